"""ADIOS2's BP5 and BP4 against adios2 itself: every value, in every way to write it."""

from __future__ import annotations

import itertools
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from format_contract import ReadOnlyContract

import dsprep
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError, UnsupportedError
from dsprep.formats.options import OpenOptions
from dsprep.source.dataset import open_dataset
from dsprep.storage.identity import ChangedError

adios2 = pytest.importorskip("adios2")

SCHEMA = Schema((Field("x", np.dtype("<f4"), (5, 3)), Field("y", np.dtype("<i8"))))
ENGINES = ("BP5", "BP4")
DTYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "c8", "c16")
JOINED, LOCAL = 2**64 - 2, 2**64 - 3


class Bp:
    """A dataset being written by adios2; arguments are parameters of the engine."""

    def __init__(self, path: Path, engine: str = "BP5", mode: str = "w", **parameters) -> None:
        self.adios = adios2.Adios()
        self.io = self.adios.declare_io("out")
        self.io.set_engine(engine)
        parameters = {"Profile": "Off"} | parameters  # else files stay in /tmp
        self.io.set_parameters({k: str(v) for k, v in parameters.items()})
        bindings = adios2.bindings.Mode
        self.engine = self.io.open(str(path), bindings.Write if mode == "w" else bindings.Append)
        self.kept = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def put(self, name, value, shape=(), start=(), count=None, *, deferred=False):
        value = np.asarray(value).copy()
        count = value.shape if count is None else count
        variable = self.io.inquire_variable(name)
        if variable is None:
            variable = self.io.define_variable(name, value, list(shape), list(start), list(count))
        elif count:
            if shape and JOINED not in shape:
                variable.set_shape(list(shape))
            variable.impl.SetSelection((list(start), list(count)))
        self.kept.append(value)
        mode = adios2.bindings.Mode
        self.engine.put(variable, value, mode.Deferred if deferred else mode.Sync)

    def text(self, name, value):
        variable = self.io.inquire_variable(name) or self.io.define_variable(name)
        self.engine.put(variable, value)

    def array(self, name, value, splits=1, axis=0, **kwargs):
        """Put a global array in blocks of about equal size along an axis."""
        value = np.asarray(value)
        edges = np.linspace(0, value.shape[axis], splits + 1).astype(int)
        for a, b in itertools.pairwise(edges):
            start = [0] * value.ndim
            start[axis] = int(a)
            part = np.take(value, np.arange(a, b), axis)
            self.put(name, part, value.shape, start, part.shape, **kwargs)

    def steps(self, count):
        for i in range(count):
            self.engine.begin_step()
            yield i
            self.engine.end_step()


def library(path, name, steps, **kwargs):
    """Return what adios2 reads of each step."""
    with adios2.FileReader(str(path)) as file:
        return [np.array(file.read(name, step_selection=[i, 1], **kwargs)) for i in range(steps)]


def opened(path, **options):
    return open_dataset(path, OpenOptions(**options))


def both(path, **options):
    """Return the samples by the metadata and by a sidecar; they are the same."""
    dsprep.provenance(path, options=OpenOptions(**options))
    found = []
    for way in ("library", "strict"):
        with open_dataset(path, OpenOptions(**options), through=way) as source:
            found.append([source[i] for i in range(len(source))])
    for one, other in zip(*found, strict=True):
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
    return found[0]


def values(rng, shape, dtype="<f4"):
    return rng.integers(0, 200, shape).astype(dtype)


# --- the contract ----------------------------------------------------------------------------


class Steps(ReadOnlyContract):
    format, schema = "adios", SCHEMA
    open = OpenOptions(sample_axis="none")
    engine = "BP5"

    def write(self, path, batch):
        with Bp(path, self.engine) as bp:
            for i in bp.steps(len(batch["x"])):
                bp.array("x", batch["x"][i])
                bp.put("y", batch["y"][i])


