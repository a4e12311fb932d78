"""The form that strategies need of a file: whether they read it as it is, how to write it.

Strategies read a file as dsprep writes it, or a plain one: an HDF5 file or a Zarr store that has
each field as an array of its name, with samples along the first axis.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dsprep.core.schema import Schema
from dsprep.formats.base import Source
from dsprep.formats.options import WriteOptions
from dsprep.sidecar.spec import Content
from dsprep.source.from_sidecar import SidecarSource

GROUPS = {"hdf5": ".h5", "zarr": ".zarr.zip", "tfrecord": ".tfrecord", "lmdb": ".lmdb"}
"""Formats for groups and the suffixes of such files; the first one that can hold the fields."""

RECIPES = {"lmdb": "values", "tfrecord": "example"}
"""The encoding of dsprep's own records, as sidecars name it."""

PAGE = 4 << 10
"""Bytes below which reading less is no faster."""

ZARR_FILES = 4096
"""Up to so many samples, zarr gets a file for each, which its library reads fastest."""

ZARR_SHARD = 256
"""Chunks of a shard beyond that: readers load its index, 16 bytes a chunk, for every sample."""


def options_of(name: str, schema: Schema, samples: int) -> WriteOptions:
    """Return how a file of a format is written so that a sample is read without its neighbours.

    A chunk of Zarr is a sample, or as many as make up a page. Few samples get a file each. Many
    would cost as many inodes, so chunks are put into shards then; small ones, since zarr reads the
    index of a shard for every sample.
    """
    if name != "zarr":
        return WriteOptions()
    largest = max((f.row_nbytes for f in schema if not f.ragged), default=0)
    chunk = max(1, min(samples, PAGE // max(1, largest)))
    few = -(-samples // chunk) <= ZARR_FILES
    return WriteOptions(chunk=chunk, zarr_shard=0 if few else chunk * ZARR_SHARD)


def is_readable(name: str, source: Source, files: Sequence[Path], format: str) -> bool:
    """Return whether a whole dataset is one file of the format `name` that strategies can read.

    A file that was repacked is not: it is the result, not what users have.
    """
    if len(files) != 1 or format != name or (name == "zarr" and not files[0].is_dir()):
        return False
    content = source.sidecar.content if isinstance(source, SidecarSource) else None
    if content is not None and any("groups" in layout for layout in content.layouts):
        return False
    written = content is not None and "source" in content.lineage and bool(content.layouts)
    if content is not None and written and not content.reading:  # by dsprep, and read as written
        return name not in RECIPES or _has_records(name, content, files[0])
    if name in RECIPES:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the library thinks of the file
            return _is_plain(name, files[0], source)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError):
        return False  # whatever it is, it is not plain


def _has_records(name: str, content: Content, file: Path) -> bool:
    """Return whether records are uncompressed and encoded as by default, under default keys."""
    for layout in content.layouts:
        recipe = (layout.get("records") or {}).get("recipe") or {}
        if layout.get("unlocated") or recipe.get("name", RECIPES[name]) != RECIPES[name]:
            return False
    if name != "lmdb" or not content.samples:
        return True
    import lmdb

    from dsprep.formats.lmdb.keys import plan_keys

    keys, ends = plan_keys(WriteOptions().key_format, content.samples), (0, content.samples - 1)
    options = {"readonly": True, "lock": False, "readahead": False}
    try:
        with lmdb.open(str(file), subdir=file.is_dir(), **options) as env, env.begin() as txn:
            return all(txn.get(keys.one(i)) is not None for i in ends)
    except lmdb.Error:
        return False


def _is_plain(name: str, file: Path, source: Source) -> bool:
    """Return whether each field is an array of its name, one row per sample."""
    import h5py
    import zarr

    is_file = name == "hdf5"
    opened: Any = h5py.File(file) if is_file else nullcontext(zarr.open_group(file, mode="r"))
    with opened as root:
        return all(
            f.kind == "array"
            and (root[f.name].shape, root[f.name].dtype) == ((len(source), *f.shape), f.dtype)
            for f in source.schema
        )
