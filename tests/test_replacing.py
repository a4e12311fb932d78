"""With ``--overwrite`` a dataset is the old or the new one, whatever fails on the way."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from support import fails, forked, random_batch, written

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import TargetError
from dsprep.storage import atomic
from dsprep.storage.locking import Lock
from dsprep.writing import staging

SCHEMA = Schema((Field("x", np.dtype("<i2"), (3,)), Field("r", np.dtype("<u4"), (None,))))
STRIDE = 1 if os.environ.get("DSPREP_FULL") == "1" else 5

CASES = [
    ("set.lmdb", {}, True),
    ("set.zarr", {}, False),
    ("set", {"to": "lmdb", "shard_size": 8}, False),
    ("set.h5", {"buffer_size": 4, "stripe_size": "4KiB"}, True),
]


def make(path, seed, **options):
    """Write a dataset of `SCHEMA`; one with another seed has as many samples and bytes."""
    batch = random_batch(SCHEMA, 24, seed, longest=4)
    batch["r"] = random_batch(SCHEMA, 24, 0, longest=4)["r"]
    batch["r"].values[:] += np.uint32(seed)
    return written(path, SCHEMA, batch, durable=True, **options)


def failing(fuse, mode):
    """Let a call of the system fail, or kill this process, after the output is complete."""
    left, armed = [fuse], [False]

    def counted(owner, name):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if armed[0] and "dir_fd" not in kwargs:  # a tree is removed in one step
                left[0] -= 1
                if left[0] == 0 and mode == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if left[0] == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), *map(str, args[:1]))
            return None if name == "fsync" else real(*args, **kwargs)

        setattr(owner, name, wrapped)

    def saved(self, state, save=staging.Staging.save):
        armed[0] = armed[0] or bool(state.get("complete"))
        save(self, state)

    for call in ("rename", "replace", "unlink", "fsync"):
        counted(os, call)
    counted(shutil, "rmtree")
    counted(atomic, "exchange")
    staging.Staging.save = saved


def attempt(convert, fuse=0, mode=""):
    """Convert in a child; return its exit code."""

    def work():
        failing(fuse, mode)
        convert()

    return forked(work)


def content(target):
    """Return what a dataset holds, types included, read in both ways; both say the same."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a sidecar that is ignored
        with dsprep.open(target) as source, dsprep.Sidecar.open(target) as opened:
            batches = (source.read(0, len(source)), opened.read(slice(None)))
            found += ["".join(f"{f} {b[f.name][:]}" for f in source.schema) for b in batches]
            assert list(map(str, opened.schema)) == list(map(str, source.schema))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("name", "options", "exchange"),
    CASES,
    ids=[f"{n}-{'-'.join(o)}-{'exchange' if e else 'renames'}" for n, o, e in CASES],
)
def test_old_or_new_whatever_fails(name, options, exchange, tmp_path, monkeypatch):
    """Each rename, unlink and fsync fails, or is the last act; every fifth one, in turn."""
    if not exchange:  # a file system that cannot exchange names
        monkeypatch.setattr(atomic, "exchange", lambda a, b: False)
    old, work = tmp_path / "old", tmp_path / "work"
    old.mkdir()
    origin, target = make(tmp_path / "origin.h5", 1), work / name
    per_file = options.get("shard_size")
    make(old / name, 2, to=options.get("to"), shard_size=per_file)
    run = dsprep.repack if "buffer_size" in options else dsprep.convert

    def convert():
        run(origin, target, workers=1, overwrite=True, **options)

    def renew():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(old, work)

    renew()
    words = {content(target): "old"}
    convert()
    words[content(target)] = "new"
    files = sorted(p.name for p in old.iterdir())
    number, seen, ended = 1 + zlib.crc32(name.encode()) % STRIDE, [], 1
    while ended:
        for mode in ("fail", "kill") if STRIDE == 1 else (("fail", "kill")[number % 2],):
            renew()
            ended = attempt(convert, number, mode)
            seen.append(words[content(target)])
            if ended:
                assert attempt(convert) == 0, (number, mode)
            assert words[content(target)] == "new", (number, mode)
            assert sorted(p.name for p in work.iterdir()) == files, (number, mode)
        number += STRIDE
    assert set(seen) == {"old", "new"}
    assert len(seen) > 3


def test_kill_between_two_renames_is_repaired_by_opening(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "PATIENCE", 0.01)
    target = tmp_path / "set.zarr"
    make(target, 1)
    made = atomic.made_path(target)
    made.parent.mkdir(parents=True)
    make(tmp_path / "new.zarr", 2)
    (tmp_path / "new.zarr").rename(made)
    target.rename(atomic.old_path(target))
    held = Lock(atomic.partial_path(target) / atomic.LOCK, signed=True)
    for use in (dsprep.open, dsprep.Sidecar.open):
        with pytest.raises(TargetError, match=r"being replaced.*in use by process"):
            use(target)  # a run that is under way is not disturbed
    held.release()
    with dsprep.open(target) as source:
        assert len(source) == 24
    assert target.is_dir()


def test_a_reader_waits_for_the_second_rename(tmp_path):
    target = tmp_path / "set.zarr"
    make(target, 1)
    made = atomic.made_path(target)
    made.parent.mkdir(parents=True)
    target.rename(made)
    atomic.old_path(target).mkdir()
    held = Lock(atomic.partial_path(target) / atomic.LOCK)

    def second():
        made.rename(target)
        held.release()

    threading.Timer(0.15, second).start()
    with dsprep.open(target) as source:
        assert len(source) == 24


@pytest.mark.parametrize("refusal", ["", "EINVAL", "no such call"])
def test_names_that_cannot_be_exchanged(refusal, tmp_path, monkeypatch):
    """Two renames do, and the report says so; a file takes one, and what can be exchanged none."""

    def refuse(*_):
        ctypes.set_errno(getattr(errno, refusal))
        return -1

    if refusal:
        monkeypatch.setattr(atomic, "_renameat2", None if " " in refusal else refuse)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    exchanged = atomic.exchange(tmp_path / "a", tmp_path / "b")
    make(tmp_path / "origin.h5", 1)
    for name, notes in (("set.zarr", not exchanged), ("set.h5", 0)):
        target = tmp_path / name
        for overwrite in (False, True):
            report = dsprep.convert(
                tmp_path / "origin.h5", target, overwrite=overwrite, durable=False
            )
            told = [n for n in report.notes if "two renames" in n]
            assert len(told) == notes * overwrite
        with dsprep.open(target) as new, dsprep.open(tmp_path / "origin.h5") as origin:
            assert dsprep.verify(origin, new).same
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_what_cannot_be_put_back_is_named(tmp_path, monkeypatch):
    target = tmp_path / "set.zarr"
    atomic.made_path(target).mkdir(parents=True)
    atomic.old_path(target).mkdir()

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    fails(lambda: dsprep.open(target), TargetError, "rename ", "old to ")
