"""From the samples of a unit to reads: which bytes go where, and what is done once they are there.

Fixed fields go to the blocks of the batches that they belong to, at the place where they are
delivered. How they get there depends on the field and the file:

direct
    Each value by its own place in the list that ``preadv`` takes: the kernel shuffles.
staged
    Values of less than `SMALL` bytes of an array: read as they lie, then gathered.
decoded
    What has to be decoded (filters, tiles, records without constant places) or is not stored:
    read by `Sidecar.read`, then gathered. So are units that lie in more than `MANY` files.

Ragged values lie one behind another in a block of their own, in the order of delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from dsprep.core.pread import GROUP_NEAR, NEAR, packed, ranges
from dsprep.core.schema import Arena, Array, Bytes, Field, Ints, Ragged
from dsprep.errors import FormatError, UsageError
from dsprep.layout.as_json import file_path
from dsprep.layout.locate import Extents, check_rows, locate, rows_of
from dsprep.reader.cutting import Reads, shared
from dsprep.reader.fills import Area, Fill, Part
from dsprep.reader.lines import Line, line, woven
from dsprep.reading.files import File
from dsprep.sidecar.sidecar import Sidecar

Mode: TypeAlias = Literal["direct", "staged", "decoded"]

SMALL = 512
"""Bytes of a value below which gathering is faster than a place of its own (measured)."""

BLOCK_NBYTES = 64 << 10
"""Bytes of a block at least, so that tiny batches do not take a page each."""

MANY = 64
"""Files of a unit from which on they are not held open together, but opened as they are read."""

_ALIGN = 64
_NONE = np.zeros(0, np.int64)


class Filler:
    """Plans and finishes fills.

    Parameters
    ----------
    sidecar
        The dataset.
    names
        The fields wanted.
    batch_size
        Samples of a full batch.
    verify
        Whether groups are compared with their checksums before.

    Attributes
    ----------
    areas
        By fixed field, where it lies in a block.
    batches, capacity
        Batches that a block holds, and samples: more than one where batches are tiny.
    block_nbytes
        Of a block.
    """

    def __init__(
        self, sidecar: Sidecar, names: Sequence[str], batch_size: int, verify: bool = False
    ) -> None:
        self.sidecar, self.names, self._verify = sidecar, tuple(names), verify
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
        self._any_ragged = any(f.ragged for f in self.fields)
        self.modes = lru_cache(maxsize=1024)(self._find_modes)

    def _find_modes(self, number: int) -> dict[str, Mode]:
        """Return how each field of a file gets to its place."""
        layout = self.sidecar.layout(number)
        found: dict[str, Mode] = {}
        for f in self.fields:
            if f.name in layout.unlocated:
                raise UsageError(
                    f"field {f.name} can be read only by the format's own library: "
                    f"{layout.unlocated[f.name]}",
                    where=self.sidecar.dataset / self.sidecar.content.files[number].path,
                    fix="name other fields with fields=, or repack the dataset",
                )
            column = layout.columns.get(f.name)
            if column is not None:
                plain = column.grid is None or column.grid.plain
                small = not f.ragged and f.row_nbytes < SMALL
                found[f.name] = ("staged" if small else "direct") if plain else "decoded"
                if column.grid is None and f.row_nbytes:
                    found[f.name] = "decoded"
        records = layout.records
        inside = [f for f in self.fields if f.name not in found]
        if records is not None and inside:
            located = all(records.parts[f.name].at is not None for f in inside)
            few = sum(max(SMALL, f.row_nbytes) for f in inside) <= SMALL * len(inside)
            tiny = few and not any(f.ragged for f in inside)
            for f in inside:
                found[f.name] = "direct" if located and not tiny else "decoded"
        return found

    # --- planning ----------------------------------------------------------------------------

    def plan(
        self,
        fill: Fill,
        most: int,
        align: int,
        take: Callable[[str, int], Bytes],
    ) -> None:
        """Find out what a fill has to read.

        Parameters
        ----------
        fill
            With its samples and slices.
        most
            Threads that share the work.
        align
            Bytes at whose multiples a range is cut for them.
        take
            Gives memory for the values of a ragged field: its name, bytes.

        Raises
        ------
        FormatError
            If the sidecar gives places that are not in the files, or of another size.
        """
        if not self._plan_even(fill, most, align):
            self._plan_any(fill, most, align, take)
        fill.missing = len(fill.parts)

    def _addresses(self, fill: Fill) -> tuple[Ints, Ints]:
        """Return the address of each sample's block, and the sample's place in it."""
        lows = np.array([s.low for s in fill.slices], np.int64)
        blocks = np.array([s.block.address for s in fill.slices], np.int64)
        shift = np.array([s.begin for s in fill.slices], np.int64) - lows
        if len(lows) == 1:
            return np.broadcast_to(blocks, len(fill.slots)), fill.slots + shift
        which = np.searchsorted(lows, fill.slots, "right") - 1
        return blocks[which], fill.slots + shift[which]

    def _stage(self, fill: Fill, area: Area) -> int:
        """Return the address of memory for the values of a staged field."""
        staged = fill._staged.get(area.field.name)
        if staged is None:
            staged = np.empty((len(fill.samples), area.nbytes), np.uint8)
            fill._staged[area.field.name] = staged
        return int(staged.ctypes.data)

    def _plan_even(self, fill: Fill, most: int, align: int) -> bool:
        """Plan consecutive samples of one file that lie evenly; False if they are not such."""
        samples, n = fill.samples, len(fill.samples)
        if not n or self._verify or self._any_ragged:
            return False
        first = int(samples[0])
        if int(samples[-1]) - first != n - 1 or not self._rising(samples):
            return False
        number, local = self.sidecar.file_of(first)
        if n > self.sidecar.content.files[number].samples - local:
            return False
        modes, layout = self.modes(number), self.sidecar.layout(number)
        lines: list[Line] = []
        addresses: list[Ints | int] = []
        base, place = self._addresses(fill)
        for area in self.areas.values():
            if not area.nbytes:
                continue
            mode = modes[area.field.name]
            found = None if mode == "decoded" else line(layout, area.field, local, n)
            if found is None or (lines and found.path != lines[0].path):
                return False
            lines.append(found)
            if mode == "staged":
                addresses.append(self._stage(fill, area))
            else:
                addresses.append(base + (place * area.nbytes + area.at))
        if not lines:
            return False
        file = self.sidecar.open_file(number, lines[0].path)
        ranges_ = woven(lines, addresses)
        if ranges_ is None:
            return False
        for each in lines:
            if each.offset + (n - 1) * each.stride + each.nbytes > file.nbytes:
                return False  # the other way tells what is wrong
        for start, places in ranges_:
            fill.parts += [Part(file, *p) for p in shared(start, places, most, align)]
        return True

    def _rising(self, samples: Ints) -> bool:
        return bool((samples[1:] - samples[:-1] == 1).all())

    def _plan_any(
        self,
        fill: Fill,
        most: int,
        align: int,
        take: Callable[[str, int], Bytes],
    ) -> None:
        """Plan samples wherever they lie."""
        base, place = self._addresses(fill)
        near = GROUP_NEAR if self._rising(fill.samples) else NEAR
        files: dict[int, Reads] = {}
        lengths: dict[str, list[tuple[Ints, Extents, int]]] = {}
        by_file = self.sidecar.by_file(fill.samples)
        if self._verify:
            fill.parts += [self._checking(number, local) for number, _, local in by_file]
        fields = [f for f in self.fields if f.ragged or f.row_nbytes]
        many = self._in_many_files(fields, by_file)
        decoded: list[str] = []
        for f in fields:
            located = None if many else self._located(f, by_file)
            if located is None:
                decoded.append(f.name)
                continue
            staged = all(self.modes(number)[f.name] == "staged" for number, _, _ in by_file)
            for (number, chosen, local), found in zip(by_file, located, strict=True):
                if f.ragged:
                    lengths.setdefault(f.name, []).append((chosen, found, number))
                    continue
                area = self.areas[f.name]
                self._check_sizes(f, found, len(local), number)
                if staged:
                    to = self._stage(fill, area) + chosen * area.nbytes
                else:
                    to = (base + (area.at + place * area.nbytes))[chosen]
                self._add(files, number, found, to)
        for number, chosen, local in by_file if decoded else ():
            if not many:
                fill.files.update(self._files(number, local, decoded))
            size = max(1, MANY // len(decoded)) if many else len(chosen)
            fill.parts += [
                self._decoding(fill, chosen[a : a + size], decoded)
                for a in range(0, len(chosen), size)
            ]
        for name, parts in lengths.items():
            self._plan_ragged(fill, name, parts, files, take)
        for reads in files.values():
            for start, places in reads.runs(near):
                fill.parts += [Part(reads.file, *p) for p in shared(start, places, most, align)]

    def _located(self, f: Field, by_file: Sequence[tuple[int, Ints, Ints]]) -> list[Extents] | None:
        """Return where a field lies in each file; None if in one of them it has to be decoded."""
        if any(self.modes(number)[f.name] == "decoded" for number, _, _ in by_file):
            return None
        out = [self._locate(number, f.name, local) for number, _, local in by_file]
        if any(len(found.offset) and int(found.offset.min()) < 0 for found in out):
            return None  # chunks that are not stored: fill values
        return out

    def _in_many_files(
        self, fields: Sequence[Field], by_file: Sequence[tuple[int, Ints, Ints]]
    ) -> bool:
        """Whether samples lie in more files than may be open at a time."""
        if len(by_file) > MANY:
            return True
        total = 0
        for number, _, local in by_file:
            for f in fields:
                column = self.sidecar.layout(number).columns.get(f.name)
                if column is None or column.grid is None or column.grid.files is None:
                    continue
                place = self._locate(number, f.name, local).place
                if place is not None and place.shape[1] > MANY // len(fields):
                    total += np.unique(place, axis=1).shape[1]
        return total > MANY

    def _locate(self, number: int, name: str, local: Ints) -> Extents:
        layout = self.sidecar.layout(number)
        column = layout.columns.get(name)
        if column is not None and column.grid is not None:
            check_rows(column.grid, *rows_of(column, local), name)
        return locate(layout, name, local)

    def _files(self, number: int, local: Ints, names: Sequence[str]) -> Iterator[File]:
        """Yield the files that hold fields, but for chunks that are files of their own."""
        for name in names:
            found = self._locate(number, name, local)
            if found.place is None and (found.offset >= 0).any():
                yield self.sidecar.open_file(number, found.template)

    def _check_sizes(self, f: Field, found: Extents, count: int, number: int) -> None:
        """Raise unless every sample has as many bytes as the field."""
        sizes = found.length
        if len(sizes) != count:
            sizes = np.bincount(found.request, found.length, count).astype(np.int64)
        if len(sizes) and not bool((sizes == f.row_nbytes).all()):
            raise FormatError(
                f"the sidecar gives field {f.name} a wrong size",
                where=self.sidecar.dataset / self.sidecar.content.files[number].path,
                expected=f"{f.row_nbytes} bytes",
                found=f"{int(sizes[sizes != f.row_nbytes][0])} bytes",
                fix="write the sidecar again with dsprep provenance",
            )

    def _add(self, files: dict[int, Reads], number: int, found: Extents, to: Ints) -> None:
        """Add the ranges of a field; `to`: where the first byte of each sample goes."""
        addresses = to
        request = found.request
        if len(request) != len(to) or (request[1:] == request[:-1]).any():
            before = np.cumsum(found.length) - found.length
            first = np.searchsorted(request, np.arange(len(to)))
            known = np.append(before, 0)[first]
            addresses = to[request] + before - known[request]
        for path, chosen in _by_place(found):
            file = self.sidecar.open_file(number, path)
            offsets, lengths = found.offset[chosen], found.length[chosen]
            file.check(offsets, lengths, "a sample")
            reads = files.setdefault(id(file), Reads(file))
            reads.add(offsets, lengths, addresses[chosen])

    def _plan_ragged(
        self,
        fill: Fill,
        name: str,
        parts: list[tuple[Ints, Extents, int]],
        files: dict[int, Reads],
        take: Callable[[str, int], Bytes],
    ) -> None:
        """Give every sample of a ragged field its place, one behind another."""
        f = self.sidecar.schema[name]
        width = max(1, f.row_nbytes)
        sizes = np.zeros(len(fill.samples), np.int64)
        for chosen, found, number in parts:
            count = np.bincount(found.request, found.length, len(chosen)).astype(np.int64)
            if (count % width).any():
                raise FormatError(
                    f"a value does not fit {f}",
                    where=self.sidecar.dataset / self.sidecar.content.files[number].path,
                    expected=f"a multiple of {width} bytes",
                    found=f"{int(count[count % width != 0][0])} bytes",
                )
            sizes[chosen] = count
        delivered = np.empty_like(sizes)
        delivered[fill.slots] = sizes
        ends = packed(delivered)
        whole = sum(r.file.nbytes for r in files.values()) + sum(
            self.sidecar.open_file(number, path).nbytes
            for _, found, number in parts
            for path, _ in _by_place(found)
        )
        if int(ends[-1]) > whole * max(1, len(fill.samples) // max(1, len(self.sidecar)) + 1):
            raise FormatError(
                f"the sidecar gives samples of field {name} that overlap",
                where=self.sidecar.dataset,
                fix="write it again with dsprep provenance",
            )
        memory = take(name, int(ends[-1]))
        to = memory.ctypes.data + ends[:-1][fill.slots]
        for chosen, found, number in parts:
            self._add(files, number, found, to[chosen])
        values = memory[: int(ends[-1])].view(f.dtype).reshape(-1, *f.inner)
        fill.ragged[name] = Ragged(values, ends // width, f.kind)

    def _decoding(self, fill: Fill, chosen: Ints, names: Sequence[str]) -> Part:
        """Return the part that reads fields of some samples by `Sidecar.read`."""
        samples = fill.samples[chosen]
        # Ragged values wait for those of other files, and the thread needs its arena before that.
        kept = any(self.sidecar.schema[name].ragged for name in names)

        def decode(arena: Arena) -> int:
            batch = self.sidecar.read(samples, names, arena=None if kept else arena)
            nbytes = 0
            for name in names:
                column = batch[name]
                nbytes += int(column.nbytes)
                if isinstance(column, Ragged):
                    fill._pieces.setdefault(name, []).append((chosen, column))
                elif len(samples) == len(fill.samples):
                    self._deliver(fill, self.areas[name], column)
                else:
                    self._deliver_some(fill, self.areas[name], column, chosen)
            return nbytes

        return Part(None, 0, _NONE, decode)

    def _checking(self, number: int, local: Ints) -> Part:
        """Return the part that compares samples with their checksums."""

        def check(arena: Arena) -> int:
            self.sidecar.proofs.check(number, local, self.names, read=True)
            return 0

        return Part(None, 0, _NONE, check)

    def sample_at(self, fill: Fill, file: File, offset: int) -> int:
        """Return the sample of a unit that has the byte `offset` of a file, or its first one."""
        for number, chosen, local in self.sidecar.by_file(fill.samples):
            modes = self.modes(number)
            for name in self.names:
                if modes[name] == "decoded":
                    continue
                found = locate(self.sidecar.layout(number), name, local)
                for path, which in _by_place(found):
                    low = found.offset[which]
                    hit = np.flatnonzero((low <= offset) & (offset < low + found.length[which]))
                    if len(hit) and self.sidecar.open_file(number, path) is file:
                        return int(fill.samples[chosen[found.request[which][hit[0]]]])
        return int(fill.samples[0])

    # --- finishing ---------------------------------------------------------------------------

    def finish(self, fill: Fill) -> None:
        """Put staged and decoded values where they are delivered, once everything is read."""
        for name, staged in fill._staged.items():
            self._deliver(fill, self.areas[name], staged)
        for name, pieces in fill._pieces.items():
            fill.ragged[name] = _joined(self.sidecar.schema[name], fill, pieces)

    def _deliver(self, fill: Fill, area: Area, values: Array) -> None:
        """Gather the values of all samples, which are as they lie, into their blocks."""
        if not area.nbytes:
            return
        order = np.empty_like(fill.slots)
        order[fill.slots] = np.arange(len(order))
        row = np.dtype((np.void, area.nbytes))
        flat = np.ascontiguousarray(values).reshape(len(order), -1).view(np.uint8)
        rows = flat.reshape(-1).view(row)
        for s in fill.slices:
            to = area.values(s.memory, s.begin, s.begin + s.high - s.low)
            np.take(rows, order[s.low : s.high], out=to.reshape(-1).view(row), mode="clip")

    def _deliver_some(self, fill: Fill, area: Area, values: Array, chosen: Ints) -> None:
        """Put the values of the samples `chosen` into their blocks."""
        if not area.nbytes:
            return
        slots = fill.slots[chosen]
        rows = np.ascontiguousarray(values).reshape(len(chosen), -1).view(np.uint8)
        for s in fill.slices:
            inside = np.flatnonzero((slots >= s.low) & (slots < s.high))
            to = area.values(s.memory, s.begin, s.begin + s.high - s.low)
            to[slots[inside] - s.low] = rows[inside]


def _joined(f: Field, fill: Fill, pieces: list[tuple[Ints, Ragged]]) -> Ragged:
    """Return ragged values of all samples in the order of delivery."""
    lengths = np.zeros(len(fill.samples), np.int64)
    starts = np.zeros(len(fill.samples), np.int64)
    at, values = 0, []
    for chosen, column in pieces:
        lengths[chosen] = column.lengths
        starts[chosen] = column.offsets[:-1] + at
        at += len(column.values)
        values.append(column.values)
    order = np.empty_like(fill.slots)
    order[fill.slots] = np.arange(len(order))
    joined = np.concatenate(values, dtype=f.dtype)  # keeps the byte order
    chosen = ranges(starts[order], lengths[order])
    return Ragged.from_lengths(joined[chosen], lengths[order], f.kind)


def _by_place(found: Extents) -> list[tuple[str, Ints | slice]]:
    """Return the files that ranges are in, and which of them are."""
    if found.place is None:
        return [(found.template, slice(None))]
    places, which = np.unique(found.place, axis=1, return_inverse=True)
    which = which.reshape(-1)
    return [
        (file_path(found.template, place), np.flatnonzero(which == i))
        for i, place in enumerate(places.T.tolist())
    ]
