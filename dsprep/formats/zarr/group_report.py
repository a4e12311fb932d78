"""How a store in groups will come out, for a person and for the space check."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dsprep.core.groups import Grouping, GroupPlan
from dsprep.core.schema import Ints, Schema
from dsprep.formats.base import WriteOptions
from dsprep.formats.zarr.group_plan import PADDING, GroupGrid, Track, key
from dsprep.formats.zarr.group_store import planned
from dsprep.formats.zarr.group_zip import header_nbytes
from dsprep.formats.zarr.shards import index_nbytes

ENTRY = 76
"""Bytes of an entry in a ZIP file's central directory, besides the name, at most."""

OVERHEAD = 64
"""Bytes by which a compressed chunk grows at most, besides 1 % of it."""


def report(schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool) -> GroupPlan:
    """Return the plan; see `base.Format.plan_groups`."""
    grid, made = planned(Path("a.zip" if zipped else "a"), schema, grouping, options)
    nbytes = grid.front if zipped else sum(map(len, made.values()))
    padding = 0
    for track in grid.tracks:
        last = np.arange(len(track.ends)) % track.groups == track.groups - 1
        last[-1:] = True
        if options.compress is None:
            stored = int(track.ends[last].sum()) - (int(track.starts[0]) if zipped else 0)
            padding += stored - sum(_held(grid, p.number) for p in track.places)
            nbytes += stored + (int(track.starts[0]) - grid.front if zipped else 0)
        else:
            stored = sum(_packed(grid, p.number, options.zarr_format) for p in track.places)
            skipped = (stored + grid.front) // (PADDING - 1) if grouping.align > 1 else 0
            padding += skipped
            nbytes += stored + skipped
        plan = grid.arrays[track.places[0].number]
        if plan.sharded:
            nbytes += index_nbytes(plan.file // plan.chunk) * int(last.sum())
    for number in grid.ordinary if not zipped else ():
        nbytes += grid.arrays[number].stored_nbytes(grid.rows[number])
    if zipped:
        chunks = [int(grid.chunks(p.number).sum()) for t in grid.tracks for p in t.places]
        nbytes += (sum(chunks) + len(made) + len(grid.ordinary)) * (ENTRY + 64)
    reads = _reads(grid)
    largest = int(_group_nbytes(grid).max(initial=0))
    aligned = all(bool((t.starts % grouping.align == 0).all()) for t in grid.tracks[:1])
    how = _how(grid, reads)
    if options.compress is not None and grid.tracks:
        most = sum(int(grid.chunks(p.number).max()) for t in grid.tracks for p in t.places)
        largest += largest // 100 + OVERHEAD * most
        aligned = grouping.align == 1 or grid.tracks[0].groups == 1
        small = [grid.arrays[n].field.name for n in grid.ordinary if _held(grid, n)]
        if small:
            how += f"; without compression: {', '.join(small)}"
        if not aligned:
            how += f"; aligned where that skips at most 1/{PADDING} of the file"
    return GroupPlan(nbytes, padding, largest, aligned, reads, how)


def _packed(grid: GroupGrid, number: int, zarr_format: int) -> int:
    """Return the bytes at most of the compressed chunks of an array, with their headers."""
    plan, count = grid.arrays[number], int(grid.chunks(number).sum())
    full = plan.chunk * plan.row_nbytes
    head = header_nbytes(key(plan, count, zarr_format)) if grid.zipped else 0
    return count * (full + full // 100 + OVERHEAD + head)


def _held(grid: GroupGrid, number: int) -> int:
    """Return the bytes of all samples in an array."""
    plan, edges = grid.arrays[number], grid.grouping.edges
    rows = int(edges[-1])
    if plan.role == "values":
        rows = int(np.sum(grid.grouping.rows[plan.field.name]))
    return rows * plan.row_nbytes


def _reads(grid: GroupGrid) -> int:
    """Return the reads by which dsprep fetches all fields of a group: copies are not used."""
    return len(grid.tracks) + len(_alone(grid))


def _alone(grid: GroupGrid) -> list[int]:
    """Return the arrays with samples that are in no track, except as copies."""
    return [n for n in grid.ordinary if grid.arrays[n].role == "samples" and _held(grid, n)]


def _group_nbytes(grid: GroupGrid) -> Ints:
    """Return the bytes of all reads of each group, a copied field once."""
    copied = {p.number for p in grid.copied}
    rows = sum(grid.arrays[n].row_nbytes for n in _alone(grid) if n not in copied)
    total: Ints = np.diff(grid.grouping.edges) * rows
    for track in grid.tracks:
        total = total + (track.used - track.starts)
    return total


def _how(grid: GroupGrid, reads: int) -> str:
    if not grid.tracks:
        return "there are no bytes in groups"
    if grid.zipped:
        return "one ZIP store; a group's chunks follow one another, with a small header between"
    track = grid.tracks[0]
    text = "a group is a chunk of the largest field" + _where(grid, track)
    names = ", ".join(grid.arrays[p.number].field.name for p in grid.copied)
    if names:
        text += f", with a copy of {names} behind it for readers that take the whole range"
    return text + (f"; dsprep makes a read per field, {reads} per group" * (reads > 1))


def _where(grid: GroupGrid, track: Track) -> str:
    if not grid.arrays[track.places[0].number].sharded:
        return " and a file"
    if track.groups >= grid.grouping.count:
        return " in one shard"
    return f" in shards of {track.groups:,} groups"
