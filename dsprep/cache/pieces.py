"""The byte ranges of the pieces of a dataset: groups, or ranges of samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from dsprep.core.packing import digest
from dsprep.core.schema import Ints
from dsprep.layout.model import Groups
from dsprep.sidecar.proofs import outside, stored_ranges
from dsprep.sidecar.sidecar import Sidecar

NEAR = 64 << 10
"""Bytes between two ranges up to which they are copied together."""

PAGE = 4096
"""Ranges begin and end at multiples of it, and reach one further on both sides, where there are no
groups: what stands around records belongs to them."""


class Range(NamedTuple):
    """Bytes ``begin .. end`` of the file at `path` below file entry `number` of a dataset."""

    number: int
    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class Piece:
    """Byte ranges that are copied together.

    Attributes
    ----------
    ranges
        By file and offset; they do not overlap.
    crc32c
        Of the first range, where the sidecar knows it.
    """

    ranges: tuple[Range, ...]
    crc32c: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum(r.end - r.begin for r in self.ranges)

    @property
    def taken(self) -> int:
        """Bytes that it takes of a tier."""
        return sum((-(-r.end // PAGE) - r.begin // PAGE) * PAGE for r in self.ranges)


class Pieces:
    """The pieces of a dataset.

    Parameters
    ----------
    sidecar
        The dataset.
    edges
        int64, shape ``(pieces + 1,)``: the first sample of each, and the number of samples.
    names
        The fields that are copied, where pieces are not groups: those have all fields.

    Attributes
    ----------
    key
        A word that is the same for the same pieces of the same data.
    """

    def __init__(self, sidecar: Sidecar, edges: Ints, names: Sequence[str]) -> None:
        self.sidecar, self.edges, self.names = sidecar, edges, tuple(names)
        self._groups = lru_cache(maxsize=256)(self._find_groups)

    def __len__(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def key(self) -> str:
        """The key of the pieces: a digest of files, edges and fields."""
        words = (self.sidecar.stated, self.edges.tobytes(), repr(self.names).encode())
        return digest(b"".join(digest(word).encode() for word in words))[:16]

    def of(self, samples: Ints) -> Ints:
        """Return which pieces samples are in, each once and rising: int64, shape ``(n,)``."""
        ends = np.searchsorted(self.edges, samples[[0, -1]], "right") - 1
        if ends[0] == ends[1] and samples[-1] - samples[0] == len(samples) - 1:
            return ends[:1]  # nearly always
        return np.unique(np.searchsorted(self.edges, samples, "right") - 1)

    def __getitem__(self, i: int) -> Piece:
        samples = np.arange(self.edges[i], self.edges[i + 1], dtype=np.int64)
        ranges: list[Range] = []
        crc = None
        by_file = self.sidecar.by_file(samples)
        for number, _, local in by_file:
            group = self._group(number, local)
            if group is None:
                ranges += self._around(number, local, self.names)
                continue
            groups, g, apart = group
            begin = int(groups.blocks.offsets.one(g))
            block = Range(number, groups.path(g), begin, begin + int(groups.blocks.lengths.one(g)))
            ranges += [block, *self._around(number, local, apart)]
            if len(by_file) == 1 and groups.crc32c is not None:
                crc = int(groups.crc32c.one(g))
        return Piece(tuple(ranges), crc)

    def _group(self, number: int, local: Ints) -> tuple[Groups, int, tuple[str, ...]] | None:
        """Return the group of a file that has just these samples; None if none has."""
        grouping = self._groups(number)
        if grouping is None:
            return None
        groups, edges, apart = grouping
        g = int(np.searchsorted(edges, local[0], "right")) - 1
        is_whole = (edges[g], edges[g + 1]) == (local[0], local[-1] + 1)
        return (groups, g, apart) if is_whole else None

    def _find_groups(self, number: int) -> tuple[Groups, Ints, tuple[str, ...]] | None:
        """Return the groups of a file, where they begin, and the fields that lie outside them."""
        layout = self.sidecar.layout(number)
        if layout.groups is None:
            return None
        edges = layout.groups.edges(self.sidecar.content.files[number].samples)
        return layout.groups, edges, outside(layout)

    def _around(self, number: int, local: Ints, names: Sequence[str]) -> Iterator[Range]:
        """Yield ranges that hold fields of samples, and what is near them."""
        layout = self.sidecar.layout(number)
        blocks: dict[str, list[tuple[Ints, Ints]]] = {}
        for name in names:
            for path, offsets, lengths in stored_ranges(layout, name, local):
                blocks.setdefault(path, []).append((offsets, offsets + lengths))
        for path, columns in blocks.items():
            size = self.sidecar.open_file(number, path).nbytes
            low, high = (np.concatenate(each) for each in zip(*columns, strict=True))
            order = np.argsort(low, kind="stable")
            low = (low[order] // PAGE - 1) * PAGE
            high = np.maximum.accumulate(-(-high[order] // PAGE) * PAGE + PAGE)
            starts = np.append(0, np.flatnonzero(low[1:] > high[:-1] + NEAR) + 1)
            ends = np.append(starts[1:], len(low)) - 1
            for begin, end in zip(low[starts].tolist(), high[ends].tolist(), strict=True):
                if max(0, begin) < min(size, end):
                    yield Range(number, path, max(0, begin), min(size, end))


def name_of(number: int, path: str) -> str:
    """Return the name in a copy of the file at `path` below file entry `number`."""
    return f"{number}-{digest(os.fsencode(path))[:16]}" if path else str(number)
