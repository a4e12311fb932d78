"""The data classes of a layout.

A **block** is a byte range of a file that is stored as a whole: a record, an LMDB value, a chunk,
or all rows of a contiguous array (which is one chunk). The blocks of a kind are numbered from 0,
and two laws give their offsets and lengths. Samples are found in them in one of two ways:

- `Records`: a block holds one sample, all of its fields back to back. A field whose offset
  in the record is always the same is a `Part`; the others take a recipe that looks into the
  record.
- `Column`: a field is an array of its own, cut into chunks (`Grid`). A sample is a row of it, or
  several.

A sample may also have a file of its own for a field, which is then all of it: `OwnFiles`. Other
fields are `Given` by the layout: they follow from the names of files, say, and take no read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Field, Ints, Ragged
from dsprep.errors import layout_mismatch
from dsprep.layout.laws import Law
from dsprep.layout.words import Words


@dataclass(frozen=True)
class Blocks:
    """Byte ranges, numbered from 0.

    Attributes
    ----------
    offsets, lengths
        Of equal count. An offset of -1 (of a chunk) means that it is not stored. A chunk of
        length 0 counts as not stored too.
    path
        The file that holds them, relative to the dataset's file entry: ``""`` is that file
        itself, ``data.mdb`` a file in that directory. In a `Grid` it may name several: ``{0}``,
        ``{1}`` stand for the number of the file along an axis.
    """

    offsets: Law
    lengths: Law
    path: str = ""

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self.offsets.count


@dataclass(frozen=True)
class Part:
    """The range of a field in every record.

    Attributes
    ----------
    at
        Bytes from the record's beginning; None where only the recipe finds it.
    nbytes
        Its bytes; None: up to the end of the record.
    """

    at: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class Records:
    """Blocks of one sample each.

    Attributes
    ----------
    blocks
        As many as there are samples, or more when `order` leaves some out.
    parts
        By field name, for every field that is in the records.
    order
        The block of each sample; None: sample i is block i.
    recipe
        What takes a record apart where a part has no place: ``{"name": ...}`` and its parameters,
        see ``dsprep.records``; None if all parts have one.
    frame
        What surrounds each block and can prove it: ``{"name": ...}`` and its parameters, see
        ``dsprep.records``; None: nothing.
    """

    blocks: Blocks
    parts: Mapping[str, Part]
    order: Law | None = None
    recipe: Mapping[str, Any] | None = None
    frame: Mapping[str, Any] | None = None

    def numbers(self, indices: Ints, where: object) -> Ints:
        """Return the blocks of samples; `FormatError` if one does not exist."""
        if self.order is None or not len(indices):
            return indices
        numbers, count = self.order.at(indices), self.blocks.count
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= count:
            wrong = high if high >= count else low
            raise layout_mismatch(
                "gives a sample a record that does not exist", where, f"< {count}", wrong
            )
        return numbers

    def extents(self, indices: Ints, where: object) -> tuple[Ints, Ints]:
        """Return offsets and lengths of the blocks of samples; see `numbers`."""
        numbers = self.numbers(indices, where)
        return self.blocks.offsets.at(numbers), self.blocks.lengths.at(numbers)


@dataclass(frozen=True)
class OwnFiles:
    """A field of which every sample has a file of its own: its value is the content of the file.

    Attributes
    ----------
    names
        The file of each sample, relative to the dataset's file entry.
    lengths
        The bytes of each.
    """

    names: Words
    lengths: Law


@dataclass(frozen=True)
class Grid:
    """An array in chunks. Every chunk is stored in full, in C order, also at the edges.

    The blocks are numbered file by file in C order of the files, and in C order of the chunks
    within a file. A contiguous array is one chunk of all rows.

    Attributes
    ----------
    blocks
        The chunks.
    shape
        Of the array: ``(rows, *inner)``; at least one axis, none of them 0.
    itemsize
        Bytes of an element.
    chunk
        Shape of a chunk.
    files
        Chunks per file along each axis, where `Blocks.path` names several; None: one file.
    filters
        What was done to a chunk when it was written, in that order: ``{"id": ...}`` and
        parameters, see ``dsprep.core.filters``.
    masks
        For each chunk a bit for each filter that was left out; None: none was.
    fill
        One element: the content of chunks that are not stored. None: every chunk has to be there.
    file_numbers
        For each chunk the number that ``{0}`` in `Blocks.path` stands for, where chunks are in
        several files in no regular way; without `files`. None: one file, or `files`.
    """

    blocks: Blocks
    shape: tuple[int, ...]
    itemsize: int
    chunk: tuple[int, ...]
    files: tuple[int, ...] | None = None
    filters: tuple[Mapping[str, Any], ...] = ()
    masks: Law | None = None
    fill: bytes | None = None
    file_numbers: Law | None = None

    @property
    def several(self) -> bool:
        """True if the chunks are in several files."""
        return self.files is not None or self.file_numbers is not None

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one row, decoded."""
        return math.prod(self.shape[1:]) * self.itemsize

    @cached_property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, decoded."""
        return math.prod(self.chunk) * self.itemsize

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def plain(self) -> bool:
        """True if rows are stored unencoded: no filters, and only the first axis is cut."""
        return not self.filters and self.chunk[1:] == self.shape[1:]

    def numbers(self, coordinates: Ints) -> tuple[Ints, Ints | None]:
        """Return ``(blocks, files)`` of chunks.

        Parameters
        ----------
        coordinates
            int64, shape ``(axes, n)``: the positions of the chunks in the grid.

        Returns
        -------
        The number of each block, int64 of shape ``(n,)``; and, where there are several files,
        their positions in the grid of files, int64 of shape ``(axes, n)``.
        """
        grid = self.chunks
        if self.files is None:
            number = np.ravel_multi_index(tuple(coordinates), grid).astype(np.int64)
            return number, None if self.file_numbers is None else self.file_numbers.at(number)[None]
        per = np.array(self.files, np.int64)[:, None]
        file_index = coordinates // per
        along = tuple(-(-n // p) for n, p in zip(grid, self.files, strict=True))
        file = np.ravel_multi_index(tuple(file_index), along)
        inside = np.ravel_multi_index(tuple(coordinates - file_index * per), self.files)
        return file * math.prod(self.files) + inside, file_index

    @cached_property
    def block_count(self) -> int:
        """The size of the numbering of blocks; with files at the edges, more than chunks."""
        if self.files is None:
            return math.prod(self.chunks)
        along = (-(-n // p) for n, p in zip(self.chunks, self.files, strict=True))
        return math.prod(along) * math.prod(self.files)


@dataclass(frozen=True)
class Column:
    """A field that is an array.

    Attributes
    ----------
    grid
        The array. None if the field has no bytes at all.
    lines
        Rows of the array per sample; those of sample i are ``i * lines .. (i + 1) * lines``.
        Not used for ragged fields.
    first, count
        Ragged fields, and others whose samples are at any row: the first row of each sample, and
        how many it has; else None. Several rows of the array may make a row of the field.
    """

    grid: Grid | None
    lines: int = 1
    first: Law | None = None
    count: Law | None = None


@dataclass(frozen=True)
class Given:
    """A field whose values are in the layout itself.

    Attributes
    ----------
    value_numbers
        For each sample the number of its value; of int64 without `values`, the value.
    values
        Values, numbered from 0: `Words` of a `bytes` or `str` field, else an array of the field's
        dtype and inner shape; None: the numbers are the values.
    """

    value_numbers: Law
    values: Words | Array | None = None

    def at(self, indices: Ints, field: Field) -> Array | Ragged:
        """Return the field of some samples; `FormatError` if one has no value."""
        numbers = self.numbers(indices, field.name)
        if self.values is None:
            return numbers
        if isinstance(self.values, Words):
            return Ragged(*self.values.take(numbers), field.kind)
        return self.values[numbers]

    def one(self, index: int, field: Field) -> Array | Ragged:
        """Return the field of one sample, as an array of one or a `Ragged` of one; see `at`."""
        if not isinstance(self.values, Words):
            return self.at(np.array([index], np.int64), field)
        number = self.value_numbers.one(index)
        if not 0 <= number < len(self.values):
            raise layout_mismatch(
                "gives a sample a value that does not exist", f"field {field.name}"
            )
        word = np.frombuffer(self.values[number], np.uint8)
        return Ragged(word, np.array([0, len(word)]), field.kind)

    def numbers(self, indices: Ints, name: str) -> Ints:
        """Return the numbers of the values of samples; see `at`."""
        numbers = self.value_numbers.at(indices)
        if self.values is None or not len(numbers):
            return numbers
        if not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self.values):
            raise layout_mismatch("gives a sample a value that does not exist", f"field {name}")
        return numbers


@dataclass(frozen=True)
class Rest:
    """Fields of groups of which some bytes are outside the range of their group.

    Attributes
    ----------
    fields
        Their names.
    crc32c
        Of each group: of the stored ranges of these fields, field by field, those of a field in
        the order of files and offsets, each once.
    """

    fields: tuple[str, ...]
    crc32c: Law


@dataclass(frozen=True)
class Groups:
    """Runs of consecutive samples, each in one byte range of the file.

    Attributes
    ----------
    samples
        Samples per group; the last may have fewer. Of the largest group, if they differ.
    blocks
        The byte ranges.
    crc32c
        Of each range; None if there are none.
    first
        The first sample of each group, where groups differ in their number of samples.
    files
        Groups per file, where there are several: ``{0}`` in the path of the blocks stands for
        the number of the file. None: one file.
    rest
        What has checksums besides the ranges; None: nothing.
    """

    samples: int
    blocks: Blocks
    crc32c: Law | None = None
    first: Law | None = None
    files: int | None = None
    rest: Rest | None = None

    def edges(self, count: int) -> Ints:
        """Return the first sample of each group, and `count`, that of all samples."""
        edges = np.full(self.blocks.count + 1, count, np.int64)
        if self.first is None:
            edges[:-1] = np.arange(self.blocks.count) * self.samples
        else:
            edges[:-1] = self.first.span(0, self.first.count)
        return edges

    def path(self, group: int) -> str:
        """Return the file that holds a group, as in `Blocks.path`."""
        if not self.files:
            return self.blocks.path
        return self.blocks.path.replace("{0}", str(group // self.files))


@dataclass(frozen=True)
class FileLayout:
    """The layout of the samples of one file (or store).

    Attributes
    ----------
    count
        Samples in the file.
    records
        Layout of the records, with the fields in them.
    columns
        Layout of fields that are arrays, by field name.
    files
        Fields of which every sample has a file, by field name.
    given
        Fields whose values are here, by field name.
    unlocated
        Fields that only the format's library can find: name to the reason, a clause.
    groups
        Groups of the samples, if there are any.
    facts
        How the file was made, as far as it shows: for a person.
    candidates
        Laws of the records' offsets that the format thinks may hold, the smallest first; never
        in a sidecar.
    """

    count: int
    records: Records | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    unlocated: Mapping[str, str] = field(default_factory=dict)
    groups: Groups | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    candidates: tuple[Law, ...] = field(default=(), compare=False)
    given: Mapping[str, Given] = field(default_factory=dict)
    files: Mapping[str, OwnFiles] = field(default_factory=dict)

    def find_field(self, name: str) -> Records | Column | OwnFiles | Given | str:
        """Return the storage of a field; or the reason, a clause, why nothing locates it."""
        if self.records is not None and name in self.records.parts:
            return self.records
        for holders in (self.columns, self.files, self.given):
            if name in holders:
                return holders[name]
        return self.unlocated.get(name, "no such field")
