"""Folders of images, which are never decoded: a sample is a file, or the files of one key.

Files that `--field` names by patterns are fields of one sample where what the patterns' stars stand
for is equal. Otherwise a sample is an image, which its folder or a table may label.

`folder`
    The files of a folder, and in which ways they can be read.
`patterns`
    Which files are fields of one sample.
`table`
    Tables of labels.
`source`
    A folder opened for reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from dsprep.core.schema import Schema
from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions, check_options
from dsprep.storage.paths import Candidate


class Images(Format):
    """The format; see `base.Format`."""

    name = "images"
    suffixes = ()
    open_options = frozenset({"fields", "follow_external", "labels", "nulls"})
    key = "name"
    named_only = True

    @override
    def recognises(self, candidate: Candidate) -> bool:
        from dsprep.formats.images.recognise import is_image_folder

        return candidate.is_directory and is_image_folder(candidate.path)

    def facts(self, path: Path) -> Mapping[str, Any]:
        """Return digests of the tables."""
        from dsprep.formats.images.folder import digests

        return digests(path)

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.images.source import open_images

        check_options(options, self.open_options, self.name)
        return open_images(path, options)
