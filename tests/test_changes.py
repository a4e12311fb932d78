"""Data that change while they are read, or between a run and its rerun, never end in an output."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest
from oracles import SUFFIX
from support import describe, fails, flip, random_batch, write_batch

import dsprep
from dsprep import formats
from dsprep.core.schema import Field, Schema
from dsprep.errors import ChangedError, TargetError
from dsprep.formats.base import Format
from dsprep.sidecar.spec import sidecar_path
from dsprep.storage.trees import data_files
from dsprep.writing import shuffle, staging

FORMATS = sorted(SUFFIX)
SCHEMA = Schema((Field("x", np.dtype("<f4"), (50,)), Field("y", np.dtype("<i8"))))
COUNT = 60


class Inline(Executor):
    """Does every task at once in this thread; calls `between` after the first one."""

    def __init__(self, between=None) -> None:
        self.between, self.done = between, 0

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        self.done += 1
        if self.done == 1 and self.between is not None:
            self.between()
        return future


def made(format: str, folder: Path, seed: int, files: int, *, beside: bool) -> list[Path]:
    """Write a dataset, of one file or of several; with a sidecar or without."""
    folder.mkdir()
    batch = random_batch(SCHEMA, COUNT, seed=seed)
    each = COUNT // files
    paths = []
    for i in range(files):
        path = folder / f"part{i}{SUFFIX[format]}"
        some = {name: column[i * each : (i + 1) * each] for name, column in batch.items()}
        write_batch(formats.load(format), path, SCHEMA, some)
        paths.append(path)
    if beside:
        where = paths[0] if files == 1 else folder
        describe(formats.load(format), SCHEMA, paths, where).save(durable=False)
    return paths


def replace(path: Path, other: Path) -> None:
    """Put another file or store of the same size in the place of one."""
    if path.is_dir():
        shutil.rmtree(path)
    other.rename(path)


def replace_all(paths: list[Path], others: list[Path]) -> None:
    for path, other in zip(paths, others, strict=True):
        replace(path, other)


def data_file(path: Path) -> Path:
    """Return the file of a dataset that has the most bytes."""
    return max(data_files(path), key=lambda p: p.stat().st_size)


def write_in_place(path: Path) -> None:
    """Change a byte of the data, in the last block."""
    flip(data_file(path), data_file(path).stat().st_size - 100)


@pytest.mark.parametrize(
    ("format", "beside", "files"),
    [
        (format, beside, files)
        for k, format in enumerate(FORMATS)
        for beside, files in ((True, (1, 3)[k % 2]), (False, (3, 1)[k % 2]))
    ],
)
def test_a_source_is_replaced_while_tasks_run(format, beside, files, tmp_path):
    """By one of the same size: the tasks that come open it by name."""
    paths = made(format, tmp_path / "one", 1, files, beside=beside)
    others = made(format, tmp_path / "two", 2, files, beside=False)
    source = paths[0] if files == 1 else tmp_path / "one"
    target = tmp_path / "out"
    options = {"to": "hdf5", "shard_size": 10, "durable": False}
    executor = Inline(lambda: replace_all(paths, others))
    fails(lambda: dsprep.convert(source, target, executor=executor, **options), ChangedError)
    assert not target.exists()
    assert not sidecar_path(target).exists()
    assert not staging.partial_path(target).exists()


@pytest.mark.parametrize("beside", [True, False], ids=["sidecar", "library"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_source_is_written_to_while_it_is_converted(format, beside, tmp_path):
    """In place, in this process."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=beside)
    target = tmp_path / "out.h5"

    def progress(samples: int, nbytes: int) -> None:
        if samples == COUNT:
            write_in_place(path)

    with pytest.raises(ChangedError, match="sampled blocks"):
        dsprep.convert(path, target, durable=False, progress=progress)
    assert not target.exists()
    assert not staging.partial_path(target).exists()


