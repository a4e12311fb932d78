"""Writing a TFRecord file: pieces of whole records, one after another.

Without compression the bytes depend on the samples alone; samples of one shape lie at
``i * size``. With GZIP every piece is one member, and readers see one stream.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Batch, Schema
from dsprep.core.storage import close, pwrite_all, sync
from dsprep.formats.base import State, WriteOptions, Writer
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.build import Assembly, Template
from dsprep.formats.tfrecord.example import view

GZIP_LEVEL = 4
"""The level unless one is asked for; higher ones cost more time than they save space."""


def gzip_level(options: WriteOptions) -> int | None:
    """Return the level to compress with, or None."""
    if options.compress is None:
        return None
    return GZIP_LEVEL if options.compress.level is None else options.compress.level


@dataclass
class Piece:
    """Encoded samples, or a recipe for them.

    Attributes
    ----------
    nbytes
        Their size in the file.
    blocks
        Their bytes, to be written one after another and to be taken once.
    offset
        Where they belong, once `TFRecordWriter.reserve` has been called.
    """

    nbytes: int
    blocks: Iterable[NDArray[np.uint8] | bytes]
    offset: int = -1


class TFRecordWriter(Writer):
    """One TFRecord file being written."""

    def __init__(
        self, path: Path, schema: Schema, options: WriteOptions, state: State | None
    ) -> None:
        types = features.plan(schema, options)
        self._builder: Template | Assembly
        if schema.ragged:
            self._builder = Assembly(schema, types, features.is_opaque(schema))
        else:
            self._builder = Template(schema, types)
        self._level = gzip_level(options)
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
        blocks: Iterable[NDArray[np.uint8]]
        if isinstance(self._builder, Template):
            nbytes = len(next(iter(batch.values()), ())) * self._builder.nbytes
            blocks = self._builder.blocks(batch, arena)
        else:
            records, _ = self._builder.records(batch, start, arena)
            nbytes, blocks = len(records), [records]
        if self._level is None or not nbytes:
            return Piece(nbytes, blocks)
        packer = zlib.compressobj(self._level, zlib.DEFLATED, 16 + 15)
        parts = [packer.compress(view(block)) for block in blocks]
        parts.append(packer.flush())
        return Piece(sum(map(len, parts)), parts)

    def reserve(self, piece: Piece) -> None:
        """Give the piece the place behind the one before."""
        piece.offset = self._end
        self._end += piece.nbytes

    def write(self, piece: Piece) -> None:
        """Write the piece at its place."""
        at = piece.offset
        for block in piece.blocks:
            at += pwrite_all(self._fd, [block], at)

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

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)
