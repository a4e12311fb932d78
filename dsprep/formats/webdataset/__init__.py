"""WebDataset: tar archives whose members are the fields of samples, read in place.

`headers` knows tar archives, `samples` which members are a sample, `source` reads them. Neither
``tarfile`` nor the package ``webdataset`` is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from dsprep.core.schema import Schema
from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions
from dsprep.storage.paths import Candidate


class WebDataset(Format):
    """WebDataset, one archive of it; see `dsprep.formats.webdataset`."""

    name: ClassVar[str] = "webdataset"
    suffixes: ClassVar[tuple[str, ...]] = (".tar",)
    open_options: ClassVar[frozenset[str]] = frozenset({"fields", "keys_as"})

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether the file begins with the header of a member, with its checksum."""
        from dsprep.formats.webdataset.headers import BLOCK, is_header

        return is_header(candidate.head[:BLOCK])

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.webdataset.source import open_archive

        return open_archive(path, options)
