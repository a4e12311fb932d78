"""How the layout in a sidecar differs from what was found in the file, number by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Ints
from dsprep.layout.laws import Law
from dsprep.layout.model import Column, FileLayout, Given, OwnFiles, Records
from dsprep.layout.words import Words
from dsprep.verbs.check.problems import Problem

SLICE = 1 << 18
"""Offsets that are compared at once."""

Span: TypeAlias = Callable[[int, int], Ints]
Numbers: TypeAlias = tuple[Span, int]
"""What gives numbers ``start .. stop``, and how many there are."""


def compare(truth: FileLayout, known: FileLayout) -> Iterator[Problem]:
    """Yield how a layout differs from what was found in the file; `file` is left empty."""
    records = [*truth.records.parts] if truth.records is not None else []
    for name in (*records, *truth.columns, *truth.files, *truth.given, *truth.unlocated):
        own, other = truth.find_field(name), known.find_field(name)
        if type(own) is not type(other):
            text = "the sidecar has it stored in another way than the file"
            yield Problem("", text, _kind(own), _kind(other), name)
            continue
        facts, numbers = _stated(own, name, truth.count)
        other_facts, other_numbers = _stated(other, name, known.count)
        facts |= {f"number of {subject}s": count for subject, (_, count) in numbers.items()}
        other_facts |= {f"number of {s}s": count for s, (_, count) in other_numbers.items()}
        keys = dict.fromkeys((*facts, *other_facts))
        wrong = [k for k in keys if _plain(facts.get(k)) != _plain(other_facts.get(k))]
        for key in wrong[:1]:
            text = f"the sidecar gives another {key} than the file"
            yield Problem("", text, str(facts.get(key)), str(other_facts.get(key)), name)
        if not wrong and name not in records[1:]:  # which share the offsets of the first one
            for subject, (law, count) in numbers.items():
                yield from _differing(law, other_numbers[subject][0], count, subject, name)


def _kind(stored: object) -> str:
    return "by its library" if isinstance(stored, str) else type(stored).__name__.lower()


def _plain(value: Any) -> Any:
    """Return a parameter as JSON gives it back, to compare."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _stated(stored: object, name: str, count: int) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """Return what a layout says of a field: facts, and the numbers that its laws give."""
    facts: dict[str, Any] = {}
    laws: dict[str, Law | None] = {}
    match stored:
        case Records() as records:
            facts = {"path": records.blocks.path, "recipe": records.recipe, "frame": records.frame}
            facts["part of the records"] = vars(records.parts[name])

            def extents(start: int, stop: int) -> tuple[Ints, Ints]:
                return records.extents(np.arange(start, stop, dtype=np.int64), f"field {name}")

            return facts, {
                "offset": (lambda a, b: extents(a, b)[0], count),
                "length": (lambda a, b: extents(a, b)[1], count),
            }
        case Column() as column:
            facts = {"number of rows per sample": column.lines}
            laws = {"first row": column.first, "row count": column.count}
            if (grid := column.grid) is not None:
                kept = ("shape", "chunk", "itemsize", "files", "filters", "fill")
                facts |= {subject: getattr(grid, subject) for subject in kept}
                facts["path"] = grid.blocks.path
                laws |= {"offset": grid.blocks.offsets, "length": grid.blocks.lengths}
                laws["mask"] = grid.masks
        case OwnFiles() as own:
            facts, laws = {"list of files": own.names.data}, {"length": own.lengths}
        case Given() as given:
            table = given.values.data if isinstance(given.values, Words) else given.values
            raw = table if table is None or isinstance(table, bytes) else table.tobytes()
            facts, laws = {"table of values": raw}, {"value": given.value_numbers}
    return facts, {s: (law.span, law.count) for s, law in laws.items() if law is not None}


def _differing(a: Span, b: Span, count: int, subject: str, name: str) -> Iterator[Problem]:
    """Yield the problem of numbers that differ: the first one."""
    for start in range(0, count, SLICE):
        stop = min(start + SLICE, count)
        x, y = a(start, stop), b(start, stop)
        bad = x != y
        if bad.any():
            i = int(bad.argmax())
            text = f"the sidecar gives another {subject} than the file, of {start + i:,} (from 0)"
            yield Problem("", text, int(x[i]), int(y[i]), name)
            return
