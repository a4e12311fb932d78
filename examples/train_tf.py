"""Train with Keras from a ``tf.data.Dataset`` that `dsprep.tf` gives, and go on in an epoch.

Makes the voltage traces of ``train_neuron_torch.py``, repacks them, and fits a small network.
Shapes are static, memory is that of the reader. TensorFlow takes batches ahead, so a program that
was interrupted says itself where it was: so many epochs, and so many batches of the next one.

    python examples/train_tf.py
    python examples/train_tf.py --samples 20000 --scale 1 --batch-size 128 --epochs 10
"""

from __future__ import annotations

import argparse
import os
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import dsprep
from dsprep.synth import synth
from dsprep.tf import dataset

FIELDS = ("train_frames", "train_unit_par")


def make(folder: Path, samples: int, scale: float) -> Path:
    """Write the dataset and return its repacked form."""
    synth("neuron-inverter", folder / "made", samples=samples, scale=scale)
    dsprep.repack(folder / "made", folder / "neuron.h5", fields=FIELDS, buffer_size=128)
    return folder / "neuron.h5"


def network(frames: tf.TensorSpec, parameters: tf.TensorSpec) -> keras.Model:
    """Return convolutions over time, and a linear layer."""
    layers = [keras.Input(frames.shape[1:])]
    for filters in (16, 32, 64):
        layers += [keras.layers.Conv1D(filters, 5, activation="relu"), keras.layers.MaxPool1D(4)]
    layers += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(parameters.shape[1])]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model


def digests(data: tf.data.Dataset) -> list[int]:
    """Return the CRC-32 of every batch."""
    return [zlib.crc32(batch["train_frames"].numpy()) for batch in data]


def main() -> None:
    """Train, and compare the batches of an epoch with those that come after an interruption."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--scale", type=float, default=0.25, help="1: traces of 1600 points")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = make(Path(name), options.samples, options.scale)
        arguments = {"remainder": "drop", "seed": 1, "fields": FIELDS}
        data = dataset(path, options.batch_size, **arguments)
        steps, spec = len(data), data.element_spec
        model = network(*(spec[field] for field in FIELDS))
        pairs = data.map(lambda batch: tuple(batch[field] for field in FIELDS))
        losses = model.fit(pairs, epochs=options.epochs, shuffle=False, verbose=0).history["loss"]

        last = options.epochs - 1
        whole = digests(dataset(path, options.batch_size, epoch=last, **arguments))
        rest = digests(dataset(path, options.batch_size, epoch=last, step=steps // 2, **arguments))
    assert rest == whole[steps // 2 :], "other batches came after the interruption"
    print(f"{options.epochs} epochs of {steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"begun at step {steps // 2} of an epoch: the same {len(rest)} batches")


if __name__ == "__main__":
    main()
