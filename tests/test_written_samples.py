"""Samples that a program gives: their fields, their checks, and batches of them."""

from __future__ import annotations

import numpy as np
import pytest
from support import fails

from dsprep.core.schema import Field, Ragged
from dsprep.errors import SchemaError, UsageError
from dsprep.writing.samples.assemble import Assembler
from dsprep.writing.samples.values import columns_of, declared, infer, with_ragged


def schema_of(**sample):
    return infer(sample)


def test_fields_are_seen_in_the_first_sample():
    found = schema_of(
        x=np.zeros((2, 3), ">f4"),
        s=np.int16(3),
        b=True,
        i=3,
        f=0.5,
        c=1j,
        rows=[1.5, 2.5],
        points=[np.zeros(3, np.float32)],
        data=b"abc",
        view=memoryview(b"x"),
        text="é",
        pair=np.zeros((), [("a", "<i4"), ("b", "<f8")]),
    )
    assert str(found) == (
        "x: >f4[2,3], s: int16, b: bool, i: int64, f: float64, c: complex128, rows: float64[None], "
        "points: float32[None,3], data: bytes, view: bytes, text: str, pair: {a: int32, b: float64}"
    )


def test_declared_fields_take_precedence():
    given = declared({"x": "float32[None,3]", "y": Field("other", np.int8), "z": np.uint16})
    assert str(given) == "x: float32[None,3], y: int8, z: uint16"
    sample = {"w": 1, "z": 3, "y": 1, "x": np.zeros((0, 3), np.float32)}
    assert str(infer(sample, given)) == "w: int64, z: uint16, y: int8, x: float32[None,3]"
    fails(lambda: infer({"x": 1}, given), SchemaError, "sample 0: field y is missing")


@pytest.mark.parametrize("what", [None, "float33", "float32[3", "bytes[3]", object, 7, "a=b"])
def test_wrong_declarations(what):
    fails(lambda: declared({"x": what}), UsageError, "schema: field x cannot be")


MASKED = np.ma.masked_array([1.0, 2.0], [False, True])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "None is not a value"),
        ({"a": 1}, "flatten"),
        ([], "schema="),
        (["a", "b"], "cannot be seen"),
        ([[1], [1, 2]], "rows of one shape"),
        (np.array([None]), "no fixed-width dtype"),
        (2**70, "no fixed-width dtype"),
        (np.ma.masked_array([1], [True]), "x.filled"),
        (object(), "an object is not a value"),
        ({1, 2}, "a set is not a value"),
        # What numpy would round, or cut off.
        ([2**63 + 1, -1], "9223372036854775809 does not fit float64, which numpy makes"),
        ([2**53 + 1, 0.5], "9007199254740993 does not fit float64"),
        ([[1.5, 2], [2**53 + 1, 4]], "9007199254740993 does not fit float64"),
        ([np.float64(0.5), 2**53 + 1], r"different types \(found float64, int64\)"),
        ([np.array([2**53 + 1]), np.array([0.5])], r"different types \(found float64, int64\)"),
        ([np.uint64(1), -1], r"different types \(found int64, uint64\)"),
        ([np.datetime64("2020"), np.datetime64("2020-01-01")], "different types"),
        ([1.0, np.ma.masked], "x.filled"),
        ([[1.0, np.ma.masked]], "x.filled"),
        ([MASKED, np.zeros(2)], "x.filled"),
        ((MASKED,), "x.filled"),
        ([1, "a"], r"different types \(found int64, str\)"),
        ([b"a\0", b"bc"], "does not fit S2"),
        ([[], []], "cannot be seen"),
    ],
)
@pytest.mark.filterwarnings("ignore:Warning. converting a masked element:UserWarning")
def test_values_without_a_type(value, says):
    with pytest.raises(SchemaError, match=says) as error:
        infer({"x": value})
    assert str(error.value).startswith("sample 0, field x: ")


@pytest.mark.parametrize("sample", [None, (1, 2), [("x", 1)], {}, {1: 2}, np.zeros(3)])
def test_what_is_not_a_sample(sample):
    fails(lambda: infer(sample), SchemaError, "sample 0")
    packed = Assembler(schema_of(x=1))
    fails(lambda: packed.add(sample, 9), SchemaError, "sample 9")


