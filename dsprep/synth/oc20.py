"""Open Catalyst (OC20, S2EF): atoms on a surface, one LMDB file of opaque values.

``data.0000.lmdb``, a single file (``subdir=False``): keys are decimal numbers without leading
zeros, so that ``10`` sorts before ``2``; every record is one commit, which leaves the tree's old
pages between the records; the last key, ``length``, holds the number of the others. The values
are pickles, of very different sizes: of a dict that holds bytes and numbers here, of a PyTorch
Geometric object in the original. Nothing in dsprep ever loads them.

`scale` multiplies the number of atoms, 8 to 225 with a mean of about 75; each atom has 30 edges.
The edges' indices compress well: zlib ratio 10 for the whole value, 84 kB in the median.

Sources: mlcommons/hpc ``open_catalyst``, fairchem ``scripts/preprocess_ef.py``.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from dsprep.synth.containers import lmdb_environment
from dsprep.synth.job import Opening, SynthJob, recipe

EDGES_PER_ATOM = 30
MOST_ATOMS = 225
MOST_NBYTES = MOST_ATOMS * (EDGES_PER_ATOM * 40 + 64) + 4096


def _system(rng: np.random.Generator, scale: float, number: int) -> dict[str, Any]:
    """Return the members of one sample: arrays as their C-order bytes, and plain numbers."""
    drawn = np.clip(rng.lognormal(4.2, 0.5), 8, MOST_ATOMS)
    n = max(1, round(float(drawn) * scale))
    sources = np.sort(rng.integers(0, n, n * EDGES_PER_ATOM))
    edges = np.stack([sources, rng.integers(0, n, n * EDGES_PER_ATOM)])
    tags = np.sort(rng.integers(0, 3, n))
    return {
        "pos": rng.uniform(0, 20, (n, 3)).astype("<f4").tobytes(),
        "cell": (np.eye(3) * rng.uniform(8, 24, 3)).astype("<f4").tobytes(),
        "atomic_numbers": rng.choice([1, 6, 8, 29, 46, 78], n).astype("<f4").tobytes(),
        "natoms": n,
        "edge_index": edges.astype("<i8").tobytes(),
        "cell_offsets": rng.integers(-1, 2, (n * EDGES_PER_ATOM, 3)).astype("<i8").tobytes(),
        "y": float(rng.normal(-400, 100)),
        "force": rng.standard_normal((n, 3)).astype("<f4").tobytes(),
        "fixed": (tags == 0).astype("<f4").tobytes(),
        "tags": tags.astype("<i8").tobytes(),
        "sid": int(rng.integers(2_500_000)),
        "fid": number,
    }


@recipe(
    "oc20",
    "Open Catalyst S2EF, one LMDB file: opaque values of varying size, unpadded decimal keys",
    samples=120,
    scale=1,
)
def _write(job: SynthJob) -> Opening:
    map_size = 2 * job.samples * (MOST_NBYTES + 6 * 4096) + (64 << 20)
    with lmdb_environment(job.path, subdir=False, map_size=map_size) as environment:
        for i in range(job.samples):
            value = pickle.dumps(_system(job.rng("oc20", i), job.scale, i), protocol=5)
            with environment.begin(write=True) as transaction:
                transaction.put(b"%d" % i, value)
            job.done(i + 1)
        with environment.begin(write=True) as transaction:
            transaction.put(b"length", pickle.dumps(job.samples, protocol=5))
    return "", "--order", "numeric", "--skip-key", "length"
