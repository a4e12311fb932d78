"""From columns of samples to the bytes of records.

The same part of many records is put in place at a time. The bytes are those that
``Example.SerializeToString`` would write for features in this order, except that every int64 takes
10 bytes, and that bytes between the members of structured elements are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from dsprep.core.schema import Arena, Batch, Bytes, Field, Ints, Ragged, Schema
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import UnsupportedError
from dsprep.formats.stored_rows import RowSpans
from dsprep.formats.tfrecord import features, framing
from dsprep.formats.tfrecord.example import (
    INT64,
    LARGEST,
    PADDED_VARINT,
    encode_varints,
    entry_head,
    example_head,
    padding_head,
)
from dsprep.formats.tfrecord.features import Feature

U8 = np.dtype(np.uint8)
BLOCK = 512 << 10
"""Bytes that are put together, given their CRCs and written while they are in the CPU's cache."""
MOST_OVERHEAD = 32
"""Bytes that a feature can take beyond its name and its values; an Example takes fewer."""


LEAST_PADDING = 2
"""Bytes that a field takes; a group that lacks 1 byte to a stripe takes a stripe more."""


class Builder:
    """Makes the records of samples, each with so many bytes of `padding`: not 1.

    Attributes
    ----------
    align
        Groups begin at multiples of it, because what is before them is filled up.
    aligned
        Whether they begin at multiples of the stripe size.
    features
        The features, in order.
    opaque
        Whether samples are records already.
    nbytes
        Of each record with its frame, where samples are of one shape; else 0.
    positions
        Where the values of each feature begin in such a payload.
    """

    def __init__(self, schema: Schema, types: dict[str, int], padding: int = 0) -> None:
        self.features = [Feature(f.name, types[f.name], f) for f in schema]
        self.opaque = features.is_opaque(schema)
        self.nbytes, self.positions = 0, list[int]()
        self.padding, self.align, self.aligned = padding, 1, True
        if not schema.ragged:
            sizes = [features.row_nbytes(f.field, f.type) for f in self.features]
            named = zip(self.features, sizes, strict=True)
            heads = [len(entry_head(f.name.encode(), f.type, size)) for f, size in named]
            entries = sum(heads) + sum(sizes)
            edges = offsets_of(np.stack([heads, sizes], axis=1).reshape(-1).astype(np.int64))
            begin = len(example_head(entries))
            self.positions = (begin + edges[1::2]).tolist()
            self.nbytes = begin + entries + padding + framing.FRAME

    def missing(self, end: int) -> int:
        """Return the padding of the last record of a group that would end at `end`."""
        short = -end % self.align
        return short + self.align if 0 < short < LEAST_PADDING else short

    def group_offsets(self, edges: Ints) -> Ints:
        """Return the offsets of groups of records of one size, and the end of the last."""
        sizes = np.diff(edges) * self.nbytes
        if self.align > 1:
            different, owner = np.unique(sizes[:-1], return_inverse=True)
            filled = [size + self.missing(size) for size in different.tolist()]
            sizes[:-1] = np.array(filled, np.int64)[owner]
        return offsets_of(sizes)

    def records(self, batch: Batch, start: int, arena: Arena) -> tuple[Ints, Iterator[Bytes]]:
        """Return the bytes of each payload of `batch`, samples ``start ..``, and the records.

        These come some at a time, as bytes that the next replace; `batch` has to stay as it is
        until the last of them. Raises `UnsupportedError` if a sample is too large for
        ``tf.train.Example``.
        """
        parts: list[RowSpans] = []
        for f in self.features:
            values = _encoded(batch, f.field, f.type, arena)
            if not self.opaque:
                parts.append(_heads(values.lengths, partial(entry_head, f.name.encode(), f.type)))
            parts.append(values)
        lengths: Ints = np.sum([part.lengths for part in parts], axis=0, dtype=np.int64)
        if not self.opaque:
            parts.insert(0, _heads(lengths, example_head))
            if self.padding:
                zeros = padding_head(self.padding).ljust(self.padding, b"\0")
                parts.append(_repeated(zeros, len(lengths)))
            lengths = lengths + parts[0].lengths + self.padding
            if len(lengths):
                check_size(int(lengths.max()), start + int(lengths.argmax()))
        if self.nbytes:
            head = framing.headers(lengths[:1]).tobytes()
            parts.insert(0, _repeated(head, len(lengths)))
        else:
            parts.insert(0, RowSpans.of_rows(framing.headers(lengths), framing.HEADER))
        blocks = _even_blocks if self.nbytes and len(lengths) else _block
        return lengths, blocks(parts, lengths + framing.FRAME, arena)