class TestSteps5(Steps):
    pass


class TestSteps4(Steps):
    engine = "BP4"


class Rows(ReadOnlyContract):
    format, schema = "adios", SCHEMA
    engine = "BP5"

    def write(self, path, batch):
        with Bp(path, self.engine) as bp:
            for _ in bp.steps(1):
                bp.array("x", batch["x"], 4)
                bp.array("y", batch["y"], 3)


class TestRows5(Rows):
    pass


class TestRows4(Rows):
    engine = "BP4"


class TestRagged(ReadOnlyContract):
    """Local arrays of different length, numbers and strings: one of each in a step."""

    format = "adios"
    schema = Schema(
        (
            Field("r", np.dtype("<u2"), (None, 2)),
            Field("n", np.dtype("<f8")),
            Field.opaque("s", "str"),
        )
    )

    def take(self, batch):
        texts = [f"text {i} " * (i % 5) for i in range(len(batch["n"]))]
        super().take({**batch, "s": Ragged.pack(texts, self.schema["s"])})

    def write(self, path, batch):
        with Bp(path) as bp:
            for i in bp.steps(len(batch["n"])):
                bp.put("r", batch["r"][i])
                bp.put("n", batch["n"][i])
                bp.text("s", batch["s"][i])


# --- against adios2, array by array -----------------------------------------------------------

WAYS = {
    "plain": {},
    "stripe": {"StripeSize": 1 << 20},
    "no statistics": {"StatsLevel": 0},
    "malloc": {"BufferVType": "malloc"},
    "small buffers": {"BufferChunkSize": 1 << 12, "MinDeferredSize": 100},
}


CUTS = [(1, 0), (2, 0), (3, 0), (7, 0), (3, 1), (4, 2)]


@pytest.mark.parametrize(
    ("engine", "way", "splits", "axis"),
    [(e, "plain", *c) for e in ENGINES for c in CUTS]
    + [(e, w, 3, 0) for e in ENGINES for w in WAYS],
)
def test_decomposed(tmp_path, engine, way, splits, axis):
    """A sample of which each block has a part, in whole rows of any number or in equal boxes."""
    rng = np.random.default_rng(splits + axis)
    path = tmp_path / "x.bp"
    wide = values(rng, (4, 7, 6, 8))
    with Bp(path, engine, **WAYS[way]) as bp:
        for i in bp.steps(4):
            bp.array("x", wide[i], splits, axis, deferred=way != "plain")
    samples = both(path, sample_axis="none")
    for i, expected in enumerate(library(path, "x", 4)):
        np.testing.assert_array_equal(samples[i]["x"], expected)
        np.testing.assert_array_equal(samples[i]["x"], wide[i])
    if axis == 0:
        rows = both(path, sample_axis="first")
        np.testing.assert_array_equal([r["x"] for r in rows], wide.reshape(28, 6, 8))


def test_boxes(tmp_path):
    """Blocks of one size that divide every axis, also as rows."""
    rng = np.random.default_rng(1)
    whole = values(rng, (3, 4, 6, 8), "<f8")
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(3):
            for at in np.random.default_rng(i).permutation(12).tolist():
                start = np.array(np.unravel_index(at, (2, 3, 2))) * (2, 2, 4)
                a, b, c = start.tolist()
                bp.put("x", whole[i, a : a + 2, b : b + 2, c : c + 4], (4, 6, 8), (a, b, c))
    found = both(tmp_path / "x.bp", sample_axis="none")
    np.testing.assert_array_equal([s["x"] for s in found], whole)
    found = both(tmp_path / "x.bp", sample_axis="first")
    np.testing.assert_array_equal([s["x"] for s in found], whole.reshape(12, 6, 8))


