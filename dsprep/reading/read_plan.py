"""From extents to reads: which ranges of which files go to which addresses. Nothing is read here.

Samples anywhere in a dataset are collected in a `ReadPlan`, from what `dsprep.layout` gives.
Consecutive samples at a constant distance, such as the rows of a chunk or records of one size, are
a few numbers; planning them so (`woven`) takes a tenth of the time and gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from dsprep.core.schema import Ints
from dsprep.layout.locate import Extents
from dsprep.layout.plain import Plain
from dsprep.storage.base import Handle
from dsprep.storage.scatter import APART_NEAR, DROPPED, NEAR, Runs, cut, runs, together

LEAST = 2 << 20
"""Bytes of a part below which another thread would not pay."""

MERGED = 512
"""Samples from which on values that are near each other are looked for, and read together."""


class ReadPlan:
    """Ranges of files, collected field by field, and the address that each is read to."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[Handle, list[tuple[Ints, Ints, Ints]]]] = {}
        self._apart: list[tuple[Handle, Runs]] = []

    def add(
        self, open_file: Callable[[str], Handle], extents: Extents, to: Ints, subject: str
    ) -> None:
        """Add the extents of a field that are stored, and stored as they are wanted.

        Parameters
        ----------
        open_file
            Returns a file by its path in `extents`.
        to
            int64, shape ``(n,)``: the address of the first byte of each request.
        subject
            What lies there, for messages.

        Raises
        ------
        FormatError
            If an extent is not within its file.
        """
        addresses = extents.addresses(to)
        for path, chosen in extents.by_path():
            file = open_file(path)
            self.put(
                file, extents.offset[chosen], extents.length[chosen], addresses[chosen], subject
            )

    def put(
        self, file: Handle, offsets: Ints, lengths: Ints, addresses: Ints, subject: str
    ) -> None:
        """Add ranges of a file, each with its address; see `add`."""
        file.check_extents(offsets, lengths, subject)
        if len(offsets):
            columns = self._files.setdefault(id(file), (file, []))[1]
            columns.append((offsets, lengths, addresses))

    def put_plain(self, file: Handle, plain: Plain, starts: Ints, to: Sequence[Ints]) -> None:
        """Add plain fields of samples in any order, each value with its address; see `add`.

        `starts` are what `Plain.starts` gives, `to` has int64, shape ``(n,)``, for each field.
        """
        low, high, n = int(starts.min()), int(starts.max()), len(starts)
        is_inside = low >= 0 and high + plain.nbytes <= file.nbytes
        if not is_inside or (n >= MERGED and high - low < n * 2 * APART_NEAR):
            for (f, at), addresses in zip(plain.fields, to, strict=True):
                self.put(file, starts + at, np.full(n, f.row_nbytes), addresses, f"field {f.name}")
            return
        for begin, columns, _ in _side_by_side(plain, to):
            self._apart.append((file, together(starts + begin, columns)))

    def read(self, near: int) -> None:
        """Read all of it, what is in files of one kind together."""
        parts = [*self._apart, *self.runs(near)]
        kinds: dict[type[Handle], list[tuple[Handle, Runs]]] = {}
        for part in parts:
            kinds.setdefault(type(part[0]), []).append(part)
        for kind, own in kinds.items():
            kind.read_many(own)
        first = {file: int(r.starts[0]) for file, r in reversed(parts) if len(r.starts)}
        for file, offset in first.items():
            file.check_same(offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the files that have been added."""
        return sum(file.nbytes for file, _ in self._files.values())

    def runs(self, near: int) -> Iterator[tuple[Handle, Runs]]:
        """Yield what to read of each file, by rising offsets; see `dsprep.storage.scatter.runs`."""
        for file, columns in self._files.values():
            offsets, lengths, addresses = (
                columns[0] if len(columns) == 1 else map(np.concatenate, zip(*columns, strict=True))
            )
            if (offsets[1:] < offsets[:-1]).any():
                order = np.argsort(offsets, kind="stable")
                offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
            yield file, runs(offsets, lengths, addresses, near)


Side: TypeAlias = tuple[int, list[tuple[Ints | int, int]], int]
"""Fields near each other in every sample: where they begin, addresses and bytes, and the end."""


def _side_by_side(plain: Plain, to: Sequence[Ints]) -> list[Side]:
    """Return fields that are near each other, with the gaps between them."""
    sides = list[Side]()
    for (f, at), addresses in zip(plain.fields, to, strict=True):
        begin, columns, end = sides[-1] if sides else (at, [], at)
        if not 0 <= at - end <= NEAR:
            sides.append((at, [(addresses, f.row_nbytes)], at + f.row_nbytes))
            continue
        gap = [(DROPPED, at - end)] if at > end else []
        sides[-1:] = [(begin, [*columns, *gap, (addresses, f.row_nbytes)], at + f.row_nbytes)]
    return sides


# --- consecutive samples at a constant distance ------------------------------------------------


def woven(plain: Plain, to: Sequence[Ints | int], stride: int, count: int) -> Ints | None:
    """Return the places of plain fields of consecutive samples that are read as one range.

    Parameters
    ----------
    to
        For each field, where the values go: int64, shape ``(count,)``; or where all of them go
        together, as they are stored.
    stride
        Bytes from one sample to the next.

    Returns
    -------
    As of `dsprep.storage.scatter.runs`, int64 of shape ``(m, 2)``; the range begins with the first
    field. None where fields overlap, or are too far from each other.
    """
    if len(to) == 1 and stride == plain.nbytes and isinstance(to[0], int):
        return np.array([[to[0], count * stride]], np.int64)
    addresses = [
        each + np.arange(count, dtype=np.int64) * f.row_nbytes if isinstance(each, int) else each
        for each, (f, _) in zip(to, plain.fields, strict=True)
    ]
    sides = _side_by_side(plain, addresses)
    begin, columns, end = sides[0]
    gap = stride - (end - begin)
    if len(sides) > 1 or not 0 <= gap <= NEAR:
        return None
    if not gap:
        return together(addresses[0], columns).places
    return together(addresses[0], [*columns, (DROPPED, gap)]).places[:-1]


def joined(ranges: Sequence[tuple[int, int, Ints]]) -> list[tuple[int, Ints]] | None:
    """Return ranges of a file as fewer, and their places; None where they overlap.

    `ranges` are where each begins and ends, and its places.
    """
    out, end = list[tuple[int, list[Ints]]](), -1
    for start, stop, iovecs in sorted(ranges, key=lambda r: r[0]):
        gap = start - end
        if out and gap < 0:
            return None
        if out and gap <= NEAR:
            out[-1][1].extend([np.array([[DROPPED, gap]], np.int64), iovecs] if gap else [iovecs])
        else:
            out.append((start, [iovecs]))
        end = stop
    return [(start, each[0] if len(each) == 1 else np.concatenate(each)) for start, each in out]


# --- ranges cut for threads and calls ----------------------------------------------------------


def shared(start: int, iovecs: Ints, limit: int, align: int) -> list[tuple[int, Ints]]:
    """Cut a range of a file into at most `limit` parts of like size, at multiples of `align`."""
    total = int(iovecs[:, 1].sum())
    count = min(limit, total // max(align, LEAST))
    if count < 2:
        return [(start, iovecs)]
    at = {(start + total * k // count) // align * align for k in range(1, count)}
    return cut(start, iovecs, sorted(a for a in at if start < a < start + total))
