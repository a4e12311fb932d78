"""What strategies of other projects' loaders share: how fields are stored, and batches got back.

Only fields of a fixed shape are stored. What a field is stored as has at least one axis, and one
of the dtypes that all these loaders and torch have; the elements of any other dtype are their
bytes, uint8 with an axis more: as many bytes to read, and the same bits. Fields are called ``f0``,
``f1``, ... in the order of the schema, since not every loader takes every name.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dsprep.bench.strategies.base import Loader
from dsprep.bench.strategies.samples import as_field
from dsprep.core.schema import Array, Batch, DType, Field, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.base import Source

CHUNK = 64 << 20
"""Bytes of a file of a loader that stores many samples per file."""

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


def samples(source: Source) -> Iterator[dict[str, Array]]:
    """Yield each sample as it is stored; 8 MiB of them are in memory."""
    schema = source.schema
    forms = [(name, f, stored(f)) for name, f in zip(names(schema), schema, strict=True)]
    step = max(1, BLOCK // max(1, schema.fixed_nbytes))
    for start in range(0, len(source), step):
        stop = min(len(source), start + step)
        batch = source.read(start, stop)
        columns = {}
        for name, f, (dtype, shape) in forms:
            rows = np.ascontiguousarray(batch[f.name])
            columns[name] = rows.reshape(-1).view(dtype).reshape(stop - start, *shape)
        for i in range(stop - start):
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
        cls._check(source.schema)
        cls.save(source, target)

    @classmethod
    @abstractmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the dataset in the project's form."""

    @classmethod
    def _check(cls, schema: Schema) -> None:
        for f in schema:
            if f.ragged or not f.row_nbytes:
                raise UnsupportedError(
                    f"{cls.project} is measured with fields of a fixed shape only",
                    found=f"field {f.name}: {f}",
                    fix="leave the field out with --field, or the strategy",
                )

    def prepare(self, held: ExitStack) -> None:
        """Make the loader, which reads tables or an index.

        It ends with its iterator, to which there may be cycles: what is collected before `made`'s
        own cleanup.
        """
        self._check(self.task.schema)
        if self.alone and self.task.world_size > 1:
            raise UnsupportedError(
                f"{self.project} cannot share samples between {self.task.world_size} processes "
                f"here: {self.alone}",
                fix="measure it with --ranks 1",
            )
        self.loader = self.made(held)
        held.callback(gc.collect)

    @abstractmethod
    def made(self, held: ExitStack) -> Any:
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
