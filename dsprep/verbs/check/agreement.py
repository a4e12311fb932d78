"""How the layout in a sidecar differs from what was found in the file, number by number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsprep.core.schema import Ints
from dsprep.errors import FormatError
from dsprep.layout.laws import Law
from dsprep.layout.model import Blocks, Column, FileLayout, Records
from dsprep.layout.words import Words
from dsprep.verbs.check.problems import Problem

SLICE = 1 << 18
"""Offsets that are compared at once."""


def compare(truth: FileLayout, known: FileLayout) -> Iterator[Problem]:
    """Yield how a layout differs from what was found in the file; `file` is left empty."""
    if truth.records is not None and known.records is not None:
        yield from _compare_records(truth.records, known.records, truth.count)
    for name in sorted({*_kinds(truth), *_kinds(known)}):
        a, b = _kinds(truth).get(name), _kinds(known).get(name)
        if a != b:
            yield Problem("", "the sidecar has it stored in another way than the file", a, b, name)
        elif name in truth.columns:
            yield from _compare_columns(truth.columns[name], known.columns[name], name)
        elif name in truth.files:
            own, other = truth.files[name], known.files[name]
            if own.names != other.names:
                yield Problem(
                    "", "the sidecar gives samples other files than are there", field=name
                )
            yield from _numbers(own.lengths.span, other.lengths.span, truth.count, "length", name)
        elif name in truth.given:
            yield from _compare_given(truth, known, name)


def _kinds(layout: FileLayout) -> dict[str, str]:
    kinds = dict.fromkeys(layout.columns, "an array")
    kinds |= dict.fromkeys(layout.files, "a file for each sample")
    kinds |= dict.fromkeys(layout.given, "in no file")
    kinds |= dict.fromkeys(layout.unlocated, "for the format's own library only")
    if layout.records is not None:
        kinds |= dict.fromkeys(layout.records.parts, "records")
    return kinds


def _plain(value: Any) -> Any:
    """Return a parameter as JSON gives it back, to compare."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _words(a: Any, b: Any, subject: str, name: str | None = None) -> Iterator[Problem]:
    if _plain(a) != _plain(b):
        yield Problem(
            "", f"the sidecar gives another {subject} than the file", str(a), str(b), name
        )


def _compare_records(a: Records, b: Records, count: int) -> Iterator[Problem]:
    yield from _words(a.blocks.path, b.blocks.path, "path")
    yield from _words(a.recipe, b.recipe, "recipe")
    yield from _words(a.frame, b.frame, "frame")
    for name in a.parts:
        if name in b.parts:
            yield from _words(vars(a.parts[name]), vars(b.parts[name]), "part of the records", name)

    def of(records: Records, pick: Callable[[Blocks], Law]) -> Callable[[int, int], Ints]:
        law = pick(records.blocks)

        def numbers(start: int, stop: int) -> Ints:
            if records.order is None:
                return law.span(start, stop)
            used = records.order.span(start, stop)
            if len(used) and not 0 <= int(used.min()) <= int(used.max()) < law.count:
                raise FormatError("the sidecar gives a sample a record that does not exist")
            return law.at(used)

        return numbers

    for subject, pick in (("offset", _offsets), ("length", _lengths)):
        yield from _numbers(of(a, pick), of(b, pick), count, subject)


def _offsets(blocks: Blocks) -> Law:
    return blocks.offsets


def _lengths(blocks: Blocks) -> Law:
    return blocks.lengths


def _numbers(
    a: Callable[[int, int], Ints],
    b: Callable[[int, int], Ints],
    count: int,
    subject: str,
    name: str | None = None,
    sample_of: Callable[[int], int | None] = lambda i: i,
    unit: str = "samples",
) -> Iterator[Problem]:
    """Yield the problem of numbers that differ: the first, and of how many."""
    wrong, first = 0, (0, 0, 0)
    for start in range(0, count, SLICE):
        stop = min(start + SLICE, count)
        x, y = a(start, stop), b(start, stop)
        bad = x != y
        if bad.any():
            i = int(bad.argmax())
            if not wrong:
                first = start + i, int(x[i]), int(y[i])
            wrong += int(bad.sum())
    if wrong:
        text = f"the sidecar gives {wrong:,} of {count:,} {unit} another {subject} than the file"
        yield Problem("", text, first[1], first[2], name, sample_of(first[0]))


def _compare_given(truth: FileLayout, known: FileLayout, name: str) -> Iterator[Problem]:
    a, b = truth.given[name], known.given[name]
    tables = [v.data if isinstance(v, Words) else v for v in (a.values, b.values)]
    same = [v if v is None or isinstance(v, bytes) else v.tobytes() for v in tables]
    if same[0] != same[1]:
        yield Problem("", "the sidecar gives other values than the file", field=name)
    yield from _numbers(a.value_numbers.span, b.value_numbers.span, truth.count, "value", name)


def _compare_columns(a: Column, b: Column, name: str) -> Iterator[Problem]:
    yield from _words(a.lines, b.lines, "number of rows per sample", name)
    for subject, x, y in (("first row", a.first, b.first), ("number of rows", a.count, b.count)):
        if (x is None) != (y is None):
            yield Problem("", f"the sidecar and the file disagree on {subject}", field=name)
        elif x is not None and y is not None:
            yield from _numbers(x.span, y.span, x.count, subject, name)
    g, h = a.grid, b.grid
    if g is None or h is None:
        if g is not h:
            text = "the sidecar and the file disagree on whether it has bytes"
            yield Problem("", text, field=name)
        return
    alike = True
    for subject in ("shape", "chunk", "itemsize", "files", "filters", "fill"):
        for differing in _words(getattr(g, subject), getattr(h, subject), subject, name):
            alike = alike and subject not in ("shape", "chunk", "files")
            yield differing
    yield from _words(g.blocks.path, h.blocks.path, "path", name)
    if not alike:
        return

    def sample_of(block: int) -> int | None:
        if a.first is not None:
            return None
        per = g.files or g.chunks
        along = tuple(-(-n // p) for n, p in zip(g.chunks, per, strict=True))
        file, inside = divmod(block, math.prod(per))
        row = (file // math.prod(along[1:])) * per[0] + inside // math.prod(per[1:])
        return row * g.chunk[0] // a.lines

    pairs: list[tuple[str, Law | None, Law | None]] = [
        ("offset", g.blocks.offsets, h.blocks.offsets),
        ("length", g.blocks.lengths, h.blocks.lengths),
        ("mask", g.masks, h.masks),
    ]
    for subject, x, y in pairs:
        if x is None or y is None:
            if x is not y:
                yield Problem("", f"the sidecar and the file disagree on a {subject}", field=name)
            continue
        unit = "samples" if g.block_count == 1 else "chunks"
        yield from _numbers(x.span, y.span, x.count, subject, name, sample_of, unit)
