"""How all samples of a group become one LMDB value.

A value is, integers little-endian:

1. a head of 48 bytes: ``dsprepG`` and the byte 1; the samples of the group, its capacity, and the
   number of its first sample, u64 each; 16 bytes that tell the schema (BLAKE2b of its JSON);
2. for each fixed field, in schema order: its values of all samples in C order, as one array of
   shape ``(capacity, *shape)``, with the dtype's own bits; padding in structured dtypes is zero;
3. for each ragged field (`bytes` and `str` too): the bytes of each sample's value as u64, shape
   ``(capacity,)``;
4. for each ragged field: the values of all samples one after another.

Where groups are even, the capacity of all is that of the first. The last one may have fewer
samples, and zeros in the places of the others: so a field lies at the same place in every value,
and is an array in chunks for the sidecar. Otherwise the capacity is the number of samples.

The sidecar tells the fields; the head makes sure that they are those of the file.
"""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Array, Batch, Bytes, Ints, Ragged, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.lmdb.values import MAX_VALUE, Part, Values, without_padding

MAGIC = b"dsprepG\1"
HEAD = struct.Struct("<8sQQQ16s")


def is_group(value: bytes) -> bool:
    """Whether a value begins as those of groups do."""
    return value[:8] == MAGIC and len(value) >= HEAD.size


class Packing:
    """The encoding of groups of one schema.

    Attributes
    ----------
    schema, fixed, ragged
        All fields, and those of either kind.
    digest
        What tells the schema.
    """

    def __init__(self, schema: Schema) -> None:
        values = Values(schema)  # what a sample cannot hold, a group cannot
        self.schema, self.fixed, self.ragged = schema, values.fixed, values.ragged
        told = json.dumps(schema.to_json(), sort_keys=True).encode()
        self.digest = hashlib.blake2b(told, digest_size=16).digest()

    def places(self, capacity: int) -> dict[str, int]:
        """Return where each fixed field, and the lengths of each ragged one, begin in a value."""
        places, at = {}, HEAD.size
        for f in self.fixed:
            places[f.name] = at
            at += capacity * f.row_nbytes
        for f in self.ragged:
            places[f.name] = at
            at += 8 * capacity
        return places

    def body(self, capacity: int) -> int:
        """Return the bytes of a value before its ragged values."""
        return HEAD.size + capacity * (self.schema.fixed_nbytes + 8 * len(self.ragged))

    def sizes(self, grouping: Grouping) -> Ints:
        """Return the bytes of each group's value; int64, shape ``(groups,)``.

        Raises
        ------
        UnsupportedError
            If LMDB cannot hold the largest.
        """
        sizes: Ints = np.array([self.body(n) for n in capacities(grouping).tolist()], np.int64)
        for f in self.ragged:
            if f.name in grouping.rows:
                sizes = sizes + grouping.rows[f.name] * f.row_nbytes
        if int(sizes.max(initial=0)) > MAX_VALUE:
            self.refuse(int(sizes.argmax()), int(sizes.max()))
        return sizes

    def refuse(self, group: int, nbytes: int) -> None:
        """Raise the error for a group that LMDB cannot hold."""
        raise UnsupportedError(
            "a group is larger than an LMDB value can be",
            where=f"group {group}",
            expected=f"at most {MAX_VALUE} bytes",
            found=nbytes,
            fix="choose a smaller --buffer-size, or leave --group-values out",
        )

    def parts(self, batch: Batch, first: int, capacity: int, arena: Arena) -> list[Part]:
        """Return what the value of one group is made of, samples ``first ..``."""
        count = len(next(iter(batch.values())))
        head = HEAD.pack(MAGIC, count, capacity, first, self.digest)
        blocks = [np.frombuffer(head, np.uint8)]
        for f in self.fixed:
            blocks += [
                _flat(np.asarray(batch[f.name]), f.name, arena),
                np.zeros((capacity - count) * f.row_nbytes, np.uint8),
            ]
        columns = []
        for f in self.ragged:
            column = batch[f.name]
            assert isinstance(column, Ragged)  # the schema says so
            table = np.zeros(capacity, "<u8")
            table[:count] = column.lengths * f.row_nbytes
            blocks.append(table.view(np.uint8))
            begin, end = int(column.offsets[0]), int(column.offsets[-1])
            columns.append(_flat(column.values[begin:end], f.name, arena))
        here = np.zeros(1, np.int64)
        return [Part(b, here, np.array([len(b)])) for b in blocks + columns if len(b)]


def capacities(grouping: Grouping) -> Ints:
    """Return for how many samples the value of each group has room."""
    sizes = np.diff(grouping.edges)
    return np.full(len(sizes), sizes.max(initial=0)) if grouping.even else sizes


def _flat(values: Array, name: str, arena: Arena) -> Bytes:
    """Return the bytes of `values` in C order, copied only if they do not lie so."""
    if not values.size:
        return np.zeros(0, np.uint8)
    values = without_padding(values)
    if not values.flags.c_contiguous:
        copied = arena.empty(f"write.{name}", values.shape, values.dtype)
        copied[...] = values
        values = copied
    return values.reshape(-1).view(np.uint8)
