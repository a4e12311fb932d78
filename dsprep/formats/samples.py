"""Which of a file's arrays count samples along their first axis: for formats that do not say.

HDF5 and Zarr hold named arrays of any shape. Those that belong to samples share the length of
their first axis; this module finds that length, and says what it left out and why. It sees only
names, shapes and sizes, and does no I/O.
"""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsprep.errors import SchemaError

WHOLE_FILE = (
    frozenset({"climate/data", "climate/labels_0"}),  # DeepCAM: one climate snapshot per file
)
"""Sets of names that are known to mean one sample per file although first axes agree."""

ONE_SAMPLE = "the file is taken as one sample (--sample-axis first counts the first axis instead)"


@dataclass(frozen=True)
class SampleAxis:
    """The outcome of `choose`.

    Attributes
    ----------
    count
        Samples in the file; 1 when the file is one sample.
    whole_file
        Whether the file is one sample, so that no axis counts samples.
    names
        The arrays that are fields, in the order given.
    notes
        What was assumed and left out, one clause each.
    """

    count: int
    whole_file: bool
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def choose(
    arrays: Mapping[str, tuple[tuple[int, ...], int]],
    mode: Literal["auto", "first", "none"],
    where: object = None,
) -> SampleAxis:
    """Return which arrays are fields, and how many samples they hold.

    With ``"auto"`` a file whose arrays all differ in their first axis, or that is known to hold
    one sample, is one sample; otherwise the first-axis length that carries the most bytes among
    those that two arrays share (or, with one array, its own) counts the samples. Arrays without
    rows count none where others have some.

    Parameters
    ----------
    arrays
        Name to ``(shape, bytes)``, in the order in which the file lists them. Not empty.
    mode
        As `OpenOptions.sample_axis`.
    where
        The file, for messages.

    Raises
    ------
    SchemaError
        With ``"auto"``, if the fields would hold less than half of the bytes of all arrays.
    """
    if mode == "none" or (mode == "auto" and is_whole_file(arrays)):
        return SampleAxis(1, True, tuple(arrays), () if mode == "none" else (ONE_SAMPLE,))
    by_length: dict[int, list[str]] = defaultdict(list)
    for name, (shape, _) in arrays.items():
        if shape:
            by_length[shape[0]].append(name)
    if not by_length:
        return SampleAxis(1, True, tuple(arrays), (ONE_SAMPLE,))
    filled = sum(length > 0 for length in by_length)

    def weight(length: int) -> tuple[bool, bool, int, int]:
        names = by_length[length]
        shared = len(names) > 1 or filled == 1
        return length > 0, shared, sum(arrays[n][1] for n in names), len(names)

    count = max(by_length, key=weight)
    chosen = set(by_length[count])
    if mode == "auto":
        check_share(arrays, chosen, f"{count} samples of {listed(by_length[count])}", where)
    notes: list[str] = []
    for length, names in by_length.items():
        if length != count:
            why = f"first axis {length}, not {count} (--field takes them)"
            notes.append(f"left out {listed(names)}: {why}")
    scalars = [name for name, (shape, _) in arrays.items() if not shape]
    if scalars:
        notes.append(f"left out {listed(scalars)}: no axis")
    return SampleAxis(count, False, tuple(n for n in arrays if n in chosen), tuple(notes))


_LONG = 64


def check_axis(
    arrays: Mapping[str, tuple[tuple[int, ...], int]], axis: SampleAxis, where: object
) -> None:
    """Raise `SchemaError` if shapes speak against what `choose` found.

    A file that is taken as one sample may as well hold one sample in each row of its largest array
    if that has many more rows than other elements along an axis. Scalars beside an array with fewer
    rows may as well be those of its only sample, such as the label of an image.
    """
    name, (shape, _) = max(arrays.items(), key=lambda item: item[1][1])
    found = expected = ""
    if axis.whole_file and len(shape) > 0 and shape[0] >= _LONG and shape[0] > sum(shape[1:]):
        if not any(other[:1] == (1,) for other, _ in arrays.values()):
            found, expected = "one sample", f"{shape[0]} samples, by the first axis of {name}"
    elif not axis.whole_file and [n for n, (s, nbytes) in arrays.items() if not s and nbytes < 16]:
        shapes = [arrays[n][0] for n in axis.names]
        if all(len(s) > 1 and s[0] <= max(s[1:]) for s in shapes):
            found = f"{axis.count} samples, by the first axis of {listed([*axis.names])}"
            expected = "one sample, with the scalars beside them"
    if found:
        raise SchemaError(
            "which axis counts the samples is doubtful",
            where=where,
            found=f"{found}; or {expected}",
            fix="say which: --sample-axis first counts the first axis, --sample-axis none takes "
            "the file as one sample, --field NAME the fields that are named",
        )


def check_share(
    arrays: Mapping[str, tuple[tuple[int, ...], int]],
    chosen: set[str],
    reading: str,
    where: object,
) -> None:
    """Raise `SchemaError` if the arrays `chosen` hold less than half of all bytes.

    `reading` says what the file would be taken for.
    """
    total = sum(nbytes for _, nbytes in arrays.values())
    kept = sum(nbytes for name, (_, nbytes) in arrays.items() if name in chosen)
    if 2 * kept >= total:
        return
    others = [f"{n} {_show(shape)}" for n, (shape, _) in arrays.items() if n not in chosen]
    raise SchemaError(
        "which axis counts the samples is doubtful: most of the file would be left out",
        where=where,
        expected="fields with half of the bytes or more",
        found=f"{reading}, without {listed(others)}",
        fix="say which: --sample-axis first takes it so, --sample-axis none takes the file as one "
        "sample, --field NAME the fields that are named",
    )


def _show(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def is_whole_file(arrays: Mapping[str, tuple[tuple[int, ...], int]]) -> bool:
    """Whether nothing in the file looks like a sample axis."""
    if frozenset(arrays) in WHOLE_FILE:
        return True
    lengths = [shape[0] for shape, _ in arrays.values() if shape and shape[0]]
    return len(arrays) > 1 and len(lengths) > 0 and len(set(lengths)) == len(lengths) > 1


def natural_key(path: str | Path) -> list[tuple[int, int, str]]:
    """Return a sort key by which ``part2`` comes before ``part10``."""
    words = re.split(r"(\d+)", str(path))
    return [(1, int(w), w) if w.isdecimal() else (0, 0, w) for w in words]


def listed(names: list[str], most: int = 4) -> str:
    """Return names for a message: all of them, or the first few and how many more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def is_file(entry: os.DirEntry[Any]) -> bool:
    """Return whether it is a regular file, perhaps by way of links that lead to one."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
