"""A unit on its way into memory: what has to be read for it, and what is done once it is there.

Fixed fields go to the blocks of the batches that they belong to, to the slots where they are
delivered. How they get there depends on the field and the file:

direct
    Each value by its own address in the list that ``preadv`` takes: the kernel shuffles.
staged
    Values of less than `SMALL` bytes of an array: read as they are stored, then gathered.
decoded
    What has to be decoded (filters, tiles, records without constant offsets) or is not stored:
    read by `Sidecar.read`, then gathered. So are units in more than `MANY` files.

Ragged values are contiguous in a block of their own, in the order of delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dsprep.core.schema import Arena, Array, Batch, Bytes, Field, Ints, Ragged, Schema, concatenate
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import DsprepError, FormatError, UsageError, layout_mismatch
from dsprep.layout.locate import Extents, check_rows, locate, rows_of
from dsprep.layout.plain import plain
from dsprep.reader.cached import Staged
from dsprep.reader.memory import Block
from dsprep.reading.read_plan import ReadPlan, joined, shared, woven
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle
from dsprep.storage.ranges import as_bytes
from dsprep.storage.scatter import APART_NEAR, GROUP_NEAR, SEVERAL, RangeError, Runs, one_range

Mode: TypeAlias = Literal["direct", "staged", "decoded"]

SMALL = 512
"""Bytes of a value below which gathering is faster than an address of its own (measured)."""

BLOCK_NBYTES = 64 << 10
"""Bytes of a block at least, so that tiny batches do not take a page each."""

MANY = 64
"""Files of a unit from which on they are not held open together, but opened as they are read."""

EACH = 64
"""Samples of a part where each has files of its own."""

_ALIGN = 64


@dataclass(frozen=True)
class Area:
    """Where a fixed field is in a block: `at` is its first byte, a sample has `nbytes`."""

    field: Field
    at: int
    nbytes: int


class Slice(NamedTuple):
    """Samples of a unit that are in one block."""

    block: Block
    memory: Bytes  # the lease of the block
    begin: int  # the slot in the block of the first of them
    low: int  # which samples of the unit, in the order of delivery
    high: int
    ragged: Mapping[str, Ragged]  # ragged fields of the unit, once it is there

    def cut(self, count: int) -> tuple[Slice, Slice]:
        """Return the first `count` samples, and the others, of which there are some."""
        at = self.low + count
        return self._replace(high=at), self._replace(begin=self.begin + count, low=at)


@dataclass(frozen=True)
class ReadPart:
    """What one thread reads: one range of a file, or many, or fields that are decoded."""

    file: Handle | None = None  # None where `decode` does the reading
    runs: Runs | None = None
    decode: Callable[[Arena, Sidecar], int] | None = None
    """With memory of the thread, and the dataset or a copy of it; returns bytes asked for."""


@dataclass
class Fill:
    """A unit on its way into memory."""

    samples: Ints  # in the order of the files, int64
    slots: Ints  # where each is delivered among those of the unit
    slices: Sequence[Slice]  # the blocks that they go to, in the order of delivery
    tier: Staged | None = None  # the copy from which they are read; None: the dataset itself
    parts: list[ReadPart] = field(default_factory=list)  # what has to be read
    ragged: dict[str, Ragged] = field(default_factory=dict)  # as delivered, once all is done
    files: dict[Handle, int] = field(default_factory=dict)  # that are read, and first where
    done: SimpleQueue[None] = field(default_factory=SimpleQueue)
    """Not empty once all is there, or `error` is. Not an event: an interrupt within its `wait`,
    which is written in Python, may become a RuntimeError."""
    error: BaseException | None = None
    missing: int = 0  # parts
    spoiled: bool = False  # something of the copy was wrong: all is read again without it
    staged: dict[str, Bytes] = field(default_factory=dict)  # values of fields as they are stored
    decoded: dict[str, list[tuple[Ints, Ragged]]] = field(default_factory=dict)  # of some samples

    def take(self) -> Sequence[Slice]:
        """Return the slices, and release their memory."""
        slices, self.slices = self.slices, ()
        return slices

    def fail(self, error: BaseException) -> None:
        """Hand an error to the consumer; threads that read other parts keep the memory."""
        self.error = error
        self.parts.clear()  # those that decode refer to this
        self.done.put(None)


class Filler:
    """Plans and finishes fills; safe to use from several threads.

    Parameters
    ----------
    sidecar, names
        The dataset, and the fields wanted.
    batch_size
        Samples of a full batch.
    verify
        Whether samples are compared with their checksums before.

    Attributes
    ----------
    areas
        By fixed field, where it is in a block.
    batches, capacity
        Batches that a block holds, and samples: more than one where batches are tiny.
    """

    def __init__(
        self,
        sidecar: Sidecar,
        names: Sequence[str],
        batch_size: int,
        verify: bool = False,
    ) -> None:
        self.sidecar, self.names, self.verify = sidecar, tuple(names), verify
        self.fields = [sidecar.schema[name] for name in names]
        self.areas: dict[str, Area] = {}
        each = sum(f.row_nbytes for f in self.fields if not f.ragged) * batch_size
        self.batches = max(1, BLOCK_NBYTES // max(each, batch_size))
        self.capacity = self.batches * batch_size
        at = 0
        for f in self.fields:
            if not f.ragged:
                self.areas[f.name] = Area(f, at, f.row_nbytes)
                at += -(-f.row_nbytes * self.capacity // _ALIGN) * _ALIGN
        self.block_nbytes = at
        self._columns = [  # at, nbytes: as in `Area`; -1: ragged
            (f.name, f.dtype, f.inner, self.areas[f.name].at, f.row_nbytes)
            if f.name in self.areas
            else (f.name, f.dtype, f.inner, 0, -1)
            for f in self.fields
        ]
        self._simple = not verify and not any(f.ragged for f in self.fields)
        self._modes: dict[int, dict[str, Mode]] = {}  # by the number of a layout

    def modes(self, number: int) -> dict[str, Mode]:
        """Return how each field of a file gets to its slots."""
        layout = self.sidecar.content.files[number].layout
        if layout not in self._modes:
            self._modes[layout] = self._find_modes(number)
        return self._modes[layout]

    def _find_modes(self, number: int) -> dict[str, Mode]:
        layout = self.sidecar.layout(number)
        modes: dict[str, Mode] = {}
        for f in self.fields:
            if f.name in layout.unlocated:
                raise UsageError(
                    f"field {f.name} can be read only by the format's own library: "
                    f"{layout.unlocated[f.name]}",
                    where=self.sidecar.root(number),
                    fix="name other fields with fields=, or repack the dataset",
                )
            column = layout.columns.get(f.name)
            if column is not None:
                plain = not f.row_nbytes if column.grid is None else column.grid.plain
                small = not f.ragged and f.row_nbytes < SMALL
                modes[f.name] = ("staged" if small else "direct") if plain else "decoded"
        records = layout.records
        apart = {*layout.files, *layout.given}
        modes |= {f.name: "decoded" for f in self.fields if f.name in apart}
        inside = [f for f in self.fields if f.name not in modes]
        if records is not None and inside:
            located = all(records.parts[f.name].at is not None for f in inside)
            few = sum(max(SMALL, f.row_nbytes) for f in inside) <= SMALL * len(inside)
            tiny = few and not any(f.ragged for f in inside)
            for f in inside:
                modes[f.name] = "direct" if located and not tiny else "decoded"
        return modes

    # --- planning ----------------------------------------------------------------------------

    def plan(self, fill: Fill, limit: int, align: int, take: Callable[[str, int], Bytes]) -> None:
        """Find out what a fill has to read.

        Parameters
        ----------
        fill
            With its samples and slices.
        limit, align
            Threads that share the work, and bytes at whose multiples a range is cut for them.
        take
            Gives memory for ragged values, or for values as they are stored: their field, bytes.

        Raises
        ------
        FormatError
            If the sidecar gives offsets that are not in the files, or another size.
        """
        n = len(fill.samples)

        def to(area: Area, staged: bool) -> Ints | int:
            if staged:
                name, nbytes = area.field.name, n * area.nbytes
                if name not in fill.staged:
                    fill.staged[name] = take(name, nbytes)[:nbytes]
                return int(fill.staged[name].ctypes.data)
            first = [s.block.address + (s.begin - s.low) * area.nbytes for s in fill.slices]
            counts = [s.high - s.low for s in fill.slices]
            at = np.repeat(np.array(first, np.int64), counts)  # by the slot within the unit
            at += np.arange(area.at, area.at + n * area.nbytes, area.nbytes)
            targets: Ints = at[fill.slots]
            return targets

        rising = bool((fill.samples[1:] - fill.samples[:-1] == 1).all())
        reads = self._plan_strided(fill, to) if rising and self._simple else None
        if reads is None:
            reads = []
            for file, runs in self._plan_any(fill, to, rising, take):
                if len(runs.starts) < SEVERAL:
                    reads += [(file, *each) for each in runs]
                else:
                    fill.parts += [ReadPart(file, part) for part in runs.divided(limit)]
        for file, start, iovecs in reads:
            for p in shared(start, iovecs, limit, align):
                fill.parts.append(ReadPart(file, one_range(*p)))
        fill.missing = len(fill.parts)

    def _plan_strided(
        self, fill: Fill, to: Callable[[Area, bool], Ints | int]
    ) -> list[tuple[Handle, int, Ints]] | None:
        """Plan consecutive samples of one file at a constant distance; None if they are not."""
        n = len(fill.samples)
        areas = [area for area in self.areas.values() if area.nbytes]
        if not n or not areas:
            return None
        number, local = self.sidecar.file_of(int(fill.samples[0]))
        modes = self.modes(number)
        if n > self.sidecar.content.files[number].samples - local or "decoded" in modes.values():
            return None
        arrays = plain(self.sidecar.layout(number), [area.field for area in areas])
        ranges, opened = list[tuple[int, Ints]](), self.opened(fill)
        file: Handle | None = None
        for each in arrays or ():
            if (run := each.run(local, n)) is None:
                return None
            other = opened.open_file(number, run[0])
            begin, file = run[1] + each.fields[0][1], file or other
            if other is not file or begin < 0:
                return None
            to_each = [to(self.areas[f.name], modes[f.name] == "staged") for f, _ in each.fields]
            places = woven(each, to_each, run[2], n)
            if places is None or begin + int(places[:, 1].sum()) > file.nbytes:
                return None  # the other way states what is wrong
            ranges.append((begin, places))
        planned = joined(ranges)
        return None if file is None or planned is None else [(file, *each) for each in planned]

    def _plan_any(
        self,
        fill: Fill,
        to: Callable[[Area, bool], Ints | int],
        rising: bool,
        take: Callable[[str, int], Bytes],
    ) -> Iterator[tuple[Handle, Runs]]:
        """Plan samples wherever they are."""
        by_file = self.sidecar.by_file(fill.samples)
        if self.verify:
            fill.parts += [self._checking(number, local) for number, _, local in by_file]
        fields = [f for f in self.fields if f.ragged or f.row_nbytes]
        many = self._in_many_files(fields, by_file)
        plan, decoded = ReadPlan(), list[str]()
        lengths: dict[str, list[tuple[int, Ints, Extents]]] = {}
        for f in fields:
            if all(f.name in self.sidecar.layout(number).files for number, _, _ in by_file):
                self._plan_files(fill, f, by_file, take)
                continue
            located = None if many else self._located(f, by_file)
            if located is None:
                decoded.append(f.name)
                continue
            if f.ragged:
                lengths[f.name] = located
                continue
            area = self.areas[f.name]
            staged = all(self.modes(number)[f.name] == "staged" for number, _, _ in by_file)
            address = to(area, staged)
            if isinstance(address, int):
                address = address + np.arange(len(fill.samples), dtype=np.int64) * area.nbytes
            for number, chosen, extents in located:
                self._check_sizes(f, extents, len(chosen), number)
                self._add(fill, plan, number, extents, address[chosen])
        for number, chosen, local in by_file if decoded else ():
            given = self.sidecar.layout(number).given
            names = [name for name in decoded if name not in given]
            if len(names) < len(decoded):  # no file has them, so one part does it
                others = [name for name in decoded if name in given]
                fill.parts.append(self._decoding(fill, chosen, others))
            if not many:
                fill.files.update(self._files(fill, number, local, decoded))
            size = self._part_size(number, names) if many else len(chosen)
            fill.parts += [
                self._decoding(fill, chosen[a : a + size], names)
                for a in range(0, len(chosen) if names else 0, size)
            ]
        for name, each in lengths.items():
            self._plan_ragged(fill, name, each, plan, take)
        return plan.runs(GROUP_NEAR if rising else APART_NEAR)

    def opened(self, fill: Fill) -> Sidecar:
        """Return what opens the files from which a unit is read."""
        return self.sidecar if fill.tier is None else fill.tier.sidecar

    def _add(self, fill: Fill, plan: ReadPlan, number: int, extents: Extents, to: Ints) -> None:
        opened = self.opened(fill)
        plan.add(lambda path: opened.open_file(number, path), extents, to, "a sample")

    def _located(
        self, f: Field, by_file: Sequence[tuple[int, Ints, Ints]]
    ) -> list[tuple[int, Ints, Extents]] | None:
        """Return where a field is in each file; None if in one of them it has to be decoded."""
        if any(self.modes(number)[f.name] == "decoded" for number, _, _ in by_file):
            return None
        out = [(number, c, self._locate(number, f.name, local)) for number, c, local in by_file]
        if any(len(extents.offset) and int(extents.offset.min()) < 0 for _, _, extents in out):
            return None  # chunks that are not stored: fill values
        return out

    def _in_many_files(
        self, fields: Sequence[Field], by_file: Sequence[tuple[int, Ints, Ints]]
    ) -> bool:
        """Whether samples are in more files than may be open at a time."""
        if len(by_file) > MANY:
            return True
        total = 0
        for number, _, local in by_file:
            layout = self.sidecar.layout(number)
            for f in fields:
                if f.name in layout.files:
                    total += len(local)
                column = layout.columns.get(f.name)
                if column is None or column.grid is None or not column.grid.several:
                    continue
                file_index = self._locate(number, f.name, local).file_index
                if file_index is not None and file_index.shape[1] > MANY // len(fields):
                    total += np.unique(file_index, axis=1).shape[1]
        return total > MANY

    def _part_size(self, number: int, names: Sequence[str]) -> int:
        """Return the samples of a part, of which each may take a file for each of the fields."""
        if self.sidecar.layout(number).files:
            return EACH  # of those one is open at a time
        return max(1, MANY // max(1, len(names)))

    def _locate(self, number: int, name: str, local: Ints) -> Extents:
        layout = self.sidecar.layout(number)
        column = layout.columns.get(name)
        if column is not None and column.grid is not None:
            check_rows(column.grid, *rows_of(column, local), name)
        return locate(layout, name, local)

    def _files(
        self, fill: Fill, number: int, local: Ints, names: Sequence[str]
    ) -> dict[Handle, int]:
        """Return the files that hold fields, but for chunks that are files of their own.

        Each with the offset of what is read first.
        """
        extents = [self._locate(number, name, local) for name in names]
        paths = {
            f.template: int(f.offset[f.offset >= 0][0])
            for f in extents
            if f.file_index is None and (f.offset >= 0).any()
        }
        return {self.opened(fill).open_file(number, path): at for path, at in paths.items()}

    def _check_sizes(self, f: Field, extents: Extents, count: int, number: int) -> None:
        """Raise unless every sample has as many bytes as the field."""
        sizes = extents.length
        if len(sizes) != count:
            sizes = np.bincount(extents.request, extents.length, count).astype(np.int64)
        if len(sizes) and not bool((sizes == f.row_nbytes).all()):
            raise FormatError(
                f"the sidecar gives field {f.name} a wrong size",
                where=self.sidecar.root(number),
                expected=f"{f.row_nbytes} bytes",
                found=f"{int(sizes[sizes != f.row_nbytes][0])} bytes",
                fix="write the sidecar again with dsprep provenance",
            )

    def _plan_ragged(
        self,
        fill: Fill,
        name: str,
        located: list[tuple[int, Ints, Extents]],
        plan: ReadPlan,
        take: Callable[[str, int], Bytes],
    ) -> None:
        """Give every sample of a ragged field its address, contiguous in the order of delivery."""
        f = self.sidecar.schema[name]
        sizes = np.zeros(len(fill.samples), np.int64)
        file_nbytes = plan.nbytes
        for number, chosen, extents in located:
            count = np.bincount(extents.request, extents.length, len(chosen)).astype(np.int64)
            excess = f.excess(count)
            if excess.any():
                raise FormatError(
                    f"a value does not fit {f}",
                    where=self.sidecar.root(number),
                    expected=f"a multiple of {f.row_nbytes} bytes",
                    found=f"{int(count[excess != 0][0])} bytes",
                )
            sizes[chosen] = count
            opened = self.opened(fill)
            file_nbytes += sum(opened.open_file(number, p).nbytes for p, _ in extents.by_path())
        if int(sizes.sum()) > file_nbytes and _distinct(fill.samples, sizes) > file_nbytes:
            raise FormatError(
                f"the sidecar gives samples of field {name} that overlap",
                where=self.sidecar.dataset,
                fix="write it again with dsprep provenance",
            )
        memory, to = self._place(fill, f, sizes, take)
        for number, chosen, extents in located:
            self._add(fill, plan, number, extents, to[chosen] + memory.ctypes.data)

    def _place(
        self, fill: Fill, f: Field, sizes: Ints, take: Callable[[str, int], Bytes]
    ) -> tuple[Bytes, Ints]:
        """Return memory for ragged values of so many bytes each, and where each begins in it."""
        delivered = np.empty_like(sizes)
        delivered[fill.slots] = sizes
        ends = offsets_of(delivered)
        memory = take(f.name, int(ends[-1]))
        values = memory[: int(ends[-1])].view(f.dtype).reshape(-1, *f.inner)
        fill.ragged[f.name] = Ragged(values, ends // max(1, f.row_nbytes), f.kind)
        return memory, ends[:-1][fill.slots]

    def _plan_files(
        self,
        fill: Fill,
        f: Field,
        by_file: Sequence[tuple[int, Ints, Ints]],
        take: Callable[[str, int], Bytes],
    ) -> None:
        """Plan a field of which every sample has a file of its own: it is read to its slot."""
        sizes = np.zeros(len(fill.samples), np.int64)
        for number, chosen, local in by_file:
            sizes[chosen] = self.sidecar.layout(number).files[f.name].lengths.at(local)
        if len(sizes) and int(sizes.min()) < 0:
            raise layout_mismatch("gives a sample a file of less than no bytes", "the files")
        memory, to = self._place(fill, f, sizes, take)

        def part(number: int, chosen: Ints, local: Ints) -> ReadPart:
            begins, ends = to[chosen], to[chosen] + sizes[chosen]
            names = self.sidecar.layout(number).files[f.name].names

            def read(arena: Arena, opened: Sidecar) -> int:
                opened.read_files(number, names.some(local), begins, ends, memory)
                return int((ends - begins).sum())

            return ReadPart(decode=read)

        fill.parts += [
            part(number, chosen[a : a + EACH], local[a : a + EACH])
            for number, chosen, local in by_file
            for a in range(0, len(chosen), EACH)
        ]

    def _decoding(self, fill: Fill, chosen: Ints, names: Sequence[str]) -> ReadPart:
        """Return the part that reads fields of some samples by `Sidecar.read`."""
        samples = fill.samples[chosen]
        # Ragged values wait for those of other files, and the thread needs its arena before that.
        kept = any(self.sidecar.schema[name].ragged for name in names)

        def decode(arena: Arena, opened: Sidecar) -> int:
            batch = opened.read(samples, names, arena=None if kept else arena)
            for name, column in batch.items():
                if isinstance(column, Ragged):
                    fill.decoded.setdefault(name, []).append((chosen, column))
                else:
                    self._deliver(fill, self.areas[name], column, fill.slots[chosen])
            return sum(int(column.nbytes) for column in batch.values())

        return ReadPart(decode=decode)

    def _checking(self, number: int, local: Ints) -> ReadPart:
        """Return the part that compares samples with their checksums."""

        def check(arena: Arena, opened: Sidecar) -> int:
            opened.proofs.check(number, local, self.names, read=True)
            return 0

        return ReadPart(decode=check)

    def sample_at(self, fill: Fill, part: ReadPart, error: BaseException) -> int:
        """Return the sample of a unit at which reading a part failed, or the unit's first one."""
        if part.decode is not None and isinstance(error, (FormatError, FileNotFoundError)):
            return self._first_damaged(np.sort(fill.samples))
        if part.file is not None and part.runs is not None:
            starts, end = part.runs.starts, part.file.look()[0]
            beyond = np.flatnonzero(starts + part.runs.sizes > end)
            offset = int(starts[0])
            if isinstance(error, RangeError):
                offset = error.offset
            elif len(beyond):
                offset = max(end, int(starts[beyond[0]]))
            for number, chosen, local in self.sidecar.by_file(fill.samples):
                modes = self.modes(number)
                for name in (n for n in self.names if modes[n] != "decoded"):
                    extents = locate(self.sidecar.layout(number), name, local)
                    for path, positions in extents.by_path():
                        low = extents.offset[positions]
                        hit = np.flatnonzero(
                            (low <= offset) & (offset < low + extents.length[positions])
                        )
                        if len(hit) and self.sidecar.open_file(number, path) is part.file:
                            return int(fill.samples[chosen[extents.request[positions][hit[0]]]])
        return int(fill.samples[0])

    def _first_damaged(self, samples: Ints) -> int:
        """Return the first sample that cannot be decoded or verified, by halving them."""

        def fails(low: int, high: int) -> bool:
            try:
                self.sidecar.read(samples[low:high], self.names)
                parts = self.sidecar.by_file(samples[low:high]) if self.verify else ()
                for number, _, local in parts:
                    self.sidecar.proofs.check(number, local, self.names, read=True)
            except (OSError, DsprepError):
                return True
            return False

        low, high = 0, len(samples)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(low, middle) else (middle, high)
        return int(samples[low if fails(low, high) else 0])

    # --- finishing ---------------------------------------------------------------------------

    def finish(self, fill: Fill) -> None:
        """Put staged and decoded values where they are delivered, once everything is read."""
        for name, staged in fill.staged.items():
            self._deliver(fill, self.areas[name], staged, fill.slots)
        fill.staged.clear()
        for name, columns in fill.decoded.items():
            fill.ragged[name] = _joined(self.sidecar.schema[name], fill, columns)

    def batch(self, pieces: Sequence[Slice]) -> Batch:
        """Return the batch of some slices, of which no two are in different blocks."""
        count = sum([s.high - s.low for s in pieces])
        memory = pieces[0].memory if pieces else np.empty(self.block_nbytes, np.uint8)
        begin = pieces[0].begin if pieces else 0
        out: Batch = {}
        for name, dtype, inner, at, nbytes in self._columns:
            if nbytes >= 0:
                out[name] = np.ndarray((count, *inner), dtype, memory, at + begin * nbytes)
                continue
            parts: list[Batch] = [{name: s.ragged[name][s.low : s.high]} for s in pieces]
            out |= concatenate(Schema((self.sidecar.schema[name],)), parts)
        return out

    def _deliver(self, fill: Fill, area: Area, values: Array, slots: Ints) -> None:
        """Gather values into the blocks; `slots` says where each of them is delivered."""
        if not area.nbytes:
            return
        row = np.dtype((np.void, area.nbytes))
        rows = np.ascontiguousarray(values).reshape(-1).view(row)
        edges = [s.low for s in fill.slices]
        if len(slots) == len(fill.slots):  # all of them, which need not be sorted
            order = np.empty_like(slots)
            order[slots] = np.arange(len(slots))
        else:
            order = np.argsort(slots)
            edges = np.searchsorted(slots, edges, sorter=order).tolist()
        for s, (a, b) in zip(fill.slices, pairwise([*edges, len(slots)]), strict=True):
            count, at = s.high - s.low, area.at + s.begin * area.nbytes
            if b - a == count:
                rows.take(order[a:b], 0, np.ndarray(count, row, s.memory, at), "clip")
            elif b > a:
                to: Array = np.ndarray(count, row, s.memory, at)
                to[slots[order[a:b]] - s.low] = rows[order[a:b]]


def _distinct(samples: Ints, sizes: Ints) -> int:
    """Return the bytes of samples, each counted once however often it comes."""
    return int(sizes[np.unique(samples, return_index=True)[1]].sum())


def _joined(f: Field, fill: Fill, columns: list[tuple[Ints, Ragged]]) -> Ragged:
    """Return ragged values of all samples in the order of delivery."""
    lengths = np.zeros(len(fill.samples), np.int64)
    for chosen, column in columns:
        lengths[chosen] = column.lengths
    order = np.empty_like(fill.slots)
    order[fill.slots] = np.arange(len(order))
    width, edges = f.row_nbytes, offsets_of(lengths[order])
    out = np.empty((int(edges[-1]), *f.inner), f.dtype)
    to = edges[:-1][fill.slots] * width
    for chosen, column in columns:
        values = as_bytes(np.ascontiguousarray(column.values))
        starts, nbytes = column.offsets[:-1] * width, column.lengths * width
        move_spans(
            np.frombuffer(values, np.uint8),
            starts,
            nbytes,
            out.reshape(-1).view(np.uint8),
            to[chosen],
        )
    return Ragged(out, edges, f.kind)
