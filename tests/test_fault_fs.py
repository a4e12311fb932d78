"""Every verb on file systems that do without something, and on one that fails at the wrong moment.

The file system is `lab.cluster.faultfs`, over FUSE. It is mounted by a process with mounts of its
own, in which the tests below run: nothing is mounted for anybody else, and nothing stays when it
ends, however that happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from lab.cluster import faultfs
from lab.cluster.faultfs import Mounted

import dsprep
from dsprep.errors import ReadError
from dsprep.reader.cached import CacheWarning
from dsprep.reader.engines import Unavailable
from dsprep.storage import trees
from dsprep.storage.trees import soon
from dsprep.verbs.stage import Outcome
from dsprep.writing import shuffle, staging
from dsprep.writing.staging import Staging

ENGINES = ("buffered", "direct")
COUNT = 90
GROUPS: dict[str, Any] = {"buffer_size": 8, "stripe_size": 4096, "memory": "40MB", "workers": 1}
ORDER: dict[str, Any] = {"seed": 5}
MODES = {
    "calls-missing": (
        "no-odirect", "no-flock", "no-rename2", "no-links", "no-fallocate",
        "no-copy-file-range=EINVAL", "no-dir-fsync", "blksize", "stale=1",
    ),
    "past-the-cache": ("no-mmap", "short", "short-write", "silly=.nfs", "local-locks", "stale=1"),
    "odd-attributes": (
        "big-inodes", "inodes=7", "coarse", "clock=60", "silly=.fuse_hidden", "stale=60",
        "late-release",
    ),
}  # fmt: skip
"""What may be missing or odd; together, so that few mounts suffice."""

SECONDS = 180.0
"""How long one test may take here before its file system is ended; the next one gets others."""


# --- in the process that has mounts of its own ------------------------------------------------


class Here:
    """What the functions below work on.

    Attributes
    ----------
    base
        A directory on the disk.
    source
        A dataset in it.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.source = base / "source.h5"
        rng = np.random.default_rng(1)
        with h5py.File(self.source, "w") as file:
            file["x"] = rng.random((COUNT, 300), np.float32)
            file["y"] = np.arange(COUNT)
        self._stack = contextlib.ExitStack()

    @cache  # noqa: B019 (one of it in a process)
    def mounted(self, mode: str) -> Mounted:
        """Return a file system: of a mode, or one that has all it should have."""
        backing, at = self.base / f"{mode}-backing", self.base / f"{mode}-mount"
        backing.mkdir()
        at.mkdir()
        usual = () if mode == "times" else ("stale=1",)  # else the kernel keeps them
        return self._stack.enter_context(Mounted(backing, at, *MODES.get(mode, usual)))

    @cache  # noqa: B019
    def expected(self, target: str) -> tuple[dict[str, str], str]:
        """Return the files and the samples of a target on the disk."""
        at = self.base / f"plain{target}"
        at.mkdir()
        return do_verbs(at, target, self.source)

    def folder(self, name: str, mode: str = "") -> Path:
        """Make a directory on a file system."""
        at = self.mounted(mode).path / name
        at.mkdir()
        return at

    def close(self) -> None:
        self._stack.close()


def do_verbs(at: Path, target: str, source: Path) -> tuple[dict[str, str], str]:
    """Do everything to a dataset in a directory; return its files, and what was read."""
    source = Path(shutil.copy(source, at / "source.h5"))
    made, grouped = at / f"made{target}", at / f"grouped{target}"
    notes = dsprep.convert(source, made).notes
    assert ("calls-missing" in str(at)) == any("syncs no directories" in n for n in notes), notes
    dsprep.provenance(made, checksums=True)
    assert dsprep.check(made, full=True) == []
    same(source, made)
    dsprep.repack(made, grouped, shuffle=3, split="train=0.8,test=0.2", **GROUPS)
    train = at / f"grouped-train{target}"
    assert dsprep.check(train, full=True) == []
    dsprep.open(train, through="strict").close()
    dsprep.convert(source, made, overwrite=True, samples="0:80")
    with dsprep.open(made, through="strict") as opened:
        assert len(opened) == 80
    assert soon(lambda: not left(at)), left(at)
    return files(at), samples(train)


def left(at: Path) -> list[str]:
    return [p.name for p in at.iterdir() if p.name.startswith(".")]


