"""Whatever happens to a cache, and to who fills it: no wrong sample, no wait for ever."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import started, written

import dsprep
from dsprep.cache import copier
from dsprep.cache.copies import PLANNED, READY, Copy
from dsprep.cache.folder import CacheFolder
from dsprep.core.schema import Field, Schema
from dsprep.errors import ReadError
from dsprep.reader.cached import CacheWarning
from dsprep.sidecar.sidecar import Sidecar, StaleError

COUNT = 256
SCHEMA = Schema((Field("x", np.dtype("<i4"), (512,)), Field("id", np.dtype("<i8"))))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("dsprep.reader.cached.PAUSE", 0.002)


def values(ids: np.ndarray, version: int) -> np.ndarray:
    """What sample `ids` holds: never zero, so that what is missing is seen."""
    found = (ids[:, None] * 7919 + np.arange(512) * 31 + version) % 251 + 1
    return found.astype(np.int32)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("origin"))


def made(folder: Path, version: int = 0, name: str = "set.h5", **options: Any) -> Path:
    """A dataset of 32 groups of 16 KiB each."""
    ids = np.arange(COUNT)
    folder.mkdir(exist_ok=True)
    source = written(folder / f"in-{version}.h5", SCHEMA, {"x": values(ids, version), "id": ids})
    options = {"buffer_size": 8, "stripe_size": "4KiB", "durable": False, **options}
    dsprep.repack(source, folder / name, overwrite=True, **options)
    return folder / name


def checked(batches: Any, version: int = 0) -> int:
    """Compare every sample with what it has to be; return how many there were."""
    seen: list[int] = []
    for batch in batches:
        ids = np.asarray(batch["id"])
        assert np.array_equal(batch["x"], values(ids, version))
        seen += ids.tolist()
    assert len(set(seen)) == len(seen)
    return len(seen)


def epoch(path: Path, cache: Path, notes: int = 0, **options: Any) -> Any:
    """Read an epoch, of which every sample is right; return its statistics."""
    with said(notes), dsprep.Reader(path, 8, cache=cache, **options) as reader:
        assert checked(reader) == COUNT
    return reader.stats[0]


@contextlib.contextmanager
def said(count: int, *words: str) -> Iterator[None]:
    """Within it there are so many notes of the cache, which have some words."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in found if w.category is CacheWarning]
    assert len(texts) == count, texts
    assert all(word in text for word in words for text in texts), texts


def the_copy(cache: Path) -> Path:
    folder = CacheFolder(cache)
    (name,) = folder.names()
    return folder.root / name


def until(happened: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.005)


# --- what is damaged ---------------------------------------------------------------------------

BAD = "[" * 100_000, '{"dsprep_copy": 2, "pieces": [[0, 1e400]]}'


@pytest.mark.parametrize("text", BAD)
def test_what_does_not_say_that_it_is_a_copy_stays_and_is_named(origin, tmp_path, text):
    epoch(origin, tmp_path)
    path = the_copy(tmp_path)
    (path / "copy.json").write_text(text)
    names = sorted(p.name for p in path.iterdir())
    with (
        said(1, str(path), "copy.json is damaged"),
        dsprep.Reader(origin, 8, cache=tmp_path) as reader,
    ):
        assert checked(reader) == COUNT
    assert sorted(p.name for p in path.iterdir()) == names
    assert (path / "copy.json").read_text() == text
    path.rename(tmp_path / "away")
    assert epoch(origin, tmp_path).copied_nbytes


@pytest.mark.parametrize("name", ["state", "files"])
def test_a_copy_without_one_of_its_tables_is_made_again(origin, tmp_path, name):
    epoch(origin, tmp_path)
    (the_copy(tmp_path) / name).unlink()
    assert epoch(origin, tmp_path).copied_nbytes
    assert epoch(origin, tmp_path).cache_units == 32
    assert len(list(tmp_path.iterdir())) == 2  # the lock, too


@pytest.mark.parametrize("synced", [True, False])
def test_what_may_have_been_lost_with_the_kernel_is_made_again(
    origin, tmp_path, monkeypatch, synced
):
    epoch(origin, tmp_path)
    copy = Copy(the_copy(tmp_path))
    copy.sync() if synced else copy.not_synced()
    copy.close()
    monkeypatch.setattr("dsprep.cache.copies.boot", lambda: "another")
    assert (epoch(origin, tmp_path).copied_nbytes == 0) == synced


def test_a_dataset_that_was_replaced_has_another_copy(tmp_path):
    epoch(made(tmp_path), tmp_path / "cache")
    with dsprep.Reader(made(tmp_path, 1), 8, cache=tmp_path / "cache") as reader:
        assert checked(reader, 1) == COUNT
        assert reader.stats[0].copied_nbytes


