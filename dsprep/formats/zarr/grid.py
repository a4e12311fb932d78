"""The places of the chunks of a store, decided before any I/O.

Without groups the rows of every array are back to back. In groups a chunk is a group; all but the
last have equally many samples. The values of a ragged field have one chunk per group, as long as
the largest group needs: the rows of group g begin at row ``g * capacity``.

A **track** is a series of groups, each in one range of bytes: in a ZIP file all arrays with values
of samples, in a directory one array in files of its own. In a directory small fields are
**ordinary**, as the index of ragged ones is: rows back to back, in chunks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.base import FilePlan, State, Writer
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.attributes import CAPACITY, ROWS
from dsprep.formats.zarr.chunks import index_nbytes
from dsprep.formats.zarr.documents import documents
from dsprep.formats.zarr.plan import LARGEST, MAX_CHUNKS, header_nbytes, plan_arrays, show

SMALL = 50
"""Fields of together at most 1/50 of a group are ordinary arrays."""

MAX_PACKED = (1 << 31) - 32
"""Bytes of a chunk that all codecs take."""

WIDE = 64
"""Arrays of further tracks are aligned where a chunk has as many stripes, which costs 1/64."""

ENTRY = 140
"""Bytes of an entry in a ZIP file's central directory, with its name, at most."""

DOCUMENTS = 2048
"""Bytes allowed for the metadata of an array."""

OVERHEAD = 64
"""Bytes by which a compressed chunk grows at most, besides 1 % of it."""


@dataclass(frozen=True, eq=False)
class Track:
    """A series of groups; see the module.

    Attributes
    ----------
    numbers
        Of the arrays, by offset in a group.
    starts, used, ends
        int64, shape ``(groups,)``: where each group begins in its file, where its last value ends
        (``starts`` if it has none), and where its last chunk ends.
    """

    numbers: tuple[int, ...]
    starts: Ints
    used: Ints
    ends: Ints


