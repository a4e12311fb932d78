"""HDF5 extents: plain reads at the places that they tell give what h5py gives, bit for bit."""

from __future__ import annotations

import ctypes
import re
import zlib
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hdf5_files import HDF5, opened, options
from record_checks import located
from support import (
    STRUCT,
    random_array,
    raw,
)

X = random_array(np.dtype("<f4"), (20, 6, 10))


def compare(path, follow=False):
    return located(HDF5, path, options(axis="first", follow=follow))


def compare_whole(path):
    """As `compare`, with what h5py reads; every field must have extents."""
    layout, batch = compare(path)
    assert not layout.unlocated
    with h5py.File(path) as file:
        for name, values in batch.items():
            assert raw(values) == raw(file[name][()])
    return layout


# --- arrays ----------------------------------------------------------------------------------

GZIP = {"compression": "gzip"}
OPTIONS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "first axis": {"chunks": (6, 6, 10)},
    "one chunk": {"chunks": (20, 6, 10)},
    "one chunk, gzip": {"chunks": (20, 6, 10), **GZIP},
    "larger than the array": {"chunks": (32, 8, 10), "maxshape": (None, None, 10)},
    "tiles": {"chunks": (3, 4, 7)},
    "tiles, one axis grows": {"chunks": (3, 4, 7), "maxshape": (None, 6, 10)},
    "tiles, all axes grow": {"chunks": (3, 4, 7), "maxshape": (None, None, None)},
    "gzip": {"chunks": (3, 4, 7), **GZIP},
    "gzip, one axis grows": {"chunks": (1, 6, 10), "maxshape": (None, 6, 10), **GZIP},
    "all": {"chunks": (7, 6, 3), "shuffle": True, "fletcher32": True, **GZIP},
    "fletcher32": {"chunks": (7, 6, 3), "fletcher32": True},
    "shuffle": {"chunks": (4, 6, 5), "shuffle": True},
    "zstd": {"chunks": (3, 4, 7), **hdf5plugin.Zstd()},
    "blosc": {"chunks": (3, 4, 7), **hdf5plugin.Blosc("zstd", 5, hdf5plugin.Blosc.BITSHUFFLE)},
    "blosc lz4": {"chunks": (8, 6, 10), **hdf5plugin.Blosc("lz4", 5)},
}


