"""Samples that can be checked wherever they come out: every value follows from the label."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (48, 40)
COUNT = 600

_SPREAD = 2_654_435_761


def image(labels: np.ndarray) -> np.ndarray:
    """Return the images of labels: float32, shape ``(n, *SHAPE)``."""
    size = SHAPE[0] * SHAPE[1]
    base = (labels.astype(np.uint64) * _SPREAD)[:, None] + np.arange(size, dtype=np.uint64)
    return (base % 16_777_213).astype(np.float32).reshape(len(labels), *SHAPE)


def lengths(labels: np.ndarray) -> np.ndarray:
    """Return how many points each sample has."""
    return (labels * 7) % 5


def points(labels: np.ndarray) -> np.ndarray:
    """Return the points of samples back to back: int16, shape ``(rows, 3)``."""
    owner = np.repeat(labels, lengths(labels))
    first = np.concatenate(([0], np.cumsum(lengths(labels))))
    row = np.arange(len(owner)) - np.repeat(first[:-1], lengths(labels))
    return ((owner[:, None] * 31 + row[:, None] * 3 + np.arange(3)) % 30_000).astype(np.int16)


def write(path: Path, count: int = COUNT, ragged: bool = False) -> None:
    """Write samples with h5py."""
    import h5py

    labels = np.arange(count, dtype=np.int64)
    with h5py.File(path, "w") as file:
        file["image"] = image(labels)
        file["label"] = labels
        if ragged:
            values, lens = points(labels), lengths(labels)
            group = file.create_group("points")
            group.attrs["dsprep_kind"] = np.bytes_("array")
            group["values"], group["count"] = values, lens
            group["first"] = np.concatenate(([0], np.cumsum(lens)[:-1]))


def wrong(batch: Mapping[str, Any]) -> str:
    """Return what is wrong in a batch: the first sample that is not what its label says."""
    labels = np.asarray(batch["label"])
    if labels.size and not 0 <= labels.min() <= labels.max() < 1 << 31:
        return f"labels from {labels.min()} to {labels.max()}"
    same = (np.asarray(batch["image"]) == image(labels)).reshape(len(labels), -1).all(1)
    if not same.all():
        return f"the image of label {labels[~same][0]} ({(~same).sum()} samples)"
    if "points" in batch:
        ragged = batch["points"]
        if not np.array_equal(ragged.lengths, lengths(labels)):
            return "the numbers of points"
        if not np.array_equal(ragged.values, points(labels)):
            return "the points"
    return ""
