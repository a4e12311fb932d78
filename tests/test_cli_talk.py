"""How much a command says: progress where there is no terminal, ``--quiet``, ``--verbose``."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from test_cli import fails, run

from dsprep.cli import report


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets by hand."""
    now = [1000.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def test_progress_in_a_log_is_a_line_every_thirty_seconds(clock, capsys):
    with report.progress_bar("convert", 5000, 10_000_000, True) as update:
        for second in range(1, 121):
            clock[0] += 1
            update(25 * second, 50_000 * second)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "dsprep: convert: 750 of 5,000 samples, 15%, about 3 min left",
        "dsprep: convert: 1,500 of 5,000 samples, 30%, about 2 min left",
        "dsprep: convert: 2,250 of 5,000 samples, 45%, about 2 min left",
        "dsprep: convert: 3,000 of 5,000 samples, 60%, about 80 s left",
    ]


def test_counts_and_runs_are_told_too(clock, capsys):
    with report.count_bar("open", True) as count, report.run_bar() as runs:
        clock[0] += 31
        count(10, 20)
        runs(1, 3, "h5py\x1b")
    assert capsys.readouterr().err.splitlines() == [
        "dsprep: open: 10 of 20, about 31 s left",
        "dsprep: runs: 1 of 3, h5py\\x1b, about 62 s left",
    ]


def test_a_quick_command_says_nothing_of_its_progress(capsys):
    with report.progress_bar("convert", 5, 5, True) as update:
        update(5, 5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "7 s"), (99, "99 s"), (600, "10 min"), (11_100, "3 h 05 min")]
)
def test_times_are_told_in_their_units(seconds, text):
    assert report.show_time(seconds) == text


# --- --quiet and --verbose -------------------------------------------------------------------


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(600, dtype="<f4").reshape(100, 6)
        file["y"] = np.arange(100)
        file.attrs["title"] = "long " * 50
    return path


def test_quiet_commands_report_nothing_but_what_was_asked_for(train, tmp_path):
    for words in (
        ("convert", train, tmp_path / "a.h5", "--verify"),
        ("repack", train, tmp_path / "b.h5", "-b", "10", "--no-measure"),
        ("provenance", train),
        ("synth", "cosmic-tagger", tmp_path / "c.h5", "--samples", "2"),
    ):
        done = run(*words, "-q")
        assert (done.code, done.out, done.err) == (0, "", "")
    assert "samples" in run("inspect", train, "-q").out
    assert "same: all 100" in run("verify", train, tmp_path / "a.h5", "--quiet").out
    assert "Nothing was written" in run("convert", train, tmp_path / "d.h5", "-q", "-n").out
    assert json.loads(run("convert", train, tmp_path / "d.h5", "-q", "--json").out)["samples"]


def test_quiet_commands_still_tell_losses_and_differences(train, tmp_path):
    with h5py.File(train, "r+") as file:
        file["odd"] = np.arange(7)
    assert "left out odd" in run("convert", train, tmp_path / "a.h5", "-q").err
    words = ("-b", "1", "--shard-size", "1B", "--no-measure", "-q")
    assert "has one sample" in run("repack", train, tmp_path / "b.h5", *words).err
    assert "contradict" in fails("convert", train, tmp_path / "c.h5", "-q", "-v", code=2)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["y"][3] = -1
    done = run("verify", train, tmp_path / "a.h5", "-q")
    assert (done.code, "sample 3" in done.out) == (1, True)


def test_quiet_commands_show_no_progress(clock, train, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SECONDS", 0.0)
    assert "dsprep: convert: 100 of 100" in run("convert", train, tmp_path / "a.h5").err
    assert run("convert", train, tmp_path / "b.h5", "-q").err == ""


def test_verbose_commands_tell_steps_files_and_causes(train, tmp_path):
    words = ("convert", train, tmp_path / "s", "--to", "tfrecord", "--samples-per-file", "60")
    told = run(*words, "-v", "--verify").err
    for step in ("open", "convert", "verify", "in all"):
        assert f"dsprep: {step}: " in told
    assert "s-00001-of-00002.tfrecord: 40 samples, " in told
    assert "dsprep: wrote" not in run(*words, "--overwrite").err
    done = run("convert", train, tmp_path / "x.h5", "--cast", "x=nosuch", "--verbose")
    assert "noticed in core/schema.py" in done.err
    assert "because of TypeError: " in done.err
    assert "Traceback" not in done.err
    assert "..." in run("inspect", train).out
    assert "long " * 49 in run("inspect", train, "-v").out
