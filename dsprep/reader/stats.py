"""Statistics of fields in one pass over the samples, and `normalise`, which takes them.

Values come in blocks that stay in a core's cache. What is summed of a block are differences from a
value within it, and blocks are merged as Chan, Golub and LeVeque do, in the order of the samples:
large offsets cost no digits, and the result is the same on any number of threads.

Results are kept in a file beside the sidecar, not in it: the sidecar and whatever has its digest
stay as they are, and datasets without one have them, too. That file says what the data were and
of the sidecar, and is used only while these are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.memory import allowed_memory
from dsprep.core.packing import digest
from dsprep.core.schema import Arena, Array, Batch, Column, Field, Ints, Ragged, is_extension
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.formats.options import memory_error
from dsprep.formats.samples import CONVENTIONS
from dsprep.reader.hidden import load_hidden, save_hidden
from dsprep.reader.scaling import PACKING, is_stored, unpacking
from dsprep.reader.subset import Subset, kept_samples
from dsprep.reader.transforms import FieldTransform, Function
from dsprep.sidecar.spec import sidecar_path
from dsprep.source.dataset import open_dataset
from dsprep.source.derived import DerivedSource
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.identity import Identities, Identity, unchanged
from dsprep.storage.paths import StorePath
from dsprep.writing.create_sidecar import dataset_of
from dsprep.writing.plan import PIECE_NBYTES, payload_nbytes, pieces

CLASSES = 1000
"""Distinct values of a field up to which each is counted."""

LONGEST = 256
"""Bytes of a string up to which it may be the name of a class."""

BLOCK = 1 << 15
"""Values that are summed at a time: as float64, a part of a core's cache."""

COPIES = 4
"""Copies of a piece in memory: as stored, decoded, selected, and what is computed of it."""