FIRST = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "label": 3,
    "weight": np.float32(0.5),
    "rows": [[1, 2], [3, 4]],
    "data": b"abc",
    "text": "né",
}


def test_batches_hold_what_was_added():
    packed = Assembler(infer(FIRST), 1)
    wanted = []
    for i in range(300):
        sample = {
            "text": "t" * (i % 5) + "é",
            "data": [bytes(i), bytearray(i), memoryview(bytes(i)), np.zeros(i, np.uint8)][i % 4],
            "rows": [[i, j] for j in range(i % 7)] if i % 2 else np.full((i % 7, 2), i),
            "weight": np.float32(i) if i % 2 else i,
            "label": np.int64(i) if i % 3 else i,
            "x": np.full((2, 3), i, np.float32),
        }
        packed.add(sample, i)
        wanted.append(sample)
    assert len(packed) == 300
    nbytes = packed.nbytes
    batch = packed.take()
    assert nbytes == sum(c.nbytes for c in batch.values())
    assert list(batch) == list(FIRST)
    assert len(packed) == 0
    assert packed.nbytes == 0
    for i, sample in enumerate(wanted):
        assert batch["x"][i].tobytes() == sample["x"].tobytes()
        assert batch["label"][i] == sample["label"]
        assert batch["weight"][i] == sample["weight"]
        assert batch["rows"][i].tolist() == np.asarray(sample["rows"]).tolist()
        assert batch["data"][i] == bytes(i)
        assert batch["text"][i] == sample["text"]
    packed.add(FIRST, 300)
    assert packed.take()["rows"][0].tolist() == FIRST["rows"]
    assert batch["label"][0] == 0  # memory of its own


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("x", np.zeros((2, 3)), r"expected float32\[2,3\], found float64\[2,3\]"),
        ("x", np.zeros((4, 3), np.float32), r'schema=\{"x": "float32\[None,3\]"\}'),
        ("x", np.zeros((2, 4), np.float32), r"found float32\[2,4\]"),
        ("x", 1.0, r"found float64"),
        ("x", "text", "found a str"),
        ("label", 2.5, "2.5 does not fit int64"),
        ("label", 2**63, "does not fit int64"),
        ("label", 2**70, "no fixed-width dtype"),
        ("label", np.int32(1), "found int32"),
        ("label", "3", "found a str"),
        ("label", None, "None is not a value"),
        ("weight", 1e300, "does not fit float32"),
        ("weight", np.float64(1), "found float64"),
        ("weight", 1j, "found complex128"),
        ("rows", [[1, 2, 3]], r"found int64\[1,3\]"),
        ("rows", [1, 2], r"found int64\[2\]"),
        ("rows", np.zeros((0, 3), np.int64), r"found int64\[0,3\]"),
        ("rows", np.zeros((1, 2)), r"found float64\[1,2\]"),
        ("rows", [[1.5, 2]], "1.5 does not fit int64"),
        ("data", "text", "expected bytes, found a str"),
        ("data", np.zeros(3), "expected bytes"),
        ("text", b"x", "expected str, found a bytes"),
        ("text", "\ud800", "not Unicode"),
    ],
)
def test_wrong_values_are_named(field, value, says):
    packed = Assembler(infer(FIRST))
    packed.add(FIRST, 0)
    with pytest.raises(SchemaError, match=says) as error:
        packed.add({**FIRST, field: value}, 17)
    assert str(error.value).startswith(f"sample 17, field {field}: ")
    packed.add(FIRST, 1)
    batch = packed.take()
    assert len(batch["x"]) == len(batch["rows"]) == len(batch["data"]) == 2
    assert batch["rows"][1].tolist() == FIRST["rows"]
    assert batch["text"][1] == "né"


