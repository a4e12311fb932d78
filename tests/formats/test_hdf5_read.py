"""HDF5 files of other programs: h5py writes, dsprep must see the same values."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from hdf5_files import opened, options
from support import NESTED, fails, random_array, raw, reading

import dsprep
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.options import OpenOptions

X = random_array(np.dtype("<f4"), (20, 6, 4))


def test_types(tmp_path):
    padded = np.dtype(
        {"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [2, 8], "itemsize": 24}
    )
    arrays = {
        name: random_array(np.dtype(d), (5, 2)) for name, d in {"f2": "<f2", "s": "S7"}.items()
    }
    arrays["struct"] = random_array(NESTED, (5,))
    arrays["padded"] = random_array(padded, (5, 3))
    with h5py.File(tmp_path / "a", "w") as file:
        for name, array in arrays.items():
            file[name] = array
            file.create_dataset(f"{name}.gz", data=array, compression="gzip")
        file.create_dataset("enum", data=[0, 1, 2, 1, 0], dtype=h5py.enum_dtype({"A": 0, "B": 1}))
        file.create_dataset(
            "when", data=np.arange(5).astype("<M8[ns]").astype(h5py.opaque_dtype("<M8[ns]"))
        )
        utf8 = h5py.string_dtype("utf-8", 6)
        words = np.array([b"\xc3\xa9", b"a", b"", b"x\0y", b"123456"], utf8)
        file.create_dataset("utf8", data=words)
        file.create_dataset("void", data=np.frombuffer(bytes(range(20)), "V4"))
        file.create_dataset("ref", data=[file["f2"].ref] * 5, dtype=h5py.ref_dtype)
        file["null"] = h5py.Empty("f4")
        mixed = np.dtype([("a", "i4"), ("s", h5py.string_dtype())])
        file.create_dataset("vlen_member", data=np.array([(1, "x")] * 5, mixed))
        file.create_dataset("pairs", (5,), np.dtype(("<i4", (2,))))[...] = np.arange(10).reshape(
            5, 2
        )
        for name in arrays:
            file[name].attrs["of"] = file["f2"].ref
    with opened(tmp_path / "a") as source, h5py.File(tmp_path / "a") as file:
        batch = source.read(1, 5)
        for name, array in arrays.items():
            assert batch[name].dtype == array.dtype
            for found in (batch[name], batch[f"{name}.gz"]):
                assert raw(found) == raw(array[1:5]), name
        for name in ("enum", "utf8", "void", "pairs"):
            assert raw(batch[name]) == raw(file[name][1:5]), name
        assert batch["utf8"].dtype == np.dtype("S6")
        assert batch["when"].dtype == np.dtype("<M8[ns]")
        assert batch["when"].astype("i8").tolist() == [1, 2, 3, 4]
        assert source.schema["pairs"].shape == (2,)
        assert batch["enum"].dtype.kind in "iu"
        said = " ".join(source.notes)
        for name in ("ref", "null", "vlen_member", "attributes of f2"):
            assert f"left out {name}" in said
    assert batch["padded.gz"].view("u1").reshape(4, 3, 24)[..., [0, 1, 3, 4, 16, 23]].max() == 0


def test_what_is_not_kept_is_noted(tmp_path):
    kinds = h5py.enum_dtype({"ELECTRON": 0, "MUON": 1})
    with h5py.File(tmp_path / "a", "w") as file:
        file["climate/data"], file["other/x"] = X, X
        file["climate"].attrs["unit"], file["other"].attrs["n"] = "K", 3
        file["climate/data"].attrs["kept"] = 1
        file.create_dataset("kind", data=np.zeros(20, "i4"), dtype=kinds)
        file.create_dataset("struct", data=np.zeros(20, [("k", kinds), ("x", "<f4")]))
        file.create_dataset("seq", (20,), h5py.vlen_dtype(kinds))
        file["flag"] = np.ones(20, bool)
        file["text"] = ["a"] * 20
    with opened(tmp_path / "a") as source:
        assert "attributes of climate, other are not kept" in source.notes
        assert "enum names of kind are not kept" in source.notes
        assert source.schema["climate/data"].attrs == {"kept": 1}
    with opened(tmp_path / "a", "flag", "text") as source:
        assert source.notes == ()


def test_one_sample_per_file(tmp_path):
    for names in (("climate/data", "climate/labels_0"), ("x", "y")):
        shapes = ((8, 12, 3), (8, 12)) if "/" in names[0] else ((8, 8, 8, 4), (4,))
        for how in ({}, {"compression": "gzip"}):
            with h5py.File(tmp_path / "a", "w") as file:
                arrays = [random_array(np.dtype("<f4"), s) for s in shapes]
                for name, array in zip(names, arrays, strict=True):
                    file.create_dataset(name, data=array, **how)
                if names[0] == "x":
                    file["scalar"] = 3.5
                    file["text"] = "words"
            with opened(tmp_path / "a", axis="none") as source:
                assert len(source) == 1
                for name, array in zip(names, arrays, strict=True):
                    assert source.schema[name].shape == array.shape
                    assert raw(source[0][name]) == raw(array)
                if names[0] == "x":
                    assert source[0]["scalar"] == 3.5
                    assert source[0]["text"] == "words"
    with opened(tmp_path / "a", "x", axis="none") as source:
        assert len(source) == 1
    with opened(tmp_path / "a", axis="first") as source:
        assert len(source) == 8


def test_links_and_cycles_end(tmp_path):
    with h5py.File(tmp_path / "a", "w") as file:
        file["g/x"] = np.arange(4)
        file["g/again"] = file["g/x"]
        file["g/up"] = file["/"]
        file["h"] = file["g"]
        file["soft"] = h5py.SoftLink("/g/x")
        file["broken"] = h5py.SoftLink("/nowhere")
        file["outside"] = h5py.ExternalLink("/etc/passwd", "/x")
    with opened(tmp_path / "a") as source:
        assert source.schema.names == ("g/again",)
        assert any("outside" in n and "/etc/passwd" in n for n in source.notes)
    fails(lambda: opened(tmp_path / "a", "outside"), SchemaError, "link to the file")


def _sequences(path, libver, address_nbytes, how):
    """Write strings and numbers of variable length; element 7 of the numbers never."""
    plist = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    plist.set_sizes(address_nbytes, 8)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(*libver)
    made = h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, plist, access)
    with h5py.File(made) as file:
        texts = ["", "a", "größer", "日本" * 500, *"bcdefghi"]
        file.create_dataset("t", data=texts, dtype=h5py.string_dtype(), **how)
        file.create_dataset("s", data=[b"\xff"] * 12, dtype=h5py.string_dtype("ascii"), **how)
        numbers = file.create_dataset("n", (12,), h5py.vlen_dtype(np.dtype(">i2")), **how)
        blobs = file.create_dataset("b", (12,), h5py.vlen_dtype(np.dtype("V1")), **how)
        for i in range(12):
            if i != 7:
                numbers[i] = np.arange(i * i, dtype=">i2")
            blobs[i] = np.frombuffer(bytes(5 * i + 1), "V1")


@pytest.mark.parametrize("address_nbytes", [4, 8])
@pytest.mark.parametrize("libver", [(0, 1), (2, 2)])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"chunks": (5,), "maxshape": (None,)},
        {"chunks": (5,), "compression": "gzip", "shuffle": True},
    ],
)
def test_sequences_are_those_that_h5py_reads(tmp_path, how, libver, address_nbytes):
    path = tmp_path / "a"
    _sequences(path, libver, address_nbytes, how)
    with h5py.File(path) as file:
        values = {name: [raw(v) for v in file[name][:]] for name in "tsnb"}
    sizes = [sum(len(values[name][i]) for name in "tsnb") for i in range(12)]
    with opened(path) as source:
        assert source.schema["n"].dtype == np.dtype(">i2")
        for start, stop in ((0, 12), (3, 8), (11, 12), (12, 12)):
            assert source.sizes(start, stop).tolist() == sizes[start:stop]
            batch = source.read(start, stop)
            for name, column in batch.items():
                assert [raw(v) for v in column] == values[name][start:stop]


# --- values in other files --------------------------------------------------------------------

INTS = np.arange(12, dtype="<i4").reshape(6, 2)


def write_elsewhere(kind, folder, other):
    """Write a file whose field ``x`` lies in `other`, and return its path."""
    path = folder / "a.h5"
    folder.mkdir(exist_ok=True)
    other.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(600.0).reshape(6, 100)
        if kind == "external":
            other.write_bytes(INTS.tobytes())
            file.create_dataset(
                "x", INTS.shape, INTS.dtype, external=[(str(other), 0, INTS.nbytes)]
            )
            return path
        with h5py.File(other, "w") as source:
            if kind == "chain":  # a virtual dataset of one in external storage
                source.create_dataset("d", INTS.shape, INTS.dtype, external=[("raw", 0, 48)])
            elif kind == "linked":
                with h5py.File(folder.parent / "far.h5", "w") as far:
                    far["d"] = INTS
                source["d"] = h5py.ExternalLink(str(folder.parent / "far.h5"), "d")
            else:
                source["d"] = INTS
        layout = h5py.VirtualLayout(INTS.shape, INTS.dtype)
        name = os.path.relpath(other, folder) if kind == "relative" else str(other)
        layout[:] = h5py.VirtualSource(name, "d", INTS.shape)
        file.create_virtual_dataset("x", layout)
    return path


FOLLOW = OpenOptions(follow_external=True)


@pytest.mark.parametrize("kind", ["external", "virtual", "relative", "linked"])
def test_other_files_are_read_only_if_the_user_says_so(tmp_path, kind):
    path = write_elsewhere(kind, tmp_path / "in", tmp_path / "in" / "other")
    with dsprep.open(path) as source:
        assert source.schema.names == ("y",)
        assert any("other" in n and "--follow-external" in n for n in source.notes)
    fails(lambda: dsprep.open(path, options("x")), SchemaError, "--follow-external")
    with dsprep.open(path, FOLLOW) as source:
        assert any("values are in other files" in note for note in source.notes)
        np.testing.assert_array_equal(source[:]["x"], INTS)
        (tmp_path / "in" / "other").unlink()
        with pytest.raises(FormatError, match="other"):
            source[:]


@pytest.mark.parametrize("damage", ["file", "dataset", "chain", "short", "gone"])
def test_a_missing_source_is_an_error_that_names_it(tmp_path, damage):
    kind = {"chain": "chain", "short": "external", "gone": "external"}.get(damage, "virtual")
    other = tmp_path / "in" / "other"
    path = write_elsewhere(kind, tmp_path / "in", other)
    if damage == "dataset":
        with h5py.File(other, "a") as file:
            del file["d"]
    elif damage == "short":
        other.write_bytes(INTS.tobytes()[:-1])
    elif damage != "chain":
        other.unlink()
    fails(lambda: dsprep.open(path, FOLLOW), FormatError, "in/other")
    with dsprep.open(path, reading("y", follow_external=True)) as s:
        assert len(s[:]["y"]) == 6


def test_the_option_is_not_kept_in_a_sidecar(tmp_path):
    """Whoever reads decides, not whoever wrote the sidecar."""
    path = write_elsewhere("external", tmp_path / "in", tmp_path / "out" / "other")
    dsprep.provenance(path, FOLLOW)
    assert "follow_external" not in path.with_name("a.h5.dsprep.json").read_text()
    with dsprep.open(path, options("y")) as source:
        assert source.schema.names == ("y",)
    with pytest.raises((SchemaError, FormatError)):
        dsprep.open(path, options("x"))
