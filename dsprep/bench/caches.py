"""The page cache: dropping files from it, and asking what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dsprep.reader.caching import resident
from dsprep.reading.files import File
from dsprep.storage import data_files, preadv_once


def files_of(path: Path) -> list[Path]:
    """Return the files with the data of a dataset, in order."""
    return sorted(p for p in data_files(path) if p.is_file())


def drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache, as ``posix_fadvise(2)`` can without being root.

    What is not yet on the disk is written first. Pages that a process has mapped stay.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def held(files: Iterable[Path]) -> float | None:
    """Return the share of the bytes of files that is in the page cache; None if it is not told."""
    found = total = 0.0
    for path in files:
        file = File(path)
        if not file.nbytes:
            continue
        share = resident(file, 0, file.nbytes)
        if share is None:
            return None
        found, total = found + share * file.nbytes, total + file.nbytes
    return found / total if total else 0.0


def fill(files: Iterable[Path]) -> None:
    """Read files once, so that the page cache holds them."""
    buffer = memoryview(bytearray(8 << 20))
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = 0
            while got := preadv_once(fd, buffer, offset):
                offset += got
        finally:
            os.close(fd)
