"""Data on file systems where inodes, times and devices are not those of a local disk.

``os.stat`` is given the answers of such file systems: no mount is needed.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
from oracles import SUFFIX
from support import assert_same_batch, random_batch
from test_marks import COUNT, SCHEMA, SHARDS, Inline, data_file, interrupted, made, replace

import dsprep
from dsprep.errors import TargetError
from dsprep.sidecar import spec
from dsprep.sidecar.spec import sidecar_path
from dsprep.source.from_sidecar import SidecarSource
from dsprep.source.many import MultiSource
from dsprep.storage import marks, nodes
from dsprep.storage.identity import ChangedError, same_time
from dsprep.storage.local import LocalFile
from dsprep.storage.marks import Mark
from dsprep.storage.nodes import wait_for
from dsprep.storage.trees import tree_nbytes
from dsprep.writing import parallel, run, staging

FORMATS = sorted(SUFFIX)
SECOND = 10**9


class Mount:
    """What ``stat`` says of files on another file system.

    Attributes
    ----------
    inodes
        Added to every inode: a client numbers files anew.
    unit
        To which times are cut, in ns.
    late
        Seconds that are added to every time: the clock of a server.
    follows
        Whether the change time is the time stamp.
    device
        Its number.
    """

    def __init__(self, monkeypatch) -> None:
        self.inodes, self.unit, self.late, self.follows, self.device = 0, 1, 0, False, None
        for name in ("stat", "lstat", "fstat"):
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))
        monkeypatch.setattr(os.path, "samestat", lambda a, b: True)  # by which trees are removed

    def wrapped(self, call):
        def stat(*args, **kwargs):
            found = call(*args, **kwargs)
            fields = list(found)
            fields[1] += self.inodes
            fields[2] = fields[2] if self.device is None else self.device
            names = {n for n in dir(found) if n.startswith("st_")} - {*found.__match_args__}
            more = {name: getattr(found, name) for name in names}
            mtime, ctime = found.st_mtime_ns, found.st_ctime_ns
            if self.follows:
                ctime = mtime
            for word, ns in (("mtime", mtime), ("ctime", ctime)):
                more[f"st_{word}_ns"] = (ns + self.late * SECOND) // self.unit * self.unit
            return os.stat_result(fields, more)

        return stat

    def as_sshfs(self) -> None:
        self.unit, self.follows = SECOND, True


@pytest.fixture
def mount(monkeypatch):
    return Mount(monkeypatch)


def elsewhere(monkeypatch) -> None:
    """Be another node from now on, and wait for nothing."""
    for module in (nodes, marks, parallel):
        if hasattr(module, "node"):
            monkeypatch.setattr(module, "node", lambda: "another")
    monkeypatch.setattr(nodes, "PATIENCE", 0.0)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1_700_000_000_123_456_789, 1_700_000_000_123_456_700, True),  # SMB
        (1_700_000_001_123_456_789, 1_700_000_001_000_000_000, True),  # tar, rsync, sshfs
        (1_700_000_001_123_456_789, 1_700_000_000_000_000_000, True),  # FAT
        (1_700_000_001_123_456_789, 1_700_000_002_000_000_000, False),
        (1_700_000_001_123_456_789, 1_700_000_001_123_456_790, False),
        (1_700_000_003_000_000_000, 1_700_000_001_000_000_000, False),
    ],
)
def test_times_are_compared_in_the_coarser_unit(a, b, same):
    assert same_time(a, b) is same_time(b, a) is same


@pytest.mark.parametrize(
    ("format", "sshfs", "files"),
    zip(FORMATS, (True, False) * 2, (1, 3) * 2, strict=True),
)
def test_files_that_are_numbered_anew_are_the_same(format, sshfs, files, tmp_path, mount):
    """While they are read, opened again, and handed to tasks; the rerun continues."""
    if sshfs:
        mount.as_sshfs()
    paths = made(format, tmp_path / "one", 1, files, beside=files == 1)
    source = paths[0] if files == 1 else tmp_path / "one"

    def forget() -> None:
        mount.inodes += 1000

    with dsprep.open(source) as opened:
        before = opened[:]
        forget()
        assert_same_batch(opened[:], before, opened.schema)
        if isinstance(opened, SidecarSource):
            opened.sidecar._files._open.clear()
            opened[1]
        elif isinstance(opened, MultiSource):
            for index in list(opened._open):
                opened._close(index)
            opened[1]
    target = tmp_path / "out"
    interrupted(source, target, **SHARDS)
    forget()
    mount.device = 99
    report = dsprep.convert(source, target, executor=Inline(forget), **SHARDS)
    assert report.resumed == 10
    with dsprep.open(source) as now, dsprep.open(target) as out:
        assert dsprep.verify(now, out).same


@pytest.mark.parametrize("format", FORMATS)
def test_another_file_of_the_same_second_is_noticed(format, tmp_path, mount):
    """By the sampled blocks, where times are whole seconds and the inode is another one."""
    mount.as_sshfs()
    (path,) = made(format, tmp_path / "one", 1, 1, beside=False)
    (other,) = made(format, tmp_path / "two", 2, 1, beside=False)
    mark = Mark.of(path)
    replace(path, other)
    with pytest.raises(ChangedError, match="replaced while"):
        mark.check()


@pytest.mark.parametrize("format", FORMATS)
def test_a_mark_on_another_node(format, tmp_path, mount, monkeypatch):
    """Inode, device and change time differ there; size and time stamp still count."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=False)
    mark = Mark.of(path)
    data = data_file(path)
    found = data.stat()
    elsewhere(monkeypatch)
    mount.inodes, mount.device = 5000, 98
    os.utime(data, ns=(found.st_atime_ns, found.st_mtime_ns))  # another change time
    mark.check()
    os.utime(data, ns=(found.st_atime_ns, found.st_mtime_ns + 3 * SECOND))
    with pytest.raises(ChangedError):
        mark.check()


