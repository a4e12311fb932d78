"""Whether a directory is a folder of images, by a look at some of its files."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from dsprep import formats
from dsprep.errors import DsprepError
from dsprep.formats.samples import is_file
from dsprep.storage.paths import Candidate, read_head, scan

SUFFIXES = frozenset(
    b"avif bmp dib exr gif heic heif j2k jfif jp2 jpe jpeg jpf jpg jpx jxl pbm pgm png pnm ppm qoi "
    b"tif tiff webp".split()
)
"""Endings of the names of images, in small letters: files with others are not samples."""

_MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",  # JPEG
    b"GIF87a",
    b"GIF89a",
    b"BM",
    b"II*\0",  # TIFF
    b"MM\0*",
    b"II+\0",  # BigTIFF
    b"MM\0+",
    b"\0\0\0\x0cjP  \r\n\x87\n",  # JPEG 2000
    b"\xff\x4f\xff\x51",
    b"\0\0\0\x0cJXL \r\n\x87\n",
    b"\xff\x0a",  # JPEG XL
    b"\x76\x2f\x31\x01",  # OpenEXR
    b"qoif",
)
"""First bytes of images; besides, WebP, the ISO family and Netpbm: see `is_image`."""

_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")

LOOKED = 16
"""Files of which the first bytes are read."""
SEEN = 4096
"""Entries that are looked through."""


def is_image(head: bytes) -> bool:
    """Whether a file is an image, judged by its first 16 bytes.

    As in the specifications: PNG (W3C), JFIF (ECMA TR/98), GIF89a, TIFF 6.0, BMP, WebP (RFC 9649),
    HEIF and AVIF (ISO/IEC 23000-22), JPEG 2000 and XL (ISO/IEC 15444-1, 18181-2), Netpbm.
    """
    if head.startswith(_MAGIC):
        return True
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return True
    if head[4:8] == b"ftyp" and head[8:12] in _BRANDS:
        return True
    return head[:1] == b"P" and head[1:2] in b"1234567" and head[2:3] in b" \t\r\n#"


def has_suffix(name: bytes) -> bool:
    """Whether the name of a file ends as those of images do."""
    stem, dot, suffix = name.rpartition(b".")
    return bool(dot and stem) and suffix.lower() in SUFFIXES


def is_image_folder(path: Path) -> bool:
    """Whether files in a directory, or in the first of its folders, are images, and none a dataset.

    Names decide where they are those of other formats; otherwise the first bytes of some files.
    """
    images, others = _first_files(path)
    if not images or any(formats.by_suffix(path) for path in others):
        return False
    heads = [read_head(path, 16) for path in images[:: max(1, len(images) // LOOKED)][:LOOKED]]
    filled = [head for head in heads if head]
    if not filled or 2 * sum(map(is_image, filled)) < len(filled):
        return False
    return not any(_is_dataset(path) for path in others[:LOOKED])


def _first_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return images and other files by their names, of the first entries below a directory."""
    images: list[Path] = []
    others: list[Path] = []
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
                kind.append(directory / entry.name)
            if count >= SEEN:
                break
        waiting += sorted(folders, reverse=True)
    return images, others


def _is_dataset(path: Path) -> bool:
    """Whether a file is a dataset of another format, whatever its name."""
    try:
        with closing(Candidate(path)) as candidate:
            return any(formats.load(name).recognises(candidate) for name in formats.FORMATS)
    except (DsprepError, OSError):
        return False
