"""Nothing that others have put into a cache is given out, written through, or removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path
from random import Random
from threading import Event, Thread

import numpy as np
import pytest
from test_cache_faults import COUNT, checked, epoch, made, said, the_copy
from typer.testing import CliRunner

import dsprep
from dsprep.cache.copies import Copy, Facts
from dsprep.cache.folder import LOCK, CacheFolder
from dsprep.cache.pieces import Pieces
from dsprep.cli import app
from dsprep.errors import UsageError
from dsprep.storage import directory
from dsprep.storage.directory import Directory
from dsprep.verbs.cache import purge


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("dsprep.reader.cached.PAUSE", 0.002)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("origin"))


@pytest.fixture
def foreign(monkeypatch):
    """Gives what makes a path somebody else's, whoever runs this."""
    inodes = set()
    monkeypatch.setattr(directory, "ROOT", -1)
    real = Directory.is_own

    def is_own(self, status):
        return (status.st_dev, status.st_ino) not in inodes and real(self, status)

    def give(path):
        found = path.lstat()
        inodes.add((found.st_dev, found.st_ino))

    monkeypatch.setattr(Directory, "is_own", is_own)
    return give


def run(*words, code=0):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def spoiled(path: Path) -> None:
    """Have a copy hold other values than the dataset, and checksums that are right for them."""
    data = path / "0"
    data.write_bytes(bytes(data.stat().st_size))


def tree(path: Path) -> dict[str, object]:
    """What is below a directory."""
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() else stat.S_IFMT(p.lstat().st_mode)
        for p in sorted(path.rglob("*"))
    }


# --- whose copies count --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["owner", "group", "others"])
def test_a_copy_that_others_may_write_to_is_not_read(origin, tmp_path, foreign, how):
    epoch(origin, tmp_path)
    path = the_copy(tmp_path)
    spoiled(path)
    if how == "owner":
        foreign(path)
    else:
        path.chmod(0o775 if how == "group" else 0o757)
    before = tree(tmp_path)
    with (
        said(1, str(path), "has made it, or others may write to it"),
        dsprep.Reader(origin, 8, cache=tmp_path) as reader,
    ):
        assert checked(reader) == COUNT
        assert reader.stats[0].cache_units == 0
    assert tree(tmp_path) == before
    assert "others may write to it" in run("cache", "list", tmp_path)
    assert "others may write to it" in run("cache", "verify", tmp_path, code=1)
    assert "others may write to it" in run("cache", "purge", tmp_path, "--all", code=1)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_in_a_directory_of_several_users_each_has_one(origin, tmp_path, mode):
    """Whatever others have put there, under the names of copies too."""
    epoch(origin, tmp_path / "other")
    planted = tmp_path / "cache" / the_copy(tmp_path / "other").name
    shutil.copytree(the_copy(tmp_path / "other"), planted)
    spoiled(planted)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cache" / LOCK).symlink_to(tmp_path / "victim")
    (tmp_path / "cache").chmod(mode)
    assert epoch(origin, tmp_path / "cache").copied_nbytes
    assert epoch(origin, tmp_path / "cache").copied_nbytes == 0
    own = tmp_path / "cache" / f"dsprep-cache-{os.geteuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert the_copy(tmp_path / "cache").parent == own
    assert str(origin) in run("cache", "list", tmp_path / "cache")
    run("cache", "purge", tmp_path / "cache", "--all")
    assert planted.exists()
    assert not CacheFolder(tmp_path / "cache").names()
    assert (tmp_path / "victim").read_text() == "precious"


