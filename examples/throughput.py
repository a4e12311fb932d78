"""How fast conversions are, as a share of what `cp` reaches with the same bytes.

    python examples/throughput.py                    # a quick look, 32 MB
    python examples/throughput.py --gigabytes 1.2    # the figures in README

Makes one HDF5 and one TFRecord file of random samples, then times, in turn, `cp` of the HDF5 file
and each conversion, and prints the median of the ratios pair by pair. Everything is in the page
cache; neither side waits for the disk (`--sync` makes both wait).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

import dsprep

SUFFIXES = {"hdf5": ".h5", "lmdb": ".lmdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}


def make(path: Path, sample_nbytes: int, total_nbytes: int) -> None:
    """Write random samples of float32 with a label each."""
    count = max(2, total_nbytes // sample_nbytes)
    values = np.random.default_rng(0).random(sample_nbytes // 4, dtype="f4")
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (count, len(values)), "f4")
        file["y"] = np.arange(count)
        for i in range(count):
            x[i] = np.roll(values, i)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seconds_of_cp(source: Path, target: Path, sync: bool) -> float:
    began = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    if sync:
        subprocess.run(["sync", target], check=True)
    seconds = time.perf_counter() - began
    remove(target)
    return seconds


def seconds_of_convert(source: Path, target: Path, sync: bool) -> float:
    began = time.perf_counter()
    dsprep.convert(source, target, durable=sync)
    seconds = time.perf_counter() - began
    remove(target)  # so that the one after it does not wait for these bytes to be written
    Path(f"{target}.dsprep.json").unlink()
    return seconds


def measure(directory: Path, sample_nbytes: int, total_nbytes: int, runs: int, sync: bool) -> None:
    plain = directory / "source.h5"
    make(plain, sample_nbytes, total_nbytes)
    records = directory / "source.tfrecord"
    dsprep.convert(plain, records, overwrite=True)
    pairs = [(plain, f) for f in SUFFIXES] + [(records, "hdf5"), (records, "lmdb")]
    for source, format in pairs:
        target = directory / f"out{SUFFIXES[format]}"
        ratios = []
        for run in range(runs + 1):
            copied = seconds_of_cp(plain, directory / "copy", sync)
            converted = seconds_of_convert(source, target, sync)
            if run:  # the first is a warm-up
                ratios.append(copied / converted)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{sample_nbytes / 1e3:>8.1f} kB  {source.suffix[1:]:>8} to {format:<8}"
            f"  {statistics.median(ratios):.2f} of cp  ({spread})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.032, help="size of each dataset")
    parser.add_argument("--runs", type=int, default=3, help="runs of each conversion")
    parser.add_argument("--sync", action="store_true", help="both wait for the disk")
    parser.add_argument("--directory", type=Path, help="where to work; a temporary one if absent")
    options = parser.parse_args()
    for sample_nbytes in (19_200, 1 << 20):
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            total = int(options.gigabytes * 1e9)
            measure(Path(scratch), sample_nbytes, total, options.runs, options.sync)


if __name__ == "__main__":
    main()