def same(a: Path, b: Path) -> None:
    with dsprep.open(a) as one, dsprep.open(b) as other:
        assert dsprep.verify(one, other).same


def files(at: Path) -> dict[str, str]:
    """Return a digest of every file; of sidecars, of what does not differ from copy to copy."""
    found = {}
    for path in sorted(at.rglob("*")):
        if path.is_file() and path.name != "lock.mdb":
            data = path.read_bytes()
            if path.name.endswith(".dsprep.json"):
                data = json.dumps(_lasting(json.loads(data))).encode()
            found[str(path.relative_to(at))] = hashlib.sha256(data).hexdigest()
    return found


def _lasting(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            k: _lasting(v)
            for k, v in content.items()
            if k not in ("mtime_ns", "inode", "lineage", "sampled")
        }
    return [_lasting(v) for v in content] if isinstance(content, list) else content


def samples(path: Path) -> str:
    """Return a digest of an epoch, the same by every engine and where it is resumed."""
    found = set()
    for engine in ENGINES:
        options: dict[str, Any] = {
            "engine": engine,
            "io_threads": 2,
            "seed": 5,
        }
        try:
            with dsprep.Reader(path, 16, **options) as reader:
                whole = [_bytes(batch) for batch in reader]
        except Unavailable:
            continue
        with dsprep.Reader(path, 16, **options) as reader:
            loop = iter(reader)
            parts = [_bytes(next(loop)) for _ in range(2)]
            state = reader.state_dict()
            del loop
        with dsprep.Reader(path, 16, **options) as reader:
            reader.load_state_dict(state)
            parts += [_bytes(batch) for batch in reader]
        assert parts == whole
        found.add(hashlib.sha256(b"".join(whole)).hexdigest())
    with dsprep.Reader(path, 16, readers_per_node=1, seed=5) as reader:
        found.add(hashlib.sha256(b"".join(map(_bytes, reader))).hexdigest())
    assert len(found) == 1
    return found.pop()


def _bytes(batch: Any) -> bytes:
    return b"".join(np.asarray(column).tobytes() for column in batch.values())


def verbs(here: Here, mode: str, target: str) -> None:
    """All of it gives the files and the samples that it gives on the disk."""
    expected = here.expected(target)
    found = do_verbs(here.folder(target, mode), target, here.source)
    differing = {n for n in {*found[0], *expected[0]} if found[0].get(n) != expected[0].get(n)}
    assert not differing, differing
    assert found[1] == expected[1]


