"""Proving that two datasets hold the same samples, bit for bit, whatever their formats."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from dsprep import executors
from dsprep.core.memory import allowed_memory
from dsprep.core.permutation import Permutation
from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Column,
    Ragged,
    Schema,
    differences,
    without_padding,
)
from dsprep.errors import UsageError
from dsprep.formats.base import Opening, Source
from dsprep.formats.options import memory_error
from dsprep.reader.options import at_least
from dsprep.reader.subset import Subset
from dsprep.source.dataset import check_opened
from dsprep.source.derived import DerivedSource
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.identity import unchanged
from dsprep.writing.plan import (
    PIECE_NBYTES,
    payload_nbytes,
    pieces,
)
from dsprep.writing.split import assign, group_labels, parse_split

BLOCK = 8
"""Consecutive samples that are compared together when only a share of them is."""


@dataclass(frozen=True)
class Difference:
    """The first difference in one field of one sample.

    Attributes
    ----------
    sample
        Its number in both datasets.
    field
        The field's name.
    where_a, where_b
        The files that hold it, with the sample's number in each file.
    element
        Index of the first differing element within the sample's value; None when the shapes
        differ.
    a, b
        The two elements, or the two shapes.
    """

    sample: int
    field: str
    where_a: str
    where_b: str
    element: tuple[int, ...] | None
    a: Any
    b: Any

    def __str__(self) -> str:
        subject = "length" if self.element is None else f"element {list(self.element)}"
        return (
            f"sample {self.sample}, field {self.field}, {subject}: "
            f"{self.a!r} in {self.where_a}, {self.b!r} in {self.where_b}"
        )


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes
    ----------
    samples_a, samples_b
        Samples in each dataset.
    compared
        Samples compared; 0 when the schemas or numbers differ.
    problems
        How the datasets differ as wholes, one clause each.
    differences
        The first differing samples, in order.
    differing
        Samples that differ, among those compared.
    """

    samples_a: int
    samples_b: int
    compared: int
    problems: tuple[str, ...]
    differences: tuple[Difference, ...]
    differing: int

    @property
    def same(self) -> bool:
        """True if no difference was found."""
        return not self.problems and not self.differing

    @property
    def complete(self) -> bool:
        """True if all samples were compared."""
        return self.compared == self.samples_a == self.samples_b


def verify(
    a: Source,
    b: Source,
    *,
    share: float | None = None,
    seed: int = 0,
    limit: int = 10,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
    executor: Executor | None = None,
    memory: int | None = None,
) -> Verdict:
    """Compare two datasets: number of samples, schema, and every value bit for bit.

    NaNs are equal when their bits are; 0.0 and -0.0 differ. Padding inside structured types is
    not compared.

    Parameters
    ----------
    a, b
        The datasets, opened.
    share
        Compare only about this share of the samples, 0 < share <= 1, spread at random; all if
        None.
    seed
        Chooses the samples when `share` is given.
    limit
        Differing samples to describe; all of them are counted.
    workers
        Threads.
    progress
        Called with (samples compared, payload bytes) so far.
    executor
        Who compares (see `dsprep.executors`); None: threads of this process.
    memory
        Bytes that the samples being compared may take; None: a quarter of what is free.

    Returns
    -------
    Verdict
        ``verdict.same`` is True if no difference was found; ``verdict.differences`` has the first
        ones, each with file, sample, field and element.

    Raises
    ------
    ChangedError
        If one of them changed while they were compared.
    DsprepError, OSError
        If either cannot be read.
    """
    check_opened(a, b)
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"a share of {share} is not possible", expected="above 0, at most 1")
    problems = differences(a.schema, b.schema, (a.path, b.path))
    if len(a) != len(b):
        problems.append(f"{len(a):,} samples in {a.path}, {len(b):,} in {b.path}")
    if problems:
        return Verdict(len(a), len(b), 0, tuple(problems), (), 0)
    workers = at_least("workers", workers, 1)
    workers = count_threads(a, b, workers, allowed_memory(memory))
    examples: list[Difference] = []
    compared = nbytes = differing = 0
    ranges = _ranges(a, share, seed)
    with ExitStack() as stack:
        stack.enter_context(unchanged((*a.identities(), *b.identities())))
        if executor is None:
            pool = stack.enter_context(ThreadPoolExecutor(workers, "dsprep-verify"))
            work = _Comparing(a, b, limit).range
            results = (r for _, r in executors.run(pool, work, ranges, lambda: 2 * workers))
        else:
            together = iter(lambda: tuple(itertools.islice(ranges, RANGES)), ())
            tasks = (
                (*a.part(some[0][0], some[-1][1]), *b.part(some[0][0], some[-1][1]), limit, some)
                for some in together
            )
            results = (r for _, r in executors.run(executor, _compare, tasks))
        for count, size, first, bad in results:
            if executor is not None:  # they had only the files that they needed
                first = [
                    replace(d, where_a=_where(a, d.sample), where_b=_where(b, d.sample))
                    for d in first
                ]
            compared, nbytes, differing = compared + count, nbytes + size, differing + bad
            examples = sorted([*examples, *first], key=lambda d: d.sample)[:limit]
            if progress is not None:
                progress(compared, nbytes)
    damaged = _damaged_groups(a) + _damaged_groups(b) if share is None else []
    return Verdict(len(a), len(b), compared, tuple(damaged), tuple(examples), differing)


