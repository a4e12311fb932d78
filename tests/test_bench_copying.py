"""Commands against copies, scans and walks: figures are there, and nothing else is left."""

from __future__ import annotations

import json
import shutil
import zlib

import h5py
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import dsprep
from dsprep.bench import caches, copying
from dsprep.bench.copying import Settings, bench_convert, bench_provenance, reading_arguments
from dsprep.bench.copying import child as copy_child
from dsprep.bench.copying import running as copy_running
from dsprep.bench.copying.running import Cold, Taken, run_child, run_cp
from dsprep.bench.model import MEASURES, Report
from dsprep.bench.scratch import folder as scratch_folder
from dsprep.bench.watching import Watch
from dsprep.cli.bench.copy import register
from dsprep.core.schema import FieldSpec
from dsprep.errors import FormatError, TargetError, UsageError
from dsprep.formats.base import OpenOptions

app = typer.Typer()
register(app)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with h5py.File(folder / "train.h5", "w") as file:
        file["x"] = np.arange(6400.0).reshape(64, 100)
        file["y"] = np.arange(64)
    return folder / "train.h5"


def run(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json", "-"])
    assert result.exit_code in (0, 1), result.output
    return Report.from_json(json.loads(result.stdout)), result.exit_code


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def rows(report):
    for row in report.rows:
        assert not row.problems, row
        assert all(m.least <= m.value <= m.most for m in row.measures.values())
    return {row.name: row for row in report.rows}


def test_convert(data):
    report, status = run("convert", data, "--to", "lmdb", "--repeat", "2")
    found = rows(report)
    assert status == 0
    assert report.kind == "convert"
    assert report.dataset["samples"] == 64
    assert report.dataset["payload_nbytes"] == 64 * 808
    assert report.machine["packages"]["dsprep"]
    assert report.settings["to"] == ["lmdb"]
    assert list(found) == ["cp", "convert lmdb"]
    copied, made = found["cp"], found["convert lmdb"]
    assert copied.value("ratio") == 1
    assert copied.value("size_bytes") == data.stat().st_size
    assert copied.value("read_bytes") >= data.stat().st_size
    assert 0 < made.value("ratio") < 1
    assert made.value("seconds") > 0
    assert made.value("peak_rss_bytes") > 1 << 20
    assert made.value("cpu_seconds") > 0
    assert made.value("size_bytes") > 64 * 808
    assert made.value("read_bytes") > 64 * 808
    assert made.runs == 2
    assert "start-up" in made.notes[0]
    assert list(made.measures) == [n for n in MEASURES if n in made.measures]
    assert names(data.parent) == ["train.h5"]
    assert report.answer


def test_repack_to_disk_into_a_folder(data, tmp_path):
    folder = tmp_path / "other"
    options = ("--to", "hdf5", "--buffer-size", "8", "--shuffle", "3", "--sync", "--repeat", "1")
    report, status = run("repack", data, *options, "--scratch", folder)
    found = rows(report)
    assert status == 0
    assert found["repack hdf5"].value("ratio") > 0
    assert (report.settings["buffer_size"], report.settings["sync"]) == ("8", True)
    assert names(folder) == []
    assert names(data.parent) == ["train.h5"]


def test_provenance_of_records(data):
    path = data.with_name("train.tfrecord")
    dsprep.convert(data, path)
    path.with_name("train.tfrecord.dsprep.json").unlink()
    report, status = run("provenance", path, "--repeat", "1")
    found = rows(report)
    assert status == 0
    assert list(found) == ["full scan", "index walk", "dsprep provenance", "locate"]
    assert found["full scan"].value("ratio") == 1
    assert found["dsprep provenance"].value("ratio") > 0
    assert 0 < found["dsprep provenance"].value("size_bytes") < 10_000
    assert found["locate"].value("locate_per_second") > 1000
    assert "opening the sidecar" in found["locate"].notes[0]
    assert names(path.parent) == ["train.h5", "train.tfrecord"], "the sidecar is not left"


@pytest.mark.parametrize("format", ["hdf5", "lmdb", "tfrecord", "zarr"])
def test_scans_and_walks(data, tmp_path, format):
    path = tmp_path / f"all.{format}"
    if format == "hdf5":
        shutil.copy(data, path)
    else:
        dsprep.convert(data, path, to=format)
    task = {"files": [str(path)], "format": format, "database": None}
    status, found = copy_child._scan(task)
    assert status == 0
    assert 64 * 808 <= found["scanned_bytes"] < 64 * 1000
    if format in copy_child.WALKS:
        assert copy_child._walk(task) == (0, {"records": 64})


def test_compressed_records_are_scanned(data, tmp_path):
    path, packed = tmp_path / "a.tfrecord", tmp_path / "z.tfrecord"
    dsprep.convert(data, path)
    dsprep.convert(data, packed, compress="gzip")
    nbytes = copy_child._tfrecord_values(path, {})
    assert copy_child._tfrecord_values(packed, {}) == nbytes
    packed.write_bytes(zlib.compress(path.read_bytes()))
    assert copy_child._tfrecord_values(packed, {}) == path.stat().st_size


def test_what_a_format_cannot_hold_is_told_in_its_row(data):
    report = bench_convert([str(data)], Settings(to=("hdf5",), repeat=1))
    assert not report.rows[1].problems
    path = data.with_name("z.tfrecord")
    dsprep.convert(data, path, compress="gzip")
    report = bench_provenance([str(path)], Settings(repeat=2))
    found = {r.name: r for r in report.rows}
    assert "no offsets" in found["dsprep provenance"].problems[0]
    assert "no sidecar" in found["locate"].problems[0]
    assert not found["dsprep provenance"].measures
    assert found["full scan"].runs == 2


def test_a_row_without_figures_makes_the_status_1(data, monkeypatch):
    monkeypatch.setattr(copying, "run_child", lambda *a: Taken({}, problem="no luck"))
    report, status = run("convert", data, "--to", "zarr", "--repeat", "2")
    assert status == 1
    assert report.rows[1].problems == ("no luck",)


def test_cold(data, monkeypatch):
    report = bench_convert([str(data)], Settings(to=("hdf5",), repeat=1, cold=True))
    for row in report.rows:
        assert row.problems or row.value("device_bytes") >= data.stat().st_size * 0.9
        assert row.problems or row.evidence == "from the device"

    monkeypatch.setattr(copy_running.caches, "drop", lambda files: None)
    monkeypatch.setattr(Watch, "held", lambda watch: 0.5)
    report = bench_convert([str(data)], Settings(to=("hdf5",), repeat=1, cold=True))
    assert all("still held 50% of the files" in row.problems[0] for row in report.rows)


def test_copies_share_the_rule_of_readers(data, monkeypatch):
    """Unseen pages and few bytes of a device are no cold run; a network mount counts none."""

    def judged(device, counts, held, cold=True, all_read=True):
        monkeypatch.setattr(caches, "counts", lambda files, look: counts)
        monkeypatch.setattr(Watch, "held", lambda watch: held)
        state = Cold((data,), cold)
        taken = Taken({"seconds": 1.0, "device_bytes": device})
        return state.judged(taken, state.settle(), all_read)

    nbytes = float(data.stat().st_size)
    assert "0% of the bytes came from a device" in judged(0.0, True, None).problem
    assert judged(nbytes, True, None).evidence.words == "from the device"
    assert not judged(0.0, False, None, cold=False).problem
    shared = judged(0.0, True, 0.0)  # reflinks fetch nothing
    assert not shared.problem
    assert shared.evidence.words.startswith("pages dropped")
    network = judged(0.0, False, 0.0)
    assert not network.problem
    assert "device_bytes" not in network.measures
    assert network.evidence.words.startswith("pages dropped")
    assert network.evidence.words.endswith("server cache unknown")
    assert judged(5.0, True, 0.0, all_read=False).evidence.words == "from the device"


def test_more_data_than_memory(data, monkeypatch):
    monkeypatch.setattr(Watch, "held", lambda watch: 0.25)
    report = bench_convert([str(data)], Settings(to=("hdf5",), repeat=1))
    assert all("had 25% of the data" in row.notes[-1] for row in report.rows)
    assert not any(row.problems for row in report.rows)


def test_cp(data, tmp_path, monkeypatch):
    taken = run_cp([data], tmp_path, True)
    assert taken.measures["size_bytes"] == data.stat().st_size
    assert taken.measures["seconds"] > 0
    other = tmp_path / "b" / "train.h5"
    other.parent.mkdir()
    shutil.copy(data, other)
    assert run_cp([data, other], tmp_path, False).measures["size_bytes"] == 2 * data.stat().st_size
    assert not run_cp([tmp_path / "missing"], tmp_path, False).measures.get("seconds")
    monkeypatch.setattr(copy_running, "cp_program", lambda: None)
    taken = run_cp([data, tmp_path / "b"], tmp_path, False)
    assert taken.measures["size_bytes"] == 2 * data.stat().st_size
    assert names(tmp_path) == ["b", "data"]


def test_a_failing_child(tmp_path):
    arguments = ["convert", "no-such-file.h5", str(tmp_path / "out.h5")]
    task = {"do": "command", "arguments": arguments, "libraries": []}
    assert "no-such-file.h5" in run_child(task, tmp_path).problem
    assert names(tmp_path) == []


def test_outputs_go_when_interrupted(data, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "run_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_convert([str(data)])
    assert names(data.parent) == ["train.h5"]


def test_reading_arguments(data):
    assert reading_arguments(OpenOptions()) == []
    options = OpenOptions(
        fields=(FieldSpec.parse("a=b/c:int16[3]"),),
        order="numeric",
        values="datum",
        database="d",
        skip_keys=(b"length",),
        keys_as="k",
        records="opaque",
        check_crc=False,
        sample_axis="none",
    )
    told = reading_arguments(options)
    assert told[:2] == ["--field", "a=b/c:int16[3]"]
    assert {"--raw-records", "--no-crc", "--skip-key", "--db", "--keys-as"} <= set(told)
    report, status = run("convert", data, "--field", "y", "--to", "tfrecord", "--repeat", "1")
    assert status == 0
    assert rows(report)["convert tfrecord"].value("size_bytes") < 64 * 100


def test_wrong_usage(data, tmp_path, monkeypatch):
    def status(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)]).exit_code

    assert status("convert", data, "--to", "parquet") == 2
    assert status("repack", data, "--shuffle", "often") == 2
    assert status("repack", data, "--buffer-size", "much") == 2
    assert status("convert", data, "--scratch", data) == 2
    assert status("convert", tmp_path / "none.h5") == 1
    for command in ("convert", "repack", "provenance"):
        assert status(command, "--help") == 0
    taken = tmp_path / "precious.json"
    taken.write_text("[]")
    assert status("convert", data, "--json", taken) == 2
    with pytest.raises(UsageError, match="not a format"):
        bench_convert([str(data)], Settings(to=("parquet",)))
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file["x"] = np.zeros((0, 3))
    with pytest.raises(FormatError, match="no samples"):
        bench_convert([str(tmp_path / "empty.h5")])
    monkeypatch.setattr(scratch_folder, "free_nbytes", lambda path: 10)
    with pytest.raises(TargetError, match="not enough space"):
        bench_convert([str(data)])
    assert names(data.parent) == ["train.h5"]
