"""One process at a time, where locks are those of a local disk, or refused."""

from __future__ import annotations

import errno
import fcntl
import os
import time

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.errors import FormatError, TargetError
from dsprep.storage.locking import OWNER, Lock
from dsprep.writing.staging import Staging

_flock = fcntl.flock


def refusing(number):
    def flock(fd, how):
        raise OSError(number, os.strerror(number))

    return flock


FLOCKS = {
    "honest": _flock,
    **{errno.errorcode[n]: refusing(n) for n in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)},
}


@pytest.fixture(params=FLOCKS)
def path(request, tmp_path, monkeypatch):
    """A lock on each kind of file system."""
    monkeypatch.setattr(fcntl, "flock", FLOCKS[request.param])
    return tmp_path / "lock"


def test_who_has_it_is_named_until_it_is_released(path):
    for _ in range(2):
        held = Lock(path, signed=True)
        with pytest.raises(BlockingIOError, match=rf"process {os.getpid()} on") as caught:
            Lock(path)
        assert str(caught.value.filename).startswith(str(path))
        held.release()
        held.release()
    assert [p.name for p in path.parent.iterdir()] == ["lock"]


def test_a_forked_child_does_not_have_it(path):
    held = Lock(path)
    child = os.fork()
    if child == 0:
        held.release()
        time.sleep(60)
    with pytest.raises(BlockingIOError):
        Lock(path)
    held.release()
    Lock(path).release()
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_a_lock_that_was_removed_with_its_directory_is_not_taken(tmp_path, monkeypatch):
    """By the process that had it and has ended, just when another one opened it."""
    path = tmp_path / "root" / "lock"
    path.parent.mkdir()
    real, removed = os.path.samestat, []

    def late(a, b):
        path.unlink()
        removed.append(path)
        return real(a, path.stat())

    monkeypatch.setattr(os.path, "samestat", late)
    with pytest.raises(FileNotFoundError):
        Lock(path)
    assert removed


def test_shared_locks_exclude_the_other_kind(tmp_path):
    held = [Lock(tmp_path / "lock", shared=True) for _ in range(2)]
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "lock", seconds=0.02)
    del held
    Lock(tmp_path / "lock").release()


@pytest.mark.parametrize("restart", [True, False])
def test_what_a_killed_process_leaves(path, restart):
    """Where the kernel has no lock of it, its user says that it is gone: how, is told."""
    target = path.parent / "out"
    child = os.fork()
    if child == 0:
        staging = Staging(target, {"format": "hdf5"})
        staging.save({"shard": 1})
        os._exit(0)
    os.waitpid(child, 0)
    if fcntl.flock is not _flock:
        with pytest.raises(TargetError, match=rf"process {child} on .*restart=True") as caught:
            Staging(target, {"format": "hdf5"})
        (record,) = path.parent.glob(f".*/*{OWNER}")
        assert f"remove {record}" in str(caught.value)
        if not restart:
            record.unlink()
    with Staging(target, {"format": "hdf5"}, restart=restart) as staging:
        assert staging.state == (None if restart else {"shard": 1})


def test_an_hdf5_file_that_is_locked_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(5)
    with (tmp_path / "x.h5").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FormatError, match="another program has the file open for writing"):
            dsprep.open(tmp_path / "x.h5")
