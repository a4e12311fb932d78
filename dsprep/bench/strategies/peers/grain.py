"""Grain over ArrayRecord: a record per sample, the bytes of its fields back to back.

Uncompressed and ``group_size:1``, which ArrayRecord advises for random access
(https://github.com/google/array_record); all samples shuffled, batched before they are read so
that a batch is one decoded array, and read by ``threads`` threads
(https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html,
``ReadOptions``). Worker processes, which its guide advises for slow transformations, would pickle
every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dsprep.bench.strategies.peers import Peer, names, samples, stored
from dsprep.core.schema import Array
from dsprep.formats.base import Source


class Grain(Peer):
    """A MapDataset, shuffled and batched."""

    project: ClassVar[str] = "Grain"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the ArrayRecord file."""
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(target), "group_size:1,uncompressed")
        for sample in samples(source):
            writer.write(b"".join(array.tobytes() for array in sample.values()))
        writer.close()

    def made(self, resources: ExitStack) -> Any:
        """Open the file."""
        from grain.sources import ArrayRecordDataSource

        self._source = resources.enter_context(ArrayRecordDataSource([str(self.task.path)]))

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield batches in this epoch's order."""
        import grain

        task, threads = self.task, max(1, self.task.threads)
        seed = int(np.random.default_rng([task.seed, number]).integers(1 << 31))
        shuffled = grain.MapDataset.source(self._source).shuffle(seed=seed)
        batches = shuffled[task.rank :: task.world_size].batch(
            task.batch_size, batch_fn=self._decoded
        )
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        self.loader = batches.to_iter_dataset(options)
        return super().epoch(number)

    def close(self) -> None:
        """End what reads ahead, which would open the file again."""
        if self.batches is not None:
            self.batches.close()  # which does not wait
            for thread in threading.enumerate():
                if thread.name.startswith("grain-prefetch"):
                    thread.join()
        super().close()

    def _decoded(self, records: Sequence[bytes]) -> dict[str, Array]:
        """Return a batch of records as an array for each field."""
        rows = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
        values, at = {}, 0
        for name, field in zip(names(self.task.schema), self.task.schema, strict=True):
            dtype, shape = stored(field)
            nbytes = field.row_nbytes
            column = np.ascontiguousarray(rows[:, at : at + nbytes])
            values[name] = column.view(dtype).reshape(len(records), *shape)
            at += nbytes
        return values
