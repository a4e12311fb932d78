"""Planning the reads of a unit: file ranges and their targets. Nothing is read here.

How a field gets to its slots depends on the field and the file:

direct
    Each value by its own address in the list that ``preadv`` takes: the kernel shuffles.
staged
    Values of less than `SMALL` bytes of an array: read as they are stored, then gathered.
decoded
    Encoded values (filters, tiles, records without constant offsets), or values not stored:
    read by `Sidecar.read`, then gathered. So are units in more files than may be open together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Arena, Field, Ints
from dsprep.errors import DsprepError, FormatError, layout_mismatch
from dsprep.layout.locate import Extents, check_rows, locate, rows_of
from dsprep.layout.plain import plain
from dsprep.reader.filling import Delivery, Fill, ReadPart, Take
from dsprep.reading.files import most_open
from dsprep.reading.layout_reader import check_located
from dsprep.reading.read_plan import ReadPlan, joined, shared, woven
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle
from dsprep.storage.scatter import APART_NEAR, GROUP_NEAR, SEVERAL, RangeError, one_range

Mode: TypeAlias = Literal["direct", "staged", "decoded"]

Located: TypeAlias = list[tuple[int, Ints, Extents]]
"""Extents of a field by file: the file's number, samples of the unit, their extents."""

SMALL = 512
"""Bytes of a value below which gathering is faster than an address of its own (measured)."""

EACH = 64
"""Samples of a part where each has files of its own."""


