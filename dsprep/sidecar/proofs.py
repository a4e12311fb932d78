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

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from dsprep.core.packing import from_planes
from dsprep.core.schema import Ints
from dsprep.core.spans import ranges
from dsprep.errors import FormatError, UsageError
from dsprep.formats.zip_members import Member, stored_members
from dsprep.layout.laws import Explicit, Law
from dsprep.layout.locate import locate
from dsprep.layout.model import FileLayout, Groups, Rest
from dsprep.storage.base import Handle
from dsprep.storage.checksums import read_crc32c
from dsprep.storage.trees import data_files

if TYPE_CHECKING:
    from dsprep.sidecar.sidecar import Sidecar

Kind: TypeAlias = Literal["group", "rest", "record", "chunk", "member", "block"]

WORDS: Mapping[Kind, str] = {
    "group": "CRC-32C of its group",
    "rest": "CRC-32C of its group's other files",
    "record": "CRC of its record",
    "chunk": "checksum of its chunk",
    "member": "CRC-32 of its ZIP member",
    "block": "CRC-32C of its 16 MiB block",
}
"""Each kind of checksum, for a person."""

PROVING = frozenset({"zlib", "gzip", "deflate", "bz2", "fletcher32", "crc32c"})
"""Filters that compare a checksum whenever a chunk is decoded."""

SMALL_MEMBER = 64 << 20
"""Bytes of a member up to which it is compared when something of it is read."""

_DAMAGED = "the file was changed or is damaged"