def match_order(a: Source, b: Source) -> tuple[Source, Source, str]:
    """Return two datasets so that equal samples have equal numbers, where `b` was made of `a`.

    What ``dsprep repack`` did by ``--subset``, ``--split``, ``--duplicate`` and ``--shuffle`` is in
    the lineage of `b`; of any other two datasets the order is left as it is.

    Returns
    -------
    The samples of `a` that `b` has, `b` in their order, and the options that were taken into
    account; these are empty if nothing was.

    Raises
    ------
    UsageError
        If samples cannot be chosen again as they were.
    """
    lineage = b.sidecar.content.lineage if isinstance(b, SidecarSource) else {}
    names = ("subset", "split", "part", "group_by", "duplicate", "shuffle")
    recipe = {name: lineage[name] for name in names if lineage.get(name) is not None}
    sources = {str(path) for path in lineage.get("source", ())}
    if not recipe or not sources & {str(path.absolute()) for path in (a.path, *a.files())}:
        return a, b, ""
    chosen, part = a, None
    if "split" in recipe:
        labels = None
        if "group_by" in recipe:
            labels = group_labels(a, a.schema[recipe["group_by"]])
        seed = lineage.get("split_seed", recipe.get("shuffle", 0))
        shares = parse_split(recipe["split"])
        part = assign(len(a), shares, seed, labels, recipe["part"])[recipe["part"]]
        chosen = DerivedSource(a, part)
    if str(recipe.get("subset")).startswith("indices="):
        raise UsageError(
            f"which samples of {a.path} are in {b.path} is not known: they were chosen by an array",
            fix="give dsprep repack a condition or a .npy file, and keep that",
        )
    if (subset := Subset.of(recipe.get("subset"))) is not None:
        kept = subset.samples(len(a), lambda _: a)
        kept = kept if part is None else np.intersect1d(part, kept)
        chosen = DerivedSource(a, kept)
    if "duplicate" in recipe:
        chosen = DerivedSource(chosen, times=recipe["duplicate"])
    if "shuffle" in recipe and len(chosen) == len(b):
        order = Permutation(recipe["shuffle"], len(b))
        b = DerivedSource(b, order.inverse(np.arange(len(b), dtype=np.int64)))
    return chosen, b, ", ".join(f"{name} {value}" for name, value in recipe.items())