@pytest.mark.parametrize(("libver", "userblock"), [("earliest", 0), ("latest", 1024)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_arrays(tmp_path, name, libver, userblock):
    path = tmp_path / "a"
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        file.create_dataset("x", data=X, **OPTIONS[name])
        file.create_dataset("group/y", data=np.arange(20), **({"chunks": (7,)} if name else {}))
    layout = compare_whole(path)
    grid = layout.columns["x"].grid
    assert grid.fill is None
    assert grid.shape == X.shape
    expected = OPTIONS[name].get("chunks", X.shape)
    assert grid.chunk == expected


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("maxshape", [None, (None, None)])
def test_chunks_with_filters_left_out(tmp_path, libver, maxshape):
    x = random_array(np.dtype("<f8"), (9, 6))
    path = tmp_path / "a"
    with h5py.File(path, "w", libver=libver) as file:
        made = file.create_dataset(
            "x", x.shape, "<f8", chunks=(2, 6), maxshape=maxshape, shuffle=True, **GZIP
        )
        for i, mask in enumerate((0, 1, 2, 3, 0)):
            rows = np.zeros((2, 6), "<f8")
            rows[: len(x[2 * i : 2 * i + 2])] = x[2 * i : 2 * i + 2]
            data = rows.tobytes()
            if not mask & 1:
                data = np.frombuffer(data, "u1").reshape(-1, 8).T.tobytes()
            if not mask & 2:
                data = zlib.compress(data)
            made.id.write_direct_chunk((2 * i, 0), data, mask)
    layout = compare_whole(path)
    grid = layout.columns["x"].grid
    assert grid.masks.span(0, 5).tolist() == [0, 1, 2, 3, 0]
    with h5py.File(path) as file:
        assert raw(file["x"][()]) == raw(x)


STRUCT_FILL = np.zeros((), STRUCT)
STRUCT_FILL["id"], STRUCT_FILL["value"] = 7, -2.5
FILLS: list[tuple[Any, Any]] = [
    ("<i4", None),
    ("<f4", np.nan),
    (">i2", 258),
    ("S5", b"none"),
    ("?", True),
    (STRUCT, STRUCT_FILL),
    (np.dtype((">u2", (2,))), None),
]


@pytest.mark.parametrize(("libver", "fill_time"), [("earliest", "ifset"), ("latest", "never")])
@pytest.mark.parametrize(("dtype", "value"), FILLS, ids=str)
def test_missing_chunks(tmp_path, dtype, value, libver, fill_time):
    path = tmp_path / "a"
    with h5py.File(path, "w", libver=libver) as file:
        made = file.create_dataset(
            "x", (9, 4), dtype, chunks=(2, 3), fillvalue=value, fill_time=fill_time
        )
        made[4, 3] = random_array(made.dtype.base, made.dtype.shape)
        none = file.create_dataset("none", (9, 4), dtype, chunks=(2, 3), fillvalue=value, **GZIP)
        assert none.id.get_num_chunks() == 0
    layout = compare_whole(path)
    for name, stored in (("x", 1), ("none", 0)):
        grid = layout.columns[name].grid
        offsets = grid.blocks.offsets.span(0, 10)
        assert np.count_nonzero(offsets >= 0) == stored
        assert len(grid.fill) == np.dtype(dtype).itemsize


# --- what only the library finds -------------------------------------------------------------


def test_what_only_the_library_finds(tmp_path):
    path = tmp_path / "a"
    with h5py.File(path, "w", userblock_size=1024) as file:
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((4, 2))
        made = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I32LE, space, compact)
        h5py.Dataset(made)[...] = np.arange(8).reshape(4, 2)
        file.create_dataset("unwritten", (4, 2), "<f4", fillvalue=3)
        (tmp_path / "raw").write_bytes(bytes(range(32)))
        file.create_dataset("external", (4, 2), "<f4", external=[(str(tmp_path / "raw"), 0, 32)])
        virtual = h5py.VirtualLayout((4, 2), "<f4")
        virtual[:] = h5py.VirtualSource(file.create_dataset("good", data=np.ones((4, 2), "<f4")))
        file.create_virtual_dataset("virtual", virtual)
        file.create_dataset("lzf", data=np.ones((4, 2)), chunks=(2, 2), compression="lzf")
        file.create_dataset("scaled", data=np.ones((4, 2), "i4"), chunks=(2, 2), scaleoffset=3)
        file.create_dataset("text", data=["a", "b", "c", "d"], dtype=h5py.string_dtype())
        terminated = h5py.h5t.C_S1.copy()
        terminated.set_size(4)
        line = h5py.h5s.create_simple((4,))
        made = h5py.h5d.create(file.id, b"terminated", terminated, line)
        h5py.Dataset(made)[...] = np.array([b"abc", b"", b"x", b"yz"], "S4")
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(20)
        h5py.h5d.create(file.id, b"odd", odd, line)
        made = file.create_dataset(
            "holes", (4, 2), "<f4", chunks=(2, 2), fillvalue=3, compression="lzf"
        )
        made[0] = 1
    found = dict(compare(path, follow=True)[0].unlocated)
    with opened(path, axis="first", follow=True) as source, h5py.File(path) as file:
        batch, storage = source.read(1, 4), source.storage()
        assert all(raw(batch[name]) == raw(file[name][1:4]) for name in found if name != "text")
    for name in ("compact", "external", "virtual"):
        assert storage[name].storage == name
    assert storage["unwritten"].storage == "contiguous"
    assert "by the HDF5 library" in storage["unwritten"].access
    holes = found.pop("holes")
    assert holes == found["lzf"]
    assert {n: w for n, w in found.items() if n != "odd"} == {
        "compact": "it is compact: its values are in the file's metadata",
        "unwritten": "nothing was ever written to it",
        "external": "its values are in external files",
        "virtual": "it is virtual: it is made of parts of other datasets",
        "lzf": "its chunks are encoded by lzf, which only HDF5 libraries decode",
        "scaled": "its chunks are encoded by scaleoffset, which only HDF5 libraries decode",
        "text": "its values are in the global heap, each found through a descriptor; "
        "dsprep convert makes it addressable",
        "terminated": "the HDF5 library converts its type when it reads",
    }
    assert found["odd"]


@pytest.mark.parametrize("filtered", [True, False])
def test_edges_that_may_be_stored_without_filters(tmp_path, filtered):
    values, library = np.arange(70, dtype="<i8").reshape(10, 7), hdf5_library()
    with h5py.File(tmp_path / "a", "w", libver="latest") as file:
        space = h5py.h5s.create_simple(values.shape)
        for name, chunk, gzip in (("x", (4, 7), 0), ("y", (5, 7), 1), ("z", (3, 2), 1)):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk(chunk)
            plist.set_shuffle()
            if gzip:
                plist.set_deflate(1)
            if not filtered:
                assert library.H5Pset_chunk_opts(ctypes.c_int64(plist.id), 2) >= 0
            made = h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_INT64, space, plist)
            h5py.Dataset(made)[:] = values
    layout, _ = compare(tmp_path / "a")
    assert set(layout.columns) == ({"y", "z"} if filtered else {"y"})


def hdf5_library():
    """Return the HDF5 library that h5py uses."""
    mapped = re.findall(r"/\S*/libhdf5[-.]\S*", Path("/proc/self/maps").read_text())
    own = [path for path in mapped if "/h5py" in path]  # netCDF4 may have brought another one
    return ctypes.CDLL((own or mapped)[0])


# --- identity --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "maxshape", [(8, None, 6), (8, 6, None), (None, 6, 6), (8, 6, 9), (8, None)]
)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_chunks_that_the_library_lists_at_wrong_places(tmp_path, libver, maxshape):
    """HDF5 counts wrongly through the index of one unlimited axis that is not the first."""
    shape, chunks = ((8, 6, 6), (3, 2, 3)) if len(maxshape) == 3 else ((2, 30), (2, 3))
    path = tmp_path / "a.h5"
    x = random_array(np.dtype("<i4"), shape)
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=x, chunks=chunks, maxshape=maxshape)
    with opened(path) as source:
        np.testing.assert_array_equal(source.read(0, len(x))["x"], x)
        wrong = libver == "latest" and maxshape[0] == 8 and None in maxshape
        assert ("x" in source.extents().unlocated) == wrong
    if not wrong:
        compare_whole(path)
