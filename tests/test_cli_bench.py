"""``dsprep bench read`` from end to end, with processes of its own, on small data."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from support import MPIEXEC
from typer.testing import CliRunner

from dsprep.bench.reading import plan_read
from dsprep.cli import app
from dsprep.synth import synth


def dsprep(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "data.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((600, 400, 3), np.float32)
        file["y"] = rng.random((600, 19), np.float32)
    return path


def rows(report):
    return {r["name"]: r for r in report["strategies"]}


def test_one_command_measures_the_papers_tables(data, tmp_path):
    """S000's Table I and the steps of LMDBIO, on two ranks, all delivering the right samples."""
    out = tmp_path / "r.json"
    page, table = tmp_path / "r.html", tmp_path / "r.csv"
    before = sorted(p.name for p in data.parent.iterdir())
    done = dsprep(
        "bench", "read", data, "-s", "async-io", "-s", "lmdbio", "-s", "dsprep",
        "--warm", "--ranks", 2, "--repeat", 1, "--json", out, "--html", page, "--csv", table,
    )  # fmt: skip
    report = json.loads(out.read_text())
    found = rows(report)
    assert next(iter(found)) == "pread-limit"
    assert {"tf", "tf-prefetch", "group", "group-db", "lmdb-cursor", "lmdbio-lmm", "lmdbio-dm"} < (
        found.keys()
    )
    assert {"lmdbio-dio", "lmdbio-prov", "lmdbio-coal", "lmdbio-stag", "dsprep"} < found.keys()
    for name, one in found.items():
        assert one["problems"] == [], name
        measures = one["measures"]
        assert measures["exposed_seconds"]["unit"] == "s"
        assert measures["samples_per_second"]["value"] > 0
        assert measures["peak_rss_bytes"]["value"] > 1e6
        assert measures["skew_seconds"]["value"] >= 0
        assert measures["limit_percent"]["value"] > 0
    assert found["pread-limit"]["measures"]["limit_percent"]["value"] == pytest.approx(100)
    assert report["command"].startswith("dsprep")
    assert report["answer"]
    assert "x: float32[400,3]" in report["dataset"]["fields"]
    assert all(name in done.output for name in found)
    assert "<svg" in page.read_text()
    with table.open() as file:
        assert [line["strategy"] for line in csv.DictReader(file)] == list(found)
    assert sorted(p.name for p in data.parent.iterdir()) == before  # nothing is left beside it


def test_a_sweep_reads_with_each_value(data, tmp_path):
    out = tmp_path / "r.json"
    dsprep("bench", "read", data, "-s", "group-db", "--warm", "-r", 1, "--json", out,
           "--sweep", "buffer-size=64KiB,1MiB")  # fmt: skip
    sweep = json.loads(out.read_text())["sweep"]
    assert [p["value"] for p in sweep["points"]] == ["64KiB", "1MiB"]
    assert sweep["knees"].get("group-db") != "1MiB"  # the last value is no knee
    calls = [rows(p)["group-db"]["measures"]["read_calls"]["value"] for p in sweep["points"]]
    assert calls[0] > calls[1]  # smaller groups really were read


