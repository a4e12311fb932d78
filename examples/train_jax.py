"""Train with JAX from `dsprep.jax`, over all devices, with a checkpoint in the middle of an epoch.

Makes the voltage traces of ``train_neuron_torch.py``, repacks them, and fits a small network.
Batches are shared out among the devices, and the next one is put there while this one is
computed. Then it goes on from the checkpoint: every batch and every weight has to be the same.

    python examples/train_jax.py
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_jax.py
    srun -N 2 --ntasks-per-node 2 python examples/train_jax.py

In a job of several processes each of them makes the data for itself, in its own folder for
temporary files, and reads its part of every batch.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dsprep
from dsprep.jax import Batches
from dsprep.reader.ranks import detect
from dsprep.synth import synth

FIELDS = ("train_frames", "train_unit_par")


def make(folder: Path, samples: int, scale: float) -> Path:
    """Write the dataset and return its repacked form."""
    synth("neuron-inverter", folder / "made", samples=samples, scale=scale)
    dsprep.repack(folder / "made", folder / "neuron.h5", fields=FIELDS, buffer_size=128)
    return folder / "neuron.h5"


def network(probes: int, parameters: int) -> list[np.ndarray]:
    """Return the weights of three convolutions over time, and of a linear layer."""
    rng = np.random.default_rng(0)
    shapes = [(5, probes, 16), (5, 16, 32), (5, 32, 64), (64, parameters)]
    return [rng.normal(0, np.prod(s[:-1]) ** -0.5, s).astype(np.float32) for s in shapes]


def predict(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Return the parameters that the network finds in traces of shape ``(n, time, probes)``."""
    *convolutions, last = weights
    for w in convolutions:
        x = jax.lax.conv_general_dilated(
            x, w, (4,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        x = jax.nn.relu(x)
    return x.mean(1) @ last


@jax.jit
def step(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return weights after one step, and the loss before it."""
    loss, slopes = jax.value_and_grad(lambda w: jnp.mean((predict(w, x) - y) ** 2))(weights)
    return [w - 0.01 * s for w, s in zip(weights, slopes, strict=True)], loss


def train(
    batches: Batches, weights: list[jax.Array], epochs: int, save: int | None = None
) -> tuple[list[int], list[jax.Array], float, dict[str, Any]]:
    """Return the CRC-32 of every batch, weights, loss, and the checkpoint after `save` steps."""
    seen, loss, saved = [], jnp.zeros(()), {}
    while batches.epoch < epochs:
        for batch in batches:
            x, y = (batch[field] for field in FIELDS)
            weights, loss = step(weights, x, y)
            seen.append(zlib.crc32(b"".join(bytes(p.data) for p in x.addressable_shards)))
            if len(seen) == save:
                saved = {"weights": weights, "batches": batches.state_dict()}
    return seen, weights, float(loss), saved


def main() -> None:
    """Train, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--scale", type=float, default=0.25, help="1: traces of 1600 points")
    parser.add_argument("--batch-size", type=int, default=32, help="a multiple of the devices")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    if detect().world_size > 1:
        jax.distributed.initialize()  # asks SLURM or MPI, as dsprep does
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    with tempfile.TemporaryDirectory() as name:
        path = make(Path(name), options.samples, options.scale)
        arguments = {"remainder": "drop", "seed": 1, "fields": FIELDS, "sharding": sharding}
        batches = Batches(path, options.batch_size, **arguments)
        frames, values = (batches.reader.schema[field] for field in FIELDS)
        steps = len(batches)
        half = steps * (options.epochs - 1) + steps // 2
        weights = jax.device_put(network(frames.shape[1], values.shape[0]), everywhere)
        whole, best, loss, saved = train(batches, weights, options.epochs, half)

        other = Batches(path, options.batch_size, **arguments)
        other.load_state_dict(saved["batches"])
        rest, again, _, _ = train(other, saved["weights"], options.epochs)
    assert rest == whole[half:], "other batches came after the checkpoint"
    if jax.default_backend() == "cpu":
        for a, b in zip(best, again, strict=True):
            assert (np.asarray(a) == np.asarray(b)).all(), "other weights came out"
    if jax.process_index() == 0:
        devices = f"{len(jax.devices())} device(s) of {jax.process_count()} process(es)"
        print(f"{options.epochs} epochs of {steps} steps on {devices}, {loss:.4f}")
        print(f"resumed after step {half}: the same {len(rest)} batches")


if __name__ == "__main__":
    main()
