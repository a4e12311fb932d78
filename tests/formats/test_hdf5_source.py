"""HDF5 files of other programs: h5py writes, dsprep must see the same values."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from support import NESTED, STRUCT, random_array, random_batch, raw, schemas, write_batch

from dsprep.errors import DsprepError, FormatError, MissingExtra, SchemaError, UsageError
from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.hdf5.source import Hdf5Source
from dsprep.schema import Arena, FieldSpec, Ragged, encode_dtype

HDF5 = Hdf5()
X = random_array(np.dtype("<f4"), (20, 6, 4))
EXTENT = np.dtype([("first", "<u8"), ("N", "<u4"), ("ID", "<u4")])
VOXEL = STRUCT


def opened(path: Path, *fields: str, axis: str = "auto") -> Hdf5Source:
    specs = tuple(map(FieldSpec.parse, fields))
    source = HDF5.open(path, OpenOptions(fields=specs, sample_axis=axis), None)  # type: ignore[arg-type]
    assert isinstance(source, Hdf5Source)
    return source


LAYOUTS = {
    "contiguous": ({}, "contiguous", "one read of 96 B"),
    "chunked": ({"chunks": (3, 6, 4)}, "chunked (3, 6, 4)", "one read of 96 B"),
    "tiled": ({"chunks": (3, 2, 4)}, "chunked (3, 2, 4)", "by the HDF5 library"),
    "gzip": ({"chunks": (5, 6, 4), "compression": "gzip"}, "chunked (5, 6, 4)", "5x more bytes"),
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
        assert source.sizes(0, 5) is None
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


# --- ragged ----------------------------------------------------------------------------------


def larcv(path: Path, events: int = 5, seed: int = 0, planes: int = 3) -> None:
    """Write a file with the structure of larcv3: two and three levels of tables."""
    rng = np.random.default_rng(seed)

    def table(counts: np.ndarray, *, ids: bool = True) -> np.ndarray:
        out = np.zeros(
            len(counts),
            EXTENT
            if ids
            else np.dtype(
                {
                    "names": ["first", "N"],
                    "formats": ["<u8", "<u4"],
                    "offsets": [0, 8],
                    "itemsize": 16,
                }
            ),
        )
        out["N"] = counts
        out["first"] = np.cumsum(counts) - counts
        return out

    with h5py.File(path, "w") as file:
        gz = {"compression": "gzip", "maxshape": (None,)}
        file.create_dataset(
            "Events/event_id", data=np.zeros(events, [("run", "<i8"), ("event", "<i8")]), **gz
        )
        g = file.create_group("Data/sparse_group")
        g.create_dataset("extents", data=table(np.full(events, planes), ids=False), **gz)
        voxels = rng.integers(0, 9, events * planes)
        g.create_dataset("voxel_extents", data=table(voxels), **gz)
        g.create_dataset("image_meta", data=np.arange(events * planes) * 1.5, **gz)
        g.create_dataset("voxels", data=random_array(VOXEL, (int(voxels.sum()),)), **gz)
        c = file.create_group("Data/cluster_group")
        c.create_dataset("extents", data=table(np.full(events, planes), ids=False), **gz)
        clusters = rng.integers(0, 5, events * planes)
        c.create_dataset("projection_extents", data=table(clusters), **gz)
        sizes = rng.integers(0, 4, int(clusters.sum()))
        c.create_dataset("cluster_extents", data=table(sizes), **gz)
        c.create_dataset("voxels", data=random_array(VOXEL, (int(sizes.sum()),), 5), **gz)
        p = file.create_group("Data/particle_group")
        particles = rng.integers(1, 7, events)
        p.create_dataset("extents", data=table(particles, ids=False), **gz)
        p.create_dataset("particles", data=random_array(NESTED, (int(particles.sum()),)), **gz)


@pytest.mark.parametrize(("events", "seed"), [(5, 0), (5, 1), (12, 2), (1, 3), (40, 4)])
def test_tables_over_several_levels(tmp_path: Path, events: int, seed: int) -> None:
    larcv(tmp_path / "a", events, seed)
    with opened(tmp_path / "a") as source, h5py.File(tmp_path / "a") as file:
        assert len(source) == events
        assert set(source.schema.names) == {
            "Events/event_id",
            "Data/sparse_group/voxel_extents",
            "Data/sparse_group/image_meta",
            "Data/sparse_group/voxels",
            "Data/cluster_group/projection_extents",
            "Data/cluster_group/cluster_extents",
            "Data/cluster_group/voxels",
            "Data/particle_group/particles",
        }
        whole = source.read(0, events, Arena())
        for i in range(events):
            sample = source[i]
            for name, values in sample.items():
                assert raw(values) == raw(whole[name][i])
            g = file["Data/cluster_group"]
            first, n = g["extents"][i]
            planes = g["projection_extents"][first : first + n]
            begin, end = int(planes["first"][0]), int(planes["first"][-1] + planes["N"][-1])
            clusters = g["cluster_extents"][begin:end]
            found = sample["Data/cluster_group/cluster_extents"]
            assert found["N"].tolist() == clusters["N"].tolist()
            total = 0
            for row, cluster in zip(found, clusters, strict=True):
                a, b = int(row["first"]), int(row["first"] + row["N"])
                assert a == total  # counts from the sample's own first voxel
                total = b
                c, d = int(cluster["first"]), int(cluster["first"] + cluster["N"])
                assert raw(sample["Data/cluster_group/voxels"][a:b]) == raw(g["voxels"][c:d])
            assert len(sample["Data/cluster_group/voxels"]) == total
            assert sample["Data/sparse_group/image_meta"].tolist() == [
                (3 * i + k) * 1.5 for k in range(3)
            ]
        sizes = source.sizes(0, events)
        assert sizes is not None
        assert sizes.tolist() == [
            sum(np.asarray(v).nbytes for v in source[i].values()) for i in range(events)
        ]
        assert (
            "rows by Data/sparse_group/extents and"
            in source.layouts()["Data/sparse_group/voxels"].storage
        )


def test_explicit_tables(tmp_path: Path) -> None:
    larcv(tmp_path / "a")
    s = "Data/sparse_group"
    with opened(
        tmp_path / "a", f"v={s}/voxels@{s}/extents@{s}/voxel_extents", "e=Events/event_id"
    ) as source:
        assert source.schema.names == ("v", "e")
        with opened(tmp_path / "a") as auto:
            for i in range(5):
                assert raw(source[i]["v"]) == raw(auto[i][f"{s}/voxels"])
    with h5py.File(tmp_path / "b", "w") as file:
        file["values"] = np.arange(10)
        file["where/from"], file["where/rows"] = [0, 4, 4], [4, 0, 6]
        file["labels"] = [1, 2, 3]
    with opened(tmp_path / "b", "x=values@where/from,where/rows", "labels") as source:
        assert [len(source[i]["x"]) for i in range(3)] == [4, 0, 6]
    for bad, error in (
        ("x=values@where/from", UsageError),
        ("x=values@nothing", SchemaError),
        ("x=nothing@where/from,where/rows", SchemaError),
        ("x=labels@where/from,where/rows", FormatError),
    ):
        with pytest.raises(error), opened(tmp_path / "b", bad) as source:
            source.read(0, len(source))


@pytest.mark.parametrize(
    "names",
    [
        ("first", "count", "values"),
        ("start", "len", "data"),
        ("x_start", "x_len", "x_data"),
        ("offsets", "lengths", "v"),
    ],
)
def test_pairs_of_datasets(tmp_path: Path, names: tuple[str, str, str]) -> None:
    counts = np.array([2, 0, 5, 1])
    with h5py.File(tmp_path / "a", "w") as file:
        file[f"g/{names[0]}"], file[f"g/{names[1]}"] = np.cumsum(counts) - counts, counts
        file[f"g/{names[2]}"] = random_array(np.dtype("<f8"), (8, 3))
        file["label"] = np.arange(4)
    with opened(tmp_path / "a") as source, h5py.File(tmp_path / "a") as file:
        assert source.schema.names == (f"g/{names[2]}", "label")
        ragged = source.read(0, 4)[f"g/{names[2]}"]
        assert isinstance(ragged, Ragged)
        assert ragged.lengths.tolist() == counts.tolist()
        assert raw(ragged.values) == raw(file[f"g/{names[2]}"][()])


def test_an_index_with_gaps_is_not_used(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["g/first"], file["g/count"] = [0, 3, 5], [2, 2, 3]
        file["g/values"] = np.arange(8)
        file["label"] = np.arange(3)
    with opened(tmp_path / "a") as source:
        assert set(source.schema.names) == {"g/first", "g/count", "label"}
        assert any("g/values" in n and "gaps" in n for n in source.notes)


def test_own_files_guess_nothing(tmp_path: Path) -> None:
    """Fields that look like an index, or like one snapshot per file, are what they were."""
    from dsprep.schema import Field, Schema

    i8 = np.dtype("<i8")
    schema = Schema((Field("first", i8), Field("count", i8), Field("values", i8)))
    batch = {"first": np.arange(4), "count": np.ones(4, "<i8"), "values": np.arange(4)}
    write_batch(HDF5, tmp_path / "a", schema, batch)
    with opened(tmp_path / "a") as source:
        assert source.schema == schema
    schema = Schema((Field("climate/data", i8, (2,)), Field("climate/labels_0", i8)))
    write_batch(HDF5, tmp_path / "b", schema, random_batch(schema, 3))
    with opened(tmp_path / "b") as source:
        assert len(source) == 3


# --- errors ----------------------------------------------------------------------------------


def test_fields_that_disagree(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"], file["y"], file["stats"] = np.zeros((9, 2)), np.zeros(9), np.zeros(3)
    with opened(tmp_path / "a") as source:
        assert source.schema.names == ("x", "y")
        assert "stats" in source.notes[0]
    with pytest.raises(SchemaError, match=r"a: field stats .*expected 9, found 3"):
        opened(tmp_path / "a", "x", "y", "stats")
    with pytest.raises(SchemaError, match=r"no field z .*one of"):
        opened(tmp_path / "a", "z")
    with pytest.raises(UsageError, match="already has a type"):
        opened(tmp_path / "a", "x:int8")


def test_empty_files_and_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no HDF5 " * 999)
    with h5py.File(tmp_path / "nothing", "w"):
        pass
    for name in ("empty", "text"):
        assert not HDF5.recognises(tmp_path / name)
    assert not HDF5.recognises(tmp_path)
    assert not HDF5.recognises(tmp_path / "missing")
    for name in ("empty", "text", "nothing"):
        with pytest.raises(FormatError):
            opened(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "missing")


def test_a_missing_filter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 6, 4), **hdf5plugin.Zstd())
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda code: code != 32015)
    with pytest.raises(MissingExtra, match=r"32015.*dsprep\[hdf5plugin\]"):
        opened(tmp_path / "a")


@pytest.mark.parametrize("text", ['"O"', '"<f8"', "{}", "[", "[" * 5000, '{"base": "<f4"}', "3"])
def test_stand_ins_that_do_not_fit(tmp_path: Path, text: str) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"] = np.zeros((3, 2), "u2")
        file["x"].attrs["dsprep_dtype"] = text
    with pytest.raises(FormatError, match="dsprep_dtype"):
        opened(tmp_path / "a")


def test_text_that_is_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"] = np.full((3, 2), 0x110000, "u4")
        file["x"].attrs["dsprep_dtype"] = '"<U2"'
    with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="no characters"):
        source.read(0, 3)


def test_hostile_sizes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", (2, 1 << 50), "f4", chunks=(1, 1024))
    with pytest.raises(FormatError, match="cannot be right"):
        opened(tmp_path / "a")
    with h5py.File(tmp_path / "b", "w") as file:
        g = file.create_group("r")
        g.attrs["dsprep_kind"] = "array"
        g["values"], g["first"], g["count"] = (
            np.arange(9),
            np.array([0, 2**62]),
            np.array([2**62, 9]),
        )
        file["y"] = [1, 2]
    with opened(tmp_path / "b") as source, pytest.raises(FormatError, match="index does not fit"):
        source.read(0, 2)
    with h5py.File(tmp_path / "b", "r+") as file:
        del file["r/count"]
    with pytest.raises(FormatError, match="lacks its dataset count"):
        opened(tmp_path / "b")


def read_whole(path: Path) -> None:
    with opened(path) as source:
        for start in range(0, min(len(source), 40), 8):
            source.read(start, min(start + 8, len(source)))
        source.layouts()
        source.sizes(0, min(len(source), 40))


def damaged_files(tmp_path: Path) -> list[bytes]:
    larcv(tmp_path / "larcv")
    mixed = dict(schemas())["mixed"]
    write_batch(HDF5, tmp_path / "plain", mixed, random_batch(mixed, 9))
    options = WriteOptions(compress=Compression("gzip"))
    write_batch(HDF5, tmp_path / "gzip", mixed, random_batch(mixed, 9), options)
    return [(tmp_path / n).read_bytes() for n in ("larcv", "plain", "gzip")]


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    for data in damaged_files(tmp_path):
        for size in range(0, len(data) - 1, max(1, len(data) // 60)):
            (tmp_path / "cut").write_bytes(data[:size])
            with pytest.raises(DsprepError):
                read_whole(tmp_path / "cut")


FLIPS = """
import sys, random
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from dsprep.errors import DsprepError
from test_hdf5_source import read_whole
path, seed = Path(sys.argv[1]), int(sys.argv[2])
data, rng = path.read_bytes(), random.Random(seed)
for _ in range(80):
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 4))):
        broken[rng.randrange(min(len(broken), 9000))] = rng.randrange(256)
    path.with_suffix(".broken").write_bytes(broken)
    try:
        read_whole(path.with_suffix(".broken"))
    except DsprepError:
        pass
