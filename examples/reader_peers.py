"""The reader beside other loaders, on the same samples, in one run.

``x`` float32[1600, 3] and ``y`` float32[19] (19.3 kB a sample), in the page cache, shuffled,
batches of 256. Every loader that is installed runs in turn, several epochs; printed is the best
rate of each, and how many times as fast `dsprep.Reader` is. tf.data reads a TFRecord file
(shuffle, batch, one vectorised parse per batch, prefetch), torch's DataLoader an HDF5 file by
h5py sample by sample, FFCV (random order, cached by the system) and litdata their own formats.

    python examples/reader_peers.py --gigabytes 1 --runs 5 --threads 2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import dsprep

SHAPE, LABELS, BATCH = (1600, 3), 19, 256
SAMPLE = 4 * (SHAPE[0] * SHAPE[1] + LABELS)


def write_hdf5(path: Path, count: int) -> None:
    """Write random samples."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (count, *SHAPE), "f4", chunks=(1, *SHAPE))
        for i in range(0, count, 1024):
            n = min(1024, count - i)
            x[i : i + n] = rng.random((n, *SHAPE), np.float32)
        file["y"] = rng.random((count, LABELS), np.float32)


def run_dsprep(source: Path, folder: Path, threads: int) -> Callable[[], Iterable[Any]]:
    """Our reader, of groups of 8 MiB."""
    path = folder / "grouped.h5"
    dsprep.repack(source, path, buffer_size="8MiB", durable=False)
    reader = dsprep.Reader(path, BATCH, io_threads=threads, rank=0, world_size=1)
    return lambda: reader


def run_tfdata(source: Path, folder: Path, threads: int) -> Callable[[], Iterable[Any]]:
    """A tf.data pipeline over a TFRecord file."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    path = folder / "all.tfrecord"
    dsprep.convert(source, path)
    features = {
        "x": tf.io.FixedLenFeature([], tf.string),
        "y": tf.io.FixedLenFeature([LABELS], tf.float32),
    }

    def parse(records: Any) -> Any:
        found = tf.io.parse_example(records, features)
        return tf.reshape(tf.io.decode_raw(found["x"], tf.float32), (-1, *SHAPE)), found["y"]

    data = tf.data.TFRecordDataset(str(path), buffer_size=8 << 20)
    data = data.shuffle(4096).batch(BATCH, drop_remainder=False)
    data = data.map(parse, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    return lambda: data


def run_torch(source: Path, folder: Path, threads: int) -> Callable[[], Iterable[Any]]:
    """torch's DataLoader over h5py."""
    import torch

    class Samples(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.file = None
            with h5py.File(source) as file:
                self.count = len(file["y"])

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            if self.file is None:
                self.file = h5py.File(source)
            return self.file["x"][i], self.file["y"][i]

    loader = torch.utils.data.DataLoader(
        Samples(), BATCH, shuffle=True, num_workers=threads, persistent_workers=True
    )
    return lambda: loader


def run_ffcv(source: Path, folder: Path, threads: int) -> Callable[[], Iterable[Any]]:
    """FFCV, random order, data in the page cache."""
    from ffcv.fields import NDArrayField
    from ffcv.fields.decoders import NDArrayDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter

    class Samples:
        def __init__(self) -> None:
            self.file = None
            with h5py.File(source) as file:
                self.count = len(file["y"])

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            if self.file is None:
                self.file = h5py.File(source)
            return self.file["x"][i], self.file["y"][i]

    path = folder / "all.beton"
    fields = {
        "x": NDArrayField(np.dtype("f4"), SHAPE),
        "y": NDArrayField(np.dtype("f4"), (LABELS,)),
    }
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(Samples())
    loader = Loader(
        str(path),
        batch_size=BATCH,
        num_workers=threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"x": [NDArrayDecoder()], "y": [NDArrayDecoder()]},
    )
    return lambda: loader


def run_litdata(source: Path, folder: Path, threads: int) -> Callable[[], Iterable[Any]]:
    """litdata's streaming loader over its own chunks."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    out = folder / "litdata"
    out.mkdir()
    writer = BinaryWriter(str(out), chunk_bytes="64MB")
    with h5py.File(source) as file:
        for i in range(len(file["y"])):
            writer.add_item(i, {"x": file["x"][i], "y": file["y"][i]})
    writer.done()
    writer.merge(1)
    loader = StreamingDataLoader(
        StreamingDataset(str(out), shuffle=True), batch_size=BATCH, num_workers=threads
    )
    return lambda: loader


LOADERS = {
    "dsprep": ("dsprep", run_dsprep),
    "tf.data": ("tensorflow", run_tfdata),
    "torch DataLoader over h5py": ("torch", run_torch),
    "FFCV": ("ffcv", run_ffcv),
    "litdata": ("litdata", run_litdata),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.04)
    parser.add_argument("--threads", type=int, default=2, help="threads or workers of each")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="loaders to run, besides dsprep")
    parser.add_argument("--folder", help="where to write; a temporary folder")
    options = parser.parse_args()
    count = int(options.gigabytes * 1e9 / SAMPLE)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source = folder / "source.h5"
        write_hdf5(source, count)
        loaders: dict[str, Callable[[], Iterable[Any]]] = {}
        for label, (package, make) in LOADERS.items():
            if options.only and label not in ("dsprep", *options.only):
                continue
            if importlib.util.find_spec(package) is None:
                print(f"{label}: not installed")
                continue
            loaders[label] = make(source, folder, options.threads)
        best = dict.fromkeys(loaders, float("inf"))
        for _ in range(options.runs + 1):  # the first one compiles, starts workers, fills caches
            for label, batches in loaders.items():
                began = time.perf_counter()
                for batch in batches():
                    del batch
                best[label] = min(best[label], time.perf_counter() - began)
        for label, seconds in best.items():
            rate = count * SAMPLE / seconds / 1e9
            times = seconds / best["dsprep"]
            print(f"{label:28} {rate:6.2f} GB/s   dsprep is {times:.1f} times as fast")


if __name__ == "__main__":
    main()
