"""CosmoFlow: the distribution of matter in simulated universes, and four parameters of each.

Four forms are in use:

``cosmoflow-h5``
    HDF5 files ``PeterA_2019_05_4parE-rec{20, 21, ...}.h5`` of 128 samples, the last one shorter:
    ``3Dmap`` uint16 (n, 128, 128, 128, 12) and ``unitPar`` float32 (n, 4), both contiguous.
``cosmoflow-tfrecord``, ``cosmoflow-tfrecord-gzip``
    MLPerf HPC: ``train`` and ``validation`` directories with one Example per file: ``x``, the
    bytes of an int16 (128, 128, 128, 4), and ``y``, four floats; plain as in v0.7, or each file
    one gzip stream as from v1.0 on.
``cosmoflow-split-h5``
    The same samples with one HDF5 file each: ``x`` int16 (128, 128, 128, 4), ``y`` float32 (4,).
``cosmoflow-sc18``
    The first public code: TFRecord files ``{0, 1, ...}.tfrecord`` of 64 Examples, the last one
    shorter: ``data_raw``, the bytes of a float64 (64, 64, 64), and ``label_raw``, those of a
    float64 (2,).

Sources: async-io-cosmoflow ``io_daemon.py``; mlcommons/hpc ``cosmoflow/prepare.py``;
NERSC/CosmoFlow ``io_Cosmo.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dsprep.core.schema import Array
from dsprep.synth.containers import bytes_feature, example, float_feature, hdf5_file, write_records
from dsprep.synth.job import Opening, SynthJob, recipe, train_and_validation
from dsprep.synth.values import particle_counts

PER_FILE = 128
PER_SC18_FILE = 64
FIRST_FILE = 20
CROPS = 64
"""Sub-volumes that are cut from one universe; they share its parameters."""


def _parameters(job: SynthJob, *universe: int) -> Array:
    return job.rng("cosmoflow parameters", *universe).uniform(-1, 1, 4).astype(np.float32)


@recipe(
    "cosmoflow-h5",
    "CosmoFlow volumes, HDF5 files of 128 samples: uint16[128,128,128,12] and 4 parameters",
    samples=192,
    scale=1 / 8,
)
def _write_hdf5(job: SynthJob) -> Opening:
    edge = job.edge(128)
    job.path.mkdir()
    for first in range(0, job.samples, PER_FILE):
        count = min(PER_FILE, job.samples - first)
        number = FIRST_FILE + first // PER_FILE
        with hdf5_file(job.path / f"PeterA_2019_05_4parE-rec{number}.h5") as file:
            maps = file.create_dataset("3Dmap", (count, edge, edge, edge, 12), "<u2")
            parameters = file.create_dataset("unitPar", (count, 4), "<f4")
            for i in range(count):
                rng = job.rng("cosmoflow 12 channels", first + i)
                maps[i] = particle_counts(rng, edge, 12, np.uint16)
                parameters[i] = _parameters(job, first + i)
                job.done(first + i + 1)
    return ()


def _crops(job: SynthJob) -> Iterator[tuple[Path, Array, Array]]:
    """Yield ``(path without suffix, x, y)`` of the job's MLPerf samples; create directories."""
    edge = job.edge(128)
    job.path.mkdir()
    done = 0
    for part, (name, count) in enumerate(train_and_validation(job.samples, 9)):
        (job.path / name).mkdir()
        for i in range(count):
            done += 1
            universe, crop = divmod(i, CROPS)
            stem = f"univ_ics_2019-03_a{universe:08d}_{crop:03d}"
            x = particle_counts(job.rng("cosmoflow", part, i), edge, 4, np.int16)
            yield job.path / name / stem, x, _parameters(job, part, universe)
            job.done(done)


@recipe(
    "cosmoflow-tfrecord",
    "CosmoFlow volumes of MLPerf HPC, one sample per TFRecord: int16[128,128,128,4] as bytes",
    samples=36,
    scale=1 / 4,
)
def _write_tfrecord(job: SynthJob, *, gzip: bool = False) -> Opening:
    edge = job.edge(128)
    for stem, x, y in _crops(job):
        features = {"x": bytes_feature(x.astype("<i2").tobytes()), "y": float_feature(y)}
        write_records(stem.with_suffix(".tfrecord"), [example(features)], gzip=gzip)
    return "train", "--field", f"x:int16[{edge},{edge},{edge},4]", "--field", "y"


@recipe(
    "cosmoflow-tfrecord-gzip",
    "the same samples, every TFRecord file one gzip stream",
    samples=36,
    scale=1 / 4,
)
def _write_gzip(job: SynthJob) -> Opening:
    return _write_tfrecord(job, gzip=True)


@recipe(
    "cosmoflow-split-h5",
    "the same samples, one HDF5 file each, without a sample axis",
    samples=36,
    scale=1 / 4,
)
def _write_split(job: SynthJob) -> Opening:
    for stem, x, y in _crops(job):
        with hdf5_file(stem.with_suffix(".hdf5")) as file:
            file.create_dataset("x", data=x, dtype="<i2")
            file.create_dataset("y", data=y, dtype="<f4")
    return "train", "--sample-axis", "none"


def _sc18_examples(job: SynthJob, first: int, stop: int) -> Iterator[bytes]:
    edge = job.edge(64)
    for i in range(first, stop):
        rng = job.rng("cosmoflow-sc18", i)
        data = particle_counts(rng, edge, 1, np.int16).astype("<f8")
        label = rng.uniform(-1, 1, 2).astype("<f8")
        yield example(
            {
                "data_raw": bytes_feature(data.tobytes()),
                "label_raw": bytes_feature(label.tobytes()),
            }
        )
        job.done(i + 1)


@recipe(
    "cosmoflow-sc18",
    "CosmoFlow volumes of SC18, TFRecords of 64 samples: float64[64,64,64] as bytes",
    samples=160,
    scale=1 / 4,
)
def _write_sc18(job: SynthJob) -> Opening:
    edge = job.edge(64)
    job.path.mkdir()
    for number, first in enumerate(range(0, job.samples, PER_SC18_FILE)):
        examples = _sc18_examples(job, first, min(first + PER_SC18_FILE, job.samples))
        write_records(job.path / f"{number}.tfrecord", examples)
    data = f"data_raw:float64[{edge},{edge},{edge}]"
    return "", "--field", data, "--field", "label_raw:float64[2]"
