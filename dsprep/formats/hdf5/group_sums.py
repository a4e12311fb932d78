"""The CRC-32C of every group, from pieces that are written in any order."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsprep.core.checksums import CRC32C, read_crc32c
from dsprep.core.schema import Ints

_MISSING = -1


class Segment(NamedTuple):
    """Bytes that were written: their place in the file, their number and their CRC."""

    offset: int
    nbytes: int
    crc: int


@dataclass
class _Open:
    """A group of which some samples are there."""

    samples: int = 0
    segments: list[Segment] = field(default_factory=list)


class Sums:
    """CRCs of ranges in one file, all of whose other bytes are zero.

    Parameters
    ----------
    offsets, lengths
        int64, shape ``(groups,)``: the ranges.
    samples
        int64, shape ``(groups,)``: the samples of each.
    """

    def __init__(self, offsets: Ints, lengths: Ints, samples: Ints) -> None:
        self._offsets, self._lengths, self._samples = offsets, lengths, samples
        self.crcs = np.full(len(offsets), _MISSING, np.int64)
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    def add(self, group: int, samples: int, segments: list[Segment]) -> None:
        """Note that so many samples of a group have been written. Thread-safe."""
        with self._lock:
            found = self._open.setdefault(group, _Open())
            found.samples += samples
            found.segments += segments
            if found.samples < self._samples[group]:
                return
            del self._open[group]
        self.crcs[group] = self._joined(group, found.segments)

    def _joined(self, group: int, segments: list[Segment]) -> int:
        at = int(self._offsets[group])
        parts = [(o - at, n, crc) for o, n, crc in sorted(segments) if n]
        return CRC32C.joined(parts, int(self._lengths[group]))

    def complete(self, path: Path) -> None:
        """Read the groups back that an earlier run wrote in whole or in part."""
        missing = np.flatnonzero(self.crcs == _MISSING)
        if not len(missing):
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            for g in missing.tolist():
                begin = int(self._offsets[g])
                self.crcs[g] = read_crc32c(fd, begin, begin + int(self._lengths[g]), path)
        finally:
            os.close(fd)
