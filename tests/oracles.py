"""What h5py, py-lmdb, tf.data and zarr themselves find in what dsprep wrote.

Each function reads one dataset of a format with that format's own library, following only the
encodings that examples/formats.md documents, and returns it as a batch. Nothing of `dsprep.formats`
is used.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsprep.core.schema import Batch, Field, Ragged, Schema, decode_dtype


def as_field(values: np.ndarray, attrs: Any, field: Field) -> np.ndarray:
    """Undo the stand-in for a dtype that the format lacks."""
    if "dsprep_dtype" in attrs:
        kept = attrs["dsprep_dtype"]  # HDF5: JSON as text; Zarr: JSON itself
        dtype = decode_dtype(kept if "zarr" in type(attrs).__module__ else json.loads(kept))
        assert dtype == field.dtype
        order = "<>"[dtype.str[0] == ">"]  # zarr-python gives integers in the machine's order
        bits = np.ascontiguousarray(values, values.dtype.newbyteorder(order))
        shape = bits.shape[: len(field.shape) + (not field.ragged)]  # bytes have one axis more
        return np.frombuffer(bits.tobytes(), dtype).reshape(shape)
    if values.dtype != field.dtype and values.dtype == field.dtype.newbyteorder("="):
        return values.astype(field.dtype)  # zarr-python gives values in the machine's order
    return values


def read_arrays(root: Any, schema: Schema, attrs_of: Callable[[Any], Any]) -> Batch:
    """HDF5 and Zarr: an array per fixed field, a group values/first/count per ragged one."""
    batch: Batch = {}
    for f in schema:
        node = root[f.name]
        if not f.ragged:
            batch[f.name] = as_field(node[...], attrs_of(node), f)
            continue
        values = as_field(node["values"][...], attrs_of(node["values"]), f)
        first, count = node["first"][...], node["count"][...]
        kind = attrs_of(node)["dsprep_kind"]
        assert (kind.decode() if isinstance(kind, bytes) else kind) == f.kind
        items = [values[a : a + n] for a, n in zip(first, count, strict=True)]
        if f.kind != "array":
            items = [v.tobytes() for v in items]
        if f.kind == "str":
            items = [v.decode("utf-8", "surrogateescape") for v in items]
        batch[f.name] = Ragged.pack(items, f)
    return batch


def read_hdf5(path: Path, schema: Schema) -> Batch:
    import h5py

    with h5py.File(path, "r") as file:
        return read_arrays(file, schema, lambda node: node.attrs)


def read_zarr(path: Path, schema: Schema) -> Batch:
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = zarr.storage.ZipStore(path, mode="r") if path.suffix == ".zip" else str(path)
        return read_arrays(zarr.open_group(store, mode="r"), schema, lambda node: node.attrs)


def read_lmdb(path: Path, schema: Schema) -> Batch:
    import lmdb

    with (
        lmdb.open(str(path), readonly=True, lock=False, subdir=path.is_dir()) as env,
        env.begin() as txn,
    ):
        return split_values([value for _, value in txn.cursor()], schema)


def split_values(values: list[bytes], schema: Schema) -> Batch:
    """LMDB: counts of ragged bytes if two or more, fixed fields packed, ragged ones behind."""
    ragged = [f for f in schema if f.ragged]
    items: dict[str, list[Any]] = {f.name: [] for f in schema}
    for value in values:
        at = 8 * len(ragged) if len(ragged) > 1 else 0
        lengths = list(np.frombuffer(value[:at], "<u8"))
        for f in schema:
            if not f.ragged:
                items[f.name].append(value[at : at + f.row_nbytes])
                at += f.row_nbytes
        for k, f in enumerate(ragged):
            length = int(lengths[k]) if lengths else len(value) - at
            items[f.name].append(value[at : at + length])
            at += length
        assert at == len(value)
    return {f.name: from_bytes(items[f.name], f) for f in schema}


def from_bytes(items: list[bytes], f: Field) -> Any:
    if f.kind == "str":
        return Ragged.pack([b.decode("utf-8", "surrogateescape") for b in items], f)
    if f.kind == "bytes":
        return Ragged.pack(items, f)
    if not f.ragged:
        return np.frombuffer(b"".join(items), f.dtype).reshape(len(items), *f.inner)
    arrays = [np.frombuffer(b, f.dtype).reshape(-1, *f.inner) for b in items]
    return Ragged.pack(arrays, f)


def tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("tensorflow")  # Pythons for which it has no wheel


def read_tfrecord(path: Path, schema: Schema) -> Batch:
    """tf.data checks lengths and CRCs; tf.train.Example gives the features."""
    tf = tensorflow()
    items: dict[str, list[Any]] = {f.name: [] for f in schema}
    with path.open("rb") as file:
        gzip = file.read(2) == b"\x1f\x8b"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = list(
            tf.data.TFRecordDataset(
                str(path), compression_type="GZIP" if gzip else ""
            ).as_numpy_iterator()
        )
    for record in records:
        features = tf.train.Example.FromString(record).features.feature
        assert set(features) == set(schema.names)
        for f in schema:
            items[f.name].append(feature_bytes(features[f.name], f))
    return {f.name: from_bytes(items[f.name], f) for f in schema}


def feature_bytes(feature: Any, f: Field) -> bytes:
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        (value,) = feature.bytes_list.value
        return value
    if kind == "float_list":
        # Its values as Python's floats have other bits if they are signalling NaNs.
        nbytes = 4 * len(feature.float_list.value)
        message = feature.float_list.SerializeToString()
        return message[len(message) - nbytes :]
    if kind == "int64_list":
        return np.array(feature.int64_list.value, "<i8").tobytes()
    assert kind is None
    return b""


READ = {
    "hdf5": read_hdf5,
    "lmdb": read_lmdb,
    "tfrecord": read_tfrecord,
    "zarr": read_zarr,
}
SUFFIX = {"hdf5": ".h5", "lmdb": ".lmdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}
