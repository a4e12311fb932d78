"""The commands as a user types them: results, one clear line for each mistake, exit codes."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from oracles import SUFFIX
from support import commands_of
from typer.main import get_command
from typer.testing import CliRunner

import dsprep
from dsprep import formats
from dsprep.cli import app, demo
from dsprep.errors import UsageError
from dsprep.synth import names as synth_names
from dsprep.synth import synth as synthesise
from dsprep.writing import transfer

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


@pytest.mark.parametrize("format", FORMATS)
def test_convert_inspect_and_verify(format, train, tmp_path):
    target = tmp_path / f"out{SUFFIX[format]}"
    done = run("convert", train, target)
    assert done.code == 0
    assert "100" in done.out
    assert "B/s of values" in done.out
    assert run("verify", train, target).out == "same: all 100 samples, bit for bit\n"
    shown = run("inspect", target, "--head", "1").out
    for word in ("x: float32[2,3]", "sample 0", "unit"):
        assert word in shown
    facts = json.loads(run("inspect", target, "--json").out)
    assert facts["samples"] == 100
    assert [f["name"] for f in facts["fields"]] == ["x", "y"]
    assert all(f["layout"]["access"] for f in facts["fields"])


@pytest.mark.parametrize(
    "words", [("convert",), ("repack",), ("repack", "--split", "train=0.5,val=0.5")]
)
def test_a_dry_run_sees_what_the_run_sees(words, train, tmp_path):
    def both(code, *more):
        done = [run(*words, train, tmp_path / "o.zarr", *more, *dry) for dry in (["-n"], [])]
        assert [each.code for each in done] == [code, code]
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
        ("name it with --to", "name it with to="),
        ("use --compress gzip, --stripe-size 4096", "use compress='gzip', stripe_size=4096"),
        ("read them with --samples 0:12; --chunk 8.", "read them with samples='0:12'; chunk=8."),
        ("--split 'a=1,b' names one", "split='a=1,b' names one"),
        ("--samples-per-file or --samples", "samples_per_file= or samples="),
        ("dsprep repack A B --shuffle 3; --memory", "dsprep repack A B --shuffle 3; memory="),
        ("--other and --to-day", "--other and --to-day"),
    ],
)
def test_errors_name_options_as_they_are_given(text, in_python):
    error = pickle.loads(pickle.dumps(UsageError("wrong", fix=text)))
    assert str(error) == f"wrong; {in_python}"
    assert error.args[0] == f"wrong; {text}"


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


def test_convert_verifies_what_was_cast_and_chosen(train, tmp_path, monkeypatch):
    words = ("--cast", "x=float16", "--samples", "10:90", "--verify")
    done = run("convert", train, tmp_path / "out.lmdb", *words)
    assert "same: all 80 samples" in done.out
    executor = ("--executor", "processes", "--workers", "1")
    done = run("convert", train, tmp_path / "out.h5", *words, *executor)
    assert "same: all 80 samples" in done.out
    right = transfer.apply_casts

    def wrong(batch, casts, start):
        cast = right(batch, casts, start)
        cast["x"][-1, 1, 2] += 1
        return cast

    monkeypatch.setattr(transfer, "apply_casts", wrong)
    done = run("convert", train, tmp_path / "wrong.h5", *words)
    assert done.code == 1
    assert "different: sample 79, field x, element [1, 2]: " in done.out


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

MISTAKES = [
    ("convert SRC", 2, "SRC... DST"),
    ("convert SRC OUT", 2, "suffix"),
    ("convert SRC OUT.h5 --to nosuch", 2, "nosuch"),
    ("convert SRC OUT.h5 --cast x=nosuch", 2, "float32"),
    ("convert SRC OUT.h5 --cast x", 2, "NAME=VALUE"),
    ("convert SRC OUT.h5 --field z", 1, "no field z"),
    ("convert SRC OUT.h5 --cast z=float16", 1, "no field z"),
    ("convert SRC OUT.h5 --compress lzma", 2, "codec"),
    ("convert SRC OUT.h5 --compress gzip:99", 2, "level"),
    ("convert SRC OUT.h5 --samples 5", 2, "START:STOP"),
    ("convert SRC OUT.h5 --memory much", 2, "size"),
    ("convert SRC OUT.h5 --memory 1kB", 2, "--memory of at least 33.6 MB"),
    ("convert SRC OUT.h5 --memory 1kB --dry-run", 2, "--memory of at least 33.6 MB"),
    ("repack SRC OUT.h5 --memory 1kB", 2, "--memory of at least 33.6 MB"),
    ("repack SRC OUT.h5 --memory 1kB --dry-run", 2, "--memory of at least 33.6 MB"),
    ("convert SRC OUT.h5 --skip-key length", 2, "--skip-key does"),
    ("convert SRC OUT.h5 --key-format {index}", 2, "--key-format does"),
    ("convert SRC OUT.lmdb --chunk 4", 2, "--key-format"),
    ("convert SRC OUT.h5 --samples-per-file 3 --shard-size 1MB", 2, "either"),
    ("convert SRC SRC --overwrite", 2, "holds the source"),
    ("convert SRC no/OUT.h5", 1, "no such directory"),
    ("convert SRC / --to zarr", 2, "has no name"),
    ("convert nosuch.h5 OUT.h5", 1, "No such file"),
    ("convert *.nosuch OUT.h5", 2, "nothing matches"),
    ("convert empty OUT.h5", 1, "holds no dataset"),
    ("convert text OUT.h5", 1, "1 other files"),
    ("convert pipe.h5 OUT.h5", 2, "neither a file"),
    ("convert /dev/null OUT.h5", 2, "neither a file"),
    ("convert @/dev/zero OUT.h5", 2, "not a list"),
    ("convert @empty OUT.h5", 2, "not a list"),
    ("inspect zero.h5", 1, "empty"),
    ("inspect text/a.txt", 1, "not a format"),
    ("inspect @nothing", 2, "names no file"),
    ("inspect @@nested", 1, "not a format"),  # lists do not nest
    ("inspect of-data.mdb", 1, "no dataset"),
    ("inspect of-zarr.json", 1, "no dataset"),
    ("verify SRC SRC --sample 2", 2, "above 0"),
    ("repack SRC OUT.lmdb --compress zstd", 2, "lmdb is written without compression; leave --c"),
    ("provenance SRC --check", 1, "there is no sidecar"),
    *(
        (f"{line} 4", 2, "has no unit")
        for line in (
            "convert SRC OUT.h5 --shard-size",
            "convert SRC OUT.h5 --memory",
            "repack SRC OUT.h5 --shard-size",
            "repack SRC OUT.h5 --stripe-size",
            "repack SRC OUT.h5 --memory",
            "bench read SRC --limit",
            "bench read SRC --dry-run -s group --transfer-size",
        )
    ),
    ("bench read SRC --sweep transfer-size=1,4", 2, "has no unit"),
    *(
        (f"{command} {samples}", 2, samples)
        for command in ("convert SRC OUT.h5 --samples", "provenance SRC --locate")
        for samples in ("0:99999", "-101:", "101:", "50:20")
    ),
    *(
        (f"{command} SRC OUT{SUFFIX[name]} --to {format}", 2, "contradict")
        for format in FORMATS
        for name in FORMATS
        if name != format
        for command in ("convert", "repack")
    ),
]


def test_a_mistake_is_one_line_and_makes_nothing(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "text", "of-data.mdb", "of-zarr.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "a.txt").write_text("hello")
    (tmp_path / "zero.h5").touch()
    (tmp_path / "nothing").write_text("\n# nothing\n")
    (tmp_path / "@nested").write_text("@nested\n")
    for pipe in ("pipe.h5", "of-data.mdb/data.mdb", "of-zarr.json/zarr.json"):
        os.mkfifo(tmp_path / pipe)
    before = sorted(p for p in tmp_path.rglob("*") if "OUT" in p.name)
    for line, code, word in MISTAKES:
        message = fails(*line.replace("SRC", "train.h5").split(), code=code)
        assert word in message, (line, message)
    assert sorted(p for p in tmp_path.rglob("*") if "OUT" in p.name) == before
    assert "not a path" in fails("convert", "", "OUT.h5", code=2)


def test_the_target_is_protected(train, tmp_path):
    before = train.read_bytes()
    out = tmp_path / "out.lmdb"
    out.write_bytes(b"precious")
    assert "exists already" in fails("convert", train, out)
    assert out.read_bytes() == b"precious"
    assert run("convert", train, out, "--overwrite").code == 0
    assert out.is_dir()
    assert train.read_bytes() == before


def test_names_that_are_no_unicode(train, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe [1] %s.h5")
    Path(odd).write_bytes(train.read_bytes())
    for suffix in SUFFIX.values():
        out = os.fsdecode(os.fsencode(tmp_path) + b"/\xfd" + suffix.encode())
        assert run("convert", odd, out).code == 0
        with dsprep.open(odd) as a, dsprep.open(out) as b:
            assert dsprep.verify(a, b).same
    (tmp_path / "list").write_bytes(os.fsencode(odd) + b"\n")
    assert json.loads(run("inspect", f"@{tmp_path}/list", "--json").out)["samples"] == 100


def test_what_an_interrupted_run_wrote_counts_as_space(train, tmp_path, monkeypatch):
    from dsprep.storage.atomic import partial_path
    from dsprep.writing import job
    from dsprep.writing.staging import Staging

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


def test_an_interrupted_run_with_other_options(train, tmp_path, monkeypatch):
    from dsprep.writing.staging import Staging

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


# --- sizes and names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name"), [("h5", "hdf5"), ("HDF5", "hdf5"), ("tfrecords", "tfrecord"), ("mdb", "lmdb")]
)
def test_formats_are_named_as_people_name_them(word, name):
    assert formats.named(word).name == name


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


def test_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SAMPLES", 8)
    monkeypatch.setattr(demo, "READ", 256)
    done = run("demo", "--json", "--keep", tmp_path / "kept")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["same"]
    assert {s["target"] for s in result["steps"]} == {"h5", "lmdb", "tfrecord", "zarr", "groups"}
    assert any((tmp_path / "kept").iterdir())
    text = run("demo").out
    assert text.count("groups: the same bit for bit") == 3
    assert re.search(r"dsprep.Reader, in groups  computing \d+ %, [\d,]+ samples/s, ", text)
    assert max(map(len, text.splitlines())) <= 80


def test_the_program_itself(train, tmp_path):
    odd = os.fsencode(tmp_path) + b"/\xff.h5"
    program = [sys.executable, "-m", "dsprep", "convert", os.fsencode(train)]
    subprocess.run([*program, odd], capture_output=True, check=True)
    lineage = json.loads(Path(os.fsdecode(odd + b".dsprep.json")).read_text())["lineage"]
    assert lineage["version"] == dsprep.__version__
    done = subprocess.run([*program, os.fsencode(train)], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"dsprep: error: ")
    assert b"Traceback" not in done.stderr


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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", node.value):
                    assert word in known, f"{path.relative_to(root)}:{node.lineno}: {word}"
