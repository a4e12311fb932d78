"""Recognises a folder of images by a look at some of its files."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from dsprep import formats
from dsprep.errors import DsprepError
from dsprep.formats.samples import is_file
from dsprep.storage.paths import Candidate, as_path, scan

SUFFIXES = frozenset(
    b"avif bmp dib exr gif heic heif j2k jfif jp2 jpe jpeg jpf jpg jpx jxl pbm pgm png pnm ppm qoi "
    b"tif tiff webp".split()
)
"""Endings of the names of images, in small letters: files with others are not samples."""

LOOKED = 16
"""Files of other names that are looked into."""
SEEN = 4096
"""Entries that are looked through."""


def has_suffix(name: bytes) -> bool:
    """Return whether the name of a file ends as those of images do."""
    stem, dot, suffix = name.rpartition(b".")
    return bool(dot and stem) and suffix.lower() in SUFFIXES


def is_image_folder(path: Path) -> bool:
    """Return whether files in a directory or its first folders are images, and none a dataset.

    Names decide, but of some files of other names the first bytes are looked at.
    """
    images, names = _first_files(path)
    others = [as_path(name) for name in names] if images else []
    if not images or any(formats.by_suffix(path) for path in others):
        return False
    return not any(_is_dataset(path) for path in others[:LOOKED])


def _first_files(path: Path) -> tuple[list[str], list[str]]:
    """Return images and other files by their names, of the first entries below a directory."""
    images, others = list[str](), list[str]()
    waiting, count = [path], 0
    while waiting and count < SEEN:
        folders, directory = [], waiting.pop()
        for entry in scan(directory):
            count += 1
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(directory / entry.name)
            elif is_file(entry):
                kind = images if has_suffix(os.fsencode(entry.name)) else others
                kind.append(entry.path)
            if count >= SEEN:
                break
        waiting += sorted(folders, reverse=True)
    return images, others


def _is_dataset(path: Path) -> bool:
    """Return whether a file is a dataset of another format, whatever its name."""
    try:
        with closing(Candidate(path)) as candidate:
            return any(formats.load(name).recognises(candidate) for name in formats.FORMATS)
    except (DsprepError, OSError):
        return False
