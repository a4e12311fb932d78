"""Ragged fields in arrays of one shape: nothing is lost, and all of it is told apart again."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fails

import dsprep
from dsprep.core.schema import Field, Ragged
from dsprep.errors import UsageError

TOKENS = st.lists(st.lists(st.integers(0, 999), max_size=12), max_size=9)


def ragged(documents: list[list[int]]) -> Ragged:
    field = Field("t", np.dtype("i4"), (None,))
    return Ragged.pack([np.array([7] * 3, "i4"), *documents], field)[1:]


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.integers(1, 10))
def test_packed_documents_come_back(documents: list[list[int]], length: int) -> None:
    batch = dsprep.pack("t", length, fill=-5)({"t": ragged(documents), "y": np.arange(3)})
    t, of, at = batch["t"], batch["t_documents"], batch["t_positions"]
    total = sum(map(len, documents))
    assert t.shape == of.shape == at.shape == (-(-total // length), length)
    assert t.dtype == np.dtype("i4")
    for i, document in enumerate(documents):
        assert t[of == i].tolist() == document
        assert at[of == i].tolist() == [*range(len(document))]
    assert (t[of == -1] == -5).all()
    assert (of == -1).sum() < length
    assert batch["y"].tolist() == [0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.integers(0, 5))
def test_padded_documents_come_back(documents: list[list[int]], more: int) -> None:
    longest = max(map(len, documents), default=0)
    batch = dsprep.pad("t", longest + more or 1, fill=-5)({"t": ragged(documents)})
    assert batch["t"].shape == (len(documents), longest + more or 1)
    for row, n, document in zip(batch["t"], batch["t_lengths"], documents, strict=True):
        assert row[:n].tolist() == document
        assert (row[n:] == -5).all()
    assert dsprep.pad("t")({"t": ragged(documents)})["t"].shape == (len(documents), longest)


def test_in_a_reader(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("t", (50,), h5py.vlen_dtype("i4"))
        for i in range(50):
            rows[i] = np.full(i, i)
        file["y"] = np.arange(50)
    dsprep.repack(tmp_path / "a.h5", tmp_path / "g.h5", buffer_size="10", durable=False)
    with dsprep.Reader(tmp_path / "g.h5", 8, transform=dsprep.pack("t", 64)) as reader:
        tokens = np.concatenate([b["t"][b["t_documents"] >= 0] for b in reader])
    assert np.bincount(tokens, minlength=50).tolist() == [*range(50)]
    with (
        dsprep.Reader(tmp_path / "g.h5", 8, transform=dsprep.pad("t", 20)) as reader,
        pytest.raises(UsageError, match="at most 20"),
    ):
        list(reader)
    with pytest.raises(UsageError, match=r"y is not a ragged field .*t"):
        dsprep.pad("y")({"y": np.zeros(3), "t": ragged([])})
    fails(lambda: dsprep.pack("t", 0), UsageError, "at least 1")


@pytest.mark.parametrize("transform", [dsprep.pad("t"), dsprep.pack("t", 4)])
def test_no_field_is_replaced(transform, tmp_path: Path) -> None:
    rows = [{"t": np.arange(i % 3), "t_lengths": i, "t_positions": i} for i in range(9)]
    dsprep.write(tmp_path / "a.h5", rows, schema={"t": "int64[None]"}, durable=False)
    with pytest.raises(UsageError, match=r"t_(lengths|positions) .*fields="):
        dsprep.Reader(tmp_path / "a.h5", 4, transform=transform)
    with dsprep.Reader(tmp_path / "a.h5", 4, transform=transform, fields="t") as reader:
        assert len(list(reader)) == 3


@pytest.mark.parametrize(
    ("dtype", "held", "refused"),
    [
        ("u2", (7, 65535, 2.0, True), (0.5, float("nan"), -1, 70_000, None, "x")),
        ("u8", (2**64 - 1,), (-1, 2**64)),
        ("f2", (-1, 0.1, float("nan"), float("inf")), (70_000, 1e300, 2049, None, "1 2")),
        ("?", (True, 0), (2,)),
        ("S3", (b"ab",), (0, b"abcd")),
    ],
)
def test_what_is_filled_in_fits_the_dtype(dtype, held, refused) -> None:
    values = np.zeros(2, dtype)
    batch = {"t": Ragged.from_lengths(values, np.array([0, 2]), "array")}
    for fill in held:
        padded, packed = (f("t", 3, fill=fill)(batch)["t"] for f in (dsprep.pad, dsprep.pack))
        expected = np.full((), fill).astype(dtype)
        np.testing.assert_array_equal(padded[0], expected)
        np.testing.assert_array_equal(packed[0, 2], expected)
    for fill in refused:
        for make in (dsprep.pad, dsprep.pack):
            fails(lambda: make("t", 3, fill=fill)(batch), UsageError, "fill=")
