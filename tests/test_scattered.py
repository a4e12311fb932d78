"""Samples from anywhere in a dataset: each value goes to its place at once, with a ring or not."""

from __future__ import annotations

import errno
import itertools
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import SUFFIX
from support import MemorySource, assert_same_batch, random_batch

import dsprep
from dsprep.core.schema import Arena, Field, Schema, concatenate
from dsprep.errors import FormatError, ReadError
from dsprep.layout.laws import Affine
from dsprep.layout.model import Blocks, Grid
from dsprep.layout.plain import Plain
from dsprep.reader import unit_plan
from dsprep.reading.layout_reader import LayoutReader
from dsprep.reading.read_plan import ReadPlan
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage import ring as module
from dsprep.storage import scatter
from dsprep.storage.local import LocalFile
from dsprep.storage.paths import open_file
from dsprep.verbs.convert import plan_job
from dsprep.writing.job import RunOptions
from dsprep.writing.run import run_job

COUNT = 1500
SCHEMA = Schema(
    (
        Field("x", np.dtype("<u2"), (300,)),
        Field("y", np.dtype("<i8")),
        Field("none", np.dtype("<f4"), (0,)),
        Field("z", np.dtype(">f4"), (2, 3)),
    )
)
BATCH = random_batch(SCHEMA, COUNT, seed=5)
FORMS = [
    *((format, "one") for format in ("hdf5", "lmdb", "tfrecord")),
    ("hdf5", "several"),
    *((format, "grouped") for format in ("lmdb", "zarr")),
]


@pytest.fixture(scope="module", params=FORMS, ids=" ".join)
def data(request, tmp_path_factory):
    format, form = request.param
    directory = tmp_path_factory.mktemp("scattered")
    origin = directory / "origin"
    origin.touch()
    source = MemorySource(SCHEMA, BATCH, origin)
    path = directory / f"first{SUFFIX[format]}"
    options = {}
    if form == "several":
        path, options = directory / "set", {"to": format, "shard_size": 400}
    run_job(plan_job(source, path, **options), RunOptions(workers=1))
    if form == "grouped":
        first, path = path, directory / f"grouped{SUFFIX[format]}"
        dsprep.repack(first, path, buffer_size=64, stripe_size=4096)
    with Sidecar.open(path) as found:
        yield found


def fields(data):
    """Those that are stored as they are wanted: not the integers of a tf.train.Example."""
    return [n for n in SCHEMA.names if data.content.format != "tfrecord" or n != "y"]


@pytest.fixture(scope="module", params=["ring", "preadv"])
def way(request, data):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "preadv":
            patch.setattr(module, "_own", threading.local())
            patch.setattr(module, "_refused", threading.Event())
            module._refused.set()
        elif module.ring() is None:
            pytest.skip("the kernel refuses io_uring")
        yield {"ring": "io_uring"}.get(request.param, request.param)


NUMBERS = st.integers(0, COUNT - 1)
CHOSEN = st.one_of(
    st.lists(NUMBERS, min_size=2, max_size=30),
    st.tuples(NUMBERS, st.integers(2, 3000)).map(
        lambda pair: np.random.default_rng(pair[0]).integers(0, COUNT, pair[1])
    ),
    st.tuples(NUMBERS, st.integers(COUNT, 2 * COUNT)).map(lambda ends: slice(*ends, 2)),
    st.just(slice(None, None, -1)),
)


@settings(max_examples=8)
@given(
    chosen=CHOSEN, names=st.sets(st.sampled_from(["x", "y", "z"]), min_size=1), own=st.booleans()
)
def test_what_is_read(data, way, chosen, names, own):
    wanted = [n for n in fields(data) if n in names or n == "none"]
    indices = np.arange(COUNT)[chosen]
    if len(wanted) == 1 or len(indices) < 2 or indices[-1] - indices[0] == len(indices) - 1:
        return  # read otherwise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutReader, "read", None)  # so that nothing is read otherwise
        found = data.read(chosen, wanted, arena=Arena() if own else None)
    schema = Schema(tuple(SCHEMA[n] for n in wanted))
    assert_same_batch(found, {n: BATCH[n][indices] for n in wanted}, schema)


