"""TFRecord files of ``tf.train.Example`` messages, as TensorFlow's own writer leaves them.

A record is its length (8 bytes, little-endian), the masked CRC-32C of those 8 bytes, the payload,
and the masked CRC-32C of the payload; the mask is ``rotate right by 15, plus 0xa282ead8``.
With ``GZIP`` the whole file is one gzip stream. Specifications: TensorFlow,
``core/lib/io/record_writer.h`` and ``core/example/{example,feature}.proto``.

Written independently of ``dsprep.formats.tfrecord``, so that each is a test of the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dsprep.core.schema import Array
from dsprep.synth.protobuf import blob, packed


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
