"""The thorough part of checking a sidecar: all extents, all checksums, and values bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep import formats
from dsprep.core.packing import from_planes
from dsprep.core.schema import Schema, differences
from dsprep.formats.base import Source
from dsprep.formats.options import OpenOptions
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.sidecar.spec import Content
from dsprep.source.many import Dataset
from dsprep.verbs.check.agreement import compare
from dsprep.verbs.check.problems import CAUGHT, Problem, problem
from dsprep.verbs.verify import differing_samples
from dsprep.writing.create_sidecar import checksums_of

Progress: TypeAlias = Callable[[int, int], None]

PIECE = 8 << 20
"""Bytes of samples that are read at once."""
ALL_SAMPLES, ALL_NBYTES = 10_000, 64 << 20
"""Datasets below either are compared sample by sample; of larger ones `BLOCKS` blocks are."""
BLOCKS, BLOCK = 256, 8


def against_files(
    content: Content,
    opened: Sidecar | None,
    dataset: Path,
    path: Path,
    progress: Progress | None,
) -> list[Problem]:
    """Return how a sidecar differs from what the format's own library finds in the files.

    Parameters
    ----------
    opened
        The sidecar, if its layouts can be used.
    path
        Its path.
    """
    problems = list(_checksums(content, dataset, path))
    format = formats.load(content.format)
    paths = [dataset / f.path for f in content.files]
    if not paths:
        return problems
    try:
        options = OpenOptions.from_json(content.reading)
        source = Dataset(format, paths, options, content.schema)
    except CAUGHT as error:
        return [*problems, problem(error, dataset)]
    with source:
        problems += _schemas(content.schema, source, dataset)
        if opened is not None:
            first = 0
            for number, entry in enumerate(content.files):
                problems += _layouts(source, opened, number, first, paths[number])
                first += entry.samples
            problems += _groups_crcs(opened)
            problems += _values(opened, source, progress)
    return problems


def _schemas(schema: Schema, source: Source, dataset: Path) -> Iterator[Problem]:
    """Yield how fields and attributes differ; attributes that only the sidecar keeps do not."""
    for line in differences(schema, source.schema):
        yield Problem(str(dataset), f"its schema is not that of the sidecar: {line}")
    ours = {"": schema.attrs, **{f.name: f.attrs for f in schema}}
    theirs = {"": source.schema.attrs, **{f.name: f.attrs for f in source.schema}}
    for owner, attrs in theirs.items():
        known = ours.get(owner, {})
        for key, value in attrs.items():
            there = spec.encode_attr(value)
            here = spec.encode_attr(known[key]) if key in known else None
            if here != there and not np.array_equal(value, known.get(key, ())):  # JSON has no int16
                text = f"its attribute {key} is not that of the sidecar"
                yield Problem(str(dataset), text, str(there), str(here), owner or None)


# --- extents ---------------------------------------------------------------------------------


def _layouts(
    source: Dataset, opened: Sidecar, number: int, first: int, path: Path
) -> list[Problem]:
    """Return how the laws of a file, whose samples begin at `first`, differ from what it holds."""
    samples = opened.content.files[number].samples
    try:
        if (count := source.count(number)) != samples:
            return [Problem(str(path), "it has another number of samples", count, samples)]
        if not samples:
            return []
        truth = source.layout(number)
        return [
            replace(p, file=str(path), sample=None if p.sample is None else p.sample + first)
            for p in compare(truth, opened.layout(number))
        ]
    except CAUGHT as error:
        return [problem(error, path)]


# --- checksums -------------------------------------------------------------------------------


def _checksums(content: Content, dataset: Path, where: Path) -> Iterator[Problem]:
    """Yield the files whose checksums are not those of the sidecar."""
    opened: Sidecar | None = None
    for number, entry in enumerate(content.files):
        if entry.crc32c is None:
            continue
        path = dataset / entry.path
        try:
            opened = opened or Sidecar(content, dataset, where)
            sums = opened.proofs.block_sums(number)
            assert sums is not None  # it has some
            block, expected = sums
            actual = from_planes(checksums_of(path, block))
        except CAUGHT as error:
            yield problem(error, path)
            continue
        if len(expected) != len(actual):
            text = "it has another number of checksums"
            yield Problem(str(path), text, len(expected), len(actual))
        n = min(len(expected), len(actual))
        for i in np.flatnonzero(expected[:n] != actual[:n]).tolist():
            text = f"the CRC-32C of bytes {i * block:,} to {(i + 1) * block:,} is wrong"
            yield Problem(str(path), text, f"{expected[i]:#010x}", f"{actual[i]:#010x}")


def _groups_crcs(opened: Sidecar) -> Iterator[Problem]:
    """Yield the groups, and the members of ZIP files, whose checksum is wrong."""
    try:
        for bad in opened.bad_groups():
            expected, actual = f"{bad.expected:#010x}", f"{bad.actual:#010x}"
            yield Problem(str(bad.path), bad.message, expected, actual, None, bad.sample)
        for number in range(len(opened.content.files)):
            for error in opened.proofs.bad_members(number):
                yield problem(error, opened.dataset)
    except CAUGHT as error:
        yield problem(error, opened.dataset)


# --- values ----------------------------------------------------------------------------------


def _pieces(opened: Sidecar, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of samples of about `PIECE` bytes, none across files."""
    per = max(1, sum(f.identity.nbytes for f in opened.content.files) // max(1, len(opened)))
    step = max(1, min(1 << 16, PIECE // per))
    begin = 0
    for entry in opened.content.files:
        end = begin + entry.samples
        for a in range(max(begin, start), min(end, stop), step):
            yield a, min(a + step, end, stop)
        begin = end


def _chosen(opened: Sidecar, payload: int) -> Callable[[int, int], Iterator[tuple[int, int]]]:
    """Return which samples of a range are compared: all, or blocks spread evenly."""
    n = len(opened)
    if n < ALL_SAMPLES or payload < ALL_NBYTES:
        return lambda start, stop: iter([(start, stop)])
    begins = np.unique(np.linspace(0, n - BLOCK, BLOCKS).astype(np.int64))

    def some(start: int, stop: int) -> Iterator[tuple[int, int]]:
        low, high = np.searchsorted(begins, [start - BLOCK + 1, stop])
        for a in begins[low:high].tolist():
            yield max(a, start), min(a + BLOCK, stop)

    return some


def _values(opened: Sidecar, source: Source, progress: Progress | None) -> Iterator[Problem]:
    """Yield the first samples that read differently, or not at all, or have a wrong checksum."""
    n, files = len(opened), opened.content.files
    if n != len(source) or differences(opened.schema, source.schema):
        return  # reported already
    chosen = _chosen(opened, sum(f.identity.nbytes for f in files))
    for a, b in _pieces(opened, 0, n):
        layout = opened.layout(opened.file_of(a)[0])
        names = [name for name in opened.schema.names if name not in layout.unlocated]
        framed = layout.records is not None and layout.records.frame is not None
        for start, stop in chosen(a, b) if names else ():
            try:
                ours = opened.read(slice(start, stop), names, verify="full" if framed else None)
                theirs = source.read(start, stop)
            except CAUGHT as error:
                yield problem(error, opened.dataset)
                return
            for name in names:
                one = Schema((opened.schema[name],))
                rows = differing_samples({name: ours[name]}, {name: theirs[name]}, one)
                if len(rows):
                    text = f"{len(rows):,} of samples {start:,} to {stop - 1:,} differ from the "
                    where, first = str(opened.dataset), start + int(rows[0])
                    yield Problem(where, f"{text}library's", None, None, name, first)
                    return
        if framed:  # the checksum of every record is compared
            try:
                opened.read(slice(a, b), names, verify="full")
            except CAUGHT as error:
                yield problem(error, opened.dataset)
                return
        if progress is not None:
            progress(b, n)