def test_attributes_that_a_client_has_kept_are_asked_for_anew(tmp_path, monkeypatch):
    """Opening does that; it is done before data count as changed, and only then."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    old = path.stat()
    time.sleep(0.01)
    path.write_bytes(b"new!")
    mark = Mark.of(path)
    real, opened, kept = Path.stat, [], [old]
    monkeypatch.setattr(
        Path, "stat", lambda p, **k: kept[0] if kept and p == path else real(p, **k)
    )
    before = os.open

    def open_(name, *args, **kwargs):
        if Path(name) == path:
            opened.append(name)
            kept.clear()
        return before(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    mark.check()
    assert len(opened) == 1
    mark.check()
    assert len(opened) == 1


# --- what another node has completed -----------------------------------------------------------


def test_it_is_waited_for_what_another_node_has_written(tmp_path):
    path = tmp_path / "x"
    wait_for(path, nodes.node())  # of this node it is there, or never
    threading.Timer(0.1, path.write_bytes, [b"12"]).start()
    threading.Timer(0.2, path.write_bytes, [b"1234"]).start()
    wait_for(path, "another", 4)
    wait_for(tmp_path, "another", 4)


def test_what_is_never_seen_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "PATIENCE", 0.1)
    for found, nbytes in (("nothing there", None), ("2 bytes", 4)):
        with pytest.raises(TargetError, match=rf"found {found}.*share.*actimeo=1"):
            wait_for(tmp_path / "x", "another", nbytes)
        (tmp_path / "x").write_bytes(b"12")


@pytest.mark.parametrize("format", FORMATS)
def test_shards_that_are_seen_late(format, tmp_path, monkeypatch):
    """The first process waits for each of them, and for the record of its groups."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=True)
    monkeypatch.setattr(parallel, "node", lambda: "another")
    real = parallel._put

    def late(made: Path, path: Path, own: Path) -> None:
        kept = made.with_name("kept")
        made.rename(kept)
        threading.Timer(0.05, real, [kept, path, own]).start()

    monkeypatch.setattr(parallel, "remove", lambda path: None)
    monkeypatch.setattr(parallel, "tree_nbytes", lambda path: _nbytes(path))

    def _nbytes(path: Path) -> int:
        while not path.exists():
            time.sleep(0.01)
        return tree_nbytes(path)

    monkeypatch.setattr(parallel, "_put", late)
    for options in ({}, {"buffer_size": 5, "stripe_size": "4KiB"}):
        target = tmp_path / f"out{len(options)}"
        run = dsprep.repack if options else dsprep.convert
        options |= {"to": format, "samples_per_file": 20, "durable": False}
        run(path, target, executor=Inline(), **options)
        with dsprep.open(path) as now, dsprep.open(target) as out:
            assert dsprep.verify(now, out).same


# --- sidecars ------------------------------------------------------------------------------------


def assert_used(path: Path, monkeypatch, *, notes: int = 0) -> None:
    """Assert that a sidecar is used without a warning, and that no checksums are compared."""
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(dsprep.Sidecar, "wrong_sums", lambda *_: pytest.fail("checksums"))
        with dsprep.open(path) as source:
            assert isinstance(source, SidecarSource)
            assert len([n for n in source.notes if "written to" in n]) == notes
            assert_same_batch(source[:], random_batch(SCHEMA, COUNT, seed=1), SCHEMA)
        dsprep.Sidecar.open(path).close()


WAYS = {
    "cp -a": lambda a, b: subprocess.run(["cp", "-a", a, b], check=True),
    "rsync without times": lambda a, b: subprocess.run(["cp", "-r", a, b], check=True),
    "moved": lambda a, b: a.rename(b),
}


