"""Neighbours that are alike: samples that are sorted by a field, such as their class.

Such data train badly where only groups are shuffled: a batch sees few of the classes. A bounded
sample is examined: runs of consecutive samples, spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsprep.core.schema import Array, Schema
from dsprep.errors import DsprepError
from dsprep.sidecar.sidecar import Sidecar

RUNS, LENGTH = 8, 64
"""Runs that are examined, and samples of each."""

FIELDS = 4
"""Fields that are examined, at most."""

CONSTANT = 0.75
"""Share of the runs that have one value throughout, from which on samples count as sorted."""

COMMON = 0.7
"""Chance that two random samples agree, from which on long runs of one value are no wonder."""


class OrderWarning(UserWarning):
    """Samples are sorted by a field, and are not mixed enough for training."""


def sorted_by(
    schema: Schema, count: int, read: Callable[[str, int, int], Array], length: int = LENGTH
) -> str:
    """Return the field by which samples are sorted; empty if there is none.

    Only fields of one integer are examined.

    Parameters
    ----------
    schema
        The fields.
    count
        Samples.
    read
        Returns the values of a field of the samples ``start <= i < stop``.
    length
        Samples of a run.
    """
    if count < RUNS * length or length < 2:
        return ""
    names = [f.name for f in schema if not f.ragged and not f.shape and f.dtype.kind in "biu"]
    starts = np.linspace(0, count - length, RUNS).astype(np.int64).tolist()
    for name in names[:FIELDS]:
        runs = np.stack([read(name, start, start + length) for start in starts])
        constant = (runs == runs[:, :1]).all(axis=1).mean()
        _, counts = np.unique(runs, return_counts=True)
        if constant >= CONSTANT and float(((counts / runs.size) ** 2).sum()) < COMMON:
            return name
    return ""


def sorting_field(opened: Sidecar) -> str:
    """Return the field by which the samples of a dataset are sorted; empty if there is none.

    Data that were shuffled when written are not examined; what cannot be read is reported by the
    reader that needs it.
    """
    if opened.content.lineage.get("shuffle") is not None:
        return ""

    def read(name: str, start: int, stop: int) -> Array:
        return opened.read(slice(start, stop), (name,))[name]  # type: ignore[return-value]

    try:
        return sorted_by(opened.schema, len(opened), read)
    except (DsprepError, OSError):
        return ""
