"""Neuron-Inverter: the voltage of simulated neurons, and the parameters that produced it.

``neuron-inverter`` (ONTRA)
    One HDF5 file per cell, of unequal length, ``CELL_excite.cellSpike_4prB8kHz.data.h5``. Each
    domain ``train``, ``val``, ``test`` has another number of samples N and the contiguous datasets
    ``DOM_frames`` float32 (N, 1600, 4), ``DOM_unit_par`` and ``DOM_phys_par`` float32 (N, 19), and
    ``DOM_unitStar_par`` float32 (N, 15).

`scale` shortens the time axis. Sample i of a domain of a file does not depend on the
lengths. Source: MLNeuronInverter ``packOntra`` and ``toolbox/Dataloader_multiH5.py``.
"""

from __future__ import annotations

import numpy as np

from dsprep.synth.containers import hdf5_file
from dsprep.synth.job import Opening, SynthJob, recipe
from dsprep.synth.values import voltages

PER_CELL = 610_000
FEWEST_CELLS = 4
PARAMETERS = 19
STAR_PARAMETERS = 15


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
)
def _write_ontra(job: SynthJob) -> Opening:
    job.path.mkdir()
    bins = job.edge(1600)
    done = 0
    for cell, count in enumerate(cell_sizes(job)):
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
    return "", "--field", "x=train_frames", "--field", "y=train_unitStar_par"