def test_values_that_are_near_each_other_are_read_together(data, monkeypatch):
    read = []
    real = LocalFile.read_many
    monkeypatch.setattr(LocalFile, "read_many", lambda parts: (read.extend(parts), real(parts))[1])
    few = data.read(slice(0, 500, 2), fields(data))
    apart = sum(len(runs.starts) for _, runs in read)
    read.clear()
    many = data.read(np.arange(COUNT)[::-1], fields(data))
    assert apart >= 250
    if len(data.content.files) == 1:
        assert sum(len(runs.starts) for _, runs in read) < 100
    for name in fields(data):
        np.testing.assert_array_equal(many[name][::-1][:500:2], few[name])


RESULTS = {
    "as they come": lambda got: got,
    "short": lambda got: got // 2,
    "nothing": lambda got: 0,
    "EINTR": lambda got: -errno.EINTR,
    "EAGAIN": lambda got: -errno.EAGAIN,
    "EIO": lambda got: -errno.EIO,
}


def failing(monkeypatch, result):
    """Have a fifth of all reads come otherwise: of a ring, and one by one, each but once."""
    ring_read, each, calls = module.Ring.read, scatter._one_by_one, itertools.count()

    def less(got):
        if next(calls) < 3:
            got[2::5] = [result(n) for n in got[2::5].tolist()]
        return got

    def by_ring(*args):
        made, got = ring_read(*args)
        return made, less(got)

    monkeypatch.setattr(module.Ring, "read", by_ring)
    monkeypatch.setattr(scatter, "_one_by_one", lambda *args: less(each(*args)))


def test_the_reader(data, way, monkeypatch):
    monkeypatch.setattr(unit_plan, "APART_NEAR", 0)
    for threads, (name, result) in zip((1, 3) * 3, RESULTS.items(), strict=True):
        with monkeypatch.context() as patch:
            failing(patch, result)
            assert_read(data, way, threads, failed=name == "EIO")


def assert_read(data, way, threads, *, failed):
    names = fields(data)
    options = {"shuffle": "global", "buffer_size": 700, "io_threads": threads, "fields": names}
    with dsprep.Reader(data.dataset, 64, epochs=1, **options) as reader:
        if failed:
            with pytest.raises(ReadError, match="Input/output error at offset") as caught:
                list(reader)
            offset = int(re.search(r"at offset (\d+)", str(caught.value))[1])
            found = [data.extents(caught.value.sample, [n]) for n in names if n != "none"]
            assert any(e.offset <= offset < e.offset + e.length for (e,) in found)
            return
        batches = list(reader)
    assert module.way() == way
    order = {row.tobytes(): i for i, row in enumerate(BATCH["x"])}
    chosen = np.array([order[row.tobytes()] for b in batches for row in b["x"]])
    assert sorted(chosen) == list(range(COUNT))
    schema = Schema(tuple(SCHEMA[n] for n in names))
    joined = concatenate(schema, batches)
    assert_same_batch(joined, {n: BATCH[n][chosen] for n in names}, schema)


@pytest.mark.parametrize("start", [-100, -(1 << 62), 901, 1 << 62])
def test_offsets_that_are_not_in_the_file(start, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(1000))
    grid = Grid(Blocks(Affine(0, 3), Affine(100, 3)), (3, 100), 1, (1, 100))
    found = Plain([(SCHEMA["y"], 40), (SCHEMA["z"], 76)], grid, 100)
    out = np.zeros(300, np.uint8)
    to = [out.ctypes.data + np.arange(3)] * 2
    with pytest.raises(FormatError, match="not in the file"):
        ReadPlan().put_plain(open_file(path), found, np.array([0, start, 900]), to)
