"""Comparing stored bytes with every checksum that a dataset has, in the file or in its sidecar.

Of each field one checksum is used, the first that there is of

===========  ======================================================================================
``group``    CRC-32C of the group that holds the samples, in the sidecar of a repacked dataset
``rest``     the same of what a group has outside its range, such as fields in files of their own
``record``   of every record, in the file: TFRecord
``chunk``    of every chunk, in the file, by a filter: gzip, zlib, bz2, Fletcher-32, CRC-32C
``member``   CRC-32 of every member of a ZIP file
``block``    CRC-32C of every 16 MiB, in the sidecar: ``dsprep provenance --checksums``
===========  ======================================================================================

Members and blocks are compared once by each `Proofs`, since random samples would read all of one
again and again; groups each time, unless `Proofs.once`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np

from dsprep.core.packing import Tables, from_planes
from dsprep.core.schema import Ints
from dsprep.core.spans import ranges
from dsprep.errors import FormatError, UsageError
from dsprep.formats.zip_members import stored_members
from dsprep.layout.laws import Explicit
from dsprep.layout.locate import locate
from dsprep.layout.model import FileLayout, Groups, Rest
from dsprep.reading.records import RecordReader
from dsprep.sidecar.spec import Content
from dsprep.storage.base import Handle
from dsprep.storage.checksums import Members, read_crc32c
from dsprep.storage.trees import data_files

Kind: TypeAlias = Literal["group", "rest", "record", "chunk", "member", "block"]

WORDS: Mapping[Kind, str] = {
    "group": "CRC-32C of its group",
    "rest": "CRC-32C of its group's other files",
    "record": "CRC of its record",
    "chunk": "checksum of its chunk",
    "member": "CRC-32 of its ZIP member",
    "block": "CRC-32C of its 16 MiB block",
}
"""What is compared, for a person."""

PROVING = frozenset({"zlib", "gzip", "deflate", "bz2", "fletcher32", "crc32c"})
"""Filters that compare a checksum whenever a chunk is decoded."""

SMALL_MEMBER = 64 << 20
"""Bytes of a member up to which it is compared when something of it is read."""

_DAMAGED = "the file was changed or is damaged"

Sums: TypeAlias = tuple[Path, int, int, tuple[str, ...]]
"""Of a group: the file, the expected and the actual CRC-32C, and fields, if only these."""

StoredRange: TypeAlias = tuple[str, Ints, Ints]
"""A file, as a path below the dataset's entry, and offsets and lengths of ranges in it."""


@dataclass(frozen=True)
class BadGroup:
    """A group whose bytes are not those that were written.

    Attributes
    ----------
    group
        Its number in the file.
    sample
        Its first sample, in the dataset.
    fields
        The fields meant, where it is only those outside the group's range.
    """

    path: Path
    group: int
    sample: int
    expected: int
    actual: int
    fields: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """What is wrong, a clause."""
        where = f" in the files of {', '.join(self.fields)}" if self.fields else ""
        return f"the CRC-32C of group {self.group}{where} is wrong"


# --- locating --------------------------------------------------------------------------------


def stored_ranges(layout: FileLayout, name: str, local: Ints) -> Iterator[StoredRange]:
    """Yield the stored ranges of a field of some samples, by file and offset, each once."""
    extents = locate(layout, name, local).stored()
    for path, chosen in extents.by_path() if len(extents.offset) else ():
        yield path, *_once(extents.offset[chosen], extents.length[chosen])


