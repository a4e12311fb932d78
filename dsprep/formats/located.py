"""A source that is read as its layout says: what parsing a file gives is also how it is read.

A format says in a `Parsed` what a file holds, and where. Fields that take long to be located, and
those that only the format's library reads, are a `LazyField` each.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.memory import free_memory
from dsprep.core.schema import Arena, Array, Attrs, Batch, Field, Ints, Schema
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats import decoders
from dsprep.formats.base import Source
from dsprep.formats.fields import retype, wanted
from dsprep.formats.options import OpenOptions
from dsprep.layout.describe import FieldStorage, of_layout
from dsprep.layout.locate import sizes
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.layout_reader import LayoutReader
from dsprep.reading.records import Verify
from dsprep.reading.single import Single
from dsprep.storage.base import Handle

LARGE = 256 << 20
"""Bytes of samples above which a read first looks whether they fit into memory."""


class Unlocated(Exception):
    """Only the format's library finds a field; the text is the reason, a clause."""


class LazyField(ABC):
    """A field that is looked for when samples are first read; safe to use from several threads."""

    @abstractmethod
    def locate(self) -> Column:
        """Return the layout of all samples.

        Raises
        ------
        Unlocated
            If only the format's library reads them.
        FormatError
            If the file is damaged.
        """

    @abstractmethod
    def storage(self) -> FieldStorage:
        """Return the storage of the field, as far as it is known without locating it."""

    def read(self, start: int, stop: int) -> Values:
        """Return samples ``start <= i < stop`` by the library; only called if it is `Unlocated`."""
        raise NotImplementedError

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of these samples, None where that takes reading them; see `read`."""
        return None

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for; see `read`."""
        return 0


