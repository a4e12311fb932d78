"""The number of the file that each sample is from, as a field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Field, Ints, Schema
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.layout.describe import FieldStorage
from dsprep.layout.laws import Affine
from dsprep.layout.model import FileLayout, Given


class NumberedSource(Source):
    """One file of a dataset whose samples have the number of the file as a field, which is last.

    Parameters
    ----------
    base
        The file, which is closed with this source.
    name, number
        The field and its value.

    Raises
    ------
    UsageError
        If the file has a field of this name.
    """

    def __init__(self, base: Source, name: str, number: int) -> None:
        if name in base.schema.names:
            base.close()
            raise UsageError(
                f"--file-field {name}: there is a field of this name",
                where=base.path,
                fix="give it another name",
            )
        self.base, self.name, self.number = base, name, number
        self.path, self.version, self.notes = base.path, base.version, base.notes
        self.random_access, self.dropped = base.random_access, base.dropped
        self.others = base.others
        self.schema = base.schema.replace(*base.schema, Field(name, np.dtype("<i8")))

    def __len__(self) -> int:
        return len(self.base)

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        numbers: Array = np.full(stop - start, self.number, np.int64)
        return {**self.base.read(start, stop, arena), self.name: numbers}

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        sizes = self.base.sizes(start, stop)
        return None if sizes is None else sizes + self.schema[self.name].row_nbytes

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        return self.base.rows(name, start, stop)

    @override
    def resident_nbytes(self) -> int:
        return self.base.resident_nbytes()

    @override
    def confirm(self) -> None:
        self.base.confirm()

    def files(self) -> list[Path]:
        """Return the files that are read."""
        return self.base.files()

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored."""
        number = FieldStorage(
            storage="in no file: the number of the file",
            stored_nbytes=0,
            access="no read",
            reads=0,
            read_nbytes=0,
        )
        return {**self.base.storage(), self.name: number}

    @override
    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        layout = self.base.extents(progress)
        number = Given(Affine(len(self), self.number))
        return replace(layout, given={**layout.given, self.name: number})

    def close(self) -> None:
        """Close the file."""
        self.base.close()


def without(schema: Schema, name: str | None) -> Schema:
    """Return a schema without the field that has the numbers of files."""
    if name is None:
        return schema
    return schema.replace(*(f for f in schema if f.name != name))
