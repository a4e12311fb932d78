"""Trains a tiny model on mini-epochs, and shows what they cost: loss against (nm, rf).

A network of one hidden layer classifies samples of a simulation, of which each run (a group of the
file) explores a corner of its own. Every row of the table trains on the same number of samples:
``nm`` mini-epochs an epoch, each passed ``rf`` times (``mini_epochs`` and ``repeats`` of the
Reader), for two batch sizes, with mini-epochs that every epoch draws anew (``recompose``) and with
a fixed split. Printed is the loss on other samples, mean and standard deviation over seeds, each of
which draws weights and order. Where rf > S, some samples are never seen.

    python examples/mini_epochs.py
    python examples/mini_epochs.py --seeds 10 --epochs 16
    python examples/mini_epochs.py --mixed           # the runs mixed before they are written
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small

import numpy as np

import dsprep

FEATURES, HIDDEN, CLASSES = 16, 64, 8
RUN = 32
"""Samples of one run of the simulation, and of a group of the file."""

ROWS = ((1, 1), (16, 1), (16, 2), (64, 2), (16, 4), (64, 4), (16, 8), (16, 16), (16, 32))
QUICK = ((1, 1), (8, 2), (8, 16))
"""Mini-epochs and repeats."""

BATCHES = (16, 64)
RATE = 0.02
"""The learning rate at the beginning; it falls to 0."""


class Simulation:
    """Draws samples: a point near the corner of its run, and a class that depends on the point."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.inner = self.rng.normal(size=(FEATURES, 24)) * 2 / np.sqrt(FEATURES)
        self.outer = self.rng.normal(size=(24, CLASSES))

    def runs(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of so many runs, and their classes."""
        corners = np.repeat(self.rng.normal(size=(count, FEATURES)), RUN, axis=0)
        x = (corners + self.rng.normal(size=corners.shape)).astype(np.float32)
        scores = np.tanh(x @ self.inner) @ self.outer
        return x, (scores + self.rng.gumbel(size=scores.shape) / 2).argmax(axis=1)


class Model:
    """A perceptron, trained by gradient descent with momentum."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shapes = (FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)
        self.weights = [
            (rng.normal(size=s) * (len(s) > 1) / np.sqrt(s[0])).astype(np.float32) for s in shapes
        ]
        self.momenta = [np.zeros_like(w) for w in self.weights]

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the hidden layer, and the logarithms of what each class is given."""
        w1, b1, w2, b2 = self.weights
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        scores -= scores.max(axis=1, keepdims=True)
        return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def loss(self, x: np.ndarray, y: np.ndarray) -> float:
        """Return the mean cross entropy."""
        return float(-self.forward(x)[1][np.arange(len(y)), y].mean())

    def step(self, x: np.ndarray, y: np.ndarray, rate: float) -> None:
        """Train on one batch."""
        hidden, logs = self.forward(x)
        error = np.exp(logs)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        back = (error @ self.weights[2].T) * (hidden > 0)
        slopes = x.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)
        for weight, momentum, slope in zip(self.weights, self.momenta, slopes, strict=True):
            momentum *= 0.9
            momentum += slope
            weight -= rate * momentum


def train(
    path: Path, other: tuple[np.ndarray, np.ndarray], seed: int, passes: int, **reading: Any
) -> tuple[float, float]:
    """Return the loss on other samples, and which share of its own the model has seen."""
    parts, repeats = reading["mini_epochs"].parts, reading["repeats"]
    reading["epochs"] = -(-passes // repeats)  # the Reader counts how often all parts come
    with dsprep.Reader(path, seed=seed, rank=0, world_size=1, buffers_mixed=8, **reading) as reader:
        model, seen, done = Model(seed), np.zeros(reader.samples, bool), 0
        for _ in range(passes * parts):  # a ``for`` is one pass of one mini-epoch
            for batch in reader:
                rate = RATE * (1 - done / (passes * len(seen)))
                model.step(batch["x"], batch["y"], rate)
                seen[batch["number"]] = True
                done += len(batch["y"])
    return model.loss(*other), float(seen.mean())


def cells(
    path: Path, other: tuple[np.ndarray, np.ndarray], row: tuple[int, int], epochs: int, seeds: int
) -> Iterator[str]:
    """Train for a row of the table and yield its cells: what was seen, and the losses."""
    parts, repeats = row
    for batch in BATCHES:
        for recompose in (True, False):
            if not recompose and (parts == 1 or repeats >= epochs):
                yield "-"  # parts are drawn once: there is no difference
                continue
            cut = dsprep.MiniEpochs(parts, recompose=recompose)
            reading = {"mini_epochs": cut, "repeats": repeats}
            found = np.array(
                [
                    train(path, other, seed, epochs, batch_size=batch, **reading)
                    for seed in range(seeds)
                ]
            )
            loss, seen = found.T
            if recompose and batch == BATCHES[0]:
                yield f"{seen.mean():.0%}"
            spread = f" ±{loss.std(ddof=1):.3f}" if seeds > 1 else ""
            yield f"{loss.mean():.3f}{spread}"


def main() -> None:
    """Write the data, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8, help="so many times N samples: S")
    parser.add_argument("--runs", type=int, default=64, help="of the simulation, 32 samples each")
    parser.add_argument("--mixed", action="store_true", help="mix runs before they are written")
    parser.add_argument("--quick", action="store_true", help="three rows, one seed, 4 epochs")
    args = parser.parse_args()
    rows, seeds, epochs = (QUICK, 1, 4) if args.quick else (ROWS, args.seeds, args.epochs)
    simulation = Simulation()
    x, y = simulation.runs(args.runs)
    if args.mixed:
        order = np.random.default_rng(1).permutation(len(y))
        x, y = x[order], y[order]
    other = simulation.runs(256)
    print(
        f"{len(y):,} samples; every row trains on {epochs} times as many (S), in batches of M; "
        f"loss on others, seeds: {seeds}"
    )
    names = (f"M={batch} {way}" for batch in BATCHES for way in ("recompose", "fixed"))
    print(f"{'nm':>3} {'rf':>3} {'S/rf':>5} {'seen':>5}", *(f"{name:>14}" for name in names))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "train.h5"
        samples = {"x": x, "y": y, "number": np.arange(len(y))}
        dsprep.write(path, [samples], batched=True, length=len(y), buffer_size=str(RUN))
        for parts, repeats in rows:
            if parts > args.runs:
                continue
            seen, *losses = cells(path, other, (parts, repeats), epochs, seeds)
            words = (f"{words:>14}" for words in losses)
            print(f"{parts:>3} {repeats:>3} {epochs / repeats:>5.4g} {seen:>5}", *words, flush=True)


if __name__ == "__main__":
    main()
