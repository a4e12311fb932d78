"""Every way of reading delivers every sample once, exactly, over all ranks, and leaves nothing."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import STRUCT, fails, random_batch, raw, write_batch

import dsprep
from dsprep import formats
from dsprep.bench import scratch
from dsprep.bench.strategies import SETS, STRATEGIES, TIERED, find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.task import Task
from dsprep.core.schema import Field, Ragged, Schema, concatenate
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.options import OpenOptions

COUNT, BATCH = 37, 5

# What other projects' loaders and torch warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

DUMB = ("pread-limit", "dummy")  # they deliver nothing
NAMES = [n for n in STRATEGIES if n not in (*DUMB, *TIERED)]  # those: test_bench_tiers.py
LMDBIO = SETS["lmdbio"][1:]  # their ranks are tested where they work together
SAMPLEWISE = [name for name in NAMES if name not in LMDBIO]
GROUPWISE = ("group", "group-db", "dsprep", "provenance")
TENSORFLOW = ("tf", "tf-prefetch", "tfrecord")
IN_ORDER = SETS["lmdbio"]
F4 = np.dtype("<f4")
SCHEMAS = {
    "fixed": Schema(
        (
            Field("image", np.dtype("u1"), (4, 4, 3)),
            Field("label", np.dtype("<i8")),
            Field("group/inner", np.dtype(">f4"), (2, 3)),
            Field("half", np.dtype(ml_dtypes.bfloat16), (3,)),
            Field("mask", np.dtype("?"), (7,)),
            Field("large", np.dtype("<u4"), (1500,)),
        )
    ),
    "ragged": Schema(
        (
            Field.opaque("jpeg"),
            Field("points", F4, (None, 3)),
            Field("floats", F4, (None,)),
            Field("ids", np.dtype("<i8"), (None,)),
            Field("counts", np.dtype("<u2"), (None,)),
            Field.opaque("name", "str"),
            Field("label", F4, (2,)),
        )
    ),
    "scalar": Schema((Field("y", F4),)),
    "foreign": Schema(
        (
            Field("hits", STRUCT, (None,)),
            Field("word", np.dtype("<U3"), (2,)),
            Field("code", np.dtype("S7")),
            Field("when", np.dtype("<M8[ns]")),
            Field("z", np.dtype("<c8"), (2,)),
            Field("none", F4, (0, 2)),
        )
    ),
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Give what a strategy reads for a schema's samples, and the samples; each made once."""

    @cache
    def samples(label):
        source = tmp_path_factory.mktemp(label) / "source.h5"
        batch = random_batch(SCHEMAS[label], COUNT, seed=1)
        write_batch(formats.load("hdf5"), source, SCHEMAS[label], batch)
        dsprep.provenance(source)
        return source, batch

    @cache
    def form(label, container):
        planned = scratch.plan([samples(label)[0]], OpenOptions(), [container], buffer_size=8)
        scratch.prepare(planned)
        return planned.forms[container].path

    def dataset(label, name):
        for package in find(name).packages:
            pytest.importorskip(package)
        return form(label, find(name).container), samples(label)[1]

    return dataset


def strategy_of(name, path, schema, **settings):
    settings = {
        "files": (path,),
        "samples": COUNT,
        "batch_size": BATCH,
        "seed": 3,
        "threads": 2,
    } | settings
    task = Task(strategy=name, path=path, schema=schema, **settings)
    return Strategy(task, find(name).load())


def keys(batch, schema):
    """One value per sample that has all its bits."""
    count = len(batch[schema.names[0]])
    return [tuple(raw(batch[f.name][i]) for f in schema) for i in range(count)]


def run_epoch(strategy, number):
    """One epoch's samples as one batch, and the sizes of its steps."""
    batches, sizes = [], []
    for item in strategy.epoch(number):
        sizes.append(strategy.way.size(item))
        batch = copy.deepcopy(strategy.way.batch(item))
        assert {len(column) for column in batch.values()} == {sizes[-1]}
        batches.append(batch)
    return concatenate(strategy.task.schema, batches), sizes


BEFORE = set(Path("/dev/shm").iterdir())


def left_open(path: Path) -> list[str]:
    """What of a dataset stays open or mapped, and processes; these may take a moment to end."""
    for _ in range(600):
        maps = Path("/proc/self/maps").read_text().splitlines()
        targets = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
        found = [line for line in maps + targets if str(path) in line]
        found += map(str, multiprocessing.active_children())
        if "torch" in sys.modules:  # which shares memory
            found += map(str, set(Path("/dev/shm").iterdir()) - BEFORE)
        if not found:
            break
        time.sleep(0.05)
    return found


TAKES = {"tf-prefetch": ("ragged",), "tf": ("fixed",)}  # which share all but reading ahead