class RowsField(LazyField):
    """An array whose rows are samples, or belong to ragged samples; see `ragged.RaggedField`.

    Attributes
    ----------
    field
        What a row is.
    count
        The number of rows.
    """

    field: Field
    count: int

    @abstractmethod
    def rows(self, ranges: Iterable[tuple[int, int]]) -> Array:
        """Return ranges of rows by the library, back to back."""

    @abstractmethod
    def storage_of(self, count: int, nbytes: float, tables: Sequence[str] = ()) -> FieldStorage:
        """Return the storage of `count` samples of so many bytes each, whose rows `tables` give."""

    @override
    def read(self, start: int, stop: int) -> Any:
        return self.rows([(start, stop)])

    @override
    def storage(self) -> FieldStorage:
        return self.storage_of(self.count, self.field.row_nbytes)


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The contents of a file, and their places.

    Attributes
    ----------
    version
        The format and its version, for a person.
    fields
        What every sample has, by the names that the file and the layout give them.
    layout
        How many samples there are, and where they are as far as it is known at once.
    lazy
        The fields that the layout does not have: each is located when samples are first read.
    attrs
        Attributes of the dataset.
    notes
        What was assumed or left out, one clause each.
    others
        The arrays that belong to all samples.
    label
        Gives the name of a sample in records, for messages; None: the file and the number.
    verify
        How records are compared with what frames them when they are read.
    examine
        Looks through the file, if need be, for all that shows of the layout, and raises
        `DsprepError` if samples are not as `fields` say; None: that is `layout`.
    packed
        What the file is compressed with as a whole, and its bytes then: it was unpacked when it was
        opened, and samples have no offsets in it. None: it is not.
    prove
        Compares what samples ``start <= i < stop`` need with checksums that the file has, unless
        it has done so already; None: there are none.
    """

    version: str
    fields: Mapping[str, Field]
    layout: FileLayout
    lazy: Mapping[str, LazyField] = field(default_factory=dict)
    attrs: Attrs = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    label: Callable[[int], str] | None = None
    verify: Verify = None
    examine: Callable[[], FileLayout] | None = None
    packed: tuple[str, int] | None = None
    prove: Callable[[int, int], None] | None = None


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
    close
        Closes the files.

    Raises
    ------
    SchemaError, UsageError
        If a field is wanted that is not there, or that has another type.
    """

    random_access = True

    def __init__(
        self,
        path: Path,
        parsed: Parsed,
        options: OpenOptions,
        open_file: Callable[[str], Handle],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.version, self.notes = path, parsed.version, parsed.notes
        self.others, self._open_file, self._close = parsed.others, open_file, close
        self._parsed, self._lock = parsed, threading.Lock()
        chosen = wanted(options.fields, parsed.fields)
        self.names = {f.name: name for name, f in chosen}
        """The name of each field in the file."""
        self.schema = Schema(tuple(f for _, f in chosen), parsed.attrs)
        self._lazy = {f.name: parsed.lazy[name] for name, f in chosen if name in parsed.lazy}
        stored = (
            replace(parsed.fields[name], name=f.name) if f.name in self._lazy else f
            for name, f in chosen
        )
        self._stored = Schema(tuple(stored))
        """The fields as they are stored: those that are lazy get the type asked for when read."""
        self._retyped = {
            f.name
            for f, g in zip(self.schema, self._stored, strict=True)
            if (f.dtype, f.shape, f.kind) != (g.dtype, g.shape, g.kind)
        }
        self._layout = _chosen(parsed.layout, self.names)
        self._reader: LayoutReader | None = None
        self._single: Single | None = None
        if not self._lazy:
            self._located()

    def _located(self, progress: Callable[[int, int], None] | None = None) -> LayoutReader:
        """Return what reads the fields that have a place, which are looked for the first time."""
        with self._lock:
            if self._reader is None:
                columns, unlocated = dict(self._layout.columns), dict(self._layout.unlocated)
                for done, (name, lazy) in enumerate(self._lazy.items(), 1):
                    try:
                        columns[name] = self._fitting(lazy.locate(), self._stored[name])
                    except Unlocated as reason:
                        unlocated[name] = str(reason)
                    if progress is not None:
                        progress(done, len(self._lazy))
                self._layout = replace(self._layout, columns=columns, unlocated=unlocated)
                grids = (c.grid for c in columns.values() if c.first is not None)
                self._large = any(g and g.shape[0] * g.row_nbytes > LARGE for g in grids)
                self._reader = LayoutReader(
                    self._layout,
                    self._stored,
                    self._open_file,
                    self.path,
                    decoders,
                    self._parsed.label,
                )
                checked = self._parsed.prove or self._parsed.verify
                text = any(f.dtype.kind == "U" for f in self.schema)
                if len(self) > 1 and not (checked or text or self._retyped or unlocated):
                    self._single = self._reader.single(self.schema.names)
            return self._reader

    def _fitting(self, column: Column, stored: Field) -> Column:
        """Return the column if its rows are samples of the field, as stored."""
        grid = column.grid
        if grid is not None:
            per = grid.row_nbytes * (1 if stored.ragged else column.lines)
            fixed = column.first is None
            if per != stored.row_nbytes or (fixed and grid.shape[0] != len(self) * column.lines):
                raise Unlocated("its rows are stored with another size than its samples have")
        return column

    def __len__(self) -> int:
        return self._layout.count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        count = stop - start
        fits = count == 1 or 0 < count * self.schema.fixed_nbytes <= LARGE
        if self._single is not None and fits:
            known = self._single.read(start, count, arena)
            if known is not None:
                return known
        return self._read(self.schema, start, stop, arena)

    @override
    def read_field(self, name: str) -> Values:
        return self._read(Schema((self.schema[name],)), 0, len(self), None)[name]

    def _read(self, schema: Schema, start: int, stop: int, arena: Arena | None) -> Batch:
        reader, unlocated = self._located(), self._layout.unlocated
        if self._parsed.prove is not None and stop > start:
            self._parsed.prove(start, stop)
        where = f"{self.path}, samples {start} to {stop}"
        try:
            self._check_memory(schema, start, stop, where)
            indices = np.arange(start, stop, dtype=np.int64)
            known = [name for name in schema.names if name not in unlocated]
            verify = self._parsed.verify
            batch = reader.read(indices, known, verify, arena) if known else {}
            for name in schema.names:
                if name in unlocated:
                    batch[name] = self._lazy[name].read(start, stop)
        except MemoryError as error:
            raise FormatError("the samples do not fit into memory", where=where) from error
        return {f.name: retype(batch[f.name], f, self.path, start) for f in schema}

    def _check_memory(self, schema: Schema, start: int, stop: int, where: str) -> None:
        """Raise `FormatError` if what the metadata say of samples is more than the memory has."""
        nbytes = (stop - start) * schema.fixed_nbytes
        known = self.sizes(start, stop) if self._large and schema is self.schema else None
        nbytes = nbytes if known is None else int(known.sum())
        if nbytes > LARGE and nbytes > free_memory():
            raise FormatError(
                "the samples do not fit into memory",
                where=where,
                found=f"{nbytes} bytes",
                fix="the metadata are damaged, or read fewer samples at a time",
            )

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        some = np.arange(start, stop, dtype=np.int64)
        total = np.full(stop - start, self.schema.fixed_nbytes, np.int64)
        if self.schema.ragged:
            self._located()
        records = self._layout.records
        parts = {} if records is None else records.parts
        hidden = [f.name for f in self.schema if f.ragged and f.name in parts]
        hidden = [name for name in hidden if parts[name].at is None]
        if records is not None and hidden:  # all of the record is about what is in it
            total = records.blocks.lengths.at(records.numbers(some, self.path))
        for f in (f for f in self.schema if f.ragged and f.name not in hidden):
            unlocated = f.name in self._layout.unlocated
            part = (
                self._lazy[f.name].sizes(start, stop)
                if unlocated
                else sizes(self._layout, self._stored[f.name], some)
            )
            if part is None:
                return None
            total += part
        return total

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        self._located()
        if name not in self._layout.columns:  # of strings in a heap a library may drop some bytes
            return None
        stored, some = self._stored[name], np.arange(start, stop, dtype=np.int64)
        nbytes = sizes(self._layout, stored, some) if stored.row_nbytes else None
        return None if nbytes is None else nbytes // stored.row_nbytes

    @override
    def resident_nbytes(self) -> int:
        if len(self) <= 1 and self._lazy:  # it is read whole, and nothing is kept
            return 0
        reader, unlocated = self._located(), self._layout.unlocated
        by_library = (lazy for name, lazy in self._lazy.items() if name in unlocated)
        return reader.resident_nbytes() + sum(lazy.resident_nbytes() for lazy in by_library)

    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of each field."""
        known = Schema(tuple(f for f in self.schema if f.name not in self._lazy))
        described = of_layout(self._layout, known)
        if self._parsed.packed is not None:
            codec, nbytes = self._parsed.packed
            how = f"slow: {codec} runs over the whole file, which is unpacked for its first sample"
            alone = nbytes if len(known) == 1 else None
            for name, each in described.items():
                packed = FieldStorage(storage=each.storage, codecs=(codec,), access=how)
                described[name] = replace(packed, stored_nbytes=alone)
        described |= {name: lazy.storage() for name, lazy in self._lazy.items()}
        return {name: described[name] for name in self.schema.names}

    @override
    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        if self._parsed.packed is not None:
            raise UnsupportedError(
                f"samples have no offsets inside a {self._parsed.packed[0]} stream",
                where=self.path,
                fix="dsprep convert DATA DST writes the whole dataset without compression",
            )
        self._located(progress)
        layout, unlocated = self._layout, dict(self._layout.unlocated)
        if layout.records is not None:
            self._open_file(layout.records.blocks.path).check_same()
        if self._parsed.examine is not None:
            closer = _chosen(self._parsed.examine(), self.names)
            layout = replace(closer, columns=layout.columns)
        given = "it was given a type here; dsprep convert gives it one"
        unlocated |= dict.fromkeys(self._retyped, given)
        columns = {name: c for name, c in layout.columns.items() if name not in unlocated}
        return replace(layout, columns=columns, unlocated=unlocated)

    @override
    def check_types(self) -> None:
        if self._parsed.examine is not None:
            self._parsed.examine()

    def close(self) -> None:
        """Close the files."""
        self._close()


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
