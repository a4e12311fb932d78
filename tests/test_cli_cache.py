"""``dsprep cache``: what a cache holds is listed and removed, while others use it."""

from __future__ import annotations

import os
import time

import pytest
from support import cli
from test_cache import compared, repacked

import dsprep
from dsprep.cache.folder import CacheFolder


def run(*words, code=0):
    done = cli("cache", *words, code=code)
    return done.json() if "--json" in words else done.out + done.err


@pytest.fixture
def path(tmp_path):
    return repacked(tmp_path)


@pytest.fixture
def cache(path, tmp_path):
    """With a copy of the dataset, which is complete."""
    compared(path, tmp_path / "cache")
    return tmp_path / "cache"


def test_nothing_that_is_in_use_is_removed(path, cache):
    with dsprep.Reader(path, 8, cache=cache) as reader:
        list(reader)
        assert "in use, kept" in run("purge", cache, "--all", code=1)
        assert "in use, kept" in run("purge", cache, "--all", "--dry-run")
        assert len(CacheFolder(cache).infos()) == 1
    assert run("purge", cache, "--all", "--json")["nbytes"] > 0
    assert CacheFolder(cache).infos() == []


def test_what_is_removed_is_chosen(path, cache, tmp_path, monkeypatch):
    other = repacked(tmp_path, "other.h5")
    compared(other, cache)
    monkeypatch.chdir(tmp_path)
    mine, others = (
        cache / n for n in sorted(CacheFolder(cache).names(), key=lambda n: n.startswith("other"))
    )
    week = time.time() - 8 * 86400
    os.utime(mine / "use", (week, week))

    def chosen(*words):
        return [c["path"] for c in run("purge", cache, *words, "-n", "--json")["removed"]]

    assert chosen("--all") == sorted([str(mine), str(others)])
    assert chosen("--dataset", "other.h5") == [str(others)]
    assert chosen("--unused-since", "7d") == [str(mine)]
    assert chosen("--unused-since", "7d", "--dataset", other) == []
    (cache / ".left.dsprep-cache-partial").mkdir()
    assert len(run("purge", cache, "--all", "--json")["removed"]) == 2
    assert [p.name for p in cache.iterdir()] == ["dsprep-cache.lock"]
