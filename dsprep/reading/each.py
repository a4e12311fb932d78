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
    new_array,
)
from dsprep.core.spans import offsets_of
from dsprep.errors import layout_mismatch
from dsprep.layout.model import OwnFiles
from dsprep.storage.base import Handle

TRUSTED = 64 << 20
"""Bytes that are taken at most before the sizes of the files have been seen."""

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
    positions, names = offsets_of(lengths), own.names.some(indices)
    if int(positions[-1]) > TRUSTED:
        for name, nbytes in zip(names, lengths.tolist(), strict=True):
            open_file(os.fsdecode(name)).check_end(nbytes)
    out = new_array(arena, f"sidecar.each.{field.name}", (int(positions[-1]),), _U8)
    read_files(names, positions[:-1], positions[1:], open_file, out)
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
