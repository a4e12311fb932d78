"""A finished store in one ZIP file, members as they are, so that they can be read in place.

The members come sorted by name and with a fixed date: the same store gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

from dsprep.core.storage import sync, sync_directory

BLOCK = 4 << 20


def folder(path: Path) -> Path:
    """Return the directory, beside the ZIP file `path`, in which its store is built."""
    return path.with_name(path.name + ".parts")


def is_zip(path: Path) -> bool:
    """Whether an output of this name is a ZIP file; ``out.zarr.zip.part`` is one in the making."""
    return ".zip" in path.suffixes


def pack(root: Path, path: Path, durable: bool) -> None:
    """Make the directory `root` the ZIP file `path`. Can be repeated if interrupted."""
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target:
            for member in members(root):
                add(target, root, member)
        if durable:
            file.flush()
            sync(file.fileno())
    if durable:
        sync_directory(path.parent)


def members(root: Path) -> list[str]:
    """Return the names of all files under `root`, sorted, but for directories of dsprep's own."""
    found = []
    for where, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".dsprep")]
        inside = os.path.relpath(where, root)
        found += [f if inside == "." else f"{inside}/{f}" for f in files]
    return sorted(found)


def add(target: zipfile.ZipFile, root: Path, member: str) -> None:
    """Add one file."""
    info = zipfile.ZipInfo(member, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o100644 << 16
    source = root / member
    info.file_size = source.stat().st_size
    with source.open("rb") as file, target.open(info, "w") as out:
        shutil.copyfileobj(file, out, BLOCK)
