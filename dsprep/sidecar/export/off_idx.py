"""Offsets and sizes of samples as the DLIO benchmark keeps them, for its workloads of Megatron.

Beside ``FILE`` are ``FILE.off.idx`` and ``FILE.sz.idx``: for each sample of the file a 64-bit
integer, little-endian, the offset of its bytes in one and their number in the other. DLIO's reader
of indexed binary files seeks and reads just that, so they are those of the sample alone: the value
in an LMDB file, the payload of a TFRecord record, the row of an array.

A sample has to be one byte range. In HDF5 and Zarr that is so if there is one field, not compressed
and cut into chunks along its first axis only.

The index of a store that is a directory (``train.lmdb``, with ``data.mdb`` in it) is beside that
directory (``train.lmdb.off.idx``): a file inside would be taken for a part of the store. The
offsets are those in the only data file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from dsprep.core.schema import Ints, Schema
from dsprep.errors import FormatError, UsageError
from dsprep.layout.locate import locate
from dsprep.layout.model import FileLayout
from dsprep.sidecar.export import SLICE, Output, check_inside
from dsprep.sidecar.sidecar import Sidecar

OFFSETS, SIZES = ".off.idx", ".sz.idx"


def outputs(sidecar: Sidecar, notes: list[str]) -> list[Output]:
    """Return both indexes for each file; `UsageError` if samples are not one byte range each."""
    indexes = []
    for number, entry in enumerate(sidecar.content.files):
        layout, path = sidecar.layout(number), sidecar.dataset / entry.path
        name = os.path.relpath(path, sidecar.dataset.parent)
        data = path / check(layout, sidecar.schema, path)
        indexes.append(
            Output(name + OFFSETS, partial(_numbers, layout, sidecar.schema, data, "at"))
        )
        indexes.append(
            Output(name + SIZES, partial(_numbers, layout, sidecar.schema, data, "size"))
        )
    return indexes


def check(layout: FileLayout, schema: Schema, path: Path) -> str:
    """Return the file below `path` that holds the samples; `UsageError` if not one range each."""
    if not layout.count:
        return ""
    if layout.files:
        raise UsageError(
            "samples are not in one file, but in files of their own",
            where=path,
            fix="repack the dataset, or convert it to tfrecord or lmdb",
        )
    if layout.records is not None and not layout.columns and not layout.given:
        return layout.records.blocks.path
    names = schema.names
    if len(names) != 1 or names[0] not in layout.columns:
        reason = "each is an array of its own" if len(names) > 1 else "it has no offset in the file"
        raise UsageError(
            f"samples are not one range of bytes: fields {', '.join(names)}: {reason}",
            where=path,
            fix="convert the dataset to tfrecord or lmdb",
        )
    grid = layout.columns[names[0]].grid
    if grid is None or not grid.plain or grid.several:
        reason = "it has no bytes" if grid is None else "it is compressed, or cut into chunks"
        raise UsageError(
            f"samples of field {names[0]} are not one range of bytes each: {reason}",
            where=path,
            fix="convert the dataset to tfrecord or lmdb, without compression",
        )
    return grid.blocks.path


def _numbers(
    layout: FileLayout, schema: Schema, path: Path, kind: Literal["at", "size"]
) -> Iterator[bytes]:
    if layout.count > (path.stat().st_size if layout.count else 0):
        raise FormatError("the file is too small for its samples", where=path, found=layout.count)
    for start in range(0, layout.count, SLICE):
        indices = np.arange(start, min(start + SLICE, layout.count), dtype=np.int64)
        offsets, lengths = _extents_of_samples(layout, schema, indices, path)
        check_inside(offsets, lengths, path, f"sample {start} and after")
        yield (offsets if kind == "at" else lengths).astype("<i8").tobytes()


def _extents_of_samples(
    layout: FileLayout, schema: Schema, indices: Ints, path: Path
) -> tuple[Ints, Ints]:
    """Return offset and size of each sample; a sample without bytes is at offset 0."""
    records = layout.records
    if records is not None:
        return records.extents(indices, path)
    name = schema.names[0]
    extents = locate(layout, name, indices)
    twice = np.flatnonzero(np.diff(extents.request) == 0)
    if len(twice) or (extents.offset < 0).any():
        at = twice if len(twice) else np.flatnonzero(extents.offset < 0)
        sample = int(indices[extents.request[at[0]]])
        reason = "it spreads over several chunks" if len(twice) else "it is not stored"
        raise UsageError(
            f"sample {sample} of field {name} is not one range of bytes: {reason}",
            where=path,
            fix="convert the dataset to tfrecord or lmdb",
        )
    offsets, lengths = np.zeros(len(indices), np.int64), np.zeros(len(indices), np.int64)
    offsets[extents.request], lengths[extents.request] = extents.offset, extents.length
    return offsets, lengths
