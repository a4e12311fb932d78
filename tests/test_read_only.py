"""Data that cannot be written to: everything that only asks works, wherever the sidecar lies."""

from __future__ import annotations

import errno
import shutil

import numpy as np
import pytest
from support import cli, cli_error, fails, written

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import TargetError
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs.audit import audit
from dsprep.verbs.provenance import provenance

SCHEMA = Schema((Field("x", np.dtype("<i2"), (4, 3)), Field("y", np.dtype("<i8"))))
SUFFIXES = (".h5", ".lmdb", ".tfrecord", ".zarr", "")


@pytest.fixture(params=SUFFIXES, ids=lambda s: s or "directory")
def locked(request, tmp_path, monkeypatch):
    """A dataset in a directory that cannot be written to, and its sidecar elsewhere."""
    folder = tmp_path / "locked"
    folder.mkdir()
    path = folder / f"a{request.param}"
    more = {} if request.param else {"to": "hdf5", "shard_size": 9}
    written(path, SCHEMA, 30, **more)
    beside = tmp_path / "elsewhere.json"
    shutil.move(spec.sidecar_path(path), beside)
    replace = spec.write_file

    def refuse(to, *rest, **more):
        if to.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(to))
        replace(to, *rest, **more)

    monkeypatch.setattr(spec, "write_file", refuse)
    return path, beside


def test_queries_work_in_memory(locked):
    path, _ = locked
    for words in (["--locate", "3,-1", "--json"], ["--show"], ["--locate", "0"]):
        done = cli("provenance", path, *words)
        assert "there is no sidecar" in done.err
    cli("inspect", path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_queries_work_with_a_sidecar_elsewhere(locked):
    path, beside = locked
    found = cli("provenance", path, "--locate", "3", "--field", "x", "--json", "--out", beside)
    with Sidecar.open(beside, path) as opened:
        assert found.json()[0]["offset"] == opened.extents([3], ["x"])[0].offset
        expected = opened.read([3])["x"]
    for words in (["--show"], ["--check"], ["--check", "--full"]):
        cli("provenance", path, *words, "--out", beside)
    done = cli("audit", path, "--sidecar", beside, "-P", "3", "-M", "4", "--json")
    assert audit(path, 3, 4, sidecar=beside).samples == done.json()["samples"] == 30
    assert "x: int16[4,3]" in cli("inspect", path, "--sidecar", beside).out
    with dsprep.Reader(beside, data=path, batch_size=5, shuffle="none") as reader:
        batches = [np.array(batch["x"]) for batch in reader]
    np.testing.assert_array_equal(np.concatenate(batches)[3], expected[0])


def test_the_error_says_what_to_do(locked):
    path, beside = locked
    fails(lambda: provenance(path), TargetError, "Permission denied")
    line = cli_error("provenance", path)
    for word in (str(path), "Permission denied", "--out F", "--sidecar F", "Reader(F, data=DATA)"):
        assert word in line
    beside.unlink()
    cli("provenance", path, "--out", beside)
    cli("provenance", path, "--check", "--out", beside)
    located = cli("audit", path, "-P", "3", "-M", "4").err
    assert "located in memory each time" in located
    assert "--out F" in located


@pytest.mark.parametrize("suffix", [".zarr", ".lmdb", ""])
def test_a_sidecar_inside_does_not_change_the_dataset(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    more = {} if suffix else {"to": "hdf5", "shard_size": 9}
    written(path, SCHEMA, 30, **more)
    if suffix != ".lmdb":
        inside = path / "x" if suffix else next(path.iterdir())
        provenance(inside, checksums=True)
        assert spec.sidecar_path(inside).is_file()
    for name in ("b.dsprep.json", "b.dsprep.bin"):
        (path / name).write_text("of another one")
    with Sidecar.open(path) as opened:
        assert len(opened) == 30
    cli("provenance", path, "--check", "--full")
