"""Folders of images for tests, each image with other bytes."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
from support import reading

from dsprep import provenance
from dsprep.formats.options import OpenOptions
from dsprep.source.dataset import open_dataset


def png(seed: int, side: int = 2) -> bytes:
    """A valid PNG of gray noise, by the specification alone."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + crc

    rows = np.random.default_rng(seed).integers(0, 256, (side, side + 1), dtype=np.uint8)
    rows[:, 0] = 0  # the filter of each row
    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes()))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def fill(root: Path, *names: str | bytes) -> Path:
    """Make images by these paths below `root`, of which each has other bytes."""
    root.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        path = Path(os.fsdecode(os.path.join(os.fsencode(root), os.fsencode(name))))  # noqa: PTH118
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i, 2 + i % 5))
    return root


FOLDERS = OpenOptions(labels="folders")


def locate(root: Path) -> None:
    """Write the sidecar of a folder of classes."""
    provenance(root, options=FOLDERS)


def read(path: Path, *fields: str, **options) -> tuple[list[dict], tuple[str, ...]]:
    with open_dataset(path, reading(*fields, **options), through="library") as source:
        return list(source), source.notes
