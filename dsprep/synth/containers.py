"""HDF5 files, LMDB environments and TFRecord files, whose bytes depend on their content alone.

Written independently of ``dsprep.formats``, so that each is a test of the other. Protocol buffers
are those of https://protobuf.dev/programming-guides/encoding; for TFRecord see TensorFlow's
``core/lib/io/record_writer.h`` and ``core/example/{example,feature}.proto``: a record is its
length (8 bytes, little-endian), the masked CRC-32C of those 8 bytes, the payload, and the masked
CRC-32C of the payload; the mask is ``rotate right by 15, plus 0xa282ead8``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Array
from dsprep.errors import TargetError


@contextmanager
def hdf5_file(path: Path) -> Iterator[Any]:
    """Create an HDF5 file with h5py's defaults; objects carry no times.

    Raises
    ------
    TargetError
        If the library cannot write it, for example for want of space.
    """
    import h5py

    try:
        with h5py.File(path, "x") as file:
            yield file
    except RuntimeError as error:  # h5py's class for a flush that fails when a file is closed
        raise TargetError("HDF5 cannot write the file", where=path, found=error) from error


def append(dataset: Any, rows: Array) -> None:
    """Append `rows` to a resizable HDF5 dataset."""
    start = dataset.shape[0]
    if len(rows):
        dataset.resize(start + len(rows), axis=0)
        dataset[start:] = rows


@contextmanager
def lmdb_environment(path: Path, *, subdir: bool, map_size: int) -> Iterator[Any]:
    """Create an LMDB environment: a directory, or one file when `subdir` is false.

    No lock file is left behind, since it would hold this process's id; readers make their own.
    One sync at the end serves all commits: the pages are the same as with one sync per commit.

    Raises
    ------
    TargetError
        If the library cannot write it, for example for want of space.
    """
    import lmdb

    if subdir:
        path.mkdir()  # the library would make it with the mode of the file
    try:
        with lmdb.open(
            str(path), subdir=subdir, map_size=map_size, lock=False, sync=False, mode=0o666
        ) as environment:
            yield environment
            environment.sync(True)
    except lmdb.Error as error:
        raise TargetError("LMDB cannot write the file", where=path, found=error) from error


# --- protocol buffers ------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Return `value` as a varint; negative numbers are 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(number: int, value: int) -> bytes:
    """Return a field that holds an integer."""
    return varint(number << 3) + varint(value)


def blob(number: int, value: bytes) -> bytes:
    """Return a field that holds bytes, a string, a message or packed numbers."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(number: int, values: Iterable[int]) -> bytes:
    """Return a field that holds packed integers."""
    return blob(number, b"".join(map(varint, values)))


# --- TFRecord --------------------------------------------------------------------------------


def bytes_feature(value: bytes) -> bytes:
    """Return a ``Feature`` of one byte string."""
    return blob(1, blob(1, value))


def float_feature(values: Array) -> bytes:
    """Return a ``Feature`` of 32-bit floats."""
    return blob(2, blob(1, np.ascontiguousarray(values, "<f4").tobytes()))


def int64_feature(values: Array) -> bytes:
    """Return a ``Feature`` of 64-bit integers."""
    return blob(3, packed(1, np.ravel(values).tolist()))


def example(features: Mapping[str, bytes]) -> bytes:
    """Return a ``tf.train.Example`` of these features, in this order."""
    entries = (blob(1, blob(1, name.encode()) + blob(2, f)) for name, f in features.items())
    return blob(1, b"".join(entries))


def _masked_crc(data: bytes) -> bytes:
    import google_crc32c

    crc = int(google_crc32c.value(data))
    crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return crc.to_bytes(4, "little")


def write_records(path: Path, payloads: Iterable[bytes], *, gzip: bool = False) -> None:
    """Write one record per payload to the new file `path`, plain or as one gzip stream."""
    stream = zlib.compressobj(wbits=31) if gzip else None  # wbits=31: gzip header without a time
    with path.open("xb") as file:
        for payload in payloads:
            length = len(payload).to_bytes(8, "little")
            for part in (length, _masked_crc(length), payload, _masked_crc(payload)):
                file.write(part if stream is None else stream.compress(part))
        if stream is not None:
            file.write(stream.flush())
