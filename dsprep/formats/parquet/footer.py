"""The footer of a Parquet file: what row groups and columns there are, without the library.

Some of what pyarrow tells of a footer ends the process where the footer is damaged, since the
library's exceptions are not caught there. So it is only given to pyarrow as a whole, and looked at
here.

The footer is a structure in Thrift's compact protocol, with its length and a magic string behind.

Sources: https://github.com/apache/parquet-format (parquet.thrift, `FileMetaData` and below), and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsprep.errors import FormatError, UnsupportedError
from dsprep.storage.base import Handle

MAGIC, ENCRYPTED = b"PAR1", b"PARE"

_END = 8
_DEEP = 16
_CODECS = ("none", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")
_BYTE_ARRAY, _DICTIONARIES = 6, {2, 8}
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
_DICTIONARY_PAGE = 2


@dataclass(frozen=True)
class Chunk:
    """A column of a row group.

    Attributes
    ----------
    name
        The names in its path, joined by dots.
    codec
        How its pages are compressed.
    values
        In it, those of lists and nulls included.
    encoded, stored
        Bytes of its pages, before and after they are compressed.
    nulls
        Those of lists are counted with the empty ones; None: nothing is said of them.
    text
        Whether its values are of any length.
    dictionary
        Whether some of its pages refer to a dictionary.
    width
        Bytes of a value; 0: that is not said here.
    decoded
        Bytes of all its values, if they are text and the file states it; else None.
    first
        The offset of its first page.
    """

    name: str
    codec: str
    values: int
    encoded: int
    stored: int
    nulls: int | None
    text: bool
    dictionary: bool
    width: int
    decoded: int | None
    first: int


@dataclass(frozen=True)
class Page:
    """What the header of a page states: its bytes in memory, and those from its header on."""

    nbytes: int
    stored: int
    is_dictionary: bool


@dataclass(frozen=True)
class Footer:
    """What the footer states.

    Attributes
    ----------
    version, written_by
        Of the format, and the program that wrote the file.
    rows
        Of each row group.
    chunks
        The columns of each row group.
    """

    version: int
    written_by: str
    rows: list[int]
    chunks: list[list[Chunk]]


def read(file: Handle) -> Footer:
    """Return what the footer of a file states.

    Raises
    ------
    FormatError
        If the file is truncated, or the footer damaged.
    UnsupportedError
        If the file is encrypted, or refers to others.
    """
    nbytes = file.nbytes
    end = file.pread_exact(_END, max(0, nbytes - _END)) if nbytes > _END else b""
    if end[4:] not in (MAGIC, ENCRYPTED):
        raise FormatError(
            "the footer is missing: the file is truncated or damaged",
            where=file.path,
            expected=f"{MAGIC!r} at its end",
            found=end[4:],
        )
    if end[4:] == ENCRYPTED:
        raise UnsupportedError("the footer is encrypted", where=file.path)
    size = int.from_bytes(end[:4], "little")
    if size > nbytes - _END - len(MAGIC):
        raise FormatError(
            "the footer is larger than the file",
            where=file.path,
            expected=f"<= {nbytes}",
            found=size,
        )
    data = file.pread_exact(size, nbytes - _END - size)
    try:
        top = _Compact(data).struct(0)
        footer = _footer(top, file.path)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError("the footer is damaged", where=file.path) from error
    if min(footer.rows, default=0) < 0 or sum(footer.rows) != top.get(3):
        raise FormatError(
            "row groups have not the rows that the footer gives",
            where=file.path,
            expected=top.get(3),
            found=sum(footer.rows),
        )
    return footer


def _footer(top: dict[int, Any], where: object) -> Footer:
    groups = top.get(4, [])
    if any(chunk.get(1) for group in groups for chunk in group[1]):
        raise UnsupportedError("the values are in other files", where=where, fix="name these")
    return Footer(
        version=int(top[1]),
        written_by=bytes(top.get(6, b"")).decode("utf-8", "replace")[:80],
        rows=[int(group[3]) for group in groups],
        chunks=[[_chunk(chunk[3]) for chunk in group[1]] for group in groups],
    )


def _chunk(facts: dict[int, Any]) -> Chunk:
    codec, nulls = facts[4], facts.get(12, {}).get(3)
    numbers = facts[5], facts[6], facts[7], nulls or 0
    if min(numbers) < 0:
        raise ValueError(f"{min(numbers)} is no size")
    return Chunk(
        name=b".".join(facts[3]).decode("utf-8", "surrogateescape"),
        codec=_CODECS[codec] if 0 <= codec < len(_CODECS) else f"codec {codec}",
        values=facts[5],
        encoded=facts[6],
        stored=facts[7],
        nulls=nulls,
        text=facts[1] == _BYTE_ARRAY,
        dictionary=not _DICTIONARIES.isdisjoint(facts[2]),
        width=_WIDTHS.get(facts[1], 0),
        decoded=facts.get(16, {}).get(1),
        first=min(int(facts[9]), int(facts.get(11) or facts[9])),
    )


def page(data: bytes, where: object) -> Page:
    """Return what the header of a page states, with which `data` begins; `FormatError` if none."""
    try:
        compact = _Compact(data)
        head = compact.struct(0)
        nbytes, stored = int(head[2]), int(head[3])
        if min(nbytes, stored) < 0:
            raise ValueError(f"{min(nbytes, stored)} is no size")
        return Page(nbytes, compact.at + stored, head[1] == _DICTIONARY_PAGE)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError("the header of a page is damaged", where=where) from error


class _Compact:
    """Structures of Thrift's compact protocol, as dictionaries by field number.

    Whatever is not as it should be raises `ValueError` or `IndexError`.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Return the structure that comes next."""
        if depth > _DEEP:
            raise ValueError("structures are nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while True:
            head = self._byte()
            if not head:
                return fields
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if 3 <= kind <= 6:
            return self._byte() if kind == 3 else self._zigzag()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"{kind} is not a type of a field of Parquet")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        size = head >> 4 if head >> 4 < 15 else self._varint()
        kind = head & 15
        if size > len(self._data) - self.at:
            raise ValueError("a list is longer than the footer")
        if kind in (1, 2):
            return [self._byte() == 1 for _ in range(size)]
        return [self._value(kind, depth + 1) for _ in range(size)]

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _bytes(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self._data):
            raise ValueError("a string is longer than the footer")
        return self._data[self.at - size : self.at]

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")

    def _zigzag(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)