def _even_blocks(parts: Sequence[RowSpans], nbytes: Ints, arena: Arena) -> Iterator[Bytes]:
    """Yield records of one size that are made of these parts, each evenly spaced, and a CRC."""
    n, width, columns, at = len(nbytes), int(nbytes[0]), [], 0
    for part in parts:
        step = int(part.starts[1] - part.starts[0]) if n > 1 else 0
        shape = n, int(part.lengths[0])
        rows = np.ndarray(shape, U8, part.data, int(part.starts[0]), (step, 1))
        columns.append((at, at + shape[1], rows))
        at += shape[1]
    out = arena.empty("write", (min(n, max(1, BLOCK // width)), width), U8)
    starts = np.arange(len(out), dtype=np.int64) * width + framing.HEADER
    for first in range(0, n, len(out)):
        block = out[: n - first]
        for a, b, rows in columns:
            if not first or rows.strides[0]:
                block[:, a:b] = rows[first : first + len(block)]
        lengths = nbytes[: len(block)] - framing.FRAME
        crcs = framing.payload_crcs(block.reshape(-1), starts[: len(block)], lengths)
        block[:, at:] = crcs.astype("<u4").view(U8).reshape(-1, framing.FOOTER)
        yield block.reshape(-1)


def _block(parts: Sequence[RowSpans], nbytes: Ints, arena: Arena) -> Iterator[Bytes]:
    """Yield all records, of `nbytes`, that are made of these parts and a CRC: few long copies."""
    offsets = offsets_of(nbytes)
    out = arena.empty("write", (int(offsets[-1]),), U8)
    starts = at = offsets[:-1]
    for part in parts:
        move_spans(part.data, part.starts, part.lengths, out, at)
        at = at + part.lengths
    crcs = framing.payload_crcs(out, starts + framing.HEADER, nbytes - framing.FRAME)
    foot = RowSpans.of_rows(crcs.astype("<u4"), framing.FOOTER)
    move_spans(foot.data, foot.starts, foot.lengths, out, at)
    yield out


def _repeated(data: bytes, n: int) -> RowSpans:
    """Return the same bytes for each of n records."""
    return RowSpans(np.frombuffer(data, U8), np.zeros(n, np.int64), np.full(n, len(data)))


def _heads(nbytes: Ints, head: Callable[[int], bytes]) -> RowSpans:
    """Return the heads of so many bytes each: all that there are, and which one each takes."""
    if len(nbytes) and (nbytes == nbytes[0]).all():
        return _repeated(head(int(nbytes[0])), len(nbytes))
    sizes, owner = np.unique(nbytes, return_inverse=True)
    heads = [head(size) for size in sizes.tolist()]
    edges = offsets_of(np.array([len(each) for each in heads], np.int64))
    return RowSpans(np.frombuffer(b"".join(heads), U8), edges[owner], np.diff(edges)[owner])


def check_size(nbytes: int, sample: int) -> None:
    """Raise `UnsupportedError` if a message of `nbytes` is too large to be parsed."""
    if nbytes > LARGEST:
        raise UnsupportedError(
            "the sample is too large for tf.train.Example",
            where=f"sample {sample}",
            expected=f"at most {LARGEST} bytes",
            found=nbytes,
            fix="convert to hdf5 or zarr",
        )


def _encoded(batch: Batch, field: Field, type_: int, arena: Arena) -> RowSpans:
    """Return the bytes that a field adds to each record."""
    column = batch[field.name]
    if type_ != INT64:
        return RowSpans.of(column, field)
    values = column.values if isinstance(column, Ragged) else column
    rows, nbytes = len(values), features.row_nbytes(field, type_)
    out = arena.empty(f"write.{field.name}", (*values.shape, PADDED_VARINT), U8)
    encode_varints(values, out)
    edges = (column.offsets if isinstance(column, Ragged) else np.arange(rows + 1)) * nbytes
    return RowSpans(out.reshape(-1), edges[:-1], np.diff(edges))
