"""What a sidecar is worth: cold shuffled reads from LMDB, with it and with py-lmdb.

Writes a database with py-lmdb, as users do, makes its sidecar, and then reads samples with a cold
page cache in three ways:

- ``get``: one sample after another in a shuffled order, with py-lmdb;
- ``single``: the same, each computed from the sidecar and fetched by one pread;
- ``grouped``: groups of consecutive samples in a shuffled order, each group by one read, its
  samples shuffled in memory: what a training run does that shuffles groups.

Ratios of samples per second are printed; absolute times say little about another machine.

    python examples/sidecar_reads.py --megabytes 1000 --sample-kb 19.2
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import lmdb
import numpy as np

import dsprep


def build(path: Path, count: int, nbytes: int) -> None:
    """Write `count` samples of `nbytes` random bytes in key order, 1000 per transaction."""
    rng = np.random.default_rng(0)
    with lmdb.open(str(path), map_size=1 << 40, sync=False) as env:
        for start in range(0, count, 1000):
            with env.begin(write=True) as txn:
                for i in range(start, min(start + 1000, count)):
                    txn.put(f"{i:08d}".encode(), rng.bytes(nbytes), append=True)
        env.sync(True)


def drop(path: Path) -> None:
    """Drop the database from the page cache."""
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def by_get(path: Path, order: np.ndarray) -> float:
    """Return samples per second of py-lmdb, one get each."""
    with lmdb.open(str(path), readonly=True, lock=False, readahead=False) as env:
        began = time.perf_counter()
        with env.begin(buffers=True) as txn:
            for i in order.tolist():
                np.frombuffer(txn.get(b"%08d" % i), np.uint8).copy()
        return len(order) / (time.perf_counter() - began)


def by_single(path: Path, order: np.ndarray) -> float:
    """Return samples per second through the sidecar, one pread each."""
    with dsprep.Sidecar.open(path) as sidecar:
        sidecar.read(0)  # imports and opens
        began = time.perf_counter()
        for i in order.tolist():
            sidecar.read(i)
        return len(order) / (time.perf_counter() - began)


def by_groups(path: Path, count: int, group: int, rng: np.random.Generator) -> float:
    """Return samples per second through the sidecar, a group at a time."""
    with dsprep.Sidecar.open(path) as sidecar:
        sidecar.read(0)
        began = time.perf_counter()
        arena = dsprep.Arena()
        for start in rng.permutation(np.arange(0, count, group)).tolist():
            batch = sidecar.read(slice(start, min(start + group, count)), arena=arena)
            rng.permutation(len(batch["value"]))  # the order in which they are handed out
        return count / (time.perf_counter() - began)


def main() -> None:
    """Build, read, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--sample-kb", type=float, default=19.2)
    parser.add_argument("--group", type=int, default=256)
    parser.add_argument("--single", type=int, default=500, help="samples read one by one")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    nbytes = round(args.sample_kb * 1000)
    count = max(args.group, round(args.megabytes * 1e6 / nbytes))
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "set.lmdb"
        build(path, count, nbytes)
        made = dsprep.provenance(path)
        print(f"{count:,} samples of {nbytes:,} bytes; sidecar {made.nbytes:,} bytes")
        single, grouped = [], []
        for _ in range(args.runs):
            order = rng.permutation(count)[: args.single]
            drop(path)
            get = by_get(path, order)
            drop(path)
            single.append(by_single(path, order) / get)
            drop(path)
            grouped.append(by_groups(path, count, args.group, rng) / get)
        for name, ratios in (("single", single), ("grouped", grouped)):
            shown = ", ".join(f"{r:.1f}" for r in ratios)
            print(f"{name:8} {statistics.median(ratios):5.1f} x py-lmdb get  ({shown})")


if __name__ == "__main__":
    main()
