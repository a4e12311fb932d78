"""Datasets to try things on: the same samples in every format, plain and grouped."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
from support import describe, random_batch, write_batch

from dsprep import formats
from dsprep.core.schema import Batch, Field, Ragged, Schema

FIXED = Schema(
    (
        Field("image", np.dtype("<f4"), (6, 5)),
        Field("label", np.dtype("<i8")),
        Field("id", np.dtype(">u4"), (2,)),
    )
)
MIXED = Schema(
    (
        *FIXED,
        Field("points", np.dtype("<i2"), (None, 3)),
        Field.opaque("blob"),
        Field.opaque("name", "str"),
    )
)
GROUPS = ("repack", "--buffer-size", "8", "--stripe-size", "4KiB")
CHUNKS = ("convert", "--chunk", "7")
GZIP = (*CHUNKS, "--compress", "gzip:1")

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hdf5": ("set.h5", ("convert",)),
    "hdf5-chunks": ("set.h5", GZIP),
    "hdf5-groups": ("set.h5", GROUPS),
    "lmdb": ("set.lmdb", ("convert",)),
    "lmdb-groups": ("set.lmdb", GROUPS),
    "tfrecord": ("set.tfrecord", ("convert",)),
    "tfrecord-gzip": ("set.tfrecord", ("convert", "--compress", "gzip:1")),
    "tfrecord-groups": ("set.tfrecord", GROUPS),
    "zarr-2": ("set.zarr", (*GZIP, "--zarr-format", "2")),
    "zarr-chunks": ("set.zarr", (*GZIP, "--zarr-shard", "0")),
    "zarr-shards": ("set.zarr", CHUNKS),
    "zarr-zip": ("set.zarr.zip", CHUNKS),
    "zarr-groups": ("set.zarr", GROUPS),
    "zarr-zip-groups": ("set.zarr.zip", GROUPS),
}
"""Name of the dataset, and the command that writes it."""


def format_of(kind: str) -> str:
    return kind.partition("-")[0]


def samples(schema: Schema, count: int, version: int = 0) -> Batch:
    """Return `count` samples; of every version all have the same sizes, and other values."""
    batch = random_batch(schema, count, seed=11)
    for name, column in batch.items():
        field = schema[name]
        if name == "label":
            batch[name] = np.arange(count) + 1_000_000 * version
        elif not isinstance(column, Ragged):
            batch[name] = random_batch(Schema((field,)), count, seed=100 + version)[name]
        elif field.kind == "str":
            batch[name] = Ragged.pack([f"{version}-{i % 7}" * (i % 3) for i in range(count)], field)
        else:
            values = column.values + np.array(version, column.values.dtype)
            batch[name] = Ragged.from_lengths(values, column.lengths, field.kind)
    return batch


def origin(folder: Path, schema: Schema, batch: Batch) -> Path:
    """Write the samples as a TFRecord with its sidecar, from which all else is made."""
    path = folder / "origin.tfrecord"
    format = formats.load("tfrecord")
    write_batch(format, path, schema, batch)
    describe(format, schema, [path], path).save(durable=False)
    return path


def dsprep(*arguments: object) -> None:
    """Run a command in this process."""
    from dsprep.cli import app

    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            app([str(a) for a in arguments])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"dsprep {arguments}: {said.getvalue()[-500:]}") from ended


def make(kind: str, source: Path, folder: Path) -> Path:
    """Write `source` as a dataset of this kind, in a folder that is made."""
    name, (command, *options) = KINDS[kind]
    folder.mkdir(parents=True)
    dsprep(command, source, folder / name, "--no-sync", "-j", 1, *options)
    return folder / name
