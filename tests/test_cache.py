"""A Reader with a cache gives what it gives without one, whatever the cache holds.

That every format can be read from a copy is part of `format_contract`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_same_batch, epochs, random_batch, written

import dsprep
from dsprep.cache.copies import READY, Copy
from dsprep.cache.folder import CacheFolder
from dsprep.cache.pieces import Pieces, name_of
from dsprep.core.schema import Field, Schema
from dsprep.storage.trees import data_files

COUNT = 100
FIXED = Schema((Field("x", np.dtype("<f4"), (40, 30)), Field("y", np.dtype("<i8"))))
MIXED = Schema(
    (
        Field("x", np.dtype("<f4"), (20, 15)),
        Field("y", np.dtype("<i8")),
        Field("points", np.dtype("<i2"), (None, 3)),
        Field.opaque("name", "str"),
    )
)
TARGETS = ("out.h5", "out.zarr", "out.zarr.zip", "out.tfrecord", "out.lmdb")
COMPRESSED = {"out.h5": "gzip", "out.zarr": "zstd"}


def repacked(folder: Path, name: str = "out.h5", schema: Schema = FIXED, **options: Any) -> Path:
    """A dataset of random samples in groups of eight."""
    source = folder / f"in {name}.h5"
    batch = random_batch(schema, COUNT, seed=1)
    batch["x"] = np.repeat(np.arange(batch["x"].size // 10, dtype="<f4"), 10).reshape(
        batch["x"].shape
    )
    written(source, schema, batch)
    options = {"buffer_size": 8, "stripe_size": "4KiB", "durable": False, **options}
    dsprep.repack(source, folder / name, **options)
    return folder / name


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Gives datasets of several kinds, each made once: ``NAME [ragged] [packed|plain|files]``."""
    made: dict[str, Path] = {}

    def give(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("set")
            name, *words = kind.split()
            schema = MIXED if "ragged" in words else FIXED
            options = {"shard_size": 30} if "files" in words else {}
            options |= {"compress": COMPRESSED[name]} if "packed" in words else {}
            if "plain" in words:
                written(folder / name, schema, COUNT)
            else:
                repacked(folder, name, schema, **options)
            made[kind] = folder / name
        return made[kind]

    return give


@contextmanager
def both(path: Path, cache: Path, batch_size: int = 8, **options: Any):
    """A Reader without and one with a cache."""
    tier = dsprep.Cache(cache, policy=options.pop("policy", None))
    cut = {n: options.pop(n) for n in ("recompose", "pools") if n in options}
    if cut:
        options["mini_epochs"] = dsprep.MiniEpochs(options["mini_epochs"], **cut)
    with (
        dsprep.Reader(path, batch_size, **options) as plain,
        dsprep.Reader(path, batch_size, cache=tier, **options) as cached,
    ):
        yield plain, cached


def compared(path: Path, cache: Path, count: int = 2, **options: Any) -> list[Any]:
    """Read so many epochs with and without a cache; return the statistics of those with it."""
    with both(path, cache, **{"epochs": count, **options}) as (plain, cached):
        for a, b in zip(epochs(plain, count), epochs(cached, count), strict=True):
            assert_same_batch(b, a, plain.schema)
        return cached.stats


def copied(stats: list[Any]) -> int:
    """Bytes that were copied, over all epochs."""
    return sum(s.copied_nbytes for s in stats)


def copies(cache: Path) -> list[Any]:
    """What is known of all copies."""
    return CacheFolder(cache).infos()


def assert_kept(path: Path, cache: Path) -> int:
    """What copies hold are the bytes of the dataset; return how many pieces they say they have."""
    count, origins = 0, dict[str, Path]()
    with dsprep.Sidecar.open(path) as sidecar:
        for i, entry in enumerate(sidecar.content.files):
            root = path / entry.path
            for file in data_files(root):
                inside = "" if file == root else str(file.relative_to(root))
                origins[name_of(i, inside)] = file
    folder = CacheFolder(cache)
    for name in folder.names():
        with closing(Copy(folder.root / name)) as copy:
            count += int((copy.states() == READY).sum())
            for file_name in copy.files():
                found, origin = (
                    np.fromfile(file, np.uint8)
                    for file in (copy.path / file_name, origins[file_name])
                )
                assert len(found) == len(origin)
                assert ((found == origin) | (found == 0)).all()
    return count


def nbytes_of(path: Path) -> int:
    """Bytes of all groups of a dataset."""
    with dsprep.Sidecar.open(path) as sidecar:
        edges = np.append(np.arange(0, COUNT, 8), COUNT)
        pieces = Pieces(sidecar, edges, sidecar.schema.names)
        return sum(pieces[i].nbytes for i in range(len(pieces)))


# --- whatever is read, and however -----------------------------------------------------------

KINDS = [
    *(f"{name} ragged" for name in TARGETS),
    *(f"{name} packed" for name in COMPRESSED),
    "out.h5 files",
    "out.zarr ragged plain",
    "out.lmdb ragged files",
    "out.tfrecord plain",
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_epoch_comes_from_the_cache(kind, datasets, tmp_path):
    path, cache = datasets(kind), tmp_path / "cache"
    first, second = compared(path, cache, buffer_size=8)
    assert (second.cache_nbytes, second.copied_nbytes) == (second.nbytes, 0)
    assert second.cache_units == second.units == first.units > 1
    assert first.cache_nbytes == first.nbytes
    assert first.copied_nbytes > 0
    (info,) = copies(cache)
    assert info.complete
    assert info.ready == info.pieces == assert_kept(path, cache) > 1


def double(batch):
    return {**batch, "x": batch["x"] * 2}


OPTIONS = {
    "fields": {"fields": ("y", "x")},
    "one field": {"fields": ("x",), "shuffle": "none"},
    "verify": {"verify": True},
    "global": {"shuffle": "global"},
    "none": {"shuffle": "none", "io_threads": 3},
    "mixed": {"buffers_mixed": 3, "buffers": 3},
    "drop": {"remainder": "drop", "batch_size": 7},
    "pad": {"remainder": "pad", "batch_size": 30},
    "large": {"buffer_size": 40, "batch_size": 3, "transfer_size": 5000},
    "direct": {"engine": "direct"},
    "transform": {"transform": double, "io_threads": 2},
    "one buffer": {"buffers": 1, "io_threads": 1, "seed": 7},
    "mini-epochs": {"mini_epochs": 3, "repeats": 2, "epochs": 2},
    "mini-epochs, global": {"mini_epochs": 3, "repeats": (1, 3), "epochs": 2, "shuffle": "global"},
    "mini-epochs, kept": {"mini_epochs": 3, "repeats": 2, "policy": "epoch", "epochs": 2},
    "fixed split": {"mini_epochs": 3, "repeats": 2, "epochs": 2, "recompose": False},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("out.h5 ragged", name) for name in OPTIONS),
        *(("out.zarr files", name) for name in ("fields", "mini-epochs")),
        *(("out.h5 packed", name) for name in ("verify", "direct", "global")),
    ],
)
def test_options_change_nothing(kind, name, datasets, tmp_path):
    options = dict(OPTIONS[name])
    path, cache = datasets(kind), tmp_path / "cache"
    passes = 12 if "mini_epochs" in options else 3
    stats = compared(path, cache, passes, **{"buffer_size": 8, **options})
    last, kept = stats[-1], not name.startswith("mini") or name.endswith("kept")
    if "global" not in name:  # which waits for no copy
        assert sum(s.cache_nbytes for s in stats) > 0
        assert not kept or (last.cache_nbytes, last.copied_nbytes) == (last.nbytes, 0)
    assert_kept(path, cache)


