"""One byte of each field flipped, in every format, plain and grouped.

Wherever there is a checksum, reading with full verification and the full check notice it. That
a sidecar's sampled blocks, which cover all of files this small, would notice it is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import dsprep
from dsprep.errors import DsprepError, UsageError
from dsprep.sidecar import identity
from dsprep.verbs.check import check
from dsprep.verbs.provenance import provenance
from lab.adversarial import judging, making
from lab.adversarial.judging import Tally

COUNT = 40
CHECKED = {
    "hdf5-chunks": "adler",
    "tfrecord": "CRC-32C",
    "tfrecord-gzip": "CRC-32",
    "zarr-2": "CRC-32",
    "zarr-chunks": "CRC-32",
    "zarr-zip": "CRC-32 of members",
}
"""Kinds in which the format itself has a checksum over every value; and all with groups."""

SCHEMAS = {True: making.FIXED, False: making.MIXED}
"""By whether HDF5 writes groups of it."""


def has_checksum(kind: str) -> bool:
    return kind in CHECKED or "groups" in kind


def noticed(work: Callable[[], object]) -> bool | None:
    """Return whether it fails; None if it says that it cannot verify."""
    try:
        work()
    except UsageError:
        return None
    except (DsprepError, OSError):
        return True
    return False


def flip(path: Path, offset: int, rng: np.random.Generator) -> None:
    """Flip one bit, and put the time stamp back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << int(rng.integers(8)))]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def targets(path: Path, field: str) -> list[tuple[Path, int, int]]:
    """Return the stored bytes of a field: file, offset and length, of each sample."""
    with dsprep.Sidecar.open(path) as opened:
        extents = opened.extents(slice(None), [field])
        return [(opened.path.parent / e.file, e.offset, e.length) for e in extents if e.length]


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    kinds = [k for k in making.KINDS if k != "tfrecord-gzip"]
    kinds += [f"{k} with checksums" for k in ("hdf5", "lmdb", "zarr-shards")]
    cases = [(k, f.name) for k in kinds for f in making.MIXED if f in schema_of(k)]
    made: dict[str, Path] = {}
    identity.sample = lambda files: ""
    for number in numbers:
        kind, field = cases[number % len(cases)]
        if options.kind and kind not in options.kind:
            continue
        if kind not in made:
            made[kind] = make(kind, folder)
        rng = np.random.default_rng([options.seed, number])
        own = folder / "flipped"
        shutil.copytree(made[kind].parent, own)
        what = trial(kind, field, own / made[kind].name, rng)
        tally.judge(number, f"{kind}, {field}", what)
        shutil.rmtree(own)


def schema_of(kind: str) -> making.Schema:
    return SCHEMAS[kind == "hdf5-groups"]


def make(kind: str, folder: Path) -> Path:
    kind, _, more = kind.partition(" ")
    origin = folder / f"origin of {kind} {more}"
    origin.mkdir()
    schema = schema_of(kind)
    path = making.origin(origin, schema, making.samples(schema, COUNT))
    path = making.make(kind, path, folder / f"{kind} {more}")
    if more:
        provenance([path], checksums=True)
    return path


def trial(kind: str, field: str, path: Path, rng: np.random.Generator) -> str:
    known = judging.read(path, through="library")
    places = targets(path, field)
    file, offset, length = places[int(rng.integers(len(places)))]
    flip(file, offset + int(rng.integers(length)), rng)

    def read() -> None:
        with dsprep.Sidecar.open(path, check=False) as opened:
            opened.read(slice(None), verify="full")

    def deliver() -> None:
        with dsprep.Reader(path, 7, verify=True, shuffle="none") as reader:
            for _ in reader:
                pass

    def library() -> None:
        nonlocal same
        same = judging.read(path, through="library") == known

    same = False
    found = {
        "Sidecar.read": noticed(read),
        "Reader": noticed(deliver),
        "check": bool(check([path], full=True)),
        "library": noticed(library),
    }
    if same:
        return "a byte that no value depends on"
    missed = [name for name, seen in found.items() if seen is False]
    if kind.endswith("checksums"):
        return "!unnoticed by check" if not found["check"] else "noticed by check"
    if not has_checksum(kind):
        return f"no checksum; noticed by {sum(v is True for v in found.values())} of 4"
    if "groups" in kind and kind not in CHECKED:
        missed = [m for m in missed if m != "library" or "zip" in kind or "tfrecord" in kind]
    return f"!unnoticed by {', '.join(missed)}" if missed else "noticed"
