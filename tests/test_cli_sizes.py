"""What is asked for in sizes, ranges and formats is what is meant, or is refused in one line."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from oracles import SUFFIX
from test_cli import fails, run

from dsprep import formats
from dsprep.errors import UsageError


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(600, dtype="<f4").reshape(100, 6)
        file["y"] = np.arange(100)
    return path


@pytest.mark.parametrize(
    "line",
    [
        "convert SRC OUT.h5 --shard-size 4",
        "convert SRC OUT.h5 --memory 4",
        "repack SRC OUT.h5 --shard-size 4",
        "repack SRC OUT.h5 --stripe-size 4096",
        "repack SRC OUT.h5 --memory 4",
        "bench read SRC --limit 4",
        "bench read SRC --transfer-size 4 --dry-run -s group",
        "bench read SRC --sweep transfer-size=1..4",
    ],
)
def test_a_size_needs_a_unit(line, train, tmp_path):
    words = line.replace("SRC", str(train)).replace("OUT", str(tmp_path / "out")).split()
    assert "has no unit" in fails(*words, code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.h5"]


def test_buffers_are_counted_in_samples_without_a_unit(train, tmp_path):
    plan = json.loads(run("repack", train, tmp_path / "o.h5", "-b", "4", "-n", "--json").out)
    assert plan["parts"][0]["samples_per_group"] == 4


def test_binary_sizes_are_echoed_as_they_were_given(train, tmp_path):
    words = ("-b", "1MiB", "--stripe-size", "2MiB", "--dry-run")
    done = run("repack", train, tmp_path / "o.h5", *words)
    assert "at most 1 MiB as asked" in done.out
    assert "to 2 MiB as asked" in done.out
    assert "1.0 MB" not in done.out


@pytest.mark.parametrize("command", [("convert",), ("repack", "-b", "1")])
def test_one_sample_per_file_is_warned_of(command, train, tmp_path):
    words = (*command, train, tmp_path / "o.h5", "--dry-run", "--samples-per-file")
    assert "each of the 100 output files has one sample" in run(*words, "1").err
    assert "one sample" not in run(*words, "50").err


@pytest.mark.parametrize("samples", ["0:99999", "-101:", "101:", "50:20"])
def test_samples_that_there_are_not_are_refused(samples, train, tmp_path):
    message = fails("convert", train, tmp_path / "o.h5", "--samples", samples, code=2)
    assert samples in message
    assert run("provenance", train).code == 0
    assert samples in fails("provenance", train, "--locate", samples, code=2)
    assert run("provenance", train, "--locate", "90:100").code == 0


@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_the_name_of_an_output_and_its_format_agree(format, train, tmp_path):
    for name in sorted(set(SUFFIX) - {format}):
        out = tmp_path / f"x{SUFFIX[name]}"
        for command in ("convert", "repack"):
            message = fails(command, train, out, "--to", format, code=2)
            assert "contradict" in message
            assert formats.load(format).suffixes[0] in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.h5"]
    done = run("convert", train, tmp_path / "x.bin", "--to", format, "--dry-run", "--json")
    assert json.loads(done.out)["format"] == format


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *((s, n) for n in formats.FORMATS for s in formats.load(n).suffixes),
        ("h5", "hdf5"),
        ("HDF5", "hdf5"),
        ("tfrecords", "tfrecord"),
        ("TFRecord", "tfrecord"),
        ("Zarr", "zarr"),
        ("mdb", "lmdb"),
    ],
)
def test_formats_are_named_as_people_name_them(word, name):
    assert formats.named(word).name == name


def test_what_is_not_a_format_is_refused():
    for word in ("nosuch", "", "h", "."):
        with pytest.raises(UsageError, match="is not a format"):
            formats.named(word)


def test_convert_does_not_offer_options_of_repack(train, tmp_path):
    message = fails("convert", train, tmp_path / "o.lmdb", "--chunk", "4", code=2)
    assert "--key-format" in message
    assert "--group-values" not in message


def test_an_export_never_advises_to_remove_what_may_be_data(train, tmp_path):
    other = tmp_path / "d.h5"
    other.write_bytes(train.read_bytes())
    message = fails("provenance", train, "--export", "kerchunk", "--out", other)
    assert "remove" not in message
    assert "another name with --out" in message
    assert other.read_bytes() == train.read_bytes()


def test_verify_says_which_side_lacks_a_field(train, tmp_path):
    run("convert", train, tmp_path / "o.h5", "--field", "y")
    shown = run("verify", train, tmp_path / "o.h5").out
    assert f"field x is in {train}, not in {tmp_path}/o.h5" in shown
    shown = run("verify", tmp_path / "o.h5", train).out
    assert f"field x is in {train}, not in {tmp_path}/o.h5" in shown


def test_help_and_check_agree_on_a_missing_sidecar(train):
    assert "all but --check write it first" in run("provenance", "--help").out
    assert "there is no sidecar" in fails("provenance", train, "--check", code=2)


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_few_samples_take_no_memory_for_more_of_them(suffix, tmp_path):
    # A chunk of the labels has room for a million samples, of which there are five.
    path = tmp_path / "ragged.h5"
    with h5py.File(path, "w") as file:
        file["label"] = np.arange(5, dtype="<i1")
        file["x/values"] = np.zeros(500_000, "<f4")
        file["x/first"], file["x/count"] = np.arange(5) * 100_000, np.full(5, 100_000)
        file["x"].attrs["dsprep_kind"] = np.bytes_("array")
    words = ("convert", path, tmp_path / f"out.{suffix}", "--compress", "gzip", "--memory", "64MB")
    assert run(*words).code == 0