@pytest.mark.parametrize(
    ("name", "label"), [(n, label) for n in NAMES for label in TAKES.get(n, ("fixed", "ragged"))]
)
def test_every_sample_comes_once(datasets, name, label):
    schema = SCHEMAS[label]
    path, expected = datasets(label, name)
    once, threads = Counter(keys(expected, schema)), threading.active_count()
    for world in (1,) if name in LMDBIO or label == "fixed" else (3,):
        epochs = [[], []]
        for rank in range(world):
            more = {} if world == 1 else {"buffer_nbytes": 16_000}
            strategy = strategy_of(name, path, schema, rank=rank, world_size=world, **more)
            strategy.open()
            for number in range(2):
                batch, sizes = run_epoch(strategy, number)
                assert_same_types(batch, schema)
                assert len(sizes) <= strategy.task.steps
                assert 0 < min(sizes) <= max(sizes) <= BATCH
                assert sizes[:-1] == [BATCH] * (len(sizes) - 1)
                epochs[number].append(keys(batch, schema))
                if rank == 0 and number == 0:  # as a cold run does
                    strategy.close()
                    assert left_open(path) == []
                    strategy.open()
            strategy.close()
            strategy.close()
        first, second = ([k for part in parts for k in part] for parts in epochs)
        assert Counter(first) == Counter(second) == once
        assert (first == second) == (name in IN_ORDER)
        assert name in IN_ORDER or first != list(keys(expected, schema))
    assert left_open(path) == []
    if name in GROUPWISE:
        assert threading.active_count() == threads


def assert_same_types(batch, schema):
    assert set(batch) == set(schema.names)
    for f in schema:
        column = batch[f.name]
        if f.ragged:
            assert isinstance(column, Ragged)
            assert column.kind == f.kind
            column = column.values
        assert column.dtype == f.dtype
        assert column.shape[1:] == f.inner


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TENSORFLOW])
def test_types_of_all_sorts(datasets, name):
    (path, expected), schema = datasets("foreign", name), SCHEMAS["foreign"]
    strategy = strategy_of(name, path, schema)
    strategy.open()
    batch, _ = run_epoch(strategy, 0)
    assert_same_types(batch, schema)
    strategy.close()
    assert left_open(path) == []
    assert Counter(keys(batch, schema)) == Counter(keys(expected, schema))


@pytest.mark.parametrize("name", TENSORFLOW)
def test_types_that_tensorflow_lacks(datasets, name):
    path, _ = datasets("foreign", name)
    with pytest.raises(UnsupportedError, match="TensorFlow has no dtype for field hits"):
        strategy_of(name, path, SCHEMAS["foreign"]).open()
    assert left_open(path) == []


@pytest.mark.parametrize("name", [*GROUPWISE, "lmdbio-prov", "tf-prefetch", "h5py"])
def test_closing_in_the_middle_of_an_epoch(datasets, name):
    path, _ = datasets("ragged", name)
    strategy = strategy_of(name, path, SCHEMAS["ragged"])
    strategy.open()
    items = strategy.epoch(0)
    assert strategy.way.size(next(items)) == BATCH
    strategy.close()
    assert left_open(path) == []
    items.close()
    strategy.open()
    assert sum(run_epoch(strategy, 1)[1]) == COUNT
    strategy.close()


OF_USER = [n for n in SAMPLEWISE if find(n).container in ("hdf5", "lmdb", "zarr")]


@pytest.mark.parametrize("name", [n for n in OF_USER if n != "torch"])
def test_files_with_other_samples_are_refused(datasets, name):
    path, _ = datasets("scalar", name)
    strategy = strategy_of(name, path, SCHEMAS["scalar"], samples=COUNT + 1)
    fails(lambda: strategy.open(), FormatError, "expected 38")
    strategy.close()
    assert left_open(path) == []


PEER = """
import sys; sys.path.insert(0, {folder!r})
import numpy as np
from common import Ranges, blocks, stored

def write(source, path):
    path.mkdir()
    for name in ("f0", "f1"):
        parts = [columns[name] for _, columns in blocks(source)]
        np.save(path / f"{{name}}.npy", np.concatenate(parts))

def make(data, batch_size, rank, world_size, seed, threads):
    path, schema, count = stored(data, "test", write)
    arrays = [np.load(path / f"{{name}}.npy", mmap_mode="r") for name in ("f0", "f1")]
    read = lambda start, stop: [a[start:stop] for a in arrays]
    return Ranges(read, count, batch_size, rank, world_size, seed, threads)
"""


@pytest.mark.parametrize("world", [1, 3])
def test_loaders_of_other_projects_give_each_sample_once(datasets, tmp_path, monkeypatch, world):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = str(Path(__file__).parents[1] / "examples" / "peers")
    (tmp_path / "peer.py").write_text(PEER.format(folder=folder))
    path, expected = datasets("fixed", "in-place")
    once = sorted(row.tobytes() for row in expected["image"])
    for number in range(2):
        images = []
        for rank in range(world):
            task = {"rank": rank, "world_size": world}
            strategy = strategy_of(f"{tmp_path}/peer.py:make", path, SCHEMAS["fixed"], **task)
            strategy.open()
            images += [row.tobytes() for item in strategy.epoch(number) for row in item[0]]
            strategy.close()
        assert sorted(images) == once
    assert len(list((tmp_path / "dsprep-peers").iterdir())) == 1
