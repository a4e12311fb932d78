"""Whether a dataset already has the form that a strategy needs, so that it is read in place.

Then the benchmark is about the user's own files, and nothing is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsprep.core.schema import Field
from dsprep.formats.base import Format, Source
from dsprep.sidecar.spec import Content
from dsprep.source.from_sidecar import SidecarSource

RECIPES = {"lmdb": "values", "tfrecord": "example"}
"""How dsprep itself puts a sample into a record, as sidecars name it."""

SLACK = 1.1
"""Groups may be this much larger than what is asked for: fields and padding between samples."""


def group_nbytes(source: Source) -> int | None:
    """Return the bytes of the first group of a dataset that was repacked; None: it was not."""
    if not isinstance(source, SidecarSource) or not source.sidecar.content.layouts:
        return None
    layouts = [source.sidecar.layout(i) for i in range(len(source.sidecar.content.files))]
    if any(layout.groups is None or layout.unlocated for layout in layouts):
        return None
    first = layouts[0].groups
    assert first is not None  # all have them
    return int(first.blocks.lengths.one(0)) if first.blocks.count else None


def has_form(name: str, source: Source, files: Sequence[Path], format: Format) -> bool:
    """Whether a dataset, taken whole, is one file as dsprep writes the format `name`, or as plain.

    Plain is an HDF5 file or a Zarr store that has each field as an array of its name, samples
    along the first axis. A file that was repacked is not: it is what comes out at the end.
    """
    if len(files) != 1 or format.name != name:
        return False
    content = source.sidecar.content if isinstance(source, SidecarSource) else None
    if content is not None and any("groups" in layout for layout in content.layouts):
        return False
    if name in RECIPES:
        return content is not None and _ours(content) and _records(name, content, files[0])
    if name == "zarr" and not files[0].is_dir():
        return False
    if content is not None and _ours(content):
        return True
    plain = _plain_hdf5 if name == "hdf5" else _plain_zarr
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the library thinks of the file
            return plain(files[0], source)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError):
        return False  # whatever it is, it is not plain


def _ours(content: Content) -> bool:
    """Whether dsprep wrote the data, and they are read as they were written."""
    return "source" in content.lineage and not content.reading and bool(content.layouts)


def _records(name: str, content: Content, file: Path) -> bool:
    """Whether records are as dsprep writes them, uncompressed, under the keys that it chooses."""
    for layout in content.layouts:
        recipe = (layout.get("records") or {}).get("recipe") or {}
        if layout.get("unlocated") or recipe.get("name", RECIPES[name]) != RECIPES[name]:
            return False
    return name != "lmdb" or not content.samples or _numbered(file, content.samples)


def _numbered(file: Path, samples: int) -> bool:
    import lmdb

    width = max(8, len(str(samples - 1)))
    try:
        with (
            lmdb.open(
                str(file), subdir=file.is_dir(), readonly=True, lock=False, readahead=False
            ) as env,
            env.begin() as txn,
        ):
            keys = (f"{i:0{width}d}".encode() for i in (0, samples - 1))
            return all(txn.get(key) is not None for key in keys)
    except lmdb.Error:
        return False


def _plain_hdf5(file: Path, source: Source) -> bool:
    import h5py

    with h5py.File(file, "r") as opened:  # opened already in this way, which has to be the same
        found = [(f, opened.get(f.name)) for f in source.schema]
        return all(isinstance(a, h5py.Dataset) and _fits(a, f, source) for f, a in found)


def _plain_zarr(file: Path, source: Source) -> bool:
    import zarr

    group = zarr.open_group(str(file), mode="r")
    found = [(f, group.get(f.name)) for f in source.schema]
    return all(isinstance(a, zarr.Array) and _fits(a, f, source) for f, a in found)


def _fits(array: Any, field: Field, source: Source) -> bool:
    """Whether an array holds the samples of a field, one after another."""
    if field.ragged or field.kind != "array":
        return False
    return bool(array.shape == (len(source), *field.inner) and array.dtype == field.dtype)
