"""HDF5 files and LMDB environments for writing, whose bytes depend on what is written alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsprep.core.schema import Array
from dsprep.errors import TargetError


@contextmanager
def hdf5_file(path: Path) -> Iterator[Any]:
    """Create an HDF5 file with h5py's defaults; objects carry no times.

    Raises
    ------
    TargetError
        If the library cannot write it, for example for want of space.
    """
    import h5py

    try:
        with h5py.File(path, "x") as file:
            yield file
    except RuntimeError as error:  # h5py's class for a flush that fails when a file is closed
        raise TargetError("HDF5 cannot write the file", where=path, found=error) from error


def append(dataset: Any, rows: Array) -> None:
    """Add `rows` behind the last row of a resizable HDF5 dataset."""
    start = dataset.shape[0]
    if len(rows):
        dataset.resize(start + len(rows), axis=0)
        dataset[start:] = rows


@contextmanager
def lmdb_environment(path: Path, *, subdir: bool, map_size: int) -> Iterator[Any]:
    """Create an LMDB environment: a directory, or one file when `subdir` is false.

    No lock file is left behind, since it would hold this process's id; readers make their own.
    One sync at the end serves all commits: the pages are the same as with one sync per commit.

    Raises
    ------
    TargetError
        If the library cannot write it, for example for want of space.
    """
    import lmdb

    if subdir:
        path.mkdir()  # the library would make it with the mode of the file
    try:
        with lmdb.open(
            str(path), subdir=subdir, map_size=map_size, lock=False, sync=False, mode=0o666
        ) as environment:
            yield environment
            environment.sync(True)
    except lmdb.Error as error:
        raise TargetError("LMDB cannot write the file", where=path, found=error) from error
