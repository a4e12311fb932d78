"""NOvA-like high-energy physics: one HDF5 file of many short columns in groups of unequal length.

Every group is a table whose columns are datasets of shape (n, 1), in chunks of (128, 1), gzip
level 6, each with its own number of rows n: ``spill`` has one row per sample,
``rec.training.cvnmaps`` on average 1.4 (its ``cvnmap`` is uint8 (n, 16)),
``rec.me.trkkalman`` 0.17, and ``neutrino`` none, as in a file of cosmic rays. ``run``,
``subrun``, ``evt`` say which spill a row belongs to. `scale` multiplies the width of ``cvnmap``.

gzip ratio of all columns together 4.5, in the real file 4.4. Source: a file of the
NU-CUCIS/ph5concat examples, opened with h5py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dsprep.core.schema import Array
from dsprep.synth.containers import append, hdf5_file
from dsprep.synth.job import Opening, SynthJob, recipe

BLOCK = 1024
"""Spills that are drawn together; always as many, so that none depends on how many are made."""
RUN, PER_SUBRUN = 11981, 2048
CHUNK = 128
VERTEX = ("vtx.x", "vtx.y", "vtx.z")
MEAN_POSITION = ("meanpos.x", "meanpos.y", "meanpos.z")

Columns = dict[str, Array]


def _tables(job: SynthJob, first: int) -> Iterator[tuple[str, Array, Columns]]:
    """Yield ``(group, spills, columns)`` of `BLOCK` spills from `first` on."""
    # `spills` has the number of the spill that each row belongs to, rising; columns are (n,) or (n,
    # width).
    rng = job.rng("nova", first)
    spills = np.arange(first, first + BLOCK)
    events = spills * 97 + rng.integers(0, 97, BLOCK)

    def table(name: str, rows: Array, **columns: Array) -> tuple[str, Array, Columns]:
        index = {
            "run": np.full(len(rows), RUN, np.uint32),
            "subrun": (rows // PER_SUBRUN).astype(np.uint32),
            "evt": events[rows - first].astype(np.uint32),
        }
        return name, rows, {**index, **columns}

    maps = np.repeat(spills, rng.poisson(1.4, BLOCK))
    tracks = np.repeat(spills, rng.poisson(0.17, BLOCK))
    n, k = len(maps), len(tracks)
    position = rng.uniform(-200, 1200, (3, k)).astype(np.float32)
    no_vertex = np.zeros((3, 0), np.float32)
    yield table("neutrino", spills[:0], **dict(zip(VERTEX, no_vertex, strict=True)))
    yield table(
        "rec.me.trkkalman",
        tracks,
        subevt=rng.integers(1, 5, k).astype(np.uint16),
        **dict(zip(MEAN_POSITION, position, strict=True)),
    )
    yield table(
        "rec.training.cvnmaps",
        maps,
        subevt=rng.integers(1, 8, n).astype(np.uint16),
        cvnmap=rng.poisson(0.05, (n, job.edge(16))).astype(np.uint8),
        hitfracx=(rng.integers(1, 24, n) * 54.421).astype(np.float32),
        hitfracy=(rng.integers(1, 24, n) * 54.421).astype(np.float32),
        ncells=np.full(n, 80, np.uint32),
    )
    yield table("spill", spills)


def _column(group: Any, name: str, values: Array) -> Any:
    """Return the column of that name, created empty at first."""
    if name in group:
        return group[name]
    width = values.shape[1] if values.ndim == 2 else 1
    return group.create_dataset(
        name,
        (0, width),
        values.dtype,
        chunks=(CHUNK, width),
        maxshape=(None, width),
        compression="gzip",
        compression_opts=6,
    )


@recipe(
    "nova",
    "NOvA-like physics tables, one HDF5 file: gzip columns [n,1] in groups of unequal length",
    samples=16_384,
    scale=1,
)
def _write(job: SynthJob) -> Opening:
    with hdf5_file(job.path) as file:
        for first in range(0, job.samples, BLOCK):
            stop = min(first + BLOCK, job.samples)
            for name, spills, columns in _tables(job, first):
                group = file.require_group(name)
                keep = int(np.searchsorted(spills, stop))
                for key, values in columns.items():
                    column = _column(group, key, values)
                    append(column, values[:keep].reshape(keep, column.shape[1]))
            job.done(stop)
    table = "rec.training.cvnmaps"
    return "", "--field", f"cvnmap={table}/cvnmap", "--field", f"evt={table}/evt"
