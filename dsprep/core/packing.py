"""Integers as few bytes: varints, byte planes and LZMA, and the tables of a sidecar.

A packed table is LZMA (``FORMAT_ALONE``) over either

- *varints*: unsigned LEB128, 7 bits a byte, least significant first, of numbers that are zigzagged
  (``2n`` for n >= 0, ``-2n - 1`` below); or
- *planes*: one byte that says how many bytes a number has (1 to 8), then all lowest bytes, all
  second bytes and so on, of zigzagged numbers.

All of it is bounded: a table that unpacks to more than `LARGEST_PLAIN` and a hundred times its
packed size is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import lzma
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints
from dsprep.errors import FormatError

INLINE = 6 << 10
"""Packed bytes up to which a table stays in the JSON, as base64."""

LARGEST_PLAIN = 256 << 20
_MEMORY = 256 << 20  # what LZMA may take for its dictionary
_EXACT = 4 << 10  # bytes up to which a size is found by packing
_SAMPLE = 4 << 10  # bytes of each sixteenth of a larger table by which its size is judged
_WINDOW = 8 << 20
"""The window size in the header of small tables, which need less."""

_SLOW, _FAST = 256 << 10, 4 << 20  # bytes up to which packing may be slow, and must be fast


def zigzag(values: Ints) -> NDArray[np.uint64]:
    """Return signed numbers as unsigned ones, small where they are near 0."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def unzigzag(values: NDArray[np.uint64]) -> Ints:
    """Return the numbers that `zigzag` encoded."""
    signed: Ints = (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64)
    return signed


def to_varints(values: NDArray[np.uint64]) -> bytes:
    """Return unsigned LEB128 of each number, one after another."""
    if not len(values):
        return b""
    sizes = np.ones(len(values), np.int64)
    for k in range(1, 10):
        sizes += values >= np.uint64(1) << np.uint64(7 * k)
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    starts = ends - sizes
    for k in range(int(sizes.max())):
        there = np.flatnonzero(sizes > k)
        byte = (values[there] >> np.uint64(7 * k)) & np.uint64(127)
        more = np.where(sizes[there] > k + 1, np.uint64(128), np.uint64(0))
        out[starts[there] + k] = byte | more
    return out.tobytes()


def from_varints(data: bytes) -> NDArray[np.uint64]:
    """Return the numbers in `data`; `ValueError` if it is not varints of at most 64 bits."""
    flat = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(flat < 128)
    if len(flat) and (not len(last) or last[-1] != len(flat) - 1):
        raise ValueError("a number is cut off")
    first = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1]) if len(last) else last
    sizes = last - first + 1
    if len(sizes) and int(sizes.max()) > 10:
        raise ValueError("a number is too long")
    values = np.zeros(len(last), np.uint64)
    for k in range(int(sizes.max()) if len(sizes) else 0):
        there = np.flatnonzero(sizes > k)
        byte = flat[first[there] + k].astype(np.uint64) & np.uint64(127)
        values[there] |= byte << np.uint64(7 * k)
    return values