class Grid:
    """The arrays of an output, and the offsets of their chunks.

    Raises `DsprepError` if the groups contradict the options or the limits of the format.

    Attributes
    ----------
    grouping, grouped
        The groups, and whether the output is written in groups; without, all samples are one.
    zipped, per
        Whether the groups are in a ZIP file, and groups per file.
    unit, whole
        As of `Writer`.
    arrays, rows
        All arrays, settled, and their rows: 0 where only writing them tells.
    tracks, ordinary
        See the module. The numbers of arrays that are in no track.
    offsets
        By number of an array: where each of its chunks begins in its file, int64. Not of arrays
        whose chunks are back to back.
    documents
        The metadata by key, of a store in groups.
    front
        Bytes kept free at the beginning of a ZIP file, for metadata and ordinary arrays.
    """

    def __init__(
        self, schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool
    ) -> None:
        self.schema, self.options, self.grouping = schema, options, grouping
        self.grouped, samples = not grouping.plain, grouping.total
        self.zipped = zipped and self.grouped
        self.tracks: list[Track] = []
        self.offsets: dict[int, Ints] = {}
        self.front, self.whole = 0, False
        planned, self.unit = plan_arrays(schema, options)
        if self.grouped:
            self.unit = 1
            self._place_groups(grouping)
        else:
            self.rows = [0 if p.role == "values" else samples for p in planned]
            self.arrays = [p if p.role == "values" else p.settled(samples) for p in planned]
            self.ordinary = list(range(len(self.arrays)))

    def _place_groups(self, grouping: Grouping) -> None:
        """Decide the arrays of a store in groups, and where their chunks go."""
        packed = self.options.compress is not None
        self.whole = packed or self.zipped
        self._check(packed)
        sharded = not self.whole and self.options.zarr_format == 3
        self.per = max(1, grouping.count) if sharded or self.zipped else 1
        if sharded:
            self.per = min(self.per, MAX_CHUNKS)
        inside = self.per if sharded else 1
        bare = replace(self.options, compress=None, zarr_shard=None if sharded else 0)
        self.arrays, self.rows = plan_arrays(self.schema, bare)[0], []
        for number, plan in enumerate(self.arrays):
            self.rows.append(grouping.total)
            if plan.role == "values":
                capacity = int(grouping.rows[plan.field.name].max(initial=0))
                self.rows[number] = capacity * grouping.count
                chunk = max(1, capacity)
                self.arrays[number] = replace(plan, chunk=chunk, file=chunk * inside)
        divided = self._divide()
        tracked = {number for track in divided for number in track}
        for number, plan in enumerate(self.arrays):
            if number in tracked and plan.role == "samples":
                chunk, codec = grouping.samples, self.options.compress
                plan = replace(plan, chunk=chunk, file=chunk * inside, whole_files=packed)
                plan = replace(plan, codec=codec)
            self.arrays[number] = plan.settled(self.rows[number])
            self._check_chunk(number)
        self.ordinary = [n for n in range(len(self.arrays)) if n not in tracked]
        self.documents = self.describe(self.rows)
        self.front = self._place_front() if self.zipped else 0
        self.tracks = [self._track(numbers, i == 0) for i, numbers in enumerate(divided)]

    # --- what there may be ---------------------------------------------------------------------

    def _check(self, packed: bool) -> None:
        if self.options.chunk is not None or self.options.zarr_shard is not None:
            raise UsageError("zarr: groups decide chunks and shards", fix="leave --chunk out")
        if packed and (self.schema.ragged or self.zipped):
            raise UnsupportedError(
                "zarr: groups of ragged fields and in ZIP files are written without compression",
                fix="leave it out, or write HDF5",
            )

    def _check_chunk(self, number: int) -> None:
        """Raise `UnsupportedError` if a chunk of an array is too large."""
        plan, nbytes = self.arrays[number], self.arrays[number].chunk_nbytes
        limit = MAX_PACKED if plan.codec else LARGEST if self.zipped else nbytes
        if nbytes > limit and self.rows[number]:
            raise UnsupportedError(
                "zarr: a chunk is too large to be compressed, or for a member of a ZIP file",
                where=f"field {plan.field.name}",
                expected=f"at most {limit} bytes",
                found=f"{nbytes} bytes in a group",
                fix="choose smaller groups, or a directory store without compression",
            )

    # --- which array goes where ----------------------------------------------------------------

    def _divide(self) -> list[tuple[int, ...]]:
        """Return the arrays of each track."""
        nbytes = {
            n: (plan.chunk if plan.role == "values" else self.grouping.samples) * plan.row_nbytes
            for n, plan in enumerate(self.arrays)
            if plan.role in ("samples", "values") and self.rows[n]
        }
        order = sorted((n for n in nbytes if nbytes[n]), key=lambda n: -nbytes[n])
        if self.zipped and order:  # what a group does not use of values is then at its end
            return [tuple(sorted(order, key=lambda n: self.arrays[n].role == "values"))]
        left = sum(nbytes.values()) // SMALL
        own = order[:1]
        for number in reversed(order[1:]):
            fixed = self.arrays[number].role == "samples"
            if fixed and nbytes[number] <= left:
                left -= nbytes[number]
            else:
                own.insert(1, number)
        return [(n,) for n in own]

    def describe(self, rows: Sequence[int]) -> dict[str, bytes]:
        """Return the metadata by key, for so many rows of each array."""
        own: dict[str, dict[str, Any]] = {}
        for plan in self.arrays if self.grouped else ():
            if plan.role == "values":
                total = int(np.sum(self.grouping.rows[plan.field.name]))
                own[plan.field.name] = {CAPACITY: plan.chunk, ROWS: total}
        return documents(self.schema, [*zip(self.arrays, rows, strict=True)], self.options, own)

    def _place_front(self) -> int:
        """Place the ordinary arrays of a ZIP file behind its metadata; return where they end."""
        at = sum(header_nbytes(name) + len(data) for name, data in self.documents.items())
        for number in self.ordinary:
            head, nbytes = self._header(number), self.arrays[number].chunk_nbytes
            chunks = self.arrays[number].chunks(self.rows[number]) if nbytes else 0
            self.offsets[number] = at + head + (head + nbytes) * np.arange(chunks)
            at += (head + nbytes) * chunks
        return at

    def _track(self, numbers: tuple[int, ...], first: bool) -> Track:
        """Place the groups of some arrays; those of the first track are aligned."""
        align = self.grouping.align
        if not first and self.arrays[numbers[0]].chunk_nbytes < WIDE * align:
            align = 1
        head = self._header(numbers[0])
        begins, end = {}, -head  # behind the header of the first chunk a group begins
        for n in numbers:
            begins[n] = end + self._header(n)
            end = begins[n] + self.arrays[n].chunk_nbytes
        starts = np.arange(self.grouping.count) % self.per * round_up(end + head, align)
        if self.zipped:
            starts += round_up(self.front + head, align)
        used = starts
        for n in numbers:
            self.offsets[n], rows = starts + begins[n], self._rows_of_groups(n)
            stops = self.offsets[n] + rows * self.arrays[n].row_nbytes
            used = np.maximum(used, np.where(rows > 0, stops, 0))
        return Track(numbers, starts, used, starts + end)

    @property
    def summed(self) -> int:
        """The array in a directory whose parts of groups have sums; -1: none."""
        return self.tracks[0].numbers[0] if self.tracks and not self.zipped else -1

    # --- of one array --------------------------------------------------------------------------

    def _header(self, number: int) -> int:
        """Return the bytes of the longest header of a ZIP file's member that is a chunk."""
        plan = self.arrays[number]
        last = max(0, plan.chunks(self.rows[number]) - 1)
        return header_nbytes(plan.key(last, self.options.zarr_format)) if self.zipped else 0

    def _rows_of_groups(self, number: int) -> Ints:
        """Return the rows of an array in each group: int64, ``(groups,)``."""
        plan = self.arrays[number]
        if plan.role == "values":
            return np.asarray(self.grouping.rows[plan.field.name], np.int64)
        return np.diff(self.grouping.edges)

    def _payload(self, number: int) -> int:
        """Return the bytes of all samples in an array."""
        return int(self._rows_of_groups(number).sum()) * self.arrays[number].row_nbytes

    # --- for a person and for the space check --------------------------------------------------

    def file_plan(
        self, create: Callable[[Path, State | None], Writer], ragged_nbytes: int
    ) -> FilePlan:
        """Return what is decided; `ragged_nbytes` are those of ragged fields, if not in groups."""
        shown = (p for p in self.arrays if p.role in ("samples", "values"))
        plan = FilePlan(
            create=create, stored={p.field.name: show(p) for p in shown}, unit=self.unit
        )
        files = 2 + 3 * len(self.arrays) + 2 * sum(f.ragged for f in self.schema)
        if self.grouped:
            packed = self.options.compress is not None
            files += self.grouping.count * len(self.tracks) * packed
            return self._with_groups(replace(plan, files=1 if self.zipped else files))
        total, scratch = DOCUMENTS * (1 + len(self.arrays)), 0
        for array, rows in zip(self.arrays, self.rows, strict=True):
            if array.role == "values":  # all are counted with the first one
                rows = -(-max(0, ragged_nbytes) // max(1, array.row_nbytes))
                ragged_nbytes = 0
            stored = array.settled(rows).stored_nbytes(rows)
            if array.codec is not None:
                stored += stored // 100 + OVERHEAD * array.chunks(rows)
                scratch += rows * array.row_nbytes * (not array.whole_files)
            total += stored
        return replace(plan, nbytes=total, scratch_nbytes=scratch, files=files)

    def _with_groups(self, plan: FilePlan) -> FilePlan:
        """Return the plan with how groups will be stored."""
        nbytes, padding = self.front, 0
        if not self.zipped:
            nbytes = sum(map(len, self.documents.values()))
            nbytes += sum(self.arrays[n].stored_nbytes(self.rows[n]) for n in self.ordinary)
        for track in self.tracks:
            array, groups = self.arrays[track.numbers[0]], self.grouping.count
            last = np.minimum(np.arange(0, groups, self.per) + self.per, groups) - 1  # of each file
            content = sum(map(self._payload, track.numbers))
            stored = int(track.ends[last].sum()) - self.front
            if array.codec:
                content = stored = stored + stored // 100 + OVERHEAD * groups
            padding += stored - content
            nbytes += stored
            if array.sharded:
                nbytes += index_nbytes(array.file // array.chunk) * len(last)
        if self.zipped:
            nbytes += ENTRY * (len(self.documents) + sum(map(len, self.offsets.values())))
        alone = [n for n in self.ordinary if self.arrays[n].role == "samples" and self._payload(n)]
        each = np.diff(self.grouping.edges) * sum(self.arrays[n].row_nbytes for n in alone)
        largest = int(sum((t.used - t.starts for t in self.tracks), each).max(initial=0))
        aligned = all(not (t.starts % self.grouping.align).any() for t in self.tracks[:1])
        reads = len(self.tracks) + len(alone)
        if self.options.compress and self.tracks:
            largest += largest // 100 + OVERHEAD * len(self.tracks)
        return replace(
            plan,
            nbytes=nbytes,
            padding=padding,
            group_nbytes=largest,
            aligned=aligned,
            reads=reads,
        )
