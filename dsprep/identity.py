"""Whether a file is still the one that a sidecar was written for, at the cost of a few reads.

Kept are the size, the time stamp and inode, what the format tells about its state (LMDB's
transaction and root, HDF5's end of file, Zarr's metadata), and a digest of sixteen blocks spread
over the data.

Another time stamp or inode alone decides nothing: files are touched and copied. Then the facts and
the sampled blocks decide, and of a file that has the same inode `located` compares checksums too,
where the sidecar has some. So a file of which a few other bytes were changed, keeping its size, is
not noticed here: that takes ``--check full``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from dsprep import formats
from dsprep.digests import read_crc32c
from dsprep.errors import DsprepError
from dsprep.marks import Mark
from dsprep.sidecar import Identity
from dsprep.storage import pread_most

BLOCKS = 16
BLOCK_NBYTES = 4096

WRITTEN = "it was written to (its time stamp changed)"


def take(path: Path, format: str) -> Identity:
    """Return the identity of `path`.

    Raises
    ------
    OSError, FormatError
        If it is gone or damaged.
    """
    mark, files = Mark.with_files(path)
    inode, nbytes, mtime, _ = mark.status
    facts = formats.load(format).identity(path)
    return Identity(nbytes, mtime, inode, mark.files, facts, sample(files))


class Look(NamedTuple):
    """What a look at a file has found.

    Attributes
    ----------
    differences
        How it differs from what was recorded, one clause each.
    written
        Whether the same file has another time stamp, which is no difference by itself.
    mark
        What it is now; None: missing.
    """

    differences: list[str]
    written: bool
    mark: Mark | None


def look(path: Path, format: str, known: Identity) -> Look:
    """Compare `path` with what was recorded.

    Raises
    ------
    OSError
        If it cannot be looked at, unless it is missing.
    """
    try:
        mark, files = Mark.with_files(path)
    except FileNotFoundError:
        return Look(["it is missing"], False, None)
    found = []
    inode, nbytes, mtime, _ = mark.status
    if nbytes != known.nbytes:
        found.append(f"it has {nbytes:,} bytes, expected {known.nbytes:,}")
    if len(files) != known.files:
        found.append(f"it has {len(files):,} files, expected {known.files:,}")
    written = known.mtime_ns is not None and mtime != known.mtime_ns
    written = written and known.inode is not None and inode == known.inode
    if found:
        return Look([*found, *([WRITTEN] if written else [])], written, mark)
    try:
        facts = formats.load(format).identity(path)
        for key, value in known.facts.items():
            if facts.get(key) != value:
                found.append(f"its {key.replace('_', ' ')} is {facts.get(key)}, expected {value}")
        if not found and known.sampled and sample(files) != known.sampled:
            found.append("its content changed (sampled blocks differ)")
    except DsprepError as error:
        found.append(f"it cannot be read: {error}")
    return Look([*found, *([WRITTEN] if found and written else [])], written, mark)


def sample(files: list[tuple[Path, int]]) -> str:
    """Return the digest of blocks spread over files: the first, the last, and those between."""
    files = sorted(files)
    total = sum(size for _, size in files)
    state = hashlib.blake2b(digest_size=8)
    last = max(0, total - BLOCK_NBYTES)
    places = sorted({last * k // (BLOCKS - 1) for k in range(BLOCKS)})
    number = begin = 0
    opened = (-1, -1)
    try:
        for place in places:
            while number < len(files) - 1 and place >= begin + files[number][1]:
                begin += files[number][1]
                number += 1
            if not files:
                break
            if opened[0] != number:
                _close(opened[1])
                opened = number, os.open(files[number][0], os.O_RDONLY | os.O_CLOEXEC)
            state.update(pread_most(opened[1], BLOCK_NBYTES, place - begin))
    finally:
        _close(opened[1])
    return state.hexdigest()


def block_crc32c(path: Path, begin: int, end: int) -> int:
    """Return the CRC-32C of some bytes of a file, or of the data files of a directory.

    Those are taken one behind another, in the order of their paths.

    Raises
    ------
    FormatError, OSError
        If they end first, or cannot be read.
    """
    crc, at = 0, 0
    for file, nbytes in sorted(Mark.with_files(path)[1]):
        low, high = max(begin, at), min(end, at + nbytes)
        if low < high:
            with file.open("rb", buffering=0) as opened:
                crc = read_crc32c(opened.fileno(), low - at, high - at, file, crc)
        at += nbytes
    return crc


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
