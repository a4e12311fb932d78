"""ADIOS2's BP as samples: steps, rows and graphs, compared with what was written."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from format_contract import ReadOnlyContract
from support import raw, reading

from dsprep.core.schema import Field, Schema
from dsprep.errors import AmbiguousError, FormatError, MissingExtra, SchemaError, UnsupportedError
from dsprep.formats.adios import source as adios_source
from dsprep.formats.options import OpenOptions
from dsprep.source.dataset import open_dataset

adios2 = pytest.importorskip("adios2")

ENGINES = ("BP5", "BP4")
DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "c8", "c16")
JOINED, LOCAL = 2**64 - 2, 2**64 - 3


class Bp:
    """A dataset being written by adios2."""

    def __init__(self, path: Path, engine: str = "BP5", mode: str = "w") -> None:
        self.adios = adios2.Adios()
        self.io = self.adios.declare_io("out")
        self.io.set_engine(engine)
        self.io.set_parameters({"Profile": "Off"})  # else files stay in /tmp
        bindings = adios2.bindings.Mode
        self.engine = self.io.open(str(path), bindings.Write if mode == "w" else bindings.Append)
        self.kept = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def put(self, name, value, shape=(), start=()):
        value = np.asarray(value).copy()
        variable = self.io.inquire_variable(name)
        if variable is None:
            sizes = list(shape), list(start), list(value.shape)
            variable = self.io.define_variable(name, value, *sizes)
        elif value.shape:
            if shape and JOINED not in shape:
                variable.set_shape(list(shape))
            variable.impl.SetSelection((list(start), list(value.shape)))
        self.kept.append(value)
        self.engine.put(variable, value, adios2.bindings.Mode.Sync)

    def array(self, name, value, splits=1, axis=0, **kwargs):
        """Put a global array in blocks of about equal size along an axis."""
        value = np.asarray(value)
        edges = np.linspace(0, value.shape[axis], splits + 1).astype(int)
        for a, b in itertools.pairwise(edges):
            start = [0] * value.ndim
            start[axis] = int(a)
            self.put(name, np.take(value, np.arange(a, b), axis), value.shape, start, **kwargs)

    def steps(self, count):
        for i in range(count):
            self.engine.begin_step()
            yield i
            self.engine.end_step()


def opened(path, *names, **options):
    return open_dataset(path, reading(*names, **options))


def read(path, *names, **options):
    with opened(path, *names, **options) as source:
        return [source[i] for i in range(len(source))]


# --- the contract ----------------------------------------------------------------------------


class TestSteps(ReadOnlyContract):
    """Arrays, also of another length in each step, numbers and strings."""

    format, located = "adios", (False, False)
    open = OpenOptions(sample_axis="none")
    schema = Schema(
        (
            Field("n", np.dtype("<f8")),
            Field("r", np.dtype("<u2"), (None, 2)),
            Field("x", np.dtype("<f4"), (5, 3)),
        )
    )

    def write(self, path, batch):
        with Bp(path) as bp:
            for i in bp.steps(len(batch["n"])):
                bp.array("r", batch["r"][i])
                bp.array("x", batch["x"][i], 2)
                bp.put("n", batch["n"][i])

    def damaged(self, change):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(adios_source, "WAIT", 0.3)
            super().damaged(change)


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_dtypes(tmp_path, engine):
    """Every bit of every type, in arrays and in numbers."""
    rng, known = np.random.default_rng(5), {}
    with Bp(tmp_path / "x.bp", engine) as bp:
        for dtype in map(np.dtype, DTYPES):
            bits = rng.integers(0, 256, (3, 6 * dtype.itemsize), np.uint8)
            known[dtype.str] = bits.view(dtype)
        for i in bp.steps(3):
            for name, values in known.items():
                bp.array(f"x{name}", values[i])
                bp.put(f"v{name}", values[i, 0])
    with opened(tmp_path / "x.bp", sample_axis="none") as source:
        batch = source[:]
    for name, values in known.items():
        assert raw(batch[f"x{name}"]) == raw(values)
        assert raw(batch[f"v{name}"]) == raw(values[:, 0])


def test_rows_of_steps(tmp_path):
    """Rows of all steps, of blocks that divide any axis, joined or appended later."""
    whole = np.random.default_rng(1).integers(0, 99, (5, 6, 4))
    with Bp(tmp_path / "one.bp") as bp:
        for _ in bp.steps(1):
            bp.array("x@1", whole, 3)
            bp.array("y", np.arange(5))
    samples = read(tmp_path / "one.bp", "a=x@1", "b=y", "c=y")
    np.testing.assert_array_equal([s["a"] for s in samples], whole)
    assert [(s["b"], s["c"]) for s in samples] == [(i, i) for i in range(5)]
    for part in range(2):
        with Bp(tmp_path / "x.bp", mode="a" if part else "w") as bp:
            for i in bp.steps((3, 2)[part]):
                bp.array("x", whole[3 * part + i], 2, 1)
                for rows in (slice(0, 2), slice(2, 6)):
                    bp.put("joined", whole[3 * part + i, rows], (JOINED, 4))
    with opened(tmp_path / "x.bp", sample_axis="first") as source:
        for name in ("x", "joined"):
            np.testing.assert_array_equal(source[4:15][name], whole.reshape(30, 4)[4:15])


# --- what a sample is ------------------------------------------------------------------------


def test_steps_or_rows_are_asked_for(tmp_path):
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(3):
            bp.array("x", np.zeros((10, 4)) + i)
    with pytest.raises(AmbiguousError) as caught:
        opened(tmp_path / "x.bp")
    for option, count in zip(("none", "first"), (3, 30), strict=True):
        assert f"--sample-axis {option}" in dict(caught.value.readings)
        assert len(read(tmp_path / "x.bp", sample_axis=option)) == count


def test_what_cannot_be_a_field(tmp_path):
    """It is left out by name, and refused if it is asked for."""
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(3):
            bp.array("x", np.arange(6) + i)
            bp.put("hole", np.arange(2), (5,), (1,))
            bp.put("local", np.arange(i + 1))
            bp.array("changing", np.zeros((2, i + 1)))
            bp.put("own", np.int64(i), (LOCAL,))
            if i:
                bp.array("late", np.arange(3.0))
    with opened(tmp_path / "x.bp", sample_axis="none") as source:
        assert source.schema.names == ("own", "x")
        notes = "\n".join(source.notes)
        for name in ("hole", "local", "changing", "late"):
            assert f"left out {name}: " in notes
            with pytest.raises(UnsupportedError, match=name):
                opened(tmp_path / "x.bp", name)
    for names in (("z",), ("x", "own")):
        with pytest.raises(SchemaError, match=names[-1]):
            opened(tmp_path / "x.bp", *names, sample_axis="first")


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["md.0", "mmd.0", "data.0"])
def test_damage_is_an_error(tmp_path, file, monkeypatch):
    """ADIOS2 crashes or hangs; what reads it does not."""
    path = tmp_path / "x.bp"
    with Bp(path) as bp:
        for i in bp.steps(3):
            bp.array("x", np.arange(12.0).reshape(4, 3) + i, 2)
    whole = (path / file).read_bytes()
    (path / file).write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(adios_source, "WAIT", 0.3)
    with pytest.raises(FormatError, match=re.escape(str(path))):
        read(path, sample_axis="none")


def test_without_the_library(tmp_path, monkeypatch):
    with Bp(tmp_path / "g.bp") as bp:
        for i in bp.steps(1):
            bp.put("x", i)
    monkeypatch.setattr(adios_source, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"dsprep\[adios2\]"):
        opened(tmp_path / "g.bp")
