"""The dataset model: dtypes, fields, ragged values, and what users type."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import DTYPES, NESTED, STRUCT, fails, raw, schemas

from dsprep.core.schema import (
    Arena,
    Field,
    FieldSpec,
    Ragged,
    Schema,
    concatenate,
    decode_dtype,
    differences,
    empty_batch,
    encode_dtype,
    has_padding,
    parse_dtype,
    parse_shape,
    show_dtype,
)
from dsprep.errors import SchemaError, UsageError


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_survives_json(dtype):
    text = json.loads(json.dumps(encode_dtype(dtype)))
    back = decode_dtype(text)
    assert back == dtype
    assert back.itemsize == dtype.itemsize
    assert back.fields == dtype.fields


@pytest.mark.parametrize("text", ["O", "object", "nosuch", {"names": ["a"]}, [], 3, None, "V0"])
def test_bad_dtype_is_refused(text):
    fails(lambda: decode_dtype(text), SchemaError)


def test_schema_survives_json():
    for name, schema in schemas():
        assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema, name


@pytest.mark.parametrize(
    "text", [{}, [1], [{"name": "x"}], [{"name": "x", "dtype": "f4", "shape": 3}], None]
)
def test_bad_schema_is_refused(text):
    fails(lambda: Schema.from_json(text), SchemaError)


def test_a_field_names_what_is_wrong_with_it():
    with pytest.raises(SchemaError, match="only the first axis may vary"):
        Field("x", np.dtype("f4"), (3, None))
    fails(lambda: Field("x", np.dtype("O")), SchemaError, "field x")
    with pytest.raises(SchemaError, match="named twice"):
        Schema((Field("x", np.dtype("f4")), Field("x", np.dtype("f4"))))
    with pytest.raises(SchemaError, match="one of x"):
        Schema((Field("x", np.dtype("f4")),))["y"]


def test_sizes_of_fields():
    f = Field("x", np.dtype("<f4"), (3, 2))
    assert (f.ragged, f.inner, f.row_nbytes, str(f)) == (False, (3, 2), 24, "x: float32[3,2]")
    g = Field("x", np.dtype("<f4"), (None, 2))
    assert (g.ragged, g.inner, g.row_nbytes, str(g)) == (True, (2,), 8, "x: float32[None,2]")
    assert str(Field.opaque("b")) == "b: bytes"


def test_differences_name_the_field():
    a = Schema((Field("x", np.dtype("f4"), (3,)), Field("y", np.dtype("i8"))))
    b = Schema((Field("x", np.dtype("f8"), (3,)), Field("z", np.dtype("i8"))))
    assert differences(a, a) == []
    assert differences(a, b) == [
        "field y is missing",
        "field x: expected x: float32[3], found x: float64[3]",
        "field z is not in the other",
    ]


def test_padding_is_known():
    assert has_padding(STRUCT)
    assert not has_padding(NESTED)
    assert not has_padding(np.dtype("f4"))
    assert has_padding(np.dtype([("a", STRUCT, (2,))]))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [("<f4", "float32"), (">f4", ">f4"), ("?", "bool"), ("S7", "S7"), ("<U3", "U3")],
)
def test_dtypes_are_shown_as_they_are_typed(dtype, text):
    assert show_dtype(np.dtype(dtype)) == text
    assert parse_dtype(text) == np.dtype(dtype)


def test_ragged_behaves_as_a_sequence():
    f = Field("x", np.dtype("<i4"), (None, 2))
    items = [np.arange(2 * n, dtype="<i4").reshape(n, 2) for n in (2, 0, 3)]
    column = Ragged.pack(items, f)
    assert len(column) == 3
    assert column.lengths.tolist() == [2, 0, 3]
    for i, item in enumerate(items):
        assert column[i].tolist() == item.tolist()
    assert column[-1].tolist() == items[2].tolist()
    assert [v.tolist() for v in column[1:]] == [i.tolist() for i in items[1:]]
    assert len(column[3:2]) == 0
    with pytest.raises(IndexError):
        column[3]
    with pytest.raises(UsageError):
        column[::2]


@pytest.mark.parametrize(
    ("kind", "items"), [("bytes", [b"", b"\0a", b"xyz"]), ("str", ["", "n\0l", "日本\udc80"])]
)
def test_bytes_and_str_come_back(kind, items):
    column = Ragged.pack(items, Field.opaque("x", kind))
    assert list(column) == items


def test_concatenate_joins_fixed_and_ragged():
    schema = Schema((Field("a", np.dtype("i4"), (2,)), Field("r", np.dtype("f4"), (None, 3))))
    one = {
        "a": np.arange(4, dtype="i4").reshape(2, 2),
        "r": Ragged.from_lengths(np.ones((3, 3), "f4"), np.array([1, 2])),
    }
    both = concatenate(schema, [one, empty_batch(schema), one])
    assert both["a"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert both["r"].lengths.tolist() == [1, 2, 1, 2]


def test_joining_keeps_the_byte_order():
    schema = Schema((Field("a", np.dtype(">i4")), Field("r", np.dtype(">f4"), (None,))))
    one = {
        "a": np.arange(2, dtype=">i4"),
        "r": Ragged.pack([np.ones(1, ">f4"), np.ones(2, ">f4")], schema["r"]),
    }
    assert one["r"].values.dtype == ">f4"
    both = concatenate(schema, [one, one])
    assert both["a"].dtype == ">i4"
    assert both["r"].values.dtype == ">f4"


def test_arena_reuses_memory():
    arena = Arena()
    a = arena.empty("x", (4, 2), np.dtype("f4"))
    b = arena.empty("x", (3,), np.dtype("f8"))
    assert np.shares_memory(a, b)
    assert not np.shares_memory(a, arena.empty("y", (4, 2), np.dtype("f4")))
    assert arena.empty("x", (0, 3), np.dtype("f4")).shape == (0, 3)
    assert arena.empty("x", (2,), STRUCT).dtype == STRUCT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x", FieldSpec("x", "x")),
        ("x=climate/data", FieldSpec("x", "climate/data")),
        ("x=/climate/data", FieldSpec("x", "climate/data")),
        ("x:float32[1600,3]", FieldSpec("x", "x", (), np.dtype("f4"), (1600, 3))),
        ("x:>i2", FieldSpec("x", "x", (), np.dtype(">i2"), ())),
        ("x=a:float32[None,3]", FieldSpec("x", "a", (), np.dtype("f4"), (None, 3))),
        ("x=a:float32[*,3]", FieldSpec("x", "a", (), np.dtype("f4"), (None, 3))),
        ("v=g/v@g/e@g/f", FieldSpec("v", "g/v", ("g/e", "g/f"))),
        ("v=g/v@g/first,g/count", FieldSpec("v", "g/v", ("g/first,g/count",))),
        ("input:0", FieldSpec("input:0", "input:0")),
        ("x=input:0", FieldSpec("x", "input:0")),
        ("input:0:f4[2]", FieldSpec("input:0", "input:0", (), np.dtype("f4"), (2,))),
        ("x:nosuch", FieldSpec("x:nosuch", "x:nosuch")),
        ("b:bytes", FieldSpec("b", "b", (), np.dtype("u1"), (None,), "bytes")),
        ("s:str", FieldSpec("s", "s", (), np.dtype("u1"), (None,), "str")),
    ],
)
def test_field_specs(text, expected):
    assert FieldSpec.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":f4",
        "x:f4[3",
        "x:f4[3,None]",
        "x:f4[-1]",
        "x:bytes[3]",
        "x:f4]",
    ],
)
def test_bad_field_specs_are_refused(text):
    fails(lambda: FieldSpec.parse(text), UsageError)


@given(st.text(max_size=30))
def test_any_text_is_a_spec_or_a_clear_error(text):
    try:
        spec = FieldSpec.parse(text)
    except UsageError:
        return
    assert spec.name


@given(st.text(alphabet="0123456789,*N one?-", max_size=12))
def test_any_text_is_a_shape_or_a_clear_error(text):
    try:
        shape = parse_shape(text)
    except UsageError:
        return
    assert all(n is None or n >= 0 for n in shape)
    assert None not in shape[1:]


def test_raw_ignores_padding():
    a = np.zeros(2, STRUCT)
    b = np.frombuffer(bytearray(b"\xff" * 32), STRUCT)
    b["id"], b["value"] = 0, 0
    assert raw(a) == raw(b)
    assert a.tobytes() != b.tobytes()


def test_a_field_of_absurd_size_is_refused():
    fails(lambda: Field("x", np.dtype("<f8"), (1 << 40, 1 << 30)), SchemaError, "bytes")
    with pytest.raises(SchemaError):
        Schema.from_json([{"name": "x", "dtype": "<f8", "shape": [None, 1 << 62]}])
