"""Repacks data shaped like CosmoFlow's and the Neuron Inverter's, and reads whole groups.

CosmoFlow: sub-volumes of the universe with four targets each. Neuron Inverter: waveforms with the
parameters that they come from. Both are made small here (``--scale 1``: as large as they are),
shuffled once while they are repacked, and read back group by group as a training run does: each
group by one read, in an order that changes every epoch.

    python examples/repack_groups.py
    python examples/repack_groups.py --scale 1 --buffer-size 64MiB
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import dsprep
from dsprep.synth import synth

DATASETS = {"cosmoflow-h5": (), "neuron-inverter": ("train_frames", "train_unit_par")}


def epoch(path: Path, group: int, seed: int) -> tuple[int, float]:
    """Read all groups in random order; return the samples and the seconds."""
    rng = np.random.default_rng(seed)
    arena = dsprep.Arena()  # memory that is used again for each group
    with dsprep.Sidecar.open(path) as sidecar:
        count = len(sidecar)
        began = time.perf_counter()
        for start in rng.permutation(np.arange(0, count, group)).tolist():
            batch = sidecar.read(slice(start, min(start + group, count)), arena=arena)
            next(iter(batch.values()))  # a training step would be here
        return count, time.perf_counter() - began


def main() -> None:
    """Make, repack and read both datasets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--scale", type=float, help="1: samples as large as the real ones")
    parser.add_argument("--buffer-size", default="2MiB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for name, fields in DATASETS.items():
            source = synth(name, Path(directory) / name, scale=args.scale).path
            target = Path(directory) / f"{name}-grouped.h5"
            made = dsprep.repack(
                source,
                target,
                fields=fields,
                buffer_size=args.buffer_size,
                stripe_size="1MiB",
                shuffle=1,
            )
            ((part, report),) = made.parts
            (plan,) = part.plans
            print(
                f"{name}: {report.samples:,} samples in {part.groups} groups of "
                f"{part.group_size.samples}; {plan.reads} read per group, padding "
                f"{plan.padding / plan.nbytes:.1%}"
            )
            for seed in range(2):
                samples, seconds = epoch(target, part.group_size.samples, seed)
                print(f"  epoch {seed}: {samples / seconds:,.0f} samples/s")


if __name__ == "__main__":
    main()
