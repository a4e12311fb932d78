"""``dsprep repack`` as a user types it: what is said about doubtful wishes."""

from __future__ import annotations

import json
import os
import shutil
import sys

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from dsprep.cli import app
from dsprep.verbs import break_even
from dsprep.writing.staging import Staging


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4000, dtype="<f4").reshape(1000, 4)
        file["y"] = np.arange(1000) % 2
    return path


def run(*words, measure=False):
    more = [] if measure else ["--no-measure"]
    done = CliRunner().invoke(app, ["repack", *map(str, words), *more])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # a traceback that the user would see
    return done


def notes(*words):
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    return [w.removeprefix("dsprep: note: ") for w in done.stderr.splitlines()]


def test_zip_is_for_zarr(train, tmp_path):
    for words in (("o.h5",), ("o.zarr", "--to", "lmdb"), ("o.lmdb",)):
        done = run(train, tmp_path / words[0], *words[1:], "--zip")
        assert done.exit_code == 2
        assert "error: --zip is for zarr: name the output OUT.zarr.zip" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["train.h5"]
    for name, made in (("a", "a.zip"), ("b.zarr", "b.zarr.zip"), ("c.zarr.zip", "c.zarr.zip")):
        assert run(train, tmp_path / name, "--zip").exit_code == 0
        assert (tmp_path / made).is_file()


def test_options_without_effect_are_told(train, tmp_path):
    words = (train, tmp_path / "o.h5", "--dry-run", "--shuffle", 1, "--duplicate", 2, "--split")
    assert "without effect: --shuffle, --duplicate" in notes(*words, "a=.5,b=.5")[0]


def test_outputs_are_compared_with_their_samples(train, tmp_path):
    words = ("--shuffle", "1", "--split", "train=.7,test=.3", "--verify")
    done = run(train, tmp_path / "out.h5", "-b", "8", *words)
    assert done.exit_code == 0, done.output
    assert done.output.count(", bit for bit") == 2
    done = run(train, tmp_path / "out2.h5", "-b", "8", *words, "--json", "-q")
    verdicts = json.loads(done.stdout)["verify"]
    assert sorted(name[-8:] for name in verdicts) == ["-test.h5", "train.h5"]
    assert all(v["same"] and v["complete"] for v in verdicts.values())


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
    words = (path, tmp_path / "out.h5", "--shuffle", 1, "--dry-run", "--memory")
    for memory in ("1kB", "34MB", "40MB", "47MB", "50MB"):
        done = run(*words, memory)
        if done.exit_code:
            assert "does not fit in the memory" in done.stderr
            least = done.stderr.split("at least ")[1].split(",")[0].replace(" ", "")
            done = run(*words, least)
        assert done.exit_code == 0, done.stderr


def test_a_leftover_of_other_options_is_told_in_words(train, tmp_path, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "publish", killed)
    assert run(train, tmp_path / "o.h5", "-b", 10).exit_code == 130
    monkeypatch.undo()
    done = run(train, tmp_path / "o.h5", "-b", 20, "--shuffle", 1)
    assert done.exit_code == 1
    assert "other options (--buffer-size or --stripe-size, --shuffle)" in done.stderr
    assert "--restart to discard what it left" in done.stderr
    times = train.stat().st_mtime_ns
    os.utime(train, ns=(times, times + 10**10))
    done = run(train, tmp_path / "o.h5", "-b", 10)
    assert "something else (source as it was); repeat the command" in done.stderr


@pytest.mark.parametrize("command", ["repack", "convert"])
def test_a_pattern_without_quotes_and_no_output(command, train, tmp_path):
    others = [shutil.copy(train, tmp_path / f"{i}.h5") for i in range(3)]
    done = CliRunner().invoke(app, [command, *map(str, others)])
    assert done.exit_code == 1
    assert "2.h5: the last path is the output, and it exists already" in done.stderr
    assert "name another output after the sources" in done.stderr
    assert len(list(tmp_path.iterdir())) == 4


# --- the plan ----------------------------------------------------------------------------------


def test_the_plan_is_five_lines_that_a_person_can_read(train, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for words in ((), ("-b", "100"), ("-b", "8KiB", "--stripe-size", "1MiB")):
        done = run("train.h5", "out.h5", "--dry-run", *words)
        *lines, end = done.stdout.splitlines()
        assert end == "Nothing was written (--dry-run)."
        assert [line.split("  ")[0] for line in lines] == [
            "target",
            "groups",
            "reads",
            "aligned",
            "on disk",
        ]
        assert max(map(len, lines)) <= 80
    assert "at most 8 KiB as asked" in done.stdout


def test_a_plan_needs_nobody_who_works(train, tmp_path, monkeypatch):
    for package in ("mpi4py", "dask", "distributed"):
        monkeypatch.setitem(sys.modules, package, None)
    for command in ("repack", "convert"):
        for executor in ("mpi", "dask", "processes"):
            words = [command, train, tmp_path / "out.h5", "--dry-run", "--executor", executor]
            done = CliRunner().invoke(app, list(map(str, words)))
            assert done.exit_code == 0, done.stderr
            assert f"whether --executor {executor} works here was not checked" in done.stderr
            assert "Nothing was written" in done.stdout


@pytest.mark.parametrize("name", ["o.h5", "o.zarr", "o.zarr.zip", "o.tfrecord", "o.lmdb"])
def test_inspect_shows_the_groups(name, train, tmp_path):
    out = tmp_path / name
    assert run(train, out, "-b", 30).exit_code == 0
    done = CliRunner().invoke(app, ["inspect", str(out)])
    assert "groups   34 of 30 samples, about 720 B each" in done.stdout
    done = CliRunner().invoke(app, ["inspect", str(out), "--json"])
    assert json.loads(done.stdout)["groups"] == {"count": 34, "samples": 30}
    done = CliRunner().invoke(app, ["inspect", str(train), "--json"])
    assert json.loads(done.stdout)["groups"] is None


@pytest.mark.parametrize("error", [OSError(107, "not connected"), KeyError(), ValueError("odd")])
def test_a_measurement_that_fails_ends_no_repack_that_is_done(train, tmp_path, monkeypatch, error):
    def measure(*_):
        raise error

    monkeypatch.setattr(break_even, "measure", measure)
    done = run(train, tmp_path / "out.h5", "-b", 8, measure=True)
    assert done.exit_code == 0
    assert "note: when the rewrite pays off was not measured: " in done.stderr
    assert "wrote" in done.stdout
    assert (tmp_path / "out.h5.dsprep.json").exists()
