"""A sidecar beside data that were touched, damaged or cannot be read: types are never lost."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from oracles import SUFFIX
from support import assert_same_batch, describe, fails, flip, random_batch, reading, write_batch
from typer.testing import CliRunner

import dsprep
from dsprep import formats
from dsprep.cli import app
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.sidecar import sidecar
from dsprep.sidecar.sidecar import StaleError
from dsprep.sidecar.spec import sidecar_path
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.identity import BLOCK_NBYTES, BLOCKS, Identity
from dsprep.storage.trees import data_files
from dsprep.verbs.provenance import provenance

FORMATS = sorted(SUFFIX)
TYPELESS = [name for name in FORMATS if not formats.load(name).keeps_types]
SCHEMA = Schema((Field("x", np.dtype("<u2"), (40, 3)), Field("y", np.dtype("u1"))))
COUNT = 40


@pytest.fixture(params=FORMATS)
def data(request, tmp_path):
    """A dataset of each format with its sidecar."""
    return made(request.param, tmp_path)


@pytest.fixture(params=TYPELESS)
def typed(request, tmp_path):
    """A dataset whose types are in its sidecar alone."""
    return made(request.param, tmp_path)


def made(format: str, folder: Path, count: int = COUNT) -> Path:
    path = folder / f"set{SUFFIX[format]}"
    write_batch(formats.load(format), path, SCHEMA, random_batch(SCHEMA, count, seed=1))
    describe(formats.load(format), SCHEMA, [path], path).save(durable=False)
    return path


def file_of(path: Path) -> Path:
    return max(data_files(path), key=lambda p: p.stat().st_size)


def touch(path: Path) -> None:
    os.utime(file_of(path), ns=(1, 1 << 61))


def assert_whole(path: Path) -> None:
    with dsprep.open(path) as source:
        assert_same_batch(source[:], random_batch(SCHEMA, COUNT, seed=1), SCHEMA)


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_a_touched_dataset_is_read_through_its_sidecar(data, tmp_path):
    touch(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = dsprep.open(data)
    with source:
        assert isinstance(source, SidecarSource)
        assert not source.notes
        assert source.schema == SCHEMA
    assert_whole(data)
    sidecar.Sidecar.open(data).close()
    dsprep.convert(data, tmp_path / "out.h5", durable=False)
    assert_whole(tmp_path / "out.h5")


def unsampled(file: Path) -> int:
    """Return an offset of which no sampled block tells: in the middle between two."""
    last = file.stat().st_size - BLOCK_NBYTES
    at = [last * k // (BLOCKS - 1) for k in range(BLOCKS)]
    gap = at[8] - (at[7] + BLOCK_NBYTES)
    assert gap > 8
    return at[8] - gap // 2


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_counts_as_a_change(kind, tmp_path):
    """Size; then the time stamp; then the sampled blocks."""
    path = tmp_path / "data"
    file = path / "b" if kind == "directory" else path
    file.parent.mkdir(exist_ok=True)
    if kind == "directory":
        (path / "a").write_bytes(b"x" * 5000)
    file.write_bytes(os.urandom(1 << 20))
    os.utime(file, (1 << 31, 1 << 31))
    known = Identity.of(path)
    assert Identity.from_json(json.loads(json.dumps(known.to_json()))) == known
    assert known.changed(path) is None
    flip(file, file.stat().st_size - 10, keep_time=True)
    assert known.changed(path) is None
    os.utime(file)
    assert "sampled" in known.changed(path)
    flip(file, file.stat().st_size - 10)
    flip(file, unsampled(file))
    assert known.changed(path) is None
    with file.open("ab") as opened:
        opened.write(b"1")
    assert "bytes, expected" in known.changed(path)
    file.unlink()
    assert known.changed(path)


def test_all_of_a_small_tree_is_sampled(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(os.urandom(900))
    known = Identity.of(tmp_path)
    for name in "abc":
        flip(tmp_path / name, 500)
        os.utime(tmp_path / name, (1 << 33, 1 << 33))  # times are counted in steps
        assert "sampled" in known.changed(tmp_path)
        flip(tmp_path / name, 500)
    assert known.changed(tmp_path) is None


def test_changed_data_without_their_types_are_refused(typed, tmp_path):
    """Also by commands, and in other words than `value: bytes`."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / typed.name
    write_batch(formats.load(typed.suffix[1:]), other, SCHEMA, random_batch(SCHEMA, COUNT, seed=2))
    file_of(other).replace(file_of(typed))
    with pytest.raises(StaleError) as caught:
        dsprep.open(typed)
    assert f"dsprep provenance {typed}" in str(caught.value)
    done = run("convert", typed, tmp_path / "out.h5")
    assert (done.exit_code, "move it away" in done.output) == (1, True)
    assert not (tmp_path / "out.h5").exists()
    with dsprep.open(typed, through="library") as source:
        assert source.schema != SCHEMA
        assert any("ignored" in note for note in source.notes)
    assert provenance(typed).content.schema == SCHEMA
    with dsprep.open(typed) as source:
        assert source.schema == SCHEMA


