"""Where the samples of a group go: which array is written how, and at which bytes.

A **track** is a place where groups lie one behind another, each in one range of bytes. Track 0
has the largest array of a group, and what one read fetches with it:

- in a ZIP file, every array with values of samples;
- in a shard, copies of the small fixed fields (`COPIES`), right behind the chunk. A shard's index
  may point anywhere and readers never look at what lies between chunks, so to them the array is
  an ordinary one; the small fields are arrays of their own beside it, which are the real ones.

Further tracks have one array each, in files of its own: fields too large to be copied. All other
arrays (small fields, and the index of ragged ones) are **ordinary**: rows one behind another.

A chunk is a group. Where groups differ in their number of samples, which chunks may not, a chunk
is what all groups are multiples of, and the chunks of a group lie together. The values of a ragged
field take one chunk per group, as long as the largest group needs: sample i of group g begins at
row ``g * capacity`` or behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsprep.core.groups import Grouping, GroupPlan, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.base import WriteOptions
from dsprep.formats.zarr.attributes import CAPACITY, COPY, ROWS
from dsprep.formats.zarr.chunks import index_nbytes
from dsprep.formats.zarr.documents import documents
from dsprep.formats.zarr.plan import LARGEST, MAX_CHUNKS, ArrayPlan, header_nbytes, plan_arrays

SMALL = 50
"""Fields of together at most 1/50 of a group, or that fit into the gap behind it, are copied."""

PADDING = 50
"""Compressed groups are aligned while at most 1/50 of the file is skipped for it."""

MAX_PACKED = (1 << 31) - 32
"""Bytes of a chunk that all codecs take."""

WIDE = 64
"""Arrays of further tracks are aligned where a chunk has as many stripes, which costs 1/64."""

MAX_MEMBERS = 1 << 22
"""Chunks of an array that a shard's index or a ZIP file lists at most."""


ENTRY = 76
"""Bytes of an entry in a ZIP file's central directory, besides the name, at most."""

OVERHEAD = 64
"""Bytes by which a compressed chunk grows at most, besides 1 % of it."""


@dataclass(frozen=True)
class Place:
    """The chunks of an array in every group of a track.

    Attributes
    ----------
    number
        Of the array.
    at
        Bytes from the group's beginning to the first chunk.
    step
        Bytes from one chunk of the group to the next.
    copy
        Whether it is a copy, of just the rows that there are.
    """

    number: int
    at: int
    step: int = 0
    copy: bool = False


@dataclass(frozen=True, eq=False)
class Track:
    """Groups one behind another; see the module.

    Attributes
    ----------
    places
        By offset.
    starts
        int64, shape ``(groups,)``: where each group begins in its file.
    ends
        Where its last chunk ends, filled up.
    used
        Where its last value ends; ``starts`` if it has none.
    groups
        Groups per file.
    """

    places: tuple[Place, ...]
    starts: Ints
    ends: Ints
    used: Ints
    groups: int


