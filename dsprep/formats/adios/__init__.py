"""ADIOS2's BP datasets: read by the package ``adios2`` (the extra ``adios2``).

Values are in blocks of steps and writers, perhaps compressed, so that samples have no offsets.

`server`
    The program that calls ADIOS2.
`source`
    A dataset opened for reading.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from dsprep.core.schema import Schema
from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions, check_options
from dsprep.storage.paths import Candidate, check_local

MAGIC = b"ADIOS-BP v"
FOOTER = 64
"""Bytes at the end of a file of BP3 among which its version is."""


class Adios(Format):
    """The format; see `base.Format`."""

    name = "adios"
    suffixes = (".bp",)
    open_options = frozenset({"fields", "sample_axis"})

    @override
    def recognises(self, candidate: Candidate) -> bool:
        if candidate.is_directory:
            return Candidate(candidate.path / "md.idx").head.startswith(MAGIC)
        if not candidate.is_file:
            return False
        file = candidate.file
        return MAGIC in file.pread(FOOTER, max(0, file.nbytes - FOOTER))

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.adios.source import open_adios

        check_options(options, self.open_options, self.name)
        check_local(path)
        return open_adios(path, options)