DAMAGE = {
    "no JSON": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no schema": lambda text: text.replace('"schema"', '"skema"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_sidecar_is_not_overlooked(damage, typed, tmp_path, monkeypatch):
    path = sidecar_path(typed)
    path.write_text(DAMAGE[damage](path.read_text()))
    for use, text in ((dsprep.open, ""), (provenance, "says what")):
        with pytest.raises(FormatError, match=text):
            use(typed)
    with dsprep.open(typed, through="library"):
        pass
    path.rename(tmp_path / "away")
    with dsprep.open(typed) as source:
        assert source.schema != SCHEMA


@pytest.mark.parametrize("name", TYPELESS)
def test_a_new_file_beside_typed_ones(name, tmp_path):
    """The sidecar does not list it; written again, it has the types of all."""
    folder = tmp_path / "set"
    folder.mkdir()
    paths = []
    for i in range(3):
        path = folder / f"part{i}{SUFFIX[name]}"
        write_batch(formats.load(name), path, SCHEMA, random_batch(SCHEMA, 5, seed=i))
        paths.append(path)
    describe(formats.load(name), SCHEMA, paths[:2], folder).save(durable=False)
    fails(lambda: dsprep.open(folder), FormatError, "does not list")
    provenance(folder)
    with dsprep.open(folder) as source:
        assert source.schema == SCHEMA
        assert len(source) == 15


def test_how_to_read_is_not_guessed(tmp_path):
    """Where the sidecar says it, and cannot be used, of HDF5 too."""
    path = made("hdf5", tmp_path)
    provenance(path, reading("z=x"))
    file = file_of(path)
    flip(file, file.stat().st_size - 50)
    fails(lambda: dsprep.open(path), StaleError)


# --- errors of the storage -------------------------------------------------------------------


def calls_of_open(path: Path, monkeypatch, patched) -> int:
    """Open a dataset while each call of ``pread`` is counted and perhaps fails."""
    real, count = os.pread, [0]

    def pread(fd, nbytes, offset):
        count[0] += 1
        return patched(count[0], real, fd, nbytes, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        with dsprep.open(path) as source:
            assert isinstance(source, SidecarSource)
            assert source.schema == SCHEMA
    return count[0]


def test_errors_while_a_sidecar_is_examined_are_told(data, monkeypatch):
    """Whichever read fails, the data are not taken for others."""
    touch(data)
    count = calls_of_open(data, monkeypatch, lambda k, real, *args: real(*args))
    assert count >= BLOCKS // 4

    for which in {1, count // 2, count}:

        def fail(k, real, *args, which=which):
            if k == which:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        with pytest.raises(OSError, match="Input/output error"):
            calls_of_open(data, monkeypatch, fail)
