"""Decoding of stored chunks: compression, shuffling, checksums.

A filter is a mapping with an ``id`` and parameters, named as numcodecs names them. Known are

==============  ===============================================================================
``zlib``        RFC 1950, as HDF5's deflate
``gzip``        RFC 1952, one member
``deflate``     RFC 1951, as a member of a ZIP file; ``crc32`` is that of what it holds, of which
                the first ``skip`` bytes are left out
``zstd``        RFC 8878, one frame, whether or not it states its size
``blosc``       one buffer of Blosc 1
``lz4``         the size as a little-endian 32-bit number, then one LZ4 block
``bz2``         one bzip2 stream
``shuffle``     the first bytes of all elements, then the second, ...; ``elementsize`` in bytes
``fletcher32``  HDF5's checksum of all bytes, four bytes after them
``crc32c``      a CRC32C of all bytes, four bytes after them, little-endian
==============  ===============================================================================

Parameters that only matter when writing (``level``, ``cname``, ...) are allowed and not used. No
other codec of numcodecs is ever looked up: some of them execute what they read. Chunks may come
from damaged or hostile files: nothing is allocated that the chunk cannot fill, and sizes that
codecs take on trust are compared with the bytes that are there.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import Bytes
from dsprep.errors import FormatError

_SMALL, _STEP = 4 << 20, 256 << 10
_LOOPED = 64
_ROOM = 1024


class _Damaged(Exception):
    """A chunk cannot be decoded; `decode` says where."""


def check(filters: Sequence[Mapping[str, Any]], where: object) -> None:
    """Raise `FormatError` unless `decode` knows the filters, given in the order of writing."""
    for f in filters:
        name = _name(f, where)
        for key, value in f.items():
            if key != "id" and key not in _KNOWN[name]:
                raise FormatError(f"filter {name} has no parameter {key[:80]}", where=where)
            if not isinstance(value, int | str | None):
                raise FormatError(f"{key} of filter {name} is not a plain value", where=where)
        if name == "shuffle":
            _elementsize(f, where)
        if name == "deflate":
            _number(f, "skip", 1 << 31, where)
            _number(f, "crc32", 1 << 32, where)
        if name == "crc32c" and f.get("location", "end") != "end":
            raise FormatError("a checksum has to follow its chunk", where=where)


def _name(f: Mapping[str, Any], where: object) -> str:
    name = f.get("id")
    if not isinstance(name, str) or name not in _KNOWN:
        raise FormatError(
            "there is no such filter",
            where=where,
            expected="one of " + ", ".join(_KNOWN),
            found=repr(name)[:80],
        )
    return name


def decode(
    data: bytes | memoryview | Bytes,
    filters: Sequence[Mapping[str, Any]],
    mask: int,
    nbytes: int,
    where: object,
) -> Bytes:
    """Return the content of a chunk.

    Memory for the content, and while filters are undone about once more, is all that is taken.

    Parameters
    ----------
    data
        The chunk as it is stored, one axis.
    filters
        In the order in which they were applied when writing; see `check`.
    mask
        Bit i set: filter i was left out for this chunk.
    nbytes
        How many bytes the content has.
    where
        The chunk, for messages.

    Returns
    -------
    uint8, shape ``(nbytes,)``; perhaps a read-only view of `data`.

    Raises
    ------
    FormatError
        If the chunk is damaged, or a filter is unknown.
    """
    done = [f for i, f in enumerate(filters) if not mask >> i & 1]
    names = [_name(f, where) for f in done]
    # What each filter was given when writing: so many bytes, or at most so many after a
    # compressor, whose output may be a little larger than its input.
    max_nbytes, exact = nbytes, True
    sizes = []
    for name in names:
        sizes.append((max_nbytes, exact))
        if name in _RATIO:
            max_nbytes, exact = max_nbytes + (max_nbytes >> 6) + _ROOM, False
        elif name in _CHECKSUMS:
            max_nbytes += 4
    flat = np.frombuffer(data, np.uint8)
    for f, (max_nbytes, exact) in zip(reversed(done), reversed(sizes), strict=True):
        flat = _undo(f, flat, max_nbytes, exact, where)
    if len(flat) != nbytes:
        raise FormatError(
            "a chunk has the wrong size",
            where=where,
            expected=f"{nbytes} bytes",
            found=len(flat),
        )
    return flat


def unpack(data: bytes, f: Mapping[str, Any], max_nbytes: int, where: object) -> Bytes:
    """Return decompressed bytes of unknown size: at most `max_nbytes`.

    Raises `FormatError` if it is more, or damaged, or the compressor is unknown.
    """
    name = f.get("id")
    if name not in COMPRESSORS:
        raise FormatError(
            "the compressor is unknown",
            where=where,
            expected="one of " + ", ".join(sorted(COMPRESSORS)),
            found=repr(name)[:80],
        )
    flat = _undo({"id": name}, np.frombuffer(data, np.uint8), max_nbytes, False, where)
    if len(flat) > max_nbytes:
        raise FormatError(
            f"what {name} unpacks is too large for the memory",
            where=where,
            expected=f"at most {max_nbytes} bytes, from {len(data)}",
            found="more",
        )
    return flat


def _undo(f: Mapping[str, Any], data: Bytes, max_nbytes: int, exact: bool, where: object) -> Bytes:
    """Return bytes before the filter: at most one more than `max_nbytes`."""
    name = f["id"]
    if name == "shuffle":
        return _unshuffle(data, _elementsize(f, where))
    skip = _number(f, "skip", 1 << 31, where) if name == "deflate" else 0
    max_nbytes += skip
    try:
        if name in _CHECKSUMS:
            return _CHECKSUMS[name](data)
        possible = _RATIO[name] * len(data) + _ROOM
        if exact and max_nbytes > possible:
            raise FormatError(
                "a chunk is too small for what it should hold",
                where=where,
                expected=f"{max_nbytes} bytes",
                found=f"{len(data)} bytes, compressed",
            )
        content = _CODECS[name](data, min(max_nbytes, possible), exact)
        complete = len(content) <= max_nbytes
        if name == "deflate" and complete:
            crc = _number(f, "crc32", 1 << 32, where)
            if zlib.crc32(content.data) != crc:
                raise _Damaged("the CRC-32 does not fit")
        return content[skip:]
    except (_Damaged, zlib.error, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a chunk cannot be decoded by {name}: {error}", where=where) from error


def _number(f: Mapping[str, Any], key: str, below: int, where: object) -> int:
    number = f.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < below:
        raise FormatError(f"{key} of filter {f['id']} is wrong", where=where, found=number)
    return number


# --- elements --------------------------------------------------------------------------------


def _elementsize(f: Mapping[str, Any], where: object) -> int:
    size = _number(f, "elementsize", 1 << 31, where)
    if not size:
        raise FormatError("elementsize of filter shuffle is wrong", where=where, found=size)
    return size


def _unshuffle(data: Bytes, size: int) -> Bytes:
    """Return the bytes element by element; bytes after the last whole element do not move."""
    n = len(data) // size
    if size == 1 or n < 2:
        return data
    out = np.empty(len(data), np.uint8)
    planes, elements = data[: n * size].reshape(size, n), out[: n * size].reshape(n, size)
    if size <= _LOOPED:  # twice as fast as numpy's own transposing copy
        for k in range(size):
            elements[:, k] = planes[k]
    else:
        elements[...] = planes.T
    out[n * size :] = data[n * size :]
    return out


# --- checksums -------------------------------------------------------------------------------


def _fletcher32(data: Bytes) -> Bytes:
    from numcodecs.fletcher32 import Fletcher32

    content, stored_sum = _split(data)
    crc = bytes(Fletcher32().encode(np.ascontiguousarray(content))[-4:]) if len(content) else b""
    # Some releases of HDF5 swapped the bytes of each half; the library takes both.
    fits = stored_sum in (crc, crc[1::-1] + crc[:1:-1])
    if not fits and (len(content) or any(stored_sum)):
        raise _Damaged("the checksum does not fit")
    return content


def _crc32c(data: Bytes) -> Bytes:
    from google_crc32c import extend

    content, stored_sum = _split(data)
    if int.from_bytes(stored_sum, "little") != extend(0, content):
        raise _Damaged("the checksum does not fit")
    return content


def _split(data: Bytes) -> tuple[Bytes, bytes]:
    if len(data) < 4:
        raise _Damaged("the checksum is missing")
    return data[:-4], data[-4:].tobytes()


# --- compression -----------------------------------------------------------------------------
# Each takes the chunk, the size of its content, and whether that is exact or a bound.


def inflate(data: Any, nbytes: int, wbits: int = zlib.MAX_WBITS) -> Bytes:
    """Return the decompressed `data`, at most one byte more than `nbytes`.

    If large, step by step into one array: in one call zlib's module needs the memory twice.

    Raises
    ------
    zlib.error
        If `data` is damaged, or ends too early.
    """
    stream, view = zlib.decompressobj(wbits), memoryview(data)
    if nbytes <= _SMALL:
        flat = np.frombuffer(stream.decompress(view, nbytes + 1), np.uint8)
        _need_end(stream, len(flat), nbytes)
        return flat
    out = np.empty(nbytes + 1, np.uint8)
    filled = at = 0
    rest: Any = b""
    while filled <= nbytes and not stream.eof:
        if not rest:
            rest, at = view[at : at + _STEP], at + _STEP
        part = stream.decompress(rest, min(4 * _STEP, nbytes + 1 - filled))
        out[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
        rest = stream.unconsumed_tail
        if not part and not rest and at >= len(view):
            break
    _need_end(stream, filled, nbytes)
    return out[:filled]


def _need_end(stream: Any, filled: int, nbytes: int) -> None:
    if filled <= nbytes and not stream.eof:
        raise zlib.error("the stream ends too early")


def _bz2(data: Bytes, max_nbytes: int, exact: bool) -> Bytes:
    from bz2 import BZ2Decompressor

    stream = BZ2Decompressor()
    content = stream.decompress(data.data, max_nbytes + 1)
    if len(content) <= max_nbytes and not stream.eof:
        raise _Damaged("the stream ends too early")
    return np.frombuffer(content, np.uint8)


def _zstd(data: Bytes, max_nbytes: int, exact: bool) -> Bytes:
    """Decode a frame into memory of the size that it states."""
    # A frame that states none is given one, so that the library compares it with the content too.
    from numcodecs.zstd import Zstd

    head = data[:18].tobytes()
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        raise _Damaged("it does not begin as a frame")
    flag, single = head[4] >> 6, head[4] >> 5 & 1
    at = 6 - single + (0, 1, 2, 4)[head[4] & 3]
    width = (single, 2, 4, 8)[flag]
    if width:
        size = int.from_bytes(head[at : at + width], "little") + (256 if width == 2 else 0)
    elif exact:
        size = max_nbytes
        header = head[:4] + bytes([head[4] | 0xC0]) + head[5:at] + struct.pack("<Q", size)
        data = np.concatenate([np.frombuffer(header, np.uint8), data[at:]])
    else:
        raise _Damaged("the frame does not give its size")
    return _filled(Zstd(), data, size, max_nbytes, exact)


def _blosc(data: Bytes, max_nbytes: int, exact: bool) -> Bytes:
    from numcodecs.blosc import Blosc

    if len(data) < 16:
        raise _Damaged("the header is missing")
    size, _, stored = struct.unpack("<4x3I", data[:16].tobytes())
    if not 16 <= stored <= len(data):  # the library reads as many as the header says
        raise _Damaged(f"the header gives {stored} of {len(data)} bytes")
    return _filled(Blosc(), data, size, max_nbytes, exact)


def _lz4(data: Bytes, max_nbytes: int, exact: bool) -> Bytes:
    from numcodecs.lz4 import LZ4

    if len(data) < 5:
        raise _Damaged("the header is missing")
    return _filled(LZ4(), data, int.from_bytes(data[:4].tobytes(), "little"), max_nbytes, exact)


def _filled(codec: Any, data: Bytes, size: int, max_nbytes: int, exact: bool) -> Bytes:
    """Decode into memory that the content fills: codecs do not report how many bytes they wrote."""
    if size > max_nbytes or (exact and size != max_nbytes) or not size:
        raise _Damaged(f"the header gives {size} bytes instead of {max_nbytes}")
    out = np.empty(size, np.uint8)
    codec.decode(np.ascontiguousarray(data), out=out)
    return out


_CODECS: dict[str, Callable[[Bytes, int, bool], Bytes]] = {
    "zlib": lambda data, max_nbytes, exact: inflate(data, max_nbytes),
    "gzip": lambda data, max_nbytes, exact: inflate(data, max_nbytes, zlib.MAX_WBITS | 16),
    "deflate": lambda data, max_nbytes, exact: inflate(data, max_nbytes, -zlib.MAX_WBITS),
    "zstd": _zstd,
    "blosc": _blosc,
    "lz4": _lz4,
    "bz2": _bz2,
}
COMPRESSORS = frozenset(_CODECS) - {"deflate"}
"""Codecs that `unpack` knows."""
_CHECKSUMS: dict[str, Callable[[Bytes], Bytes]] = {"fletcher32": _fletcher32, "crc32c": _crc32c}
_RATIO = {
    "zlib": 1100,
    "gzip": 1100,
    "deflate": 1100,
    "zstd": 1 << 17,
    "blosc": 1 << 17,
    "lz4": 256,
    "bz2": 1 << 21,
}
"""The largest compression ratio; content beyond it is not allocated."""

_KNOWN: dict[str, frozenset[str]] = {
    "zlib": frozenset({"level"}),
    "gzip": frozenset({"level"}),
    "deflate": frozenset({"crc32", "skip"}),
    "zstd": frozenset({"level", "checksum"}),
    "blosc": frozenset({"cname", "clevel", "shuffle", "blocksize", "typesize"}),
    "lz4": frozenset({"acceleration"}),
    "bz2": frozenset({"level"}),
    "shuffle": frozenset({"elementsize"}),
    "fletcher32": frozenset(),
    "crc32c": frozenset({"location"}),
}
"""The filters and their parameters."""
