"""How much a command says: progress where there is no terminal, ``--quiet``, ``--verbose``."""

from __future__ import annotations

import pytest

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
