"""How fast whole commands are: convert and repack against `cp`, provenance against a full scan.

    python examples/throughput.py                                    # a quick look at 32 MB
    python examples/throughput.py --gigabytes 1.2 --runs 5 --source hdf5 tfrecord
    python examples/throughput.py train.h5 --to lmdb --cold --sync   # your own data

Without DATA random samples are made, in the formats of `--source`. Each command and each copy is a
process of its own; they take turns, each turn begins with another one, and what was written is
removed after each. Start-up (the interpreter and the imports) is measured
apart: a ratio is the rate as a share of what `cp --reflink=never` of the same files reaches (of
a scan by the format's library for `provenance`), run by run, of the whole process and without its
start-up. Data are in the page cache, or with `--cold` dropped from it before each run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

import dsprep

SUFFIXES = {"hdf5": ".h5", "lmdb": ".lmdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}
LIBRARIES = {"hdf5": "h5py", "lmdb": "lmdb", "tfrecord": "google_crc32c", "zarr": "zarr"}
VERBS = ("convert", "provenance", "repack")
SLAB = 8 << 20

CHILD = """
import runpy, sys, time
from importlib import import_module
for name in ("dsprep.cli", *sys.argv[1].split(",")):
    import_module(name)
began = time.perf_counter()
sys.argv = ["dsprep", *sys.argv[2:]]
try:
    if len(sys.argv) > 1:
        runpy.run_module("dsprep", run_name="__main__")
finally:
    print(time.perf_counter() - began)