@pytest.mark.parametrize("format", FORMATS)
def test_other_time_stamps_are_no_change(format, tmp_path):
    """Some file systems move those of files that were closed long ago."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=True)

    def progress(samples: int, nbytes: int) -> None:
        for file in data_files(path):
            os.utime(file, (samples, samples))

    dsprep.convert(path, tmp_path / "out.h5", durable=False, progress=progress)
    with dsprep.open(path) as one, dsprep.open(tmp_path / "out.h5") as other:
        assert dsprep.verify(one, other).same
    with dsprep.Reader(path, 7) as reader:
        for k, _ in enumerate(reader):
            progress(k + 1, 0)


def test_the_first_pass_of_a_shuffle_notices(tmp_path, monkeypatch):
    paths = made("hdf5", tmp_path / "one", 1, 1, beside=True)
    others = made("hdf5", tmp_path / "two", 2, 1, beside=False)
    monkeypatch.setattr(shuffle, "_choose", lambda *_: "buckets")
    monkeypatch.setattr("dsprep.writing.shuffle.PART_NBYTES", 4000)
    executor = Inline(lambda: replace_all(paths, others))
    options = {"buffer_size": 10, "stripe_size": "4KiB", "shuffle": 3, "shard_size": 20}
    with pytest.raises(ChangedError):
        dsprep.repack(paths[0], tmp_path / "out", to="hdf5", executor=executor, **options)
    assert executor.done > 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("executor", [True, False], ids=["executor", "threads"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_comparison_notices(which, executor, tmp_path):
    paths = made("hdf5", tmp_path / "one", 1, 1, beside=True)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    both = [paths[0], tmp_path / "copy" / paths[0].name]
    with dsprep.open(both[0]) as a, dsprep.open(both[1]) as b:
        pool = Inline(lambda: write_in_place(both[which])) if executor else None
        progress = None if executor else lambda samples, nbytes: write_in_place(both[which])
        with pytest.raises(ChangedError, match="sampled blocks"):
            dsprep.verify(a, b, progress=progress, executor=pool)


@pytest.mark.parametrize("beside", [True, False], ids=["sidecar", "library"])
def test_a_file_is_replaced_before_it_is_opened_again(beside, tmp_path, monkeypatch):
    """Of many files only a few stay open."""
    monkeypatch.setattr(Format, "max_open", 2)
    monkeypatch.setattr("dsprep.reading.files.KEPT", 2)
    paths = made("hdf5", tmp_path / "one", 1, 6, beside=beside)
    others = made("hdf5", tmp_path / "two", 2, 6, beside=False)
    with dsprep.open(tmp_path / "one") as source:
        for i in range(0, COUNT, 10):
            source[i]
        replace(paths[0], others[0])
        source[30]
        with pytest.raises(ChangedError, match=r"part0\.h5"):
            source[0]


def test_a_file_of_very_many_is_looked_at_when_it_is_opened(tmp_path, monkeypatch):
    """When the sidecar is opened only some of the files are."""
    monkeypatch.setattr("dsprep.sidecar.sidecar.CHECKED", 2)
    paths = made("hdf5", tmp_path / "one", 1, 6, beside=True)
    others = made("hdf5", tmp_path / "two", 2, 6, beside=False)
    replace(paths[2], others[2])
    shutil.copyfile(paths[4], tmp_path / "copy")
    (tmp_path / "copy").replace(paths[4])
    for opened in (dsprep.open(tmp_path / "one"), dsprep.Sidecar.open(tmp_path / "one")):
        with opened:
            for i in (0, 10, 30, 40, 50):
                opened.read(slice(i, i + 1)) if isinstance(opened, dsprep.Sidecar) else opened[i]
            with pytest.raises(ChangedError, match=r"part2\.h5"):
                opened.read(slice(20, 21)) if isinstance(opened, dsprep.Sidecar) else opened[20]


# --- between a run and its rerun ---------------------------------------------------------------


class Stop(Exception):
    """A run is interrupted."""


def stop() -> None:
    raise Stop


def interrupted(source: Path, target: Path, **options) -> None:
    """Write the first file of an output, as far as it goes."""
    with pytest.raises(Stop):
        dsprep.convert(source, target, executor=Inline(stop), **options)
    assert staging.partial_path(target).exists()


SHARDS = {"to": "hdf5", "shard_size": 10}


@pytest.mark.parametrize("format", ["hdf5", "zarr"])
def test_a_source_is_touched_before_the_rerun(format, tmp_path):
    """Its sampled blocks are the same, others may not be: nothing old stays."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=False)
    target = tmp_path / "out"
    interrupted(path, target, **SHARDS)
    os.utime(data_file(path), (1, 1 << 33))
    report = dsprep.convert(path, target, executor=Inline(), **SHARDS)
    assert any("started over" in note for note in report.notes)
    assert report.resumed == 0
    with dsprep.open(path) as now, dsprep.open(target) as out:
        assert dsprep.verify(now, out).same


@pytest.mark.parametrize("format", ["lmdb", "zarr"])
def test_a_source_of_other_content_is_not_continued(format, tmp_path):
    """Though its size is the same; the rerun says what to do."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=False)
    (other,) = made(format, tmp_path / "two", 2, 1, beside=False)
    target = tmp_path / "out"
    interrupted(path, target, **SHARDS)
    replace(path, other)
    with pytest.raises(TargetError, match="restart=True"):
        dsprep.convert(path, target, executor=Inline(), **SHARDS)
    report = dsprep.convert(path, target, executor=Inline(), restart=True, **SHARDS)
    assert report.resumed == 0
    with dsprep.open(path) as now, dsprep.open(target) as out:
        assert dsprep.verify(now, out).same