StoredRange: TypeAlias = tuple[str, Ints, Ints]
"""A file, as a path below the dataset's entry, and offsets and lengths of ranges in it."""


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
    """Return whether the first and the last sample of every group are in its range."""
    low = groups.blocks.offsets.span(0, groups.blocks.count)
    high = low + groups.blocks.lengths.span(0, groups.blocks.count)
    per = groups.files or groups.blocks.count
    for samples in (edges[nonempty], edges[nonempty + 1] - 1):
        extents = locate(layout, name, samples).stored()
        group, end = nonempty[extents.request], extents.offset + extents.length
        if bool(((extents.offset < low[group]) | (end > high[group])).any()):
            return False
        for path, chosen in extents.by_path() if len(group) else ():
            files = np.unique(group[chosen] // per).tolist()
            if [groups.path(number * per) for number in files] != [path]:
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
    """Return a summary of `Proofs.describe` for a person."""
    words: dict[str | None, list[str]] = {}
    for name, word in checksums.items():
        words.setdefault(word, []).append(name)
    return "; ".join(f"{', '.join(names)} by {word or 'nothing'}" for word, names in words.items())


# --- proving ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Byte ranges with a checksum each: `members` of a ZIP file, or blocks over all data files."""

    begins: Ints
    ends: Ints
    starts: Mapping[str, int]
    members: Sequence[Member] = ()
    crcs: Ints | None = None


class Proofs:
    """Compares samples of a dataset with checksums.

    Attributes
    ----------
    once
        True: groups, too, are compared only once.
    """

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self.once = False
        self._proved: set[tuple[int, Kind, int]] = set()
        self.kinds = lru_cache(maxsize=1024)(self._kinds)
        self._pieces = lru_cache(maxsize=256)(self._find_pieces)
        self._edges = lru_cache(maxsize=256)(self._find_edges)

    def _kinds(self, number: int) -> Mapping[str, Kind]:
        """Return the checksums of each field of a file; no entry: it has none."""
        layout = self._sidecar.layout(number)
        groups, records, kinds = layout.groups, layout.records, dict[str, Kind]()
        apart = outside(layout) if groups is not None and groups.crc32c is not None else ()
        for name in (*(records.parts if records else ()), *layout.columns, *layout.files):
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
            elif pieces := self._pieces(number):
                kinds[name] = next(iter(pieces))
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
        if "group" in by_kind or "rest" in by_kind:
            edges = self._edges(number)
            numbers = np.unique(np.searchsorted(edges[1:], local, "right")).tolist()
            for bad in self.bad_groups(number, numbers, by_kind.keys()):
                raise bad
        if "record" in by_kind and read:
            records = self._sidecar.records(number)
            if records is not None and layout.records is not None:
                file = self._sidecar.open_file(number, layout.records.blocks.path)
                records.prove(file, local)
        for kind in ("member", "block"):
            for name in by_kind.get(kind, ()):
                self._check_pieces(number, kind, name, local)

    # --- groups --------------------------------------------------------------------------------

    def bad_groups(
        self,
        number: int,
        chosen: Iterable[int] | None = None,
        kinds: Container[Kind] = ("group", "rest"),
    ) -> Iterator[FormatError]:
        """Yield an error for each group of a file, of those `chosen` or of all, that is damaged."""
        layout = self._sidecar.layout(number)
        if (groups := layout.groups) is None:
            return
        edges, open_file = self._edges(number), partial(self._sidecar.open_file, number)
        crcs: dict[Kind, Law | None] = {"group": groups.crc32c}
        if groups.rest is not None:
            crcs["rest"] = groups.rest.crc32c
        for g in range(groups.blocks.count) if chosen is None else chosen:
            for kind, law in crcs.items():
                if law is None or kind not in kinds:
                    continue
                if self.once and (number, kind, g) in self._proved:
                    continue
                where, words = self._sidecar.root(number), ""
                if kind == "group":
                    file = open_file(groups.path(g))
                    offset, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
                    file.check_extents(np.array([offset]), np.array([nbytes]), "a group")
                    where, crc = file.path, read_crc32c(file, offset, offset + nbytes)
                else:
                    fields = groups.rest.fields if groups.rest is not None else ()
                    words = f" in the files of {', '.join(fields)}"
                    crc = rest_crc(layout, fields, edges[g : g + 2], open_file)
                if crc == law.one(g):
                    self._proved.add((number, kind, g))
                    continue
                sample = self._sidecar.first(number) + int(edges[g])
                yield FormatError(
                    f"the CRC-32C of group {g}{words} is wrong",
                    where=f"{where}, sample {sample} and on",
                    expected=f"{law.one(g):#010x}",
                    found=f"{crc:#010x}",
                    fix=_DAMAGED,
                )

    def _find_edges(self, number: int) -> Ints:
        layout = self._sidecar.layout(number)
        return np.zeros(0, np.int64) if layout.groups is None else layout.groups.edges(layout.count)

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

    def _find_pieces(self, number: int) -> Mapping[Kind, _Pieces]:
        root, pieces = self._sidecar.root(number), dict[Kind, _Pieces]()
        if (members := stored_members(root)) is not None:
            begins = np.array([m.offset for m in members], np.int64)
            ends = begins + np.array([m.nbytes for m in members], np.int64)
            pieces["member"] = _Pieces(begins, ends, {"": 0}, members)
        if (known := self.block_sums(number)) is None:
            return pieces
        (block, crcs), starts, at = known, dict[str, int](), 0
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
        begins = np.arange(len(crcs), dtype=np.int64) * block
        pieces["block"] = _Pieces(begins, begins + block, starts, crcs=crcs)
        return pieces

    def _check_pieces(self, number: int, kind: Kind, name: str, local: Ints) -> None:
        """Compare the members or blocks that hold a field, unless that was done before."""
        pieces = self._pieces(number)[kind]
        for path, offsets, lengths in stored_ranges(self._sidecar.layout(number), name, local):
            self._sidecar.open_file(number, path).check_extents(offsets, lengths, f"field {name}")
            if path not in pieces.starts:
                raise FormatError("a file has appeared", where=self._sidecar.root(number) / path)
            begins = offsets + pieces.starts[path]
            first = np.searchsorted(pieces.ends, begins, "right")
            last = np.searchsorted(pieces.begins, begins + lengths, "left")
            for i in np.unique(ranges(first, np.maximum(0, last - first))).tolist():
                if (number, kind, i) not in self._proved:
                    self._check_piece(number, pieces, i)
                    self._proved.add((number, kind, i))

    def has_members(self, number: int) -> bool:
        """Return whether a file has checksums of its members, none of which takes long to read."""
        members = stored_members(self._sidecar.root(number))
        return members is not None and max((m.nbytes for m in members), default=0) <= SMALL_MEMBER

    def bad_pieces(self, number: int) -> Iterator[FormatError]:
        """Yield an error for each member and block of a file whose checksum is wrong."""
        for pieces in self._pieces(number).values():
            for i in range(len(pieces.begins)):
                try:
                    self._check_piece(number, pieces, i)
                except FormatError as error:
                    yield error

    def _check_piece(self, number: int, pieces: _Pieces, i: int) -> None:
        """Raise `FormatError` if the checksum of a member or block is wrong."""
        if pieces.members:
            pieces.members[i].check(self._sidecar.open_file(number, ""))
            return
        assert pieces.crcs is not None
        begin, end, crc, where = int(pieces.begins[i]), int(pieces.ends[i]), 0, Path()
        paths, starts = [*pieces.starts], [*pieces.starts.values()]
        for k in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
            file = self._sidecar.open_file(number, paths[k])
            low, high = max(0, begin - starts[k]), min(file.nbytes, end - starts[k])
            crc, where = read_crc32c(file, low, max(low, high), crc), file.path
        if crc != int(pieces.crcs[i]):
            raise FormatError(
                f"the CRC-32C of bytes {begin:,} to {end:,} is wrong",
                where=where,
                expected=f"{int(pieces.crcs[i]):#010x}",
                found=f"{crc:#010x}",
                fix=_DAMAGED,
            )

    # --- for people ----------------------------------------------------------------------------

    def describe(self, numbers: Iterable[int], names: Sequence[str]) -> dict[str, str | None]:
        """Return the checksums of each field, in words; None: a file has none."""
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
