"""Records of which each is in a file of its own: opened, read and closed one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from dsprep.core.pread import packed
from dsprep.core.schema import Arena, Batch, Field, Ints, Schema, concatenate, new_array
from dsprep.layout.model import Records, misfit
from dsprep.reading.files import File
from dsprep.reading.records import Taken, take_field

TRUSTED = 64 << 20
"""Bytes that are taken before the sizes of the files have been seen."""

_U8 = np.dtype(np.uint8)


def read_each(
    records: Records,
    fields: Sequence[Field],
    indices: Ints,
    open_file: Callable[[str], File],
    arena: Arena | None,
) -> Batch:
    """Return fields of samples, in the order asked for; one file is open at a time.

    Parameters
    ----------
    records
        Whose blocks have names, and whose parts have offsets.
    indices
        int64, shape ``(n,)``, in any order.
    open_file
        Opens a file by its name.

    Raises
    ------
    ChangedError
        If a file does not end where its record ends.
    """
    offsets, lengths = records.extents(indices, "the files")
    if len(lengths) and min(int(offsets.min()), int(lengths.min())) < 0:
        raise misfit("gives a record an extent that is not in its file", "the files")
    cuts = _cut(lengths)
    if len(cuts) > 1:
        arena = None  # it has memory for one part
    parts = [_read(records, fields, indices[a:b], open_file, arena) for a, b in cuts]
    return parts[0] if len(parts) == 1 else concatenate(Schema(tuple(fields)), parts)


def _cut(lengths: Ints) -> list[tuple[int, int]]:
    """Return runs of samples of at most `TRUSTED` bytes, or of one sample."""
    ends, out, a = np.cumsum(lengths), list[tuple[int, int]](), 0
    while a < len(lengths):
        before = int(ends[a - 1]) if a else 0
        b = max(a + 1, int(np.searchsorted(ends, before + TRUSTED, "right")))
        out.append((a, b))
        a = b
    return out or [(0, 0)]


def _read(
    records: Records,
    fields: Sequence[Field],
    indices: Ints,
    open_file: Callable[[str], File],
    arena: Arena | None,
) -> Batch:
    """Return fields of samples whose bytes are taken together."""
    names = records.blocks.names
    assert names is not None  # see `read_each`
    offsets, lengths = records.extents(indices, "the files")
    paths = [os.fsdecode(names[i]) for i in records.numbers(indices, "the files").tolist()]
    places = packed(lengths)
    out = new_array(arena, "sidecar.each", (0,), _U8)
    for k, (path, offset, nbytes) in enumerate(
        zip(paths, offsets.tolist(), lengths.tolist(), strict=True)
    ):
        file = open_file(path)
        file.check_end(offset + nbytes)
        if not k:
            out = new_array(arena, "sidecar.each", (int(places[-1]),), _U8)
        at = int(places[k])
        if nbytes:
            file.read_into(out[at : at + nbytes], offset)
    taken, found = Taken(out, places[:-1], lengths), Batch()
    for field in fields:
        part = records.parts[field.name]
        found[field.name] = take_field(taken, field, part, int(part.at or 0), paths.__getitem__)
    return found
