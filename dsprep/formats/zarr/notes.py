"""What a store says that samples have no place for, and what is missing from it: notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsprep.core.schema import Attrs
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import from_json
from dsprep.formats.zarr.fields import Parts, Reading
from dsprep.formats.zarr.store import Store

MAX_FILES = 100_000
"""Files of a store that are looked for when it is opened."""

SHOWN = 8
"""Names in a note."""


def unkept(groups: Mapping[str, Attrs], readings: Sequence[Reading]) -> list[str]:
    """Return which names of axes and which attributes do not become part of the samples.

    Parameters
    ----------
    groups
        The attributes of each group of the store, by path.
    readings
        The fields that are read.
    """
    arrays = [a for r in readings for a in r.arrays]
    named = [name(a) for a in arrays if a.meta.named_axes]
    parts = [r for r in readings if isinstance(r, Parts)]
    fields = {r.field.name for r in parts}
    owners = [name(a) for r in parts for a in r.arrays if from_json(a.meta.attrs)]
    for path, attrs in groups.items():
        above = any(name(a).startswith(f"{path}/") for a in arrays)
        if path and path not in fields and above and from_json(attrs):
            owners.append(path)
    notes = [f"dimension names of {listed(named)} are not kept"] if named else []
    return notes + ([f"attributes of {listed(owners)} are not kept"] if owners else [])


def missing(store: Store, readings: Sequence[Reading]) -> list[str]:
    """Return how many files of each array are missing, for as many files as are soon counted."""
    notes, left = [], MAX_FILES
    for array in (a for r in readings for a in r.arrays if a.meta.shape):
        files = array.meta.files()
        if files > left:
            continue
        left -= files
        gone = store.count_missing(array.meta.file_keys(0, len(array)))
        if gone:
            what = "" if array.complete else " and read as the fill value"
            notes.append(f"{gone} of {files} chunk files of {name(array)} are missing{what}")
    return notes


def name(array: StoredArray) -> str:
    """Return what an array is called in notes."""
    return array.meta.path or "the array"


def listed(names: Sequence[str]) -> str:
    """Return names as a list with commas, the first ones if there are many."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
