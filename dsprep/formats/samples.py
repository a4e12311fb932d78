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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dsprep.core.schema import Attrs
from dsprep.errors import SchemaError
from dsprep.storage.paths import DirectoryEntry

WHOLE_FILE = (
    frozenset({"climate/data", "climate/labels_0"}),  # DeepCAM: one climate snapshot per file
)
"""Sets of names that are known to mean one sample per file although first axes agree."""

SPACE = frozenset(
    (
        "x",
        "y",
        "z",
        "lat",
        "latitude",
        "lon",
        "long",
        "longitude",
        "rlat",
        "rlon",
        "nav_lat",
        "nav_lon",
        "easting",
        "northing",
        "level",
        "lev",
        "plev",
        "isobaricinhpa",
        "height",
        "width",
        "depth",
        "altitude",
        "bottom_top",
        "south_north",
        "west_east",
        "c",
        "channel",
        "channels",
        "band",
        "bands",
        "wavelength",
    )
)
"""Names of dimensions along which there is one sample: a map, an image, a column of air."""

_COORDINATE = re.compile(r"(.*[^a-z])?coord(inate)?s?|t|time")

CONVENTIONS = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
"""Attributes by which other programs change values when they read them."""

ONE_SAMPLE = "the file is taken as one sample (--sample-axis first counts the first axis instead)"


