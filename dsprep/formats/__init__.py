"""The table of formats, and finding the one that a path is of.

A fifth format is one package beside the others and one line in `FORMATS`. Nothing is imported
until it is asked for.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path

from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Format

FORMATS = {
    "hdf5": "dsprep.formats.hdf5:Hdf5",
    "lmdb": "dsprep.formats.lmdb:Lmdb",
    "tfrecord": "dsprep.formats.tfrecord:TFRecord",
    "zarr": "dsprep.formats.zarr:Zarr",
}


@cache
def load(name: str) -> Format:
    """Return the format called `name`.

    Raises
    ------
    UsageError
        If there is no such format.
    """
    if name not in FORMATS:
        raise UsageError(f"{name!r} is not a format", expected="one of " + ", ".join(FORMATS))
    module, _, attribute = FORMATS[name].partition(":")
    made: Format = getattr(import_module(module), attribute)()
    return made


def recognise(path: Path) -> Format:
    """Return the format that `path` is of, judged by its contents.

    Raises
    ------
    FormatError
        If it is of none.
    OSError
        If it cannot be read.
    """
    os.close(os.open(path, os.O_RDONLY))  # whoever may not read it is told so
    for name in FORMATS:
        if load(name).recognises(path):
            return load(name)
    empty = path.is_file() and path.stat().st_size == 0
    raise FormatError(
        "the file is empty" if empty else "this is none of the formats that dsprep reads",
        where=path,
        expected=", ".join(FORMATS),
    )


def by_suffix(path: Path) -> Format | None:
    """Return the format that the name `path` ends in, or None."""
    for name in FORMATS:
        if path.name.lower().endswith(load(name).suffixes):
            return load(name)
    return None
