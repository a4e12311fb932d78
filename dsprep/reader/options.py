"""The options of a `Reader`, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Batch
from dsprep.errors import UsageError
from dsprep.reader.engines import NAMES
from dsprep.reader.memory import Allocate
from dsprep.reader.order import SHUFFLES, Remainder, Shuffle


@dataclass(frozen=True)
class ReaderOptions:
    """What a `Reader` is made with; its parameters, which are described there.

    Raises
    ------
    UsageError
        If one of them is impossible, or two contradict each other.
    """

    path: str | Path
    batch_size: int
    buffer_size: int | str | None
    seed: int
    rank: int | None
    world_size: int | None
    epochs: int | None
    shuffle: Shuffle
    drop_last: bool
    pad: bool
    fields: Sequence[str]
    buffers: int
    buffers_mixed: int | None
    io_threads: int | None
    transfer_size: int | None
    engine: str
    verify: bool
    transform: Callable[[Batch], Any] | None
    transform_threads: int
    readers_per_node: int | None
    stagger: int | None
    comm: Any
    node_key: str | None
    data: str | Path | None
    check_order: bool
    follow_external: bool
    allocate: Allocate

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)):
            raise UsageError(f"path is {self.path!r}", expected="one dataset, or its sidecar")
        if isinstance(self.fields, str):
            raise UsageError(f"fields is {self.fields!r}", expected="a sequence of names")
        if self.transform is not None and not callable(self.transform):
            raise UsageError(f"transform is {self.transform!r}", expected="a function of a batch")
        if self.drop_last and self.pad:
            raise UsageError("drop_last and pad exclude each other", fix="give one of them")
        for name in ("batch_size", "buffers", "transform_threads"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        optional = ("epochs", "io_threads", "transfer_size", "readers_per_node", "stagger")
        for name in (*optional, "buffers_mixed"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for name, known in (("shuffle", SHUFFLES), ("engine", NAMES)):
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name} is {value!r}", expected="one of " + ", ".join(known))

    @property
    def remainder(self) -> Remainder:
        """What happens to samples that do not fill a batch on every rank."""
        return "drop" if self.drop_last else "pad" if self.pad else "ragged"


def at_least(name: str, value: Any, least: int) -> None:
    """Raise `UsageError` unless an option is a whole number of at least `least`."""
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not number or value < least:
        raise UsageError(f"{name} is {value!r}", expected=f"a whole number, at least {least}")
