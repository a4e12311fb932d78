"""A Reader with a cache gives what it gives without one, whatever the cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_same_batch, epochs, random_batch, written

import dsprep
from dsprep.cache.folder import CacheFolder, info_of
from dsprep.core.schema import Field, Schema

COUNT = 100
FIXED = Schema((Field("x", np.dtype("<f4"), (40, 30)), Field("y", np.dtype("<i8"))))


@pytest.fixture(autouse=True)
def unnoticed(monkeypatch):
    """Copies of killed jobs are told by the start of the machine, not by how long ago it was."""
    monkeypatch.setattr("dsprep.reader.cached.PAUSE", 0.002)


def repacked(folder: Path, name: str = "out.h5", schema: Schema = FIXED, **options: Any) -> Path:
    """A dataset of random samples in groups of eight."""
    source = folder / f"in {name}.h5"
    written(source, schema, random_batch(schema, COUNT, seed=1))
    options = {"buffer_size": 8, "stripe_size": "4KiB", "durable": False, **options}
    dsprep.repack(source, folder / name, **options)
    return folder / name


def compared(path: Path, cache: Path, count: int = 2, **options: Any) -> list[Any]:
    """Read so many epochs with and without a cache; return the statistics of those with it."""
    with (
        dsprep.Reader(path, 8, epochs=count, **options) as plain,
        dsprep.Reader(path, 8, epochs=count, cache=cache, **options) as cached,
    ):
        for expected, found in zip(epochs(plain, count), epochs(cached, count), strict=True):
            assert_same_batch(found, expected, plain.schema)
        return cached.stats


def copies(cache: Path) -> list[Any]:
    """What is known of all copies."""
    return [info_of(path) for path in CacheFolder(cache).paths()]


def test_paths_of_the_same_data_share_a_copy(tmp_path, monkeypatch):
    path, cache = repacked(tmp_path), tmp_path / "cache"
    with dsprep.Reader(path, 8, cache=cache) as user:
        list(user)
        monkeypatch.chdir(tmp_path)
        (stats,) = compared(Path("out.h5"), cache, 1)
        assert (stats.cache_nbytes, stats.copied_nbytes) == (stats.nbytes, 0)
        (info,) = copies(cache)
        assert (info.dataset, info.in_use) == (str(path), True)
    assert not copies(cache)[0].in_use


def test_names_of_any_length_and_script_have_a_copy(tmp_path):
    path = repacked(tmp_path)
    long = tmp_path / ("日本" * 35 + ".h5")
    path.rename(long)
    path.with_name(path.name + ".dsprep.json").rename(long.with_name(long.name + ".dsprep.json"))
    assert compared(long, tmp_path / "cache")[1].copied_nbytes == 0
