"""The header of an array file of NumPy, parsed strictly and without executing it.

A file begins with a magic string, a version, the length of the header and the header: the text of
a Python dictionary with the keys ``descr``, ``fortran_order`` and ``shape``, padded by spaces. The
values of the array follow. Versions 1.0, 2.0 and 3.0 differ in the width of the length (2 bytes,
then 4) and in the text's encoding (Latin-1, from 3.0 on UTF-8).

Source: NumPy Enhancement Proposal 1, and the documentation of ``numpy.lib.format``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dsprep.core.schema import LARGEST, Array, Bytes, DType, decode_dtype, encode_dtype
from dsprep.errors import FormatError, UnsupportedError, require

MAGIC = b"\x93NUMPY"

MAX_NBYTES = 10_000
"""Bytes of the longest header that is parsed, as by NumPy. Those of plain types have 118 bytes."""

MAX_AXES = 32
"""Axes of an array, at most."""

_FIRST = 4096


@dataclass(frozen=True)
class Header:
    """The facts in the header of an array.

    Attributes
    ----------
    dtype, shape
        Of the array.
    begin
        The offset of the first value from the beginning of the header's magic string.
    columns
        Whether values are in Fortran order, and that is not C order as well.
    """

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    columns: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse(read: Callable[[int], bytes], where: object) -> Header:
    """Return the facts in a header.

    Parameters
    ----------
    read
        Returns the first bytes of the file, as many as it is asked for, or all that there are.
    where
        The file, for messages.

    Raises
    ------
    FormatError
        If there is no header, or it is damaged or cut off.
    UnsupportedError
        If the array holds Python objects or values without a width; the message names a remedy.
    """
    head = read(_FIRST)
    width = 2 if head[6:7] == b"\1" else 4
    begin = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if len(head) < begin <= MAX_NBYTES:
        head = read(begin)
    known = head[:8] in (MAGIC + b"\1\0", MAGIC + b"\2\0", MAGIC + b"\3\0")
    require(
        known and begin <= min(len(head), MAX_NBYTES),
        FormatError,
        "this is not an array file of NumPy of version 1, 2 or 3, or its header is cut off",
        where=where,
        expected=f"{MAGIC!r}, and a header of at most {MAX_NBYTES} bytes",
        found=head[:12],
    )
    return _header(head[:begin], where)


def check_size(header: Header, nbytes: int, where: object) -> None:
    """Raise `FormatError` unless all values fit into so many bytes, the header's own included."""
    if header.begin + header.nbytes > nbytes:
        raise FormatError(
            "the array is truncated",
            where=where,
            expected=f"{header.nbytes} bytes at {header.begin}",
            found=f"{max(0, nbytes - header.begin)} bytes",
        )
    if not header.nbytes and max(header.shape, default=0) > nbytes:
        raise FormatError(
            "the array has no values", where=where, found=f"shape {header.shape}"[:80]
        )


def array_in(data: Bytes, where: object) -> Array:
    """Return the array that the bytes of a file are: a view of them; raises as `parse` does."""
    header = parse(lambda nbytes: data[:nbytes].tobytes(), where)
    check_size(header, len(data), where)
    order: Any = "F" if header.columns else "C"
    return np.ndarray(header.shape, header.dtype, data, header.begin, order=order)


def _header(head: bytes, where: object) -> Header:
    try:
        shape, fortran, dtype = _evaluate(head)
    except Exception as error:  # numpy raises any of a dozen, a SystemError among them
        raise FormatError(
            "the header is damaged",
            where=where,
            expected="a dictionary of descr, fortran_order and shape",
            found=repr(head[10:])[:80],
        ) from error
    if dtype.hasobject:
        raise UnsupportedError(
            "the array holds Python objects, and nothing is unpickled",
            where=where,
            fix="save numbers, or strings of a fixed width: "
            "numpy.save(FILE, array.astype('U20')); or write samples from Python: dsprep.write",
        )
    if dtype.itemsize == 0 or dtype.subdtype is not None:
        raise UnsupportedError(f"the values, of type {dtype}, have no width", where=where)
    columns = fortran and sum(n > 1 for n in shape) > 1 and 0 not in shape
    header = Header(dtype, shape, len(head), columns)
    good = len(shape) <= MAX_AXES and all(0 <= n < LARGEST for n in shape)
    if not good or header.nbytes >= LARGEST:
        raise FormatError("no array has this shape", where=where, found=repr(shape)[:80])
    return header


@lru_cache(64)  # the members of an archive mostly have the same few
def _evaluate(head: bytes) -> tuple[tuple[int, ...], bool, DType]:
    """Return shape, order and type, which is without the titles of members."""
    text = head[10 if head[6] == 1 else 12 :].decode("utf-8" if head[6] == 3 else "latin-1")
    try:
        values = ast.literal_eval(text.strip())
    except SyntaxError:  # Python 2 wrote 10L
        values = ast.literal_eval(re.sub(r"(?<=[(, ])(\d+)L(?=[,)])", r"\1", text).strip())
    shape, fortran, descr = values.pop("shape"), values.pop("fortran_order"), values.pop("descr")
    if values or type(fortran) is not bool or not isinstance(descr, str | list):
        raise ValueError("other values")
    if type(shape) is not tuple or any(type(n) is not int for n in shape):
        raise ValueError("other values")
    dtype = np.lib.format.descr_to_dtype(descr)  # type: ignore[arg-type]
    return shape, fortran, dtype if dtype.hasobject else decode_dtype(encode_dtype(dtype))