"""


@dataclass
class Run:
    """What a process took; `work` without its start-up, `device` bytes that were fetched for it."""

    seconds: float
    work: float
    device: int
    cpu: float


@dataclass
class Way:
    """A command, given the folder to write into, and its runs; `base` is what it is compared to."""

    name: str
    command: Callable[[Path], list[str]]
    base: str = "cp"
    runs: list[Run] = field(default_factory=list)


def make(path: Path, sample_nbytes: int, total_nbytes: int) -> None:
    """Write random samples of float32 with a label each."""
    count = max(2, total_nbytes // sample_nbytes)
    values = np.random.default_rng(0).random(sample_nbytes // 4, dtype="f4")
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (count, len(values)), "f4")
        file["y"] = np.arange(count)
        for i in range(count):
            x[i] = np.roll(values, i)


# --- full scans, by the library of each format ------------------------------------------------


def scan_arrays(found) -> int:
    """Read arrays in slabs of whole chunks; return their bytes."""
    done = 0
    for array in found:
        rows = array.shape[0] if array.shape else 0
        unit = array.chunks[0] if rows and array.chunks else 1
        row = array.dtype.itemsize * int(array.size) // max(1, rows)
        step = max(1, SLAB // max(1, row * unit)) * unit
        for at in range(0, rows, step):
            done += array[at : at + step].nbytes
    return done


def scan(path: Path, format: str) -> int:
    """Read all values of a file; return their bytes."""
    if format == "hdf5":
        with h5py.File(path) as file:
            items = []
            file.visititems(lambda _, item: items.append(item))
            return scan_arrays(item for item in items if isinstance(item, h5py.Dataset))
    elif format == "zarr":
        import zarr

        items = zarr.open_group(path, mode="r").members(max_depth=None)
        return scan_arrays(item for _, item in items if isinstance(item, zarr.Array))
    elif format == "lmdb":
        import lmdb

        with (
            lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as env,
            env.begin() as transaction,
        ):
            return sum(len(value) for _, value in transaction.cursor())
    with path.open("rb", buffering=1 << 20) as file:  # length, CRC of it, value, CRC of that
        done = 0
        while len(head := file.read(12)) == 12:
            done += len(file.read(int.from_bytes(head[:8], "little") + 4)) - 4
        return done


# --- running ------------------------------------------------------------------------------------


def run(command: Sequence[str], synced: Path | None) -> Run:
    """Run a command; `synced` is on the disk when the time is taken."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        printed = process.stdout.read().split()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"throughput: {' '.join(command[-6:])} ended with {process.returncode}")
    waited = time.perf_counter()
    if synced is not None:
        for path in filter(Path.is_file, synced.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
    ended = time.perf_counter()
    work = (float(printed[-1]) if printed else waited - began) + ended - waited
    return Run(ended - began, work, used.ru_inblock * 512, used.ru_utime + used.ru_stime)


def settle(files: Sequence[Path], cold: bool) -> None:
    """Drop files from the page cache, or read them into it."""
    for path in files:
        with path.open("rb") as file:
            if cold:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(SLAB):
                    pass


def in_turn(ways: Sequence[Way], files: Sequence[Path], options, folder: Path) -> None:
    """Run all ways `options.runs` times; what they write is removed after each."""
    compileall.compile_dir(Path(dsprep.__file__).parent, quiet=2)  # as installing does
    run(child(LIBRARIES.values()), None)  # now the page cache has the programs
    for turn in range(options.runs):
        at = turn % len(ways)
        for way in [*ways[at:], *ways[:at]]:
            settle(files, options.cold)
            out = Path(tempfile.mkdtemp(dir=folder))
            way.runs.append(run(way.command(out), out if options.sync else None))
            shutil.rmtree(out)


def child(modules: Iterable[str], *words: object) -> list[str]:
    """Return the command that imports modules and then runs dsprep, and prints what that took."""
    return [sys.executable, "-c", CHILD, ",".join(modules), *map(str, words)]


def ways_of(data: Path, format: str, options) -> list[Way]:
    """Return what is measured of a dataset: `cp` first, a scan before provenance."""
    sync = "--sync" if options.sync else "--no-sync"
    more = {"repack": ("--no-measure", "--buffer-size", options.buffer_size)}
    library = LIBRARIES[format]

    def writing(verb: str, to: str) -> Way:
        words = (verb, "-q", "--to", to, sync, *more.get(verb, ()), data)
        modules = (f"dsprep.verbs.{verb}", library, LIBRARIES[to])
        return Way(f"{verb} {to}", lambda out: child(modules, *words, out / f"out{SUFFIXES[to]}"))

    ways = [Way("cp", lambda out: ["cp", "-r", "--reflink=never", str(data), str(out)])]
    ways += [writing(v, to) for v in options.verb if v != "provenance" for to in options.to]
    if "provenance" in options.verb:
        scanning = [sys.executable, __file__, "--scan", format, str(data)]
        ways.append(Way("scan", lambda out: scanning, "scan"))
        words = ("provenance", "-q", data, "--out")
        modules = ("dsprep.verbs.provenance", library)
        made = Way(
            "provenance", lambda out: child(modules, *words, out / "out.dsprep.json"), "scan"
        )
        ways.append(made)
    return ways


def measure(data: Path, options, folder: Path) -> None:
    """Measure one dataset, and print a line for each way."""
    with dsprep.open(data) as source:
        count, sample = len(source), source[0:1]
        each = sum(column.nbytes for column in sample.values() if hasattr(column, "nbytes"))
    format = next((n for n, s in SUFFIXES.items() if data.name.endswith(s)), "hdf5")
    files = [data] if data.is_file() else [p for p in data.rglob("*") if p.is_file()]
    ways = ways_of(data, format, options)
    in_turn(ways, files, options, folder)
    print(f"{data.name}: {count:,} samples of {each / 1e3:.1f} kB, {format}")
    heads = ("seconds", "start-up", "ratio", "without it", "device MB", "CPU s")
    print(f"{'':<18}{''.join(f'{h:>11}' for h in heads)}")
    for way in ways:
        base = next(w for w in ways if w.name == way.base).runs
        net = [a.work / b.work for a, b in zip(base, way.runs, strict=True)]
        columns = (
            [r.seconds for r in way.runs],
            [r.seconds - r.work for r in way.runs],
            [a.seconds / b.seconds for a, b in zip(base, way.runs, strict=True)],
            net,
            [r.device / 1e6 for r in way.runs],
            [r.cpu for r in way.runs],
        )
        numbers = "".join(f"{statistics.median(c):>11.2f}" for c in columns)
        print(f"{way.name:<18}{numbers}   ({min(net):.2f} to {max(net):.2f} of {way.base})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="*", type=Path, help="datasets; else samples are made")
    parser.add_argument("--gigabytes", type=float, default=0.032, help="size of what is made")
    parser.add_argument("--sample-kb", type=float, nargs="+", default=[19.2], help="its samples")
    parser.add_argument("--source", nargs="+", choices=SUFFIXES, default=["hdf5"])
    parser.add_argument("--verb", nargs="+", choices=VERBS, default=VERBS[:2])
    parser.add_argument("--to", nargs="+", choices=SUFFIXES, default=list(SUFFIXES))
    parser.add_argument("--buffer-size", default="auto", help="of repack")
    parser.add_argument("--runs", type=int, default=1, help="runs of each")
    parser.add_argument("--cold", action="store_true", help="drop the data from the page cache")
    parser.add_argument("--sync", action="store_true", help="all wait for the disk, cp too")
    parser.add_argument("--directory", type=Path, help="where to work; a temporary one if absent")
    parser.add_argument("--scan", nargs=2, help=argparse.SUPPRESS)  # FORMAT FILE: a run's process
    options = parser.parse_args()
    if options.scan:
        began = time.perf_counter()
        scan(Path(options.scan[1]), options.scan[0])
        print(time.perf_counter() - began)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        for data in options.data:
            measure(data.absolute(), options, folder)
        for kilobytes in () if options.data else options.sample_kb:
            plain = folder / "samples.h5"
            make(plain, round(1e3 * kilobytes), int(options.gigabytes * 1e9))
            for format in options.source:
                data = folder / f"made{SUFFIXES[format]}"
                dsprep.convert(plain, data, overwrite=True)
                measure(data, options, folder)


if __name__ == "__main__":
    main()
