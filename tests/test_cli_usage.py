"""What a command says: pages of help, completion, mistakes, progress, --quiet, --verbose."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import warnings

import pytest
from support import cli
from typer.main import get_command
from typer.testing import CliRunner

import dsprep
from dsprep.bench.strategies import SETS, STRATEGIES
from dsprep.cli import app, report
from dsprep.synth import names as synth_names

TOP = get_command(app)


def load(group, prefix=""):
    """Yield all commands of a group, and the groups themselves, by name."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield f"{prefix}{name}", command, group.available[name].summary
        if hasattr(command, "available"):
            yield from load(command, f"{name} ")


LOADED = list(load(TOP))
COMMANDS = {name: command for name, command, _ in LOADED if not hasattr(command, "available")}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_of_help_fits_and_begins_with_examples(name):
    text = cli(*name.split(), "--help").out
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("Examples:") < text.index("Options:")
    assert f"  dsprep {name}" in text
    for param in COMMANDS[name].params:  # each is there; nothing is left to the library's words
        assert max(param.opts, key=len) in text if param.opts[0].startswith("-") else True
        assert param.help
        assert getattr(param, "is_flag", False) or param.metavar, param.name
    assert "None" not in text


@pytest.mark.parametrize(("name", "command", "summary"), LOADED, ids=[n for n, *_ in LOADED])
def test_a_group_says_of_a_command_what_its_own_page_says(name, command, summary):
    assert summary == " ".join(command.help.split("\n\n")[0].split())


def test_pydantic_is_imported_for_mistakes_alone(train):
    code = f"""
import sys
import warnings
from dsprep.cli import app
try:
    app(["inspect", {str(train)!r}, "--field", "x", "--memory", "1GiB", "--sample-axis", "first"])
except SystemExit as left:
    assert not left.code
print("pydantic" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["False"]


@pytest.mark.parametrize(("line", "limited"), [(["inspect"], True), (["bench", "read"], False)])
def test_numpy_has_threads_of_its_own_in_benchmarks_alone(line, limited, monkeypatch, capsys):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "argv", ["dsprep", *line])
    monkeypatch.setattr(dsprep.cli, "app", lambda: print(os.environ.get("OPENBLAS_NUM_THREADS")))
    with warnings.catch_warnings():
        dsprep.cli.main()
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    assert capsys.readouterr().out.split() == ["1" if limited else "None"]


def test_no_arguments_are_answered_by_help():
    for words in ([], ["bench"]):
        done = cli(*words, code=None)
        assert "Commands:" in done.out
        assert "error" not in done.err


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("convert a b --to ", ["hdf5", "lmdb", "tfrecord", "zarr"]),
        ("repack a b --to z", ["zarr"]),
        ("bench read a --strategy ", [*STRATEGIES, *SETS]),
        ("bench read a -s lmdbio-", [n for n in STRATEGIES if n.startswith("lmdbio-")]),
        ("provenance a --export ", ["kerchunk", "dali-idx"]),
        ("synth cosmo", [n for n in synth_names() if n.startswith("cosmo")]),
    ],
)
def test_names_are_completed(line, names):
    words = ["dsprep", *line.split(" ")]
    environment = {
        "_DSPREP_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="dsprep", env={**os.environ, **environment})
    assert sorted(done.stdout.split()) == sorted(names)


def test_the_version():
    assert cli("--version").out == f"dsprep {dsprep.__version__}\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("convert train.h5 out.h5 <&- >&- 2>&-", 0),
        ("inspect train.h5 >/dev/full", 1),
    ],
)
def test_streams_that_are_closed_or_full(line, code, train):
    command = f"{sys.executable} -m dsprep {line}"
    done = subprocess.run(command, shell=True, cwd=train.parent, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert re.fullmatch("dsprep: error: .*No space left on device\n", done.stderr)
    if "out.h5" in line:
        cli("verify", train, train.parent / "out.h5")


def test_a_terminal_breaks_lines_between_words_and_keeps_no_bar(train):
    (train.parent / "an-output-that-is-there.h5").touch()
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "dsprep", "convert", "train.h5", "an-output-that-is-there.h5"]
    subprocess.run(command, cwd=train.parent, stderr=slave, env={**os.environ, "COLUMNS": "40"})
    os.close(slave)
    shown = os.read(master, 1 << 20).decode().rpartition("\x1b[2K")[2].splitlines()
    os.close(master)
    assert len(shown) > 1
    assert max(map(len, shown)) <= 40
    words = "dsprep: error: an-output-that-is-there.h5: the last path is the output, and it exists"
    assert " ".join(map(str.strip, shown)).startswith(words)


# --- how much is said ------------------------------------------------------------------------


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