def test_the_directory_of_a_user_may_be_made_by_another_one(origin, tmp_path, foreign):
    tmp_path.chmod(0o1777)
    own = tmp_path / f"dsprep-cache-{os.geteuid()}"
    own.mkdir(0o700)
    foreign(own)
    with said(1, str(own)), dsprep.Reader(origin, 8, cache=tmp_path) as reader:
        assert checked(reader) == COUNT
    assert list(own.iterdir()) == []
    own.rmdir()
    (tmp_path / "elsewhere").mkdir()
    own.symlink_to(tmp_path / "elsewhere")
    with said(1, str(own)), dsprep.Reader(origin, 8, cache=tmp_path) as reader:
        assert checked(reader) == COUNT
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_a_cache_of_ones_own_there_is_nothing_to_list(tmp_path):
    tmp_path.chmod(0o777)
    for words in ("list", "verify", "purge --all"):
        command, *more = words.split()
        assert "--shared" in run("cache", command, tmp_path, *more, code=2)
    assert list(tmp_path.iterdir()) == []


def test_servers_that_name_other_users(origin, tmp_path, monkeypatch):
    """As with root squashing, or through FUSE: what this process makes is its own all the same."""
    monkeypatch.setattr(directory, "ROOT", -1)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert epoch(origin, tmp_path / "cache").copied_nbytes
    assert epoch(origin, tmp_path / "cache").copied_nbytes == 0
    assert the_copy(tmp_path / "cache").parent == tmp_path / "cache"
    assert not [p for p in (tmp_path / "cache").iterdir() if "owner" in p.name]


def test_a_shared_cache_is_asked_for(origin, tmp_path, foreign):
    """Then copies of others count, and others may write to what is made."""
    tmp_path.chmod(0o2775)
    assert epoch(origin, tmp_path, cache_shared=True).copied_nbytes
    (path,) = (p for p in tmp_path.iterdir() if p.is_dir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o2775
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o664}
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o664
    foreign(path)
    assert epoch(origin, tmp_path, cache_shared=True).copied_nbytes == 0
    assert str(origin) in run("cache", "list", tmp_path, "--shared")
    assert "right" in run("cache", "verify", tmp_path, "--shared")
    assert "removed" in run("cache", "purge", tmp_path, "--all", "--shared")
    assert not path.exists()
    run("stage", origin, "-P", 1, "--ranks-per-node", 1, "-M", 8, "--to", tmp_path, "--shared")
    assert epoch(origin, tmp_path, cache_shared=True).copied_nbytes == 0
    with pytest.raises(UsageError, match="cache_shared is that of a cache"):
        dsprep.Reader(origin, 8, cache_shared=True)