# --- how much it takes -----------------------------------------------------------------------


def test_mini_epochs_that_are_over_leave_no_file_open(datasets, tmp_path):
    """Also in programs that do not collect garbage while they train."""
    cache = tmp_path / "cache"

    def opened():
        links = (p for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
        names = [str(p.readlink()) for p in links]
        return [n for n in names if n.startswith(str(cache)) and "-part-" in n]

    gc.collect()
    gc.disable()
    try:
        options = {"mini_epochs": 6, "repeats": 2, "cache": cache}
        with dsprep.Reader(datasets("out.lmdb ragged files"), 8, **options) as reader:
            for _ in range(24):
                list(reader)
            assert len({name.split("-part-")[1][:16] for name in opened()}) <= 4
        del reader
        assert not opened()
    finally:
        gc.enable()


# --- who shares it ---------------------------------------------------------------------------


def test_the_next_reader_finds_what_was_copied(datasets, tmp_path):
    path, cache = datasets("out.h5 ragged"), tmp_path / "cache"
    compared(path, cache, 1, seed=1)
    for options in (
        {"seed": 2},
        {"world_size": 3, "rank": 1},
        {"mini_epochs": 3, "policy": "epoch", "repeats": 2},
        {"shuffle": "none", "io_threads": 3, "engine": "direct"},
    ):
        stats = compared(path, cache, 1, **options)[0]
        assert (stats.cache_nbytes, stats.copied_nbytes) == (stats.nbytes, 0)
    assert len(copies(cache)) == 1


def test_ranks_of_nodes_copy_their_pools(datasets, tmp_path):
    """Four ranks on two nodes, each with a cache of its own: nothing else is read again.

    Together they copy all once, and of each mini-epoch at most one group twice.
    """
    path, total = datasets("out.h5"), 0
    for node in range(2):
        ranks = []
        for rank in (2 * node, 2 * node + 1):
            place = {"rank": rank, "world_size": 4, "pools": 2, "mini_epochs": 3, "repeats": 2}
            ranks.append(compared(path, tmp_path / f"{node}", 6, recompose=False, **place))
        total += sum(map(copied, ranks))
        for one in ranks:
            assert all(s.cache_nbytes == s.nbytes for s in one[1::2])
    assert nbytes_of(path) <= total <= (1 + 3 / 13) * nbytes_of(path)


def read_in_child(path, cache, seed, start, sent):
    """Say whether batches are right, and how much was copied."""
    start.wait()
    try:
        sent.send(copied(compared(path, cache, 3, seed=seed, io_threads=1)))
    except BaseException as error:
        sent.send(repr(error))


def test_two_jobs_at_once_copy_all_once(datasets, tmp_path):
    path, cache, fork = datasets("out.h5"), tmp_path / "cache", multiprocessing.get_context("fork")
    start, pipes, jobs = fork.Event(), [fork.Pipe(duplex=False) for _ in range(2)], []
    for seed, (_, sent) in enumerate(pipes):
        jobs.append(fork.Process(target=read_in_child, args=(path, cache, seed, start, sent)))
        jobs[-1].start()
    start.set()
    found = [received.recv() for received, _ in pipes]
    for job in jobs:
        job.join()
    assert sum(found) == nbytes_of(path)
    assert assert_kept(path, cache) == 13


def test_ranks_of_a_node_that_one_reads_for(datasets, tmp_path, monkeypatch):
    """The one that reads uses the cache."""
    path, cache, own = datasets("out.h5"), tmp_path / "cache", {"epochs": 2, "world_size": 2}
    shared = {**own, "readers_per_node": 1, "cache": cache}
    monkeypatch.setenv("MASTER_PORT", f"{os.getpid()} cache")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    readers = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        readers.append(dsprep.Reader(path, 8, rank=rank, **shared))
    for rank, reader in enumerate(readers):
        with dsprep.Reader(path, 8, rank=rank, **own) as plain:
            for a, b in zip(epochs(plain, 2), epochs(reader, 2), strict=True):
                assert_same_batch(b, a, plain.schema)
        assert reader.stats[1].cache_nbytes == reader.stats[1].nbytes > 0
    for reader in reversed(readers):
        reader.close()
    assert assert_kept(path, cache) == 13
