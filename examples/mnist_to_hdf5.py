"""Turn the idx files of MNIST, or of any set like it, into one HDF5 file.

    python examples/mnist_to_hdf5.py IMAGES LABELS OUT.h5

IMAGES (uint8, n x rows x columns) and LABELS (uint8, n) are idx files, plain or gzip, such as
``t10k-images-idx3-ubyte.gz``. OUT.h5 gets two datasets, ``image`` uint8 (n, rows, columns) and
``label`` uint8 (n,), which every command of dsprep reads as n samples with two fields. Without
arguments the script makes ten small pictures in a temporary directory and shows the result.

An idx file begins with two zero bytes, a byte for the dtype (8: uint8), a byte for the number of
axes, and the axes' lengths as big-endian 32-bit integers; the values follow in C order.
"""

from __future__ import annotations

import gzip
import math
import sys
import tempfile
import zlib
from pathlib import Path

import h5py
import numpy as np

GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Return the uint8 array of an idx file; ValueError if it is not one with so many axes."""
    data = path.read_bytes()
    if data.startswith(GZIP_MAGIC):
        data = gzip.decompress(data)
    magic = bytes([0, 0, 8, axes])
    header = 4 + 4 * axes
    if data[:4] != magic or len(data) < header:
        raise ValueError(f"{path}: expected an idx file that begins with {magic}, not {data[:4]}")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", axes, 4))
    if len(data) - header != math.prod(shape):
        raise ValueError(
            f"{path}: {shape} needs {math.prod(shape)} values, there are {len(data) - header}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a uint8 array as an idx file; the inverse of `read_idx`."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + array.tobytes())


def convert(images: Path, labels: Path, out: Path) -> None:
    """Write both idx files to the new HDF5 file `out`."""
    image, label = read_idx(images, 3), read_idx(labels, 1)
    if len(image) != len(label):
        raise ValueError(f"{images} has {len(image)} samples, {labels} has {len(label)}")
    with h5py.File(out, "x") as file:
        file.create_dataset("image", data=image)
        file.create_dataset("label", data=label)


def show(out: Path) -> None:
    """Print the datasets of `out` and its first picture."""
    with h5py.File(out) as file:
        for name, dataset in file.items():
            print(f"{name}: {dataset.dtype} {dataset.shape}")
        if len(file["label"]):
            print(f"the first sample, labelled {file['label'][0]}:")
            for row in file["image"][0]:
                print("".join(" .:*#"[int(pixel) * 5 // 256] for pixel in row).rstrip())


def demo(folder: Path) -> Path:
    """Make idx files of ten pictures, a ring around each, and convert them."""
    y, x = np.mgrid[:28, :28] - 13.5
    rings = [255 * np.exp(-((np.hypot(x, y) - 3 - k) ** 2)) for k in range(10)]
    write_idx(folder / "images-idx3-ubyte", np.array(rings).astype(np.uint8))
    write_idx(folder / "labels-idx1-ubyte", np.arange(10, dtype=np.uint8))
    out = folder / "rings.h5"
    convert(folder / "images-idx3-ubyte", folder / "labels-idx1-ubyte", out)
    return out


def main(arguments: list[str]) -> None:
    if not arguments:
        with tempfile.TemporaryDirectory() as folder:
            show(demo(Path(folder)))
    elif len(arguments) == 3:
        images, labels, out = map(Path, arguments)
        convert(images, labels, out)
        show(out)
    else:
        sys.exit("usage: python examples/mnist_to_hdf5.py IMAGES LABELS OUT.h5")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, EOFError, ValueError, zlib.error) as error:
        sys.exit(f"mnist_to_hdf5: {error}")
