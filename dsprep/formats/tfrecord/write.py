"""Writing a TFRecord file: pieces of whole records, one after another, and perhaps in groups.

Without compression the bytes depend on samples and groups alone, whatever the pieces; samples of
one shape have a constant stride. With GZIP, of files without groups, every piece is one member, and
readers see one stream. The CRC of a group is taken while its bytes are in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Array, Batch, Ints
from dsprep.formats.base import State
from dsprep.formats.options import Compression
from dsprep.formats.record_writer import RecordWriter
from dsprep.formats.tfrecord import framing
from dsprep.formats.tfrecord.build import Builder, check_size
from dsprep.formats.tfrecord.example import padding_head
from dsprep.formats.tfrecord.locate import layout_of
from dsprep.formats.tfrecord.stream import read_blocks
from dsprep.layout.model import FileLayout
from dsprep.storage.checksums import crc32c
from dsprep.storage.durable import sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import pwrite_all, truncate

GZIP_LEVEL = 4
"""The level unless one is asked for; higher ones cost more time than they save space."""


@dataclass
class Piece:
    """Encoded samples of one group, or a recipe for them.

    `blocks` are their bytes, to be written back to back and to be taken once: `nbytes` in the file,
    of which the last record has `last`, and the payloads, if they vary, `lengths`.
    `TFRecordWriter.reserve` gives the group, the offset, and
    by how many bytes the group is filled up behind them.
    """

    start: int
    stop: int
    nbytes: int
    blocks: Iterable[NDArray[np.uint8] | bytes]
    last: int
    lengths: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    group: int = -1
    offset: int = -1
    missing: int = 0


class TFRecordWriter(RecordWriter):
    """One TFRecord file being written; see `plan` for how groups are laid out."""

    def __init__(
        self,
        builder: Builder,
        grouping: Grouping,
        compress: Compression | None,
        path: Path,
        state: State | None,
    ) -> None:
        super().__init__(path, "", grouping, state)
        self._builder, self._samples = builder, grouping
        self._level: int | None = None
        if compress is not None:
            self._level = GZIP_LEVEL if compress.level is None else compress.level
        self._begins = np.full(grouping.count, -1, np.int64)
        self._end = 0 if state is None else int(state["offset"])
        self._lengths: list[Array] | None = [] if state is None else None

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """Return samples ``start ..`` as a piece; see `Writer.encode`.

        Raises `UnsupportedError` if a sample is too large for ``tf.train.Example``.
        """
        builder = self._builder
        lengths, blocks = builder.records(batch, start, arena)
        count = len(lengths)
        nbytes = int(lengths.sum()) + count * framing.FRAME
        last = int(lengths[-1]) + framing.FRAME if count else 0
        if builder.nbytes:
            lengths = lengths[:0]
        if self._level is None or not count:
            return Piece(start, start + count, nbytes, blocks, last, lengths)
        packer = zlib.compressobj(self._level, zlib.DEFLATED, 16 + 15)
        parts = [*(packer.compress(block.data) for block in blocks), packer.flush()]
        return Piece(start, start + count, sum(map(len, parts)), parts, last)

    def reserve(self, piece: Piece) -> None:
        """Give the piece the place behind the one before, and behind its group what is missing."""
        piece.offset, end = self._end, self._end + piece.nbytes
        self.allocate(end)
        self._end, grouping = end, self.grouping
        if self._lengths is not None and len(piece.lengths):
            narrow = np.uint32 if int(piece.lengths.max()) < 1 << 31 else np.int64
            self._lengths.append(piece.lengths.astype(narrow))
        if grouping is None or piece.start == piece.stop:
            return
        g = piece.group = grouping.of(piece.start)
        if piece.start == grouping.edges[g]:
            self._begins[g] = piece.offset
        if piece.stop == grouping.edges[g + 1]:
            if g + 1 < grouping.count:
                piece.missing = self._builder.missing(end)
            if piece.missing:
                check_size(piece.last - framing.FRAME + piece.missing, piece.stop - 1)
                if self._lengths and len(piece.lengths):
                    self._lengths[-1][-1] += piece.missing
            end += piece.missing
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
            for part in parts if piece.group >= 0 else ():
                crc = crc32c(part, crc)
            at += pwrite_all(self.fd, parts, at)
        if done and piece.group >= 0:
            self.sums.add(piece.group, piece.offset, at - piece.offset, crc)

    @override
    def layout(self) -> FileLayout | None:
        if self._level is not None:
            return None
        lengths = np.concatenate(self._lengths).astype(np.int64) if self._lengths else None
        return layout_of(self._builder, self._samples, lengths)

    def checkpoint(self) -> State:
        """Return the offset of the next piece."""
        return {"offset": self._end}

    def finish(self) -> None:
        """Cut off what an interrupted run may have left behind the end, and close."""
        truncate(self.fd, self._end)
        if self.durable:
            sync(self.fd)
        self.close()

    @override
    def group_ranges(self, edges: Ints) -> tuple[Ints, Ints]:
        begins = self._begins
        if self._builder.nbytes:
            begins = self._builder.group_offsets(edges)[:-1]
        elif (begins < 0).any():  # those of an earlier run are found in the file
            with closing(open_file(self.path)) as file:
                begins = read_blocks(file).offsets.at(edges[:-1]) - framing.HEADER
        return begins, np.append(begins[1:], self._end)[: len(begins)]


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
