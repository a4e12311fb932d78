"""FFCV: one ``.beton`` file, mapped, samples copied out by compiled threads.

``OrderOption.RANDOM``, ``drop_last=False``, and ``os_cache=True``: what FFCV's guide advises where
the dataset fits into memory; where it does not, or in cold runs, it reads by page faults, sample
by sample, and that is what is measured. Its code is compiled when the strategy is opened for the
first time, on zeros, and kept; training takes some seconds more than is shown here. Each rank
gets every ``world_size``-th sample, always the same ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar

import numpy as np

from dsprep.bench.strategies.peers import Peer, names, samples, stored
from dsprep.errors import UnsupportedError
from dsprep.formats.base import Source

PAGE = 8 << 20
"""Bytes of a page, FFCV's own default; a sample is on one page."""

LARGEST = 1 << 31
"""Bytes of the largest page that FFCV can write."""


class Ffcv(Peer):
    """A Loader with ``threads`` threads."""

    project: ClassVar[str] = "FFCV"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the ``.beton`` file, as FFCV's writer does with one worker, in this process."""
        schema = source.schema
        page = max(PAGE, 1 << (schema.fixed_nbytes - 1).bit_length())
        if page > LARGEST:
            raise UnsupportedError(
                "the samples are too large for FFCV",
                expected=f"at most {LARGEST} bytes",
                found=schema.fixed_nbytes,
            )
        from ffcv.fields import NDArrayField
        from ffcv.memory_allocator import MemoryAllocator
        from ffcv.writer import DatasetWriter, handle_sample

        fields = {n: NDArrayField(*stored(f)) for n, f in zip(names(schema), schema, strict=True)}
        writer = DatasetWriter(str(target), fields, page, num_workers=1)
        writer.num_samples = len(source)
        writer.prepare()
        try:
            allocator = MemoryAllocator(str(target), writer.data_region_start, page)
            table = [np.frombuffer(writer.metadata_sm.buf, writer.metadata_type, len(source))]
            try:
                with allocator:
                    for i, sample in enumerate(samples(source)):
                        values = tuple(sample.values())
                        handle_sample(values, i, list(fields), table[0], allocator, fields)
            finally:
                table.clear()  # else the memory cannot be closed
            writer.finalize([allocator.allocations])
        finally:
            writer.metadata_sm.close()
            writer.metadata_sm.unlink()

    def open(self) -> None:
        """Read the tables, and compile; once, since `close` keeps both."""
        if self.loader is None:
            super().open()
            self._compile()

    def made(self, resources: ExitStack) -> Any:
        """Read the tables."""
        from ffcv.fields.decoders import NDArrayDecoder
        from ffcv.loader import Loader, OrderOption

        task = self.task
        return Loader(
            str(task.path),
            batch_size=task.batch_size,
            num_workers=max(1, task.threads),
            os_cache=True,
            order=OrderOption.RANDOM,
            seed=task.seed,
            indices=np.arange(task.rank, task.samples, task.world_size, dtype=np.uint64),
            pipelines={name: [NDArrayDecoder()] for name in names(task.schema)},
            drop_last=False,
        )

    def _compile(self) -> None:
        """Take an epoch of one batch of zeros, which stand where the file would be mapped."""
        context = self.loader.memory_manager.context
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # read-only: it takes no memory
        zeros = mmap.mmap(-1, self.task.path.stat().st_size, flags, mmap.PROT_READ)
        context.mmap = np.frombuffer(zeros, np.uint8)
        for _ in self.epoch(0):
            break
        self.close()

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the Loader's own batches: each is overwritten some steps later."""
        self.loader.next_epoch = number
        return super().epoch(number)

    def close(self) -> None:
        """End the thread that reads ahead, and unmap the file; the compiled code is kept."""
        batches, self.batches = self.batches, None
        if batches is not None:
            batches.close()
            while batches.is_alive():  # its last word waits for room in the queue
                with suppress(Empty):
                    batches.output_queue.get(timeout=0.01)
        if self.loader is not None:
            self.loader.memory_manager.context.mmap = None