# --- others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o1777, 0o775])
def test_a_directory_to_which_others_may_write_is_refused(origin, tmp_path, mode):
    tmp_path.chmod(mode)
    with said(1, "others may write"), dsprep.Reader(origin, 8, cache=tmp_path) as reader:
        assert checked(reader) == COUNT
    assert not list(tmp_path.iterdir())
    assert epoch(origin, tmp_path / "own").copied_nbytes
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


# --- what a copy holds ---------------------------------------------------------------------------


def test_a_damaged_group_is_noticed_by_verify_and_read_again_as_a_whole(origin, tmp_path):
    epoch(origin, tmp_path)
    with (the_copy(tmp_path) / "0").open("r+b") as file:
        data = bytearray(file.read())
        for at in range(9_000, len(data), 30_000):
            data[at] ^= 1
        file.seek(0)
        file.write(data)
    assert epoch(origin, tmp_path, notes=1, verify=True, buffers=2).cache_units < 32


@pytest.mark.parametrize("cut", [True, False])
def test_files_that_somebody_removes_or_cuts_off_are_not_taken_for_filled(origin, tmp_path, cut):
    """As programs do that remove what was not read for long."""
    with dsprep.Reader(origin, 8, cache=dsprep.Cache(tmp_path, bandwidth="2MB/s")) as reader:
        loop = iter(reader)
        checked([next(loop)])
        states = the_copy(tmp_path) / "state"
        until(lambda: (np.fromfile(states, np.uint8) == READY).sum() > 8)
    assert (np.fromfile(states, np.uint8) == PLANNED).any()
    if cut:
        os.truncate(the_copy(tmp_path) / "0", 5000)
    else:
        (the_copy(tmp_path) / "0").unlink()
    assert epoch(origin, tmp_path).cache_units == 32


def damaged(path: Path, i: int) -> bool:
    """Change a byte of a sample, unless the sidecar notices that at once; return whether."""
    found = path.stat()
    with path.open("r+b") as file:
        at = file.read().index(values(np.array([i]), 0).tobytes()) + 101
        for word in (b"\xff", b"\0"):
            file.seek(at)
            file.write(word)
            file.flush()
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
            with contextlib.suppress(StaleError):
                Sidecar.open(path).close()
                return word == b"\xff"
    raise AssertionError(path)


def test_groups_that_are_not_right_are_not_kept_and_noted_once(tmp_path):
    path = made(tmp_path)
    wrong = {i for i in range(4, 200, 8) if damaged(path, i)}
    assert len(wrong) > 1
    cache = tmp_path / "cache"
    with said(1, "CRC-32C"), dsprep.Reader(path, 8, cache=cache) as reader:
        for _ in range(2):
            seen = 0
            for batch in reader:
                wrong_here = (batch["x"] != values(batch["id"], 0)).any(1)
                assert set(batch["id"][wrong_here].tolist()) <= wrong
                seen += len(batch["id"])
            assert seen == COUNT
        assert reader.stats[1].cache_units == 32 - len(wrong)


# --- who fills it --------------------------------------------------------------------------------


def held(path: Path, directory: bool = False) -> int:
    """Have a child be the one that fills a copy, or keep all of them; return its number."""

    def hold() -> None:
        folder = CacheFolder(path.parent)
        copy = Copy(path)
        lock = copy.fill_lock()
        assert lock is not None
        with folder.locked() if directory else contextlib.nullcontext():
            path.with_name("held").touch()
            time.sleep(60)

    child = started(hold)
    until(lambda: path.with_name("held").exists())
    return child


def ended(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


# --- room ----------------------------------------------------------------------------------------


def taken(path: Path) -> int:
    files = [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_blocks * 512 for each in files)


@pytest.mark.filterwarnings("ignore:.*there is no room")
@pytest.mark.parametrize(("policy", "share"), [("epoch", 0.2), ("mini-epoch", 0.6)])
def test_never_more_than_its_size(origin, tmp_path, policy, share):
    size = int(origin.stat().st_size * share)
    options: dict[str, Any] = {"mini_epochs": 4, "repeats": 2}
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.001):
            with contextlib.suppress(OSError):
                most = max(most, taken(tmp_path))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        tier = dsprep.Cache(tmp_path, size, policy)
        with dsprep.Reader(origin, 8, cache=tier, **options) as reader:
            assert sum(checked(reader) for _ in range(16)) == 4 * COUNT
    finally:
        ended.set()
        looking.join()
    assert sum(s.cache_units for s in reader.stats) > 0
    assert 0 < most <= size


def test_no_room_for_anything(origin, tmp_path):
    with said(1, "there is no room"):
        with dsprep.Reader(origin, 8, cache=dsprep.Cache(tmp_path, 8000)) as reader:
            assert checked(reader) == checked(reader) == COUNT
        assert taken(tmp_path) == 0


