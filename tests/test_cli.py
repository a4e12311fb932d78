"""The commands as a user types them: results, one clear line for each mistake, exit codes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from oracles import SUFFIX
from support import random_batch
from typer.main import get_command
from typer.testing import CliRunner

import dsprep
from dsprep.cli import app
from dsprep.core.schema import Field, Schema
from dsprep.synth import names as synth_names
from dsprep.synth import synth as synthesise
from dsprep.write import transfer

FORMATS = sorted(SUFFIX)


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


def run(*args) -> Result:
    done = CliRunner().invoke(app, [str(a) for a in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # a traceback that the user would see
    return Result(done.exit_code, done.stdout, done.stderr)


def fails(*args, code=1) -> str:
    """Run a command that must fail with exactly one line on stderr; return it without notes."""
    done = run(*args)
    assert done.code == code if code is not None else done.code in (1, 2), done.err
    lines = [w for w in done.err.splitlines() if not w.startswith("dsprep: note: ")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("dsprep: error: ")
    return lines[0]


@pytest.fixture
def train(tmp_path) -> Path:
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(600, dtype="<f4").reshape(100, 2, 3)
        file["y"] = np.arange(100)
        file["x"].attrs["unit"] = "K"
        file.attrs["title"] = "training"
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_convert_inspect_verify(format, train, tmp_path):
    target = tmp_path / f"out{SUFFIX[format]}"
    done = run("convert", train, target)
    assert done.code == 0
    assert "100" in done.out
    assert "B/s of values" in done.out
    assert run("verify", train, target).out == "same: all 100 samples, every bit\n"
    shown = run("inspect", target, "--head", "1").out
    assert "x: float32[2,3]" in shown
    assert "sample 0" in shown
    assert "unit" in shown
    facts = json.loads(run("inspect", target, "--json").out)
    assert facts["samples"] == 100
    assert [f["name"] for f in facts["fields"]] == ["x", "y"]
    assert all(f["layout"]["access"] for f in facts["fields"])


@pytest.mark.parametrize("format", FORMATS)
def test_loading_code_runs(format, train, tmp_path):
    target = tmp_path / f"out{SUFFIX[format]}"
    run("convert", train, target)
    code = run("inspect", target, "--code").out
    assert "dsprep" not in code.replace("dsprep_", "")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    for word in ("x", "y", "float32", "int64"):
        assert word in done.stdout, done.stdout


def test_dry_run_writes_nothing(train, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    done = run("convert", train, tmp_path / "o", "--to", "zarr", "--shard-size", "1kB", "--dry-run")
    assert done.code == 0
    assert "o-00000-of-" in done.out
    assert "Nothing was written" in done.out
    plan = json.loads(
        run("convert", train, tmp_path / "o.lmdb", "--dry-run", "--json", "--samples", ":10").out
    )
    assert plan["samples"] == 10
    assert plan["format"] == "lmdb"
    assert sorted(tmp_path.rglob("*")) == before


def test_options_of_convert(train, tmp_path):
    target = tmp_path / "out.h5"
    done = run(
        "convert", train, target, "--field", "image=x", "--cast", "image=float16",
        "--samples", "10:20", "--compress", "gzip:1", "--chunk", "4", "--json", "--workers", "1",
        "--memory", "256MiB", "--no-sync",
    )  # fmt: skip
    report = json.loads(done.out)
    assert report["samples"] == 10
    with h5py.File(target) as file:
        assert set(file) == {"image"}
        assert file["image"].dtype == np.float16
        assert file["image"].chunks == (4, 2, 3)
        assert file["image"].compression == "gzip"
        assert file["image"][0, 0, 0] == 60


def test_convert_with_verify(train, tmp_path):
    done = run("convert", train, tmp_path / "out.tfrecord", "--verify")
    assert "same: all 100 samples" in done.out


@pytest.mark.parametrize("format", FORMATS)
def test_convert_verifies_what_was_cast_and_chosen(format, train, tmp_path, monkeypatch):
    words = ("--cast", "x=float16", "--samples", "10:90", "--verify")
    done = run("convert", train, tmp_path / f"out{SUFFIX[format]}", *words)
    assert "same: all 80 samples" in done.out
    right = transfer.apply_casts

    def wrong(batch, casts, start):
        cast = right(batch, casts, start)
        cast["x"][-1, 1, 2] += 1
        return cast

    monkeypatch.setattr(transfer, "apply_casts", wrong)
    done = run("convert", train, tmp_path / f"wrong{SUFFIX[format]}", *words)
    assert done.code == 1
    assert "different: sample 79, field x, element [1, 2]: " in done.out


def test_processes_verify_what_was_cast(train, tmp_path):
    words = ("--cast", "x=float16", "--verify", "--executor", "processes", "--workers", "1")
    done = run("convert", train, tmp_path / "out.h5", *words)
    assert "same: all 100 samples" in done.out


def test_shards(train, tmp_path):
    run("convert", train, tmp_path / "shards", "--to", "tfrecord", "--samples-per-file", "30")
    names = sorted(p.name for p in (tmp_path / "shards").iterdir())
    assert names == [f"shards-0000{i}-of-00004.tfrecord" for i in range(4)]
    assert "same: all 100" in run("verify", train, tmp_path / "shards").out
    assert "same: all 100" in run("verify", train, f"{tmp_path}/shards/*").out
    listing = tmp_path / "list.txt"
    listing.write_text("# two of them\nshards/" + "\nshards/".join(names[:2]) + "\n")
    assert json.loads(run("inspect", f"@{listing}", "--json").out)["samples"] == 60


def test_natural_order(tmp_path):
    for i in (1, 2, 10):
        with h5py.File(tmp_path / f"part{i}.h5", "w") as file:
            file["y"] = np.full(2, i)
    run("convert", f"{tmp_path}/part*.h5", tmp_path / "all.h5")
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["y"][:].tolist() == [1, 1, 2, 2, 10, 10]


def test_verify_names_file_sample_field_and_element(train, tmp_path):
    other = tmp_path / "other.h5"
    other.write_bytes(train.read_bytes())
    with h5py.File(other, "r+") as file:
        file["x"][17, 1, 2] = np.nan
        file["y"][40:60] = -1
    done = run("verify", train, other, "-k", "3")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].startswith("different: sample 17, field x, element [1, 2]: 107.0 in ")
    assert str(other) in lines[0]
    assert "sample 40, field y, element []" in lines[1]
    assert len(lines) == 4
    assert lines[-1] == "21 of 100 compared samples differ"
    verdict = json.loads(run("verify", train, other, "--json").out)
    assert (verdict["same"], verdict["differing"]) == (False, 21)


def test_verify_treats_nan_as_its_bits(tmp_path):
    for name, bits in (("a", 0x7FC00000), ("b", 0x7FC00000), ("c", 0x7FC00001), ("d", 0x80000000)):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.full(3, bits, "u4").view("f4")
    with h5py.File(tmp_path / "e", "w") as file:
        file["x"] = np.zeros(3, "f4")
    assert run("verify", tmp_path / "a", tmp_path / "b").code == 0
    assert run("verify", tmp_path / "a", tmp_path / "c").code == 1
    assert run("verify", tmp_path / "d", tmp_path / "e").code == 1


def test_verify_of_different_schemas(train, tmp_path):
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["x"] = np.zeros((99, 2, 3), ">f4")
    done = run("verify", train, tmp_path / "o.h5")
    assert done.code == 1
    assert f"field y is in {train}, not in {tmp_path}/o.h5" in done.out
    assert f"field x: float32[2,3] in {train}, x: >f4[2,3] in {tmp_path}/o.h5" in done.out
    assert "100 samples" in done.out


def test_a_quick_look_says_that_it_is_one(tmp_path):
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.arange(10_000)
    done = run("verify", tmp_path / "a.h5", tmp_path / "b.h5", "--sample", "0.05")
    assert done.code == 0
    compared = int(re.search(r"no difference in ([\d,]+) of 10,000", done.out)[1].replace(",", ""))
    assert 400 <= compared <= 600
    assert "not compared" in done.out
    assert "above 0" in fails(
        "verify", tmp_path / "a.h5", tmp_path / "b.h5", "--sample", "2", code=2
    )


# --- mistakes --------------------------------------------------------------------------------


def test_wrong_usage(train, tmp_path):
    out = tmp_path / "out.h5"
    assert "SRC... DST" in fails("convert", train, code=2)
    assert "suffix" in fails("convert", train, tmp_path / "out", code=2)
    assert "nosuch" in fails("convert", train, out, "--to", "nosuch", code=2)
    assert "float32" in fails("convert", train, out, "--cast", "x=nosuch", code=2)
    assert "NAME=VALUE" in fails("convert", train, out, "--cast", "x", code=2)
    assert "no field z" in fails("convert", train, out, "--field", "z")
    assert "no field z" in fails("convert", train, out, "--cast", "z=float16")
    assert "codec" in fails("convert", train, out, "--compress", "lzma", code=2)
    assert "level" in fails("convert", train, out, "--compress", "gzip:99", code=2)
    assert "START:STOP" in fails("convert", train, out, "--samples", "5", code=2)
    assert "size" in fails("convert", train, out, "--memory", "much", code=2)
    assert "--memory" in fails("convert", train, out, "--memory", "1kB", code=2)
    assert run("convert", train, out, "--workers", "0").code == 2
    assert "--skip-key does" in fails("convert", train, out, "--skip-key", "length", code=2)
    assert "--key-format does" in fails("convert", train, out, "--key-format", "{index}", code=2)
    both = ["--samples-per-file", "3", "--shard-size", "1MB"]
    assert "either" in fails("convert", train, out, *both, code=2)
    assert not list(tmp_path.glob("*out*"))


def test_the_target_is_protected(train, tmp_path):
    before = train.read_bytes()
    assert "holds the source" in fails("convert", train, train, "--overwrite", code=2)
    out = tmp_path / "out.lmdb"
    out.write_bytes(b"precious")
    assert "exists already" in fails("convert", train, out)
    assert out.read_bytes() == b"precious"
    assert run("convert", train, out, "--overwrite").code == 0
    assert out.is_dir()
    assert train.read_bytes() == before
    assert "no such directory" in fails("convert", train, tmp_path / "no" / "out.h5")


def test_missing_and_empty_sources(train, tmp_path):
    out = tmp_path / "out.h5"
    assert "No such file" in fails("convert", tmp_path / "nosuch.h5", out)
    assert "nothing matches" in fails("convert", f"{tmp_path}/*.nosuch", out, code=2)
    (tmp_path / "empty").mkdir()
    assert "holds no dataset" in fails("convert", tmp_path / "empty", out)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("hello")
    assert "1 other files" in fails("convert", tmp_path / "text", out)
    (tmp_path / "zero.h5").touch()
    assert "empty" in fails("inspect", tmp_path / "zero.h5")
    assert "none of the formats" in fails("inspect", tmp_path / "text" / "a.txt")
    (tmp_path / "list").write_text("\n# nothing\n")
    assert "names no file" in fails("inspect", f"@{tmp_path}/list", code=2)
    assert not out.exists()


def test_paths_that_are_no_files(train, tmp_path):
    out = tmp_path / "out.h5"
    os.mkfifo(tmp_path / "pipe.h5")
    assert "neither a file" in fails("convert", tmp_path / "pipe.h5", out, code=2)
    assert "neither a file" in fails("convert", "/dev/null", out, code=2)
    assert "not a path" in fails("convert", "", out, code=2)
    assert "no list" in fails("convert", "@/dev/zero", out, code=2)
    assert "no list" in fails("convert", f"@{tmp_path}", out, code=2)
    assert "has no name" in fails("convert", train, "/", "--to", "zarr", code=2)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    os.mkfifo(mixed / "pipe.h5")
    (mixed / "self").symlink_to("self")
    (mixed / "loop").symlink_to(".")
    (mixed / "good.h5").write_bytes(train.read_bytes())
    done = run("convert", mixed, out)
    assert done.code == 0
    assert "left out loop, pipe.h5, self" in done.err
    assert json.loads(run("inspect", f"{mixed}/**/*d.h5", "--json").out)["files"] == 1
    for name in ("data.mdb", "zarr.json"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        os.mkfifo(folder / name)
        assert "no dataset" in fails("inspect", folder)
    nested = tmp_path / "@nested"
    nested.write_text("@nested\n")
    assert "none of the formats" in fails("inspect", f"@{nested}")  # lists do not nest


def test_names_that_are_no_unicode(train, tmp_path):
    odd = os.fsencode(tmp_path) + b"/\xff\xfe [1] %s.h5"
    Path(os.fsdecode(odd)).write_bytes(train.read_bytes())
    for suffix in SUFFIX.values():
        out = os.fsdecode(os.fsencode(tmp_path) + b"/\xfd" + suffix.encode())
        program = [sys.executable, "-m", "dsprep", "convert", odd, os.fsencode(out)]
        done = subprocess.run(program, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        with dsprep.open(os.fsdecode(odd)) as a, dsprep.open(out) as b:
            assert dsprep.verify(a, b).same
    (tmp_path / "list").write_bytes(odd + b"\n")
    assert json.loads(run("inspect", f"@{tmp_path}/list", "--json").out)["samples"] == 100


def test_mixed_formats_and_schemas(train, tmp_path):
    run("convert", train, tmp_path / "b.tfrecord")
    message = fails("inspect", train, tmp_path / "b.tfrecord")
    assert "mixes formats" in message
    assert "b.tfrecord" in message
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros((5, 2, 4), "f4")
        file["y"] = np.arange(5)
    message = fails("inspect", train, tmp_path / "other.h5")
    assert "other.h5" in message
    assert "field x" in message
    assert run("inspect", train, tmp_path / "other.h5", "--field", "y").code == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("keep", [0.3, 0.8, 0.99])
def test_truncated_sources(format, keep, tmp_path):
    source = tmp_path / "train.h5"
    with h5py.File(source, "w") as file:
        file["x"] = random_batch(Schema((Field("x", np.dtype("f4"), (500,)),)), 200)["x"]
    whole = tmp_path / f"whole{SUFFIX[format]}"
    run("convert", source, whole)
    files = sorted((p for p in whole.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    file = files[-1] if whole.is_dir() else whole
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * keep) | 1)  # never between two records
    out = tmp_path / "out.h5"
    message = fails("convert", whole, out)
    assert whole.name in message
    assert not out.exists()


def test_no_permission(train, tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:  # root may write everywhere, so the kernel's no is played
        patch.setattr(Path, "mkdir", refuse)
        assert "out.h5.dsprep-partial: Permission denied" in fails(
            "convert", train, tmp_path / "out.h5"
        )
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        patch.setattr(os, "open", refuse)
        assert "train.h5: Permission denied" in fails("inspect", train)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.h5"]


def test_no_space(train, tmp_path, monkeypatch):
    from dsprep.write import job

    monkeypatch.setattr(job, "free_nbytes", lambda path: 1000)
    out = tmp_path / "out.h5"
    assert "not enough space" in fails("convert", train, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.h5"]
    assert run("convert", train, out, "--compress", "gzip").code == 0  # may well fit


def test_what_an_interrupted_run_wrote_counts_as_space(train, tmp_path, monkeypatch):
    from dsprep.core.atomic import partial_path
    from dsprep.write import job
    from dsprep.write.staging import Staging

    def stop(*args):
        raise KeyboardInterrupt

    out = tmp_path / "out.tfrecord"
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", stop)
        assert run("convert", train, out).code == 130
    assert partial_path(out).exists()
    monkeypatch.setattr(job, "free_nbytes", lambda path: 500)
    assert run("convert", train, out).code == 0


def test_other_things_are_never_replaced(train, tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "thesis.txt").write_text("years of work")
    assert "not replaced" in fails("convert", train, keep, "--to", "zarr", "--overwrite")
    (keep / "data.h5").write_bytes(train.read_bytes())
    assert "thesis.txt" in fails("convert", train, keep, "--to", "zarr", "--overwrite")
    assert sorted(p.name for p in keep.iterdir()) == ["data.h5", "thesis.txt"]
    (keep / "thesis.txt").unlink()
    assert run("convert", train, keep, "--to", "zarr", "--overwrite").code == 0
    assert (keep / "zarr.json").exists()


def test_a_failed_run_stands_in_nobodys_way(train, tmp_path):
    with h5py.File(train, "r+") as file:
        file["x"][3] = 1e30
    out = tmp_path / "out.h5"
    assert "sample 3, field x" in fails("convert", train, out, "--cast", "x=float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.h5"]
    assert run("convert", train, out).code == 0


def test_notes_come_from_all_files(tmp_path):
    for i in range(3):
        with h5py.File(tmp_path / f"q{i}.h5", "w") as file:
            file["x"], file["y"] = np.zeros((4, 2)), np.arange(4)
            file.attrs["id"] = i
            if i:
                file["z"] = np.arange(9)
    done = run("convert", f"{tmp_path}/q*.h5", tmp_path / "all.h5")
    assert "left out z" in done.err
    assert "(in 2 of 3 files)" in done.err
    assert "attributes are not those of the first file" in done.err


def test_a_dataset_may_be_renamed_with_its_sidecar(train, tmp_path):
    run("convert", train, tmp_path / "a.tfrecord")
    run("convert", train, tmp_path / "s", "--to", "lmdb", "--samples-per-file", "30")
    for old, new in (("a.tfrecord", "b.tfrecord"), ("s", "t")):
        (tmp_path / old).rename(tmp_path / new)
        assert run("verify", train, tmp_path / new).code == 1
        (tmp_path / f"{old}.dsprep.json").rename(tmp_path / f"{new}.dsprep.json")
        assert run("verify", train, tmp_path / new).code == 0


@pytest.mark.parametrize("format", ["hdf5", "tfrecord"])
def test_a_sidecar_that_lists_other_files(format, train, tmp_path):
    """It is ignored with a note where the files have the types, and refused where it alone has."""
    run("convert", train, tmp_path / "s", "--to", format, "--samples-per-file", "50")
    first = min((tmp_path / "s").iterdir())
    (tmp_path / "s" / f"more{first.suffix}").write_bytes(first.read_bytes())
    done = run("inspect", tmp_path / "s")
    assert done.code == (format == "tfrecord")
    assert ("sidecar ignored" in done.err) == (format == "hdf5")
    assert f"more{first.suffix}" in done.err


def test_json_is_json(train, tmp_path):
    report = json.loads(run("convert", train, tmp_path / "o.zarr", "--json", "--verify").out)
    assert report["verify"]["same"]
    assert report["copied"] == report["payload"] == 100 * (24 + 8)
    other = tmp_path / "other.h5"
    other.write_bytes(train.read_bytes())
    with h5py.File(other, "r+") as file:
        file["x"][0, 0, 0] = np.nan
    text = run("verify", train, other, "--json").out
    assert json.loads(text, parse_constant=pytest.fail)["differences"][0]["b"] == "nan"


@pytest.mark.parametrize("format", FORMATS)
def test_the_disk_fills_up(format, train, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    out = tmp_path / f"out{SUFFIX[format]}"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        patch.setattr(os, "pwrite", full)
        assert "No space left" in fails("convert", train, out)
    assert not out.exists()
    assert run("convert", train, out).code == 0
    assert run("verify", train, out).code == 0


def test_an_interrupted_run_with_other_options(train, tmp_path, monkeypatch):
    from dsprep.write.staging import Staging

    def stop(*args):
        raise KeyboardInterrupt

    out = tmp_path / "out.h5"
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", stop)
        done = run("convert", train, out)
    assert done.code == 130
    assert "same command again" in done.err
    assert not out.exists()
    assert "--restart" in fails("convert", train, out, "--samples", ":50")
    assert run("convert", train, out, "--samples", ":50", "--restart").code == 0
    assert json.loads(run("inspect", out, "--json").out)["samples"] == 50


# --- the rest --------------------------------------------------------------------------------


def test_synth(tmp_path):
    listed = run("synth", "--list").out
    assert "cosmic-tagger" in listed
    done = run("synth", "cosmic-tagger", tmp_path / "c.h5", "--samples", "3")
    assert done.code == 0
    hint = done.out.split("look ")[1].split()
    assert run(*hint[1:]).code == 0
    assert "exists" in fails("synth", "cosmic-tagger", tmp_path / "c.h5")
    assert "NAME OUT" in fails("synth", code=2)


@pytest.mark.parametrize("name", synth_names())
def test_synthetic_datasets_convert_around_the_formats(name, tmp_path):
    made = synthesise(name, tmp_path / "made", samples=5, scale=0.05)
    _, verb, data, *options = shlex.split(made.open_hint)
    assert json.loads(run(verb, data, *options, "--json").out)["samples"] > 0
    last, read = data, options
    for suffix in (".zarr", ".lmdb", ".tfrecord", ".h5"):
        target = tmp_path / f"out{suffix}"
        assert run("convert", last, target, *read).code == 0
        as_a = ["--field-a" if word == "--field" else word for word in read]
        assert run("verify", last, target, *as_a).code == 0
        last, read = target, []


def test_demo(tmp_path):
    done = run("demo", "--json", "--keep", tmp_path / "kept")
    result = json.loads(done.out)
    assert result["same"]
    assert {s["target"] for s in result["steps"]} == {"h5", "lmdb", "tfrecord", "zarr", "groups"}
    assert any((tmp_path / "kept").iterdir())


def test_help_has_examples_and_every_option_is_explained():
    for command in (
        *("convert", "repack", "provenance", "inspect", "verify", "synth", "demo"),
        *("bench read", "bench compare"),
    ):
        text = run(*command.split(), "--help").out
        assert "Examples" in text
        assert f"dsprep {command}" in text
    assert run("--version").out == f"dsprep {dsprep.__version__}\n"


def test_the_program_itself(train, tmp_path):
    program = [sys.executable, "-m", "dsprep"]
    done = subprocess.run(
        [*program, "convert", str(train), str(train)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dsprep: error: ")
    assert "Traceback" not in done.stderr
    out = tmp_path / "out.zarr"
    subprocess.run([*program, "convert", str(train), str(out)], capture_output=True, check=True)
    lineage = json.loads((tmp_path / "out.zarr.dsprep.json").read_text())["lineage"]
    assert lineage["version"] == dsprep.__version__


def test_messages_name_options_that_exist():
    top = get_command(app).commands.values()
    commands = [c for command in top for c in getattr(command, "commands", {"": command}).values()]
    known = {o for c in commands for p in c.params for o in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version"}
    known |= {"--yaml", "--reflink", "--parents"}  # of lfs and cp
    root = Path(dsprep.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name == "page":  # style sheets have names of that form
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", node.value):
                    assert word in known, f"{path.relative_to(root)}:{node.lineno}: {word}"
