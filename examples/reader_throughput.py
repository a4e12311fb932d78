"""How near the reader comes to plain ``preadv`` of the same bytes, in one run.

Makes a dataset of ``x`` (float32[n, 3]) and ``y`` (float32[19]), repacks it, and reads it again and
again: by `dsprep.Reader` (groups and samples shuffled, batches of fixed size, a rank alone), and by
plain ``preadv`` of the same groups in the same order into two buffers of the same kind of memory.
The runs alternate; printed is the median of the ratios, and the fastest runs.
(Rows of x that are no multiple of 64 bytes are copied more slowly, by other readers too.)

    python examples/reader_throughput.py --gigabytes 1 --runs 7 --sample 3072 19200 --group 8MiB

The Reader gets its default arguments unless --threads or --engine is given, and plain ``preadv`` as
many threads as there are cores, or --threads. With --directory the dataset is copied to that mount,
and read there. Cold means that the files are dropped from this machine's page cache before each
run; what a file server has in its own stays there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

import dsprep
from dsprep.reader.memory import Pool


def make(folder: Path, gigabytes: float, sample: int, group: str, to: str) -> Path:
    """Write the dataset and return its repacked form."""
    import h5py

    shape = (max(1, sample // 12), 3)
    count = max(4, int(gigabytes * 1e9 / (shape[0] * 12 + 76)))
    source = folder / "source.h5"
    rng = np.random.default_rng(0)
    with h5py.File(source, "w") as file:
        x = file.create_dataset("x", (count, *shape), "f4")
        step = max(1, (64 << 20) // sample)
        for i in range(0, count, step):
            n = min(step, count - i)
            x[i : i + n] = rng.random((n, *shape), np.float32)
        file["y"] = rng.random((count, 19), np.float32)
    out = (
        folder
        / {
            "hdf5": "out.h5",
            "lmdb": "out.lmdb",
            "tfrecord": "out.tfrecord",
            "zarr": "out.zarr.zip",
        }[to]
    )
    dsprep.repack(source, out, buffer_size=group, durable=False)
    source.unlink()
    return out


def groups_of(path: Path) -> list[tuple[Path, int, int]]:
    """Return file, offset and length of every group."""
    found = []
    with dsprep.Sidecar.open(path) as sidecar:
        for number, entry in enumerate(sidecar.content.files):
            blocks = sidecar.layout(number).groups.blocks
            file = sidecar.dataset / entry.path
            file = file / blocks.path if blocks.path else file
            offsets, lengths = blocks.offsets, blocks.lengths
            found += [(file, offsets.one(i), lengths.one(i)) for i in range(blocks.count)]
    return found


def plain(groups: list[tuple[Path, int, int]], threads: int, seed: int) -> float:
    """Read all groups in random order by plain preadv; return seconds."""
    order: SimpleQueue[int] = SimpleQueue()
    for i in np.random.default_rng(seed).permutation(len(groups)).tolist():
        order.put(i)
    fds = {path: os.open(path, os.O_RDONLY) for path, _, _ in groups}
    largest = max(n for _, _, n in groups)
    pool = Pool(largest, 2 * threads)
    buffers = [[pool.take(0, lambda: False)[1] for _ in range(2)] for _ in range(threads)]
    for pair in buffers:
        for buffer in pair:
            buffer[::4096] = 0  # pages are there before the clock starts

    def work(pair: list[np.ndarray]) -> None:
        turn = 0
        while True:
            try:
                path, offset, nbytes = groups[order.get_nowait()]
            except Empty:
                return
            view, done = memoryview(pair[turn % 2]), 0
            while done < nbytes:
                done += os.preadv(fds[path], [view[done:nbytes]], offset + done)
            turn += 1

    workers = [threading.Thread(target=work, args=(pair,)) for pair in buffers]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    for fd in fds.values():
        os.close(fd)
    return seconds


def drop(path: Path) -> None:
    """Drop a dataset from the page cache."""
    os.sync()
    for file in [path] if path.is_file() else list(path.rglob("*")):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def epoch(reader: dsprep.Reader) -> float:
    """Run through an epoch; return seconds."""
    began, samples = time.perf_counter(), 0
    for batch in reader:
        samples += len(batch["y"])
    assert samples == reader.samples
    return time.perf_counter() - began


def compare(path: Path, cold: bool, options: argparse.Namespace) -> str:
    """Measure both in turn; return what was found, in a line."""
    threads = options.threads or len(os.sched_getaffinity(0))
    asked = {"io_threads": options.threads, "engine": options.engine}
    asked = {name: value for name, value in asked.items() if value is not None}
    groups = groups_of(path)
    ratios, best = [], {}
    with dsprep.Reader(path, options.batch_size, rank=0, world_size=1, **asked) as reader:
        choice, payload = reader.choice, reader.samples * reader.schema.fixed_nbytes
        for run in range(options.runs + 1):  # the first one does not count
            seconds = {}
            for which in ("plain", "Reader") if run % 2 else ("Reader", "plain"):
                if cold:
                    drop(path)
                seconds[which] = plain(groups, threads, run) if which == "plain" else epoch(reader)
            if run:
                ratios.append(seconds["plain"] / seconds["Reader"])
                best = {w: min(s, best.get(w, s)) for w, s in seconds.items()}
    return (
        f"{statistics.median(ratios):.2f} of plain preadv by {threads} "
        f"({min(ratios):.2f} to {max(ratios):.2f}; plain {payload / best['plain'] / 1e9:.2f} GB/s, "
        f"Reader {payload / best['Reader'] / 1e9:.2f} GB/s, {choice.engine} by {choice.threads}, "
        f"{choice.why})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.05)
    parser.add_argument("--sample", type=int, nargs="+", default=[19200], help="bytes of x")
    parser.add_argument("--group", nargs="+", default=["8MiB"], help="bytes or samples of a group")
    parser.add_argument("--state", nargs="+", default=["warm"], choices=["warm", "cold"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, help="of both; else as many as cores, and default")
    parser.add_argument("--engine", choices=["buffered", "direct", "mapped"])
    parser.add_argument("--to", default="hdf5", choices=["hdf5", "lmdb", "tfrecord", "zarr"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", help="on which mount to read; else where temporary files go")
    options = parser.parse_args()
    for sample, group in itertools.product(options.sample, options.group):
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            path = make(Path(name), options.gigabytes, sample, group, options.to)
            if options.directory:
                there = stack.enter_context(
                    tempfile.TemporaryDirectory(dir=options.directory, ignore_cleanup_errors=True)
                )
                path = shutil.copytree(name, Path(there) / "data") / path.name
            for state in options.state:
                words = compare(path, state == "cold", options)
                print(
                    f"{options.to}, samples of {sample} B, groups of {group}, {state}: {words}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
