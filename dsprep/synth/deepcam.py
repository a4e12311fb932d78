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
from dsprep.synth.job import Hint, SynthJob, recipe, train_and_validation
from dsprep.synth.values import smooth

CHANNELS = 16
START = datetime(1996, 1, 1)
LEVELS = np.geomspace(1e-3, 1e5, CHANNELS).astype(np.float32)
"""Mean of each channel: humidity is about 1e-3 kg/kg, pressure 1e5 Pa."""


def _weather(rng: np.random.Generator, height: int, width: int) -> tuple[Array, Array]:
    """Return the channels, float32 (h, w, 16), and the labels, int64 (h, w), of one time step.

    The channels are smooth over some 30 grid points; their zlib ratio is 1.1. The labels are
    two thresholds of another smooth field, with a zlib ratio above 100.
    """
    cell = max(1, width // 36)
    data = smooth(rng, (height, width, CHANNELS), cell, axes=2)
    data = (1 + data * np.float32(0.1)) * LEVELS
    event = smooth(rng, (height, width), cell)
    labels = np.zeros((height, width), np.int64)
    labels[event > 1.3] = 2
    labels[event < -1.9] = 1
    return data, labels


class _Statistics:
    """Count, mean, mean square, minimum and maximum per channel of the samples added."""

    def __init__(self) -> None:
        self.count = 0
        self.total = np.zeros(CHANNELS)
        self.squares = np.zeros(CHANNELS)
        self.minimum = np.full(CHANNELS, np.inf, np.float32)
        self.maximum = np.full(CHANNELS, -np.inf, np.float32)

    def add(self, data: Array) -> None:
        pixels = data.reshape(-1, CHANNELS)
        self.count += 1
        self.total += pixels.mean(0, dtype=np.float64)
        self.squares += np.square(pixels).mean(0, dtype=np.float64)
        self.minimum = np.minimum(self.minimum, pixels.min(0))
        self.maximum = np.maximum(self.maximum, pixels.max(0))

    def tables(self) -> dict[str, Array]:
        return {
            "count": np.asarray(self.count, np.int64),
            "mean": (self.total / self.count).astype(np.float32),
            "sqmean": (self.squares / self.count).astype(np.float32),
            "minval": self.minimum,
            "maxval": self.maximum,
        }


@recipe(
    "deepcam",
    "DeepCAM weather, one HDF5 file per sample: float32[768,1152,16] and labels[768,1152]",
    samples=5,
    scale=1 / 4,
)
def _write(job: SynthJob) -> Hint:
    height, width = job.edge(768), job.edge(1152)
    statistics = _Statistics()
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
            if part == 0:
                statistics.add(data)
            done += 1
            job.done(done)
    with hdf5_file(job.path / "stats.h5") as file:
        for key, table in statistics.tables().items():
            file[f"climate/{key}"] = table
    return Hint(("--sample-axis", "none"), "train")