def _once(offsets: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Return ranges by offset, each once."""
    if len(offsets) > 1 and not bool((offsets[1:] > offsets[:-1]).all()):
        offsets, first = np.unique(offsets, return_index=True)
        lengths = lengths[first]
    return offsets, lengths


def outside(layout: FileLayout) -> tuple[str, ...]:
    """Return the fields that have bytes outside the range of their group."""
    groups = layout.groups
    if groups is None:
        return ()
    edges = groups.edges(layout.count)
    nonempty = np.flatnonzero(np.diff(edges) > 0)
    records = layout.records.parts if layout.records is not None else ()
    names = [*records, *layout.columns, *layout.files]
    return tuple(n for n in names if not _inside(layout, groups, n, edges[:-1], edges, nonempty))


def _inside(
    layout: FileLayout, groups: Groups, name: str, first: Ints, edges: Ints, nonempty: Ints
) -> bool:
    """Whether the first and the last sample of every group are in its range."""
    low = groups.blocks.offsets.span(0, groups.blocks.count)
    high = low + groups.blocks.lengths.span(0, groups.blocks.count)
    for samples in (edges[nonempty], edges[nonempty + 1] - 1):
        extents = locate(layout, name, samples)
        is_stored = extents.offset >= 0
        group = nonempty[extents.request[is_stored]]
        offset = extents.offset[is_stored]
        if bool((offset < low[group]).any()):
            return False
        if bool((offset + extents.length[is_stored] > high[group]).any()):
            return False
        if extents.file_index is None:
            if len(group) and extents.template != groups.path(int(group[0])):
                return False
            if groups.files and len(np.unique(group // groups.files)) > 1:
                return False
            continue
        file_numbers = extents.file_index[:, is_stored]
        new = np.ones(len(group), bool)
        new[1:] = (file_numbers[:, 1:] != file_numbers[:, :-1]).any(axis=0)
        if groups.files:
            new[1:] |= group[1:] // groups.files != group[:-1] // groups.files
        for k in np.flatnonzero(new).tolist():
            if extents.path(file_numbers[:, k].tolist()) != groups.path(int(group[k])):
                return False
    return True


# --- summing ---------------------------------------------------------------------------------


def rest_of(layout: FileLayout, open_file: Callable[[str], Handle]) -> Rest | None:
    """Return the checksums of the bytes of groups outside their ranges; None if there are none."""
    names, groups = outside(layout), layout.groups
    if groups is None or groups.crc32c is None or not names:
        return None
    edges = groups.edges(layout.count)
    crcs = [
        rest_crc(layout, names, edges[g : g + 2], open_file) for g in range(groups.blocks.count)
    ]
    return Rest(names, Explicit(np.array(crcs, np.int64)))


def rest_crc(
    layout: FileLayout, names: Sequence[str], edges: Ints, open_file: Callable[[str], Handle]
) -> int:
    """Return the CRC-32C of the stored ranges of fields of the samples from one edge to another."""
    crc, local = 0, np.arange(edges[0], edges[1], dtype=np.int64)
    for name in names:
        for path, offsets, lengths in stored_ranges(layout, name, local):
            file = open_file(path)
            file.check_extents(offsets, lengths, f"field {name}")
            for begin, end in _joined(offsets, lengths):
                crc = read_crc32c(file, begin, end, crc)
    return crc


def _joined(offsets: Ints, lengths: Ints) -> list[tuple[int, int]]:
    """Return ranges, of which contiguous ones are merged."""
    if not len(offsets):
        return []
    new = np.ones(len(offsets), bool)
    new[1:] = offsets[1:] != offsets[:-1] + lengths[:-1]
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(offsets)) - 1
    return list(zip(offsets[starts].tolist(), (offsets + lengths)[ends].tolist(), strict=True))


def summarize(checksums: Mapping[str, str | None]) -> str:
    """Return what fields are compared with, as `Proofs.describe` has it, for a person."""
    words: dict[str | None, list[str]] = {}
    for name, word in checksums.items():
        words.setdefault(word, []).append(name)
    return "; ".join(f"{', '.join(names)} by {word or 'nothing'}" for word, names in words.items())


# --- proving ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FileEntrySums:
    """The checksums of an entry besides those that its layout has.

    `members` are of a ZIP file; `blocks` has the CRC-32C of each `block` bytes of all data files,
    back to back: `starts` and `files` say where each begins.
    """

    members: Members | None
    block: int
    blocks: Ints
    starts: Mapping[str, int]
    files: tuple[tuple[int, str], ...]


class _LocatedDataset(Protocol):
    """What `Proofs` need of a `Sidecar`: files by their numbers, their layouts and records."""

    @property
    def content(self) -> Content: ...

    def layout(self, file: int) -> FileLayout: ...

    def records(self, number: int) -> RecordReader | None: ...

    def root(self, number: int) -> Path: ...

    def first(self, number: int) -> int: ...

    def open_file(self, number: int, path: str) -> Handle: ...

    def tables(self) -> Tables: ...


class Proofs:
    """Compares samples of a dataset with checksums.

    Attributes
    ----------
    once
        Whether groups, too, are compared only once.
    """

    def __init__(self, sidecar: _LocatedDataset) -> None:
        self._sidecar = sidecar
        self.once = False
        self._proved: set[tuple[int, Kind, int]] = set()
        self.kinds = lru_cache(maxsize=1024)(self._kinds)
        root = sidecar.root
        self._members = lru_cache(maxsize=256)(lambda number: stored_members(root(number)))
        self._sums = lru_cache(maxsize=256)(self._find_sums)
        self._edges = lru_cache(maxsize=256)(self._find_edges)

    def _kinds(self, number: int) -> Mapping[str, Kind]:
        """Return what each field of a file is compared with; no entry: nothing."""
        layout = self._sidecar.layout(number)
        groups, sums = layout.groups, None
        apart = outside(layout) if groups is not None and groups.crc32c is not None else ()
        kinds: dict[str, Kind] = {}
        records = layout.records
        names = [*(records.parts if records is not None else ()), *layout.columns, *layout.files]
        for name in names:
            column = layout.columns.get(name)
            grid = None if column is None else column.grid
            if groups is not None and groups.crc32c is not None and name not in apart:
                kinds[name] = "group"
            elif groups is not None and groups.rest is not None and name in groups.rest.fields:
                kinds[name] = "rest"
            elif column is None and (
                (reader := self._sidecar.records(number)) is not None and reader.has_crcs
            ):
                kinds[name] = "record"
            elif (
                grid is not None
                and grid.masks is None
                and any(f.get("id") in PROVING for f in grid.filters)
            ):
                kinds[name] = "chunk"
            else:
                sums = self._sums(number) if sums is None else sums
                if sums.members is not None:
                    kinds[name] = "member"
                elif len(sums.blocks):
                    kinds[name] = "block"
        return kinds

    def check(self, number: int, local: Ints, names: Iterable[str], *, read: bool = False) -> None:
        """Raise `FormatError` if fields of some samples of a file differ from their checksums.

        `read`: whether records and chunks are compared as well, which reading them does anyway.
        """
        if not len(local):
            return
        layout, kinds = self._sidecar.layout(number), self.kinds(number)
        by_kind: dict[Kind, list[str]] = {}
        for name in names:
            if name in kinds:
                by_kind.setdefault(kinds[name], []).append(name)
        groups = layout.groups
        if groups is not None and ("group" in by_kind or "rest" in by_kind):
            edges = self._edges(number)
            numbers = np.unique(np.searchsorted(edges[1:], local, "right")).tolist()
            for bad in self.bad_groups(number, numbers, by_kind.keys()):
                raise FormatError(
                    bad.message,
                    where=f"{bad.path}, sample {bad.sample} and on",
                    expected=f"{bad.expected:#010x}",
                    found=f"{bad.actual:#010x}",
                    fix=_DAMAGED,
                )
        if "record" in by_kind and read:
            records = self._sidecar.records(number)
            if records is not None and layout.records is not None:
                file = self._sidecar.open_file(number, layout.records.blocks.path)
                records.prove(file, local)
        for kind in ("member", "block"):
            for name in by_kind.get(kind, ()):
                self._check_ranges(number, kind, name, local)

    def check_file(self, number: int) -> None:
        """Raise `FormatError` if a checksum of a whole file, or else of its groups, is wrong."""
        sums = self._sums(number)
        for i in range(len(sums.blocks)):
            self._block(number, sums, i)
        if not len(sums.blocks):
            local = np.arange(self._sidecar.layout(number).count, dtype=np.int64)
            kinds = self.kinds(number)
            self.check(number, local, [n for n in kinds if kinds[n] in ("group", "rest")])

    # --- groups --------------------------------------------------------------------------------

    def bad_groups(
        self, number: int, chosen: Iterable[int] | None = None, kinds: Iterable[Kind] = ()
    ) -> Iterator[BadGroup]:
        """Yield which groups of a file, of those `chosen` or of all, have a wrong checksum.

        `kinds` are ``"group"``, ``"rest"`` or both, which nothing means too.
        """
        layout = self._sidecar.layout(number)
        groups, kinds = layout.groups, set(kinds) or {"group", "rest"}
        if groups is None:
            return
        edges = self._edges(number)
        known: dict[Kind, object] = {"group": groups.crc32c, "rest": groups.rest}
        checked = [kind for kind, sums in known.items() if sums is not None and kind in kinds]
        for g in range(groups.blocks.count) if chosen is None else chosen:
            for kind in checked:
                if self.once and (number, kind, g) in self._proved:
                    continue
                of = self._range_sums if kind == "group" else self._rest_sums
                path, expected, crc, fields = of(number, groups, g)
                if crc == expected:
                    self._proved.add((number, kind, g))
                    continue
                sample = self._sidecar.first(number) + int(edges[g])
                yield BadGroup(path, g, sample, expected, crc, fields)

    def _find_edges(self, number: int) -> Ints:
        layout = self._sidecar.layout(number)
        return np.zeros(0, np.int64) if layout.groups is None else layout.groups.edges(layout.count)

    def _range_sums(self, number: int, groups: Groups, g: int) -> Sums:
        assert groups.crc32c is not None
        file = self._sidecar.open_file(number, groups.path(g))
        offset, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        file.check_extents(np.array([offset]), np.array([nbytes]), "a group")
        crc = read_crc32c(file, offset, offset + nbytes)
        return file.path, groups.crc32c.one(g), crc, ()

    def _rest_sums(self, number: int, groups: Groups, g: int) -> Sums:
        assert groups.rest is not None
        open_file, edges = partial(self._sidecar.open_file, number), self._edges(number)[g : g + 2]
        fields = groups.rest.fields
        crc = rest_crc(self._sidecar.layout(number), fields, edges, open_file)
        return self._sidecar.root(number), groups.rest.crc32c.one(g), crc, fields

    # --- members and blocks --------------------------------------------------------------------

    def block_sums(self, number: int) -> tuple[int, Ints] | None:
        """Return the bytes of a block of a file and the CRC-32C of each; None without.

        Raises `FormatError` if they are damaged.
        """
        known = self._sidecar.content.files[number].crc32c
        if known is None:
            return None
        block = known.get("block")
        try:
            if not isinstance(block, int) or not 1 << 12 <= block <= 1 << 32:
                raise ValueError(f"a block of {block!r} bytes")
            return block, from_planes(self._sidecar.tables().get(known.get("data")))
        except ValueError as error:
            raise FormatError(
                f"the checksums of a file are damaged: {error}", where=self._sidecar.root(number)
            ) from error

    def _find_sums(self, number: int) -> FileEntrySums:
        root = self._sidecar.root(number)
        known = self.block_sums(number)
        block, crcs = (0, np.zeros(0, np.int64)) if known is None else known
        starts: dict[str, int] = {}
        if known is not None:
            at = 0
            for path in sorted(data_files(root)):
                starts["" if path == root else path.relative_to(root).as_posix()] = at
                at += path.stat().st_size
            if len(crcs) != -(-at // block):
                raise FormatError(
                    "there is another number of checksums than blocks",
                    where=root,
                    expected=-(-at // block),
                    found=len(crcs),
                    fix="write the sidecar again with dsprep provenance --checksums",
                )
        files = tuple(sorted((at, path) for path, at in starts.items()))
        return FileEntrySums(self._members(number), block, crcs, starts, files)

    def _check_ranges(self, number: int, kind: Kind, name: str, local: Ints) -> None:
        """Compare the members or blocks that hold a field, unless that was done before."""
        sums = self._sums(number)
        for path, offsets, lengths in stored_ranges(self._sidecar.layout(number), name, local):
            self._sidecar.open_file(number, path).check_extents(offsets, lengths, f"field {name}")
            if kind == "member" and sums.members is not None:
                ends = sums.members.offsets + sums.members.nbytes
                first = np.searchsorted(ends, offsets, "right")
                last = np.searchsorted(sums.members.offsets, offsets + lengths, "left")
            else:
                if path not in sums.starts:
                    new = self._sidecar.root(number) / path
                    raise FormatError("a file has appeared", where=new)
                first = (offsets + sums.starts[path]) // sums.block
                last = -(-(offsets + sums.starts[path] + lengths) // sums.block)
            for i in np.unique(ranges(first, np.maximum(0, last - first))).tolist():
                if (number, kind, i) not in self._proved:
                    (self._member if kind == "member" else self._block)(number, sums, i)
                    self._proved.add((number, kind, i))

    def has_members(self, number: int) -> bool:
        """Whether a file keeps the checksums of its members, none of which takes long to read."""
        members = self._members(number)
        return members is not None and int(members.nbytes.max(initial=0)) <= SMALL_MEMBER

    def bad_members(self, number: int) -> Iterator[FormatError]:
        """Yield an error for each member of a ZIP file whose checksum is wrong."""
        members = self._members(number)
        if members is None:
            return
        file = self._sidecar.open_file(number, "")
        for i in range(len(members.offsets)):
            try:
                members.check(file, i)
            except FormatError as error:
                yield error

    def _member(self, number: int, sums: FileEntrySums, i: int) -> None:
        assert sums.members is not None
        file = self._sidecar.open_file(number, "")
        sums.members.check(file, i)

    def _block(self, number: int, sums: FileEntrySums, i: int) -> None:
        begin, end, crc = i * sums.block, (i + 1) * sums.block, 0
        k = bisect_right(sums.files, begin, key=lambda file: file[0]) - 1
        where: Path = self._sidecar.root(number)
        while k < len(sums.files) and sums.files[k][0] < end:
            start, path = sums.files[k]
            file = self._sidecar.open_file(number, path)
            low, high = max(0, begin - start), min(file.nbytes, end - start)
            crc = read_crc32c(file, low, max(low, high), crc)
            where = file.path
            k += 1
        if crc != int(sums.blocks[i]):
            raise FormatError(
                f"the CRC-32C of bytes {begin:,} to {end:,} is wrong",
                where=where,
                expected=f"{int(sums.blocks[i]):#010x}",
                found=f"{crc:#010x}",
                fix=_DAMAGED,
            )

    # --- for people ----------------------------------------------------------------------------

    def describe(self, numbers: Iterable[int], names: Sequence[str]) -> dict[str, str | None]:
        """Return what each field is compared with, in words; None: nothing in some file."""
        words: dict[str, set[str | None]] = {name: set() for name in names}
        for number in numbers:
            kinds = self.kinds(number)
            for name in names:
                words[name].add(WORDS[kinds[name]] if name in kinds else None)
        return {
            name: None if None in of_field else ", or ".join(sorted(map(str, of_field)))
            for name, of_field in words.items()
        }

    def lacking(self, checksums: Mapping[str, str | None], dataset: Path) -> str | None:
        """Return which fields have no checksum, by what `describe` found; None if all have one.

        Raises `UsageError` if no field has one.
        """
        without = [name for name, word in checksums.items() if word is None]
        if not without:
            return None
        fix = f"dsprep provenance {dataset} --checksums keeps one of every 16 MiB, or repack it"
        if len(without) == len(checksums):
            raise UsageError(
                "there are no checksums to verify samples with", where=dataset, fix=fix
            )
        return f"{dataset}: no checksum covers {', '.join(without)}, which is not verified; {fix}"
