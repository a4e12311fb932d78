"""HDF5 files as other programs write them, read as they are meant or refused with what decides."""

from __future__ import annotations

import shlex
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hdf5_files import options
from support import raw

import dsprep
from dsprep.errors import AmbiguousError, FormatError, SchemaError, UsageError
from dsprep.formats.options import OpenOptions

RNG = np.random.default_rng(5)


def edges(counts):
    return np.append(0, np.cumsum(counts))


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# --- N + 1 offsets ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"chunks": (5,), "compression": "gzip"}])
@pytest.mark.parametrize(
    ("dtype", "names"), [("<i4", ("indptr", "data")), (">u8", ("node0-offsets", "node1-data"))]
)
def test_offsets_of_one_entry_more(tmp_path, dtype, how, names):
    counts = np.array([2, 0, 0, 5, 1, 0])
    values = RNG.random((8, 2)).astype(">f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(f"x/{names[0]}", data=edges(counts).astype(dtype), **how)
        file[f"x/{names[1]}"], file["label"] = values, np.arange(6)
    name = f"x/{names[1]}"
    with dsprep.open(tmp_path / "a.h5") as source:
        assert source.schema.names == ("label", name)
        expected = [raw(part) for part in np.split(values, edges(counts)[1:-1])]
        assert [raw(source[i][name]) for i in range(6)] == expected
        assert source.sizes(0, 6).tolist() == (8 * counts + 8).tolist()
    dsprep.provenance(tmp_path / "a.h5")
    with dsprep.Reader(tmp_path / "a.h5", 4, shuffle="none") as reader:
        found = [raw(v) for batch in reader for v in batch[name]]
    assert found == expected
    with dsprep.open(tmp_path / "a.h5", options(f"y={name}@x/{names[0]}")) as source:
        assert raw(source[3]["y"]) == expected[3]


def write_lists(file, outer, inner=None):
    file["node0-offsets"] = edges(outer)
    if inner is not None:
        file["node1-offsets"] = edges(inner)
    file["node2-data"] = np.arange(int(np.sum(outer if inner is None else inner)))


def test_lists_in_lists_are_named_not_guessed(tmp_path):
    outer, inner = [2, 0, 3], [1, 4, 0, 2, 2]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write_lists(file, outer, inner)
    with pytest.raises(FormatError, match="node1-offsets counts lists in lists"):
        dsprep.open(tmp_path / "a.h5")
    with dsprep.open(
        tmp_path / "a.h5", options("x=node2-data@node0-offsets@node1-offsets")
    ) as source:
        assert [source[i]["x"].tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [], [5, 6, 7, 8]]


@pytest.mark.parametrize("wrong", ["shifted", "falling", "short"])
def test_offsets_that_do_not_divide_the_values(tmp_path, wrong):
    offsets = {"shifted": [1, 3, 8], "falling": [0, 5, 3, 8], "short": [0, 3, 7]}[wrong]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["offsets"], file["content"] = offsets, np.arange(8)
        file["label"] = np.arange(len(offsets) - 1)
    with pytest.raises(UsageError, match="not an index table"):
        dsprep.open(tmp_path / "a.h5", options("x=content@offsets"))
    if wrong == "short":  # nothing says that these belong together
        return
    with dsprep.open(tmp_path / "a.h5") as source:
        assert source.schema.names == ("label",)
        assert any("left out content, offsets" in note for note in source.notes)


def test_offsets_of_as_many_values_as_samples(tmp_path):
    """What has as many rows as there are samples is told from the values by its name."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["offsets"], file["data"], file["label"] = [0, 2, 2, 3], [5, 6, 7], [1, 2, 3]
    with dsprep.open(tmp_path / "a.h5") as source:
        assert source.schema["data"].ragged
        assert not source.schema["label"].ragged


# --- AnnData ----------------------------------------------------------------------------------


def annotated(kind, n, m):
    anndata, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random(n, m, 0.3, format="csr", dtype="f4", random_state=1)
    obs = {"kind": pd.Categorical(RNG.choice(["T", "B", "NK"], n)), "score": RNG.random(n)}
    found = anndata.AnnData(
        {"csr": x, "csc": x.tocsc(), "dense": x.toarray()}[kind],
        obs=pd.DataFrame(obs, index=[f"cell {i}" for i in range(n)]),
        var=pd.DataFrame({"seen": RNG.random(m)}, index=[f"gene {i}" for i in range(m)]),
    )
    found.obsm["pca"], found.varm["loading"], found.uns["k"] = RNG.random((n, 5)), x.T[:, :2], [1]
    found.varm["rows"] = x.T[:, :2].tocsr()
    return found


@pytest.mark.parametrize("kind", ["csr", "dense"])
@pytest.mark.parametrize(("n", "m"), [(20, 30), (25, 25)])  # variables may be as many as samples
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_anndata(tmp_path, kind, n, m, compression):
    data = annotated(kind, n, m)
    data.write_h5ad(tmp_path / "a.h5ad", compression=compression)
    dsprep.provenance(tmp_path / "a.h5ad")
    located = ["X/data", "X/indices"] if kind == "csr" else ["X"]
    with (
        dsprep.open(tmp_path / "a.h5ad") as source,
        dsprep.Sidecar.open(tmp_path / "a.h5ad") as sidecar,
    ):
        assert len(source) == n
        assert not [x for x in source.schema.names if x.startswith(("var", "uns"))]
        assert any("AnnData's variables and annotations" in note for note in source.notes)
        batch = sidecar.read(slice(None), [*located, "obs/score"])
        for i in range(n):
            sample = source[i]
            row = sample[located[0]]
            if kind == "csr":
                assert source.schema["X/data"].attrs["columns"] == m
                row = np.zeros(m, "f4")
                row[sample["X/indices"]] = sample["X/data"]
            expected = data.X[i].toarray()[0] if kind == "csr" else data.X[i]
            assert raw(row) == raw(expected)
            for name in located:
                assert raw(batch[name][i]) == raw(sample[name])
            assert sample["obs/score"] == batch["obs/score"][i] == data.obs["score"].iloc[i]
            assert sample["obs/kind/codes"] == data.obs["kind"].cat.codes.iloc[i]
            assert sample["obs/_index"] == data.obs_names[i]
            assert raw(sample["obsm/pca"]) == raw(data.obsm["pca"][i])
    with dsprep.open(tmp_path / "a.h5ad", options("var/seen")) as source:
        assert len(source) == m


def test_matrices_by_columns_are_refused(tmp_path):
    annotated("csc", 20, 30).write_h5ad(tmp_path / "a.h5ad")
    with pytest.raises(SchemaError, match=r"X is csc_matrix, stored by columns.*tocsr"):
        dsprep.open(tmp_path / "a.h5ad")
    with pytest.raises(SchemaError, match="X/data cannot be a field: X is csc_matrix"):
        dsprep.open(tmp_path / "a.h5ad", options("X/data"))
    with dsprep.open(tmp_path / "a.h5ad", options("obs/score")) as source:
        assert len(source) == 20


# --- tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 5])
def test_tables_of_pytables(tmp_path, level):
    tables = pytest.importorskip("tables")
    point = np.dtype([("q", "<f8"), ("r", "<i4", (2,))])
    row = np.dtype([("x", "<f4"), ("flag", "?"), ("c", "<c16"), ("in", point), ("name", "S5")])
    data = np.zeros(300, row)
    data["x"], data["flag"], data["in"]["r"] = RNG.random(300), RNG.random(300) > 0.5, [1, 2]
    data["c"], data["name"] = 1j * np.arange(300), b"ab"
    path = tmp_path / "a.h5"
    with tables.open_file(path, "w", filters=tables.Filters(complevel=level)) as file:
        file.create_table("/", "t", obj=data)
        file.create_carray("/", "image", obj=RNG.random((300, 2, 2)))
        lists, objects = (
            file.create_vlarray("/", name, atom)
            for name, atom in (("lists", tables.Int32Atom()), ("things", tables.ObjectAtom()))
        )
        for i in range(300):
            lists.append(np.arange(i % 4))
            objects.append({"a": i})
    members = {"t/x": "x", "t/flag": "flag", "t/c": "c", "t/name": "name"}
    with dsprep.open(path) as source:
        assert set(source.schema.names) == {*members, "t/in/q", "t/in/r", "image", "lists"}
        assert any("things: pickled Python objects" in note for note in source.notes)
        batch = source[100:200]
        for name, member in members.items():
            assert raw(batch[name]) == raw(data[member][100:200])
        assert raw(batch["t/in/r"]) == raw(data["in"]["r"][100:200])
        assert batch["lists"][2].tolist() == [0, 1]
    with dsprep.open(path, options("x=t/x", "t/in")) as source:
        assert source.schema["t/in"].dtype == point
        assert raw(source[5]["x"]) == raw(data["x"][5])
    with dsprep.open(path, options("t")) as source:
        assert raw(source[5]["t"]["in"]) == raw(data[5]["in"])
    with dsprep.open(path, options("things")) as source:
        assert source[0]["things"].dtype == np.uint8
    with pytest.raises(SchemaError, match="no field t/nothing"):
        dsprep.open(path, options("t/nothing"))
    dsprep.convert(path, tmp_path / "b.zarr", workers=1)
    with dsprep.open(path) as a, dsprep.open(tmp_path / "b.zarr") as b:
        assert dsprep.verify(a, b).same


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


def test_attributes_of_the_groups_are_fields(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(12):
            file[f"s{i}/x"] = np.full((2, 2), i)
            attrs = file[f"s{i}"].attrs
            attrs["label"], attrs["box"], attrs["kind"] = np.int16(i), [i, 1.5], f"kind {i}"
            attrs["x"], attrs["odd"] = 1, np.arange(i)
        file["meta/mean"] = np.zeros(2)
    groups = OpenOptions(sample_axis="groups")
    with dsprep.open(tmp_path / "a.h5", groups) as source:
        assert source.schema.names == ("x", "box", "kind", "label")
        sample = source[7]
        assert (sample["label"], sample["kind"]) == (7, "kind 7")
        assert sample["box"].tolist() == [7, 1.5]
        assert source[3:5]["label"].tolist() == [3, 4]
        notes = "\n".join(source.notes)
        assert "left out attributes of the samples' groups: odd, x" in notes
        assert "meta/mean: not in the samples' groups" in notes
        assert "attributes of groups" in source.storage()["label"].storage
    with dsprep.open(tmp_path / "a.h5", options("y=label", "x", axis="groups")) as source:
        assert source.schema.names == ("y", "x")
    dsprep.convert(tmp_path / "a.h5", tmp_path / "b.tfrecord", open_options=groups)
    with dsprep.open(tmp_path / "a.h5", groups) as a, dsprep.open(tmp_path / "b.tfrecord") as b:
        assert dsprep.verify(a, b).same


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


def test_a_dataset_per_sample(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in sorted(range(30), key=str):
            file[f"utt{i}"] = np.full((3 + i % 7, 4), i, "f4")
    with dsprep.open(tmp_path / "a.h5", options(axis="groups")) as source:
        assert (len(source), source.schema.names) == (30, ("values",))
        assert source.schema["values"].shape == (None, 4)
        for i in range(30):
            assert raw(source[i]["values"]) == raw(np.full((3 + i % 7, 4), i, "f4"))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        for i in range(12):
            file[f"feature{i}"] = np.zeros(2000)
    with dsprep.open(tmp_path / "b.h5") as source:
        assert (len(source), len(source.schema)) == (2000, 12)


# --- doubt ------------------------------------------------------------------------------------


def images_alone(file):
    for i in range(40):
        file[f"image_{i}"] = np.zeros((3, 8, 8), "u1")


def splits(file):
    for name in ("train", "val"):
        for i in range(12):
            file[f"{name}_{i}/x"] = np.zeros((2, 3))


def image_and_label(file):
    file["image"], file["label"] = np.zeros((3, 64, 64), "u1"), 7


def images_and_mean(file):
    file["images"], file["mean"] = np.zeros((500, 3, 8, 8), "u1"), np.zeros(3)


def rows_and_note(file):
    file["x"], file["note"] = np.zeros((1000, 64), "u1"), np.zeros(5, "u1")


def image(file):
    file["image"] = np.zeros((30, 40), "u1")
    file["image"].attrs["CLASS"] = np.bytes_(b"IMAGE")


DOUBTFUL = {
    images_alone: "--sample-axis groups",
    splits: "--sample-axis groups",
    image_and_label: "--sample-axis none",
    images_and_mean: "--sample-axis first",
    rows_and_note: "--sample-axis first",
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
    differ = r"coordinates is .* differ in their first axis only"
    with pytest.raises(AmbiguousError):
        dsprep.open(tmp_path / "a.h5")
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


def test_what_netcdf_keeps_for_itself_is_no_note(tmp_path):
    netcdf = pytest.importorskip("netCDF4")
    path = tmp_path / "a.nc"
    with netcdf.Dataset(path, "w") as file:
        for name, size in (("time", None), ("lat", 3), ("nv", 2)):
            file.createDimension(name, size)
        for k in range(9):
            variable = file.createVariable(f"v{k}", "f4", ("time", "lat", "nv"))
            variable[:4], variable.units, variable.comment = k, "K", ""
        file.createVariable("time", "f8", ("time",))[:] = np.arange(4)
        file["v1"].scale_factor, file["v2"].missing_value = 0.1, np.float32(np.nan)
    with dsprep.open(path) as source:
        assert source.notes[0] == "samples are counted along time"
        assert "scale_factor of v1 are not applied" in source.notes[1]
        attrs = dict(source.schema["v0"].attrs)
        assert attrs.pop("_ARRAY_DIMENSIONS").tolist() == ["time", "lat", "nv"]
        assert attrs == {"units": "K", "comment": ""}
        assert {*source.schema["time"].attrs} == {"_ARRAY_DIMENSIONS"}
    report = dsprep.convert(path, tmp_path / "b.zarr", workers=1)
    assert not [note for note in report.notes if "CLASS" in note or "_Netcdf4" in note]


@pytest.mark.parametrize("dims", ["lat lon", "level time", "band y x"])
def test_axes_of_space_are_doubtful(tmp_path, dims):
    netcdf = pytest.importorskip("netCDF4")
    path, names = tmp_path / "a.nc", dims.split()
    with netcdf.Dataset(path, "w") as file:
        for name in names:
            file.createDimension(name, 4)
        file.createVariable("v", "f4", names)[:] = 1
        file.createVariable("other", "f4", names[1:])[:] = 1  # as long, along another axis
    with pytest.raises(AmbiguousError):
        dsprep.open(path)
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
    with pytest.raises(FormatError, match=r"no datasets that can be fields.*netCDF dimension"):
        dsprep.open(path)
