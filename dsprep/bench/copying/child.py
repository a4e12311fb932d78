"""The process that does what is compared: ``python -m dsprep.bench.copying.child TASK RESULT``.

TASK is JSON, with ``do``: a ``command`` of dsprep, a full ``scan`` by the library of the format, a
``walk`` over its index, ``locate``, a plain ``copy``, or ``nothing``. What was measured is written
to the file RESULT: the seconds between the libraries being imported and the end, and the counts of
the kernel in between.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dsprep.bench import counters
from dsprep.bench.orphan import end_with_parent

SLAB = 8 << 20
"""Bytes that a scan reads at a time."""

SECONDS = 0.5
"""How long places are computed for."""

AT_ONCE = 1024
"""Places that are computed by one call."""

LIBRARIES = {"hdf5": "h5py", "lmdb": "lmdb", "tfrecord": "dsprep.core.storage", "zarr": "zarr"}

FRAME = struct.Struct("<QI")
"""What is before a TFRecord's bytes: their length and its CRC; behind them is another CRC."""

WALKS = ("lmdb", "tfrecord")
"""Formats with an index, or something like it, that can be walked without reading values."""


def main(task: dict[str, Any], result: Path) -> int:
    """Do a task, write what it took, return the exit status."""
    for name in task["libraries"]:
        import_module(name)
    before, began = counters.count(), time.perf_counter()
    status, found = _ACTIONS[task["do"]](task)
    seconds, used = time.perf_counter() - began, counters.count() - before
    told = {
        "seconds": seconds,
        "read_bytes": used.asked,
        "device_bytes": used.device,
        "cpu_seconds": used.cpu,
        "peak_rss_bytes": counters.peak_rss(),
        **found,
    }
    result.write_text(json.dumps(told))
    return status


# --- what is done ----------------------------------------------------------------------------


