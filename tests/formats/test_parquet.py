"""Parquet, as pyarrow, Hugging Face and Spark lay it out: values as pyarrow gives them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import numpy as np
import pytest
from format_contract import ReadOnlyContract
from support import assert_same_batch, cli, fails, reading

import dsprep
from dsprep import formats
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError, UnsupportedError, UsageError
from dsprep.formats.options import OpenOptions

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def ragged(column):
    inner = column.values.shape[1:]
    items = pa.array(column.values.reshape(-1))
    for n in reversed(inner):
        items = pa.FixedSizeListArray.from_arrays(items, n)
    return pa.ListArray.from_arrays(pa.array(column.offsets.astype("i4")), items)


def table_of(batch, schema):
    columns = {}
    for f in schema:
        column = batch[f.name]
        if f.kind != "array":
            columns[f.name] = pa.array(
                list(column), pa.string() if f.kind == "str" else pa.binary()
            )
        elif f.ragged:
            columns[f.name] = ragged(column)
        else:
            items = pa.array(np.ascontiguousarray(column).reshape(-1))
            for n in reversed(f.shape):
                items = pa.FixedSizeListArray.from_arrays(items, n)
            columns[f.name] = items
    return pa.table(columns)


class TestParquet(ReadOnlyContract):
    format, located, simple = "parquet", (False, False), False
    schema = Schema(
        (
            Field("x", np.dtype("<f4"), (5, 3)),
            Field("y", np.dtype("<i8")),
            Field("r", np.dtype("<u2"), (None, 2)),
            Field.opaque("b"),
            Field.opaque("s", "str"),
        )
    )

    def write(self, path, batch):
        pq.write_table(table_of(batch, self.schema), path, row_group_size=10)


def written(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


TYPES = [
    *((pa.from_numpy_dtype(d), np.dtype(d)) for d in ("i1", "u8", "f2", "f4", "f8", "?")),
    *((pa.timestamp(u), np.dtype(f"M8[{u}]")) for u in ("ms", "us", "ns")),
    (pa.timestamp("us", "Europe/Paris"), np.dtype("M8[us]")),
    (pa.date32(), np.dtype("M8[D]")),
    (pa.time32("ms"), np.dtype("m8[ms]")),
    (pa.time64("ns"), np.dtype("m8[ns]")),
    (pa.duration("us"), np.dtype("m8[us]")),
    (pa.binary(3), np.dtype("V3")),
]


@pytest.mark.parametrize(("of", "dtype"), TYPES, ids=lambda t: str(t))
def test_every_type(tmp_path, of, dtype):
    """Bit for bit, alone, in lists and in lists of a fixed size."""
    rng = np.random.default_rng(1)
    width = 1 if of == pa.bool_() else of.bit_width // 8
    count = 12
    data = rng.integers(0, 256, (count, width), np.uint8)
    if of == pa.bool_():
        values = pa.array(data[:, 0] % 2 == 1)
        expected = data[:, 0] % 2 == 1
    else:
        values = pa.Array.from_buffers(of, count, [None, pa.py_buffer(data.tobytes())])
        raw = data.view("V3" if width == 3 else f"<i{width}").reshape(-1)
        expected = raw.astype("<i8") if dtype.kind in "mM" and width == 4 else raw
    if of == pa.time64("ns") or of == pa.time32("ms"):
        values = pa.array(np.arange(count), pa.int64()).cast(pa.int32() if width == 4 else "int64")
        values, expected = values.view(of), np.arange(count)
    nested = pa.ListArray.from_arrays(pa.array([0, 2, 2, 5, 7, 12], pa.int32()), values)
    boxes = pa.FixedSizeListArray.from_arrays(values, 3)
    written(tmp_path / "a.parquet", x=values)
    written(tmp_path / "b.parquet", x=nested)
    written(tmp_path / "c.parquet", x=boxes)
    with dsprep.open(tmp_path / "a.parquet") as source:
        assert source.schema["x"] == Field("x", dtype)
        assert source[:]["x"].tobytes() == expected.tobytes()
        assert source[3:7]["x"].tobytes() == expected[3:7].tobytes()
    with dsprep.open(tmp_path / "b.parquet") as source:
        assert source.schema["x"] == Field("x", dtype, (None,))
        assert source[1:4]["x"].values.tobytes() == expected[2:7].tobytes()
        assert source[1:4]["x"].lengths.tolist() == [0, 3, 2]
    with dsprep.open(tmp_path / "c.parquet") as source:
        assert source.schema["x"] == Field("x", dtype, (3,))
        assert source[2]["x"].tobytes() == expected[6:9].tobytes()


def test_text(tmp_path):
    words = ["", "ä", "b" * 40] * 5
    types = {"large_string", "string", "large_binary", "binary", "string_view", "binary_view"}
    for of in sorted(types):
        plain = pa.array(words) if "string" in of else pa.array([w.encode() for w in words])
        made = getattr(pa, of)()
        for array in (plain.cast(made), plain.dictionary_encode()):
            written(tmp_path / "a.parquet", x=array)
            with dsprep.open(tmp_path / "a.parquet") as source:
                assert list(source[:]["x"]) == plain.to_pylist()
                assert source[7]["x"] == plain[7].as_py()


def test_what_is_not_a_field_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    odd = {
        "d": pa.array([Decimal("1.50"), Decimal("-2.25"), None]),
        "lll": pa.array([[[["a"], []]], [], None]),
        "bb": pa.array([[[b"\xff"]], [[b"", None]], [[]]]),
    }
    written(path, x=pa.array([1, 2, 3]), **odd, n=pa.array([None] * 3))
    with dsprep.open(path) as source:
        assert source.schema.names == ("x",)
        assert [n.split()[2] for n in source.notes] == ["d:", "lll:", "bb:", "n:"]
    for name in odd:
        with pytest.raises(UnsupportedError, match=f"column {name} is not a field.*dsprep.write"):
            dsprep.open(path, reading(name))
    written(path, d=odd["d"])
    with pytest.raises(UnsupportedError, match=r"no column is a field.*decimal.*dsprep.write"):
        dsprep.open(path)


def test_nulls(tmp_path):
    """Known from the footer where it counts them, and met while reading where it does not."""
    path = tmp_path / "a.parquet"
    for values in (pa.array([1, None, 3] * 9), pa.array(["a", None] * 9)):
        for statistics in (True, False):
            other = pa.array(range(len(values)))
            table = pa.table({"x": values, "y": other})
            pq.write_table(table, path, write_statistics=statistics, row_group_size=12)
            with pytest.raises(FormatError, match=r"row group [01], column x: there are nulls"):
                dsprep.open(path)[:]
            with dsprep.open(path, reading("y")) as source:
                assert source[:]["y"].tolist() == other.to_pylist()
    for values in ([[1], None], [[1, None], []], [{"a": None}, {"a": 2}], [None, {"a": 2}]):
        written(path, x=pa.array(values))
        with pytest.raises(FormatError, match="nulls"), dsprep.open(path) as source:
            source[:]


@pytest.fixture
def parts(tmp_path):
    """Parts with nulls in different columns; `w` has none in the first one but nulls."""
    root = tmp_path / "parts"
    root.mkdir()
    written(root / "a.parquet", x=[1, 2, 3], y=["a", None, "c"], z=[[1], [], None], w=[None] * 3)
    written(root / "b.parquet", x=[4, None], y=["d", "e"], z=[[2, None], [3]], w=[0.5, 1.5])
    pq.write_table(
        pa.table({"x": [6, 7], "y": ["", "g"], "z": [[], [4, 5]], "w": [2.5, None]}),
        root / "c.parquet",
        write_statistics=False,
    )
    return root


def test_columns_with_nulls_are_named_at_once(parts):
    fails(lambda: dsprep.open(parts), FormatError, "nulls in y (1)", "--nulls drop-rows")
    with (
        dsprep.open(parts, reading("z")) as source,
        pytest.raises(FormatError, match=r"a.parquet, row group 0, column z.*--nulls drop-rows"),
    ):
        source[:]
    (parts / "a.parquet").unlink()
    with pytest.raises(FormatError, match=r"nulls in x \(1\).*name the others: --field y$"):
        dsprep.open(parts, reading("x", "y"))
    for advice in (["--field", "x", "--nulls", "drop-rows"], ["--field", "y"]):
        cli("inspect", parts, *advice)


@pytest.mark.parametrize("executor", [None, "processes"])
def test_rows_with_nulls_are_dropped(parts, tmp_path, executor):
    with pytest.raises(SchemaError, match="--field x"):  # of one file `w` has nothing but nulls
        dsprep.open(parts, reading(nulls="drop-rows"))
    with dsprep.open(parts, reading("x", "y", "z", nulls="drop-rows")) as source:
        assert source[:]["x"].tolist() == [1, 6, 7]
        assert source.dropped == 4
        assert any("rows with nulls in y" in n for n in source.notes)
        assert source.part(1, 3)[0]()[:]["x"].tolist() == [6, 7]
    with dsprep.open(parts / "c.parquet", reading("n=x", "w", nulls="drop-rows")) as source:
        assert (source[:]["n"].tolist(), source.dropped) == ([6], 1)
    with pytest.raises(FormatError, match=r"w \(3\)"):
        dsprep.open(parts / "a.parquet", reading("w", nulls="drop-rows"))
    words = ["convert", parts, tmp_path / "a.h5", "--nulls", "drop-rows", "-f", "x", "-f", "z"]
    words += ["--executor", executor] if executor else []
    assert "left out 3 of 7 samples" in cli(*words).said
    with dsprep.open(tmp_path / "a.h5") as source:
        assert source[:]["x"].tolist() == [1, 2, 6, 7]
        assert [z.tolist() for z in source[:]["z"]] == [[1], [], [], [4, 5]]


NESTED = {  # the column, and what its fields are of three rows, of which the third has a null
    "list": ([[1, 2], [], [None]], {"list": [[1, 2], []]}),
    "fixed": (
        pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2)),
        {"fixed": [[1, 2], [3, 4]]},
    ),
    "words": (
        [["ab", "", "c"], [], ["d", None]],
        {"words": [b"abc", b""], "words.lengths": [[2, 0, 1], []]},
    ),
    "lists": (
        [[[1], [], [2, 3]], [], [[4, None]]],
        {"lists": [[1, 2, 3], []], "lists.lengths": [[1, 0, 2], []]},
    ),
    "boxes": (
        [[{"x": 0.5, "n": {"s": "a"}}, {"x": 1.5, "n": {"s": "bc"}}], [], [{"x": 2.0, "n": None}]],
        {
            "boxes.x": [[0.5, 1.5], []],
            "boxes.n.s": [b"abc", b""],
            "boxes.n.s.lengths": [[1, 2], []],
        },
    ),
    "map": (
        pa.array([[("k", 1), ("ll", 2)], [], [("m", None)]], pa.map_(pa.string(), pa.int64())),
        {"map.key": [b"kll", b""], "map.key.lengths": [[1, 2], []], "map.value": [[1, 2], []]},
    ),
    "struct": (
        [{"a": 1, "b": [5]}, {"a": 2, "b": []}, {"a": None, "b": [6]}],
        {"struct.a": [1, 2], "struct.b": [[5], []]},
    ),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("statistics", [True, False])
def test_nested_columns_and_their_nulls(tmp_path, name, statistics):
    """Every kind of nesting, over several row groups, and in parts of them."""
    column, fields = NESTED[name]
    column = column if isinstance(column, pa.Array) else pa.array(column)
    column = pa.concat_arrays([column] * 4)
    table = pa.table({name: column, "id": pa.array(range(12))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5, write_statistics=statistics)
    with dsprep.open(tmp_path / "a.parquet", reading(nulls="drop-rows")) as source:
        assert source.schema.names == (*fields, "id")
        assert (len(source), source.dropped) == (8, 4)
        for start, stop in ((0, 8), (3, 7)):
            batch = source[start:stop]
            for field, values in fields.items():
                found = [v if isinstance(v, bytes) else v.tolist() for v in batch[field]]
                assert found == (values * 4)[start:stop], field
    with dsprep.open(tmp_path / "a.parquet", reading("id")) as source:
        assert source[:]["id"].tolist() == list(range(12))


def test_the_items_of_lists_have_one_type(tmp_path):
    path = written(tmp_path / "a.parquet", t=[["ab", "c"]], i=[[[1], [2, 3]]])
    for spec in ("t:int32[None]", "t:S2[None]", "t:str", "i:int64[None,1]"):
        fails(lambda: dsprep.open(path, reading(spec)), UsageError, "leave the type out")
    with dsprep.open(path, reading("new=t:bytes")) as source:
        assert source[0]["new"] == b"abc"


def test_tensors(tmp_path):
    path = tmp_path / "a.parquet"
    values = np.arange(48, dtype="f4").reshape(4, 3, 4)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    written(path, x=tensors)
    with dsprep.open(path) as source:
        assert source.schema["x"].shape == (3, 4)
        np.testing.assert_array_equal(source[:]["x"], values)


def test_directories_of_parts(tmp_path):
    """Spark's layout: partitions, a marker, checksums and files without rows."""
    root = tmp_path / "out"
    for year, word in ((2019, "a b"), (2020, "ü"), (2020, "7")):
        folder = root / f"year={year}" / f"word={word.replace(' ', '%20')}"
        folder.mkdir(parents=True)
        x = np.arange(5) + year
        pq.write_table(pa.table({"x": x}), folder / "part-00000-1.c000.snappy.parquet")
        (folder / ".part-00000-1.c000.snappy.parquet.crc").write_bytes(b"crc")
    empty = root / "year=2021" / "word=z"
    empty.mkdir(parents=True)
    pq.write_table(pa.table({"x": pa.array([], "int64")}), empty / "part-00000.parquet")
    (root / "_SUCCESS").touch()
    pq.write_metadata(pa.schema([("x", "int64")]), root / "_common_metadata")
    with dsprep.open(root) as source:
        assert [str(f) for f in source.schema] == ["x: int64", "year: int64", "word: str"]
        batch = source[:]
        assert batch["year"].tolist() == [2019] * 5 + [2020] * 10
        assert list(batch["word"]) == ["a b"] * 5 + ["7"] * 5 + ["ü"] * 5
        assert batch["x"].tolist() == [*range(2019, 2024), *(list(range(2020, 2025)) * 2)]
        assert any("_SUCCESS" in note for note in source.notes)
    dsprep.convert(root, tmp_path / "out.h5")
    with dsprep.open(root) as a, dsprep.open(tmp_path / "out.h5") as b:
        assert dsprep.verify(a, b).same
    (root / "year=2019").rename(root / "year=__HIVE_DEFAULT_PARTITION__")
    fails(lambda: dsprep.open(root), FormatError, "nulls in year (5)", "--field x --field word")
    with dsprep.open(root, OpenOptions(nulls="drop-rows")) as source:
        assert source.schema["year"].dtype == np.int64
        assert source[:]["year"].tolist() == [2020] * 10