def test_fields_that_are_missing_or_more():
    packed = Assembler(infer(FIRST))
    with pytest.raises(SchemaError, match="sample 3: field data is missing"):
        packed.add({n: v for n, v in FIRST.items() if n != "data"}, 3)
    with pytest.raises(SchemaError, match="item 'a': field more is in none"):
        packed.add({**FIRST, "more": 1}, "item 'a'")
    with pytest.raises(SchemaError, match="field text is missing"):
        packed.add({**{n: v for n, v in FIRST.items() if n != "text"}, "more": 1}, 3)


def test_bits_are_kept():
    nan = np.array([0x7FC00123, 0xFFC00001, 0x80000000], np.uint32).view(np.float32)
    packed = Assembler(schema_of(x=nan, y=nan.astype(">f4"), s=nan[0]))
    swapped = nan.view(np.uint32).astype(">u4").view(">f4")
    packed.add({"x": nan, "y": swapped, "s": nan[1]}, 0)
    packed.add({"x": swapped, "y": nan, "s": nan[2]}, 1)
    batch = packed.take()
    for i in range(2):
        assert batch["x"][i].tobytes() == nan.tobytes()
        assert batch["y"][i].tobytes() == swapped.tobytes()
    assert batch["s"].tobytes() == nan[1:].tobytes()


def test_batches_that_a_program_gives():
    texts = ["a", "bc", "é"]
    whole = {
        "x": np.arange(12, dtype=np.float32).reshape(3, 4),
        "label": [1, 2, 3],
        "rows": Ragged.from_lengths(np.arange(5.0), [0, 2, 3]),
        "text": texts,
        "lists": [[1], [2, 3], []],
    }
    columns, count = columns_of(whole, 5)
    assert count == 3
    schema = infer({n: c[0] for n, c in columns.items()}, with_ragged(None, columns))
    assert {str(f) for f in schema} == {
        "x: float32[4]",
        "label: int64",
        "rows: float64[None]",
        "text: str",
        "lists: int64[None]",
    }
    with pytest.raises(SchemaError, match="differ in their number of samples"):
        columns_of({**whole, "label": [1]}, 5)
    fails(lambda: columns_of({**whole, "label": 1}, 5), SchemaError, "no axis of samples")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([2**53, 0.5], "float64"),
        ([True, 2], "int64"),
        ([float("nan"), -0.0, 3], "float64"),
        ([1j, 2], "complex128"),
        ([np.int64(2**53 + 1), 3], "int64"),
        ([np.array([1, 2], ">f4"), np.array([3, 4], "<f4")], "float32"),
        ([[2**53 + 1, 2], (3, 4)], "int64"),
    ],
)
def test_lists_are_kept_exactly(value, dtype):
    packed = Assembler(infer({"x": value}))
    packed.add({"x": value}, 0)
    found = packed.take()["x"][0]
    expected = np.empty(found.shape, dtype)
    for row, one in enumerate(value):
        expected[row] = one
    assert found.dtype == dtype
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("float64", 2**53 + 1, "9007199254740993 does not fit float64"),
        ("float32", 2**24 + 1, "16777217 does not fit float32"),
        ("float32[2]", [2**24 + 1, 1], "16777217 does not fit float32"),
        ("complex64", 2**24 + 1, "16777217 does not fit complex64"),
        ("bfloat16", 257, "257 does not fit bfloat16"),
        ("float32[None]", [2, np.float64(0.1)], "found float64"),
        ("U5[None]", [1, "a"], "different types"),
        ("U5", "ab\0", "found a"),
        ("S5", b"ab\0", "found a"),
    ],
)
def test_numbers_without_a_type_are_exact_or_refused(field, value, says):
    schema = declared({"x": field})
    with pytest.raises(SchemaError, match=says):
        Assembler(schema).add({"x": value}, 0)


class Table:
    """What numpy makes one array of, though its columns are of two types."""

    def __array__(self, dtype=None, copy=None):
        return np.array([[2**53 + 1, 0.5]])

    def to_numpy(self):
        return np.array([[0.5]])


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v]], ids=["value", "list"])
def test_what_an_array_of_a_table_would_lack(wrap):
    fails(lambda: infer({"x": wrap(Table())}), SchemaError, "a Table is not a value ", "x.to_numpy")
