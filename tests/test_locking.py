"""One process at a time, where locks are those of a local disk, of one node alone, or refused."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.errors import FormatError, TargetError
from dsprep.storage import atomic, locking
from dsprep.storage.locking import Owner, take
from dsprep.writing.staging import Staging


def honest(fd, how):
    """Take the lock as the system does."""
    return _flock(fd, how)


_flock = fcntl.flock


def local(fd, how):
    """Exclude nobody, as between two nodes where locks are of one node alone."""


def refusing(number):
    def flock(fd, how):
        raise OSError(number, os.strerror(number))

    return flock


FLOCKS = {
    "honest": honest,
    "local": local,
    **{errno.errorcode[n]: refusing(n) for n in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)},
}


@pytest.fixture(params=FLOCKS)
def path(request, tmp_path, monkeypatch):
    """A lock on each kind of file system, that of another node being watched for a moment."""
    monkeypatch.setattr(fcntl, "flock", FLOCKS[request.param])
    monkeypatch.setattr(locking, "QUIET", 0.1)
    monkeypatch.setattr(locking, "SETTLE", 0.03)
    return tmp_path / "lock"


def record(path):
    return path.with_name(f"{path.name}.owner")


def left(path, **facts) -> Owner:
    """Leave the record of a process that is gone, by default of another node."""
    owner = replace(Owner.this(), **{"host": "node7", "boot": "another", **facts})
    record(path).write_bytes(owner.dump())
    return owner


@pytest.fixture
def waiting_for_ever(path, monkeypatch):
    """Waiting for another node would be noticed."""
    monkeypatch.setattr(locking, "QUIET", 3600)
    monkeypatch.setattr(locking, "SETTLE", 3600)


def test_a_released_lock_leaves_nothing_and_costs_no_time(path, waiting_for_ever):
    for _ in range(3):
        held = take(path)
        held.check()
        held.release()
        held.release()
        assert held.notes == ()
    assert [p.name for p in path.parent.iterdir()] == ["lock"]


def test_who_has_it_is_named(path):
    held = take(path)
    with pytest.raises(BlockingIOError, match=rf"process {os.getpid()} on {os.uname().nodename}"):
        take(path)
    held.check()
    held.release()
    take(path).release()


def test_a_killed_process_of_this_node_is_seen_at_once(path, waiting_for_ever):
    child = os.fork()
    if child == 0:
        take(path)
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is not collected yet
    assert record(path).exists()
    held = take(path)
    assert held.notes == ()
    held.release()
    os.waitpid(child, 0)


def test_a_number_that_is_used_again_is_no_sign_of_life(path):
    this = Owner.this()
    left(path, boot=this.boot, pid=os.getppid(), start=1)
    take(path).release()
    assert Owner.this().lives() is False  # of this process, but of no lock that it holds


@pytest.mark.parametrize("text", [None, b"", b"{"], ids=["whole", "empty", "half"])
def test_a_silent_node_is_watched_then_replaced(path, text):
    left(path)
    if text is not None:
        record(path).write_bytes(text)
    began = time.monotonic()
    held = take(path)
    assert time.monotonic() - began >= locking.QUIET
    assert len(held.notes) == 1
    assert ("process" if text is not None else "on node7") in held.notes[0]
    held.release()
    assert not record(path).exists()


def test_a_node_that_gives_signs_of_life_is_not_disturbed(path, monkeypatch):
    monkeypatch.setattr(locking, "BEAT", 0.1)
    monkeypatch.setattr(locking, "QUIET", 600)
    monkeypatch.setattr(Owner, "lives", lambda self: None)  # as from another node
    monkeypatch.setattr(fcntl, "flock", local)
    held = take(path)
    with pytest.raises(BlockingIOError, match="process"):
        take(path)
    held.check()
    held.release()


def test_a_record_that_goes_meanwhile_is_no_obstacle(path, monkeypatch):
    monkeypatch.setattr(locking, "QUIET", 600)
    left(path)
    threading.Timer(0.2, record(path).unlink).start()
    held = take(path)
    assert held.notes == ()
    held.release()


@pytest.mark.parametrize("taken_over", [True, False])
def test_of_several_nodes_one_begins(taken_over, path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", local)
    if taken_over:
        monkeypatch.setattr(locking, "SETTLE", 0.5)
        left(path)
    held, barrier = [], threading.Barrier(4)

    def node():
        barrier.wait()
        with suppress(BlockingIOError):
            held.append(take(path))

    threads = [threading.Thread(target=node) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1
    held[0].check()
    held[0].release()


def test_a_lock_that_the_server_keeps_after_its_holder_is_awaited(path, monkeypatch):
    times = []

    def late(fd, how):
        times.append(how)
        if len(times) < 3:
            raise BlockingIOError(errno.EAGAIN, "still held")
        return honest(fd, how)

    take(path).release()
    gone = replace(Owner.this(), pid=2**22 + 1, token="gone")
    path.with_name("lock.owner").write_bytes(gone.dump())
    monkeypatch.setattr(locking, "LATE", (0.01, 0.01))
    monkeypatch.setattr(fcntl, "flock", late)
    held = take(path)
    assert len(times) == 3
    held.release()


def test_a_holder_that_slept_publishes_nothing(path):
    target = path.parent / "out"

    def work():
        with Staging(target, {"format": "hdf5"}) as staging:
            (staging.data / "out").write_text("new")
            staging.save({"shard": 0})
            left(staging.root / atomic.LOCK)
            staging.publish()

    with pytest.raises(TargetError, match=r"process .* on node7 has taken this work over"):
        work()
    assert not target.exists()
    with Staging(target, {"format": "hdf5"}) as staging:  # and the other one is gone as well
        assert staging.state == {"shard": 0}
        assert len(staging.notes) == 1


def test_a_forked_child_does_not_release(path):
    held = take(path)
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    held.check()
    held.release()


def test_an_hdf5_file_that_is_locked_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(5)
    with (tmp_path / "x.h5").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FormatError, match="another program has the file open for writing"):
            dsprep.open(tmp_path / "x.h5")
