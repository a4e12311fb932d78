"""The table of formats, and finding the one that a path is of.

A further format is one package beside the others and one line in `WRITTEN` or `READ_ONLY`, or an
entry point ``dsprep.formats`` of another distribution, whose value is ``module:Class``. Nothing is
imported until it is asked for, and entry points are only read where no format here fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from dsprep.core.schema import Schema
from dsprep.errors import FormatError, UsageError
from dsprep.formats import foreign
from dsprep.formats.base import Format, WritableFormat
from dsprep.layout.model import Records
from dsprep.reading.records import Frame, Recipe
from dsprep.storage.paths import Candidate, scan

WRITTEN = {
    "hdf5": "dsprep.formats.hdf5:Hdf5",
    "lmdb": "dsprep.formats.lmdb:Lmdb",
    "tfrecord": "dsprep.formats.tfrecord:TFRecord",
    "zarr": "dsprep.formats.zarr:Zarr",
}
"""The formats that are read and written."""

READ_ONLY: dict[str, str] = {
    "adios": "dsprep.formats.adios:Adios",
    "numpy": "dsprep.formats.npy:Numpy",
    "netcdf": "dsprep.formats.netcdf:NetCdf",
    "images": "dsprep.formats.images:Images",
    "webdataset": "dsprep.formats.webdataset:WebDataset",
    "parquet": "dsprep.formats.parquet:Parquet",
}
"""The formats that are only read."""

FORMATS = {**WRITTEN, **READ_ONLY}
"""All formats, in the order in which a file is tried."""

DEFAULT = "hdf5"
"""The format of outputs in groups, if nothing says which."""


FRAMES = {
    "lmdb": "dsprep.formats.lmdb.overflow:Frame",
    "tfrecord": "dsprep.formats.tfrecord.framing:Frame",
}
"""The makers of frames of records that a layout may name: ``module:attribute``."""

RECIPES = {
    "values": "dsprep.formats.lmdb.fields:Recipe",
    "datum": "dsprep.formats.lmdb.fields:Recipe",
    "example": "dsprep.formats.tfrecord.fields:example",
}
"""The makers of recipes, which take records apart."""


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


def _maker(json: Mapping[str, Any], known: Mapping[str, str], kind: str) -> Any:
    name = json.get("name")
    if not isinstance(name, str) or name not in known:
        raise FormatError(
            f"the sidecar names a {kind} that does not exist",
            expected="one of " + ", ".join(known),
            found=repr(name)[:80],
        )
    return _attribute(known[name])


@cache
def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _with_installed() -> Iterator[str]:
    """Yield the names of the formats here, then those of formats that are installed besides."""
    known = [*FORMATS]
    yield from known
    _add_installed()
    yield from [name for name in FORMATS if name not in known]


@cache
def _add_installed() -> None:
    """Add the formats that other distributions declare."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="dsprep.formats"):
        FORMATS.setdefault(entry.name, entry.value)


@cache
def load(name: str) -> Format:
    """Return the format called `name`.

    Raises
    ------
    UsageError
        If there is no such format.
    """
    if name not in FORMATS:
        _add_installed()
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
    for name in _with_installed():
        if suffix == f".{name}" or suffix in load(name).suffixes:
            return load(name)
    return load(word)


def writable(name: str) -> WritableFormat:
    """Return the format called `name`, which is to be written.

    Raises
    ------
    UsageError
        If there is no such format, or it is only read.
    """
    format = load(name)
    if not isinstance(format, WritableFormat):
        raise UsageError(
            f"dsprep reads {name} and does not write it", expected="one of " + ", ".join(WRITTEN)
        )
    return format


def of_target(path: Path, to: str | None) -> WritableFormat | None:
    """Return the format in which an output is to be written; None if nothing says which.

    Raises
    ------
    UsageError
        If `to` is not a format, or the suffix of the output is that of another one.
    """
    named_format = by_suffix(path)
    suffixed = None if named_format is None else writable(named_format.name)
    if to is None:
        return suffixed
    chosen = writable(named(to).name)
    if suffixed is not None and suffixed is not chosen:
        raise UsageError(
            f"--to {to} and the name of the output contradict each other",
            where=path,
            expected=f"a name that ends in {chosen.suffixes[0]}, or without a suffix of a format",
            found=f"the suffix of {suffixed.name}",
        )
    return chosen


def unnamed(target: Path) -> UsageError:
    """Return the error for an output whose name does not say in which format it is written."""
    return UsageError(
        f"the name {target.name} does not give the format",
        expected="a suffix such as " + ", ".join(load(n).suffixes[0] for n in WRITTEN),
        fix="or name it with --to",
    )


def recognise(path: Path) -> Format:
    """Return the format that `path` is of, judged by its contents.

    Raises
    ------
    FormatError
        If it is of none.
    OSError
        If it cannot be read.
    """
    with closing(Candidate(path)) as candidate:
        if not candidate.head and not candidate.is_file:
            next(scan(path), None)  # an error says why a directory cannot be read
        for name in _with_installed():
            if load(name).recognises(candidate):
                return load(name)
    raise foreign.refused(path, tuple(FORMATS))


def by_suffix(path: Path) -> Format | None:
    """Return the format that the name `path` ends in, or None."""
    for name in _with_installed() if path.suffix else FORMATS:
        if path.name.lower().endswith(load(name).suffixes):
            return load(name)
    return None