def failing_writes(here: Here, target: str) -> None:
    """What cannot be written is reported with the file, publishes nothing, and is continued."""
    fs, at = here.mounted(""), here.folder(f"writes{target}")
    old, new = at / f"old{target}", at / f"new{target}"
    dsprep.convert(here.source, old)
    before = files(at)
    for fault, number in (
        ("enospc=20000", errno.ENOSPC),
        ("enospc-close", errno.ENOSPC),
        ("eio-fsync", errno.EIO),
    ):
        calls: list[Callable[[], Any]] = [
            lambda: dsprep.convert(here.source, new),
            lambda: dsprep.convert(here.source, old, overwrite=True),
            lambda: dsprep.repack(
                here.source,
                at / f"groups{target}",
                buffer_size=8,
                shuffle=1,
                memory="40MB",
                workers=1,
            ),
        ]
        for call in calls:
            with fs.armed(fault), pytest.raises(OSError, match=str(at)) as caught:
                call()
            assert caught.value.errno == number
            assert files_published(at) == before
        for call in calls[:1]:
            call()
        assert files_published(at) == before | {
            name.replace("old", "new"): digest for name, digest in before.items()
        }
        for path in list(at.iterdir()):
            if path.name.startswith((".", "new")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def files_published(at: Path) -> dict[str, str]:
    return {name: digest for name, digest in files(at).items() if not name.startswith(".")}


def failing_reads(here: Here, target: str) -> None:
    """A read that fails reaches the consumer with file, offset and sample; others work."""
    fs, at = here.mounted("past-the-cache"), here.folder(f"reads{target}", "past-the-cache")
    path = at / f"grouped{target}"
    where = rf" at offset \d+: '{path}"
    text = rf"sample \d+ cannot be read: .*{where}"
    with fs.without("short", "short-write"):
        dsprep.repack(here.source, path, **GROUPS)
        for engine, fault in (("buffered", "eio"), ("direct", "estale")):
            few = {"io_threads": 1, "buffers": 2}  # so that most is read after the first batch
            with dsprep.Reader(path, 8, engine=engine, **few, **ORDER) as reader:
                loop = iter(reader)
                next(loop)
                with fs.armed(f"{fault}=once"), pytest.raises(OSError, match=where) as caught:
                    list(itertools.chain(loop, reader))
                # If all of the epoch was read ahead, the next one's look at the files is refused.
                assert isinstance(caught.value, ReadError) == bool(
                    re.match(text, str(caught.value))
                )
            with dsprep.Reader(path, 16, engine=engine, **ORDER) as reader:
                assert sum(len(batch["y"]) for batch in reader) == COUNT
    for verb in (
        lambda: dsprep.convert(path, here.base / f"never{target}"),
        lambda: dsprep.provenance(path),
        lambda: same(here.source, path),
    ):
        with fs.armed("eio=always"), pytest.raises(OSError, match=str(at)) as caught:
            verb()
        assert caught.value.errno == errno.EIO
    assert not (here.base / f"never{target}").exists()
    with fs.armed("eio=always"):
        assert "cannot be read" in str(dsprep.check(path, full=True)[0])


def times_that_move(here: Here, target: str, seconds: float) -> None:
    """What a run has written is its own, though the server moves its times when it is closed."""
    fs, at = here.mounted("times"), here.folder(f"times{target}", "times")
    with fs.armed(f"restamp={seconds}"):
        dsprep.convert(here.source, at / f"made{target}")
        report = dsprep.repack(
            here.source, at / f"grouped{target}", shuffle=3, measure=True, **GROUPS
        )
        assert report.break_even is not None, report.unmeasured
        items = {"function": _two, "workers": 2}
        written = dsprep.write(at / f"items{target}", range(40), **items)
        assert written.samples == 80, written
        again = at / f"again{target}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "_clear", _interrupt)  # it has its name by then
            with pytest.raises(KeyboardInterrupt):
                dsprep.convert(here.source, again)
        assert again.exists()
        time.sleep(min(seconds, 0.05))
        report = dsprep.convert(here.source, again)
        assert report.resumed == COUNT, report
    assert fs.counts()["restamp"]


def _two(item: int) -> list[dict[str, Any]]:
    return [{"x": np.full(2000, item), "y": k} for k in range(2)]


def _interrupt(*_: object) -> bool:
    raise KeyboardInterrupt


def replaced_while_read(here: Here, kind: str) -> None:
    """What a reader holds open stays, under another name; a run that replaces it says where."""
    fs, at = here.mounted(""), here.folder(f"held{kind}")
    with fs.armed(f"silly={kind}"):
        made = at / "made.zarr"
        few = {"samples": "0:9", "overwrite": True}
        dsprep.convert(here.source, made, **few)
        held = [path.open("rb") for path in made.rglob("*") if path.is_file()]
        try:
            for _ in range(2):
                notes = dsprep.convert(here.source, made, **few).notes
                assert [n for n in notes if "still open" in n and str(at / ".made.zarr") in n]
        finally:
            for file in held:
                file.close()
        assert not dsprep.convert(here.source, made, overwrite=True).notes
        assert [p.name for p in sorted(at.iterdir())] == ["made.zarr", "made.zarr.dsprep.json"]
        same(here.source, made)


def directories_that_hide_files(here: Here) -> None:
    """A directory that readdir shows empty and rmdir does not is left, with a note."""
    fs, at = here.mounted(""), here.folder("hiding")
    made, root = at / "made.h5", at / ".made.h5.dsprep-partial"
    calls: list[Callable[[], Any]] = [
        lambda: dsprep.convert(here.source, made, overwrite=True, shard_size=10),
        lambda: dsprep.write(made, range(9), function=_two, overwrite=True, resume=True),
    ]
    with fs.armed("unseen"), pytest.MonkeyPatch.context() as quick:
        quick.setattr(trees, "SOON", 0.05)
        for call, inside in zip(
            calls * 2, ("apart-1/2-3", "items/run-1", "data", "x/y"), strict=True
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Staging, "publish", _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    call()
            (root / inside).mkdir(parents=True, exist_ok=True)
            (root / inside / "unseen-7").touch()
            for _ in range(2):
                assert [note for note in call().notes if str(root) in note]
            shutil.rmtree(fs.backing / "hiding" / root.name)
    assert not calls[0]().notes


def interrupt_what_hangs(fs: Mounted, before: int, left: threading.Event) -> None:
    """Send this process an interrupt when one more read hangs than before.

    Until it has left: one that comes just before a thread begins to wait does not wake it.
    """
    while fs.counts().get("hang", 0) == before and not left.wait(0.01):
        pass
    while not left.is_set():
        os.kill(os.getpid(), signal.SIGINT)
        left.wait(5)


def interrupted_reader(here: Here) -> None:
    """A loop whose read hangs is left by an interrupt."""
    fs, at = here.mounted("past-the-cache"), here.folder("hang", "past-the-cache")
    path = at / "grouped.h5"
    dsprep.repack(here.source, path, **GROUPS)
    with dsprep.Reader(path, 16, **ORDER) as reader:
        loop = iter(reader)
        next(loop)
        before = fs.counts().get("hang", 0)
        with fs.armed("hang=3600:8192"):
            left = threading.Event()
            asked = {"target": interrupt_what_hangs, "args": (fs, before, left), "daemon": True}
            interrupting = threading.Thread(**asked)

            def batches():
                try:  # the interrupt may come at once
                    interrupting.start()
                    # All of the first loop may have been read ahead: then the next one is left.
                    yield from itertools.chain(loop, reader, reader)
                finally:
                    left.set()

            with pytest.raises(KeyboardInterrupt), reader:
                list(batches())
    with dsprep.Reader(path, 16, **ORDER) as reader:
        assert sum(len(batch["y"]) for batch in reader) == COUNT


def interrupted_command(here: Here) -> None:
    """A command whose read hangs says what it waits for, and a second interrupt leaves."""
    fs, at = here.mounted("past-the-cache"), here.folder("hang-command", "past-the-cache")
    source = Path(shutil.copy(here.source, at / "source.h5"))
    dsprep.provenance(source)
    words = [sys.executable, "-m", "dsprep", "convert", str(source), str(here.base / "hung.h5")]
    with fs.without("short"), fs.armed("hang=3600:65536"):
        before = fs.counts().get("hang", 0)
        running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        while fs.counts().get("hang", 0) == before:  # it is not reading yet
            time.sleep(0.05)
        assert running.stderr is not None
        for text in ("waiting for reads", "left at once"):
            running.send_signal(signal.SIGINT)
            assert any(text in line for line in running.stderr)
    assert running.wait() == 130  # the kernel keeps it until the server has answered
    running.stderr.close()
    assert not (here.base / "hung.h5").exists()


def cached(here: Here, mode: str, fault: str) -> None:
    """A cache on it changes no sample; where it cannot be used, or fails, one note says so."""
    fs, at = here.mounted(mode), here.folder(f"cache-{fault}", mode)
    path = here.base / f"cached-{mode}{fault}.h5"
    dsprep.repack(here.source, path, **GROUPS)
    cache = {"cache": dsprep.Cache(at, bandwidth="400kB/s")}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with (
            dsprep.Reader(path, 8, **ORDER) as plain,
            dsprep.Reader(path, 8, buffers=2, io_threads=1, **cache, **ORDER) as reader,
        ):
            loop = iter(reader)
            found = [_bytes(next(loop))]
            with fs.armed(fault) if fault else contextlib.nullcontext():
                found += [_bytes(batch) for batch in itertools.chain(loop, reader)]
                assert found == [_bytes(batch) for batch in itertools.chain(plain, plain)]
            units = reader.stats[1].cache_units
    notes = [w for w in said if w.category is CacheWarning]
    works = mode != "calls-missing" and not fault
    texts = [str(w.message) for w in notes]
    assert (units == 12, len(notes)) == (works, 0 if works else 1), (units, texts)


def staged_by_two(here: Here) -> None:
    """Nodes that stage to one directory copy once, though each keeps pages that it has read."""
    path = here.base / "staged.h5"
    dsprep.repack(here.source, path, **GROUPS)
    backing, nodes = here.mounted("").backing, [here.base / "node1", here.base / "node2"]
    found: dict[Path, Outcome] = {}

    def stage(node: Path) -> None:
        report = dsprep.stage(path, 2, 8, node / "tier", ranks_per_node=1, bandwidth="100kB/s")
        assert report.outcome is not None
        found[node] = report.outcome

    with contextlib.ExitStack() as stack:
        for node in nodes:
            node.mkdir()
            stack.enter_context(Mounted(backing, node, "stale"))
        threads = [threading.Thread(target=stage, args=(node,)) for node in nodes]
        threads[0].start()
        while not list(backing.glob("tier/[!.]*/0*")):  # it copies
            time.sleep(0.01)
        threads[1].start()
        for thread in threads:
            thread.join()
    copied = sorted((each.copied, each.there) for each in found.values())
    assert copied == [(0, copied[1][0]), (copied[1][0], 0)], copied


def serve(base: Path) -> None:
    """Run what stdin asks for, one JSON list in a line, and answer each with a traceback."""
    die_with_parent = 1
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    os.environ["XDG_CACHE_HOME"] = str(base / "cache")
    shuffle._choose = lambda *_: "buckets"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    here = Here(base)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        text = ""
        try:
            globals()[name](here, *arguments)
        except BaseException:
            text = traceback.format_exc()
        print(json.dumps(text), file=answers, flush=True)
    here.close()


# --- in the process of the tests ---------------------------------------------------------------


def private(at: Path) -> list[str]:
    """Return how a command gets mounts of its own; skip where it cannot mount FUSE."""
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no /dev/fuse")
    if shutil.which("unshare") is None:
        pytest.skip("there is no program unshare (util-linux)")
    why = ""
    for words in (["unshare", "-m"], ["unshare", "-Urm"]):
        server = [sys.executable, faultfs.__file__, str(at), str(at), "--until-eof"]
        probe: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run([*words, *server], **probe)
        if done.stdout.startswith("ready"):
            return words
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it is refused"
    pytest.skip(f"a FUSE file system cannot be mounted here: {why}")


class Worker:
    """The process that has mounts of its own, or another one after one that hung."""

    def __init__(self, base: Path) -> None:
        self.base, self.count, self.private = base, 0, private(base)
        self.process: Any = None

    def begin(self) -> None:
        """Start a process, with a directory of its own."""
        if self.process is not None:
            self.close()
        self.count += 1
        base = self.base / str(self.count)
        base.mkdir()
        words = [*self.private, sys.executable, __file__, str(base)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, **pipes, text=True, start_new_session=True)

    def __call__(self, name: str, *arguments: str | float) -> None:
        if self.process is None or self.process.poll() is not None:
            self.begin()
        timer = threading.Timer(SECONDS, self.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            text = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not text:
            self.kill()
            self.process.wait(60)
        if text != '""\n':
            pytest.fail(json.loads(text) if text else "it hung, or died", pytrace=False)

    def kill(self) -> None:
        """End it with its file systems, so that nothing can hang in them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("mode", "target"),
    [
        *(("calls-missing", each) for each in (".h5", ".lmdb")),
        ("past-the-cache", ".zarr"),
        ("odd-attributes", ".tfrecord"),
    ],
)
def test_every_verb_gives_the_same(worker, mode, target):
    worker("verbs", mode, target)


@pytest.mark.parametrize("target", [".h5", ".zarr"])
def test_what_cannot_be_written_is_not_published(worker, target):
    worker("failing_writes", target)


@pytest.mark.parametrize("target", [".h5", ".zarr.zip"])
def test_what_cannot_be_read_is_named(worker, target):
    worker("failing_reads", target)


@pytest.mark.parametrize(("target", "seconds"), [(".h5", 0.003), (".lmdb", 0.03), (".zarr", 0.1)])
def test_times_of_what_was_written_may_move(worker, target, seconds):
    worker("times_that_move", target, seconds)


@pytest.mark.parametrize("kind", [".nfs", ".fuse_hidden"])
def test_files_that_are_read_while_they_are_replaced(worker, kind):
    worker("replaced_while_read", kind)


def test_directories_that_do_not_show_what_they_have(worker):
    worker("directories_that_hide_files")


def test_an_interrupt_leaves_a_loop_whose_read_hangs(worker):
    worker("interrupted_reader")


def test_an_interrupt_leaves_a_command_whose_read_hangs(worker):
    worker("interrupted_command")


@pytest.mark.parametrize(
    ("mode", "fault"),
    [*((mode, "") for mode in MODES), ("", "eio=always"), ("", "enospc=9000"), ("", "eio-fsync")],
)
def test_a_cache_changes_nothing(worker, mode, fault):
    worker("cached", mode, fault)


def test_two_nodes_stage_once(worker):
    worker("staged_by_two")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