def _command(task: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run a command as ``python -m dsprep`` does."""
    sys.argv = ["dsprep", *task["arguments"]]
    try:
        runpy.run_module("dsprep", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None), {}
    return 0, {}


def _scan(task: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    scan = _SCANS[task["format"]]
    return 0, {"scanned_bytes": sum(scan(Path(f), task) for f in task["files"])}


def _walk(task: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    walk = {"lmdb": _lmdb_keys, "tfrecord": _tfrecord_frames}[task["format"]]
    return 0, {"records": sum(walk(Path(f), task) for f in task["files"])}


def _copy(task: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Copy files and directories, where there is no ``cp``."""
    for i, name in enumerate(task["files"]):
        source, target = Path(name), Path(task["target"], str(i))
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    return 0, {}


def _locate(task: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Open a sidecar and compute the places of random samples."""
    import numpy as np

    from dsprep.sidecar.sidecar import Sidecar

    began = time.perf_counter()
    with Sidecar.open(task["sidecar"], task["data"]) as opened:
        field = next(n for n in opened.schema.names if n not in opened.layout(0).unlocated)
        opened.locate(0, field)
        opening = time.perf_counter() - began
        chosen = np.random.default_rng(0).integers(0, len(opened), 1 << 16)
        done, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + SECONDS:
            at = done % len(chosen)
            opened.locate(chosen[at : at + AT_ONCE], field)
            done += AT_ONCE
        one, alone = 0, time.perf_counter()
        while time.perf_counter() < alone + SECONDS / 2:
            opened.locate(int(chosen[one % len(chosen)]), field)
            one += 1
        each = (time.perf_counter() - alone) / one
    return 0, {
        "opening_seconds": opening,
        "locate_per_second": done / (now - began),
        "one_seconds": each,
    }


_ACTIONS: dict[str, Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "command": _command,
    "scan": _scan,
    "walk": _walk,
    "copy": _copy,
    "locate": _locate,
    "nothing": lambda task: (0, {}),
}


# --- full scans and walks --------------------------------------------------------------------


def _hdf5_values(file: Path, task: dict[str, Any]) -> int:
    """Read every dataset, `SLAB` bytes at a time; return their bytes."""
    import h5py

    done = 0

    def read(name: str, item: object) -> None:
        nonlocal done
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            done += _array_values(item, item.chunks)

    with h5py.File(file, "r") as opened:
        opened.visititems(read)
    return done


def _zarr_values(file: Path, task: dict[str, Any]) -> int:
    """Read every array, `SLAB` bytes at a time; return their bytes."""
    import zarr

    opened = zarr.open(str(file), mode="r")
    if isinstance(opened, zarr.Array):
        return _array_values(opened, opened.chunks)
    arrays = (a for _, a in opened.members(max_depth=None) if isinstance(a, zarr.Array))
    return sum(_array_values(a, getattr(a, "shards", None) or a.chunks) for a in arrays)


def _array_values(array: Any, chunks: Sequence[int] | None) -> int:
    """Read an array in slabs of whole chunks; return its bytes in memory."""
    if not array.shape:
        return int(array[()].nbytes) if hasattr(array[()], "nbytes") else 0
    rows = array.shape[0]
    each = max(1, array.dtype.itemsize * int(array.size) // max(1, rows))
    unit = chunks[0] if chunks else 1
    step = max(1, SLAB // (each * unit)) * unit
    return sum(int(array[at : at + step].nbytes) for at in range(0, rows, step))


def _lmdb_values(file: Path, task: dict[str, Any]) -> int:
    """Copy every value out of the map, by a cursor; return their bytes."""
    with _lmdb_cursor(file, task) as cursor:
        return sum(len(value) for _, value in cursor)


def _lmdb_keys(file: Path, task: dict[str, Any]) -> int:
    """Step a cursor over all keys; return how many there are."""
    with _lmdb_cursor(file, task) as cursor:
        return sum(1 for _ in cursor.iternext(keys=True, values=False))


@contextmanager
def _lmdb_cursor(file: Path, task: dict[str, Any]) -> Iterator[Any]:
    import lmdb

    with lmdb.open(str(file), subdir=file.is_dir(), readonly=True, lock=False, max_dbs=1) as opened:
        name = task.get("database")
        database = opened.open_db(name.encode(), create=False) if name else None
        with opened.begin(db=database) as transaction, transaction.cursor() as cursor:
            yield cursor


def _tfrecord_values(file: Path, task: dict[str, Any]) -> int:
    """Read every record, one behind the other, without its CRC; return their bytes."""
    import gzip
    import zlib

    with file.open("rb") as plain:
        head = plain.read(2)
    if head[:2] == b"\x1f\x8b":
        with gzip.open(file, "rb") as opened:
            return _records(opened.read)
    if len(head) == 2 and head[0] == 0x78 and not int.from_bytes(head, "big") % 31:
        inflate, done = zlib.decompressobj(), 0
        with file.open("rb") as opened_file:
            while data := opened_file.read(SLAB >> 4):
                done += len(inflate.decompress(data))
        return done
    with file.open("rb", buffering=1 << 20) as opened_file:
        return _records(opened_file.read)


def _records(read: Callable[[int], bytes]) -> int:
    done = 0
    while len(head := read(FRAME.size)) == FRAME.size:
        length = FRAME.unpack(head)[0]
        done += len(read(length + 4)) - 4
    return done


def _tfrecord_frames(file: Path, task: dict[str, Any]) -> int:
    """Read the frame of every record, from which the place of the next one follows."""
    from dsprep.core.storage import pread_most

    found = offset = 0
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(head := pread_most(fd, FRAME.size, offset)) == FRAME.size:
            offset += FRAME.size + FRAME.unpack(head)[0] + 4
            found += 1
    finally:
        os.close(fd)
    return found


_SCANS: dict[str, Callable[[Path, dict[str, Any]], int]] = {
    "hdf5": _hdf5_values,
    "zarr": _zarr_values,
    "lmdb": _lmdb_values,
    "tfrecord": _tfrecord_values,
}


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
