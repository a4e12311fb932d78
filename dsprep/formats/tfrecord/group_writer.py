"""Writing groups of records, and the CRC of each group while its bytes are in memory.

Without compression the bytes depend on samples and groups alone, whatever the pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsprep.core.checksums import Sums, crc32c, read_crc32c
from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Array, Batch, Ints, Schema
from dsprep.core.storage import close, pwrite_all, sync
from dsprep.formats.base import GroupWriter, State, WriteOptions
from dsprep.formats.tfrecord import features, framing, group_gzip
from dsprep.formats.tfrecord.build import Template, check_size
from dsprep.formats.tfrecord.example import padding_head
from dsprep.formats.tfrecord.group import arrange
from dsprep.formats.tfrecord.stream import read_index
from dsprep.layout.laws import Explicit, Law, affine
from dsprep.layout.model import Blocks, Groups
from dsprep.reading.files import File


@dataclass
class Piece:
    """Encoded samples of one group, or a recipe for them.

    Attributes
    ----------
    start, stop
        The samples ``start <= i < stop``.
    nbytes
        Their size in the file, without padding that the group ends with.
    blocks
        Their bytes, to be written one after another and to be taken once.
    last
        Bytes of the last record, which ends the last block.
    group, offset, missing
        Where they belong, and by how many bytes the group is filled up behind them, once
        `TFRecordGroupWriter.reserve` has been called.
    """

    start: int
    stop: int
    nbytes: int
    blocks: Iterable[NDArray[np.uint8] | bytes]
    last: int
    group: int = -1
    offset: int = -1
    missing: int = 0


class TFRecordGroupWriter(GroupWriter):
    """One TFRecord file of groups being written; see `group` for how they lie."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        self._path, self._grouping = path, grouping
        self._arrangement = arrange(schema, features.plan(schema, options), options, grouping)
        self.whole = self._arrangement.level is not None
        self._begins = np.full(grouping.count, -1, np.int64)
        self._ends = np.full(grouping.count, -1, np.int64)
        self._sums = Sums()
        self._end = 0 if state is None else int(state["offset"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if state is None else 0)
        self._fd = os.open(path, flags, 0o666)

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """Return samples ``start ..`` as a piece; see `Writer.encode`.

        Raises
        ------
        UnsupportedError
            If a sample is too large for ``tf.train.Example``.
        """
        builder, level = self._arrangement.builder, self._arrangement.level
        count = len(next(iter(batch.values()), ()))
        blocks: Iterable[NDArray[np.uint8]]
        if isinstance(builder, Template):
            nbytes, last = count * builder.nbytes, builder.nbytes
            blocks = builder.blocks(batch, arena)
        else:
            records, last = builder.records(batch, start, arena)
            nbytes, blocks = len(records), [records]
        if level is None or not count:
            return Piece(start, start + count, nbytes, blocks, last)
        ends_file = start + count == self._grouping.edges[-1]
        parts = group_gzip.member(level, blocks, 1 if ends_file else self._arrangement.align)
        return Piece(start, start + count, sum(map(len, parts)), parts, last)

    def reserve(self, piece: Piece) -> None:
        """Give the piece the place behind the one before, and behind its group what is missing."""
        if piece.start == piece.stop:
            return
        edges, arrangement = self._grouping.edges, self._arrangement
        g = piece.group = self._grouping.of(piece.start)
        piece.offset, end = self._end, self._end + piece.nbytes
        if piece.start == edges[g]:
            self._begins[g] = piece.offset
        if piece.stop == edges[g + 1]:
            if g + 1 < self._grouping.count:
                piece.missing = arrangement.missing(end)
            if piece.missing:
                check_size(piece.last - framing.FRAME + piece.missing, piece.stop - 1)
            end += piece.missing
            self._ends[g] = end
        self._end = end

    def write(self, piece: Piece) -> None:
        """Write the piece at its place."""
        at, crc, done = piece.offset, 0, 0
        for block in piece.blocks:
            done += len(block)
            parts: list[bytes | Array] = [block]
            if piece.missing and done == piece.nbytes:
                assert isinstance(block, np.ndarray)
                parts = lengthened(block, piece.last, piece.missing)
            for part in parts:
                crc = crc32c(part, crc)
            at += pwrite_all(self._fd, parts, at)
        if done:
            self._sums.add(piece.group, piece.offset, at - piece.offset, crc)

    def checkpoint(self) -> State:
        """Return where the next piece goes."""
        return {"offset": self._end}

    def sync(self) -> None:
        """Make all that has been written durable."""
        sync(self._fd, data=True)

    def finish(self) -> None:
        """Cut off what an interrupted run may have left behind the end, and close."""
        os.ftruncate(self._fd, self._end)
        if self.durable:
            sync(self._fd)
        self.close()

    def groups(self) -> Groups:
        """Return where the groups lie; see `GroupWriter.groups`.

        What an earlier run has written is read back for its sums.

        Raises
        ------
        FormatError
            If the file was changed since.
        """
        grouping = self._grouping
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._find_places(fd)
            sums = np.empty(grouping.count, np.int64)
            places = zip(self._begins.tolist(), self._ends.tolist(), strict=True)
            for g, (begin, end) in enumerate(places):
                known = self._sums.of(g, begin, end)
                sums[g] = read_crc32c(fd, begin, end, self._path) if known is None else known
        finally:
            os.close(fd)
        return Groups(
            max(1, grouping.samples),
            Blocks(law(self._begins), law(self._ends - self._begins)),
            Explicit(sums),
            None if grouping.even else Explicit(grouping.edges[:-1].copy()),
        )

    def _find_places(self, fd: int) -> None:
        """Find the groups that an earlier run has written."""
        edges, arrangement = self._grouping.edges, self._arrangement
        if bool((self._begins >= 0).all() and (self._ends >= 0).all()):
            return
        if arrangement.level is not None:
            at = 0
            for g in range(self._grouping.count):
                self._begins[g] = at
                self._ends[g] = at + group_gzip.nbytes_at(fd, at, self._path)
                at = int(self._ends[g])
            return
        if arrangement.fixed:
            places = arrangement.places(edges)
        else:
            index = read_index(File(self._path))
            begins = index.offsets.at(edges[:-1]) - framing.HEADER
            places = np.append(begins, index.nbytes)
        self._begins[:], self._ends[:] = places[:-1], places[1:]

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


def lengthened(block: Array, last: int, padding: int) -> list[bytes | Array]:
    """Return `block` with `padding` added to the record that its `last` bytes are."""
    begin, end = len(block) - last + framing.HEADER, len(block) - framing.FOOTER
    head = padding_head(padding)
    zeros = np.zeros(padding - len(head), np.uint8)
    crc = framing.unmask(int.from_bytes(block[end:].tobytes(), "little"))
    crc = crc32c(zeros, crc32c(head, crc))
    foot = framing.mask(np.array([crc], np.uint32)).astype("<u4").tobytes()
    header = framing.headers(np.array([end - begin + padding])).tobytes()
    before = block[: begin - framing.HEADER]
    return [before, header, block[begin:end], head, zeros, foot]


def law(values: Ints) -> Law:
    """Return `values` as the law that they follow, if that is so simple."""
    return affine.fit(values) or Explicit(values)
