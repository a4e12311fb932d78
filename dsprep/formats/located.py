"""A source whose samples all have offsets: what parsing a file gives is also how it is read.

A format that only says where its samples are gives a `Parsed`, and needs nothing else to be read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Attrs, Batch, Field, Ints, Schema
from dsprep.formats import decoders
from dsprep.formats.base import Source
from dsprep.formats.fields import wanted
from dsprep.formats.options import OpenOptions
from dsprep.layout.describe import FieldStorage, of_layout
from dsprep.layout.locate import sizes
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.layout_reader import LayoutReader
from dsprep.storage.base import Handle


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a file holds, and where.

    Attributes
    ----------
    version
        The format and its version, for a person.
    fields
        What every sample has, by the names that the file and the layout give them.
    layout
        Where the samples are. All fields are located.
    attrs
        Attributes of the dataset.
    notes
        What was assumed or left out, one clause each.
    """

    version: str
    fields: Mapping[str, Field]
    layout: FileLayout
    attrs: Attrs = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Unlocated(Exception):
    """Only the format's library finds a field; the text is the reason, a clause."""


def locate_fields(
    fields: Mapping[str, Callable[[], Column]],
    count: int,
    progress: Callable[[int, int], None] | None,
) -> FileLayout:
    """Return the layout of `count` samples; see `Source.extents`.

    `fields` locate one field each, or raise `Unlocated`.
    """
    columns: dict[str, Column] = {}
    unlocated: dict[str, str] = {}
    for done, (name, locate) in enumerate(fields.items(), 1):
        try:
            columns[name] = locate()
        except Unlocated as reason:
            unlocated[name] = str(reason)
        if progress is not None:
            progress(done, len(fields))
    return FileLayout(count, None, columns, unlocated)


def total_sizes(parts: Iterable[Ints | None], count: int) -> Ints | None:
    """Return the bytes of `count` samples, from those of each field; None if one is not known."""
    total = np.zeros(count, np.int64)
    for part in parts:
        if part is None:
            return None
        total += part
    return total


class LocatedSource(Source):
    """One file, or one directory, that is read as its layout says.

    Parameters
    ----------
    path
        The file or directory.
    parsed
        What it holds.
    options
        Which of the fields are wanted, and by what names and types.
    open_file
        Opens a file by the path that the layout gives it; see `LayoutReader`.

    Raises
    ------
    SchemaError, UsageError
        If a field is wanted that is not there, or that has another type.
    """

    random_access = True

    def __init__(
        self, path: Path, parsed: Parsed, options: OpenOptions, open_file: Callable[[str], Handle]
    ) -> None:
        self.path, self.version, self.notes = path, parsed.version, parsed.notes
        chosen = wanted(options.fields, parsed.fields)
        self.names = {f.name: name for name, f in chosen}
        """What the file calls each field."""
        self.schema = Schema(tuple(f for _, f in chosen), parsed.attrs)
        self._layout = _chosen(parsed.layout, self.names)
        self._reader = LayoutReader(self._layout, self.schema, open_file, path, decoders)

    def __len__(self) -> int:
        return self._layout.count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        indices = np.arange(start, stop, dtype=np.int64)
        return self._reader.read(indices, self.schema.names, arena=arena)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        some = np.arange(start, stop, dtype=np.int64)
        parts = (sizes(self._layout, f, some) for f in self.schema if f.ragged)
        ragged = total_sizes(parts, stop - start)
        return None if ragged is None else ragged + self.schema.fixed_nbytes

    @override
    def resident_nbytes(self) -> int:
        return self._reader.resident_nbytes()

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored."""
        return of_layout(self._layout, self.schema)

    @override
    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        return self._layout

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


def _chosen(layout: FileLayout, names: Mapping[str, str]) -> FileLayout:
    """Return the layout of some fields, by new names: new name to the one in the layout."""
    records = layout.records
    if records is not None:
        parts = {new: records.parts[old] for new, old in names.items() if old in records.parts}
        records = replace(records, parts=parts) if parts else None
    columns = {new: layout.columns[old] for new, old in names.items() if old in layout.columns}
    given = {new: layout.given[old] for new, old in names.items() if old in layout.given}
    files = {new: layout.files[old] for new, old in names.items() if old in layout.files}
    return replace(layout, records=records, columns=columns, given=given, files=files)
