"""Datasets to try things on: the same samples in every format."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from dsprep import convert
from dsprep.core.schema import Field, Schema
from dsprep.formats.options import WriteOptions

FIXED = Schema(
    (
        Field("image", np.dtype("<f4"), (6, 5)),
        Field("label", np.dtype("<i8")),
        Field("id", np.dtype(">u4"), (2,)),
    )
)
RAGGED = Schema((FIXED["label"], FIXED["id"], Field("points", np.dtype("<i2"), (None, 3))))
CHUNKS = ("convert", "--chunk", "7")
GZIP = (*CHUNKS, "--compress", "gzip:1")

WAYS = {"zarr-2": {"zarr_format": 2}, "zarr-chunks": {"zarr_shard": 0}}

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hdf5": ("set.h5", ("convert",)),
    "hdf5-chunks": ("set.h5", GZIP),
    "lmdb": ("set.lmdb", ("convert",)),
    "tfrecord": ("set.tfrecord", ("convert",)),
    "tfrecord-gzip": ("set.tfrecord", ("convert", "--compress", "gzip:1")),
    "zarr-2": ("set.zarr", ("convert",)),
    "zarr-chunks": ("set.zarr", ("convert",)),
    "zarr-shards": ("set.zarr", CHUNKS),
    "zarr-zip": ("set.zarr.zip", CHUNKS),
}
"""Name of the dataset, and the command that writes it."""


def format_of(kind: str) -> str:
    return kind.partition("-")[0]


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
    if kind in WAYS:
        chunks = {"chunk": 7, "compress": "gzip:1", "workers": 1}
        convert(source, folder / name, write_options=WriteOptions(**WAYS[kind]), **chunks)
        return folder / name
    dsprep(command, source, folder / name, "-j", 1, *options)
    return folder / name