def test_flushed(tmp_path):
    """What a writer wrote before the end of a step is elsewhere in the subfile."""
    rng = np.random.default_rng(3)
    whole = values(rng, (3, 9, 5))
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(3):
            for k in range(3):
                bp.put("x", whole[i, 3 * k : 3 * k + 3], (9, 5), (3 * k, 0))
                bp.put("y", whole[i, 3 * k : 3 * k + 3, 0], (9,), (3 * k,))
                if k < 2:
                    bp.engine.impl.PerformDataWrite()
    found = both(tmp_path / "x.bp", sample_axis="none")
    np.testing.assert_array_equal([s["x"] for s in found], whole)
    np.testing.assert_array_equal([s["y"] for s in found], whole[:, :, 0])


@pytest.mark.parametrize("engine", ENGINES)
def test_appended(tmp_path, engine):
    rng = np.random.default_rng(4)
    whole = values(rng, (6, 4))
    path = tmp_path / "x.bp"
    for part in range(2):
        with Bp(path, engine, "a" if part else "w") as bp:
            for i in bp.steps(3):
                bp.array("x", whole[3 * part + i])
        found = both(path)
        np.testing.assert_array_equal([s["x"] for s in found], whole[: 3 * part + 3])


def test_appended_is_noticed(tmp_path):
    path = tmp_path / "x.bp"
    for mode in ("w", "a"):
        with Bp(path, mode=mode) as bp:
            for i in bp.steps(2):
                bp.put("x", np.arange(5) + i, (5,), (0,))
        if mode == "w":
            dsprep.provenance(path)
            source = opened(path)
    with pytest.raises(ChangedError):
        source[0:2]
    source.close()
    assert any("steps" in str(p) or "changed" in str(p) for p in dsprep.check(path))
    with pytest.raises(DsprepError), open_dataset(path, through="strict"):
        pass


def test_late(tmp_path):
    """A variable that is not in every step is left out by name, and read if it is asked for."""
    path = tmp_path / "x.bp"
    with Bp(path) as bp:
        for i in bp.steps(4):
            bp.put("x", np.arange(6) + i, (6,), (0,))
            if i > 1:
                bp.put("late", np.arange(3.0) * i, (3,), (0,))
    with opened(path) as source:
        assert source.schema.names == ("x",)
        assert any("late" in note for note in source.notes)
    found = both(path, fields=(dsprep.FieldSpec.parse("late"),))
    np.testing.assert_array_equal([s["late"] for s in found], library(path, "late", 2))


def test_other_steps(tmp_path):
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(4):
            bp.put(("x", "y")[i % 2], np.arange(6), (6,), (0,))
    with pytest.raises(SchemaError, match="other steps"):
        opened(tmp_path / "x.bp")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path, engine, dtype):
    """Every bit of every type, in arrays and in numbers."""
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(5).integers(0, 256, (3, 6 * dtype.itemsize), np.uint8)
    whole = bits.view(dtype)
    with Bp(tmp_path / "x.bp", engine) as bp:
        for i in bp.steps(3):
            bp.array("x", whole[i])
            bp.put("v", whole[i, 0])
    with opened(tmp_path / "x.bp") as source:
        batch = source[:]
    assert batch["x"].dtype == dtype
    assert batch["v"].dtype == dtype
    assert batch["x"].tobytes() == whole.tobytes()
    assert batch["v"].tobytes() == whole[:, 0].tobytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_local(tmp_path, engine):
    """Local arrays: each block is a sample, ragged where they differ; joined ones are one array."""
    rng = np.random.default_rng(6)
    blocks = [values(rng, (int(rng.integers(1, 5)), 3)) for _ in range(12)]
    path = tmp_path / "x.bp"
    with Bp(path, engine) as bp:
        for i in bp.steps(4):
            for block in blocks[3 * i : 3 * i + 3]:
                bp.put("local", block, (), ())
                bp.put("joined", block, (JOINED, 3), ())
            bp.put("own", np.int64(7 * i), (LOCAL,), ())
    for way in ("auto", "none"):
        found = both(path, fields=(dsprep.FieldSpec.parse("local"),), sample_axis=way)
        for sample, block in zip(found, blocks, strict=True):
            np.testing.assert_array_equal(sample["local"], block)
    rows = both(path, fields=(dsprep.FieldSpec.parse("local"),), sample_axis="first")
    np.testing.assert_array_equal([r["local"] for r in rows], np.concatenate(blocks))
    specs = tuple(map(dsprep.FieldSpec.parse, ("joined", "own")))
    found = both(path, fields=specs, sample_axis="none")
    for i, sample in enumerate(found):
        np.testing.assert_array_equal(sample["joined"], np.concatenate(blocks[3 * i : 3 * i + 3]))
        assert sample["own"] == 7 * i


