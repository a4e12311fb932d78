"""Extents of a layout that are not in their files, or not those that a library finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Ints, Schema
from dsprep.errors import FormatError, layout_mismatch
from dsprep.layout.laws import Affine, Law
from dsprep.layout.locate import Extents, adjoining, check_rows, locate, rows_of
from dsprep.layout.model import Blocks, Column, FileLayout, Grid, OwnFiles, Records

SLICE = 1 << 18
"""Samples whose extents are computed at once."""

MOST_BLOCKS = 1 << 24
"""Blocks of one sample, beyond which it is not checked."""

Wrong: TypeAlias = tuple[str, object, object, int]
"""A problem as a clause, the expected and the actual value, and the sample, in the file."""


def wrong_extents(
    layout: FileLayout, schema: Schema, root: Path, first: int = 0, truth: FileLayout | None = None
) -> Iterator[FormatError]:
    """Yield for each field the first extent that is wrong; memory does not grow with the samples.

    Parameters
    ----------
    root
        The file or store.
    first
        The number of its first sample in the dataset.
    truth
        The layout that a library finds in the file, to which each extent is compared; None: it has
        to be within its file.
    """
    records_checked = False
    for name in schema.names:
        stored = layout.find_field(name)
        other = stored if truth is None else truth.find_field(name)
        where = f"{root}, field {name}"
        if (key := _differing_fact(other, stored)) is not None:
            yield FormatError(f"the sidecar gives another {key} than the file", where=where)
            continue
        if isinstance(stored, Records) and truth is None:
            if records_checked:  # which are those of the field before
                continue
            records_checked = True
        for samples in _samples(stored, other, layout.count):
            for some in _pieces(stored, name, samples):
                wrong = _outside(layout, name, some, root)
                if truth is not None and wrong is None:
                    wrong = _differing(layout, truth, name, some)
                if wrong is not None:
                    break
            else:
                continue
            text, expected, actual, sample = wrong
            where = f"{root}, sample {sample + first:,}, field {name}"
            yield FormatError(text, where=where, expected=expected, found=actual)
            break


def _differing_fact(own: object, other: object) -> str | None:
    """Return what two layouts state otherwise of a field, besides numbers."""
    if type(own) is not type(other) or isinstance(own, str):
        return None if isinstance(own, str) and isinstance(other, str) else "kind of storage"
    a, b = _facts(own), _facts(other)
    return next((key for key in a.keys() & b.keys() if a[key] != b[key]), None)


def _facts(stored: Any) -> dict[str, str]:
    holder = getattr(stored, "grid", None) or stored
    kept = {**vars(stored), **vars(holder)}
    return {k: _text(v) for k, v in kept.items() if not isinstance(v, Law | Blocks | Grid)}


def _text(value: Any) -> str:
    """Return a parameter as a text to compare, whether it was JSON or not."""
    if isinstance(value, dict):
        return repr({str(k): _text(value[k]) for k in sorted(value)})
    if isinstance(value, list | tuple):
        return repr([*map(_text, value)])
    return repr(value.tolist() if isinstance(value, np.ndarray) else getattr(value, "data", value))


def _samples(stored: object, other: object, count: int) -> Iterator[Ints]:
    """Yield the samples whose extents are looked at, in slices: the others are between these."""
    each = 1
    match stored:
        case Column(grid=Grid() as grid, first=None, lines=lines):
            each, rest = divmod(grid.chunk[0], max(1, lines))
            each = 1 if rest else max(1, each)
        case Column(grid=Grid()) | OwnFiles() | Records():
            pass
        case _:  # there is no such extent
            return
    if _is_affine(stored) and _is_affine(other) and count > 2:
        yield np.array([0, count - 1], np.int64)
        return
    units = -(-count // each)
    for start in range(0, units, SLICE):
        first = np.arange(start, min(start + SLICE, units), dtype=np.int64) * each
        last = np.minimum(first + each, count) - 1
        yield first if each == 1 else np.unique(np.concatenate([first, last]))


def _is_affine(stored: object) -> bool:
    """Return whether two samples tell where all are."""
    if isinstance(stored, Records):
        numbers = stored.blocks.offsets, stored.blocks.lengths, stored.order
        return all(law is None or isinstance(law, Affine) for law in numbers)
    if not isinstance(stored, Column) or stored.grid is None or stored.first is not None:
        return False
    return stored.grid.plain and adjoining(stored.grid) is not None


def _pieces(stored: object, name: str, samples: Ints) -> list[Ints]:
    """Return samples in pieces that have not too many chunks; `FormatError` if one has."""
    if not isinstance(stored, Column) or stored.grid is None:
        return [samples]
    grid, (first, count) = stored.grid, rows_of(stored, samples)
    check_rows(grid, first, count, name)
    blocks = (count // grid.chunk[0] + 2) * float(np.prod(np.array(grid.chunks[1:], float)))
    if float(blocks.max(initial=0)) > MOST_BLOCKS:
        raise layout_mismatch("gives a sample impossibly many chunks", f"field {name}")
    parts = int(blocks.sum() // (SLICE * 4)) + 1
    return np.array_split(samples, min(parts, max(1, len(samples))))


def _outside(layout: FileLayout, name: str, samples: Ints, root: Path) -> Wrong | None:
    """Return the first of some samples that has an extent outside of its file."""
    records, column, needed = layout.records, layout.columns.get(name), 0
    fill = column is not None and column.grid is not None and column.grid.fill is not None
    if records is not None and name in records.parts:
        parts = [p for p in records.parts.values() if p.at is not None]
        needed = max(((p.at or 0) + (p.nbytes or 0) for p in parts), default=0)
        ranges = [(records.blocks.path, samples, *records.extents(samples, f"field {name}"))]
    else:
        extents = locate(layout, name, samples)
        numbers, offset, length = samples[extents.request], extents.offset, extents.length
        ranges = [(path, numbers[k], offset[k], length[k]) for path, k in extents.by_path()]
    for path, numbers, offset, length in ranges:
        if fill and (offset == -1).all():  # chunks that are not stored need no file
            continue
        nbytes = (root / path if path else root).stat().st_size
        bad = (length < needed) | (length > nbytes) | (offset > nbytes - length)
        bad |= (offset < 0) & ~((offset == -1) & fill)
        if bad.any():
            i = int(bad.argmax())
            expected = f"within {nbytes:,} bytes, of at least {needed:,}"
            actual = f"{int(length[i]):,} bytes at {int(offset[i]):,}"
            text = "the sidecar gives an extent that is not in the file"
            return text, expected, actual, int(numbers[i])
    return None


def _differing(layout: FileLayout, truth: FileLayout, name: str, samples: Ints) -> Wrong | None:
    """Return the first of some samples that a sidecar has elsewhere than the file."""
    ours, theirs = locate(layout, name, samples), locate(truth, name, samples)
    a, b = _rows(theirs), _rows(ours)
    if a.shape != b.shape:
        text = "the sidecar gives another number of ranges than the file"
        return text, a.shape[1], b.shape[1], int(samples[0])
    bad = (a != b).any(axis=0)
    if not bad.any():
        return None
    i = int(bad.argmax())
    expected, actual = (f"{x[1, i]:,} bytes at {x[0, i]:,}" for x in (a, b))
    text = "the sidecar gives another extent than the file"
    return text, expected, actual, int(samples[ours.request[i]])


def _rows(extents: Extents) -> Array:
    rows = [extents.offset, extents.length]
    if extents.file_index is not None:
        rows += [*extents.file_index]
    if extents.inside is not None and extents.inside_nbytes is not None:
        rows += [extents.inside, extents.inside_nbytes]
    return np.stack(rows)
