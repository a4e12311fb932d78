"""Datasets that the tests of the adapters read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import MemorySource, random_batch

import dsprep
from dsprep.core.schema import Batch, Field, Schema
from dsprep.verbs.convert import plan_job
from dsprep.write.job import RunOptions
from dsprep.write.run import run_job

COUNT = 100
PLAIN = Schema((Field("x", np.dtype("<f4"), (6, 3)), Field("label", np.dtype("<i8"))))
MIXED = Schema(
    (
        Field("image", np.dtype("<f4"), (8, 5)),
        Field("label", np.dtype("<i8")),
        Field("points", np.dtype("<i2"), (None, 3)),
        Field.opaque("name", "str"),
        Field("id", np.dtype(">u4"), (2,)),
    )
)


def made(
    directory: Path, schema: Schema, count: int = COUNT, group: int = 16
) -> tuple[Path, Batch]:
    """A repacked dataset and its samples; the label of a sample is its number."""
    batch = random_batch(schema, count, seed=1)
    if "label" in schema.names:
        batch["label"] = np.arange(count, dtype="<i8")
    (directory / "memory").touch()
    source = MemorySource(schema, batch, directory / "memory")
    run_job(plan_job(source, directory / "origin.h5"), source, RunOptions(durable=False))
    out = directory / "out.h5"
    dsprep.repack(
        directory / "origin.h5", out, buffer_size=group, stripe_size="4KiB", durable=False
    )
    return out, batch
