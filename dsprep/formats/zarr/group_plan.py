"""Where the samples of a group go: which array is written how, and at which bytes.

A **track** is a series of groups stored back to back, each in one range of bytes. Track 0 has the
largest array of a group, and what one read fetches with it:

- in a ZIP file, every array with values of samples;
- in a shard, copies of the small fixed fields (`COPIES`), right behind the chunk. A shard's index
  may point anywhere and readers never look at what lies between chunks, so to them the array is
  an ordinary one; the small fields are arrays of their own beside it, which are the real ones.

Further tracks have one array each, in files of its own: fields too large to be copied. All other
arrays (small fields, and the index of ragged ones) are **ordinary**: rows one behind another.

A chunk is a group. Where groups differ in their number of samples, which chunks may not, a chunk
is what all groups are multiples of, and the chunks of a group are contiguous. The values of a
ragged field take one chunk per group, as long as the largest group needs: sample i of group g
begins at row ``g * capacity`` or behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from dsprep.core.groups import Grouping, GroupPlan, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.options import WriteOptions
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

PLAIN = "choose smaller groups, or leave compression out"
FULL = "4 GiB are the most that a member of a ZIP file holds here"

OVERHEAD = 64
"""Bytes by which a compressed chunk grows at most, besides 1 % of it."""


class GroupChunks(NamedTuple):
    """The chunks of an array in every group of a track.

    The first chunk is `at` bytes behind the group's beginning, `step` bytes before the next one. A
    copy has just the rows that there are.
    """

    number: int
    at: int
    step: int = 0
    copy: bool = False


class Cell(NamedTuple):
    """A chunk of a group: array and number of the chunk, its bytes, and those of samples.

    `at` counts bytes from the group's beginning.
    """

    at: int
    array: int
    chunk: int
    nbytes: int
    used: int


@dataclass(frozen=True, eq=False)
class Track:
    """Groups stored back to back; see the module.

    Attributes
    ----------
    slots
        The chunks of each array, by offset.
    groups
        Groups per file.
    starts, ends, used
        int64, shape ``(groups,)``: where each group begins in its file, where its last chunk ends,
        filled up, and where its last value ends; ``starts`` if it has none.
    """

    slots: tuple[GroupChunks, ...]
    groups: int
    starts: Ints
    ends: Ints
    used: Ints


@dataclass(frozen=True, eq=False)
class GroupGrid:
    """The arrays of an output in groups.

    Attributes
    ----------
    grouping
        The groups.
    zipped
        Whether it is a ZIP file.
    chunk
        Samples per chunk in groups.
    arrays, rows
        All arrays, settled, and their rows.
    tracks
        See the module; none if there are no groups with bytes.
    ordinary
        The numbers of the arrays that are in no track, except as copies.
    documents
        The metadata by key.
    beside
        Of a ZIP file: by number of an ordinary array, where each of its chunks begins.
    front
        Bytes kept free at the beginning of a ZIP file, for metadata and ordinary arrays.
    """

    grouping: Grouping
    zipped: bool
    chunk: int
    arrays: list[ArrayPlan]
    rows: list[int]
    tracks: list[Track]
    ordinary: list[int]
    documents: dict[str, bytes]
    beside: dict[int, Ints] = field(default_factory=dict)
    front: int = 0

    @property
    def copied(self) -> list[int]:
        """The numbers of the arrays that are copied into track 0."""
        return [p.number for t in self.tracks for p in t.slots if p.copy]

    def chunks(self, number: int) -> Ints:
        """Return how many chunks of an array each group has: int64, shape ``(groups,)``."""
        plan = self.arrays[number]
        if plan.role == "values":
            return np.ones(self.grouping.count, np.int64)
        return -(-np.diff(self.grouping.edges) // plan.chunk)

    def chunk_offsets(self, track: Track, slot: GroupChunks) -> Ints:
        """Return where each chunk of an array begins in its file: int64, shape ``(chunks,)``."""
        counts = self.chunks(slot.number)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        within = np.arange(int(counts.sum())) - before
        out: Ints = np.repeat(track.starts, counts) + slot.at + within * slot.step
        return out

    def cells(
        self, track: Track, group: int, samples: int = -1, rows: Mapping[str, int] | None = None
    ) -> list[Cell]:
        """Return the chunks of a group, by offset.

        Of its samples, and of their values by ragged field, so many count as used; all by default.
        """
        first, last = self.grouping.edges[group : group + 2].tolist()
        samples = last - first if samples < 0 else samples
        cells = []
        for slot in track.slots:
            plan, filled, chunk = self.arrays[slot.number], samples, self.chunk
            if plan.role == "values":
                name, chunk = plan.field.name, plan.chunk
                filled = int(self.grouping.rows[name][group]) if rows is None else rows[name]
            before = group if plan.role == "values" else first // plan.chunk
            for j in range(1 if plan.role == "values" else -(-filled // chunk)):
                used = min(chunk, filled - j * chunk) * plan.row_nbytes
                at, nbytes = slot.at + j * slot.step, chunk * plan.row_nbytes
                cells.append(Cell(at, slot.number, before + j, nbytes, used))
        return sorted(cells)


def plan_grid(schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool) -> GroupGrid:
    """Return where everything goes; raise `DsprepError` if that contradicts options or limits."""
    return _Planner(schema, options, grouping, zipped).plan()


class _Planner:
    """Works a `GroupGrid` out."""

    def __init__(
        self, schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool
    ) -> None:
        self.schema, self.options, self.grouping, self.zipped = schema, options, grouping, zipped
        if options.chunk is not None:
            raise UsageError("zarr: a chunk is a group", fix="leave --chunk out")
        if zipped and options.zarr_shard:
            raise UsageError("zarr-shard: a ZIP file has no shards", fix="leave it out")
        plan_arrays(schema, replace(options, zarr_shard=None))  # refuses what there is not
        self.packed = options.compress is not None
        if self.packed and schema.ragged:
            raise UnsupportedError(
                "zarr: groups with ragged fields are written without compression",
                fix="leave it out, or write HDF5",
            )
        self.sharded = not zipped and options.zarr_format == 3 and options.zarr_shard != 0
        shard = None if self.sharded else 0
        self.arrays = plan_arrays(schema, replace(options, compress=None, zarr_shard=shard))[0]
        self.sizes = np.diff(grouping.edges)
        inner = grouping.edges[1:-1]
        self.chunk = int(np.gcd.reduce(inner)) if len(inner) else int(grouping.edges[-1])
        self.single = bool((self.sizes <= self.chunk).all())  # a chunk per group
        self.per = self._groups_per_file()
        self.rows: list[int] = []

    def _groups_per_file(self) -> int:
        count, shard = max(1, self.grouping.count), self.options.zarr_shard
        if not self.sharded and not self.zipped:
            if not self.single:
                raise UnsupportedError(
                    "zarr: groups of different numbers of samples cannot be chunk files",
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
        if shard:
            if shard % self.chunk and self.grouping.count > 1:
                raise UsageError(
                    f"zarr: {shard} samples per shard",
                    expected=f"a multiple of the {self.chunk} samples of a group",
                )
            return min(count, max(1, shard // self.chunk))
        return min(count, MAX_CHUNKS)

    def plan(self) -> GroupGrid:
        grouped = self._count_rows()
        order = sorted(grouped, key=lambda n: -self._nbytes(n))
        divided, ordinary = self._divide(order)
        self._settle(grouped - set(ordinary))
        slots = [self._place_arrays(*track) for track in divided]
        made = self._documents(slots, ordinary)
        front, beside = 0, {}
        if self.zipped:
            front = sum(header_nbytes(name) + len(data) for name, data in made.items())
            for number in ordinary:
                head, nbytes = self._header(number), self._chunk_nbytes(number)
                chunks = np.arange(self.arrays[number].chunks(self.rows[number]) if nbytes else 0)
                beside[number] = front + head + (head + nbytes) * chunks
                front += (head + nbytes) * len(chunks)
        tracks = [self._track(p, front, i == 0) for i, p in enumerate(slots)]
        every = self.arrays, self.rows, tracks, ordinary, made, beside, front
        return GroupGrid(self.grouping, self.zipped, self.chunk, *every)

    def _count_rows(self) -> set[int]:
        """Find the rows of all arrays, and the chunks of values; return who has bytes in groups."""
        count, grouped = int(self.grouping.edges[-1]), set()
        for number, plan in enumerate(self.arrays):
            rows = count
            if plan.role == "values":
                capacity = int(self._values(plan).max(initial=0))
                rows = capacity * self.grouping.count
                plan = replace(plan, chunk=max(1, capacity), file=max(1, capacity) * self.per)
            if plan.role in ("samples", "values") and plan.row_nbytes and rows:
                grouped.add(number)
            self.arrays[number] = plan
            self.rows.append(rows)
        return grouped

    def _settle(self, grouped: set[int]) -> None:
        """Give the arrays their chunks and files; `grouped` are in tracks, but for copies."""
        count = int(self.grouping.edges[-1])
        for number, plan in enumerate(self.arrays):
            if number in grouped and plan.role == "samples":
                per = self.per if self.single else -(-count // self.chunk)
                plan = replace(plan, chunk=self.chunk, file=self.chunk * per)
            if number in grouped:
                file = plan.file if self.sharded else plan.chunk
                plan = replace(plan, sharded=self.sharded, file=file)
            elif plan.role == "values" and not self.sharded:
                plan = replace(plan, file=plan.chunk)
            self.arrays[number] = plan.settled(self.rows[number])
            self._check(number)

    def _check(self, number: int) -> None:
        """Raise `UnsupportedError` if a chunk of an array is too large."""
        for limited, limit, reason, fix in (
            (self.packed, MAX_PACKED, "2 GiB are the most that codecs compress at once", PLAIN),
            (self.zipped, LARGEST, FULL, "choose smaller groups, or a directory store"),
        ):
            if limited and self.rows[number] and self._chunk_nbytes(number) > limit:
                raise UnsupportedError(
                    f"zarr: {reason}",
                    where=f"field {self.arrays[number].field.name}",
                    found=f"{self._chunk_nbytes(number)} bytes in a group",
                    fix=fix,
                )

    def _values(self, plan: ArrayPlan) -> Ints:
        """Return how many rows of values each group has."""
        return np.asarray(self.grouping.rows[plan.field.name], np.int64)

    def _nbytes(self, number: int) -> int:
        """Return the bytes of an array in the largest group."""
        plan = self.arrays[number]
        rows = plan.chunk if plan.role == "values" else self.grouping.samples
        return rows * plan.row_nbytes

    def _chunk_nbytes(self, number: int) -> int:
        return self.arrays[number].chunk * self.arrays[number].row_nbytes

    def _divide(self, order: list[int]) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
        """Return the arrays and copies of each track, and the arrays of none.

        `order` are those that have bytes in groups, the largest first.
        """
        beside = [n for n in range(len(self.arrays)) if n not in order]
        if not order:
            return [], beside
        if self.zipped:
            heads = [n for n in order if self.arrays[n].role == "values"]
            return [(heads + [n for n in order if n not in heads], [])], beside
        main, rest = order[0], order[1:]
        group, total = self._nbytes(main), sum(map(self._nbytes, order))
        gap = round_up(group, self.grouping.align) - group
        left = total // SMALL if self.packed else max(gap, total // SMALL)
        small: list[int] = []
        for number in reversed(rest):
            if self.arrays[number].role == "samples" and self._nbytes(number) <= left:
                small.append(number)
                left -= self._nbytes(number)
        both = self.single or self.arrays[main].role == "samples"
        copies = small if both and self.sharded and not self.packed else []
        own = [n for n in rest if n not in small]
        if not self.single and not self.packed:
            # Rows of fixed size need no chunks of their own to lie together.
            small = small + [n for n in own if self.arrays[n].role == "samples"]
            own = [n for n in own if n not in small]
        return [([main], copies), *(([n], []) for n in own)], sorted(beside + small)

    def _header(self, number: int) -> int:
        """Return the bytes of the longest header of a ZIP file's member that is a chunk."""
        if not self.zipped:
            return 0
        plan = self.arrays[number]
        last = max(0, plan.chunks(self.rows[number]) - 1)
        return header_nbytes(plan.key(last, self.options.zarr_format))

    def _place_arrays(self, numbers: list[int], copies: list[int]) -> tuple[GroupChunks, ...]:
        """Return a group of these arrays, of which those of values come first."""
        at = 0
        slots: list[GroupChunks] = []
        heads = [n for n in numbers if self.arrays[n].role == "values"]
        cells = [n for n in numbers if n not in heads]
        for number in heads:
            at += self._header(number) * bool(slots)
            slots.append(GroupChunks(number, at))
            at += self._chunk_nbytes(number)
        begin = at
        inside: list[tuple[int, int]] = []
        for number in [*cells, *copies]:
            at += self._header(number) * bool(slots or inside)
            inside.append((number, at))
            at += self.chunk * self.arrays[number].row_nbytes
        step = at - begin
        if not heads and cells:  # the header of the first array, before the next cell
            step += self._header(cells[0])
        return (*slots, *(GroupChunks(n, a, step, n in copies) for n, a in inside))

    def _track(self, slots: tuple[GroupChunks, ...], front: int, first: bool) -> Track:
        """Return the track of groups with these slots; the first one is aligned."""
        ends, used = self._reach(slots)
        head, align = self._header(slots[0].number), self.grouping.align
        if not first and self._chunk_nbytes(slots[0].number) < WIDE * align:
            align = 1
        strides = -(-(ends + head) // align) * align
        starts = np.cumsum(strides) - strides
        starts += round_up(front + head, align) if self.zipped else 0
        if self.per < self.grouping.count:
            starts -= np.repeat(starts[:: self.per], self.per)[: len(starts)]
        return Track(slots, self.per, starts, starts + ends, starts + used)

    def _reach(self, slots: tuple[GroupChunks, ...]) -> tuple[Ints, Ints]:
        """Return the bytes of each group up to the end of its last chunk and last value."""
        ends = used = np.zeros(self.grouping.count, np.int64)
        for slot in slots:
            plan = self.arrays[slot.number]
            if plan.role == "values":
                last, last_rows, full = np.zeros_like(used), self._values(plan), plan.chunk
            else:
                last = -(-self.sizes // self.chunk) - 1
                last_rows, full = self.sizes - last * self.chunk, self.chunk
            begin = slot.at + last * slot.step
            ends = np.maximum(ends, begin + full * plan.row_nbytes)
            used = np.maximum(used, np.where(last_rows > 0, begin + last_rows * plan.row_nbytes, 0))
        return ends, used

    def _documents(
        self, tracks: list[tuple[GroupChunks, ...]], ordinary: list[int]
    ) -> dict[str, bytes]:
        own: dict[str, dict[str, Any]] = {}
        for plan in self.arrays:
            if plan.role == "values":
                rows = int(self._values(plan).sum())
                own[plan.field.name] = {CAPACITY: plan.chunk, ROWS: rows}
        for main, *others in tracks:
            for slot in (p for p in others if p.copy):
                at = slot.at - main.at - self._chunk_nbytes(main.number)
                copy = {"array": self.arrays[main.number].path, "at": at}
                own[self.arrays[slot.number].path] = {COPY: copy}
        raw = frozenset(self.arrays[n].path for n in ordinary)
        arrays = list(zip(self.arrays, self.rows, strict=True))
        return documents(self.schema, arrays, self.options, own, raw)


# --- for a person and for the space check ----------------------------------------------------


def report(schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool) -> GroupPlan:
    """Return the plan; see `base.Format.plan`."""
    grid = plan_grid(schema, options, grouping, zipped)
    nbytes = grid.front if zipped else sum(map(len, grid.documents.values()))
    padding = 0
    for track in grid.tracks:
        last = np.arange(len(track.ends)) % track.groups == track.groups - 1
        last[-1:] = True
        if options.compress is None:
            skipped = int(track.starts[0]) if zipped else 0
            stored = int(track.ends[last].sum()) - skipped
            padding += stored - sum(_payload(grid, p.number) for p in track.slots)
            nbytes += stored + skipped - grid.front
        else:
            stored = sum(_packed(grid, p.number, options.zarr_format) for p in track.slots)
            skipped = (stored + grid.front) // (PADDING - 1) if grouping.align > 1 else 0
            padding += skipped
            nbytes += stored + skipped
        plan = grid.arrays[track.slots[0].number]
        if plan.sharded:
            nbytes += index_nbytes(plan.file // plan.chunk) * int(last.sum())
    chunk_counts = [grid.chunks(p.number) for t in grid.tracks for p in t.slots]
    if zipped:
        members = sum(int(n.sum()) for n in chunk_counts) + len(grid.documents) + len(grid.ordinary)
        nbytes += members * (ENTRY + 64)
    else:
        nbytes += sum(grid.arrays[n].stored_nbytes(grid.rows[n]) for n in grid.ordinary)
    # Reads by which dsprep fetches all fields of a group: copies are not used.
    alone = [n for n in grid.ordinary if grid.arrays[n].role == "samples" and _payload(grid, n)]
    reads = len(grid.tracks) + len(alone)
    largest = _largest(grid, alone)
    aligned = all(bool((t.starts % grouping.align == 0).all()) for t in grid.tracks[:1])
    how = _how(grid, reads)
    if options.compress is not None and grid.tracks:
        largest += largest // 100 + OVERHEAD * sum(int(n.max()) for n in chunk_counts)
        aligned = grouping.align == 1 or grid.tracks[0].groups == 1
        small = [grid.arrays[n].field.name for n in grid.ordinary if _payload(grid, n)]
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


def _payload(grid: GroupGrid, number: int) -> int:
    """Return the bytes of all samples in an array."""
    plan, rows = grid.arrays[number], int(grid.grouping.edges[-1])
    if plan.role == "values":
        rows = int(np.sum(grid.grouping.rows[plan.field.name]))
    return rows * plan.row_nbytes


def _largest(grid: GroupGrid, alone: list[int]) -> int:
    """Return the bytes of all reads of the largest group, a copied field once."""
    copied = grid.copied
    total: Ints = np.diff(grid.grouping.edges) * sum(
        grid.arrays[n].row_nbytes for n in alone if n not in copied
    )
    for track in grid.tracks:
        total = total + (track.used - track.starts)
    return int(total.max(initial=0))


def _how(grid: GroupGrid, reads: int) -> str:
    if not grid.tracks:
        return "there are no bytes in groups"
    if grid.zipped:
        return "one ZIP store; a group's chunks follow one another, with a small header between"
    track = grid.tracks[0]
    where = " and a file"
    if grid.arrays[track.slots[0].number].sharded:
        where = f" in shards of {track.groups:,} groups"
        if track.groups >= grid.grouping.count:
            where = " in one shard"
    text = f"a group is a chunk of the largest field{where}"
    names = ", ".join(grid.arrays[n].field.name for n in grid.copied)
    if names:
        text += f", with a copy of {names} after it for readers that take the whole range"
    return text + (f"; dsprep makes a read per field, {reads} per group" * (reads > 1))
