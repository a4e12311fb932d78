"""What datasets of very many small files cost: ``python tests/lab/million.py DIR N [N ...]``.

For each N it makes that many ``.npy`` files of one sample in DIR, 1,000 in a directory, does what
people do with them, each in a process of its own, prints seconds, seconds of all its processors
and MB of the largest of its processes, and removes them. ``--executor processes`` and the like go
to the commands that find the samples; ``--keep`` leaves the files, and a later run takes them.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PER_DIRECTORY = 1000

OPENED = """
import os, resource, sys, time
import numpy, dsprep
from dsprep.sidecar.sidecar import Sidecar
def used():
    with open("/proc/self/smaps_rollup") as file:
        sizes = dict(line.split()[:2] for line in file if line.endswith("kB\\n"))
    return [int(sizes[name]) / 1e3 for name in ("Rss:", "Anonymous:")]
known = set(sys.modules)
Sidecar.open(sys.argv[2]).close()
rss, own = used()
before = time.perf_counter()
opened = Sidecar.open(sys.argv[1])
seconds = time.perf_counter() - before
more, private = used()
opened.read([0, len(opened) // 2, -1])
print(f"{seconds:.3f} s, {more - rss:.1f} MB more, {private - own:.1f} of them not shared")
"""
"""Opens a sidecar of few files first, so that modules do not count."""

BATCH = """
import sys
import dsprep
with dsprep.Reader(sys.argv[1], 32) as reader:
    next(iter(reader))
"""


def make(folder: Path, count: int) -> None:
    """Make `count` files, each a vector of 32 numbers."""
    head = io.BytesIO()
    np.save(head, np.zeros(32, "f4"))
    values = np.arange(32, dtype="f4")
    for i in range(count):
        if i % PER_DIRECTORY == 0:
            below = folder / f"{i // PER_DIRECTORY:04}"
            below.mkdir(parents=True)
        with (below / f"{i:07}.npy").open("wb", buffering=0) as file:
            file.write(head.getvalue()[:-128] + (values + np.float32(i)).tobytes())


def run(name: str, *words: object, python: str | None = None) -> None:
    """Run a command, or a program, and print what it took."""
    how = ("-c", python) if python else ("-m", "dsprep")
    before = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *how, *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - before
    text = f"{usage.ru_utime + usage.ru_stime:8.1f} {usage.ru_maxrss / 1e3:8.0f}"
    print(f"{name:36}{seconds:8.1f} {text}  {said[-1] if python and said else ''}", flush=True)
    if process.returncode:
        raise SystemExit(f"{name}: {process.returncode}")


def main() -> None:
    """Make, try and remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("counts", type=int, nargs="+")
    parser.add_argument("--executor", default="processes")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    few = given.directory / "few" / "0000"
    if not few.exists():
        make(few.parent, 10)
    found = ("--executor", given.executor, "--workers", given.workers)
    axis = ("--sample-axis", "none")
    subprocess.run([sys.executable, "-m", "dsprep", "provenance", few, *axis], check=True)
    for count in given.counts:
        data = given.directory / f"files-{count}"
        if not data.exists():
            make(data, count)
        print(f"{count:,} files{'':24} seconds      cpu       MB")
        beside = [data.with_name(f"{data.name}.dsprep.{kind}") for kind in ("json", "bin")]
        if not beside[0].exists():
            run("inspect without a sidecar", "inspect", data, *axis)
            run("provenance", "provenance", data, *axis, *found)
        sizes = ", ".join(f"{p.stat().st_size / 1e6:.2f} MB" for p in beside if p.exists())
        print(f"the sidecar: {sizes}")
        run("the sidecar opened", data, few, python=OPENED)
        run("Reader, the first batch", data, python=BATCH)
        run("provenance again", "provenance", data, *found)
        run("inspect", "inspect", data)
        run("repack --dry-run", "repack", data, given.directory / "out.h5", "--dry-run")
        if not given.keep:
            for path in (data, *beside):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not given.keep:
        shutil.rmtree(few.parent)


if __name__ == "__main__":
    main()