def test_many_threads_and_large_row_groups(tmp_path, monkeypatch):
    """A large row group is decoded in steps, never as a whole."""
    path = tmp_path / "a.parquet"
    x = np.random.default_rng(0).integers(0, 1 << 40, (5000, 20))
    batch = {"x": x, "r": Ragged.from_lengths(np.arange(12_500) % 77, np.arange(5000) % 6)}
    schema = Schema((Field("x", np.dtype("<i8"), (20,)), Field("r", np.dtype("<i8"), (None,))))
    batch["r"] = Ragged.from_lengths(np.arange(int(batch["r"].lengths.sum())), np.arange(5000) % 6)
    pq.write_table(table_of(batch, schema), path, row_group_size=3000)
    for small in (1 << 30, 1 << 10):
        monkeypatch.setattr("dsprep.formats.parquet.row_groups.SMALL", small)
        monkeypatch.setattr("dsprep.formats.parquet.row_groups.STEP_NBYTES", 1 << 14)
        with dsprep.open(path) as source, ThreadPoolExecutor(4) as pool:
            barrier = threading.Barrier(4)

            def read(seed, source=source, barrier=barrier):
                barrier.wait(10)
                for start in np.random.default_rng(seed).integers(0, 4990, 12):
                    stop = int(min(5000, start + 700))
                    found = source.read(int(start), stop)
                    expected = {n: c[int(start) : stop] for n, c in batch.items()}
                    assert_same_batch(found, expected, schema)

            list(pool.map(read, range(4)))
            assert_same_batch(source[:], batch, schema)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", x=pa.array(range(20)))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    fails(lambda: dsprep.open(path), DsprepError, "dsprep[parquet]")
    assert formats.recognise(path).name == "parquet"