# --- jobs that end, stop, or run together --------------------------------------------------------


def filling(path: Path, cache: Path, count: int = 5) -> int:
    """Have a child fill a copy, and return its number once it has so many groups."""

    def work() -> None:
        warnings.simplefilter("ignore")
        with dsprep.Reader(path, 8, cache=dsprep.Cache(cache, bandwidth="400kB/s")) as reader:
            checked(reader)

    child = started(work)
    until(lambda: cache.exists() and any(CacheFolder(cache).names()))
    states = the_copy(cache) / "state"
    until(lambda: (np.fromfile(states, np.uint8) == READY).sum() >= count)
    return child


def test_a_job_that_was_killed_leaves_what_the_next_one_needs_not_copy(origin, tmp_path):
    ended(filling(origin, tmp_path))
    copied = epoch(origin, tmp_path).copied_nbytes
    assert 0 < copied <= 27 / 32 * origin.stat().st_size
    stats = epoch(origin, tmp_path)
    assert (stats.copied_nbytes, stats.cache_units) == (0, 32)


def test_a_job_goes_on_filling_when_the_other_one_is_killed(origin, tmp_path):
    child = filling(origin, tmp_path, 2)
    with said(0), dsprep.Reader(origin, 8, cache=tmp_path) as reader:
        loop = iter(reader)
        checked([next(loop)])
        assert reader._cache._last[0].current.copy.is_filled_by_somebody()
        ended(child)
        assert checked(loop) == COUNT - 8
        assert reader.stats[0].cache_units == 32
        assert 0 < reader.stats[0].copied_nbytes < origin.stat().st_size


@pytest.mark.parametrize("what", ["copy", "directory"])
def test_who_is_stopped_is_not_waited_for_for_ever(origin, tmp_path, monkeypatch, what):
    monkeypatch.setattr("dsprep.reader.cached.SLOW_SECONDS", 0.3)
    monkeypatch.setattr("dsprep.cache.folder.PATIENCE", 0.3)
    with dsprep.Reader(origin, 8, cache=dsprep.Cache(tmp_path, bandwidth="10kB/s")) as reader:
        reader._cache.begin(reader._segment())
        path = the_copy(tmp_path)
    ready = (np.fromfile(path / "state", np.uint8) == READY).sum()  # before it was closed
    child = held(path, what == "directory")
    os.kill(child, signal.SIGSTOP)
    try:
        stats = epoch(origin, tmp_path, notes=1)
        assert stats.cache_units == (ready if what == "copy" else 0) < 32
        assert stats.copied_nbytes == 0
    finally:
        ended(child)
    assert epoch(origin, tmp_path).cache_units == 32


# --- a tier that does not work -------------------------------------------------------------------


def test_a_cache_that_vanishes(origin, tmp_path):
    cache = tmp_path / "cache"
    tier = dsprep.Cache(cache, policy="mini-epoch", bandwidth="1MB/s")
    with said(1), dsprep.Reader(origin, 8, mini_epochs=2, cache=tier) as reader:
        loop = iter(reader)
        seen = checked([next(loop)])
        shutil.rmtree(cache)
        assert seen + checked(loop) + checked(reader) == COUNT
        assert checked(reader) + checked(reader) == COUNT


def test_a_disk_that_is_full_in_the_middle(origin, tmp_path, monkeypatch):
    """As where reserving space means nothing."""
    real, left = copier.pwrite_crc32c, [10]

    def write(*words: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*words)

    monkeypatch.setattr(copier, "pwrite_crc32c", write)
    with said(1, "No space left"), dsprep.Reader(origin, 8, cache=tmp_path) as reader:
        assert checked(reader) == checked(reader) == COUNT
    monkeypatch.setattr(copier, "pwrite_crc32c", real)
    assert epoch(origin, tmp_path).cache_units == 32


# --- another dataset -----------------------------------------------------------------------------


def test_a_dataset_that_is_written_to_while_it_is_copied(tmp_path):
    path, cache = made(tmp_path), tmp_path / "cache"
    tier = dsprep.Cache(cache, bandwidth="1MB/s")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        with dsprep.Reader(path, 8, cache=tier, buffers=2) as reader:
            loop = iter(reader)
            checked([next(loop)])
            with path.open("r+b") as file:
                data = file.read().replace(values(np.array([7]), 0).tobytes()[:64], b"\1" * 64)
                file.seek(0)
                file.write(bytes(b ^ 1 for b in data[:4096]) + data[4096:])
            with pytest.raises((ReadError, StaleError)):
                checked(itertools.chain(loop, reader))
    states = np.fromfile(the_copy(cache) / "state", np.uint8)
    held = np.fromfile(the_copy(cache) / "0", np.uint8)
    assert (states == READY).any()
    assert held[:4096].tobytes() != bytes(b ^ 1 for b in data[:4096])
