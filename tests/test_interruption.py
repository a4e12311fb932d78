"""A killed conversion leaves nothing that looks complete, and continues to the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import random_batch

from dsprep.core.schema import Field, Schema

SCRIPT = Path(__file__).with_name("interrupt.py")
FIXED = Schema((Field("x", np.dtype("<f4"), (50, 10)), Field("y", np.dtype("<i8"))))
MIXED = Schema((*FIXED, Field("r", np.dtype("<i2"), (None, 3)), Field.opaque("b")))

CASES = [
    ("hdf5", FIXED, {}),
    ("hdf5", FIXED, {"chunk": 7}),
    ("hdf5", FIXED, {"compress": "gzip:1", "chunk": 10}),
    ("hdf5", MIXED, {}),
    ("hdf5", MIXED, {"compress": "gzip:1"}),
    ("lmdb", FIXED, {}),
    ("lmdb", MIXED, {}),
    ("tfrecord", FIXED, {}),
    ("tfrecord", MIXED, {}),
    ("tfrecord", MIXED, {"compress": "gzip:1"}),
    ("tfrecord", MIXED, {"samples_per_file": 70}),
    ("zarr", FIXED, {}),
    ("zarr", MIXED, {}),
    ("zarr", FIXED, {"compress": "gzip:1", "chunk": 10}),
    ("zarr", MIXED, {"compress": "zstd:1"}),
    ("zarr", MIXED, {"samples_per_file": 70}),
    ("hdf5", FIXED, {"buffer_size": 32, "stripe_size": "4KiB"}),
    ("hdf5", FIXED, {"buffer_size": 32, "stripe_size": "4KiB", "shuffle": 3}),
    ("hdf5", MIXED, {"buffer_size": 32, "stripe_size": "4KiB"}),
    ("hdf5", FIXED, {"buffer_size": 32, "stripe_size": "4KiB", "compress": "gzip:1"}),
    ("tfrecord", MIXED, {"buffer_size": 32, "stripe_size": "4KiB"}),
    ("tfrecord", FIXED, {"buffer_size": 16, "stripe_size": "4KiB", "samples_per_file": 70}),
    ("lmdb", FIXED, {"buffer_size": 32, "stripe_size": "4KiB"}),
]


@pytest.mark.parametrize("format", ["hdf5", "lmdb", "tfrecord", "zarr"])
def test_killed_at_every_step(format, tmp_path, origin):
    suffix = {"hdf5": ".h5", "lmdb": ".lmdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}[format]
    jobs = []
    for i, (to, schema, options) in enumerate(CASES):
        if to == format:
            name = "set" if "samples_per_file" in options else f"set{suffix}"
            target = tmp_path / str(i) / name
            jobs.append([str(origin[schema is MIXED]), str(target), {**options, "to": to}])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), format, json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for job, results in zip(jobs, json.loads(done.stdout), strict=True):
        assert len(results) > 1
        wrong = [r for r in results if not (r["complete"] and r["same"] and r["left"])]
        assert wrong == [], job


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """The two datasets, as TFRecord with its sidecar."""
    from support import MemorySource

    from dsprep.verbs.convert import plan_job
    from dsprep.write.run import run_job

    made = []
    for schema in (FIXED, MIXED):
        directory = tmp_path_factory.mktemp("origin")
        (directory / "memory").touch()
        source = MemorySource(schema, random_batch(schema, 160), directory / "memory")
        target = directory / "origin.tfrecord"
        run_job(plan_job(source, target), source)
        made.append(target)
    return made
