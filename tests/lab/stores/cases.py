"""What dsprep does with an object store, case by case, compared with the same on a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dsprep

SAMPLES = 2000
LIMIT = 240
"""Seconds for a command."""
KILLS = 14

READ = """
import hashlib, sys
import numpy as np
import dsprep
from dsprep.storage.objects.requests import counters

def digest(**options):
    found, count, before = hashlib.sha256(), 0, counters["requests"]
    with dsprep.Reader(sys.argv[1], 32, seed=1, epochs=2, **options) as reader:
        for _ in range(2):
            for batch in reader:
                found.update(np.ascontiguousarray(batch["x"]).tobytes())
                found.update(np.ascontiguousarray(batch["y"]).tobytes())
                count += len(batch["y"])
    return found.hexdigest(), count, counters["requests"] - before

plain, filled, kept = digest(), digest(cache=sys.argv[2]), digest(cache=sys.argv[2])
assert plain[:2] == filled[:2] == kept[:2], (plain, filled, kept)
assert plain[1] == int(sys.argv[3]) * 2
assert kept[2] <= 2, kept
"""

WRITE = """
import sys
import numpy as np
import dsprep

def make(i):
    return {"x": np.full(500, i, "<f4")}

if __name__ == "__main__":
    dsprep.write(sys.argv[1], range(300), function=make, executor="processes", workers=2)
    with dsprep.open(sys.argv[1]) as source:
        assert (source[:]["x"][:, 0] == np.arange(300)).all()
"""


class WrongError(Exception):
    """What a case did in place of what it should."""


class Suite:
    """The cases on the store at `base`, with files in `folder`.

    `cases` yields the name of each and a function that raises if it fails.
    """

    def __init__(self, base: str, env: dict[str, str], folder: Path) -> None:
        import numpy as np

        self.base, self.folder, self.source = base, folder, folder / "source.h5"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.env = {**os.environ, **env, "TMPDIR": str(self.temporary)}
        samples = ({"x": np.full(4000, i, "<f4"), "y": i} for i in range(SAMPLES))
        dsprep.write(self.source, samples, length=SAMPLES)

    def url(self, name: str) -> str:
        """Return the URL of a name in the bucket."""
        return f"{self.base}/{name}"

    def python(self, *words: object, code: int = 0) -> str:
        """Run Python in the folder; return what it prints."""
        line = [sys.executable, *map(str, words)]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=LIMIT, cwd=self.folder, env=self.env
        )
        if done.returncode != code or "Traceback" in done.stderr:
            said = " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
            raise WrongError(f"status {done.returncode}: {said[:500]}")
        return done.stdout + done.stderr

    def dsprep(self, *words: object, code: int = 0) -> str:
        """Run a command of dsprep."""
        return self.python("-m", "dsprep", *words, code=code)

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        """Start a command of dsprep that may be killed."""
        line, quiet = [sys.executable, "-m", "dsprep", *map(str, words)], subprocess.DEVNULL
        return subprocess.Popen(line, stdout=quiet, stderr=quiet, cwd=self.folder, env=self.env)

    def cases(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield names and functions, in the order in which they build on each other."""
        url, source, folder = self.url, self.source, self.folder
        shuffled = ("--to", "hdf5", "--shuffle", 3, "-b", "1MiB")

        def command(name: str, *words: object, code: int = 0) -> tuple[str, Callable[[], object]]:
            return name, lambda: self.dsprep(*words, code=code)

        def cut(count: int, to: str = "hdf5") -> tuple[object, ...]:
            return "--to", to, "--shard-size", count

        yield command("convert to HDF5 shards", "convert", source, url("c"), *cut(500))
        yield command("inspect", "inspect", url("c"))
        yield command("provenance --check --full", "provenance", url("c"), "--check", "--full")
        yield command("verify HDF5", "verify", source, url("c"))
        for suffix in ("zarr", "lmdb"):
            yield command(f"convert to {suffix}", "convert", source, url(f"c.{suffix}"))
            yield command(f"verify {suffix}", "verify", source, url(f"c.{suffix}"))
        yield command(
            "convert to TFRecord shards", "convert", source, url("t"), *cut(400, "tfrecord")
        )
        yield command("verify TFRecord", "verify", source, url("t"))
        groups = *shuffled, "--shard-size", 600
        yield command("repack, store to store, shuffled", "repack", url("c"), url("g"), *groups)
        yield command("the same on the disk", "repack", source, folder / "g", *groups)
        yield command("verify the two", "verify", url("g"), folder / "g")
        yield command("one object in parts", "convert", source, url("one.h5"))
        yield command("verify it", "verify", source, url("one.h5"))
        yield command("it exists: refused", "convert", source, url("one.h5"), code=1)
        yield command("--overwrite", "convert", source, url("one.h5"), "--overwrite")
        again = "convert", source, url("c"), *cut(700), "--overwrite"
        yield command("--overwrite of shards", *again)
        yield command("verify it", "verify", source, url("c"))
        yield command("a glob", "inspect", url("t/*.tfrecord"))
        out = "--out", url("t2.dsprep.json")
        yield command("provenance of a glob", "provenance", url("t/*.tfrecord"), *out)
        yield command("audit", "audit", url("g"), "--ranks", 4, "--batch-size", 16)
        reading = "-M", 32, "--compute", "1ms", "-s", "dsprep", "--warm"
        yield command("bench read", "bench", "read", url("g"), *reading)
        yield command("nothing there", "inspect", url("nothing"), code=1)
        words = url("g"), folder / "cache", SAMPLES
        yield "Reader, without and with a cache", lambda: self.python("-c", READ, *words)
        ranks = "-P", 2, "--ranks-per-node", 2, "-M", 32, "-E", 1
        yield command("stage", "stage", url("g"), *ranks, "--to", folder / "tier")
        yield f"repack, killed up to {KILLS} times", self.kill_and_continue
        yield "verify with the disk", self.compare_killed
        yield "killed, TMPDIR lost, repeated", self.lose_temporary
        yield command("verify it", "verify", source, url("km.h5"))
        yield "dsprep.write(function=)", self.write_items

    def kill_and_continue(self) -> None:
        """Kill a run ever later; between two, what is there must not open."""
        words = "--to", "hdf5", "-b", "1MiB", "--shard-size", 100
        line = "repack", self.source, self.url("k"), *words, "--shuffle", 3
        delay, kills = 0.9, 0
        for _ in range(KILLS):
            child = self.start(*line)
            try:
                child.wait(delay)
                break
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            kills += 1
            try:
                self.dsprep("inspect", self.url("k"), code=1)
            except WrongError:  # it was complete, or `compare_killed` says that it was not
                break
            delay *= 1.12
        else:
            self.dsprep(*line)
        self.dsprep("repack", self.source, self.folder / "k", *words, "--shuffle", 3)
        print(f"({kills} kills)", end="  ")

    def compare_killed(self) -> None:
        """Compare what came of it."""
        self.dsprep("verify", self.folder / "k", self.url("k"))

    def lose_temporary(self) -> None:
        """Kill an upload in parts, lose its files, and repeat it."""
        child = self.start("convert", self.source, self.url("km.h5"))
        time.sleep(1.5)
        child.kill()
        child.wait()
        shutil.rmtree(self.temporary)
        self.temporary.mkdir()
        try:
            self.dsprep("convert", self.source, self.url("km.h5"))
        except WrongError as error:
            if "exists already" not in str(error):  # it was done before
                raise

    def write_items(self) -> None:
        """Write what a function makes, by processes."""
        script = self.folder / "write.py"
        script.write_text(WRITE)
        self.python(script, self.url("w.h5"))
