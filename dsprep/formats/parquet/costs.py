"""How much memory decoding a row group takes: from the footer, and the headers of its pages.

A page is decompressed as a whole, and a dictionary stays as long as its row group is read. How many
bytes strings have that refer to one is stated in newer files only, and nothing but the largest one
bounds it: so many rows are decoded at once as surely fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsprep.errors import FormatError
from dsprep.formats.options import OpenOptions, not_enough
from dsprep.formats.parquet.footer import Chunk, Footer, page
from dsprep.formats.parquet.types import Leaf
from dsprep.storage.base import Handle

SMALL, SMALL_SHARE = 64 << 20, 64
"""Bytes of a row group up to which all of it is decoded at once, and their share of the memory."""

STEP_NBYTES, STEP_SHARE = 8 << 20, 128
"""Bytes of a step in a larger one, and their share of the memory."""

KEPT = 4
"""Decoded row groups that are kept, and large ones that are being read forward, at most."""

SMALL_DICTIONARY = 4 << 20
"""Bytes of an encoded column up to which its dictionaries are left as they are."""

DICTIONARY_COPIES = 5
"""How many times a kept dictionary is in memory while it is made."""

PAGES = 1 << 16
"""Pages of a column whose headers are looked at."""


@dataclass(frozen=True)
class RowGroup:
    """A row group, and how it is decoded.

    Attributes
    ----------
    number
        In the file.
    rows
        How many it has.
    nbytes
        Bytes of all of it decoded, about.
    step
        Rows that are decoded at once.
    whole
        Whether all are, and kept.
    taken
        Bytes that are taken while a step is decoded, besides those of the rows before.
    """

    number: int
    rows: int
    nbytes: int
    step: int
    whole: bool
    taken: int


class Costs:
    """How each row group of a file is decoded, within the memory that may be taken.

    Parameters
    ----------
    file, footer
        The file, and what its footer states.
    leaves
        What is read of it.
    options
        What they say of the memory.
    """

    def __init__(
        self, file: Handle, footer: Footer, leaves: Sequence[Leaf], options: OpenOptions
    ) -> None:
        self._file, self._footer, self._limit = file, footer, options.limit
        self._columns: dict[str, int] = {}
        for leaf in leaves:
            width = 0 if leaf.field is None else leaf.field.dtype.itemsize
            self._columns[leaf.column] = max(width, self._columns.get(leaf.column, 0))
        self._row = sum(f.row_nbytes for f in (x.field for x in leaves) if f and not f.ragged)
        self._groups: dict[int, RowGroup] = {}
        self._kept: int | None = None
        for number in range(len(footer.rows)):
            if 2 * sum(c.encoded for c in self._chunks(number)) > self._limit:
                self.group(number)  # refused now rather than later

    def dictionaries(self) -> list[str]:
        """Return the columns of strings whose dictionaries are left as they are."""
        chunks = [c for i in range(len(self._footer.rows)) for c in self._chunks(i) if c.text]
        return sorted({c.name for c in chunks if _has_small_dictionary(c)})

    def streams(self, group: RowGroup) -> int:
        """Return how many steps of row groups like this one may be in memory at once."""
        return max(1, min(KEPT, self._limit // 2 // max(1, group.taken)))

    def kept(self) -> int:
        """Return the bytes that stay in memory while a file is read, about."""
        if self._kept is not None:
            return self._kept
        encoded = [sum(c.encoded for c in self._chunks(i)) for i in range(len(self._footer.rows))]
        if not encoded:
            return 0
        group = self.group(encoded.index(max(encoded)))
        step = group.step * group.nbytes // max(1, group.rows)
        pages = group.taken if group.taken > self._limit // 8 else 0
        self._kept = KEPT * (group.nbytes if group.whole else 2 * step) + pages
        return self._kept

    def group(self, number: int) -> RowGroup:
        """Return how a row group is decoded.

        Raises
        ------
        UsageError
            If it takes more memory than it may.
        FormatError
            If the header of a page is damaged.
        """
        known = self._groups.get(number)
        if known is None:
            known = self._groups[number] = self._planned(number)
        return known

    def much(self) -> bool:
        """Whether that is too much for each of several files."""
        return self.kept() > self._limit // 16

    def _chunks(self, number: int) -> list[Chunk]:
        return [c for c in self._footer.chunks[number] if self._column(c) is not None]

    def _column(self, chunk: Chunk) -> str | None:
        """Return which of the columns that are read a column in the file is a part of."""
        parts = chunk.name.split(".")
        names = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
        return next((name for name in names if name in self._columns), None)

    def _planned(self, number: int) -> RowGroup:
        rows, chunks = self._footer.rows[number], self._chunks(number)
        stated = largest = 0
        for c in chunks:
            stated += self._decoded(c)
            largest = max(largest, self._max_nbytes(c))
        stated = max(stated, rows * self._row)
        small = min(SMALL, self._limit // SMALL_SHARE)
        if stated <= small and largest <= self._limit // 8:
            return RowGroup(number, rows, stated, max(1, rows), True, 3 * small)
        mean = max(1, stated // max(1, rows))
        step = max(1, min(STEP_NBYTES, self._limit // STEP_SHARE) // mean)
        if largest > stated:  # the mean says little of the largest
            step = max(1, min(step, self._limit // 16 * rows // largest))
        pages = [2 * c.encoded for c in chunks]
        if sum(pages) > self._limit // 8:
            pages = [2 * self._largest_page(c) for c in chunks]
        taken = sum(pages) + 3 * step * mean
        if taken > self._limit:
            worst = chunks[pages.index(max(pages))] if chunks else None
            raise not_enough(
                "a row group cannot be decoded in the memory allowed",
                taken,
                self._limit,
                where=f"{self._file.path}, row group {number}"
                + (f", column {worst.name}" if worst else ""),
                fix="raise --memory, or leave the column out by naming others with --field",
            )
        return RowGroup(number, rows, stated, step, False, taken)

    def _decoded(self, c: Chunk) -> int:
        """Return the bytes of the values of a column, as far as they are known without reading."""
        if not c.text:
            width = c.width or self._columns[self._column(c) or ""]
            return max(c.encoded, c.values * width)
        if _has_small_dictionary(c):
            return DICTIONARY_COPIES * c.encoded + 4 * c.values
        return max(c.encoded, c.decoded or 0) + 4 * c.values

    def _max_nbytes(self, c: Chunk) -> int:
        """Return the bytes that the values of a column can have at most."""
        known = self._decoded(c)
        if not c.text or not c.dictionary or _has_small_dictionary(c):
            return known
        if c.values * c.encoded <= self._limit // 8:
            return c.values * c.encoded
        first = page(self._head(c.first), self._file.path)
        return max(known, c.values * first.nbytes if first.is_dictionary else 0)

    def _largest_page(self, c: Chunk) -> int:
        """Return the bytes of the largest page of a column."""
        at, stop, paged_nbytes, largest = c.first, c.first + c.stored, 0, 0
        for _ in range(PAGES):
            if at >= stop:
                return largest
            header = page(self._head(at), self._file.path)
            largest, paged_nbytes = max(largest, header.nbytes), paged_nbytes + header.nbytes
            at += header.stored
        return max(largest, c.encoded - paged_nbytes)

    def _head(self, at: int) -> bytes:
        data = self._file.pread(64 << 10, at)
        if at < 0 or not data:
            raise FormatError("a column begins outside of the file", where=self._file.path)
        return data


def _has_small_dictionary(c: Chunk) -> bool:
    return c.text and c.dictionary and c.encoded < SMALL_DICTIONARY + 8 * c.values
