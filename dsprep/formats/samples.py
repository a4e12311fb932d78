"""The arrays of a file that count samples along their first axis: for formats that do not say.

HDF5 and Zarr hold named arrays of any shape. Those that belong to samples share the length of
their first axis; this module finds that length, and says what it left out and why. It sees only
names, shapes and sizes, and does no I/O.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dsprep.core.schema import Attrs, FieldSpec
from dsprep.errors import AmbiguousError, SchemaError
from dsprep.formats.foreign import WAY_OUT
from dsprep.storage.paths import DirectoryEntry

SPACE = (
    " x y z lat latitude lon long longitude rlat rlon nav_lat nav_lon easting northing level lev "
    "plev isobaricinhpa height width depth altitude bottom_top south_north west_east c channel "
    "channels band bands wavelength "
)
"""Names of dimensions along which there is one sample: a map, an image, a column of air."""

CONVENTIONS = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
"""Attributes by which other programs change values when they read them."""

Readings: TypeAlias = Sequence[tuple[str, str]]
"""Options that choose a reading, and what each gives: see `AmbiguousError`."""

ONE_SAMPLE = "the file is taken as one sample (--sample-axis first counts the first axis instead)"


class Sized(NamedTuple):
    """The shape of an array, its bytes, its dtype, and the name of its first axis, if it has one.

    Arrays whose first axes have two names do not belong to the same samples, whatever their length.
    """

    shape: tuple[int, ...]
    nbytes: int
    axis: str = ""
    dtype: np.dtype[Any] | None = None


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
    mode: str,
    where: object = None,
    *,
    named: bool = False,
    grouped: bool = True,
    more: Callable[[], Readings] = list,
) -> SampleAxis:
    """Return the arrays that are fields, and the number of their samples.

    ``"first"`` takes the first axis that carries the most bytes.

    Parameters
    ----------
    arrays
        In the order in which the file lists them. Not empty.
    mode
        ``"auto"``, ``"first"`` or ``"none"``, as `OpenOptions.sample_axis`.
    where
        The file, for messages.
    named
        Whether the user named the arrays: then they belong together if they are as long.
    grouped
        Whether groups that are alike may be samples.
    more
        Returns the readings that what the arrays hold adds to those of their shapes.

    Raises
    ------
    AmbiguousError
        With ``"auto"``, unless all arrays agree in their first axis and nothing else they share.
    SchemaError
        If not all arrays that the user named have that axis.
    """
    if mode == "none" or not any(array.shape for array in arrays.values()):
        return SampleAxis(1, True, tuple(arrays), () if mode == "none" else (ONE_SAMPLE,))
    if mode == "auto":
        reason = _doubt(arrays, named, grouped)
        if reason:
            raise ambiguous(reason, arrays, where, more=more())
    by_axis: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name, array in arrays.items():
        if array.shape:
            by_axis[array.shape[0], "" if named else array.axis].append(name)
    along = {  # with those of its length whose axis has no name
        (length, axis): [*names, *(by_axis.get((length, ""), ()) if axis else ())]
        for (length, axis), names in by_axis.items()
    }

    def weight(key: tuple[int, str]) -> tuple[bool, int, int]:
        return key[0] > 0, sum(arrays[n].nbytes for n in along[key]), len(along[key])

    count, axis = max(by_axis, key=weight)
    chosen = set(along[count, axis])
    names = tuple(n for n in arrays if n in chosen)
    axes = {arrays[n].axis for n in names}
    axis = axes.pop() if len(axes) == 1 else axis
    static = static_among(arrays, names)
    notes = [f"left out {listed([*static])}: {STATIC}"] if static else []
    if lost := [n for n in arrays if n not in chosen and n not in static]:
        notes.append(f"left out {listed(lost)}: their first axes do not count the {count} samples")
    if axis:
        notes.append(counted_along(axis))
    sample_axis = SampleAxis(count, False, names, tuple(notes), static)
    for name in (n for n in arrays if named and n not in chosen):
        raise not_of_samples(name, (*arrays[name].shape, "no axis")[0], sample_axis, where)
    return sample_axis


STATIC_NBYTES, NAMED_NBYTES, MOST_STATIC = 1 << 20, 64 << 20, 256
"""Bytes of the largest array that may belong to all samples: of any one, and of those whose first
axis has a name, together; and how many there may be."""


def static_among(arrays: Mapping[str, Sized], fields: Iterable[str]) -> tuple[str, ...]:
    """Return the arrays that are not fields and may belong to all samples, if they are not many."""
    others = {n: a for n, a in arrays.items() if n not in frozenset(fields)}
    limits = {n: NAMED_NBYTES if a.axis else STATIC_NBYTES for n, a in others.items()}
    static = tuple(n for n, a in others.items() if 0 < a.nbytes <= limits[n])
    few = len(static) <= MOST_STATIC and sum(others[n].nbytes for n in static) <= NAMED_NBYTES
    return static if few else ()


STATIC = "not per sample, kept as they are by convert and repack"
"""The reason why arrays that belong to all samples are not fields."""


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


def _doubt(arrays: Mapping[str, Sized], named: bool, grouped: bool) -> str:
    """Return why the arrays may be read in several ways; "" if only one is possible."""
    counting = {n: a.shape for n, a in arrays.items() if a.shape}
    axes: Counter[str] = Counter()
    for n in counting if not named else ():
        axes[arrays[n].axis] += arrays[n].nbytes
    if axes and "" not in axes:  # others than that of most bytes are of places, not of samples
        axis = axes.most_common(1)[0][0]
        if f" {axis.rpartition('/')[2].lower()} " in SPACE:
            return f"{axis} usually is part of a sample"
        lengths = {k for n, shape in counting.items() if arrays[n].axis == axis for k in shape[1:]}
        others = (n for n in counting if arrays[n].axis not in (axis, n))
        apart = next((n for n in others if counting[n][0] not in lengths), "")
        return f"{apart} is not along {axis}, nor along another axis of its arrays" if apart else ""
    if len({shape[0] for shape in counting.values()}) > 1 or len(axes) > 2:
        return "its arrays differ in their first axes"
    if any(not array.shape for array in arrays.values()):
        return "there are scalars beside arrays"
    beside = side_by_side(arrays) if grouped and not named and any("/" in n for n in arrays) else []
    if any(not each.odd and each.members != ("",) for each in beside):
        return "groups that are alike may be samples"
    inner = [shape for shape in counting.values() if len(shape) > 1]
    square = all(shape[0] == shape[1] for shape in inner)
    second = len({shape[1] for shape in inner}) == 1 and inner[0][1] > 1
    if second and (square or len(inner) == len(counting) > 1):
        return "its arrays agree in their second axis, too"
    return ""


class Beside(NamedTuple):
    """Groups side by side, or arrays (whose only member is ``""``), that may be samples.

    `members` are those that all have, `pattern` is how ``--field`` spells the groups, which are
    those that hold what most of them do; `odd` is one that holds more or less, or ``""``.
    """

    pattern: str
    groups: tuple[str, ...]
    members: tuple[str, ...]
    odd: str

    def options(self) -> str:
        """Return the options that take the members by their pattern."""
        names = [m.rpartition("/")[2] or "values" for m in self.members[:MOST_READINGS]]
        pairs = zip(names, self.members[:MOST_READINGS], strict=True)
        fields = (shlex.quote(f"{n}={self.pattern}/{m}".rstrip("/")) for n, m in pairs)
        return " ".join(f"--field {field}" for field in fields)


def matching(paths: Iterable[str], pattern: str) -> Beside:
    """Return the groups or arrays that a pattern such as ``data/*`` stands for.

    A ``*`` stands for one name, or for a part of it.
    """
    depth = pattern.count("/") + 1
    words = re.compile("[^/]*".join(map(re.escape, pattern.split("*"))))
    by_group: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split("/")
        by_group.setdefault("/".join(parts[:depth]), []).append("/".join(parts[depth:]))
    return _beside(pattern, {g: names for g, names in by_group.items() if words.fullmatch(g)})


def _beside(pattern: str, by_group: Mapping[str, Sequence[str]]) -> Beside:
    """Return groups as samples, or arrays if there are no groups, by what is in each of them."""
    by_group = {g: m for g, m in by_group.items() if "" not in m} or by_group
    counts = Counter(member for members in by_group.values() for member in members)
    common = counts.most_common(1)[0][0] if counts else ""
    groups = sorted((g for g in by_group if common in by_group[g]), key=natural_key)
    by_member = Counter(m for group in groups for m in by_group[group])
    members = [m for m in by_member if by_member[m] == len(groups)]
    odd = [group for group in by_group if len(by_group[group]) != len(members)]
    return Beside(pattern, tuple(groups), tuple(members), (*odd, "")[0])


def side_by_side(paths: Iterable[str]) -> list[Beside]:
    """Return each way in which groups are samples, only those next to the root; or else arrays."""
    inside: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        parts = path.split("/")
        for k in range(1, len(parts) + 1):
            groups = inside.setdefault("/".join(parts[: k - 1]), {})
            groups.setdefault("/".join(parts[:k]), []).append("/".join(parts[k:]))
    every = [_beside(f"{parent}/*".lstrip("/"), inside[parent]) for parent in inside]
    every = [each for each in every if len(each.groups) > 1 and each.members]
    apart = [each for each in every if each.members != ("",)] or every
    depth = min((each.pattern.count("/") for each in apart), default=0)
    apart = [each for each in apart if each.pattern.count("/") == depth]
    return sorted(apart, key=lambda each: natural_key(each.pattern))


def groups_named(paths: Iterable[str], specs: Sequence[FieldSpec]) -> list[Beside]:
    """Return the groups that patterns in fields stand for, or else those that are side by side."""
    matches = (_GROUPS.match(spec.path) for spec in specs)
    patterns = sorted({match[0] for match in matches if match})
    paths = list(paths)
    return [matching(paths, pattern) for pattern in patterns] or side_by_side(paths)


_GROUPS = re.compile(r".*\*[^/]*")
"""The part of a path behind which a member follows: up to the last name with a ``*``."""


def ambiguous(
    reason: str,
    arrays: Mapping[str, Sized],
    where: object,
    *,
    groups_only: bool = False,
    more: Readings = (),
) -> AmbiguousError:
    """Return the error for a file that can be read in several ways, with all of these."""
    readings, beside = [*more], side_by_side(arrays)
    alone = beside[0].pattern if len(beside) == 1 else ""
    for each in [*beside]:
        groups = [matching(arrays, f"{group}/*") for group in each.groups[:MOST_GROUPS]]
        if all(len(g.groups) > 1 and g.members not in ((), ("",)) for g in groups):
            beside += [matching(arrays, f"{each.pattern}/*"), *groups]
    for each in beside:
        alike = tuple(m for m in each.members if _alike(each, m, arrays))
        if alike:
            options = each._replace(members=alike).options()
            option = "--sample-axis groups" if each.pattern == alone else options
            shown = show_reading(len(each.groups), [m or "values" for m in alike])
            readings.append((option, shown))
    del readings[MOST_READINGS:]
    shapes = {n: array.shape for n, array in arrays.items() if array.shape}
    if shapes and not groups_only:
        last = {shape[-1] for shape in shapes.values()}
        if len(last) == 1 and any(len(shape) > 1 for shape in shapes.values()):
            readings.append(("--sample-axis last", show_reading(last.pop(), [*shapes])))
        first = choose(arrays, "first")
        readings.append(("--sample-axis first", show_reading(first.count, first.names)))
    if not groups_only:
        readings.append(("--sample-axis none", show_reading(1, [*arrays])))
    return AmbiguousError(reason, readings, where=where, fix=WAY_OUT)


def _alike(beside: Beside, member: str, arrays: Mapping[str, Sized]) -> bool:
    """Return whether the arrays of a member in all groups differ in their first axes at most."""
    every = [arrays[f"{group}/{member}".rstrip("/")] for group in beside.groups]
    kinds = {(each.dtype, len(each.shape), each.shape[1:]) for each in every}
    return len(kinds) == 1 and (member != "" or every[0].shape != ())


def show_reading(count: int, names: Sequence[str]) -> str:
    """Return what a reading gives."""
    return f"{count} sample{'s' * (count != 1)} with {listed([*names])}"


MOST_READINGS, MOST_GROUPS = 8, 3


def counted_along(axis: str) -> str:
    """Return the note that names the dimension which counts the samples."""
    return f"samples are counted along {axis}"


_FORM = bytes(ord("0" if 48 <= c < 58 else "a" if c < 128 else "?") for c in range(256))


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
    """Return whether an attribute is NaN, which stands for itself."""
    return isinstance(value, float | np.floating | np.ndarray) and bool(np.all(value != value))


def natural_key(path: str | Path) -> list[tuple[int, int, str]]:
    """Return a sort key by which ``part2`` comes before ``part10``."""
    words = re.split(r"(\d+)", str(path))
    return [(1, int(w), w) if w.isdecimal() else (0, 0, w) for w in words]


def natural_order(names: list[bytes]) -> list[int]:
    """Return the numbers of names in natural order, as `natural_key` gives it."""
    # All ASCII, with digits at the same places: their bytes sort them.
    forms = {name.translate(_FORM) for name in names}
    if len(forms) <= 1 and not any(b"?" in form for form in forms):
        return sorted(range(len(names)), key=names.__getitem__)
    keys = [natural_key(os.fsdecode(name)) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


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