@pytest.mark.parametrize(("way", "format"), [*zip(WAYS, FORMATS, strict=False), ("moved", "zarr")])
def test_a_sidecar_holds_for_copies_and_other_mounts(way, format, tmp_path, mount, monkeypatch):
    (path,) = made(format, tmp_path / "one", 1, 1, beside=True)
    dsprep.provenance(path, checksums=True)
    WAYS[way](tmp_path / "one", tmp_path / "two")
    copy = tmp_path / "two" / path.name
    assert_used(copy, monkeypatch)
    mount.inodes, mount.device, mount.late = 7000, 97, 60
    assert_used(copy, monkeypatch)


@pytest.mark.parametrize(
    ("unit", "format"), zip([100, SECOND, 2 * SECOND, SECOND], FORMATS, strict=True)
)
def test_a_sidecar_holds_where_times_are_cut(format, unit, tmp_path, mount, monkeypatch):
    """As after a remount, when the client has forgotten what it had not yet cut."""
    (path,) = made(format, tmp_path / "one", 1, 1, beside=True)
    dsprep.provenance(path, checksums=True)
    mount.unit = unit
    assert_used(path, monkeypatch)


def test_a_sidecar_that_is_seen_too_short(tmp_path, monkeypatch):
    """It has just replaced a shorter one, of which the client has kept the size."""
    (path,) = made("lmdb", tmp_path / "one", 1, 1, beside=True)
    real, times = LocalFile.pread, []

    def pread(self, nbytes, offset):
        data = real(self, nbytes, offset)
        if self.path.name.endswith(".json") and len(times) < 2:
            times.append(self)
            return data[: len(data) // 2]
        return data

    monkeypatch.setattr(LocalFile, "pread", pread)
    assert spec.read(sidecar_path(path)).samples == COUNT
    assert len(times) == 2


# --- what is found again -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_another_node_has_made_meanwhile_is_not_replaced(kind, tmp_path, monkeypatch):
    """Though this one does not see it: the server is asked by the rename itself."""
    target = tmp_path / "out"
    real = os.path.lexists
    with staging.Staging(target, {"format": "hdf5"}) as stage:
        for path in (stage.data / "out", target):
            if kind == "file":
                path.write_text(str(path))
            else:
                path.mkdir()
                (path / "x").write_text(str(path))
        stage.save({"complete": True})
        monkeypatch.setattr(os.path, "lexists", lambda p: p != target and real(p))
        with pytest.raises(TargetError, match="another node has made it"):
            stage.publish()
    assert (target if kind == "file" else target / "x").read_text() == str(
        target if kind == "file" else target / "x"
    ).removesuffix("/x")


def test_other_times_of_a_locked_output_are_no_change_of_it(tmp_path, monkeypatch):
    """Clients may show other times of what one of them wrote; sizes are compared all the same."""
    (source,) = made("hdf5", tmp_path / "one", 1, 1, beside=False)
    real = run.describe

    def touched(*arguments):
        class Late(Inline):
            def submit(self, fn, /, *args, **kwargs):
                for path in (tmp_path / ".set.dsprep-partial" / "data" / "set").iterdir():
                    os.utime(path, (self.done, self.done))
                return super().submit(fn, *args, **kwargs)

        return real(*arguments[:-1], Late())

    monkeypatch.setattr(run, "describe", touched)
    dsprep.convert(source, tmp_path / "set", executor=Inline(), **SHARDS)
    with dsprep.open(source) as a, dsprep.open(tmp_path / "set") as b:
        assert dsprep.verify(a, b).same
    (tmp_path / "x").write_text("12")
    mark = dataclasses.replace(Mark.of(tmp_path / "x"), locked=True)
    (tmp_path / "x").write_text("123")
    with pytest.raises(ChangedError):
        mark.check()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_old_dataset_is_not_taken_for_the_output_where_times_are_coarse(
    kind, tmp_path, monkeypatch
):
    """Though only bytes differ that are not sampled, and times are whole seconds."""
    blocks = [bytes([i]) * marks.BLOCK_NBYTES for i in range(64)]
    contents = {"old": b"".join(blocks), "new": b"".join([*blocks[:6], b"\1" * 4096, *blocks[7:]])}
    target = tmp_path / "out"

    def write(path, content):
        if kind == "directory":
            path.mkdir()
            path = path / "x"
        path.write_bytes(contents[content])

    def stat(self, *, follow_symlinks=True, real=Path.stat):
        return Rounded(real(self, follow_symlinks=follow_symlinks))

    monkeypatch.setattr(Path, "stat", stat)
    write(target, "old")
    with staging.Staging(target, {"format": "hdf5"}, overwrite=True) as stage:
        write(stage.data / "out", "new")
        stage.save({"complete": True})
        assert not staging.published(target)
        stage.publish()
        assert staging.published(target)
    found = target / "x" if kind == "directory" else target
    assert found.read_bytes() == contents["new"]


class Rounded:
    """A status whose times are whole seconds, all the same."""

    def __init__(self, found):
        self._found = found

    def __getattr__(self, name):
        if name in ("st_mtime_ns", "st_ctime_ns"):
            return 1_790_000_000 * 10**9
        return getattr(self._found, name)
