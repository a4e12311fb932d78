"""DeepCAM: global weather with labelled extreme events, one HDF5 file per time step.

``train`` and ``validation`` directories of files ``data-YYYY-MM-DD-HH-0.h5``, three hours apart:
``climate/data`` float32 (768, 1152, 16), channels last, and ``climate/labels_0`` int64
(768, 1152) with 0 background, 1 tropical cyclone, 2 atmospheric river (the public loaders cast
whatever integer type they find). ``stats.h5`` beside them has ``climate/count``, ``mean``,
``sqmean``, ``minval`` and ``maxval``, per channel, of the training set.

Sources: mlcommons/hpc ``deepcam/src/deepCam/data`` and ``deepcam/src/utils/summarize_data.py``.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np

from dsprep.core.schema import Array
from dsprep.synth.containers import hdf5_file
from dsprep.synth.job import Opening, SynthJob, recipe, train_and_validation
from dsprep.synth.values import smooth

CHANNELS = 16
START = datetime(1996, 1, 1)
LEVELS = np.geomspace(1e-3, 1e5, CHANNELS).astype(np.float32)
"""Mean of each channel: humidity is about 1e-3 kg/kg, pressure 1e5 Pa."""


def _weather(rng: np.random.Generator, height: int, width: int) -> tuple[Array, Array]:
    """Return the channels, float32 (h, w, 16), and the labels, int64 (h, w), of one time step."""
    # The channels are smooth over some 30 grid points; their zlib ratio is 1.1. The labels are two
    # thresholds of another smooth field, with a zlib ratio above 100.
    cell = max(1, width // 36)
    data = smooth(rng, (height, width, CHANNELS), cell, axes=2)
    data = (1 + data * np.float32(0.1)) * LEVELS
    event = smooth(rng, (height, width), cell)
    labels = np.zeros((height, width), np.int64)
    labels[event > 1.3] = 2
    labels[event < -1.9] = 1
    return data, labels


def _statistics(moments: list[Array]) -> dict[str, Array]:
    """Return the datasets of ``stats.h5``, by the moments of each sample."""
    mean, squares, low, high = np.stack(moments, axis=1)
    tables = {"mean": mean.mean(0), "sqmean": squares.mean(0), "minval": low.min(0)}
    tables["maxval"] = high.max(0)
    tables = {name: table.astype(np.float32) for name, table in tables.items()}
    return {"count": np.asarray(len(moments), np.int64), **tables}


@recipe(
    "deepcam",
    "DeepCAM weather, one HDF5 file per sample: float32[768,1152,16] and labels[768,1152]",
    samples=5,
    scale=1 / 4,
)
def _write(job: SynthJob) -> Opening:
    height, width = job.edge(768), job.edge(1152)
    moments: list[Array] = []
    job.path.mkdir()
    done = 0
    for part, (name, count) in enumerate(train_and_validation(job.samples, 10)):
        (job.path / name).mkdir()
        for i in range(count):
            when = START + timedelta(hours=3 * i, days=36525 * part)
            with hdf5_file(job.path / name / f"data-{when:%Y-%m-%d-%H}-0.h5") as file:
                data, labels = _weather(job.rng("deepcam", part, i), height, width)
                file.create_dataset("climate/data", data=data, dtype="<f4")
                file.create_dataset("climate/labels_0", data=labels, dtype="<i8")
            if part == 0:  # mean, mean square, minimum and maximum of each channel
                pixels = data.reshape(-1, CHANNELS).astype(np.float64)
                squares = np.square(pixels).mean(0)
                moments.append(np.stack((pixels.mean(0), squares, pixels.min(0), pixels.max(0))))
            done += 1
            job.done(done)
    with hdf5_file(job.path / "stats.h5") as file:
        for key, table in _statistics(moments).items():
            file[f"climate/{key}"] = table
    return "train", "--sample-axis", "none"
