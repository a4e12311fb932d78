"""Recognises a folder of images by a look at some of its files."""

from __future__ import annotations

import os
from contextlib import closing
from itertools import islice
from pathlib import Path

from dsprep import formats
from dsprep.errors import DsprepError
from dsprep.formats.samples import is_file
from dsprep.storage.paths import Candidate, as_path
from dsprep.storage.trees import data_entries

SUFFIXES = frozenset(
    b"avif bmp dib exr gif heic heif j2k jfif jp2 jpe jpeg jpf jpg jpx jxl pbm pgm png pnm ppm qoi "
    b"tif tiff webp".split()
)
"""Endings of the names of images, in small letters: files with others are not samples."""

LOOKED = 16
"""Files of other names that are looked into."""
SEEN = 4096
"""Files that are looked through."""


def has_suffix(name: bytes) -> bool:
    """Return whether the name of a file ends as those of images do."""
    stem, dot, suffix = name.rpartition(b".")
    return bool(dot and stem) and suffix.lower() in SUFFIXES


def is_image_folder(path: Path) -> bool:
    """Return whether files in a directory or its first folders are images, and none a dataset.

    Names decide, but of some files of other names the first bytes are looked at.
    """
    has_images, others = False, list[Path]()
    for entry in islice(data_entries(path), SEEN):
        if has_suffix(os.fsencode(entry.name)):
            has_images = True
        elif "/." not in entry.path[len(str(path)) :] and is_file(entry):
            others.append(as_path(entry.path))
    if not has_images or any(map(formats.by_suffix, others)):
        return False
    return not any(_is_dataset(path) for path in others[:LOOKED])


def _is_dataset(path: Path) -> bool:
    """Return whether a file is a dataset of another format, whatever its name."""
    try:
        with closing(Candidate(path)) as candidate:
            return any(formats.load(name).recognises(candidate) for name in formats.FORMATS)
    except (DsprepError, OSError):
        return False
