"""HDF5 files as other programs write them, read as they are meant or refused with what decides."""

from __future__ import annotations

import shlex

import h5py
import numpy as np
import pytest
from hdf5_files import options
from support import fails, raw

import dsprep
from dsprep.errors import AmbiguousError, FormatError, SchemaError, UsageError
from dsprep.formats.options import OpenOptions

RNG = np.random.default_rng(5)


def edges(counts):
    return np.append(0, np.cumsum(counts))


# --- N + 1 offsets ----------------------------------------------------------------------------


def test_offsets_of_as_many_values_as_samples(tmp_path):
    """What has as many rows as there are samples is told from the values by its name."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["offsets"], file["data"], file["label"] = [0, 2, 2, 3], [5, 6, 7], [1, 2, 3]
    with dsprep.open(tmp_path / "a.h5") as source:
        assert source.schema["data"].ragged
        assert not source.schema["label"].ragged


# --- AnnData ----------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [30, 20])  # variables may be as many as samples
def test_anndata(tmp_path, m):
    """As it lays out a matrix in CSR: observations are samples, variables are not."""
    counts = np.arange(20) % 4
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        x = file.create_group("X")
        x.attrs["encoding-type"], x.attrs["shape"] = "csr_matrix", [20, m]
        x["data"], x["indices"] = np.arange(counts.sum()), np.arange(counts.sum()) % m
        x["indptr"], file["obs/score"] = edges(counts), np.arange(20)
        kind = file.create_group("obs/kind")
        kind.attrs["encoding-type"] = "categorical"
        kind["codes"], kind["categories"] = np.arange(20, dtype="i1") % 3, ["T", "B", "NK"]
        file["var/seen"], file["uns/k"] = np.arange(m), [1]
    with dsprep.open(tmp_path / "a.h5ad") as source:
        names = {"X/data", "X/indices", "obs/score", "obs/kind/codes"}
        assert (len(source), set(source.schema.names)) == (20, names)
        assert source.schema["X/data"].attrs["columns"] == m
        assert source[3]["X/data"].tolist() == [3, 4, 5]
        assert any("AnnData's variables and annotations" in note for note in source.notes)
    with dsprep.open(tmp_path / "a.h5ad", options("var/seen")) as source:
        assert len(source) == m


# --- tables -----------------------------------------------------------------------------------


def test_tables_are_structured_fields(tmp_path):
    """As PyTables writes them, beside pickled objects, which stay bytes."""
    point = np.dtype([("q", "<f8"), ("r", "<i4", (2,))])
    data = np.zeros(30, np.dtype([("x", "<f4"), ("in", point)]))
    data["x"], data["in"]["r"] = RNG.random(30), [1, 2]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["PYTABLES_FORMAT_VERSION"] = np.bytes_(b"2.1")
        file.create_dataset("t", data=data, chunks=(7,), compression="gzip")
        file["t"].attrs["CLASS"] = np.bytes_(b"TABLE")
        things = file.create_dataset("things", (30,), h5py.vlen_dtype("u1"))
        things.attrs["CLASS"], things.attrs["PSEUDOATOM"] = b"VLARRAY", b"object"
    dsprep.provenance(tmp_path / "a.h5")
    with dsprep.open(tmp_path / "a.h5") as source, dsprep.Sidecar.open(tmp_path / "a.h5") as side:
        assert source.schema.names == ("t", "things")
        assert source.schema["things"].dtype == "u1"
        assert raw(source[3:9]["t"]["in"]["r"]) == raw(data["in"]["r"][3:9])
        assert raw(side.read([7, 29], ["t"])["t"]["x"]) == raw(data["x"][[7, 29]])


def test_members_that_numpy_has_in_a_larger_type_only(tmp_path):
    """Given them as h5py does, the library writes beyond the memory."""
    odd = h5py.h5t.IEEE_F32LE.copy()
    odd.set_ebias(255)
    rows = h5py.h5t.create(h5py.h5t.COMPOUND, 12)
    rows.insert(b"x", 0, odd)
    rows.insert(b"y", 4, h5py.h5t.STD_I64LE)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"t", rows, h5py.h5s.create_simple((5,)))
        file["z"] = np.arange(5)
    with dsprep.open(tmp_path / "a.h5") as source:
        assert source.schema.names == ("z",)
        assert any(
            "left out t: h5py gives it a type whose members overlap" in n for n in source.notes
        )


# --- samples in groups and datasets -----------------------------------------------------------


def test_names_that_say_more_are_kept_if_asked(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("cat", "dog"):
            for i in range(12):
                file[f"{name}{i}/x"] = np.full(3, i)
    with dsprep.open(tmp_path / "a.h5", OpenOptions(sample_axis="groups")) as source:
        assert len(source) == 24
        assert any("--keys-as key keeps them" in note for note in source.notes)
    with dsprep.open(tmp_path / "a.h5", OpenOptions(keys_as="key", sample_axis="groups")) as source:
        assert source[0]["key"] == "cat0"
        assert [source[i]["key"] for i in (11, 12, 23)] == ["cat11", "dog0", "dog11"]
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.arange(3)
    with pytest.raises(UsageError, match="--keys-as applies where each group"):
        dsprep.open(tmp_path / "b.h5", OpenOptions(keys_as="key"))


def test_groups_of_groups(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("ant", "bee", "cat"):
            for i in range(12):
                file[f"{name}/s{i}/image"] = np.full((2, 3), i)
    with pytest.raises(AmbiguousError) as caught:
        dsprep.open(tmp_path / "a.h5")
    assert dict(caught.value.readings)["--field 'image=*/*/image'"].startswith("36 samples")
    every = OpenOptions(fields=options("x=*/*/image", "key").fields, keys_as="key")
    with dsprep.open(tmp_path / "a.h5", every) as source:
        assert len(source) == 36
        assert source.schema.names == ("x", "key")
        assert source[12]["key"] == "bee/s0"
    with dsprep.open(tmp_path / "a.h5", options("x=bee/*/image")) as source:
        assert len(source) == 12


def test_arrays_of_as_many_rows_are_fields(tmp_path):
    with h5py.File(tmp_path / "b.h5", "w") as file:
        for i in range(12):
            file[f"feature{i}"] = np.zeros(2000)
    with dsprep.open(tmp_path / "b.h5") as source:
        assert (len(source), len(source.schema)) == (2000, 12)


# --- doubt ------------------------------------------------------------------------------------


def splits(file):
    for name in ("train", "val"):
        for i in range(12):
            file[f"{name}_{i}/x"] = np.zeros((2, 3))


def image(file):
    file["image"] = np.zeros((30, 40), "u1")
    file["image"].attrs["CLASS"] = np.bytes_(b"IMAGE")


DOUBTFUL = {
    splits: "--sample-axis groups",
    image: "",
}


@pytest.mark.parametrize("write", DOUBTFUL, ids=lambda write: write.__name__)
def test_what_is_doubtful_is_refused(tmp_path, write):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
    with pytest.raises(SchemaError) as caught:
        dsprep.open(tmp_path / "a.h5")
    readings = getattr(caught.value, "readings", ())
    assert not DOUBTFUL[write] or DOUBTFUL[write] in dict(readings)
    for option, gives in readings:
        words = shlex.split(option)
        chosen = options(*(word for word in words if word != "--field"))
        if words[0] == "--sample-axis":
            chosen = options(axis=words[1])
        with dsprep.open(tmp_path / "a.h5", chosen) as source:
            assert len(source) == int(gives.partition(" ")[0])


# --- labels and molecules -------------------------------------------------------------------


def test_molecules_of_several_sizes(tmp_path):
    """As in ANI-1x: the message names the axis that differs, and what it offers works."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(12):
            atoms, count = 3 + i % 4, 5 + i
            file[f"C{i}H{atoms}/coordinates"] = np.zeros((count, atoms, 3), "f4")
            file[f"C{i}H{atoms}/atomic_numbers"] = np.arange(atoms)
            file[f"C{i}H{atoms}/energy"] = np.arange(count) + i
    differ = "coordinates differs in more than its first axis"
    fails(lambda: dsprep.open(tmp_path / "a.h5"), AmbiguousError)
    with pytest.raises(SchemaError, match=differ):
        dsprep.open(tmp_path / "a.h5", options("c=*/coordinates"))
    with dsprep.open(tmp_path / "a.h5", options("c=C0H3/coordinates")) as source:
        assert len(source) == 5
    with dsprep.open(tmp_path / "a.h5", options("z=*/atomic_numbers", "e=*/energy")) as source:
        assert len(source) == 12
        assert (source[2]["z"].tolist(), len(source[2]["e"])) == ([0, 1, 2, 3, 4], 7)


