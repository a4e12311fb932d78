"""The tf.data program that loads a dataset; `inspect --code` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsprep.core.schema import DType, is_extension
from dsprep.formats.tfrecord.example import BYTES, FLOAT
from dsprep.formats.tfrecord.features import Feature

RAW = frozenset({"<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2"})
"""The dtypes that ``tf.io.decode_raw`` knows."""


def loading_code(path: Path, codec: str | None, chosen: Sequence[Feature], opaque: bool) -> str:
    """Return a program that loads sample 0 with tf.data and prints name, dtype and shape."""
    packed = f", compression_type={codec.upper()!r}" if codec else ""
    ext = any(is_extension(f.field.dtype) for f in chosen)
    lines = [
        *(["import ml_dtypes"] if ext else []),
        *(["import numpy as np"] if any(_by_numpy(f) for f in chosen) else []),
        "import tensorflow as tf",
        "",
        f"dataset = tf.data.TFRecordDataset({str(path)!r}{packed})",
    ]
    if not opaque:
        features = {f.name: f"    {f.name!r}: {_spec(f)},\n" for f in chosen}
        specs = "".join(features.values())
        lines.append(f"features = {{\n{specs}}}")
    lines.append("for record in dataset.take(1):")
    if not opaque:
        lines.append("    sample = tf.io.parse_single_example(record, features)")
    for f in chosen:
        value = "record" if opaque else f"sample[{f.name!r}]"
        lines.append(f"    value = {_decode(f, value)}")
        shown = "value.dtype" if _by_numpy(f) else "value.dtype.name"
        lines.append(f"    print({f.field.name!r}, {shown}, value.shape)")
    if not chosen:
        lines.append("    print(record)")
    return "\n".join(lines) + "\n"


def _spec(feature: Feature) -> str:
    if feature.form != "value":
        return "tf.io.VarLenFeature(tf.string)"
    if feature.type == BYTES:
        return 'tf.io.FixedLenFeature([], tf.string, "")'
    name = "float32" if feature.type == FLOAT else "int64"
    if feature.field.ragged:
        return f"tf.io.FixedLenSequenceFeature([], tf.{name}, allow_missing=True)"
    return f"tf.io.FixedLenFeature({list(feature.field.shape)}, tf.{name})"


def _by_numpy(feature: Feature) -> bool:
    """Whether the bytes are of a dtype that TensorFlow cannot decode."""
    f = feature.field
    return feature.type == BYTES and f.kind == "array" and _short(f.dtype) not in RAW


def _short(dtype: DType) -> str:
    return "" if dtype.names is not None or is_extension(dtype) else dtype.str


def _decode(feature: Feature, value: str) -> str:
    f = feature.field
    if feature.form == "strings":
        return f"tf.strings.reduce_join({value}.values)"
    if feature.form == "lengths":
        return f"tf.cast(tf.strings.length({value}.values), tf.int64)"
    if feature.type != BYTES:
        plain = f.dtype.str in ("<f4", "<i8")
        cast = value if plain else f"tf.cast({value}, {f.dtype.newbyteorder('=').name!r})"
        return f"tf.reshape({cast}, {[-1, *f.inner]})" if f.ragged and f.inner else cast
    if f.kind != "array":
        return value
    shape = [-1 if n is None else n for n in f.shape]
    if _by_numpy(feature):
        dtype = f"np.{f.dtype!r}" if f.dtype.names is not None else f"np.dtype({f.dtype.str!r})"
        if is_extension(f.dtype):
            dtype = f"np.dtype(ml_dtypes.{f.dtype.name})"
        return f"np.frombuffer({value}.numpy(), {dtype}).reshape({shape})"
    return f"tf.reshape(tf.io.decode_raw({value}, tf.{f.dtype.name}), {shape})"
