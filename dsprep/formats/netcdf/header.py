"""The header of a classic netCDF file: dimensions, attributes, and where each variable lies.

What it says of sizes is not trusted: they are computed from types and dimensions, as the field
for them is too small in large files, and compared with the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsprep.core.schema import DType
from dsprep.errors import FormatError
from dsprep.storage.base import Handle

MAX_HEADER_NBYTES = 64 << 20
"""No header is larger: that of 100,000 variables with ten attributes each fits."""

MAX_AXES = 32
"""Axes of an array; numpy has up to 64."""

CHAR = 2
TYPES: Mapping[int, DType] = {
    code: np.dtype(text)
    for code, text in enumerate(
        ("i1", "S1", ">i2", ">i4", ">f4", ">f8", "u1", ">u2", ">u4", ">i8", ">u8"), 1
    )
}
"""The types by their code; those after 6 exist in CDF-5 alone."""

_DIMENSION, _VARIABLE, _ATTRIBUTE = 10, 11, 12
_WORDS = {_DIMENSION: "dimensions", _VARIABLE: "variables", _ATTRIBUTE: "attributes"}
_FIRST_READ = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An array of the file.

    Attributes
    ----------
    name
        Unique in the file.
    dtype
        Of an element as it is stored, big-endian; ``S1`` for characters.
    dimensions
        The number of the dimension of each axis.
    shape
        Without the axis of records.
    record
        Whether its first axis is that of the records.
    begin
        Offset of its first element.
    attrs
        Its attributes.
    """

    name: str
    dtype: DType
    dimensions: tuple[int, ...]
    shape: tuple[int, ...]
    record: bool
    begin: int
    attrs: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array; of a variable with records, of one record."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts that a file states about itself.

    Attributes
    ----------
    version
        1, 2 or 5.
    records
        How many records there are.
    stride
        Bytes from one record to the next.
    dimensions
        The name of each.
    variables
        In the file's order.
    attrs
        Attributes of the file.
    """

    version: int
    records: int
    stride: int
    dimensions: tuple[str, ...]
    variables: tuple[Variable, ...]
    attrs: Mapping[str, Any]

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Return the shape of a variable, with the axis of records."""
        return ((self.records,) if variable.record else ()) + variable.shape


def read_header(file: Handle) -> Header:
    """Return the header of a file, after comparing it with the file's size.

    Raises
    ------
    FormatError
        If the file is damaged or truncated.
    """
    cursor = _Cursor(file)
    magic = cursor.take(4, "the magic number")
    version = magic[3]
    if version not in (1, 2, 5):
        raise FormatError(
            "this is netCDF of an unknown version",
            where=file.path,
            expected="CDF-1, CDF-2 or CDF-5",
            found=f"CDF-{version}",
        )
    cursor.wide, cursor.far = version == 5, version != 1
    records = cursor.count()
    if records == (1 << (64 if cursor.wide else 32)) - 1:
        raise FormatError(
            "the header leaves the number of records open", where=file.path, fix="nccopy IN OUT"
        )
    dimensions = [(cursor.name()[0], cursor.count()) for _ in cursor.items(_DIMENSION)]
    if sum(not n for _, n in dimensions) > 1:
        raise cursor.wrong("two dimensions have no length", "one, that of the records")
    attrs = cursor.attributes()
    variables = tuple(cursor.variable(dimensions) for _ in cursor.items(_VARIABLE))
    names = {v.name for v in variables}
    if len(names) < len(variables):
        raise FormatError("two variables have the same name", where=file.path)
    inside = [v for v in variables if v.record]
    stride = sum(_padded(v.nbytes) for v in inside)
    if len(inside) == 1:
        stride = inside[0].nbytes  # the only one is not padded
    header = Header(
        version=version,
        records=records,
        stride=stride,
        dimensions=tuple(name for name, _ in dimensions),
        variables=variables,
        attrs=attrs,
    )
    _check_extents(header, cursor.at, file)
    return header


def _check_extents(header: Header, end: int, file: Handle) -> None:
    """Raise unless all variables lie behind the header and within the file."""
    for v in header.variables:
        last = v.begin + v.nbytes + (max(0, header.records - 1) * header.stride if v.record else 0)
        where = f"{file.path}, {v.name} at offset {v.begin}"
        if v.begin < end:
            raise FormatError("the header overlaps a variable", where=where)
        if last > file.nbytes and (header.records or not v.record):
            raise FormatError(
                "the file is truncated",
                where=where,
                expected=f"{last:,} bytes",
                found=f"{file.nbytes:,} bytes",
                fix="copy it again, or write it to its end",
            )


