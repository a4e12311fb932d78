"""The commands as a user types them: results, one clear line for each mistake, exit codes."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from oracles import SUFFIX
from support import cli, commands_of
from typer.main import get_command

import dsprep
from dsprep.bench import reading
from dsprep.cli import app, demo
from dsprep.errors import UsageError
from dsprep.source import dataset
from dsprep.synth import names as synth_names
from dsprep.synth import synth as synthesise

FORMATS = sorted(SUFFIX)


def test_of_very_many_files_some_are_looked_into(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "MANY_FILES", 20)
    monkeypatch.setattr(dataset, "INSPECTED_FILES", 3)
    for i in range(40):
        np.save(tmp_path / f"{i}.npy", np.full(3, i))
    asked = ("inspect", tmp_path, "--sample-axis", "none", "--json")
    facts = cli(*asked, "--head", "2").json()
    assert [facts[k] for k in ("files", "looked_into", "samples")] == [40, 4, 40]
    assert facts["stored_nbytes"] == 40 * (tmp_path / "0.npy").stat().st_size
    assert [sample["array"][:2] for sample in facts["head"]] == ["[0", "[1"]
    assert "40, of which 3 were" in cli(*asked[:-1]).out
    assert cli(*asked, "--stats").json()["looked_into"] == 40
    cli("provenance", tmp_path, "--sample-axis", "none")
    assert cli("inspect", tmp_path, "--json").json()["looked_into"] == 40


@pytest.mark.parametrize(
    "words", [("convert",), ("repack",), ("repack", "--split", "train=0.5,val=0.5")]
)
def test_a_dry_run_sees_what_the_run_sees(words, train, tmp_path):
    def both(code, *more):
        asked = (*words, train, tmp_path / "o.zarr", *more)
        done = [cli(*asked, *dry, code=code) for dry in (["-n"], [])]
        notes, last = (sorted(w for w in d.err.splitlines() if "note: " in w) for d in done)
        assert code or notes == last
        return [each.err.splitlines()[-1:] for each in done]

    both(0)
    dry, real = both(1)
    assert dry == real
    assert "add --overwrite" in dry[0]
    both(0, "--overwrite")
    folder = tmp_path / ("o-val.zarr" if "--split" in words else "o.zarr")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.txt").touch()
    dry, real = both(1, "--overwrite")
    assert dry == real
    assert "is not replaced" in dry[0]


@pytest.mark.parametrize(
    ("text", "in_python"),
    [
        ("add --restart, or --overwrite", "add restart=True, or overwrite=True"),
        ("use --compress gzip, --stripe-size 4096", "use compress='gzip', stripe_size=4096"),
        ("read them with --samples 0:12; --chunk 8.", "read them with samples='0:12'; chunk=8."),
        ("--shard-size or --samples", "shard_size= or samples="),
        ("dsprep repack A B --shuffle 3; --memory", "dsprep repack A B --shuffle 3; memory="),
        ("--other and --to-day", "--other and --to-day"),
    ],
)
def test_errors_name_options_as_they_are_given(text, in_python):
    error = pickle.loads(pickle.dumps(UsageError("wrong", fix=text)))
    assert str(error) == f"wrong; {in_python}"
    assert error.args[0] == f"wrong; {text}"


# --- mistakes --------------------------------------------------------------------------------


def test_names_that_are_no_unicode(train, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe [1] %s.h5")
    Path(odd).write_bytes(train.read_bytes())
    for suffix in SUFFIX.values():
        out = os.fsdecode(os.fsencode(tmp_path) + b"/\xfd" + suffix.encode())
        cli("convert", odd, out)
        with dsprep.open(odd) as a, dsprep.open(out) as b:
            assert dsprep.verify(a, b).same
    (tmp_path / "list").write_bytes(os.fsencode(odd) + b"\n")
    assert cli("inspect", f"@{tmp_path}/list", "--json").json()["samples"] == 100


def test_what_an_interrupted_run_wrote_counts_as_space(train, tmp_path, monkeypatch):
    from dsprep.storage.atomic import partial_path
    from dsprep.writing import job
    from dsprep.writing.staging import Staging

    def stop(*args):
        raise KeyboardInterrupt

    out = tmp_path / "out.tfrecord"
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", stop)
        cli("convert", train, out, code=130)
    assert partial_path(out).exists()
    monkeypatch.setattr(job, "free_nbytes", lambda path: 500)
    cli("convert", train, out)


# --- the rest --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", synth_names())
def test_synthetic_datasets_convert_around_the_formats(name, tmp_path):
    made = synthesise(name, tmp_path / "made", samples=5, scale=0.05)
    _, verb, data, *options = shlex.split(made.open_hint)
    assert cli(verb, data, *options, "--json").json()["samples"] > 0
    target = tmp_path / f"out{('.zarr', '.h5')[len(name) % 2]}"
    cli("convert", data, target, *options)
    as_a = ["--field-a" if word == "--field" else word for word in options]
    cli("verify", data, target, *as_a)


def test_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DATASETS", demo.DATASETS[:1])
    monkeypatch.setattr(demo, "SAMPLES", 4)
    monkeypatch.setattr(demo, "READ", 256)
    monkeypatch.setattr(reading, "Settings", partial(reading.Settings, repeat=1))
    text = cli("demo", "--keep", tmp_path / "kept").out
    assert any((tmp_path / "kept").iterdir())
    assert text.count("groups: the same bit for bit") == 1
    assert re.search(r"dsprep.Reader, in groups  computing \d+ %, [\d,]+ samples/s, ", text)
    assert max(map(len, text.splitlines())) <= 80


def test_messages_name_options_that_exist():
    top = commands_of(get_command(app)).values()
    commands = [c for command in top for c in commands_of(command).values() or [command]]
    known = {o for c in commands for p in c.params for o in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version"}
    known |= {"--yaml", "--reflink", "--parents", "--sort"}  # of lfs, cp and tar
    root = Path(dsprep.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name == "page":  # style sheets have names of that form
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line):
                assert word in known, f"{path.relative_to(root)}:{number}: {word}"


def test_docstrings_are_needed():
    done = subprocess.run([sys.executable, "-OO", "-m", "dsprep"], capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "PYTHONOPTIMIZE" in done.stderr