@dataclass(frozen=True, eq=False)
class GroupGrid:
    """The arrays of an output in groups.

    Attributes
    ----------
    grouping
        The groups.
    zipped
        Whether it is a ZIP file.
    arrays
        All arrays, settled.
    rows
        Of each array.
    tracks
        See the module; none if there are no groups with bytes.
    ordinary
        The numbers of the arrays that are in no track, except as copies.
    front
        Bytes kept free at the beginning of a ZIP file, for metadata and ordinary arrays.
    chunk
        Samples per chunk in groups.
    """

    grouping: Grouping
    zipped: bool
    arrays: tuple[ArrayPlan, ...]
    rows: tuple[int, ...]
    tracks: tuple[Track, ...]
    ordinary: tuple[int, ...]
    front: int
    chunk: int

    @property
    def copied(self) -> tuple[Place, ...]:
        """The copies in track 0."""
        return tuple(p for t in self.tracks for p in t.places if p.copy)

    def first_chunk(self, number: int, group: int) -> int:
        """Return the number of an array's first chunk in a group."""
        plan = self.arrays[number]
        return group if plan.role == "values" else int(self.grouping.edges[group]) // plan.chunk

    def chunks(self, number: int) -> Ints:
        """Return how many chunks of an array each group has: int64, shape ``(groups,)``."""
        plan = self.arrays[number]
        if plan.role == "values":
            return np.ones(self.grouping.count, np.int64)
        return -(-np.diff(self.grouping.edges) // plan.chunk)

    def chunk_places(self, track: Track, place: Place) -> Ints:
        """Return where each chunk of an array begins in its file: int64, shape ``(chunks,)``."""
        counts = self.chunks(place.number)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        within = np.arange(int(counts.sum())) - before
        out: Ints = np.repeat(track.starts, counts) + place.at + within * place.step
        return out


def plan_grid(
    schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool, front: int = 0
) -> GroupGrid:
    """Return where everything goes.

    Parameters
    ----------
    front
        See `GroupGrid`.

    Raises
    ------
    UnsupportedError
        If no chunks can hold groups as these.
    UsageError
        If an option contradicts the groups.
    """
    if options.chunk is not None:
        raise UsageError("zarr: a chunk is a group", fix="leave --chunk out")
    return _Planner(schema, options, grouping, zipped, front).plan()


class _Planner:
    """Works a `GroupGrid` out."""

    def __init__(
        self, schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool, front: int
    ) -> None:
        self.options, self.grouping, self.zipped, self.front = options, grouping, zipped, front
        self.sizes = np.diff(grouping.edges)
        self.files = not zipped and (options.zarr_format == 2 or options.zarr_shard == 0)
        if zipped and options.zarr_shard:
            raise UsageError("zarr-shard: a ZIP file has no shards", fix="leave it out")
        plan_arrays(schema, replace(options, zarr_shard=None))  # refuses what there is not
        self.packed = options.compress is not None
        if self.packed and schema.ragged:
            raise UnsupportedError(
                "zarr: groups with ragged fields are written without compression",
                fix="leave it out, or write HDF5",
            )
        shard = 0 if zipped or self.files else None
        self.base = plan_arrays(schema, replace(options, compress=None, zarr_shard=shard))[0]
        inner = grouping.edges[1:-1]
        self.chunk = int(np.gcd.reduce(inner)) if len(inner) else int(grouping.edges[-1])
        self.single = bool((self.sizes <= self.chunk).all())  # a chunk per group
        self.per = self._groups_per_file()

    def _groups_per_file(self) -> int:
        count, wanted = max(1, self.grouping.count), self.options.zarr_shard
        if self.files:
            if not self.single:
                raise UnsupportedError(
                    "zarr: groups of different numbers of samples are no chunk files",
                    fix="write Zarr v3 with shards, a ZIP store, or HDF5",
                )
            return 1
        if self.zipped or not self.single:
            if self.grouping.edges[-1] > MAX_MEMBERS * self.chunk:
                raise UnsupportedError(
                    f"zarr: chunks of {self.chunk} samples, the largest that all groups are "
                    "multiples of, are too many",
                    fix="choose groups of equally many samples, or HDF5",
                )
            return count
        if wanted:
            if wanted % self.chunk and self.grouping.count > 1:
                raise UsageError(
                    f"zarr: {wanted} samples per shard",
                    expected=f"a multiple of the {self.chunk} samples of a group",
                )
            return min(count, max(1, wanted // self.chunk))
        return min(count, MAX_CHUNKS)

    def plan(self) -> GroupGrid:
        count = int(self.grouping.edges[-1])
        arrays, rows, grouped = [], [], []
        for number, plan in enumerate(self.base):
            own = count
            if plan.role == "values":
                capacity = int(self._rows(plan).max(initial=0))
                own = capacity * self.grouping.count
                plan = replace(plan, chunk=max(1, capacity), file=max(1, capacity) * self.per)
            if plan.role in ("samples", "values") and plan.row_nbytes and own:
                grouped.append(number)
            arrays.append(plan)
            rows.append(own)
        order = sorted(grouped, key=lambda n: -self._nbytes(arrays[n]))
        self.arrays = arrays
        tracks, ordinary = self._divide(order)
        for number, plan in enumerate(arrays):
            grouped_here = number in grouped and number not in ordinary
            if grouped_here and plan.role == "samples":
                per = self.per if self.single else -(-count // self.chunk)
                plan = replace(plan, chunk=self.chunk, file=self.chunk * per)
            sharded = not self.zipped and not self.files
            if grouped_here:
                plan = replace(plan, sharded=sharded, file=plan.file if sharded else plan.chunk)
            elif plan.role == "values" and not sharded:
                plan = replace(plan, file=plan.chunk)
            arrays[number] = plan.settled(rows[number])
        self._check_members(arrays, rows)
        made = [self._track(*track, rows, i == 0) for i, track in enumerate(tracks)]
        return GroupGrid(
            self.grouping,
            self.zipped,
            tuple(arrays),
            tuple(rows),
            tuple(made),
            tuple(ordinary),
            self.front,
            self.chunk,
        )

    def _rows(self, plan: ArrayPlan) -> Ints:
        """Return how many rows of values each group has."""
        return np.asarray(self.grouping.rows[plan.field.name], np.int64)

    def _nbytes(self, plan: ArrayPlan) -> int:
        """Return the bytes of an array in the largest group."""
        rows = plan.chunk if plan.role == "values" else self.grouping.samples
        return rows * plan.row_nbytes

    def _divide(self, order: list[int]) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
        """Return the arrays and copies of each track, and the arrays of none.

        Parameters
        ----------
        order
            Arrays that have bytes in groups, the largest first.
        """
        beside = [n for n in range(len(self.arrays)) if n not in order]
        if not order:
            return [], beside
        if self.zipped:
            heads = [n for n in order if self.arrays[n].role == "values"]
            return [(heads + [n for n in order if n not in heads], [])], beside
        main, rest = order[0], order[1:]
        group = self._nbytes(self.arrays[main])
        total = sum(self._nbytes(self.arrays[n]) for n in order)
        gap = round_up(group, self.grouping.align) - group
        left = total // SMALL if self.packed else max(gap, total // SMALL)
        small: list[int] = []
        for number in reversed(rest):
            nbytes = self._nbytes(self.arrays[number])
            if self.arrays[number].role == "samples" and nbytes <= left:
                small.append(number)
                left -= nbytes
        both = self.single or self.arrays[main].role == "samples"
        copies = small if both and not self.files and not self.packed else []
        own = [n for n in rest if n not in small]
        if not (
            self.single or self.packed
        ):  # rows of fixed size need no chunks of their own to lie together
            small += [n for n in own if self.arrays[n].role == "samples"]
            own = [n for n in own if n not in small]
        return [([main], copies), *(([n], []) for n in own)], sorted(beside + small)

    def _header(self, number: int, rows: list[int]) -> int:
        if not self.zipped:
            return 0
        plan = self.arrays[number]
        last = max(0, plan.chunks(rows[number]) - 1)
        return header_nbytes(plan.key(last, self.options.zarr_format))

    def _track(self, numbers: list[int], copies: list[int], rows: list[int], first: bool) -> Track:
        """Return a track of these arrays, of which those of values come first."""
        at = 0
        places: list[Place] = []
        heads = [n for n in numbers if self.arrays[n].role == "values"]
        cells = [n for n in numbers if n not in heads]
        for number in heads:
            at += self._header(number, rows) * bool(places)
            places.append(Place(number, at))
            at += self.arrays[number].chunk * self.arrays[number].row_nbytes
        begin = at
        inside: list[tuple[int, int, bool]] = []
        for number in [*cells, *copies]:
            at += self._header(number, rows) * bool(places or inside)
            inside.append((number, at, number in copies))
            at += self.chunk * self.arrays[number].row_nbytes
        step = at - begin
        if not heads and cells:  # the header of the first array, before the next cell
            step += self._header(cells[0], rows)
        places += [Place(n, a, step, c) for n, a, c in inside]
        ends, used = self._reach(places)
        head = self._header(places[0].number, rows)
        align = self.grouping.align
        chunk_nbytes = self.arrays[numbers[0]].chunk * self.arrays[numbers[0]].row_nbytes
        if not first and chunk_nbytes < WIDE * align:
            align = 1
        strides = -(-(ends + head) // align) * align
        starts = np.cumsum(strides) - strides
        starts += round_up(self.front + head, align) if self.zipped else 0
        if self.per < self.grouping.count:
            starts -= np.repeat(starts[:: self.per], self.per)[: len(starts)]
        return Track(tuple(places), starts, starts + ends, starts + used, self.per)

    def _reach(self, places: list[Place]) -> tuple[Ints, Ints]:
        """Return the bytes of each group up to the end of its last chunk and last value."""
        ends = used = np.zeros(self.grouping.count, np.int64)
        for place in places:
            plan = self.arrays[place.number]
            if plan.role == "values":
                last, held, full = np.zeros_like(used), self._rows(plan), plan.chunk
            else:
                last = -(-self.sizes // self.chunk) - 1
                held, full = self.sizes - last * self.chunk, self.chunk
            begin = place.at + last * place.step
            real = np.where(held > 0, begin + held * plan.row_nbytes, 0)
            ends = np.maximum(ends, begin + full * plan.row_nbytes)
            used = np.maximum(used, real)
        return ends, used

    def _check_members(self, arrays: list[ArrayPlan], rows: list[int]) -> None:
        for plan, count in zip(arrays, rows, strict=True):
            if self.packed and count and plan.chunk * plan.row_nbytes > MAX_PACKED:
                raise UnsupportedError(
                    "zarr: 2 GiB are the most that codecs compress at once",
                    where=f"field {plan.field.name}",
                    found=f"{plan.chunk * plan.row_nbytes} bytes in a group",
                    fix="choose smaller groups, or leave compression out",
                )
            if self.zipped and count and plan.chunk * plan.row_nbytes > LARGEST:
                raise UnsupportedError(
                    "zarr: 4 GiB are the most that a member of a ZIP file holds here",
                    where=f"field {plan.field.name}",
                    found=f"{plan.chunk * plan.row_nbytes} bytes in a group",
                    fix="choose smaller groups, or a directory store",
                )


def planned(
    schema: Schema, grouping: Grouping, options: WriteOptions, zipped: bool
) -> tuple[GroupGrid, dict[str, bytes]]:
    """Return where everything goes, and the metadata documents by key."""
    grid = plan_grid(schema, options, grouping, zipped)
    made = _documents(schema, grid, options)
    if zipped:
        front = metadata_nbytes(made) + sum(
            len(places) * step for _, places, step in beside(grid, 0, options.zarr_format)
        )
        grid = plan_grid(schema, options, grouping, zipped, front)
    return grid, made


def metadata_nbytes(made: dict[str, bytes]) -> int:
    """Return the bytes of the documents as members of a ZIP file."""
    return sum(header_nbytes(name) + len(data) for name, data in made.items())


def beside(grid: GroupGrid, at: int, zarr_format: int) -> Iterator[tuple[int, Ints, int]]:
    """Yield the ordinary arrays of a ZIP file: number, place of each chunk, bytes of a member.

    Parameters
    ----------
    at
        Where the first header may begin: behind the metadata.
    """
    for number in grid.ordinary:
        plan = grid.arrays[number]
        count = plan.chunks(grid.rows[number]) if plan.row_nbytes else 0
        head = header_nbytes(plan.key(max(0, count - 1), zarr_format))
        step = head + plan.chunk * plan.row_nbytes
        yield number, at + head + step * np.arange(count), step
        at += step * count


def _documents(schema: Schema, grid: GroupGrid, options: WriteOptions) -> dict[str, bytes]:
    own: dict[str, dict[str, Any]] = {}
    for plan in grid.arrays:
        if plan.role == "values":
            rows = int(np.sum(grid.grouping.rows[plan.field.name]))
            own[plan.field.name] = {CAPACITY: plan.chunk, ROWS: rows}
    for place in grid.copied:
        first = grid.tracks[0].places[0]
        main = grid.arrays[first.number]
        at = place.at - first.at - main.chunk * main.row_nbytes
        own[grid.arrays[place.number].path] = {COPY: {"array": main.path, "at": at}}
    raw = frozenset(grid.arrays[n].path for n in grid.ordinary)
    return documents(schema, list(zip(grid.arrays, grid.rows, strict=True)), options, own, raw)


# --- for a person and for the space check ----------------------------------------------------


def report(schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool) -> GroupPlan:
    """Return the plan; see `base.Format.plan`."""
    grid, made = planned(schema, grouping, options, zipped)
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
    head = header_nbytes(plan.key(count, zarr_format)) if grid.zipped else 0
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
