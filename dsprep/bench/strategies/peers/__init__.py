"""What strategies of other projects' loaders share: how fields are stored, and batches got back.

Only fields of a fixed shape are stored. What a field is stored as has at least one axis, and one
of the dtypes that all these loaders and torch have; the elements of any other dtype are their
bytes, uint8 with an axis more: as many bytes to read, and the same bits. Fields are called ``f0``,
``f1``, ... in the order of the schema, since not every loader takes every name.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dsprep.bench.strategies.base import Loader
from dsprep.bench.strategies.samples import as_field
from dsprep.core.schema import Array, Batch, DType, Field, Ints, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.base import Source

CHUNK = 64 << 20
"""Bytes of a file of a loader that stores many samples per file."""

CHUNKS = 64
"""Chunks of such a file, where it has chunks."""

BLOCK = 8 << 20
"""Bytes of samples that are read from the dataset at a time."""

PLAIN = frozenset(np.dtype(c) for c in ("i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8"))


def names(schema: Schema) -> list[str]:
    """Return what the fields are called."""
    return [f"f{i}" for i in range(len(schema))]


def stored(field: Field) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape of a sample of a field, as it is stored."""
    if field.dtype in PLAIN:
        return field.dtype, field.inner or (1,)
    return np.dtype(np.uint8), (*field.inner, field.dtype.itemsize)


def chunk(schema: Schema) -> int:
    """Return the samples of a chunk, where a loader reads those of several at once: a power of 2.

    They have 1 MiB or less; batches of so many, or of a multiple, touch no chunk twice.
    """
    return 1 << max(0, (CHUNK // CHUNKS // max(1, schema.fixed_nbytes)).bit_length() - 1)


def blocks(source: Source) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield whole chunks of samples as they are stored, with the number of the first; 8 MiB."""
    schema = source.schema
    forms = [(name, f, stored(f)) for name, f in zip(names(schema), schema, strict=True)]
    each = chunk(schema)
    step = max(1, BLOCK // max(1, each * schema.fixed_nbytes)) * each
    for start in range(0, len(source), step):
        stop = min(len(source), start + step)
        batch = source.read(start, stop)
        columns = {}
        for name, f, (dtype, shape) in forms:
            rows = np.ascontiguousarray(batch[f.name])
            columns[name] = rows.reshape(-1).view(dtype).reshape(stop - start, *shape)
        yield start, columns


def samples(source: Source) -> Iterator[dict[str, Array]]:
    """Yield each sample as it is stored."""
    for _, columns in blocks(source):
        for i in range(len(columns["f0"])):
            yield {name: column[i] for name, column in columns.items()}


class Peer(Loader):
    """A loader of another project, which has a form of the dataset of its own.

    Its items are dicts of tensors by the names of `names`, or the tensors in that order. Worker
    processes stay from epoch to epoch.
    """

    project: ClassVar[str]  # its name
    alone: ClassVar[str] = ""  # why one process only can be measured; empty: several can be

    @classmethod
    def write(cls, source: Source, target: Path) -> None:
        """Write the dataset in the project's form."""
        cls.check(source.schema)
        cls.save(source, target)

    @classmethod
    @abstractmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the dataset in the project's form."""

    @classmethod
    def check(cls, schema: Schema) -> None:
        """Raise `UnsupportedError` if not all fields have a fixed shape."""
        for f in schema:
            if f.ragged or not f.row_nbytes:
                raise UnsupportedError(
                    f"{cls.project} is measured with fields of a fixed shape only",
                    found=f"field {f.name}: {f}",
                    fix="leave the field out with --field, or the strategy",
                )

    def prepare(self, resources: ExitStack) -> None:
        """Make the loader, which reads tables or an index.

        It ends with its iterator, to which there may be cycles: what is collected before `made`'s
        own cleanup.
        """
        self.check(self.task.schema)
        if self.alone and self.task.world_size > 1:
            raise UnsupportedError(
                f"{self.project} cannot share samples between {self.task.world_size} processes "
                f"here: {self.alone}",
                fix="measure it with --ranks 1",
            )
        self.loader = self.made(resources)
        resources.callback(gc.collect)

    @abstractmethod
    def made(self, resources: ExitStack) -> Any:
        """Return the loader."""

    @property
    def workers(self) -> dict[str, Any]:
        """How a DataLoader of torch is given workers that stay."""
        return {"num_workers": self.task.threads, "persistent_workers": self.task.threads > 0}

    def size(self, item: Any) -> int:
        """Return the samples of a batch."""
        return len(item["f0"] if isinstance(item, dict) else item[0])

    def batch(self, item: Any) -> Batch:
        """Return the tensors as arrays."""
        batch: Batch = {}
        for i, f in enumerate(self.task.schema):
            array = np.ascontiguousarray(item[f"f{i}" if isinstance(item, dict) else i])
            batch[f.name] = as_field(array, f, (len(array), *f.inner))
        return batch


class Ranges(Peer):
    """A project whose library is fastest at ranges of samples: a step's are consecutive.

    Steps come in shuffled order, and samples within a step. Threads read, as many steps ahead, and
    gather the samples: a copy out of what the library returns.
    """

    @abstractmethod
    def rows(self, start: int, stop: int) -> list[Array]:
        """Return a range of samples, an array with a row per sample for each field."""

    def prepare(self, resources: ExitStack) -> None:
        """Open what is read, and start the threads."""
        super().prepare(resources)
        self._pool = ThreadPoolExecutor(max(1, self.task.threads))
        resources.callback(self._pool.shutdown, cancel_futures=True)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples."""
        task, waiting = self.task, deque[Future[dict[str, Array]]]()
        rng = np.random.default_rng([task.seed, number])
        starts = rng.permutation(np.arange(0, task.samples, task.batch_size))
        for start in starts[task.rank :: task.world_size].tolist():
            stop = min(task.samples, start + task.batch_size)
            waiting.append(self._pool.submit(self._step, start, rng.permutation(stop - start)))
            if len(waiting) > task.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _step(self, start: int, order: Ints) -> dict[str, Array]:
        columns = zip(names(self.task.schema), self.rows(start, start + len(order)), strict=True)
        return {name: np.take(column, order, axis=0) for name, column in columns}
