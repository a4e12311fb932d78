"""Neuron-Inverter: the voltage of simulated neurons, and the parameters that produced it.

``neuron-inverter`` (ONTRA)
    One HDF5 file per cell, of unequal length, ``CELL_excite.cellSpike_4prB8kHz.data.h5``. Each
    domain ``train``, ``val``, ``test`` has another number of samples N and the contiguous datasets
    ``DOM_frames`` float32 (N, 1600, 4), ``DOM_unit_par`` and ``DOM_phys_par`` float32 (N, 19), and
    ``DOM_unitStar_par`` float32 (N, 15).
``neuron-bbp3``
    One HDF5 file (``CELL.mlPack1.h5``): ``DOM_volts_norm`` float16 (N, 4000, 3, 5),
    ``DOM_unit_par`` float32 (N, 19), ``DOM_unit_stim_adjust`` float32 (N, 2, 5) for ``train``,
    ``valid``, ``test``; five stimuli float32 (4000,) and ``meta.JSON``, one variable-length string.

In both, `scale` shortens the time axis. Sample i of a domain of a file does not depend on the
lengths. Source: MLNeuronInverter ``packOntra``, ``packBBP3`` and ``toolbox/Dataloader_multiH5.py``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dsprep.core.schema import Array
from dsprep.synth.containers import hdf5_file
from dsprep.synth.job import Hint, SynthJob, recipe
from dsprep.synth.values import voltages

PER_CELL = 610_000
FEWEST_CELLS = 4
PARAMETERS = 19
STAR_PARAMETERS = 15
PROBES, STIMULI = 3, 5
STIMULUS_NAMES = (
    "4k50kInterChaoticB",
    "4k0step_200",
    "4k0ramp",
    "4k0chirp",
    "4k0step_500",
)


def domain_sizes(count: int) -> tuple[int, int, int]:
    """Return the samples of the training, validation and test domain: about 80, 12 and 8 %."""
    validation, test = count * 12 // 100, count * 8 // 100
    return count - validation - test, validation, test


def cell_sizes(job: SynthJob) -> list[int]:
    """Return the samples of each cell's file: at least 1, and 60 to 100 % of the longest."""
    cells = min(job.samples, max(FEWEST_CELLS, -(-job.samples // PER_CELL)))
    weights = job.rng("neuron cells").uniform(0.6, 1, cells)
    spread = np.cumsum(weights / weights.sum() * (job.samples - cells))
    edges = np.concatenate([[0], spread.astype(np.int64)[:-1], [job.samples - cells]])
    return [int(n) + 1 for n in np.diff(edges)]


@recipe(
    "neuron-inverter",
    "Neuron-Inverter (ONTRA), HDF5 files of unequal length: float32[1600,4] and parameters",
    samples=512,
    scale=1,
    apart=True,
)
def _write_ontra(job: SynthJob) -> Hint:
    job.path.mkdir()
    bins = job.edge(1600)
    done = 0
    for cell, count in enumerate(cell_sizes(job)):
        if not job.takes(cell):
            done += count
            continue
        name = f"witness{cell + 2}c_excite.cellSpike_4prB8kHz.data.h5"
        with hdf5_file(job.path / name) as file:
            sizes = domain_sizes(count)
            for domain, (prefix, n) in enumerate(zip(("train", "val", "test"), sizes, strict=True)):
                frames = file.create_dataset(f"{prefix}_frames", (n, bins, 4), "<f4")
                unit = file.create_dataset(f"{prefix}_unit_par", (n, PARAMETERS), "<f4")
                phys = file.create_dataset(f"{prefix}_phys_par", (n, PARAMETERS), "<f4")
                star = file.create_dataset(f"{prefix}_unitStar_par", (n, STAR_PARAMETERS), "<f4")
                for i in range(n):
                    rng = job.rng("neuron-inverter", cell, domain, i)
                    frames[i] = voltages(rng, bins, 4)
                    unit[i] = values = rng.uniform(-1, 1, PARAMETERS).astype(np.float32)
                    phys[i] = np.float32(10) ** values
                    star[i] = values[:STAR_PARAMETERS]
                    done += 1
                    job.done(done)
    return Hint(("--field", "x=train_frames", "--field", "y=train_unitStar_par"))


def _normalised(volts: Array) -> Array:
    """Return traces (t, p) with mean 0 and deviation 1 along the time, float16."""
    deviation = np.maximum(volts.std(0), np.float32(1e-6))
    scaled: Array = ((volts - volts.mean(0)) / deviation).astype(np.float16)
    return scaled


def _write_domain(
    job: SynthJob, file: Any, domain: int, prefix: str, count: int, first: int
) -> None:
    """Write the datasets of one BBP3 domain; `first` samples of others are there already."""
    bins = job.edge(4000)
    volts = file.create_dataset(f"{prefix}_volts_norm", (count, bins, PROBES, STIMULI), "<f2")
    unit = file.create_dataset(f"{prefix}_unit_par", (count, PARAMETERS), "<f4")
    adjust = file.create_dataset(f"{prefix}_unit_stim_adjust", (count, 2, STIMULI), "<f4")
    for i in range(count):
        rng = job.rng("neuron-bbp3", domain, i)
        traces = [_normalised(voltages(rng, bins, PROBES)) for _ in range(STIMULI)]
        volts[i] = np.stack(traces, axis=-1)
        unit[i] = rng.uniform(-1, 1, PARAMETERS).astype(np.float32)
        adjust[i] = rng.uniform(-1, 1, (2, STIMULI)).astype(np.float32)
        job.done(first + i + 1)


@recipe(
    "neuron-bbp3",
    "Neuron-Inverter (BBP3), one HDF5 file: float16[4000,3,5], parameters and a JSON string",
    samples=128,
    scale=1,
)
def _write_bbp3(job: SynthJob) -> Hint:
    import h5py

    bins = job.edge(4000)
    time = np.arange(bins, dtype=np.float32) / np.float32(bins)
    with hdf5_file(job.path) as file:
        for k, name in enumerate(STIMULUS_NAMES):
            stimulus = np.sin(time * np.float32(6.2832 * 4**k)) * (time > 0.1)
            file.create_dataset(name, data=stimulus.astype("<f4"))
        first = 0
        sizes = domain_sizes(job.samples)
        for domain, (prefix, n) in enumerate(zip(("train", "valid", "test"), sizes, strict=True)):
            _write_domain(job, file, domain, prefix, n, first)
            first += n
        meta = {
            "simu_info": {"stim_names": list(STIMULUS_NAMES), "num_time_bins": bins},
            "cell_name": "L5_TTPC1cADpyr0",
        }
        file.create_dataset("meta.JSON", data=[json.dumps(meta)], dtype=h5py.string_dtype())
    return Hint(("--field", "x=train_volts_norm", "--field", "y=train_unit_par"))
