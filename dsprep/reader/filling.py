"""A unit on its way into memory: the targets of its values, and the last steps after reading.

Fixed fields go to the blocks of their batches, into the slots at which they are delivered.
Ragged values are contiguous in a block of their own, in the order of delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from dsprep.core.schema import Arena, Array, Batch, Bytes, Field, Ints, Ragged, Schema, concatenate
from dsprep.core.spans import move_spans, offsets_of
from dsprep.reader.cached import Staged
from dsprep.reader.memory import Block
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle
from dsprep.storage.ranges import as_bytes
from dsprep.storage.scatter import Runs

BLOCK_NBYTES = 64 << 10
"""Bytes of a block at least, so that tiny batches do not take a page each."""

Take: TypeAlias = Callable[[str, int], Bytes]
"""Allocates memory for values of a field: called with its name and a number of bytes."""

_ALIGN = 64


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
    """One thread's part of a unit: one range of a file, or many, or fields that are decoded."""

    file: Handle | None = None  # None where `decode` does the reading
    runs: Runs | None = None
    decode: Callable[[Arena, Sidecar], int] | None = None
    """Called with memory of the thread, and the dataset or a copy; returns bytes requested."""


@dataclass
class Fill:
    """A unit on its way into memory."""

    samples: Ints  # numbers in the order of the files: int64, shape (n,)
    slots: Ints  # position of each within the unit as delivered: int64, shape (n,)
    slices: Sequence[Slice]  # the blocks that they go to, in the order of delivery
    cached_copy: Staged | None = None  # the copy from which they are read; None: the dataset itself
    parts: list[ReadPart] = field(default_factory=list)  # what has to be read
    ragged: dict[str, Ragged] = field(default_factory=dict)  # as delivered, once all is done
    files: dict[Handle, int] = field(default_factory=dict)  # that are read, and first where
    done: SimpleQueue[None] = field(default_factory=SimpleQueue)
    """Not empty once all is there, or `error` is. Not an event: an interrupt within its `wait`,
    which is written in Python, may become a RuntimeError."""
    error: BaseException | None = None
    missing: int = 0  # parts that are not read yet
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


class Delivery:
    """The blocks that batches are, and how what was read gets to its slots in them.

    Parameters
    ----------
    fields
        Of a batch.
    batch_size
        Samples of a full batch.

    Attributes
    ----------
    areas
        By fixed field, its first byte in a block, where samples are back to back.
    batches, capacity
        Batches that a block holds, and samples: more than one where batches are tiny.
    """

    def __init__(self, fields: Sequence[Field], batch_size: int) -> None:
        self._fields = {f.name: f for f in fields}
        self.areas: dict[str, int] = {}
        each = sum(f.row_nbytes for f in fields if not f.ragged) * batch_size
        self.batches = max(1, BLOCK_NBYTES // max(each, batch_size))
        self.capacity = self.batches * batch_size
        at = 0
        for f in fields:
            if not f.ragged:
                self.areas[f.name] = at
                at += -(-f.row_nbytes * self.capacity // _ALIGN) * _ALIGN
        self.block_nbytes = at
        self._columns = [  # where it begins, bytes of a sample; -1: ragged
            (f, f.name, f.dtype, f.inner, self.areas[f.name], f.row_nbytes)
            if f.name in self.areas
            else (f, f.name, f.dtype, f.inner, 0, -1)
            for f in fields
        ]

    def addresses(self, fill: Fill, f: Field) -> Ints:
        """Return the target address of each value of a field, in the order of the files: int64."""
        nbytes, area = f.row_nbytes, self.areas[f.name]
        first = [s.block.address + (s.begin - s.low) * nbytes for s in fill.slices]
        counts, n = [s.high - s.low for s in fill.slices], len(fill.samples)
        at = np.repeat(np.array(first, np.int64), counts)  # by the slot within the unit
        at += np.arange(area, area + n * nbytes, nbytes)
        targets: Ints = at[fill.slots]
        return targets

    def reserve(self, fill: Fill, f: Field, sizes: Ints, take: Take) -> tuple[Bytes, Ints]:
        """Return memory for ragged values of so many bytes each, and where each begins in it."""
        delivered = np.empty_like(sizes)
        delivered[fill.slots] = sizes
        ends = offsets_of(delivered)
        memory = take(f.name, int(ends[-1]))
        values = memory[: int(ends[-1])].view(f.dtype).reshape(-1, *f.inner)
        fill.ragged[f.name] = Ragged(values, ends // max(1, f.row_nbytes), f.kind)
        return memory, ends[:-1][fill.slots]

    def deliver(self, fill: Fill, chosen: Ints, batch: Batch) -> None:
        """Put fields of some samples where they are delivered; ragged ones wait for `finish`."""
        for name, column in batch.items():
            if isinstance(column, Ragged):
                fill.decoded.setdefault(name, []).append((chosen, column))
            else:
                self._deliver(fill, name, column, fill.slots[chosen])

    def finish(self, fill: Fill) -> None:
        """Put staged and decoded values where they are delivered, once everything is read."""
        for name, staged in fill.staged.items():
            self._deliver(fill, name, staged, fill.slots)
        fill.staged.clear()
        for name, columns in fill.decoded.items():
            fill.ragged[name] = _joined(self._fields[name], fill, columns)

    def batch(self, pieces: Sequence[Slice]) -> Batch:
        """Return the batch of some slices, of which no two are in different blocks."""
        count = sum([s.high - s.low for s in pieces])
        memory = pieces[0].memory if pieces else np.empty(self.block_nbytes, np.uint8)
        begin = pieces[0].begin if pieces else 0
        out: Batch = {}
        for f, name, dtype, inner, at, nbytes in self._columns:
            if nbytes >= 0:
                out[name] = np.ndarray((count, *inner), dtype, memory, at + begin * nbytes)
                continue
            parts: list[Batch] = [{name: s.ragged[name][s.low : s.high]} for s in pieces]
            out |= concatenate(Schema((f,)), parts)
        return out

    def _deliver(self, fill: Fill, name: str, values: Array, slots: Ints) -> None:
        """Gather values into the blocks; `slots` says where each of them is delivered."""
        area, nbytes = self.areas[name], self._fields[name].row_nbytes
        if not nbytes:
            return
        row = np.dtype((np.void, nbytes))
        rows = np.ascontiguousarray(values).reshape(-1).view(row)
        edges = [s.low for s in fill.slices]
        if len(slots) == len(fill.slots):  # all of them, which need not be sorted
            order = np.empty_like(slots)
            order[slots] = np.arange(len(slots))
        else:
            order = np.argsort(slots)
            edges = np.searchsorted(slots, edges, sorter=order).tolist()
        for s, (a, b) in zip(fill.slices, pairwise([*edges, len(slots)]), strict=True):
            count, at = s.high - s.low, area + s.begin * nbytes
            if b - a == count:
                rows.take(order[a:b], 0, np.ndarray(count, row, s.memory, at), "clip")
            elif b > a:
                to: Array = np.ndarray(count, row, s.memory, at)
                to[slots[order[a:b]] - s.low] = rows[order[a:b]]


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
