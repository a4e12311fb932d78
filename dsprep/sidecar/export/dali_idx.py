"""NVIDIA DALI's index of a TFRecord file, ``FILE.idx``, as its tool ``tfrecord2idx`` makes it.

A line for each record: the offset of the record and its size, in decimal, with one blank between
them. A record begins with its length and that one's checksum (12 bytes), and ends with a checksum
of the payload (4 bytes): all of them count. DALI takes the indexes as ``index_path``, in the order
of the files in ``path``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from dsprep.errors import UsageError
from dsprep.layout.model import FileLayout
from dsprep.sidecar.export import SLICE, Outputs, check_inside
from dsprep.sidecar.sidecar import Sidecar

SUFFIX = ".idx"
HEADER, FOOTER = 12, 4
"""Bytes of a TFRecord record before and after its payload."""


def outputs(sidecar: Sidecar, notes: list[str]) -> Outputs:
    """Return an index for each file; `UsageError` if the dataset is not of TFRecord files."""
    if sidecar.content.format != "tfrecord":
        raise UsageError(
            "DALI's index is one of TFRecord files",
            where=sidecar.dataset,
            found=sidecar.content.format,
            fix="convert the dataset with --to tfrecord",
        )
    indexes: Outputs = {}
    for number, entry in enumerate(sidecar.content.files):
        path = sidecar.dataset / entry.path
        lines = partial(_lines, sidecar.layout(number), path)
        indexes[os.path.relpath(path, sidecar.dataset.parent) + SUFFIX] = lines
    return indexes


def _lines(layout: FileLayout, path: Path) -> Iterator[bytes]:
    records = layout.records
    if records is None:
        if layout.count:
            raise UsageError("the sidecar does not give the offsets of records", where=path)
        return
    for start in range(0, layout.count, SLICE):
        stop = min(start + SLICE, layout.count)
        offsets, lengths = records.extents(np.arange(start, stop, dtype=np.int64), path)
        check_inside(offsets, lengths + FOOTER, path, f"records {start} to {stop}", HEADER)
        pairs = zip((offsets - HEADER).tolist(), (lengths + HEADER + FOOTER).tolist(), strict=True)
        yield "".join([f"{at} {size}\n" for at, size in pairs]).encode()
