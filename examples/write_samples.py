"""Write a dataset of samples that your own code makes: three generators, and what is read back.

    python examples/write_samples.py                           # on data it creates and deletes
    python examples/write_samples.py --images photos out.h5    # photos/CLASS/NAME.png or .jpg

`images` gives the encoded bytes of PNG and JPEG files as they are, with the number of their class;
`unpickled` gives the dicts that somebody pickled into an LMDB, by code of yours that trusts them:
dsprep itself never unpickles; `simulated` gives the steps of a simulation while it runs. Whatever
gives dicts can be written. The result is grouped, has a sidecar, and appears when it is complete.
"""

from __future__ import annotations

import argparse
import pickle
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

import dsprep

Sample = dict[str, Any]
SUFFIXES = (".png", ".jpg", ".jpeg")


def images(folder: Path) -> Iterator[Sample]:
    """Yield a sample for each image: its bytes, its class and its name."""
    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    for label, directory in enumerate(classes):
        for path in sorted(p for p in directory.iterdir() if p.suffix.lower() in SUFFIXES):
            yield {"image": path.read_bytes(), "label": label, "name": path.stem}


def unpickled(path: Path) -> Iterator[Sample]:
    """Yield the dicts of an LMDB that you trust: to unpickle is to run what it says."""
    environment = lmdb.open(str(path), readonly=True, lock=False)
    with environment, environment.begin() as transaction:
        for _, value in transaction.cursor():
            yield pickle.loads(value)


def simulated(steps: int, size: int = 64) -> Iterator[Sample]:
    """Yield the steps of heat that spreads; the array is changed in place from step to step."""
    heat = np.zeros((size, size), np.float32)
    heat[size // 2, size // 2] = 1000
    for step in range(steps):
        heat[1:-1, 1:-1] += 0.2 * (
            heat[:-2, 1:-1]
            + heat[2:, 1:-1]
            + heat[1:-1, :-2]
            + heat[1:-1, 2:]
            - 4 * heat[1:-1, 1:-1]
        )
        hottest = np.argwhere(heat > heat.max() / 2)  # as many rows as there are such points
        yield {"heat": heat, "hottest": hottest, "step": step}


def png(pixels: np.ndarray) -> bytes:
    """Return a grey image as PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def make_images(folder: Path) -> None:
    """Make a few images of two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(20):
            data = png(rng.integers(0, 256, (28, 28), np.uint8))
            (folder / name / f"{name}{i:03}.png").write_bytes(data)


def make_pickles(path: Path) -> None:
    """Make an LMDB of pickled graphs, as OC20 and many others are."""
    rng = np.random.default_rng(0)
    environment = lmdb.open(str(path), map_size=1 << 24)
    with environment, environment.begin(write=True) as transaction:
        for i in range(30):
            atoms = int(rng.integers(3, 9))
            graph = {"pos": rng.random((atoms, 3), np.float32), "energy": float(i)}
            transaction.put(f"{i:08}".encode(), pickle.dumps(graph))


def show(target: Path) -> None:
    """Print what is in a dataset, and read batches of it as training does."""
    with dsprep.open(target) as source:
        print(f"{target.name}: {len(source)} samples of {source.schema}")
    with dsprep.Reader(target, batch_size=16) as reader:
        print("  batches of", [len(next(iter(batch.values()))) for batch in reader])


def main() -> None:
    """Write the images that are named, or all three on data made here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="a folder of folders, one for each class")
    parser.add_argument("target", nargs="?", type=Path, default=Path("images.h5"))
    arguments = parser.parse_args()
    if arguments.images is not None:
        report = dsprep.write(arguments.target, images(arguments.images), shuffle=1)
        print(f"{report.samples:,} samples in {report.target}")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "photos")
        # In the folder one class comes after the other: the shuffle mixes them for good.
        dsprep.write(folder / "images.h5", images(folder / "photos"), shuffle=1)
        show(folder / "images.h5")

        make_pickles(folder / "graphs.lmdb")
        # One sample does not show that the number of atoms varies: it has to be declared.
        schema = {"pos": "float32[None,3]"}
        dsprep.write(folder / "graphs.zarr", unpickled(folder / "graphs.lmdb"), schema=schema)
        show(folder / "graphs.zarr")

        schema = {"hottest": "int64[None,2]"}
        dsprep.write(folder / "heat.tfrecord", simulated(100), schema=schema, buffer_size=25)
        show(folder / "heat.tfrecord")


if __name__ == "__main__":
    main()