"""


def test_flipped_bytes_never_escape(tmp_path: Path) -> None:
    """In a process of its own, so that a crash of the library would show as such."""
    here = Path(__file__).parent
    damaged_files(tmp_path)
    for seed, name in enumerate(("larcv", "plain", "gzip")):
        arguments = [tmp_path / name, seed, here, here.parent]
        done = subprocess.run(
            [sys.executable, "-c", FLIPS, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]


# --- the rest of the contract ----------------------------------------------------------------


def test_threads_read_side_by_side(tmp_path: Path) -> None:
    larcv(tmp_path / "a", 40)
    wrong: list[object] = []
    with opened(tmp_path / "a") as source:
        whole = source.read(0, 40)

        def work(k: int) -> None:
            arena = Arena()
            for start in range(k, 36, 4):
                for name, column in source.read(start, start + 3, arena).items():
                    if raw(column.values if isinstance(column, Ragged) else column) != raw(
                        whole[name][start : start + 3].values
                        if isinstance(column, Ragged)
                        else whole[name][start : start + 3]
                    ):
                        wrong.append((start, name))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    # Names that count rows are rebased per sample, so they too are the same in any range.
    assert wrong == []


@pytest.mark.parametrize("kind", ["larcv", "mixed", "types", "whole"])
def test_the_loading_code_runs(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.h5"
    if kind == "larcv":
        larcv(path)
    elif kind == "whole":
        with h5py.File(path, "w") as file:
            file["x"], file["y"], file["t"] = np.zeros((3, 4)), np.zeros(2), "text"
    else:
        from dsprep.schema import Field, Schema

        schema = dict(schemas())["mixed"]
        if kind == "types":
            import ml_dtypes

            odd = np.dtype([("a", ml_dtypes.bfloat16), ("b", "<U2", (2,))])
            schema = Schema(
                (
                    Field("x", odd, (2,)),
                    Field("u", np.dtype("<U3"), (None,)),
                    Field("h", np.dtype(ml_dtypes.bfloat16)),
                )
            )
            batch = {
                "x": np.zeros((2, 2), odd),
                "u": Ragged.pack([["a"], ["b", "c"]], schema["u"]),
                "h": np.zeros(2, ml_dtypes.bfloat16),
            }
            write_batch(HDF5, path, schema, batch)
        else:
            write_batch(
                HDF5,
                path,
                schema,
                random_batch(schema, 4),
                WriteOptions(compress=Compression("zstd")),
            )
    with opened(path) as source:
        code, sample = source.loading_code(), source[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(sample)
    for line, (name, value) in zip(lines, sample.items(), strict=True):
        array = np.asarray(value)
        assert line.startswith(f"{name} ")
        if array.dtype.kind not in "SUO":
            assert line == f"{name} {array.dtype} {array.shape}"
    assert encode_dtype(np.dtype("<f4")) == "<f4"


def test_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, dsprep.formats.hdf5 as h; from pathlib import Path; "
        "h.Hdf5().recognises(Path(sys.executable)); "
        "assert not {'h5py', 'zarr', 'numcodecs', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