class Sized(NamedTuple):
    """The shape of an array, its bytes, and what its first axis is called if the file names it.

    Arrays whose first axes have two names do not belong to the same samples, whatever their length.
    """

    shape: tuple[int, ...]
    nbytes: int
    axis: str = ""


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
    others
        The arrays that belong to all samples.
    """

    count: int
    whole_file: bool
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def choose(
    arrays: Mapping[str, Sized],
    mode: Literal["auto", "first", "none"],
    where: object = None,
    *,
    named: bool = False,
) -> SampleAxis:
    """Return which arrays are fields, and how many samples they hold.

    With ``"auto"`` a file whose arrays all differ in their first axis, or that is known to hold
    one sample, is one sample; otherwise the first axis that carries the most bytes among
    those that two arrays share (or, with one array, its own) counts the samples. Arrays without
    rows count none where others have some.

    Parameters
    ----------
    arrays
        In the order in which the file lists them. Not empty.
    mode
        As `OpenOptions.sample_axis`.
    where
        The file, for messages.
    named
        Whether the user named the arrays: then they belong together if they are as long.

    Raises
    ------
    SchemaError
        With ``"auto"``, if the fields would hold less than half of the bytes of all arrays, or what
        would count the samples is a dimension of space.
    """
    if mode == "none" or (mode == "auto" and is_whole_file(arrays)):
        return SampleAxis(1, True, tuple(arrays), () if mode == "none" else (ONE_SAMPLE,))
    by_axis: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name, array in arrays.items():
        if array.shape:
            by_axis[array.shape[0], "" if named else array.axis].append(name)
    if not by_axis:
        return SampleAxis(1, True, tuple(arrays), (ONE_SAMPLE,))
    filled = len({length for length, _ in by_axis if length > 0})

    def along(length: int, axis: str) -> list[str]:
        """Return the arrays along an axis, and those of its length whose axis has no name."""
        return [*by_axis[length, axis], *(by_axis.get((length, ""), ()) if axis else ())]

    def weight(key: tuple[int, str]) -> tuple[bool, bool, int, int]:
        names = along(*key)
        shared = len(names) > 1 or filled == 1
        return key[0] > 0, shared, sum(arrays[n].nbytes for n in names), len(names)

    count, axis = max(by_axis, key=weight)
    chosen = set(along(count, axis))
    names = tuple(n for n in arrays if n in chosen)
    axes = {arrays[n].axis for n in names}
    axis = axes.pop() if len(axes) == 1 else axis
    if mode == "auto":
        if not named or any(len(arrays[n].shape) > 1 for n in names):
            _check_dimension(axis, count, names, where)
        check_share(arrays, chosen, f"{count} samples of {listed([*names])}", where)
    static = static_among(arrays, names)
    notes = [f"left out {listed([*static])}: {STATIC}"] if static else []
    for (length, other), others in by_axis.items():
        if lost := [n for n in others if n not in chosen and n not in static]:
            first, taken = (length, count) if length != count else (other or "unnamed", axis)
            notes.append(f"left out {listed(lost)}: first axis {first}, not {taken}")
    scalars = [n for n, array in arrays.items() if not array.shape and n not in static]
    if scalars:
        notes.append(f"left out {listed(scalars)}: no axis")
    if axis:
        notes.append(counted_along(axis))
    return SampleAxis(count, False, names, tuple(notes), static)


STATIC_NBYTES, NAMED_NBYTES, MOST_STATIC = 1 << 20, 64 << 20, 256
"""Bytes of the largest array that may belong to all samples: of any one, and of those whose first
axis has a name, together; and how many there may be."""


def static_among(arrays: Mapping[str, Sized], fields: Iterable[str]) -> tuple[str, ...]:
    """Return the arrays that are no fields and may belong to all samples, if they are not many."""
    others = {n: a for n, a in arrays.items() if n not in frozenset(fields)}
    limits = {n: NAMED_NBYTES if a.axis else STATIC_NBYTES for n, a in others.items()}
    static = tuple(n for n, a in others.items() if 0 < a.nbytes <= limits[n])
    few = len(static) <= MOST_STATIC and sum(others[n].nbytes for n in static) <= NAMED_NBYTES
    return static if few else ()


STATIC = "not per sample, kept as they are by convert and repack"
"""Why arrays that belong to all samples are no fields."""


def not_of_samples(name: str, rows: object, axis: SampleAxis, where: object) -> SchemaError:
    """Return the error for a field that was named among others and does not count the samples."""
    return SchemaError(
        f"{name} has no value for each sample of {axis.names[0]}",
        where=where,
        expected=f"{axis.count} along the first axis",
        found=rows,
        fix=f"leave out --field {name}: what is small, or along the same axes, is kept beside the "
        "samples; or take the file as one sample with --sample-axis none",
    )


def counted_along(axis: str) -> str:
    """Return the note that names the dimension which counts the samples."""
    return f"samples are counted along {axis}"


def _check_dimension(axis: str, count: int, names: Sequence[str], where: object) -> None:
    if axis.rpartition("/")[2].lower() in SPACE:
        raise SchemaError(
            f"which axis counts the samples is doubtful: {axis} usually is part of a sample",
            where=where,
            found=f"{count} samples of {listed([*names])}, counted along {axis}",
            fix="say which: --sample-axis first takes it so, --sample-axis none takes the file as "
            "one sample",
        )


_LONG = 64

_ROWS = 16
"""Rows from which on arrays of nearly equal lengths look like samples of which some are lost."""

_FORM = bytes(ord("0" if 48 <= c < 58 else "a" if c < 128 else "?") for c in range(256))


def check_axis(arrays: Mapping[str, Sized], axis: SampleAxis, where: object) -> None:
    """Raise `SchemaError` if shapes speak against what `choose` found.

    A file that is taken as one sample may as well hold one sample in each row of its largest array
    if that has many more rows than other elements along an axis. Scalars beside an array with fewer
    rows may as well be those of its only sample, such as the label of an image.
    """
    name, (shape, *_) = max(arrays.items(), key=lambda item: item[1].nbytes)
    stated = expected = ""
    if axis.whole_file and len(shape) > 0 and shape[0] >= _LONG and shape[0] > sum(shape[1:]):
        if not any(other.shape[:1] == (1,) for other in arrays.values()):
            stated, expected = "one sample", f"{shape[0]} samples, by the first axis of {name}"
    elif not axis.whole_file and any(not a.shape and a.nbytes < 16 for a in arrays.values()):
        shapes = [arrays[n].shape for n in axis.names]
        if all(len(s) > 1 and s[0] <= max(s[1:]) for s in shapes):
            stated = f"{axis.count} samples, by the first axis of {listed([*axis.names])}"
            expected = "one sample, with the scalars beside them"
    elif axis.whole_file and (unequal := _nearly_equal(arrays)):
        stated, expected = "one sample", f"samples along the first axes, of which {unequal}"
    if stated:
        raise SchemaError(
            "which axis counts the samples is doubtful",
            where=where,
            found=f"{stated}; or {expected}",
            fix="say which: --sample-axis first counts the first axis, --sample-axis none takes "
            "the file as one sample, --field NAME the fields that are named",
        )


def _nearly_equal(arrays: Mapping[str, Sized]) -> str:
    """Return which arrays have some rows more than others, in words; empty: they are not alike.

    A tenth of the rows may have been lost; arrays with edges of bins have one row more, too.
    """
    by_rows = sorted((a.shape[0], name) for name, a in arrays.items() if a.shape)
    if len(by_rows) < len(arrays) or not by_rows:
        return ""
    (least, some), (most, other) = by_rows[0], by_rows[-1]
    alike = least < most and most >= _ROWS and 10 * (most - least) <= most
    return f"{other} has {most} and {some} has {least}" if alike else ""


def check_share(
    arrays: Mapping[str, Sized],
    chosen: set[str],
    reading: str,
    where: object,
) -> None:
    """Raise `SchemaError` if the arrays `chosen` hold less than half of all bytes.

    `reading` says what the file would be taken for.
    """
    total = sum(array.nbytes for array in arrays.values())
    kept = sum(array.nbytes for name, array in arrays.items() if name in chosen)
    if 2 * kept >= total:
        return
    others = [f"{n} {_show(array.shape)}" for n, array in arrays.items() if n not in chosen]
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


def is_whole_file(arrays: Mapping[str, Sized]) -> bool:
    """Whether nothing in the file looks like a sample axis."""
    if frozenset(arrays) in WHOLE_FILE:
        return True
    lengths = [array.shape[0] for array in arrays.values() if array.shape and array.shape[0]]
    return len(set(lengths)) == len(lengths) > 1 and not has_coordinates(arrays)


def has_coordinates(arrays: Mapping[str, Sized]) -> bool:
    """Whether all but one array are coordinates of that one's inner axes, which its samples have.

    Those of an axis are as many as it is long, or one more: the edges of its cells. One that is
    called ``y`` alone may as well be what is to be learned.
    """
    largest = max(arrays, key=lambda name: arrays[name].nbytes)
    inner = {n for length in arrays[largest].shape[1:] for n in (length, length + 1)}
    others = [name for name, array in arrays.items() if name != largest and array.shape]
    last = [name.rpartition("/")[2].lower() for name in others]
    return (
        all(len(arrays[n].shape) == 1 and arrays[n].shape[0] in inner for n in others)
        and all(n in SPACE or _COORDINATE.fullmatch(n) for n in last)
        and (len(last) > 1 or len(last[0]) > 1)
    )


def unapplied(fields: Mapping[str, Attrs]) -> list[str]:
    """Return the note on attributes by which other programs change the values of fields, if any."""
    changing = {
        name: [c for c in CONVENTIONS if c in attrs and not is_nan(attrs[c])]
        for name, attrs in fields.items()
    }
    names = [name for name, changed in changing.items() if changed]
    if not names:
        return []
    words = [c for c in CONVENTIONS if any(c in changing[n] for n in names)]
    problem = f"{listed(words)} of {listed(names)}"
    return [f"values are as stored: {problem} are not applied (dsprep.mask_and_scale does)"]


def is_nan(value: object) -> bool:
    """Whether an attribute is NaN, which stands for itself."""
    return isinstance(value, float | np.floating | np.ndarray) and bool(np.all(value != value))


def natural_key(path: str | Path) -> list[tuple[int, int, str]]:
    """Return a sort key by which ``part2`` comes before ``part10``."""
    words = re.split(r"(\d+)", str(path))
    return [(1, int(w), w) if w.isdecimal() else (0, 0, w) for w in words]


def natural_order(names: list[bytes]) -> list[int]:
    """Return the numbers of names in natural order, as `natural_key` gives it."""
    if _plain_digits(names):
        return sorted(range(len(names)), key=names.__getitem__)
    keys = [natural_key(os.fsdecode(name)) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def _plain_digits(names: Iterable[bytes]) -> bool:
    """Whether all names are ASCII, with digits at the same places: their bytes sort them."""
    forms = {name.translate(_FORM) for name in names}
    return len(forms) <= 1 and not any(b"?" in form for form in forms)


def listed(names: list[str], limit: int = 4) -> str:
    """Return names for a message: all of them, or the first few and how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def is_file(entry: DirectoryEntry) -> bool:
    """Return whether it is a regular file, perhaps by way of links that lead to one."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
