"""What one process of a benchmark is to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Ints, Schema


@dataclass(frozen=True, kw_only=True)
class Task:
    """One rank of one run of one strategy.

    Attributes
    ----------
    strategy
        Its name.
    path
        The dataset in the form that the strategy needs, or its sidecar.
    data
        The dataset, where `path` is a sidecar that does not lie beside it.
    schema
        Its fields, as every strategy has to deliver them.
    samples
        Of the dataset.
    batch_size
        Samples per step and rank.
    rank, world_size
        Which process this is, of how many.
    seed
        Of the order.
    epochs, warmup
        Epochs that are measured, and those before that are not.
    threads
        Threads or worker processes that read, where the strategy has some.
    buffer_nbytes
        Bytes that a group-wise strategy reads at a time; None: one group as it lies.
    transfer_size
        Bytes of one read call at most; None: all at once.
    buffers
        Groups in memory at a time, where the strategy double-buffers.
    stagger
        Readers that read at a time, where the strategy staggers.
    readers_per_node
        Processes that read for all, where the strategy has such.
    engine
        Of the `Reader` and of the limit: ``"buffered"``, ``"direct"``, ``"mapped"``.
    compute
        What a step does with its batch; see `dsprep.bench.computing`.
    cold
        Whether the data are dropped from the page cache before each epoch.
    everywhere
        Whether every rank drops them: where ranks are on several nodes; else the first one does.
    warm_server
        Whether all is read once before the first cold epoch, for the server to have it in memory.
    evict_server
        The command that drops the cache of the server before each cold epoch.
    check
        Whether all that is delivered is summed up, in one more epoch that is not measured.
    key
        What the processes of this run have in common, and no others.
    drop
        The files that a cold run drops from the page cache.
    """

    strategy: str
    path: Path
    schema: Schema
    samples: int
    batch_size: int
    data: Path | None = None
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    epochs: int = 1
    warmup: int = 0
    threads: int = 1
    buffer_nbytes: int | None = None
    transfer_size: int | None = None
    buffers: int = 2
    stagger: int = 1
    readers_per_node: int = 1
    engine: str = "buffered"
    compute: str = "none"
    cold: bool = False
    everywhere: bool = False
    warm_server: bool = False
    evict_server: str | None = None
    check: bool = True
    key: str = ""
    drop: tuple[Path, ...] = ()

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        each = -(-self.samples // self.world_size)
        return -(-each // self.batch_size)

    def share(self, epoch: int) -> Ints:
        """Return the samples of this rank in an epoch, in shuffled order."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
        return order[self.rank :: self.world_size].astype(np.int64)

    def batches(self, epoch: int) -> Iterator[Ints]:
        """Yield the samples of each step of this rank, shuffled; the last ones may be fewer."""
        share = self.share(epoch)
        for at in range(0, len(share), self.batch_size):
            yield share[at : at + self.batch_size]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        json = {f.name: getattr(self, f.name) for f in fields(self)}
        json["path"], json["schema"] = str(self.path), self.schema.to_json()
        json["data"] = None if self.data is None else str(self.data)
        json["drop"] = [str(p) for p in self.drop]
        return json

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Task:
        """Return the task that `to_json` wrote."""
        told = dict(json)
        told["path"], told["schema"] = Path(told["path"]), Schema.from_json(told["schema"])
        told["data"] = None if told["data"] is None else Path(told["data"])
        told["drop"] = tuple(map(Path, told["drop"]))
        return cls(**told)
