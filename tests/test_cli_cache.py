"""``dsprep cache``: what a cache holds is listed, compared and removed, while others use it."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing

import pytest
from support import flip
from test_cache import compared, repacked
from typer.testing import CliRunner

import dsprep
from dsprep.cache.copies import Copy
from dsprep.cache.folder import CacheFolder
from dsprep.cli import app
from dsprep.errors import UsageError
from dsprep.verbs.cache import list_copies, purge


def run(*words, code=0):
    done = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert done.exit_code == code, done.output
    if "--json" in words:
        return json.loads(done.stdout)
    return done.output


@pytest.fixture
def path(tmp_path):
    return repacked(tmp_path)


@pytest.fixture
def cache(path, tmp_path):
    """With a copy of the dataset, which is complete."""
    compared(path, tmp_path / "cache")
    return tmp_path / "cache"


def only(cache):
    folder = CacheFolder(cache)
    (name,) = folder.names()
    return folder.root / name


def opened(path):
    return closing(Copy(path))


def damaged(cache, number):
    """Flip a bit of a piece; return its copy."""
    with opened(only(cache)) as copy:
        sidecar = dsprep.Sidecar.open(copy.facts.sidecar)
        with sidecar:
            at = int(sidecar.layout(0).groups.blocks.offsets.one(number))
    flip(only(cache) / "0", at + 5)
    return only(cache)


def test_what_a_cache_holds_is_listed(path, cache):
    text = run("list", cache)
    assert "whole  13 of 13" in text
    assert str(path) in text
    assert "copies  1, 0 in use" in text
    with dsprep.Reader(path, 8, cache=cache, mini_epochs=3, cache_policy="mini-epoch") as reader:
        list(reader)
        found = run("list", cache, "--json")
        assert [c["in_use"] for c in found["copies"]].count(True) >= 1
        assert found["nbytes"] == sum(c["nbytes"] for c in found["copies"]) > 0
        assert found["free"] > 0
        assert "mini-epoch" in run("list", cache)
    (cache / CacheFolder(cache).names()[0] / "copy.json").write_text("{")
    assert "worthless" in run("list", cache)


@pytest.mark.parametrize("words", ["list", "verify", "purge --all"])
def test_there_has_to_be_a_cache(words, tmp_path):
    assert "no such directory" in run(
        *words.split()[:1], tmp_path / "no", *words.split()[1:], code=2
    )
    assert "wrong" not in run(*words.split()[:1], tmp_path, *words.split()[1:])


def test_what_was_changed_is_named_and_not_read_any_more(path, cache):
    assert "13 pieces" in run("verify", cache)
    copy = damaged(cache, 4)
    text = run("verify", cache, code=1)
    assert f"{copy}/0, offset" in text
    assert "piece 4 (samples 32 to 39): its CRC-32C is" in text
    stats = compared(path, cache, 1)[0]
    assert stats.nbytes > stats.cache_nbytes > 0.9 * 12 / 13 * stats.nbytes
    assert "12 pieces" in run("verify", cache)
    dsprep.stage(path, 1, 8, cache, ranks_per_node=1)
    (found,) = run("verify", cache, "--json")
    assert (found["compared"], found["right"]) == (13, True)


def test_what_was_changed_is_copied_again(path, cache):
    for number in (0, 12):
        damaged(cache, number)
    os.truncate(damaged(cache, 7) / "0", (only(cache) / "0").stat().st_size - 5000)
    (found,) = run("verify", cache, "--json", code=1)
    assert found["compared"] == 13
    assert [line.split("piece ")[1].split()[0] for line in found["bad"]] == ["0", "7", "12"]
    dsprep.stage(path, 1, 8, cache, ranks_per_node=1)
    stats = compared(path, cache, 1)[0]
    assert (stats.cache_nbytes, stats.copied_nbytes) == (stats.nbytes, 0)
    assert run("verify", cache, "--json")[0]["bad"] == []


def test_without_the_sidecar_nothing_is_compared(path, cache):
    sidecar = path.with_name("out.h5.dsprep.json")
    content = sidecar.read_text()
    sidecar.unlink()
    assert "sidecar of its dataset is needed" in run("verify", cache, code=1)
    sidecar.write_text(content.replace("\n", "\n "))
    assert "has changed since" in run("verify", cache, code=1)


def test_nothing_that_is_in_use_is_removed(path, cache):
    with dsprep.Reader(path, 8, cache=cache) as reader:
        list(reader)
        assert "in use, kept" in run("purge", cache, "--all", code=1)
        assert "in use, kept" in run("purge", cache, "--all", "--dry-run")
        assert len(list_copies(cache).copies) == 1
    assert run("purge", cache, "--all", "--json")["nbytes"] > 0
    assert list_copies(cache).copies == ()
    assert list_copies(cache).nbytes == 0


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
    for wrong in ({}, {"everything": True, "dataset": other}):
        with pytest.raises(UsageError, match="not clear"):
            purge(cache, **wrong)