def test_cold_epochs_have_evidence_or_say_that_they_were_not(data, tmp_path):
    out, log = tmp_path / "r.json", tmp_path / "log"
    arguments = ["bench", "read", str(data), "-s", "group", "-r", "1", "--json", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--evict-server", f"echo once >> {log}"])
    report = json.loads(out.read_text())
    for one in rows(report).values():
        if one["problems"]:  # a file system in memory
            assert all("not cold" in p for p in one["problems"])
            assert result.exit_code == 1
        else:
            assert one["evidence"].endswith(f"server cache dropped by echo once >> {log}")
            if "device_bytes" in one["measures"]:
                assert one["measures"]["device_bytes"]["value"] > 0.9 * 600 * 4876
    assert report["settings"]["evict_server"] == f"echo once >> {log}"
    assert len(log.read_text().split()) == 1 + len(rows(report))  # tried, then before each epoch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--evict-server", "echo no route >&2; exit 7"], "exit status 7: no route"),
        (["--evict-server", "true", "--warm-server"], "contradict"),
        (["--evict-server", "true", "--warm"], "cold runs"),
        (["--warm-server", "--warm"], "cold runs"),
    ],
)
def test_what_cannot_be_done_about_a_server_is_refused(data, options, words):
    before = sorted(p.name for p in data.parent.iterdir())
    result = CliRunner().invoke(app, ["bench", "read", str(data), "-r", "1", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert sorted(p.name for p in data.parent.iterdir()) == before


def test_computation_hides_reading_of_double_buffers_only(data, tmp_path):
    out = tmp_path / "r.json"
    dsprep("bench", "read", data, "-s", "h5py", "-s", "group-db", "--warm", "-r", 1,
           "--compute", "10ms", "--json", out)  # fmt: skip
    found = rows(json.loads(out.read_text()))
    steps = -(-600 // 32)
    for one in found.values():
        assert one["measures"]["compute_seconds"]["value"] >= 0.01 * steps
        assert 0 < one["measures"]["utilisation_percent"]["value"] <= 100
    hidden = found["group-db"]["measures"]["exposed_after_first_seconds"]["value"]
    shown = found["h5py"]["measures"]["exposed_after_first_seconds"]["value"]
    assert hidden < shown
    assert "dummy" in found


def test_a_scratch_folder_is_used_again(data, tmp_path):
    scratch = tmp_path / "scratch"
    arguments = ["bench", "read", data, "-s", "lmdb-get", "--warm", "-r", 1, "--scratch", scratch]
    dsprep(*arguments)
    kept = {p: p.stat().st_mtime_ns for p in scratch.rglob("*.mdb")}
    assert kept
    dsprep(*arguments, "--dry-run")
    dsprep(*arguments)
    assert {p: p.stat().st_mtime_ns for p in scratch.rglob("data.mdb")}.items() <= kept.items()


def test_ragged_samples_and_subsets(tmp_path):
    made = synth("cosmic-tagger", tmp_path / "events.h5", samples=12).path
    out = tmp_path / "r.json"
    dsprep("bench", "read", made, "-s", "h5py", "-s", "lmdb-get", "-s", "dsprep", "--warm",
           "-r", 1, "-M", 5, "--limit", "4MB", "--json", out)  # fmt: skip
    report = json.loads(out.read_text())
    assert 0 < report["dataset"]["samples"] < report["dataset"]["of"] == 12
    assert all(r["problems"] == [] for r in report["strategies"])


def test_what_cannot_be_read_so_is_told_in_its_row(tmp_path):
    path = tmp_path / "s.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(9, np.dtype([("a", "<f4"), ("b", "<i8")]))
    out = tmp_path / "r.json"
    done = dsprep("bench", "read", path, "-s", "tf", "-s", "dsprep", "--warm", "-r", 1,
                  "--json", out, code=1)  # fmt: skip
    found = rows(json.loads(out.read_text()))
    assert found["tf"]["measures"] == {}
    assert found["dsprep"]["problems"] == []
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["-s", "nosuch"],
        ["--compute", "soon"],
        ["--sweep", "colour=red"],
        ["--buffer-size", "lots"],
        ["--transfer-size", "0"],
        ["--limit", "some"],
        ["--ranks", "0"],
    ],
)
def test_wrong_usage_is_one_line(data, arguments):
    result = CliRunner().invoke(app, ["bench", "read", str(data), *arguments])
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_the_list_and_the_plan(data):
    assert "pread-limit" in dsprep("bench", "read", "--list").output
    plan = dsprep("bench", "read", data, "-s", "all", "--dry-run").output
    assert "to write" in plan
    assert "600" in plan
    assert CliRunner().invoke(app, ["bench", "read"]).exit_code == 2


def test_the_baseline_is_measured_too(data):
    words = ("bench", "read", data, "-s", "dsprep", "-s", "samples", "--baseline", "h5py")
    assert "h5py" in dsprep(*words, "--dry-run").stdout
    work = plan_read([data], ["dsprep", "tf", "lmdbio"], baseline="h5py")
    assert work.baseline == "h5py"
    assert "h5py" in work.names
    assert "lmdbio" not in work.named
    assert plan_read([data]).named == ()


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIEXEC is None, reason="mpi4py is missing"
)
def test_the_ranks_of_an_mpi_job_are_those_of_the_benchmark(data, tmp_path):
    out = tmp_path / "r.json"
    program = [sys.executable, "-m", "dsprep", "bench", "read", str(data)]
    done = subprocess.run(
        [MPIEXEC, "-n", "2", *program, "-s", "h5py", "-s", "dsprep", "--warm", "-r", "1",
         "--compute", "1ms", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["settings"]["ranks"] == 2
    for one in report["strategies"]:
        assert one["problems"] == []
        assert one["measures"]["skew_seconds"]["value"] >= 0
    failed = subprocess.run(
        [MPIEXEC, "-n", "2", *program, "--ranks", "3"], capture_output=True, text=True, timeout=60
    )
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
