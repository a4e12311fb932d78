"""Fields of which every sample has a file of its own: opened, read and closed one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from dsprep.core.schema import (
    Arena,
    Bytes,
    Field,
    Ints,
    Ragged,
    Schema,
    concatenate,
    new_array,
)
from dsprep.core.spans import offsets_of
from dsprep.errors import layout_mismatch
from dsprep.layout.model import OwnFiles
from dsprep.storage.base import Handle

TRUSTED = 64 << 20
"""Bytes that are taken before the sizes of the files have been seen."""

_U8 = np.dtype(np.uint8)


def read_each(
    own: OwnFiles,
    field: Field,
    indices: Ints,
    open_file: Callable[[str], Handle],
    arena: Arena | None,
) -> Ragged:
    """Return the field of samples, in the order asked for; one file is open at a time.

    Parameters
    ----------
    indices
        int64, shape ``(n,)``, in any order.
    open_file
        Opens a file by its name.

    Raises
    ------
    ChangedError
        If a file has another size.
    """
    lengths = own.lengths.at(indices)
    if len(lengths) and int(lengths.min()) < 0:
        raise layout_mismatch("gives a sample a file of less than no bytes", "the files")
    cuts = _cut(lengths)
    if len(cuts) > 1:
        arena = None  # it has memory for one part
    parts = [_read(own, field, indices[a:b], lengths[a:b], open_file, arena) for a, b in cuts]
    if len(parts) == 1:
        return parts[0]
    joined = concatenate(Schema((field,)), [{field.name: part} for part in parts])[field.name]
    assert isinstance(joined, Ragged)  # as all parts
    return joined


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
    own: OwnFiles,
    field: Field,
    indices: Ints,
    lengths: Ints,
    open_file: Callable[[str], Handle],
    arena: Arena | None,
) -> Ragged:
    """Return the field of samples whose bytes are taken together."""
    positions = offsets_of(lengths)
    if len(indices):
        open_file(os.fsdecode(own.names[int(indices[0])])).check_end(int(lengths[0]))
    out = new_array(arena, f"sidecar.each.{field.name}", (int(positions[-1]),), _U8)
    read_files(own.names.some(indices), positions[:-1], positions[1:], open_file, out)
    return Ragged(out, positions, field.kind)


def read_files(
    names: Sequence[bytes],
    begins: Ints,
    ends: Ints,
    open_file: Callable[[str], Handle],
    out: Bytes,
) -> None:
    """Read files, of just so many bytes each, to ``out[begins[i]:ends[i]]``; see `read_each`."""
    for name, a, b in zip(names, begins.tolist(), ends.tolist(), strict=True):
        open_file(os.fsdecode(name)).read_whole(out[a:b])
