"""Stores for the tests of Zarr: made with zarr-python, opened with dsprep."""

from __future__ import annotations

import gc
import json
import zipfile
from pathlib import Path

import numpy as np
import zarr
from support import DTYPES, assert_same_batch, schemas

from dsprep.core.packing import Tables
from dsprep.core.schema import Field, FieldSpec, Schema
from dsprep.formats import load
from dsprep.formats.options import OpenOptions
from dsprep.layout import as_json, fit
from dsprep.layout.model import FileLayout
from dsprep.reading.layout_reader import LayoutReader
from dsprep.storage.paths import open_file

ZARR = load("zarr")
F4 = np.dtype("<f4")


def _by_dtype() -> dict[str, Schema]:
    """All schemas: those of many dtypes in two, and those of float32 each by itself, too."""
    every = dict(schemas())
    found = {k: v for k, v in every.items() if not k.startswith(("scalar-", "fixed-", "ragged-"))}
    found |= {k: v for k, v in every.items() if k.endswith("-<f4")}
    for label, kinds in {"numbers": "biufc", "others": "SUV"}.items():
        dtypes = [d for d in DTYPES if d.kind in kinds][:: 2 if label == "numbers" else 1]
        found[label] = Schema(
            tuple(
                Field(f"{name}{i}", dtype, shape)
                for i, dtype in enumerate(dtypes)
                for name, shape in (("x", (3, 2)), ("y", ()), ("r", (None, 2)))
            )
        )
    return found


SCHEMAS = _by_dtype()


def opened(path: Path, *fields: str, axis: str = "auto"):
    specs = tuple(FieldSpec.parse(f) for f in fields)
    return ZARR.open(path, OpenOptions(fields=specs, sample_axis=axis), None)


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


def kept(layout: FileLayout, schema: Schema) -> FileLayout:
    """The layout as a sidecar keeps it."""
    tables = Tables()
    text = json.dumps(as_json.to_json(fit.fit(layout), schema, tables))
    return as_json.from_json(json.loads(text), layout.count, schema, Tables(bytes(tables.written)))


def check(path: Path, source) -> FileLayout:
    """Every field of every sample is the same through a sidecar's layout and through the source."""
    reports: list[tuple[int, int]] = []
    layout = source.extents(lambda done, total: reports.append((done, total)))
    assert all(0 <= a <= b for a, b in reports)
    assert layout.count == len(source)
    assert layout.records is None
    assert sorted([*layout.columns, *layout.unlocated]) == sorted(source.schema.names)
    for column in layout.columns.values():
        if column.grid is not None:
            blocks = column.grid.blocks
            assert blocks.offsets.count == blocks.lengths.count == column.grid.block_count
    schema = Schema(tuple(f for f in source.schema if f.name in layout.columns))
    known, where = kept(layout, source.schema), lambda p: open_file(path / p if p else path)
    found = LayoutReader(known, source.schema, where, path).read(
        np.arange(len(source)), schema.names
    )
    batch = source.read(0, len(source))
    assert_same_batch(found, {name: batch[name] for name in schema.names}, schema)
    return layout