class UnitPlanner:
    """Plans fills; safe to use from several threads.

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
    delivery
        The memory that values go to.
    """

    def __init__(
        self, sidecar: Sidecar, names: Sequence[str], batch_size: int, verify: bool = False
    ) -> None:
        self.sidecar, self.names, self.verify = sidecar, tuple(names), verify
        self.fields = [sidecar.schema[name] for name in names]
        self.delivery = Delivery(self.fields, batch_size)
        self._simple = not verify and not any(f.ragged for f in self.fields)
        self._modes: dict[int, dict[str, Mode]] = {}  # by the number of a layout

    def modes(self, number: int) -> dict[str, Mode]:
        """Return the mode of each field of a file, by name."""
        layout = self.sidecar.content.files[number].layout
        if layout not in self._modes:
            self._modes[layout] = self._find_modes(number)
        return self._modes[layout]

    def _find_modes(self, number: int) -> dict[str, Mode]:
        layout = self.sidecar.layout(number)
        modes: dict[str, Mode] = {}
        fix = "name other fields with fields=, or repack the dataset"
        check_located(layout, self.names, self.sidecar.root(number), fix)
        for f in self.fields:
            column = layout.columns.get(f.name)
            if column is None or (f.row_nbytes if column.grid is None else not column.grid.plain):
                modes[f.name] = "decoded"
            else:
                modes[f.name] = "direct" if f.ragged or f.row_nbytes >= SMALL else "staged"
        parts = {} if layout.records is None else layout.records.parts
        inside = [f for f in self.fields if f.name in parts]
        tiny = all(not f.ragged and f.row_nbytes <= SMALL for f in inside)
        if not tiny and all(parts[f.name].at is not None for f in inside):
            modes |= dict.fromkeys((f.name for f in inside), "direct")
        return modes

    def plan(self, fill: Fill, limit: int, align: int, take: Take) -> None:
        """Plan the parts that a fill has to read.

        Parameters
        ----------
        fill
            The unit, with its samples and slices.
        limit, align
            Threads that share the work, and bytes at whose multiples a range is cut for them.
        take
            Allocates memory for values.

        Raises
        ------
        FormatError
            If the sidecar gives offsets that are not in the files, or another size.
        """
        rising = bool((fill.samples[1:] - fill.samples[:-1] == 1).all())
        reads = self._plan_run(fill, take) if rising and self._simple else None
        if reads is None:
            reads = []
            plan = self._plan_any(fill, take)
            for file, runs in plan.runs(GROUP_NEAR if rising else APART_NEAR):
                if len(runs.starts) < SEVERAL:
                    reads += [(file, *each) for each in runs]
                else:
                    fill.parts += [ReadPart(file, part) for part in runs.divided(limit)]
        for file, start, iovecs in reads:
            for p in shared(start, iovecs, limit, align):
                fill.parts.append(ReadPart(file, one_range(*p)))
        fill.missing = len(fill.parts)

    def opened(self, fill: Fill) -> Sidecar:
        """Return the sidecar through which a unit is read: of the dataset, or of a copy."""
        return self.sidecar if fill.cached_copy is None else fill.cached_copy.sidecar

    def _targets(self, fill: Fill, f: Field, staged: bool, take: Take) -> Ints | int:
        """Return the target address of each value, or one address for all as stored."""
        if not staged:
            return self.delivery.addresses(fill, f)
        name, nbytes = f.name, len(fill.samples) * f.row_nbytes
        if name not in fill.staged:
            fill.staged[name] = take(name, nbytes)[:nbytes]
        return int(fill.staged[name].ctypes.data)

    def _plan_run(self, fill: Fill, take: Take) -> list[tuple[Handle, int, Ints]] | None:
        """Plan consecutive samples of one file at a constant distance; None if they are not."""
        n, fields = len(fill.samples), [f for f in self.fields if f.row_nbytes]
        if not n or not fields:
            return None
        number, local = self.sidecar.file_of(int(fill.samples[0]))
        modes = self.modes(number)
        if n > self.sidecar.content.files[number].samples - local or "decoded" in modes.values():
            return None
        ranges, opened = list[tuple[int, int, Ints]](), self.opened(fill)
        file: Handle | None = None
        for each in plain(self.sidecar.layout(number), fields) or ():
            if (run := each.run(local, n)) is None:
                return None
            other = opened.open_file(number, run[0])
            begin, file = run[1] + each.fields[0][1], file or other
            to = [self._targets(fill, f, modes[f.name] == "staged", take) for f, _ in each.fields]
            iovecs = woven(each, to, run[2], n)
            if iovecs is None or other is not file or begin < 0:
                return None
            stop = run[1] + (n - 1) * run[2] + each.nbytes
            if stop > file.nbytes:
                return None  # the other way states what is wrong
            ranges.append((begin, stop, iovecs))
        planned = joined(ranges)
        return None if file is None or planned is None else [(file, *each) for each in planned]

    def _plan_any(self, fill: Fill, take: Take) -> ReadPlan:
        """Plan samples at any offsets, in any files."""
        by_file, plan = self.sidecar.by_file(fill.samples), ReadPlan()
        if self.verify:
            fill.parts += [self._checking_part(number, local) for number, _, local in by_file]
        fields = [f for f in self.fields if f.ragged or f.row_nbytes]
        layouts = [self.sidecar.layout(number) for number, _, _ in by_file]
        own = [f for f in fields if all(f.name in layout.files for layout in layouts)]
        others, limit_open = [f for f in fields if f not in own], most_open()
        located, many = dict[str, Located](), len(by_file) > limit_open
        if not many:
            each_of = ((f.name, self._locate_field(f, by_file)) for f in others)
            located = {name: each for name, each in each_of if each is not None}
            every = ((n, extents) for each in located.values() for n, _, extents in each)
            paths = {(n, path) for n, extents in every for path, _ in extents.by_path()}
            many = len(paths) > limit_open
        if many:
            located = {}
        for f in own:
            self._plan_files(fill, f, by_file, take)
        for f in (f for f in others if f.name in located):
            if f.ragged:
                to = self._reserve(fill, f, located[f.name], plan, take)
            else:
                staged = all(self.modes(number)[f.name] == "staged" for number, _, _ in by_file)
                at = self._targets(fill, f, staged, take)
                steps = np.arange(len(fill.samples), dtype=np.int64) * f.row_nbytes
                to = at + steps if isinstance(at, int) else at
            for number, chosen, extents in located[f.name]:
                if not f.ragged:
                    self._check_sizes(f, extents, len(chosen), number)
                open_file = partial(self.opened(fill).open_file, number)
                plan.add(open_file, extents, to[chosen], "a sample")
        decoded = [f.name for f in others if f.name not in located]
        for (_, chosen, _), layout in zip(by_file, layouts, strict=True):
            # No file has those that are given, so one part does it.
            given = [name for name in decoded if name in layout.given]
            names = [name for name in decoded if name not in layout.given]
            size = EACH if many or layout.files else len(chosen)
            for each, step in ((given, len(chosen)), (names, size)):
                fill.parts += [
                    self._decoding_part(fill, chosen[a : a + step], each)
                    for a in range(0, len(chosen) if each else 0, step)
                ]
        return plan

    def _locate_field(self, f: Field, by_file: Sequence[tuple[int, Ints, Ints]]) -> Located | None:
        """Return the extents of a field by file; None if a file stores it encoded."""
        if any(self.modes(number)[f.name] == "decoded" for number, _, _ in by_file):
            return None
        out = []
        for number, chosen, local in by_file:
            layout = self.sidecar.layout(number)
            column = layout.columns.get(f.name)
            if column is not None and column.grid is not None:
                check_rows(column.grid, *rows_of(column, local), f.name)
            out.append((number, chosen, locate(layout, f.name, local)))
        if any(len(extents.offset) and int(extents.offset.min()) < 0 for _, _, extents in out):
            return None  # chunks that are not stored: fill values
        return out

    def _check_sizes(self, f: Field, extents: Extents, count: int, number: int) -> Ints:
        """Return the bytes of every sample; raise unless they are those of values of the field."""
        sizes = extents.length
        if f.ragged or len(sizes) != count:
            sizes = np.bincount(extents.request, extents.length, count).astype(np.int64)
        fix = "write the sidecar again with dsprep provenance"
        f.check_nbytes(sizes, lambda _: str(self.sidecar.root(number)), fix)
        return sizes

    def _reserve(self, fill: Fill, f: Field, located: Located, plan: ReadPlan, take: Take) -> Ints:
        """Return the address of every ragged value, in the order of delivery; refuse overlaps."""
        sizes, nbytes, opened = (
            np.zeros(len(fill.samples), np.int64),
            plan.nbytes,
            self.opened(fill),
        )
        for number, chosen, extents in located:
            sizes[chosen] = self._check_sizes(f, extents, len(chosen), number)
            nbytes += sum(opened.open_file(number, p).nbytes for p, _ in extents.by_path())
        if int(sizes.sum()) > nbytes:
            distinct = np.unique(fill.samples, return_index=True)[1]  # however often each comes
            if int(sizes[distinct].sum()) > nbytes:
                raise FormatError(
                    f"the sidecar gives samples of field {f.name} that overlap",
                    where=self.sidecar.dataset,
                    fix="write it again with dsprep provenance",
                )
        memory, to = self.delivery.reserve(fill, f, sizes, take)
        to += memory.ctypes.data
        return to

    def _plan_files(
        self, fill: Fill, f: Field, by_file: Sequence[tuple[int, Ints, Ints]], take: Take
    ) -> None:
        """Plan a field of which every sample has a file of its own: it is read to its slot."""
        sizes = np.zeros(len(fill.samples), np.int64)
        for number, chosen, local in by_file:
            sizes[chosen] = self.sidecar.layout(number).files[f.name].lengths.at(local)
        if len(sizes) and int(sizes.min()) < 0:
            raise layout_mismatch("gives a sample a file of less than no bytes", "the files")
        memory, to = self.delivery.reserve(fill, f, sizes, take)

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

    def _decoding_part(self, fill: Fill, chosen: Ints, names: Sequence[str]) -> ReadPart:
        """Return the part that reads fields of some samples by `Sidecar.read`."""
        samples = fill.samples[chosen]
        # Ragged values wait for those of other files, and the thread needs its arena before that.
        kept = any(self.sidecar.schema[name].ragged for name in names)

        def decode(arena: Arena, opened: Sidecar) -> int:
            batch = opened.read(samples, names, arena=None if kept else arena)
            self.delivery.deliver(fill, chosen, batch)
            return sum(int(column.nbytes) for column in batch.values())

        return ReadPart(decode=decode)

    def _checking_part(self, number: int, local: Ints) -> ReadPart:
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