def test_values_of_a_step(tmp_path):
    """Attributes, strings and numbers of each step, and a number that a step does not have."""
    path = tmp_path / "x.bp"
    for engine in ENGINES:
        with Bp(path, engine) as bp:
            for i in bp.steps(3):
                bp.put("x", np.arange(4.0) + i, (4,), (0,))
                bp.text("s", f"é{i}" * i)
                if not i:
                    bp.io.define_attribute("unit", "K", "x")
                    bp.io.define_attribute("title", "all of it")
                    bp.io.define_attribute("names", ["a", "bc"])
                    bp.io.define_attribute("limits", np.array([1.5, 2.5]))
        with opened(path) as source:
            assert [s["s"] for s in source] == ["", "é1", "é2é2"]
            assert dict(source.schema["x"].attrs) == {"unit": "K"}
            attrs = dict(source.schema.attrs)
            assert attrs.pop("limits").tolist() == [1.5, 2.5]
            assert list(attrs.pop("names")) == ["a", "bc"]
            assert attrs == {"title": "all of it"}
        dsprep.convert(path, tmp_path / f"{engine}.h5")
        with dsprep.open(path) as one, dsprep.open(tmp_path / f"{engine}.h5") as other:
            assert dsprep.verify(one, other).same
        shutil.rmtree(path)


# --- several writers -------------------------------------------------------------------------


def together(parts, target, subfiles):
    """Make one BP5 dataset of what writers wrote alone, as the format's documents say.

    Writer r goes to subfile ``subfiles[r]``. The library here has no MPI, so that it cannot write
    this; it reads it.
    """
    target.mkdir()
    indices = [(p / "md.idx").read_bytes() for p in parts]
    metadata = [(p / "md.0").read_bytes() for p in parts]
    formats: dict[bytes, bytes] = {}
    for p in parts:
        text, at = (p / "mmd.0").read_bytes(), 0
        while at < len(text):
            own, length = struct.unpack_from("<2Q", text, at)
            formats[text[at + 16 : at + 16 + own]] = text[at : at + 16 + own + length]
            at += 16 + own + length
    (target / "mmd.0").write_bytes(b"".join(formats.values()))
    shift = []
    for p, number in zip(parts, subfiles, strict=True):
        with (target / f"data.{number}").open("ab") as file:
            shift.append(file.tell())
            file.write((p / "data.0").read_bytes())
    writers, steps = len(parts), (len(indices[0]) - 64 - 41) // 41
    numbers = (writers, len(set(subfiles)), len(set(subfiles)), *subfiles)
    index = indices[0][:64] + struct.pack(f"<cQ{len(numbers)}Q", b"w", 8 * len(numbers), *numbers)
    every = b""
    for step in range(steps):
        own = [struct.unpack_from("<4Q", i, 64 + 41 + 41 * step + 9) for i in indices]
        sizes = [struct.unpack_from("<3Q", m, o[0]) for m, o in zip(metadata, own, strict=True)]
        begins = [o[0] + 24 for o in own]
        found = zip(metadata, begins, sizes, strict=True)
        variables, attributes = zip(
            *((m[b : b + v], m[b + v : b + v + a]) for m, b, (_, v, a) in found), strict=True
        )
        text = struct.pack(f"<{2 * writers}Q", *map(len, variables), *map(len, attributes))
        text += b"".join(variables) + b"".join(attributes)
        positions = [o[3] + s for o, s in zip(own, shift, strict=True)]
        words = (len(every), len(text) + 8, 0, *positions)
        index += struct.pack(f"<cQ{len(words)}Q", b"s", 8 * len(words), *words)
        every += struct.pack("<Q", len(text)) + text
    (target / "md.idx").write_bytes(index)
    (target / "md.0").write_bytes(every)
    return target


