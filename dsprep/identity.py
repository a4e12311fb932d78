"""Whether a file is still the one that a sidecar was written for, at the cost of a few reads.

Kept are the size, the time stamp and inode, what the format tells about its state (LMDB's
transaction and root, HDF5's end of file, Zarr's metadata), and a digest of sixteen blocks spread
over the data.

A file whose time stamp differs was written to if it has the same inode; with another inode it is
a copy, and the facts and the sampled blocks decide. So a copy that was altered in its few other
bytes, keeping its size, is not noticed here: that takes ``--check full``.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dsprep import formats
from dsprep.errors import DsprepError
from dsprep.sidecar import Identity
from dsprep.storage import data_files, pread_most

BLOCKS = 16
BLOCK_NBYTES = 4096


def take(path: Path, format: str) -> Identity:
    """Return the identity of `path`.

    Raises
    ------
    OSError, FormatError
        If it is gone or damaged.
    """
    files, nbytes, mtime = _stat(path)
    facts = formats.load(format).identity(path)
    return Identity(nbytes, mtime, path.stat().st_ino, len(files), facts, sample(files))


def differences(path: Path, format: str, known: Identity) -> list[str]:
    """Return how `path` differs from what was recorded, one clause each; empty when it does not."""
    try:
        files, nbytes, mtime = _stat(path)
    except FileNotFoundError:
        return ["it is missing"]
    except OSError as error:
        return [f"it cannot be looked at: {error.strerror}"]
    found = []
    if nbytes != known.nbytes:
        found.append(f"it has {nbytes:,} bytes, expected {known.nbytes:,}")
    if len(files) != known.files:
        found.append(f"it has {len(files):,} files, expected {known.files:,}")
    written = known.mtime_ns is not None and mtime != known.mtime_ns
    if written and known.inode is not None and path.stat().st_ino == known.inode:
        found.append("it was written to (its time stamp changed)")
    if found:
        return found
    try:
        facts = formats.load(format).identity(path)
        for key, value in known.facts.items():
            if facts.get(key) != value:
                found.append(f"its {key.replace('_', ' ')} is {facts.get(key)}, expected {value}")
        if not found and known.sampled and sample(files) != known.sampled:
            found.append("its content changed (sampled blocks differ)")
    except (DsprepError, OSError) as error:
        found.append(f"it cannot be read: {error}")
    return found


def _stat(path: Path) -> tuple[list[tuple[Path, int]], int, int]:
    """Return the data files with their sizes, the bytes of all, and the newest time stamp."""
    files, total, newest = [], 0, 0
    for file in data_files(path):
        stat = file.stat()
        files.append((file, stat.st_size))
        total += stat.st_size
        newest = max(newest, stat.st_mtime_ns)
    return files, total, newest


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


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
