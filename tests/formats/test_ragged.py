"""Index tables mean the same in every format that holds named arrays."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import zarr
from hdf5_files import options
from support import fails, raw

import dsprep
from dsprep.errors import AmbiguousError, FormatError, SchemaError, UsageError
from dsprep.formats.options import OpenOptions

RNG = np.random.default_rng(8)


def to_hdf5(path, arrays, attrs):
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        for group, some in attrs.items():
            file.require_group(group or "/").attrs.update(some)


def to_zarr(version):
    def write(path, arrays, attrs):
        root = zarr.create_group(path, zarr_format=version)
        for name, values in arrays.items():
            array = root.create_array(name, shape=values.shape, dtype=values.dtype)
            array[...] = values
        for group, some in attrs.items():
            (root[group] if group else root).attrs.update(some)

    return write


def to_npz(path, arrays, attrs):
    np.savez_compressed(path, **arrays)


def to_directory(path, arrays, attrs):
    path.mkdir()
    for name, values in arrays.items():
        np.save(path / name, values)


FORMATS = {
    "a.h5": to_hdf5,
    "a.zarr": to_zarr(3),
    "b.zarr": to_zarr(2),
    "a.npz": to_npz,
    "arrays": to_directory,
}


@pytest.fixture(params=FORMATS)
def written(request, tmp_path):
    def write(arrays, attrs=None):
        path = tmp_path / request.param
        FORMATS[request.param](path, {k: np.asarray(v) for k, v in arrays.items()}, attrs or {})
        return path

    return write


def bounds(counts):
    return np.append(0, np.cumsum(counts))


COUNTS = np.array([2, 0, 5, 1, 0])
VALUES = RNG.random((8, 2)).astype("f4")
PARTS = [raw(part) for part in np.split(VALUES, bounds(COUNTS)[1:-1])]


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"offsets": bounds(COUNTS)}, "data"),
        ({"x_offsets": bounds(COUNTS).astype("i4")}, "x_data"),
        ({"x_index": bounds(COUNTS)[1:].astype("u1")}, "x"),  # as the VectorIndex of NWB
        ({"first": bounds(COUNTS)[:-1], "count": COUNTS}, "x"),
    ],
)
def test_one_rule(written, table, name):
    path = written({name: VALUES, **table, "label": np.arange(5)})
    with dsprep.open(path) as source:
        assert set(source.schema.names) == {name, "label"}
        assert [raw(source[i][name]) for i in range(5)] == PARTS
        assert [raw(v) for v in source[1:4][name]] == PARTS[1:4]
    dsprep.provenance(path)
    with dsprep.Reader(path, 5, shuffle="none") as reader:
        (batch,) = reader
        assert [raw(v) for v in batch[name]] == PARTS
    with dsprep.open(path, options(f"y={name}@{','.join(table)}")) as source:
        assert raw(source[2]["y"]) == PARTS[2]


@pytest.mark.parametrize("wrong", [[0, 3, 2, 8, 8, 8], [1, 2, 2, 7, 8, 8]])
def test_a_wrong_table_is_asked_about(written, wrong):
    path = written({"indptr": wrong, "data": VALUES, "indices": np.arange(8), "y": np.arange(5)})
    fails(lambda: dsprep.open(path), AmbiguousError, "differ in their first axes")
    with pytest.raises(UsageError, match="indptr is not an index table of data"):
        dsprep.open(path, options("x=data@indptr"))


def test_lists_in_lists(written):
    path = written({"a-offsets": [0, 2, 2, 3], "b-offsets": [0, 1, 5, 6], "c-data": np.arange(6.0)})
    fails(lambda: dsprep.open(path), AmbiguousError, "c-data@a-offsets@b-offsets: 3 samples")
    with dsprep.open(path, options("x=c-data@a-offsets@b-offsets")) as source:
        assert [source[i]["x"].tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [], [5]]


MATRIX = {"data": np.arange(8.0), "indices": np.arange(8) % 3, "indptr": bounds(COUNTS)}


def sparse(kind):
    return {"": {"encoding-type": f"{kind}_matrix", "shape": np.array([5, 9]).tolist()}}


def test_matrices_in_csr_have_their_width(written):
    path = written(MATRIX, sparse("csr"))
    with dsprep.open(path) as source:
        assert (len(source), set(source.schema.names)) == (5, {"data", "indices"})
        assert source[2]["data"].tolist() == [2, 3, 4, 5, 6]
        if path.suffix in (".h5", ".zarr"):  # those of NumPy have no attributes
            assert source.schema["data"].attrs["columns"] == 9
            assert not [n for n in source.notes if "left out" in n]


@pytest.mark.parametrize("kind", ["csc", "coo", "bsr", "dia"])
def test_matrices_that_are_not_stored_by_rows_are_refused(written, kind):
    arrays = MATRIX if kind in ("csc", "bsr") else {"data": np.arange(8.0), "row": np.arange(8)}
    path = written(arrays, sparse(kind))
    if path.suffix not in (".h5", ".zarr"):
        return
    with pytest.raises((SchemaError, FormatError), match=rf"is {kind}_matrix, stored.*tocsr"):
        dsprep.open(path)
    with pytest.raises((SchemaError, FormatError), match=r"is (csc|coo|bsr|dia)_matrix"):
        dsprep.open(path, options("data"))


def test_tables_of_nwb_are_apart(tmp_path):
    """Rows of two tables are not fields of one sample, though they are as many."""
    units = {"units/id": np.arange(4), "units/t": np.arange(6.0), "units/t_index": [1, 3, 3, 6]}
    trials = {"trials/id": np.arange(4), "trials/start": np.arange(4.0)}
    attrs = {"units": {"colnames": ["t"]}, "trials": {"colnames": ["start"]}}
    for name in ("a.h5", "a.zarr"):
        FORMATS[name](
            tmp_path / name, {k: np.asarray(v) for k, v in (units | trials).items()}, attrs
        )
        with pytest.raises(AmbiguousError), dsprep.open(tmp_path / name):
            pass
        with dsprep.open(tmp_path / name, OpenOptions(sample_axis="first")) as source:
            assert set(source.schema.names) == {"units/id", "units/t"}
            assert source[1]["units/t"].tolist() == [1, 2]
            assert {*source.others} == {"trials/id", "trials/start"}
        with dsprep.open(tmp_path / name, options("trials/start", "trials/id")) as source:
            assert len(source) == 4
