"""What users see before a command runs: pages of help, completion, mistakes in options."""

from __future__ import annotations

import os

import pytest
from test_cli import fails, run
from typer.main import get_command
from typer.testing import CliRunner

from dsprep.bench.strategies import SETS, STRATEGIES
from dsprep.cli import app
from dsprep.formats import FORMATS
from dsprep.layout.laws import LAWS
from dsprep.synth import names as synth_names

TOP = get_command(app)
COMMANDS = {
    **{n: c for n, c in TOP.commands.items() if n != "bench"},
    **{f"bench {n}": c for n, c in TOP.commands["bench"].commands.items()},
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_of_help_fits_and_begins_with_examples(name):
    text = run(*name.split(), "--help").out
    lines = text.splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= 80
    assert not set("╭│╰") & set(text)
    assert text.index("Examples:") < text.index("Options:")
    assert f"  dsprep {name}" in text
    for param in COMMANDS[name].params:  # each is there; nothing is left to the library's words
        assert max(param.opts, key=len) in text if param.opts[0].startswith("-") else True
        assert param.help
        assert getattr(param, "is_flag", False) or param.metavar, param.name
    assert "None" not in text


@pytest.mark.parametrize("format", FORMATS)
def test_options_of_one_format_have_a_page_of_their_own(format):
    text = run("repack", "--help", format).out
    panel = {"lmdb": "LMDB", "tfrecord": "TFRecord"}.get(format, "HDF5 and Zarr")
    assert f"Options for {panel}:" in text
    assert ("--group-values" in text) == (format == "lmdb")
    assert ("--raw-records" in text) == (format == "tfrecord")
    assert ("--sample-axis" in text) == (format in ("hdf5", "zarr"))
    assert "none of its own" in run("audit", "-h", format).out


def test_no_arguments_are_answered_by_help():
    for words in ([], ["bench"]):
        done = run(*words)
        assert "Commands:" in done.out
        assert "error" not in done.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("convert a b --compres zstd", "no option --compres; did you mean --compress?"),
        ("convert a b --shard-sise=4GiB", "no option --shard-sise; did you mean --shard-size?"),
        ("convert a b --frobnicate", "no option --frobnicate; see"),
        ("repack a b --workers 0", "--workers '0': "),
        ("repack a b -j0", "--workers '0': "),
        ("repack a b --workers=many", "--workers 'many': "),
        ("repack a b --order nummeric", "--order 'nummeric' is not understood (expected key"),
        ("repack a b --order nummeric", "did you mean numeric?"),
        ("audit a --ranks 2", "--batch-size is missing"),
        ("audit", "DATA is missing"),
        ("convert", "SRC... DST is missing"),
        ("convert a b --to", "--to needs a value"),
        ("verify a b c", "unexpected extra argument"),
        ("convret a b", "no command 'convret'; did you mean convert?"),
        ("bench raed a", "no command 'raed'; did you mean read?"),
        ("frobnicate", "no command 'frobnicate'; "),
        ("--nosuch", "no option --nosuch"),
        ("provenance a --check=ful", "did you mean full?"),
        ("convert a b --compress zst", "zst"),
    ],
)  # fmt: skip
def test_a_mistake_in_options_is_one_line(line, told):
    message = fails(*line.split(), code=None)
    assert told in message
    assert "Value error" not in message


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("convert a b --to ", ["hdf5", "lmdb", "tfrecord", "zarr"]),
        ("repack a b --to z", ["zarr"]),
        ("bench read a --strategy ", [*STRATEGIES, *SETS]),
        ("bench read a -s lmdbio-", [n for n in STRATEGIES if n.startswith("lmdbio-")]),
        ("provenance a --law ", list(LAWS)),
        ("provenance a --export ", ["kerchunk", "dali-idx", "off-idx"]),
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
