"""HDF5 files of other programs: h5py writes, dsprep must see the same values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from support import NESTED, random_array, raw

from dsprep.core.schema import Arena, FieldSpec
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.base import OpenOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.hdf5.source import Hdf5Source

HDF5 = Hdf5()
X = random_array(np.dtype("<f4"), (20, 6, 4))


def opened(path: Path, *fields: str, axis: str = "auto") -> Hdf5Source:
    specs = tuple(map(FieldSpec.parse, fields))
    source = HDF5.open(path, OpenOptions(fields=specs, sample_axis=axis), None)  # type: ignore[arg-type]
    assert isinstance(source, Hdf5Source)
    return source


LAYOUTS = {
    "contiguous": ({}, "contiguous", "one read of 96 B"),
    "chunked": ({"chunks": (3, 6, 4)}, "chunked (3, 6, 4)", "one read of 96 B"),
    "tiled": ({"chunks": (3, 2, 4)}, "chunked (3, 2, 4)", "3 chunks of 96 B, each is read: 3x"),
    "gzip": (
        {"chunks": (5, 6, 4), "compression": "gzip"},
        "chunked (5, 6, 4)",
        "5x the bytes",
    ),
    "shuffled": (
        {"chunks": (5, 6, 4), "compression": 1, "shuffle": True, "fletcher32": True},
        "chunked (5, 6, 4)",
        "decoded",
    ),
    "lzf": ({"chunks": (4, 6, 4), "compression": "lzf"}, "chunked (4, 6, 4)", "decoded"),
    "resizable": ({"chunks": (3, 6, 4), "maxshape": (None, 6, 4)}, "chunked (3, 6, 4)", "one read"),
    "blosc": ({"chunks": (4, 6, 4), **hdf5plugin.Blosc()}, "chunked (4, 6, 4)", "decoded"),
    "zstd": ({"chunks": (4, 6, 4), **hdf5plugin.Zstd()}, "chunked (4, 6, 4)", "decoded"),
}


@pytest.mark.parametrize("userblock", [0, 1024])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path: Path, name: str, userblock: int) -> None:
    options, storage, access = LAYOUTS[name]
    with h5py.File(tmp_path / "a", "w", userblock_size=userblock) as file:
        file.create_dataset("g/x", data=X, **options)
    assert HDF5.recognises(tmp_path / "a")
    with opened(tmp_path / "a") as source:
        for start, stop in ((0, 20), (0, 1), (7, 18), (20, 20), (19, 20)):
            assert raw(source.read(start, stop, Arena())["g/x"]) == raw(X[start:stop])
        layout = source.layouts()["g/x"]
        assert layout.storage == storage
        assert access in layout.access
        assert (layout.codecs == ()) == (name in ("contiguous", "chunked", "tiled", "resizable"))


def test_other_storage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other", "w") as file:
        file["x"] = X
    with h5py.File(tmp_path / "a", "w", userblock_size=512) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        element, space = h5py.h5t.py_create(X.dtype), h5py.h5s.create_simple(X.shape)
        compact = h5py.Dataset(h5py.h5d.create(file.id, b"compact", element, space, plist))
        compact[...] = X
        file.create_dataset("never", shape=X.shape, dtype="f4", fillvalue=3)
        file.create_dataset("holes", shape=X.shape, dtype="f4", chunks=(3, 6, 4), fillvalue=3)
        file["holes"][7] = X[7]
        file.create_dataset(
            "external", data=X, external=[(str(tmp_path / "blob"), 0, h5py.h5f.UNLIMITED)]
        )
        layout = h5py.VirtualLayout(X.shape, "f4")
        layout[...] = h5py.VirtualSource(tmp_path / "other", "x", X.shape)
        file.create_virtual_dataset("virtual", layout)
    threes = np.full(X.shape, 3, "f4")
    holes = threes.copy()
    holes[7] = X[7]
    with opened(tmp_path / "a") as source:
        batch = source.read(2, 19)
        for name, expected in {
            "compact": X,
            "external": X,
            "virtual": X,
            "never": threes,
            "holes": holes,
        }.items():
            assert raw(batch[name]) == raw(expected[2:19]), name
        layouts = source.layouts()
        assert [layouts[n].storage for n in ("compact", "external", "virtual", "never")] == [
            "compact",
            "external",
            "virtual",
            "contiguous",
        ]
        assert "one read of 96 B, by the HDF5 library" in layouts["never"].access


def test_types(tmp_path: Path) -> None:
    padded = np.dtype(
        {"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [2, 8], "itemsize": 24}
    )
    arrays = {
        name: random_array(np.dtype(d), (5, 2))
        for name, d in {"f2": "<f2", "bf8": ">f8", "c": ">c8", "b": "?", "s": "S7"}.items()
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


def test_the_cost_of_a_sample_is_at_most_the_dataset(tmp_path: Path) -> None:
    gz = {"compression": "gzip"}
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("one", data=X, chunks=(20, 6, 4), **gz)
        file.create_dataset("room", data=X, chunks=(64, 6, 4), maxshape=(None, 6, 4), **gz)
        file.create_dataset("two", data=X, chunks=(16, 3, 4), **gz)
        file.create_dataset("wide", data=X[:, 0, 0], chunks=(1000,), maxshape=(None,), **gz)
        index = np.zeros(2, [("first", "<i8"), ("count", "<i8")])
        index["first"], index["count"] = [0, 1], [1, 39]
        file["index"] = index
        file.create_dataset("rows", data=np.arange(40), chunks=(39,), **gz)
    with opened(tmp_path / "a", "one", "room", "two", "wide") as source:
        access = {name: layout.access for name, layout in source.layouts().items()}
    assert access["one"] == "the only chunk (1.92 kB) is read and decoded for one sample"
    assert access["room"] == "the only chunk (6.14 kB) is read and decoded for one sample"
    assert access["wide"] == "the only chunk (4 kB) is read and decoded for one sample"
    assert access["two"].startswith("a sample lies in 2 chunks of 768 B, each is read and decoded")
    assert access["two"].endswith(": 16x the bytes that are wanted")
    with opened(tmp_path / "a", "rows@index") as source:
        access = source.layouts()["rows"].access
    assert "in about 1.5 chunks of 312 B" in access
    assert ": 2.9x the bytes that are wanted" in access  # both chunks for 39 rows, one for one row


def test_what_is_not_kept_is_noted(tmp_path: Path) -> None:
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
        assert "attributes of groups climate, other are not kept" in source.notes
        assert "enum names of kind, seq, struct are not kept" in source.notes
        assert source.schema["climate/data"].attrs == {"kept": 1}
    with opened(tmp_path / "a", "d=climate/data", "k=kind") as source:
        assert source.notes == (
            "attributes of group climate are not kept",
            "enum names of k are not kept",
        )
    with opened(tmp_path / "a", "flag", "text") as source:
        assert source.notes == ()


def test_variable_length(tmp_path: Path) -> None:
    texts = ["", "a", "größer", "日本", "\U0001f600"]
    numbers = [np.arange(n, dtype=">i2") for n in (0, 3, 1, 0, 5)]
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("t", data=texts, dtype=h5py.string_dtype())
        file.create_dataset(
            "ascii", data=[b"x", b"\xff", b"", b"a b", b"c"], dtype=h5py.string_dtype("ascii")
        )
        v = file.create_dataset("n", (5,), h5py.vlen_dtype(np.dtype(">i2")))
        for i, n in enumerate(numbers):
            v[i] = n
        file.create_dataset("t2", data=[texts], dtype=h5py.string_dtype())
        file["x"] = np.arange(5)
    with opened(tmp_path / "a") as source:
        assert [source[i]["t"] for i in range(5)] == texts
        assert source[1]["ascii"].encode("utf-8", "surrogateescape") == b"\xff"
        assert source.schema["n"].shape == (None,)
        assert source.schema["n"].dtype == np.dtype(">i2")
        for i, n in enumerate(numbers):
            assert raw(source[i]["n"]) == raw(n)
        expected = [
            sum(
                np.asarray(v).nbytes
                if not isinstance(v, str)
                else len(v.encode("utf-8", "surrogateescape"))
                for v in source[i].values()
            )
            for i in range(5)
        ]
        sizes = source.sizes(0, 5)
        assert sizes is not None
        assert sizes.tolist() == expected
        assert source.read(2, 2)["t"].lengths.tolist() == []


def test_one_sample_per_file(tmp_path: Path) -> None:
    for names in (("climate/data", "climate/labels_0"), ("x", "y")):
        shapes = ((8, 12, 3), (8, 12)) if "/" in names[0] else ((8, 8, 8, 4), (4,))
        for options in ({}, {"compression": "gzip"}):
            with h5py.File(tmp_path / "a", "w") as file:
                arrays = [random_array(np.dtype("<f4"), s) for s in shapes]
                for name, array in zip(names, arrays, strict=True):
                    file.create_dataset(name, data=array, **options)
                if names[0] == "x":
                    file["scalar"] = 3.5
                    file["text"] = "words"
            with opened(tmp_path / "a") as source:
                assert len(source) == 1
                assert "the file is taken as one sample" in source.notes[0]
                for name, array in zip(names, arrays, strict=True):
                    assert source.schema[name].shape == array.shape
                    assert raw(source[0][name]) == raw(array)
                if names[0] == "x":
                    assert source[0]["scalar"] == 3.5
                    assert source[0]["text"] == "words"
    with opened(tmp_path / "a", "x") as source:
        assert len(source) == 8
    with opened(tmp_path / "a", "x", axis="none") as source:
        assert len(source) == 1
    with opened(tmp_path / "a", axis="first") as source:
        assert len(source) == 8


def test_links_and_cycles_end(tmp_path: Path) -> None:
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
    with pytest.raises(SchemaError, match="link to the file"):
        opened(tmp_path / "a", "outside")


def test_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, dsprep.formats.hdf5 as h; from pathlib import Path; "
        "h.Hdf5().recognises(Path(sys.executable)); "
        "assert not {'h5py', 'zarr', 'numcodecs', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_dataset_that_cannot_be_a_field_leaves_the_others(tmp_path: Path) -> None:
    """Whatever its size, and whether or not it has as many rows."""
    text = h5py.string_dtype()
    for shape in ((10, 2), (1000, 5)):
        with h5py.File(tmp_path / "a", "w") as file:
            file["x"], file["y"] = np.arange(10), np.arange(10)
            file.create_dataset("t", data=np.full(shape, "a", object), dtype=text)
            quad = h5py.h5t.IEEE_F64LE.copy()
            quad.set_size(16)
            quad.set_precision(128)
            quad.set_fields(127, 112, 15, 0, 112)
            quad.set_ebias(16383)
            h5py.h5d.create(file.id, b"quad", quad, h5py.h5s.create_simple((10,)))
        with opened(tmp_path / "a") as source:
            assert source.schema.names == ("x", "y")
            notes = "\n".join(source.notes)
            assert "left out t: sequences of variable length" in notes
            assert "left out quad: its type is unknown to numpy" in notes


def test_the_reason_is_named_where_nothing_can_be_a_field(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["e"] = h5py.Empty("f4")
        file["link"] = h5py.SoftLink("/nowhere")
    with pytest.raises(FormatError, match=r"e: it holds no data, link: it is a link to /nowhere"):
        opened(tmp_path / "a")
