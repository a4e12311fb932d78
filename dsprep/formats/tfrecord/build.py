"""From columns of samples to the bytes of records.

`Template` serves samples of one shape: a record with gaps is filled in for all of them at once.
`Assembly` serves those that vary: the same part of all records is put in place at a time. Both
write the bytes that ``Example.SerializeToString`` would for features in this order, except that
every int64 takes 10 bytes, and that bytes between the members of structured elements are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Field,
    Ints,
    Ragged,
    Schema,
    copy_members,
    has_padding,
)
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import UnsupportedError
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
Payload: TypeAlias = NDArray[np.uint8]
BLOCK = 512 << 10
"""Bytes that are filled in, given their CRCs and written while they are in the CPU's cache."""
MOST_OVERHEAD = 32
"""Bytes that a feature can take beyond its name and its values; an Example takes fewer."""


class Template:
    """Records of samples of one shape: `nbytes` each, with their frames."""

    def __init__(self, schema: Schema, types: dict[str, int], padding: int = 0) -> None:
        """Take the fields, and how many bytes of padding each record gets: not 1."""
        self._gaps: list[tuple[Field, int, int, int]] = []  # field, list, start, stop
        self._fixed: list[tuple[int, Payload]] = []  # offset, bytes that all records share
        sizes = [features.row_nbytes(f, types[f.name]) for f in schema]
        heads = [
            entry_head(f.name.encode(), types[f.name], size)
            for f, size in zip(schema, sizes, strict=True)
        ]
        entries = sum(map(len, heads)) + sum(sizes)
        length = len(example_head(entries)) + entries + padding
        self.nbytes = length + framing.FRAME
        self._share(0, framing.headers(np.array([length])).tobytes() + example_head(entries))
        at = framing.HEADER + len(example_head(entries))
        for f, head, size in zip(schema, heads, sizes, strict=True):
            self._share(at, head)
            at += len(head)
            self._gaps.append((f, types[f.name], at, at + size))
            at += size
        if padding:
            self._share(at, padding_head(padding).ljust(padding, b"\0"))

    @property
    def features(self) -> list[tuple[Feature, int]]:
        """The features, and where the values of each begin in the payload."""
        return [(Feature(f.name, type_, f), at - framing.HEADER) for f, type_, at, _ in self._gaps]

    def _share(self, at: int, data: bytes) -> None:
        self._fixed.append((at, np.frombuffer(data, U8)))

    def blocks(self, batch: Batch, arena: Arena) -> Iterator[Payload]:
        """Yield the records of `batch`, some at a time, as bytes that the next block replaces.

        `batch` has to stay as it is until the last block.
        """
        count = len(next(iter(batch.values()), ()))
        step = min(count, max(1, BLOCK // self.nbytes))
        rows: Payload = arena.empty("write", (step, self.nbytes), U8)
        for at, data in self._fixed:
            rows[:, at : at + len(data)] = data
        starts = np.arange(step, dtype=np.int64) * self.nbytes + framing.HEADER
        lengths = np.full(step, self.nbytes - framing.FRAME)
        columns = []
        for f, type_, a, b in self._gaps:
            column = batch[f.name]
            assert isinstance(column, np.ndarray)
            few = type_ == INT64 and 0 < count * (b - a) <= BLOCK
            if few:  # such as labels: one call for all of them costs as much as for a block
                encoded = arena.empty(f"write.{f.name}", (count, b - a), U8)
                encode_values(column, f, type_, encoded)
                column = encoded
            if a < b:
                columns.append((column, f, type_, few, a, b))
        for begin in range(0, count, step or 1):
            n = min(step, count - begin)
            for column, f, type_, encoded_already, a, b in columns:
                if encoded_already:
                    rows[:n, a:b] = column[begin : begin + n]
                else:
                    encode_values(column[begin : begin + n], f, type_, rows[:n, a:b])
            flat = rows[:n].reshape(-1)
            crcs = framing.payload_crcs(flat, starts[:n], lengths[:n])
            rows[:n, -framing.FOOTER :] = _bytes_of(crcs)
            yield flat


class Assembly:
    """Records of samples that vary in size, or that are records already (`opaque`)."""

    def __init__(self, schema: Schema, types: dict[str, int], opaque: bool) -> None:
        self._fields = [(f, f.name.encode(), types[f.name]) for f in schema]
        self.features = [Feature(f.name, types[f.name], f) for f in schema]
        self.opaque = opaque

    def records(self, batch: Batch, start: int, arena: Arena) -> tuple[Payload, Ints]:
        """Return the records of `batch`, samples ``start ..``, and the bytes of each payload.

        Raises `UnsupportedError` if a sample is too large for ``tf.train.Example``.
        """
        spans: list[tuple[Payload, Ints, Ints]] = []  # bytes, where those of each record begin, end
        for f, name, type_ in self._fields:
            data, edges = _encoded(batch, f, type_, arena)
            if not self.opaque:
                spans.append(_heads(np.diff(edges), partial(entry_head, name, type_)))
            spans.append((data, edges[:-1], edges[1:]))
        nbytes: Ints = np.sum([ends - begins for _, begins, ends in spans], axis=0, dtype=np.int64)
        if not self.opaque:
            data, begins, ends = _heads(nbytes, example_head)
            spans.insert(0, (data, begins, ends))
            nbytes = nbytes + (ends - begins)
            if len(nbytes):
                check_size(int(nbytes.max()), start + int(nbytes.argmax()))
        offsets = offsets_of(nbytes + framing.FRAME)
        out: Payload = arena.empty("write", (int(offsets[-1]),), U8)
        starts = at = offsets[:-1] + framing.HEADER
        for data, begins, ends in spans:
            move_spans(data, begins, ends - begins, out, at)
            at = at + (ends - begins)
        crcs = framing.payload_crcs(out, starts, nbytes)
        frames = ((framing.headers(nbytes), offsets[:-1]), (_bytes_of(crcs), at))
        for rows, targets in frames:
            width = np.full(len(rows), rows.shape[1])
            move_spans(rows.reshape(-1), offsets_of(width)[:-1], width, out, targets)
        return out, nbytes


def _heads(nbytes: Ints, head: Callable[[int], bytes]) -> tuple[Payload, Ints, Ints]:
    """Return the heads of so many bytes each: all that there are, and which one each takes."""
    sizes, owner = np.unique(nbytes, return_inverse=True)
    heads = [head(size) for size in sizes.tolist()]
    edges = offsets_of(np.array([len(each) for each in heads], np.int64))
    return np.frombuffer(b"".join(heads), U8), edges[owner], edges[owner + 1]


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


def _bytes_of(crcs: NDArray[np.uint32]) -> Payload:
    return crcs.astype("<u4").view(U8).reshape(-1, framing.FOOTER)


def _encoded(
    batch: Batch, field: Field, type_: int, arena: Arena
) -> tuple[Payload, NDArray[np.int64]]:
    """Return a column's encoded values, and where each sample's begin and end in them."""
    column = batch[field.name]
    nbytes = features.row_nbytes(field, type_)
    if isinstance(column, Ragged):
        values, edges = column.values, column.offsets * nbytes
    else:
        values, edges = column, np.arange(len(column) + 1) * nbytes
    if not nbytes or not len(values):
        return np.empty(0, U8), edges
    if type_ != INT64 and not has_padding(field.dtype) and values.flags.c_contiguous:
        return values.reshape(-1).view(U8), edges
    out: Payload = arena.empty(f"write.{field.name}", (len(values), nbytes), U8)
    encode_values(values, field, type_, out)
    return out.reshape(-1), edges


def encode_values(values: Array, field: Field, type_: int, out: Payload) -> None:
    """Write each row of `values` as list `type_` has it to a row of `out`, ``(n, nbytes)``."""
    elements = values.reshape(len(out), -1)
    if type_ == INT64:
        encode_varints(elements, out.reshape(*elements.shape, PADDED_VARINT))
    elif has_padding(field.dtype):
        out[:] = 0
        copy_members(elements, out.view(field.dtype))
    else:
        if elements.strides[-1] != elements.itemsize:
            elements = np.ascontiguousarray(elements)
        out[:] = elements.view(U8)
