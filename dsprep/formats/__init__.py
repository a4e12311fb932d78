"""The table of formats, and finding the one that a path is of.

A fifth format is one package beside the others and one line in `FORMATS`. Nothing is imported
until it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dsprep.core.schema import Schema
from dsprep.core.storage import pread_most
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Format
from dsprep.layout.model import Records
from dsprep.reading.records import Frame, Recipe

FORMATS = {
    "hdf5": "dsprep.formats.hdf5:Hdf5",
    "lmdb": "dsprep.formats.lmdb:Lmdb",
    "tfrecord": "dsprep.formats.tfrecord:TFRecord",
    "zarr": "dsprep.formats.zarr:Zarr",
}

DEFAULT = "hdf5"
"""The format of outputs in groups, if nothing says which."""


@dataclass(frozen=True)
class Decoder:
    """A frame or a recipe of records that a layout may name.

    Attributes
    ----------
    target
        ``module:attribute`` of what makes it: of its parameters; a recipe, of the schema too.
    words
        What it does, for a person.
    """

    target: str
    words: str


FRAMES = {
    "lmdb": Decoder(
        "dsprep.formats.lmdb.overflow:Frame",
        "proven by the header of the overflow page before it",
    ),
    "tfrecord": Decoder(
        "dsprep.formats.tfrecord.framing:Frame", "proven by its length and CRC before it"
    ),
}
RECIPES = {
    "values": Decoder(
        "dsprep.formats.lmdb.layout:values", "the lengths that the value begins with"
    ),
    "datum": Decoder("dsprep.formats.lmdb.layout:datum", "what Caffe's Datum message says"),
    "example": Decoder("dsprep.formats.tfrecord.recipe:example", "what tf.train.Example says"),
}


def decoders(records: Records, schema: Schema) -> tuple[Frame | None, Recipe | None]:
    """Return what proves records, and what takes them apart; see `dsprep.reading.records`.

    Raises
    ------
    FormatError
        If the layout names a frame or a recipe that does not exist, or its parameters are wrong.
    """
    frame, recipe = None, None
    if records.frame is not None:
        frame = _maker(records.frame, FRAMES, "frame")(records.frame)
    if records.recipe is not None:
        recipe = _maker(records.recipe, RECIPES, "recipe")(records.recipe, schema)
    return frame, recipe


def _maker(json: Mapping[str, Any], known: Mapping[str, Decoder], what: str) -> Any:
    name = json.get("name")
    if not isinstance(name, str) or name not in known:
        raise FormatError(
            f"the sidecar names a {what} that does not exist",
            expected="one of " + ", ".join(known),
            found=repr(name)[:80],
        )
    return _attribute(known[name].target)


@cache
def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


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
    made: Format = _attribute(FORMATS[name])()
    return made


def named(word: str) -> Format:
    """Return the format that a user means: its name or a suffix, whatever the case.

    Raises
    ------
    UsageError
        If it is of none.
    """
    suffix = f".{word.lower().removeprefix('.')}"
    for name in FORMATS:
        if suffix == f".{name}" or suffix in load(name).suffixes:
            return load(name)
    return load(word)


def of_target(path: Path, to: str | None) -> Format | None:
    """Return the format in which an output is to be written; None if nothing says which.

    Raises
    ------
    UsageError
        If `to` is not a format, or the suffix of the output is that of another one.
    """
    suffixed = by_suffix(path)
    if to is None:
        return suffixed
    chosen = named(to)
    if suffixed is not None and suffixed is not chosen:
        raise UsageError(
            f"--to {to} and the name of the output contradict each other",
            where=path,
            expected=f"a name that ends in {chosen.suffixes[0]}, or without a suffix of a format",
            found=f"the suffix of {suffixed.name}",
        )
    return chosen


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
    known = foreign(path)
    if known is not None:
        raise known
    empty = path.is_file() and path.stat().st_size == 0
    raise FormatError(
        "the file is empty" if empty else "this is not a format that dsprep reads",
        where=path,
        expected=", ".join(FORMATS),
    )


_FOREIGN = {
    b"version https://git-lfs.github.com/spec/": (
        "this is a Git LFS pointer, which stands for the file",
        "fetch the file itself: git lfs pull",
    ),
    b"CDF": (
        "this is netCDF-3, which is not HDF5",
        "make netCDF-4 of it, which is: nccopy -k nc4 IN OUT",
    ),
    b"MATLAB 5.0 MAT-file": (
        "this is a MATLAB file of version 5, which is not HDF5",
        "save it in MATLAB with -v7.3, or load it with scipy.io.loadmat and write it with h5py",
    ),
    b"!<<PDB:": (
        "this is a Portable Database (PDB, as Silo writes it), which is not HDF5",
        "write it with HDF5 beneath (in Silo: the driver DB_HDF5)",
    ),
    b"HEADER    ": (
        "this is text in the Protein Data Bank's format",
        "read it with a parser such as Biopython and write its arrays with h5py",
    ),
    b"\x0e\x03\x13\x01": ("this is HDF4, which is not HDF5", "convert it: h4toh5 IN OUT"),
    b"\x93NUMPY": (
        "this is an array file of NumPy",
        "write it with h5py: h5py.File('x.h5', 'w')['x'] = numpy.load(FILE)",
    ),
}
"""First bytes of files that people take for datasets: what they are, and the way out."""


def foreign(path: Path) -> FormatError | None:
    """Return the error for a file of a kind that is known but not read, or None."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = pread_most(file.fileno(), 64, 0)
    for start, (what, fix) in _FOREIGN.items():
        if head.startswith(start):
            return FormatError(what, where=path, expected=", ".join(FORMATS), fix=fix)
    return None


def by_suffix(path: Path) -> Format | None:
    """Return the format that the name `path` ends in, or None."""
    for name in FORMATS:
        if path.name.lower().endswith(load(name).suffixes):
            return load(name)
    return None
