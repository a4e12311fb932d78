"""ADIOS2's BP5 and BP4, read without its library: a directory ``x.bp`` of metadata and data.

`metadata`
    What the metadata say: variables, and the byte range of each of their blocks.
`bp5`, `bp4`
    Reading them.
`columns`
    Where the samples of one variable are.
`fields`
    Which variables are fields, and what a sample is.

What went through operators (compressors), big-endian and column-major arrays, and structs are
refused by name.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from typing_extensions import override

from dsprep.core.packing import digest
from dsprep.core.schema import Schema
from dsprep.errors import FormatError
from dsprep.formats.base import FileIdentity, Format, Source
from dsprep.formats.options import OpenOptions, check_options
from dsprep.storage.paths import Candidate, open_file

INDEX = "md.idx"
MAGIC = b"ADIOS-BP v"

FACTS = 4096
"""Bytes of the index at its beginning and at its end of which `Adios.identity` takes a digest."""

FOOTER = 64
"""Bytes at the end of a file of BP3 or older among which its version is."""


class Adios(Format):
    """The format; see `base.Format`."""

    name = "adios"
    suffixes = (".bp",)
    open_options = frozenset({"fields", "follow_external", "sample_axis"})

    @override
    def recognises(self, candidate: Candidate) -> bool:
        # Also of BP3, which `open` refuses with the way out.
        if candidate.is_directory:
            return Candidate(candidate.path / INDEX).head.startswith(MAGIC)
        if not candidate.is_file:
            return False
        file = candidate.file
        return MAGIC in file.pread(FOOTER, max(0, file.nbytes - FOOTER))

    def identity(self, path: Path) -> FileIdentity:
        """Return the size of the index, and a digest of its beginning and its end.

        Each step that is appended makes it longer.
        """
        if path.is_file():
            return FileIdentity()
        index = path / INDEX
        nbytes = index.stat().st_size
        ends = _read(index, FACTS, 0) + _read(index, FACTS, max(0, nbytes - FACTS))
        return FileIdentity({"index": [nbytes, digest(ends)]})

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.adios.source import AdiosSource

        check_options(options, self.open_options, self.name)
        if path.is_file():
            raise FormatError(
                "this is BP3 or older, in one file",
                where=path,
                expected="BP4 or BP5, in a directory",
                fix="rewrite it: adios2_reorganize IN OUT.bp BPFile BP5",
            )
        return AdiosSource(path, options)


def _read(path: Path, nbytes: int, offset: int) -> bytes:
    with closing(open_file(path)) as file:
        return file.pread(nbytes, offset)
