"""Stores for the tests of Zarr: made with zarr-python, opened with dsprep."""

from __future__ import annotations

import gc
import json
import zipfile
from pathlib import Path

import numpy as np
import zarr
from support import reading

from dsprep.formats import load

ZARR = load("zarr")
F4 = np.dtype("<f4")


def opened(path: Path, *fields: str, axis: str = "auto"):
    return ZARR.open(path, reading(*fields, sample_axis=axis), None)


def create(root: zarr.Group, name: str, values: np.ndarray, **how) -> None:
    how = {"compressors": None, "filters": None, **how}
    array = root.create_array(name, shape=values.shape, dtype=values.dtype, **how)
    array[...] = values


def edit(path: Path, **changes) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


def new_store(path: Path, version: int = 3, **how) -> zarr.Group:
    """The root group of a new store: in a ZIP file if the name of `path` ends so."""
    zipped = path.suffix == ".zip"
    store = zarr.storage.ZipStore(path, mode="w") if zipped else path
    return zarr.create_group(store, zarr_format=version, **how)


def complete(root: zarr.Group) -> None:
    root.store.close()
    gc.collect()


def zip_up(folder: Path, path: Path, prefix: str = "", how: int = zipfile.ZIP_STORED) -> Path:
    """A ZIP file of all that is in a folder."""
    with zipfile.ZipFile(path, "w", how) as target:
        for member in sorted(p for p in folder.rglob("*") if p.is_file()):
            target.write(member, Path(prefix) / member.relative_to(folder))
    return path