def as_another_user(work) -> None:
    """Do something in a child that may not write to what this user has made."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_root_has_staged_is_read(tmp_path_factory):
    """By users who cannot write to it: no lock is taken, and nothing noted."""
    base = tmp_path_factory.mktemp("root")
    path, cache = made(base), base / "cache"
    cache.mkdir(0o755)
    run("stage", path, "-P", 1, "--ranks-per-node", 1, "-M", 8, "--to", cache)
    places = [base, *base.rglob("*")]
    if os.geteuid() == 0:
        places += [p for p in base.parents if p.stat().st_uid == 0]
    before = {p: p.stat().st_mode for p in places}
    for p, mode in before.items():
        p.chmod((mode | (0o555 if p.is_dir() else 0o444)) & ~0o222)
    try:
        as_another_user(lambda: _reads_all(path, cache))
    finally:
        for p, mode in before.items():
            p.chmod(mode)
    with Copied(cache) as copy:
        copy.set_state(3, 0)
    for p in places:
        p.chmod((before[p] | (0o555 if p.is_dir() else 0o444)) & ~0o222)
    try:
        as_another_user(lambda: _reads_all(path, cache, 31))
    finally:
        for p, mode in before.items():
            p.chmod(mode)


class Copied:
    """The only copy of a cache."""

    def __init__(self, cache: Path, shared: bool = False) -> None:
        folder = CacheFolder(cache, shared=shared)
        (name,) = folder.names()
        self.copy = Copy(folder.root, name)

    def __enter__(self) -> Copy:
        return self.copy

    def __exit__(self, *_: object) -> None:
        self.copy.close()


def _reads_all(path: Path, cache: Path, units: int = 32) -> None:
    with said(0), dsprep.Reader(path, 8, cache=cache) as reader:
        assert checked(reader) == checked(reader) == COUNT
        assert [s.cache_units for s in reader.stats] == [units, units]


# --- links, FIFOs, and other names ---------------------------------------------------------------

NAMES = ("state", "turn", "sums", "use", "fill", "files", "edges", "copy.json", "0")


def planted(kind: str, path: Path, victim: Path) -> None:
    path.unlink()
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling":
        path.symlink_to(victim.with_name("not there"))
    elif kind == "second name":
        path.hardlink_to(victim)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.mark.filterwarnings("ignore::dsprep.reader.cached.CacheWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "dangling", "second name", "FIFO", "directory"])
def test_nothing_is_written_through_what_is_no_file_of_the_copy(origin, tmp_path, kind, name):
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    cache.mkdir()
    cache.chmod(0o775)
    epoch(origin, cache, cache_shared=True)
    with Copied(cache, shared=True) as copy:
        path = copy.path
        copy.set_state(31, 1)  # asked for: it is to be written to
        copy.not_synced()
    victim.write_bytes((path / name).read_bytes() if kind == "second name" else b"precious")
    before = victim.read_bytes()
    planted(kind, path / name, victim)
    for _ in range(2):
        with dsprep.Reader(origin, 8, cache=cache, cache_shared=True) as reader:
            assert checked(reader) == COUNT
    assert victim.read_bytes() == before
    assert not victim.with_name("not there").exists()
    purge(cache, shared=True, everything=True)
    assert victim.read_bytes() == before
    assert kind != "directory" or path.exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "second name", "FIFO", "directory"])
def test_the_lock_is_not_made_through_a_link(origin, tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / LOCK).touch()
    planted(kind, cache / LOCK, victim)
    with said(1, str(cache / LOCK)), dsprep.Reader(origin, 8, cache=cache) as reader:
        assert checked(reader) == COUNT
    assert victim.read_text() == "precious"
    assert not (tmp_path / "not there").exists()


def test_what_the_files_of_a_dataset_were_is_not_taken_from_others(tmp_path, foreign):
    """Otherwise a dataset that was replaced would be taken for the one of the sidecar."""
    path, cache = made(tmp_path), tmp_path / "cache"
    run("stage", path, "-P", 1, "--ranks-per-node", 1, "-M", 8, "--to", cache)
    with dsprep.Reader(path, 8, cache=cache) as reader:
        assert reader._sidecar.is_known
    foreign(the_copy(cache))
    with dsprep.Reader(path, 8, cache=cache) as reader:
        assert not reader._sidecar.is_known
        reader._cache.close()


# --- what is no copy -----------------------------------------------------------------------------

FACTS = {
    "a user's": '{"version": 1, "dataset": "novel.txt"}',
    "of an earlier version": '{"version": 1, "pieces": [[0, 4]], "fields": ["x"], "key": "1", '
    '"part": "", "dataset": "x", "sidecar": "y", "boot": ""}',
    "empty": "",
    "no JSON": "{",
}


@pytest.mark.parametrize("text", FACTS)
@pytest.mark.parametrize("name", ["mine", "mine.dsprep-copy", ".mine.dsprep-cache-partial"])
def test_a_directory_of_a_user_is_never_removed(origin, tmp_path, name, text):
    """Whatever is in it, and however little room there is."""
    own = tmp_path / name
    (own / "below").mkdir(parents=True)
    for file in ("copy.json", "state", "0", "novel.txt", "below/copy.json"):
        (own / file).write_text(FACTS[text])
    before = tree(own)
    for options in ({}, {"mini_epochs": 4}, {"cache_size": "600kB"}):
        with dsprep.Reader(origin, 8, cache=tmp_path, **options) as reader:
            assert checked(reader) > 0
    if name != "mine":
        code = int(not name.startswith("."))
        for words in ("--incomplete", "--all"):
            text = run("cache", "purge", tmp_path, words, code=code)
            assert not code or "no part of a copy, kept" in text
    run("cache", "verify", tmp_path, code=int(name == "mine.dsprep-copy"))
    assert tree(own) == before


@pytest.mark.parametrize("extra", ["notes.txt", "state.old", "00000-1", "below"])
def test_a_copy_in_which_a_user_keeps_something_stays(origin, tmp_path, extra):
    epoch(origin, tmp_path)
    path = the_copy(tmp_path)
    (path / extra).mkdir() if extra == "below" else (path / extra).write_text("mine")
    before = tree(path)
    text = run("cache", "purge", tmp_path, "--all", code=1)
    assert f"it holds {extra}, which is no part of a copy, kept: {path}" in text
    assert tree(path) == before
    (path / "state").unlink()
    with said(1, extra, "move it away"), dsprep.Reader(origin, 8, cache=tmp_path) as reader:
        assert checked(reader) == COUNT


@pytest.mark.parametrize("count", range(1, 12))
def test_what_a_kill_leaves_of_making_or_removing_is_removed(origin, tmp_path, monkeypatch, count):
    """At each of its steps: nothing else has to be known of it than what is in it."""

    class Killed(BaseException):
        pass

    def killed(real):
        def call(*words, **more):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real(*words, **more)

        return call

    for step in ("open_file", "unlink"):
        cache, left = tmp_path / step, count
        if step == "unlink":
            epoch(origin, cache)
        else:
            cache.mkdir()
            (cache / LOCK).touch()
            left += 1  # the lock
        with monkeypatch.context() as patch:
            patch.setattr(Directory, step, killed(getattr(Directory, step)))
            try:
                if step == "unlink":
                    purge(cache, everything=True)
                else:
                    with dsprep.Sidecar.open(origin) as sidecar:
                        pieces = Pieces(sidecar, np.arange(0, COUNT + 8, 8), ("x", "id"))
                        CacheFolder(cache).open(Facts.of(pieces), pieces.edges)
            except Killed:
                assert len(list(cache.iterdir())) == 2
        epoch(origin, cache)
        assert sorted(p.name for p in cache.iterdir()) == [LOCK, the_copy(cache).name]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_no_umask_makes_a_cache_that_others_may_write_to(origin, tmp_path, mask):
    before = os.umask(mask)
    try:
        assert epoch(origin, tmp_path / "a" / "cache").copied_nbytes
        assert epoch(origin, tmp_path / "a" / "cache").copied_nbytes == 0
    finally:
        os.umask(before)
    made_here = [tmp_path / "a" / "cache", *(tmp_path / "a" / "cache").rglob("*")]
    assert not [p for p in made_here if p.stat().st_mode & directory.OTHERS]
    assert the_copy(tmp_path / "a" / "cache").parent == tmp_path / "a" / "cache"


@pytest.mark.filterwarnings("ignore::dsprep.reader.cached.CacheWarning")
def test_names_that_are_swapped_between_look_and_open(origin, tmp_path):
    """By one who may write to a shared cache: what is read is right, what links lead to stays."""
    victim, cache, ended, draw = tmp_path / "victim", tmp_path / "cache", Event(), Random(1)
    victim.mkdir()
    cache.mkdir()
    cache.chmod(0o775)
    for name in (*NAMES, LOCK, "synced"):
        (victim / name).write_text("precious")
    before = tree(victim)

    def swap(path: Path) -> None:
        aside = tmp_path / "aside"
        path.rename(aside)
        path.symlink_to(victim / path.name if aside.is_file() else victim)
        time.sleep(0.002)
        path.unlink()
        aside.rename(path)

    def attack() -> None:
        while not ended.wait(0.0005):
            with contextlib.suppress(OSError):
                swap(draw.choice([*cache.iterdir(), *cache.glob("*/*"), cache / "none"]))

    attacker = Thread(target=attack)
    attacker.start()
    try:
        for options in [{}, {"mini_epochs": 4}, {"cache_size": "300kB"}] * 2:
            with dsprep.Reader(origin, 8, cache=cache, cache_shared=True, **options) as reader:
                assert sum(checked(reader) for _ in range(4)) in (COUNT, 4 * COUNT)
            with contextlib.suppress(OSError):
                purge(cache, shared=True, everything=True)
    finally:
        ended.set()
        attacker.join()
    assert tree(victim) == before
