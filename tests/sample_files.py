"""One small dataset of each format in each form that dsprep writes: plain, grouped, compressed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from oracles import READ, SUFFIX
from support import random_batch, written

import dsprep
from dsprep.core.schema import Batch, Field, Schema

COUNT = 40
SCHEMA = Schema(
    (
        Field("x", np.dtype("<u2"), (300,)),
        Field("y", np.dtype("<i8")),
        Field("ragged", np.dtype("<f4"), (None,)),
        Field.opaque("name", "str"),
    )
)
BATCH: Batch = random_batch(SCHEMA, COUNT, seed=3)

COMPRESS = {"hdf5": "gzip", "tfrecord": "gzip:1", "zarr": "gzip"}
FORMS = [
    *((f, SUFFIX[f], "plain") for f in sorted(READ)),
    *((f, SUFFIX[f], "grouped") for f in sorted(READ)),
    *((f, SUFFIX[f], "compressed") for f in sorted(COMPRESS)),
    *(("zarr", ".zarr.zip", form) for form in ("plain", "grouped")),
]


def make(form: tuple[str, str, str], directory: Path) -> Path:
    """Write `BATCH` as one of `FORMS`, and return its path."""
    format, suffix, kind = form
    path = directory / f"{kind}{suffix}"
    first = path if kind == "plain" else directory / f"first{suffix}"
    written(first, SCHEMA, BATCH)
    if kind == "grouped":
        dsprep.repack(first, path, buffer_size=16, stripe_size=4096)
    elif kind == "compressed":
        dsprep.convert(first, path, compress=COMPRESS[format])
    return path