def count_threads(a: Source, b: Source, workers: int, memory: int) -> int:
    """Return the number of threads that may compare samples; `UsageError` if none fits."""
    largest = max(payload_nbytes(source, 0, len(source))[1] for source in (a, b))
    each, taken = COPIES * max(PIECE_NBYTES, largest), a.resident_nbytes() + b.resident_nbytes()
    if each + taken > memory:
        raise memory_error(
            "two samples cannot be compared in the memory allowed", each + taken, memory
        )
    return min(workers, (memory - taken) // each)


COPIES = 6
"""Copies of a range of samples in memory: stored, read and compared, of both."""

Compared: TypeAlias = tuple[int, int, list[Difference], int]
"""Samples, payload bytes, the first samples that differ, and how many differ."""

RANGES = 32
"""Ranges, of about 8 MiB, that another process compares at a time."""


class _Comparing:
    """Two sources, compared by threads; sample `first` of all is the first of each of them."""

    def __init__(
        self, a: Source, b: Source, limit: int, first_a: int = 0, first_b: int = 0
    ) -> None:
        self._a, self._b, self._limit, self._schema = a, b, limit, a.schema
        self._first_a, self._first_b = first_a, first_b
        self._local = threading.local()

    def range(self, bounds: tuple[int, int]) -> Compared:
        """Compare samples ``start <= i < stop``."""
        start, stop = bounds
        if not hasattr(self._local, "arenas"):
            self._local.arenas = (Arena(), Arena())
        one, other = self._local.arenas
        left = self._a.read(start - self._first_a, stop - self._first_a, one)
        right = self._b.read(start - self._first_b, stop - self._first_b, other)
        rows = differing_samples(left, right, self._schema)
        size = sum(int(c.nbytes) for c in left.values())
        first = [self._describe(left, right, start, int(i)) for i in rows[: self._limit]]
        return stop - start, size, first, len(rows)

    def _describe(self, left: Batch, right: Batch, start: int, row: int) -> Difference:
        sample = start + row
        where_a = _where(self._a, sample - self._first_a)
        where_b = _where(self._b, sample - self._first_b)
        for f in self._schema:
            x, y = (_value(batch[f.name], row) for batch in (left, right))
            if x.shape != y.shape:
                return Difference(sample, f.name, where_a, where_b, None, x.shape[0], y.shape[0])
            at = _first_element(x, y)
            if at is not None:
                return Difference(sample, f.name, where_a, where_b, at, _show(x[at]), _show(y[at]))
        raise AssertionError("the sample does not differ")


Task: TypeAlias = tuple[Opening, int, Opening, int, int, tuple[tuple[int, int], ...]]
"""Two sources as they travel, each with its first sample, a limit, and ranges."""


def _compare(task: Task) -> Compared:
    open_a, first_a, open_b, first_b, limit, ranges = task
    samples = nbytes = differing = 0
    differences: list[Difference] = []
    with open_a() as a, open_b() as b:
        comparing = _Comparing(a, b, limit, first_a, first_b)
        for bounds in ranges:
            count, size, first, bad = comparing.range(bounds)
            samples, nbytes, differing = samples + count, nbytes + size, differing + bad
            differences += first[: limit - len(differences)]
    return samples, nbytes, differences, differing


def _damaged_groups(source: Source) -> list[str]:
    """Return the groups of a repacked dataset whose checksum is wrong, one clause each."""
    if not isinstance(source, SidecarSource):
        return []
    return [*map(str, source.sidecar.bad_groups())]


def _ranges(source: Source, share: float | None, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of samples to compare: all pieces, or blocks spread at random."""
    count = len(source)
    if share is None or share == 1:
        yield from pieces(source, 0, count)
        return
    blocks = -(-count // BLOCK)
    range_count = min(blocks, max(2, round(share * count / BLOCK)))
    rng = np.random.default_rng(seed)
    # One block in each of `wanted` equal strata: spread out, in order, and O(1) memory.
    edges = (blocks * i // range_count for i in range(range_count + 1))
    for low, high in itertools.pairwise(edges):
        block = int(rng.integers(low, high))
        yield block * BLOCK, min(count, (block + 1) * BLOCK)


def differing_samples(a: Batch, b: Batch, schema: Schema) -> Array:
    """Return the numbers, within the batch, of the samples that differ in any field."""
    masks = [_differing_rows(a[f.name], b[f.name]) for f in schema]
    return np.flatnonzero(np.logical_or.reduce(masks)) if masks else np.zeros(0, np.int64)


def _differing_rows(a: Column, b: Column) -> Array:
    """Return a mask of the samples whose values differ."""
    if not (isinstance(a, Ragged) and isinstance(b, Ragged)):
        return _differing_fixed(np.asarray(a), np.asarray(b))
    wrong: Array = a.lengths != b.lengths
    if not wrong.any():
        rows = np.flatnonzero(_differing_fixed(a.values, b.values))
        wrong[np.searchsorted(a.offsets, rows, "right") - 1] = True
        return wrong
    for i in np.flatnonzero(~wrong):
        x = a.values[a.offsets[i] : a.offsets[i + 1]]
        y = b.values[b.offsets[i] : b.offsets[i + 1]]
        wrong[i] = _differing_fixed(x, y).any()
    return wrong


def _differing_fixed(a: Array, b: Array) -> Array:
    """Return a mask of the rows of two arrays of one shape that differ."""
    if a.size:
        x, y = _bits(without_padding(a)), _bits(without_padding(b))
        if x.shape[1] % 8 == 0 and x.flags.c_contiguous and y.flags.c_contiguous:
            x, y = x.view(np.uint64), y.view(np.uint64)
        if not np.array_equal(x, y):
            mask: Array = (x != y).any(axis=1)
            return mask
    return np.zeros(len(a), bool)


def _bits(array: Array) -> Array:
    """Return the bits as ``uint8`` of shape ``(n, bytes per row)``, without a copy if possible."""
    rows = array.reshape(len(array), -1)
    if rows.strides[1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    bits: Array = rows.view(np.uint8)
    return bits


def _value(column: Array | Ragged, row: int) -> Array:
    if isinstance(column, Ragged):
        rows: Array = column.values[column.offsets[row] : column.offsets[row + 1]]
        return rows
    return np.asarray(column[row])


def _first_element(x: Array, y: Array) -> tuple[int, ...] | None:
    """Return the index of the first element that differs, or None."""
    rows = _differing_fixed(x.reshape(-1), y.reshape(-1))
    if not rows.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(rows.argmax()), x.shape))


def _show(element: Any) -> Any:
    return element.item() if isinstance(element, np.generic) else element


def _where(source: Source, sample: int) -> str:
    path, inside = source.locate(sample)
    alone = (path, inside) == (source.path, sample)
    return str(path) if alone else f"{path} (sample {inside} there)"