@pytest.mark.parametrize("subfiles", [(0, 0, 0), (0, 1, 2), (1, 0, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_writers(tmp_path, subfiles, axis):
    """Blocks of several writers in several subfiles, as adios2 reads them."""
    rng = np.random.default_rng(7)
    whole = values(rng, (4, 9, 6))
    edges = [0, 3, 6, 9] if axis == 0 else [0, 2, 4, 6]
    parts = []
    for r in range(3):
        parts.append(tmp_path / f"part{r}.bp")
        a, b = edges[r], edges[r + 1]
        with Bp(parts[-1]) as bp:
            for i in bp.steps(4):
                part = whole[i, a:b] if axis == 0 else whole[i, :, a:b]
                bp.put("x", part, (9, 6), (a, 0) if axis == 0 else (0, a))
                bp.put("local", whole[i, : r + 1], (), ())
                bp.put("n", np.int64(i))
                bp.put("own", np.int64(10 * i + r), (LOCAL,), ())
    path = together(parts, tmp_path / "x.bp", subfiles)
    specs = {n: (dsprep.FieldSpec.parse(n),) for n in ("x", "n", "local", "own")}
    found = both(path, fields=specs["x"] + specs["n"], sample_axis="none")
    np.testing.assert_array_equal([s["x"] for s in found], whole)
    np.testing.assert_array_equal([s["x"] for s in found], library(path, "x", 4))
    np.testing.assert_array_equal([s["n"] for s in found], np.ravel(library(path, "n", 4)))
    found = both(path, fields=specs["x"], sample_axis="first")
    np.testing.assert_array_equal([s["x"] for s in found], whole.reshape(-1, 6))
    found = both(path, fields=specs["local"] + specs["own"])
    with adios2.FileReader(str(path)) as file:
        for k, sample in enumerate(found):
            step = {"step_selection": [k // 3, 1]}
            block = file.read("local", block_id=k % 3, **step)
            np.testing.assert_array_equal(sample["local"], block)
            assert sample["own"] == file.read("own", **step)[k % 3]
    dsprep.repack(path, tmp_path / "x.h5", open_options=OpenOptions(fields=specs["x"]))
    with dsprep.open(tmp_path / "x.h5") as source:
        np.testing.assert_array_equal([s["x"] for s in source], whole)
    with dsprep.Reader(path, batch_size=4) as reader:
        assert sum(len(batch["local"]) for batch in reader) == 12


def test_uneven_writers(tmp_path):
    """The writers of HydraGNN have rows of any number; the sidecar has a run for each of them."""
    whole = values(np.random.default_rng(8), (1000, 3))
    edges, parts = [0, 311, 660, 661, 1000], []
    for r, (a, b) in enumerate(itertools.pairwise(edges)):
        parts.append(tmp_path / f"part{r}.bp")
        with Bp(parts[-1]) as bp:
            for _ in bp.steps(1):
                bp.put("x", whole[a:b], (1000, 3), (a, 0))
    path = together(parts, tmp_path / "x.bp", (0, 1, 0, 1))
    found = both(path)
    np.testing.assert_array_equal([s["x"] for s in found], whole)
    np.testing.assert_array_equal(whole, library(path, "x", 1)[0])
    assert (tmp_path / "x.bp.dsprep.json").stat().st_size < 2000
    (tmp_path / "x.bp.dsprep.json").unlink()
    (path / "data.1").unlink()
    with pytest.raises(FormatError, match="missing"):
        opened(path)


# --- HydraGNN --------------------------------------------------------------------------------


def graphs(path, engine="BP5", labels=("trainset",), writers=2):
    """Write graphs as HydraGNN does: for each set arrays, and which rows are those of a sample."""
    rng = np.random.default_rng(9)
    known = {}
    with Bp(path, engine, StatsLevel=0) as bp:
        for _ in bp.steps(1):
            for label in labels:
                samples = [
                    {
                        "x": values(rng, (n, 4)),
                        "y": values(rng, (1, 1), "<f8"),
                        "z": values(rng, (n,), "<i8"),
                        "edge_index": values(rng, (2, 3 * n), "<i8"),
                    }
                    for n in rng.integers(1, 9, 11).tolist()
                ]
                known[label] = samples
                bp.io.define_attribute(f"{label}/ndata", np.array(len(samples)))
                for key in samples[0]:
                    axis = int(key == "edge_index")
                    arrays = [s[key] for s in samples]
                    count = np.array([a.shape[axis] for a in arrays])
                    name = f"{label}/{key}"
                    bp.io.define_attribute(f"{name}/variable_dim", np.array(axis))
                    bp.array(name, np.concatenate(arrays, axis), writers, axis)
                    bp.array(f"{name}/variable_count", count, writers)
                    bp.array(f"{name}/variable_offset", np.cumsum(count) - count, writers)
        bp.io.define_attribute("total_ndata", np.array(11 * len(labels)))
    return known


@pytest.mark.parametrize("engine", ENGINES)
def test_graphs(tmp_path, engine):
    path = tmp_path / "g.bp"
    known = graphs(path, engine)["trainset"]
    found = both(path)
    assert len(found) == 11
    for sample, expected in zip(found, known, strict=True):
        assert set(sample) == {f"trainset/{k}" for k in ("x", "y", "z")}
        for name, value in sample.items():
            np.testing.assert_array_equal(value, expected[name.partition("/")[2]])
    with opened(path) as source:
        assert any("edge_index" in n and "variable_dim" in n for n in source.notes)
        assert source.schema.attrs["trainset/ndata"] == 11
    with pytest.raises(UnsupportedError, match="edge_index"):
        opened(path, fields=(dsprep.FieldSpec.parse("trainset/edge_index"),))


def test_sets_of_graphs(tmp_path):
    path = tmp_path / "g.bp"
    known = graphs(path, labels=("trainset", "valset", "testset"))
    with pytest.raises(SchemaError, match="trainset, valset, testset") as info:
        opened(path)
    words = str(info.value).partition("--field ")[2].split(" --field ")
    assert words == ["trainset/x", "trainset/y", "trainset/z"]
    found = both(path, fields=tuple(map(dsprep.FieldSpec.parse, ("x=valset/x", "y=valset/y"))))
    for sample, expected in zip(found, known["valset"], strict=True):
        np.testing.assert_array_equal(sample["x"], expected["x"])
        np.testing.assert_array_equal(sample["y"], expected["y"])


def test_damaged_index(tmp_path):
    with Bp(tmp_path / "g.bp") as bp:
        for _ in bp.steps(1):
            bp.io.define_attribute("t/x/variable_dim", np.array(0))
            bp.array("t/x", np.zeros((10, 2)))
            bp.array("t/x/variable_count", np.array([4, 4, 4]))
            bp.array("t/x/variable_offset", np.array([0, 4, 8]))
    with pytest.raises(DsprepError, match="sample 2 has 4 rows from 8 on, of 10"):
        opened(tmp_path / "g.bp")


# --- what is refused -------------------------------------------------------------------------


def plain(path, engine="BP5"):
    """Write three steps of a few variables; with a local array and a string."""
    with Bp(path, engine) as bp:
        for i in bp.steps(3):
            bp.array("x", np.arange(12.0).reshape(4, 3) + i, 2)
            bp.put("local", np.arange(i + 1), (), ())
            bp.put("n", np.int64(i))
            bp.text("s", f"text {i}")
    return path


def edited(path, name, at, new):
    data = bytearray((path / name).read_bytes())
    data[at : at + len(new)] = new
    (path / name).write_bytes(data)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("at", "new", "words"),
    [(36, b"\1", "big-endian"), (37, b"\3", "version of BP"), (0, b"no", None)],
)
def test_header(tmp_path, engine, at, new, words):
    path = plain(tmp_path / "x.bp", engine)
    edited(path, "md.idx", at, new)
    with pytest.raises(FormatError, match=words):
        opened(path)


def test_column_major(tmp_path):
    path = plain(tmp_path / "x.bp")
    edited(path, "md.idx", 40, b"y")
    with pytest.raises(FormatError, match="column-major"):
        opened(path)
    path = plain(tmp_path / "y.bp", "BP4")
    edited(path, "md.0", (path / "md.0").read_bytes().index(b"n", 84), b"y")
    with pytest.raises(FormatError, match="column-major"):
        opened(path)


@pytest.mark.parametrize("engine", ENGINES)
def test_active(tmp_path, engine):
    """A dataset whose writer was stopped is read as far as it is complete, and that is said."""
    path = plain(tmp_path / "x.bp", engine)
    edited(path, "md.idx", 39 if engine == "BP5" else 38, b"\1")
    with (path / "md.idx").open("ab") as file:
        file.write(struct.pack("<cQ", b"s", 32) + bytes(5))
    with opened(path) as source:
        assert len(source) == 3
        assert any("writing to it" in note for note in source.notes)
        assert any("left out the end of md.idx" in note for note in source.notes)
    edited(path, "md.idx", 39 if engine == "BP5" else 38, b"\0")
    with pytest.raises(FormatError, match="ends within"):
        opened(path)


@pytest.mark.parametrize("engine", ENGINES)
def test_truncated(tmp_path, engine):
    """Whatever is cut off, it is noticed, and nothing else happens."""
    origin = plain(tmp_path / "x.bp", engine)
    known = [str(sample) for sample in both(origin)]
    (tmp_path / "x.bp.dsprep.json").unlink()
    for file in sorted(origin.iterdir()):
        if file.suffix == ".json":
            continue
        whole = file.read_bytes()
        for nbytes in sorted({*np.linspace(0, len(whole) - 1, 20).astype(int).tolist()}):
            file.write_bytes(whole[:nbytes])
            try:
                with opened(origin) as source:
                    assert [str(sample) for sample in source] == known[: len(source)]
            except FormatError:
                pass
        file.write_bytes(whole)
    assert len(both(origin)) == 3


def test_missing(tmp_path):
    for name in ("md.0", "mmd.0", "data.0"):
        path = plain(tmp_path / f"{name}.bp")
        (path / name).unlink()
        with pytest.raises(FormatError, match="a file of the dataset is missing"):
            opened(path)
    path = plain(tmp_path / "index.bp")
    (path / "md.idx").unlink()
    with pytest.raises(DsprepError):
        opened(path)


def test_holes(tmp_path):
    """Rows that nobody wrote, or that several did, are not made up."""
    for k, blocks in enumerate(([(0, 2), (3, 5)], [(0, 3), (2, 5)], [(0, 3)])):
        path = tmp_path / f"{k}.bp"
        with Bp(path) as bp:
            for _ in bp.steps(2):
                for a, b in blocks:
                    bp.put("x", np.arange(a, b), (5,), (a,))
        with pytest.raises(FormatError, match="leave out some rows, or have some twice"):
            opened(path)


def test_irregular(tmp_path):
    """Blocks of several sizes along other axes have no extents, and the way out is named."""
    with Bp(tmp_path / "x.bp") as bp:
        for _ in bp.steps(2):
            bp.array("x", np.zeros((4, 7)), 2, 1)
            bp.array("y", np.zeros((4, 7)))
    with opened(tmp_path / "x.bp") as source:
        assert source.schema.names == ("y",)
        assert any("left out x" in n and "whole rows" in n for n in source.notes)
    with pytest.raises(UnsupportedError, match="whole rows"):
        opened(tmp_path / "x.bp", fields=(dsprep.FieldSpec.parse("x"),))


def test_doubtful(tmp_path):
    """Steps that look like batches are refused until the user says which they are."""
    rng = np.random.default_rng(2)
    x, y = values(rng, (3, 10, 4)), values(rng, (3, 10))
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(3):
            bp.array("x", x[i])
            bp.array("y", y[i])
    with pytest.raises(SchemaError, match="doubtful") as info:
        opened(tmp_path / "x.bp")
    assert "--sample-axis none" in str(info.value)
    assert "--sample-axis first" in str(info.value)
    rows = both(tmp_path / "x.bp", sample_axis="first")
    np.testing.assert_array_equal([r["x"] for r in rows], x.reshape(30, 4))
    np.testing.assert_array_equal([r["y"] for r in rows], y.reshape(30))
    steps = both(tmp_path / "x.bp", sample_axis="none")
    np.testing.assert_array_equal([s["y"] for s in steps], y)


def test_whole(tmp_path):
    """One step whose arrays differ in their first axis is one sample."""
    with Bp(tmp_path / "x.bp") as bp:
        for _ in bp.steps(1):
            bp.array("x", np.arange(12.0).reshape(4, 3), 2)
            bp.array("y", np.arange(5))
            bp.put("n", np.int64(3))
    (sample,) = both(tmp_path / "x.bp")
    assert sample["x"].shape == (4, 3)
    assert sample["y"].tolist() == [0, 1, 2, 3, 4]
    assert sample["n"] == 3


def test_empty(tmp_path):
    """Arrays and blocks of no elements, and a dataset of no steps."""
    with Bp(tmp_path / "x.bp") as bp:
        for i in bp.steps(3):
            bp.put("x", np.zeros((i, 2)), (), ())
            bp.put("z", np.zeros((0, 2)), (0, 2), (0, 0))
    found = both(tmp_path / "x.bp")
    assert [s["x"].shape for s in found] == [(0, 2), (1, 2), (2, 2)]
    assert all(s["z"].shape == (0, 2) for s in found)
    with Bp(tmp_path / "none.bp"):
        pass
    with pytest.raises(FormatError, match="no variable"):
        opened(tmp_path / "none.bp")


def test_old(tmp_path):
    """BP3 is one file; it is named, with the way out."""
    with Bp(tmp_path / "x.bp", "BP3") as bp:
        for _ in bp.steps(2):
            bp.array("x", np.arange(5))
    with pytest.raises(FormatError, match=r"BP3 or older.*adios2_reorganize"):
        opened(tmp_path / "x.bp")


@pytest.mark.parametrize("engine", ENGINES)
def test_many_steps(tmp_path, engine):
    """The laws of many equal steps are affine, and so small whatever their number."""
    path = tmp_path / "x.bp"
    with Bp(path, engine) as bp:
        for i in bp.steps(2000):
            bp.array("x", np.arange(6.0).reshape(2, 3) + i)
            bp.put("n", np.int64(i))
    dsprep.provenance(path)
    assert (tmp_path / "x.bp.dsprep.json").stat().st_size < 2500
    with dsprep.Sidecar.open(path) as opened_:
        batch = opened_.read([1999, 0, 7])
    np.testing.assert_array_equal(batch["n"], [1999, 0, 7])
    np.testing.assert_array_equal(batch["x"][:, 0, 0], [1999, 0, 7])
