"""``dsprep repack`` as a user types it: what is said about doubtful wishes."""

from __future__ import annotations

import sys

import h5py
import pytest
from support import cli

from dsprep.verbs import break_even


def test_nothing_is_measured_twice():
    read = []

    def one(i):
        read.append(i)
        return 1

    assert break_even._seconds_per_sample(one, 5, 3) > 0
    assert sorted(read) == list(range(5))  # a second time it would come from the cache
    read.clear()
    break_even._seconds_per_sample(one, 10**9, 3)
    assert len(set(read)) == len(read) <= break_even.MOST


@pytest.mark.parametrize("samples", [1000, 1 << 21, 3 << 21, 1 << 24])
def test_the_memory_that_is_named_suffices(samples, tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (samples,), "f4", chunks=(1 << 20,) if samples > 1000 else None)
    words = ("repack", path, tmp_path / "out.h5", "--shuffle", 1, "--dry-run", "--memory")
    for memory in ("1kB", "34MB", "40MB", "47MB", "50MB"):
        done = cli(*words, memory, code=None)
        if done.code:
            assert "does not fit in the memory" in done.err
            cli(*words, done.err.split("at least ")[1].split(",")[0].replace(" ", ""))


# --- the plan ----------------------------------------------------------------------------------


def test_a_plan_needs_nobody_who_works(train, tmp_path, monkeypatch):
    for package in ("mpi4py", "dask", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    for command in ("repack", "convert"):
        for executor in ("mpi", "dask", "processes"):
            done = cli(command, train, tmp_path / "out.h5", "--dry-run", "--executor", executor)
            assert f"whether --executor {executor} works here was not checked" in done.err
            assert "Nothing was written" in done.out


@pytest.mark.parametrize("error", [OSError(107, "not connected"), KeyError(), ValueError("odd")])
def test_a_measurement_that_fails_ends_no_repack_that_is_done(train, tmp_path, monkeypatch, error):
    def measure(*_):
        raise error

    monkeypatch.setattr(break_even, "measure", measure)
    done = cli("repack", train, tmp_path / "out.h5", "-b", 8)
    assert "note: when the rewrite pays off was not measured: " in done.err
    assert "wrote" in done.out
    assert (tmp_path / "out.h5.dsprep.json").exists()