def write_matlab(file):
    file["S/data"], file["S/ir"], file["S/jc"] = np.arange(6.0), np.arange(6), edges([1, 2, 0, 3])
    file["S"].attrs["MATLAB_sparse"], file["y"] = np.uint64(20), np.arange(4.0)[:, None]


def test_columns_are_not_samples(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        write_matlab(file)
    with dsprep.open(path) as source:  # as of dense arrays, rows are MATLAB's columns
        assert (len(source), set(source.schema.names)) == (4, {"S/data", "S/ir", "y"})
        assert source[3]["S/data"].tolist() == [3, 4, 5]
        assert source.schema["S/data"].attrs["columns"] == 20


# --- netCDF-4 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["lat lon", "level time", "band y x"])
def test_axes_of_space_are_doubtful(tmp_path, dims):
    netcdf = pytest.importorskip("netCDF4")
    path, names = tmp_path / "a.nc", dims.split()
    with netcdf.Dataset(path, "w") as file:
        for name in names:
            file.createDimension(name, 4)
        file.createVariable("v", "f4", names)[:] = 1
        file.createVariable("other", "f4", names[1:])[:] = 1  # as long, along another axis
    fails(lambda: dsprep.open(path), AmbiguousError)
    with dsprep.open(path, options(axis="first")) as source:
        assert (len(source), source.schema.names) == (4, ("v",))
        assert source.others == ("other",)
        assert any(f"counted along {names[0]}" in note for note in source.notes)
    with dsprep.open(path, options(axis="none")) as source:
        assert len(source) == 1


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [None, h5py.Empty("f4")])
def test_a_sample_without_data_is_not_left_out_in_silence(tmp_path, inside):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(12):
            file[f"s{i}/image"] = np.full((3, 4), i)
        file.create_group("empty"), file.create_group("s12")
        if inside is not None:
            file["s12/image"] = inside
    with dsprep.open(tmp_path / "a.h5", OpenOptions(sample_axis="groups")) as source:
        assert len(source) == 12
        assert any("s12" in note for note in source.notes)


def test_dimensions_of_netcdf_are_not_fields(tmp_path):
    """They hold no values, and their length may be any."""
    netcdf = pytest.importorskip("netCDF4")
    path = tmp_path / "a.nc"
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("time", 6), file.createDimension("n", 6)
        file.createDimension("many", 5_000_000_000)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(6)
        file.createVariable("x", "i4", ("time", "n"))[:] = 1
    with dsprep.open(path) as source:
        assert source.schema.names == ("time", "x")
        assert len(source) == 6
        assert source.notes == ("samples are counted along time",)
    with pytest.raises(SchemaError, match="many cannot be a field: it is a netCDF dimension"):
        dsprep.open(path, options("many"))
    with netcdf.Dataset(path, "w") as file:
        file.createDimension("many", 5_000_000_000)
    with pytest.raises(FormatError, match=r"no arrays that can be fields.*netCDF dimension"):
        dsprep.open(path)