def _padded(nbytes: int) -> int:
    """Return the bytes up to the next multiple of 4, to which values are padded."""
    return -(-nbytes // 4) * 4


@dataclass
class _Cursor:
    """Reads a header from its beginning, never beyond the file's end.

    Attributes
    ----------
    at
        The offset of what comes next.
    wide, far
        Whether counts, and whether offsets, have 8 bytes instead of 4.
    """

    file: Handle
    at: int = 0
    wide: bool = False
    far: bool = False
    _data: np.ndarray[Any, np.dtype[np.uint8]] = field(
        default_factory=lambda: np.empty(0, np.uint8)
    )

    def wrong(self, problem: str, expected: object = None, found: object = None) -> FormatError:
        """Return the error for what ends here."""
        where = f"{self.file.path}, offset {self.at}"
        return FormatError(
            f"the header is damaged: {problem}", where=where, expected=expected, found=found
        )

    def take(self, nbytes: int, subject: str) -> bytes:
        """Return the next bytes."""
        end = self.at + nbytes
        if end > min(self.file.nbytes, MAX_HEADER_NBYTES):
            limit = min(self.file.nbytes, MAX_HEADER_NBYTES) - self.at
            raise self.wrong(f"{subject} leaves it", f"up to {limit} bytes", f"{nbytes} bytes")
        if end > len(self._data):
            size = min(max(end, 2 * len(self._data), _FIRST_READ), self.file.nbytes)
            more = np.empty(size - len(self._data), np.uint8)
            self.file.read_into(more, len(self._data))
            self._data = np.concatenate([self._data, more])
        data = self._data[self.at : end].tobytes()
        self.at = end
        return data

    def number(self, nbytes: int, subject: str) -> int:
        """Return the next bytes as a number."""
        return int.from_bytes(self.take(nbytes, subject), "big")

    def count(self) -> int:
        """Return a count, a length or the number of a dimension."""
        return self.number(8 if self.wide else 4, "a count")

    def items(self, tag: int) -> Iterator[int]:
        """Yield the numbers of the items of a list, after looking at how it begins."""
        subject = _WORDS[tag]
        tag_found, count = self.number(4, f"the list of {subject}"), self.count()
        if tag_found != tag and (tag_found or count):
            raise self.wrong(f"no list of {subject} begins", tag, tag_found)
        if count > self.file.nbytes - self.at:
            raise self.wrong(f"more {subject} than bytes", found=count)
        yield from range(count)

    def padded(self, nbytes: int, subject: str) -> bytes:
        """Return the next bytes, and go to the next multiple of 4 behind them."""
        return self.take(_padded(nbytes), subject)[:nbytes]

    def name(self) -> tuple[str, str]:
        """Return a name, and what is wrong with it; some programs end it as C does."""
        data = self.padded(self.count(), "a name").rstrip(b"\0")
        text = data.decode("utf-8", "backslashreplace")
        if not data or any(c < " " or c in "/\x7f" for c in text):
            return repr(text), "is not one that netCDF allows"
        return text, "" if text.encode() == data else "is not UTF-8"

    def type(self, subject: str) -> int:
        """Return the code of a type."""
        code = self.number(4, "a type")
        if not 1 <= code <= (max(TYPES) if self.wide else 6):
            raise self.wrong(f"{subject} has a type that does not exist", found=code)
        return code

    def attributes(self) -> dict[str, Any]:
        """Return a list of attributes; of a name that comes twice, the first one."""
        values: dict[str, Any] = {}
        for _ in self.items(_ATTRIBUTE):
            name, _ = self.name()
            code, count = self.type("an attribute"), self.count()
            dtype = TYPES[code]
            data = self.padded(count * dtype.itemsize, "the value of an attribute")
            values.setdefault(name, _text(data) if code == CHAR else _values(data, dtype))
        return values

    def variable(self, dimensions: list[tuple[str, int]]) -> Variable:
        """Return a variable of these dimensions, which are names and lengths."""
        name, problem = self.name()
        if problem:
            raise self.wrong(f"the name of a variable {problem}", found=name)
        axes = self.count()
        if axes > MAX_AXES:
            raise self.wrong(f"variable {name} has too many axes", f"<= {MAX_AXES}", axes)
        ids = tuple(self.count() for _ in range(axes))
        if any(i >= len(dimensions) for i in ids):
            raise self.wrong(f"variable {name} has a dimension that does not exist", found=ids)
        lengths = [dimensions[i][1] for i in ids]
        if 0 in lengths[1:]:
            raise self.wrong(
                f"variable {name} has the records' dimension in another place than the first"
            )
        attrs = self.attributes()
        code = self.type(f"variable {name}")
        self.count()  # its bytes, which do not fit in here if it is large
        begin = self.number(8 if self.far else 4, "an offset")
        record = lengths[:1] == [0]
        return Variable(
            name=name,
            dtype=TYPES[code],
            dimensions=ids,
            shape=tuple(lengths[record:]),
            record=record,
            begin=begin,
            attrs=attrs,
        )


def _text(data: bytes) -> str | bytes:
    try:
        return data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return data


def _values(data: bytes, dtype: DType) -> Any:
    """Return the values of an attribute in the machine's byte order; one alone without an axis."""
    values = np.frombuffer(data, dtype)
    if not dtype.isnative:
        values = values.byteswap().view(dtype.newbyteorder("="))
    return values[0] if len(values) == 1 else values