def to_planes(values: Ints) -> bytes:
    """Return the numbers as byte planes."""
    codes = zigzag(values)
    top = int(codes.max()) if len(codes) else 0
    width = max(1, (top.bit_length() + 7) // 8)
    planes = codes.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    return bytes([width]) + np.ascontiguousarray(planes.T).tobytes()


def from_planes(data: bytes) -> Ints:
    """Return the numbers that `to_planes` encoded; `ValueError` if `data` is damaged."""
    width = data[0] if data else 0
    if not 1 <= width <= 8 or (len(data) - 1) % width:
        raise ValueError("the width of the numbers is wrong")
    planes = np.frombuffer(data, np.uint8, offset=1).reshape(width, -1)
    codes = np.zeros((planes.shape[1], 8), np.uint8)
    codes[:, :width] = planes.T
    return unzigzag(codes.view("<u8").reshape(-1).astype(np.uint64, copy=False))


@lru_cache(maxsize=4)  # what a table takes is asked for before it is stored
def pack(plain: bytes) -> bytes:
    """Compress the bytes of a table."""
    preset = 6 | lzma.PRESET_EXTREME if len(plain) <= _SLOW else 1 if len(plain) > _FAST else 4
    if len(plain) > _SLOW:
        return lzma.compress(plain, lzma.FORMAT_ALONE, preset=preset)
    # A window larger than the data finds nothing more, and takes 20 ms to make ready.
    window = max(4096, 1 << len(plain).bit_length())
    one = {"id": lzma.FILTER_LZMA1, "preset": preset, "dict_size": window}
    packed = lzma.compress(plain, lzma.FORMAT_ALONE, filters=[one])
    return packed[:1] + _WINDOW.to_bytes(4, "little") + packed[5:]


def packed_nbytes(plain: bytes) -> int:
    """Return about how many bytes `pack` makes of a table: exact for small ones, quick for all."""
    if len(plain) <= _EXACT:
        return len(pack(plain))
    size, step = len(plain), max(_SAMPLE, len(plain) // 16)
    some = b"".join(plain[at : at + _SAMPLE] for at in range(0, size, step))
    return len(zlib.compress(some, 1)) * size // len(some)


def unpack(packed: bytes) -> bytes:
    """Return the bytes that `pack` encoded; `ValueError` if they are damaged, or far too many."""
    max_nbytes = LARGEST_PLAIN + 100 * len(packed)
    try:
        stream = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_MEMORY)
        plain = stream.decompress(packed, max_nbytes + 1)
    except (lzma.LZMAError, MemoryError) as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    if len(plain) > max_nbytes:
        raise ValueError(f"it unpacks to more than {max_nbytes} bytes")
    if not stream.eof:
        raise ValueError("it is cut off")
    return plain


class Tables:
    """The packed tables of one sidecar: small ones in the JSON, others in its companion.

    Parameters
    ----------
    companion
        The bytes of the companion file, when reading; None if there is no such file.
    where
        The sidecar, for messages.
    """

    def __init__(self, companion: bytes | None = None, where: object = None) -> None:
        self._read, self.where = companion, where
        self.written = bytearray()

    def put(self, plain: bytes) -> Any:
        """Pack a table; return its JSON: base64, or its range in the companion."""
        packed = pack(plain)
        if len(packed) <= INLINE:
            return base64.b64encode(packed).decode()
        at = len(self.written)
        self.written += packed
        return {"at": at, "nbytes": len(packed), "blake2b": digest(packed)}

    def get(self, json: Any) -> bytes:
        """Return the table that `put` gave this JSON for.

        Raises
        ------
        FormatError
            If it is not there, damaged, or of another sidecar.
        """
        try:
            return unpack(self._packed(json))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise FormatError(
                "a table of the sidecar is damaged",
                where=self.where,
                found=error,
                fix="write the sidecar again with dsprep provenance",
            ) from error

    def _packed(self, json: Any) -> bytes:
        if isinstance(json, str):
            try:
                return base64.b64decode(json, validate=True)
            except binascii.Error as error:
                raise ValueError(f"it is not base64: {error}") from error
        if not isinstance(json, Mapping):
            raise TypeError("it is neither base64 nor an offset in the companion")
        at, nbytes = json["at"], json["nbytes"]
        if not (type(at) is type(nbytes) is int and at >= 0 and nbytes >= 0):
            raise ValueError("its offset is damaged")
        if self._read is None:
            raise ValueError("the companion file is missing")
        packed = self._read[at : at + nbytes]
        if len(packed) != nbytes or digest(packed) != json["blake2b"]:
            raise ValueError("the companion file is of another sidecar")
        return packed


class Sizes(Tables):
    """Counts what tables would take, without packing large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def put(self, plain: bytes) -> Any:
        """Count a table."""
        self.nbytes += packed_nbytes(plain)
        return ""


def digest(data: bytes) -> str:
    """Return 16 hexadecimal digits by which a change of `data` is noticed."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
