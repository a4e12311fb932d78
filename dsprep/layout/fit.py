"""From the numbers that were found in a file to the smallest laws that give exactly them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dsprep.core.schema import Ints
from dsprep.layout import laws
from dsprep.layout.laws import Law, follow
from dsprep.layout.laws.affine import Affine
from dsprep.layout.laws.periodic import fit as fit_periodic
from dsprep.layout.laws.replay import Replay
from dsprep.layout.model import Blocks, Column, FileLayout, Grid, Groups, Records

SMALL = 250
"""Bytes below which no further law is tried."""

SHORT = 1 << 15
"""Steps up to which a replay is taken: they cost a fraction of a second when it is first used."""

_FRAMES = ((0, 1), (16, 1))
"""Bytes between records, and their alignment: nothing; the header and CRCs of a TFRecord."""


def fit(layout: FileLayout) -> FileLayout:
    """Return the layout with the smallest laws that are exact."""
    records = layout.records
    if records is not None:
        records = _fit_records(records, layout.candidates)
    columns = {name: _fit_column(c) for name, c in layout.columns.items()}
    groups = None if layout.groups is None else fit_groups(layout.groups)
    given = {
        name: replace(g, value_numbers=_fit(g.value_numbers)) for name, g in layout.given.items()
    }
    files = {name: replace(o, lengths=_fit(o.lengths)) for name, o in layout.files.items()}
    return replace(
        layout,
        records=records,
        columns=columns,
        groups=groups,
        candidates=(),
        given=given,
        files=files,
    )


def fit_groups(groups: Groups) -> Groups:
    """Return groups with the smallest laws that are exact."""
    return Groups(
        groups.samples,
        _fit_blocks(groups.blocks, ()),
        None if groups.crc32c is None else _fit(groups.crc32c),
        None if groups.first is None else _fit(groups.first),
        groups.files,
        None if groups.rest is None else replace(groups.rest, crc32c=_fit(groups.rest.crc32c)),
    )


def _all(law: Law) -> Ints:
    return law.span(0, law.count)


def _fit(law: Law) -> Law:
    return law if isinstance(law, Affine) else laws.fit(_all(law))


# --- records ---------------------------------------------------------------------------------


def _fit_records(records: Records, candidates: tuple[Law, ...]) -> Records:
    align = int(records.frame["psize"]) if records.frame and "psize" in records.frame else 1
    blocks = _fit_blocks(records.blocks, candidates, align)
    order = None if records.order is None else _fit(records.order)
    fitted = replace(records, blocks=blocks, order=order)
    if isinstance(blocks.offsets, Affine):
        return fitted
    offsets = _all(records.blocks.offsets)
    if bool((offsets[1:] >= offsets[:-1]).all()):
        return fitted
    size = nbytes(fitted)
    if size <= 4 * SMALL:
        return fitted
    sorted_ = _in_file_order(records, offsets, align)
    return fitted if size <= nbytes(sorted_) else sorted_


def _in_file_order(records: Records, offsets: Ints, align: int) -> Records:
    """Return the records numbered by offset, with the order of the samples."""
    by_offset = np.argsort(offsets, kind="stable")
    rank = np.empty(len(offsets), np.int64)
    rank[by_offset] = np.arange(len(offsets))
    order = rank if records.order is None else rank[_all(records.order)]
    lengths = _all(records.blocks.lengths)[by_offset]
    blocks = Blocks(laws.Explicit(offsets[by_offset]), laws.Explicit(lengths), records.blocks.path)
    return replace(records, blocks=_fit_blocks(blocks, (), align), order=laws.fit(order))


def nbytes(records: Records) -> int:
    """Return the bytes of the laws of the records in a sidecar."""
    every = (records.blocks.offsets, records.blocks.lengths, records.order)
    return sum(laws.packed_nbytes(law) for law in every if law is not None)


def _fit_blocks(blocks: Blocks, candidates: tuple[Law, ...], align: int = 1) -> Blocks:
    lengths = _fit(blocks.lengths)
    if isinstance(blocks.offsets, Affine):
        return replace(blocks, lengths=lengths)
    offsets = _all(blocks.offsets)
    return replace(blocks, offsets=_smallest(offsets, lengths, candidates, align), lengths=lengths)


def _smallest(offsets: Ints, lengths: Law, candidates: tuple[Law, ...], align: int) -> Law:
    """Return the smallest law of offsets that is exact."""
    closed = tuple(c for c in candidates if c.name != "replay")
    fitted = laws.fit(offsets, closed)
    if isinstance(fitted, Affine) or fitted in closed:
        return fitted
    options = [fitted]
    for candidate in candidates:
        short = isinstance(candidate, Replay) and candidate.steps <= SHORT
        if short and laws.is_exact(candidate, offsets):
            return min(fitted, candidate, key=laws.packed_nbytes)
    if laws.packed_nbytes(fitted) <= SMALL:
        return fitted
    if not isinstance(lengths, Affine) or lengths.stride:
        options += [_best_follow(offsets, lengths, align)]
    return min(options, key=laws.packed_nbytes)


def _best_follow(offsets: Ints, lengths: Law, align: int) -> Law:
    """Return the law of contiguous blocks, with the frame between them that fits best."""
    frames = [*_FRAMES, (16, align)] if align > 1 else list(_FRAMES)
    some = min(len(offsets), laws.JUDGED)
    head = laws.Explicit(lengths.span(0, some))
    judged = [
        (laws.packed_nbytes(follow.fit(offsets[:some], head, f, a).rest), f, a) for f, a in frames
    ]
    _, frame, step = min(judged)
    return follow.fit(offsets, lengths, frame, step)


# --- columns ---------------------------------------------------------------------------------


def _fit_column(column: Column) -> Column:
    grid = column.grid
    if grid is not None:
        masks = None if grid.masks is None else _fit(grid.masks)
        file_numbers = None if grid.file_numbers is None else _fit(grid.file_numbers)
        grid = replace(grid, blocks=_fit_chunks(grid), masks=masks, file_numbers=file_numbers)
    if column.first is None or column.count is None:
        return replace(column, grid=grid)
    count = _fit(column.count)
    first = _all(column.first)
    fitted_first: Law | None = laws.affine.fit(first)
    if fitted_first is None:
        fitted_first = behind = follow.fit(first, count, 0, 1)
        if not isinstance(behind.rest, Affine):
            fitted_first = min(behind, laws.fit(first), key=laws.packed_nbytes)
    return replace(column, grid=grid, first=fitted_first, count=count)


def _fit_chunks(grid: Grid) -> Blocks:
    """Return the chunks' laws; those of equal files begin again with every file."""
    blocks = grid.blocks
    if grid.files is not None:
        period = math.prod(grid.files)
        again = [
            fit_periodic(_all(blocks.offsets), period),
            fit_periodic(_all(blocks.lengths), period),
        ]
        if again[0] is not None and again[1] is not None:
            return replace(blocks, offsets=again[0], lengths=again[1])
    return _fit_blocks(blocks, ())