@dataclass(frozen=True)
class FieldStats:
    """Statistics of one field.

    Attributes
    ----------
    samples, count
        Samples, and values in them.
    min, max, mean, std
        Of the finite values, unpacked as `mask_and_scale` does; `std` is that of the population.
        None if there are none, or the values are not real numbers.
    nans, infinities
        How many values are not finite.
    lengths
        Of ragged fields: rows per sample (bytes for `bytes` and `str`), least, mean and most.
    classes
        How many samples have each value, rising, of fields that are one integer, bool or string a
        sample, with at most `CLASSES` values; else None.
    missing
        How many values are missing by the attributes of the field, which nothing else counts.
    field
        What they are of.
    """

    samples: int
    count: int
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    std: float | None = None
    nans: int = 0
    infinities: int = 0
    lengths: tuple[int, float, int] | None = None
    classes: Mapping[Any, int] | None = None
    missing: int = 0
    field: Field | None = dataclass_field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; classes as a list of [value, samples]."""
        classes = None if self.classes is None else [[k, n] for k, n in self.classes.items()]
        return {n: v for n, v in vars(self).items() if n != "field"} | {"classes": classes}

    @classmethod
    def from_json(cls, given: Any, field: Field) -> FieldStats:
        """Return what `to_json` gave of a field."""
        classes = None if given["classes"] is None else MappingProxyType(dict(given["classes"]))
        lengths = None if given["lengths"] is None else tuple(given["lengths"])
        return cls(**{**given, "classes": classes, "lengths": lengths}, field=field)


@dataclass
class Moments:
    """Sums of values, of which the mean is `base` + `offset`; `m2` are the squares around it."""

    count: int = 0
    low: Any = None
    high: Any = None
    base: Any = 0
    offset: float = 0.0
    m2: float = 0.0
    nans: int = 0
    infinities: int = 0
    missing: int = 0

    def merge(self, other: Moments) -> None:
        """Add the values of another one."""
        self.nans += other.nans
        self.infinities += other.infinities
        self.missing += other.missing
        if not other.count:
            return
        if not self.count:
            self.low, self.high, self.base = other.low, other.high, other.base
        total = self.count + other.count
        delta = float(other.base - self.base) + other.offset - self.offset
        self.m2 += other.m2 + delta * delta * (self.count * other.count / total)
        self.offset += delta * (other.count / total)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count = total

    def add(self, values: Array, unpack: Function | None = None) -> None:
        """Add values of a dtype that `is_number`, of any shape; `unpack` makes missing ones NaN."""
        rows = max(1, BLOCK // max(1, values[:1].size))
        scratch = np.empty(min(BLOCK, values.size))
        with np.errstate(all="ignore"):
            for i in range(0, len(values), rows):
                flat = values[i : i + rows].reshape(-1)
                for j in range(0, flat.size, BLOCK):
                    block = flat[j : j + BLOCK]
                    moments = _block(_plain(unpack(block) if unpack else block), scratch)
                    if unpack:
                        nans = int(np.count_nonzero(np.isnan(block)))
                        moments.nans, moments.missing = nans, moments.nans - nans
                    self.merge(moments)


def _plain(values: Array) -> Array:
    """Return values as native numbers that numpy is fast with."""
    dtype = values.dtype
    if dtype.kind == "b":
        return values.view(np.uint8)
    if is_extension(dtype) or dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _block(values: Array, scratch: Array) -> Moments:
    """Return the moments of some values, at least one."""
    low, high = values.min(), values.max()
    if values.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
        finite = values[np.isfinite(values)]
        some = _block(finite, scratch) if len(finite) else Moments()
        some.nans = int(np.count_nonzero(np.isnan(values)))
        some.infinities = len(values) - len(finite) - some.nans
        return some
    base: Any
    differences = scratch[: len(values)]
    if values.dtype.kind in "iu":
        low, high = int(low), int(high)
        base = low
    else:
        low, high = float(low), float(high)
        base = low / 2 + high / 2
    if values.dtype.kind in "iu" and values.itemsize == 8:  # exact, where float64 is not
        differences[:] = values.view(np.uint64) - np.uint64(base % (1 << 64))
    else:
        np.subtract(values, base, out=differences, dtype=np.float64)
    total = float(differences.sum())
    squares = float(np.einsum("i,i->", differences, differences))
    offset = total / len(values)
    return Moments(len(values), low, high, base, offset, max(0.0, squares - total * offset))


def is_number(f: Field) -> bool:
    """Return whether the values of a field are real numbers."""
    return f.kind == "array" and (f.dtype.kind in "biuf" or is_extension(f.dtype))


@dataclass
class FieldSums:
    """Sums over a field after some samples."""

    samples: int = 0
    count: int = 0
    values: Moments = dataclass_field(default_factory=Moments)
    lengths: Moments = dataclass_field(default_factory=Moments)
    classes: dict[Any, int] | None = dataclass_field(default_factory=dict)

    @classmethod
    def of(cls, f: Field, column: Column) -> FieldSums:
        """Return those of some samples."""
        sums = cls(len(column))
        values: Any = column
        if isinstance(column, Ragged):
            values = column.values[int(column.offsets[0]) : int(column.offsets[-1])]
            sums.lengths.add(column.lengths)
        sums.count = int(values.size)
        unpack = unpacking(f)
        if is_number(f):
            sums.values.add(values, unpack)
        if unpack is None or not _has_classes(f):
            sums.classes = _classes(f, column)
        elif f.attrs.keys() & CONVENTIONS[:2]:
            sums.classes = None  # they would be those of the packed values
        else:
            sums.classes = _classes(f, values[~np.isnan(unpack(values))])
        return sums

    def merge(self, other: FieldSums) -> None:
        """Add later samples."""
        self.samples += other.samples
        self.count += other.count
        self.values.merge(other.values)
        self.lengths.merge(other.lengths)
        if self.classes is None or other.classes is None:
            self.classes = None
            return
        for name, count in other.classes.items():
            self.classes[name] = self.classes.get(name, 0) + count
        if len(self.classes) > CLASSES:
            self.classes = None

    def result(self, f: Field) -> FieldStats:
        """Return the statistics."""
        lengths, values, classes = None, self.values, self.classes
        if f.ragged and self.samples:
            mean = self.lengths.base + self.lengths.offset
            lengths = self.lengths.low, mean, self.lengths.high
        if classes is not None:
            classes = dict(sorted(classes.items()))
        mean = std = None
        if values.count:
            mean, std = float(values.base + values.offset), float(np.sqrt(values.m2 / values.count))
        return FieldStats(
            *(self.samples, self.count, values.low, values.high, mean, std),
            *(values.nans, values.infinities, lengths),
            None if classes is None or not _has_classes(f) else MappingProxyType(classes),
            *(values.missing, f),
        )


def _has_classes(f: Field) -> bool:
    return f.kind == "str" or (f.shape == () and f.dtype.kind in "biuU")


def _classes(f: Field, column: Column) -> dict[Any, int] | None:
    """Return how many samples have each value; None if there are too many values."""
    if not _has_classes(f) or not len(column):
        return {} if _has_classes(f) else None
    if isinstance(column, Ragged):
        if column.lengths.max() > LONGEST:
            return None
        counts: Counter[Any] = Counter()
        for i in range(0, len(column), CLASSES):
            counts.update(column[i : i + CLASSES])
            if len(counts) > CLASSES:
                return None
        return dict(counts)
    values: Any = np.asarray(column)
    if len(values) > 1 << 16 and len(np.unique(values[: 1 << 14])) > CLASSES:
        return None  # known before all of them are sorted
    names, numbers = np.unique(values, return_counts=True)
    if len(names) > CLASSES:
        return None
    return dict(zip(names.tolist(), numbers.tolist(), strict=True))


def stats(
    path: str | Path | Source,
    fields: Sequence[str] | str | None = None,
    subset: Any = None,
    *,
    workers: int | None = None,
    memory: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Mapping[str, FieldStats]:
    """Return statistics of fields, computed in one pass, or as an earlier pass has kept them.

    Parameters
    ----------
    path
        A dataset, or an opened one.
    fields
        Their names; None: all.
    subset
        Which samples, as of a `Reader`; None: all. Normalise with those of the training part.
    workers
        Threads; None: the cores of this process, at most 8.
    memory
        Bytes that may be taken; None: a quarter of what is free.
    progress
        Called with (samples, payload bytes) so far.

    Returns
    -------
    mapping
        Field name to `FieldStats`.

    Raises
    ------
    ChangedError
        If the data changed meanwhile.
    DsprepError, OSError
        If there are no such fields or samples, or data cannot be read.
    """
    with ExitStack() as stack:
        if isinstance(path, Source):
            source = path
        else:
            source = stack.enter_context(open_dataset(path, marked=True))
        given = (fields,) if isinstance(fields, str) else fields
        everything = source.schema.names
        names = everything if given is None else tuple(source.schema[n].name for n in given)
        chosen = Subset.of(subset)
        kept = None if chosen is None else _kept(source, chosen)
        known = source.identities()
        stack.enter_context(unchanged(known))
        target = _kept_path(source, names, kept)
        for where in (target, _kept_path(source, everything, kept)):  # those of all fields serve
            parse = partial(_parse, source=source, known=known, names=names)
            if where is not None and (known_stats := load_hidden(where, source.files()[0], parse)):
                return MappingProxyType(known_stats)
        reading = _narrowed(source, names)
        if kept is not None:
            reading = DerivedSource(reading, kept)
        sums = _sums(reading, names, workers, allowed_memory(memory), progress)
        result = {n: sums[n].result(source.schema[n]) for n in names}
        if target is not None:
            by_field = {name: each.to_json() for name, each in result.items()}
            content = {"files": [now.to_json() for _, now in known], "fields": by_field}
            stated = digest(json.dumps(content).encode())
            save_hidden(target, json.dumps({**content, "digest": stated}).encode())
        return MappingProxyType(result)


def _parse(
    data: bytes, source: Source, known: Identities, names: Sequence[str]
) -> dict[str, FieldStats]:
    """Return the statistics that a file keeps, none if it is of other data."""
    kept = json.loads(data)
    if kept.pop("digest") != digest(json.dumps(kept).encode()):
        raise ValueError("it has another digest")
    same = len(kept["files"]) == len(known) and not any(
        Identity.from_json(old).changed(path)
        for old, (path, _) in zip(kept["files"], known, strict=True)
    )
    fields = kept["fields"] if same else {}
    return {n: FieldStats.from_json(fields[n], source.schema[n]) for n in names if same}


def _kept(source: Source, subset: Subset) -> Ints:
    """Return the samples of a subset."""
    if isinstance(source, SidecarSource):
        return kept_samples(subset, source.sidecar)
    return subset.samples(len(source), lambda _: source)


def _narrowed(source: Source, names: Sequence[str]) -> Source:
    """Return a source that reads no other fields, where that saves something."""
    if not isinstance(source, SidecarSource) or tuple(names) == source.schema.names:
        return source
    known = source.sidecar.schema
    if any(n not in known.names or known[n] != source.schema[n] for n in names):
        return source  # renamed
    return SidecarSource(source.sidecar, [(n, known[n]) for n in names])


def _kept_path(source: Source, names: Sequence[str], kept: Ints | None) -> Path | None:
    """Return where statistics are kept; None if that is not possible."""
    if not source.identities():
        return None
    path = source.sidecar.path if isinstance(source, SidecarSource) else None
    with suppress(UsageError):
        path = path or sidecar_path(dataset_of([p.absolute() for p in source.files()]))
    if path is None or isinstance(path, StorePath):
        return None
    schema = [source.schema[n] for n in names]
    packing = [repr({c: f.attrs[c] for c in PACKING if c in f.attrs}) for f in schema]
    facts = [*map(str, schema)], packing, source.options.meaning.to_json()
    subset_digest = "" if kept is None else hashlib.blake2b(kept.tobytes()).hexdigest()
    key = digest(repr((facts, len(source), subset_digest)).encode())
    return path.with_name(f".stats-{key}.{path.name}")


Piece: TypeAlias = tuple[int, int, dict[str, FieldSums]]
"""The end of a range, its payload bytes, and the sums of its fields."""


def _sums(
    source: Source,
    names: Sequence[str],
    workers: int | None,
    memory: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, FieldSums]:
    """Return the sums of all samples, in their order, of pieces that some threads read ahead."""
    threads = workers or min(8, len(os.sched_getaffinity(0)))
    each = COPIES * max(PIECE_NBYTES, payload_nbytes(source, 0, len(source))[1])
    left = memory - source.resident_nbytes()
    if left < each:
        needed = each + source.resident_nbytes()
        raise memory_error("a sample cannot be read in the memory allowed", needed, memory)
    threads, local = min(threads, left // each), threading.local()

    def piece(start: int, stop: int) -> Piece:
        if not hasattr(local, "arena"):
            local.arena = Arena()
        batch = source.read(start, stop, local.arena)
        sums = {n: FieldSums.of(source.schema[n], batch[n]) for n in names}
        return stop, sum(int(batch[n].nbytes) for n in names), sums

    total, nbytes = {name: FieldSums() for name in names}, 0
    waiting: deque[Future[Piece]] = deque()
    with ThreadPoolExecutor(threads, "dsprep-stats") as pool:
        try:
            for bounds in chain(pieces(source), [None] * 2 * threads):
                if bounds is not None:
                    waiting.append(pool.submit(piece, *bounds))
                if waiting and (bounds is None or len(waiting) > 2 * threads):
                    stop, more, sums = waiting.popleft().result()
                    for name in names:
                        total[name].merge(sums[name])
                    nbytes += more
                    if progress is not None:
                        progress(stop, nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
    return total


def normalise(
    of: str | Path | Source | Mapping[str, FieldStats],
    *fields: str,
    subset: Any = None,
    missing: Literal["mean", "nan"] | None = None,
) -> Callable[[Batch], Batch]:
    """Return a ``transform`` that gives fields the mean 0 and the standard deviation 1.

    Packed values are unpacked, as by `mask_and_scale`, unless that was done before:
    ``transform=[mask_and_scale(...), normalise(...)]``.

    Parameters
    ----------
    of
        Statistics, or the dataset whose statistics are taken: of the samples that train, or else
        what validates is no longer unknown.
    fields
        Names, of numbers, ragged or not.
    subset
        The samples whose statistics are taken, as of `stats`.
    missing
        What missing values and NaNs become: ``"mean"`` (0, then), or ``"nan"``; None: there are
        none.

    Returns
    -------
    function
        Of a batch. Fields become float32, in place where they are; those with a standard deviation
        of 0 become 0.

    Raises
    ------
    UsageError
        If no field is named, one has no mean, or it has missing values and `missing` is None.
    """
    if not fields:
        raise UsageError("normalise is given no field", expected='normalise("train.h5", "image")')
    if missing not in (None, "mean", "nan"):
        raise UsageError(f"missing is {missing!r}", expected='"mean" or "nan"')
    known = of if isinstance(of, Mapping) else stats(of, fields, subset)
    functions: dict[str, Function] = {}
    for name in fields:
        own = known.get(name)
        if own is None or own.mean is None or own.std is None:
            raise UsageError(
                f"field {name} has no mean", expected="statistics of a field of numbers"
            )
        if own.missing + own.nans and missing is None:
            raise _missing(name, f"{own.missing + own.nans:,} of {own.count:,} values")
        unpack = None if own.field is None else unpacking(own.field)
        functions[name] = partial(_scaled, known=own, missing=missing, unpack=unpack)
    return FieldTransform("normalised", functions)


def _missing(name: str, problem: str) -> UsageError:
    return UsageError(
        f"field {name} has missing values",
        found=problem,
        fix='say what becomes of them: normalise(..., missing="mean"), or missing="nan"',
    )


def _scaled(
    values: Array,
    known: FieldStats,
    missing: str | None,
    unpack: Function | None,
    is_unpacked: bool = False,
) -> Array:
    """Return values, unpacked if they are as stored, less their mean, over their deviation."""
    if (f := known.field) is not None and unpack is not None:
        values = unpack(values) if not is_unpacked and is_stored(f, values) else values
        if missing is None and np.isnan(values).any():
            raise _missing(f.name, "some of a batch")
    if is_extension(values.dtype):
        values = values.astype(np.float32)
    in_place = values.dtype == np.float32 and values.flags.writeable
    out = values if in_place else np.empty(values.shape, np.float32)
    wide = values.dtype.itemsize > 4 or (values.dtype.kind in "iu" and values.itemsize > 2)
    number = np.float64 if wide else np.float32
    np.subtract(values, number(known.mean), out=out, casting="same_kind")
    np.multiply(out, np.float32(1 / known.std if known.std else 0), out=out)
    if missing == "mean":
        out[np.isnan(out)] = 0
    return out
