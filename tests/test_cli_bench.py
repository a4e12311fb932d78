"""``dsprep bench read`` from end to end, with processes of its own, on small data."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from support import MPIEXEC, cli

from dsprep.bench.reading import plan_read
from dsprep.bench.task import Settings
from dsprep.synth import synth

WARM = ("--warm", "--repeat", "1")


def rows(report):
    return {r["name"]: r for r in report["strategies"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "data.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((600, 400, 3), np.float32)
        file["y"] = rng.random((600, 19), np.float32)
    return path


@pytest.fixture
def report_of(tmp_path):
    """Run with ``--json``; return the report."""

    def report(*arguments, code=0):
        cli("bench", "read", *arguments, "--json", tmp_path / "r.json", code=code)
        return json.loads((tmp_path / "r.json").read_text())

    return report


def test_one_command_measures_several_ways(data, tmp_path):
    """On two ranks, beside the Reader; all deliver the right samples, in every output."""
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    before = sorted(p.name for p in data.parent.iterdir())
    ways = ("-s", "lmdbio-prov,dsprep", "--ranks", 2, "--compute", "1ms", *WARM)
    done = cli("bench", "read", data, *ways, "--json", out, "--html", page)
    report = json.loads(out.read_text())
    found = rows(report)
    assert list(found) == ["pread-limit", "dummy", "lmdbio-prov", "dsprep"]
    for name, one in found.items():
        assert one["problems"] == [], name
        values = {key: m["value"] for key, m in one["measures"].items()}
        assert one["measures"]["exposed_seconds"]["unit"] == "s"
        assert min(values["samples_per_second"], values.get("limit_percent", 1)) > 0
        assert values["peak_rss_bytes"] > 1e6
        assert values["skew_seconds"] >= 0
        assert values["compute_seconds"] >= 0.001 * 600 // 32 // 2
    assert found["pread-limit"]["measures"]["limit_percent"]["value"] == pytest.approx(100)
    assert report["command"].startswith("dsprep")
    assert "x: float32[400,3]" in report["dataset"]["fields"]
    assert all(name in done.out for name in found)
    assert "<svg" in page.read_text()
    assert sorted(p.name for p in data.parent.iterdir()) == before  # nothing is left beside it


def test_a_sweep_reads_with_each_value(data, report_of):
    report = report_of(data, "-s", "group-db", *WARM, "--sweep", "buffer-size=64KiB,1MiB")
    found = {r["value"]: r for r in report["strategies"] if r["name"] == "group-db"}
    assert list(found) == ["64KiB", "1MiB"]
    assert report["knees"].get("group-db") != "1MiB"  # the last value is not a knee
    calls = [r["measures"]["read_calls"]["value"] for r in found.values()]
    assert calls[0] > calls[1]  # smaller groups really were read


def test_ragged_samples_and_subsets(tmp_path, report_of):
    made = synth("cosmic-tagger", tmp_path / "events.h5", samples=12).path
    ways = ("-s", "h5py", "-s", "dsprep")
    report = report_of(made, *ways, *WARM, "-M", 5, "--limit", "4MB", "--sample-axis", "first")
    assert 0 < report["dataset"]["samples"] < report["dataset"]["of"] == 12
    assert all(r["problems"] == [] for r in report["strategies"])


def test_the_baseline_is_measured_too(data):
    asked = (data, "-s", "dsprep", "-s", "samples", "--baseline", "h5py", "--dry-run")
    assert "h5py" in cli("bench", "read", *asked).out
    work = plan_read([data], ["dsprep", "tf", "lmdbio"], Settings(baseline="h5py"))
    assert "h5py" in work.names
    assert "lmdbio" not in work.named
    assert plan_read([data]).named == ()
    assert {"tf", "tf-prefetch", "group", "group-db"} < set(plan_read([data], ["async-io"]).names)


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIEXEC is None, reason="mpi4py is missing"
)
def test_the_ranks_of_an_mpi_job_are_those_of_the_benchmark(data, tmp_path):
    def job(*arguments, code):
        command = [MPIEXEC, "-n", "2", sys.executable, "-m", "dsprep", "bench", "read", str(data)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr

    out = tmp_path / "r.json"
    job("-s", "h5py", "-s", "dsprep", *WARM, "--compute", "1ms", "--json", str(out), code=0)
    report = json.loads(out.read_text())
    assert report["settings"]["ranks"] == 2
    for one in report["strategies"]:
        assert one["problems"] == []
        assert one["measures"]["skew_seconds"]["value"] >= 0
    job("--ranks", "3", code=2)
