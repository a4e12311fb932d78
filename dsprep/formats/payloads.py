"""Bytes of samples that state their own type: what they are, and what decodes them."""

from __future__ import annotations

from contextlib import suppress

from dsprep.core.schema import show_dtype, show_shape
from dsprep.errors import DsprepError
from dsprep.formats.npy_header import parse
from dsprep.formats.protobuf import read_fields, read_varint

_TENSORS = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    19: "float16",
    22: "uint32",
    23: "uint64",
}
"""Numbers of ``tensorflow.DataType``."""


def describe_payload(data: object, value: str) -> str | None:
    """Return what the bytes of a field are, and what decodes them in Python, where `value` is them.

    Several arrays are decoded to a mapping. None if the bytes are not known, or are not bytes.
    """
    if not isinstance(data, bytes):
        return None
    with suppress(DsprepError):
        header = parse(lambda nbytes: data[:nbytes], "")
        array = f"{show_dtype(header.dtype)}{show_shape(header.shape)}"
        return f".npy, {array} behind {header.begin} bytes: numpy.load(io.BytesIO({value}))"
    if data.startswith(b"PK\3\4"):
        return f"a ZIP file such as .npz: numpy.load(io.BytesIO({value}))"
    if data[8:10] == b'{"' and int.from_bytes(data[:8], "little") <= len(data) - 8:
        return f"safetensors: safetensors.numpy.load({value})"
    with suppress(ValueError, LookupError):
        dtype, shape = _read_tensor(data)
        decoded = f"tensorflow.io.parse_tensor({value}, {dtype!r}).numpy()"
        return f"a serialised TensorProto, {dtype}{show_shape(shape)}: {decoded}"
    return None


def _read_tensor(data: bytes) -> tuple[str, list[int]]:
    """Return dtype and shape of a serialised TensorProto; raise unless the bytes are one."""
    fields = {number: place for number, _, *place in read_fields(data, 0, len(data))}
    dtype = _TENSORS[read_varint(data, *fields[1])[0]]
    sizes = [place for number, _, *place in read_fields(data, *fields[2]) if number == 2]
    shape = []
    for start, stop in sizes:
        ((_, _, *place),) = read_fields(data, start, stop)
        shape.append(read_varint(data, *place)[0])
    return dtype, shape
