"""Stores for the tests of Zarr: made with zarr-python, opened with dsprep, read by layout alone."""

from __future__ import annotations

import gc
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from support import DTYPES, raw, schemas

from dsprep.core import filters
from dsprep.core.packing import Tables
from dsprep.core.schema import Field, FieldSpec, Ragged, Schema
from dsprep.formats import load
from dsprep.formats.base import OpenOptions
from dsprep.layout import as_json, fit
from dsprep.layout.as_json import file_path
from dsprep.layout.model import Column, FileLayout, Grid

ZARR = load("zarr")
F4 = np.dtype("<f4")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def _by_dtype() -> dict[str, Schema]:
    """All schemas: those of one dtype in one, and those of float32 each by itself, too."""
    every = dict(schemas())
    found = {k: v for k, v in every.items() if not k.startswith(("scalar-", "fixed-", "ragged-"))}
    found |= {k: v for k, v in every.items() if k.endswith("-<f4")}
    for dtype in DTYPES:
        fields = Field("x", dtype, (3, 2)), Field("y", dtype), Field("r", dtype, (None, 2))
        label = f"{dtype.str}{dtype.itemsize}" if dtype.names else str(dtype)
        found[label] = Schema(fields)
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


# --- a reader that knows the layout only ---------------------------------------------------------


def stored_block(path: Path, grid: Grid, at: tuple[int, ...]) -> bytes | None:
    """The decoded bytes of the chunk at a place of the grid, by pread; None: fill."""
    numbers, places = grid.numbers(np.array(at, np.int64)[:, None])
    name = grid.blocks.path
    if places is not None:
        name = file_path(name, [int(n) for n in places[:, 0]])
    else:
        assert "{" not in name
    offset = int(grid.blocks.offsets.at(numbers)[0])
    length = int(grid.blocks.lengths.at(numbers)[0])
    if offset < 0:
        assert (offset, length) == (-1, 0)
        return None
    assert length > 0
    file = path / name if name else path
    assert offset + length <= file.stat().st_size
    fd = os.open(file, os.O_RDONLY)
    data = os.pread(fd, length, offset)
    os.close(fd)
    filters.check(grid.filters, file)
    return filters.decode(data, grid.filters, 0, grid.chunk_nbytes, file).tobytes()


def whole_array(path: Path, grid: Grid) -> np.ndarray:
    """The rows of an array: uint8, shape (rows, row_nbytes)."""
    assert grid.blocks.offsets.count == grid.blocks.lengths.count == grid.block_count
    assert (grid.fill is None) or len(grid.fill) == grid.itemsize
    out = np.zeros(
        (*(n * c for n, c in zip(grid.chunks, grid.chunk, strict=True)), grid.itemsize), np.uint8
    )
    for at in np.ndindex(*grid.chunks):
        block = stored_block(path, grid, at)
        if block is None:
            assert grid.fill is not None
            block = grid.fill * (grid.chunk_nbytes // grid.itemsize)
        where = tuple(slice(k * c, (k + 1) * c) for k, c in zip(at, grid.chunk, strict=True))
        out[where] = np.frombuffer(block, np.uint8).reshape(*grid.chunk, grid.itemsize)
    out = out[tuple(slice(n) for n in grid.shape)]
    return np.ascontiguousarray(out).reshape(grid.shape[0], -1)


def read_field(path: Path, column: Column, field: Field, count: int) -> list[bytes]:
    """The bytes of each sample."""
    rows = np.zeros((0, 0), np.uint8) if column.grid is None else whole_array(path, column.grid)
    if column.first is None:
        lines = column.lines
        if column.grid is not None:
            assert rows.shape[0] == lines * count
            assert rows.shape[1] * lines == field.row_nbytes
        return [rows[i * lines : (i + 1) * lines].tobytes() for i in range(count)]
    every = np.arange(count)
    first, number = column.first.at(every).tolist(), column.count.at(every).tolist()
    if column.grid is not None:
        assert rows.shape[1] == field.row_nbytes
    return [rows[a : a + n].tobytes() for a, n in zip(first, number, strict=True)]


def sample(column: np.ndarray | Ragged, i: int) -> np.ndarray:
    """The elements of a sample, one behind another, in their own byte order."""
    if isinstance(column, Ragged):
        column = column.values[column.offsets[i] : column.offsets[i + 1]]
    else:
        column = column[i : i + 1]
    return column.reshape(-1)


def kept(layout: FileLayout, schema: Schema) -> FileLayout:
    """The layout as a sidecar keeps it."""
    tables = Tables()
    text = json.dumps(as_json.to_json(fit.fit(layout), schema, tables))
    return as_json.from_json(json.loads(text), layout.count, schema, Tables(bytes(tables.written)))


def check(path: Path, source) -> FileLayout:
    """Every field of every sample is the same through the layout and through the source."""
    reports: list[tuple[int, int]] = []
    layout = source.extents(lambda done, total: reports.append((done, total)))
    assert all(0 <= a <= b for a, b in reports)
    assert layout.count == len(source)
    assert layout.records is None
    assert sorted([*layout.columns, *layout.unlocated]) == sorted(source.schema.names)
    batch = source.read(0, len(source))
    for name, column in kept(layout, source.schema).columns.items():
        field = source.schema[name]
        found = read_field(path, column, field, len(source))
        for i, data in enumerate(found):
            stored = np.frombuffer(data, field.dtype).reshape(-1)
            assert raw(stored) == raw(sample(batch[name], i)), (name, i)
    return layout
