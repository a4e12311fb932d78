"""Whether a file is still the one that a sidecar was written for, at the cost of a few reads.

Kept are the size, the time stamp and inode, what the format states about itself (LMDB's
transaction and root, HDF5's end of file, Zarr's metadata), and a digest of sixteen blocks spread
over the data.

Of an object in a store its ETag decides, which every read names, too; so it is not asked for when
the sidecar is opened.

Another time stamp or inode alone decides nothing: files are touched and copied. Then the facts and
the sampled blocks decide, and of a file that has the same inode `located` compares checksums too,
where the sidecar has some. So a file of which a few other bytes were changed, keeping its size, is
not noticed here: that takes ``--check full``.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dsprep import formats
from dsprep.errors import DsprepError, UsageError
from dsprep.sidecar.spec import Identity
from dsprep.storage.checksums import read_crc32c
from dsprep.storage.identity import same_time
from dsprep.storage.marks import DataFiles, Mark, sample
from dsprep.storage.paths import StorePath, open_file

ENDS = 2
"""Blocks that are sampled of objects, of which the ETag decides: each would be a request."""

WRITTEN = "it was written to (its time stamp changed)"


def identify(path: Path, format: str) -> Identity:
    """Return the identity of `path`; `OSError` or `FormatError` if it is gone or damaged."""
    mark, files = Mark.with_files(path)
    inode, nbytes, mtime, _ = mark.status
    facts = formats.load(format).identity(path).values
    if etag := _etag(path, mark):
        return Identity(nbytes, None, None, mark.files, facts, sample(files, ENDS), etag)
    return Identity(nbytes, mtime, inode, mark.files, facts, sample(files))


def _etag(path: Path, mark: Mark) -> str:
    """Return the ETag of an object, or a digest of those in a directory; empty of local files."""
    if not isinstance(path, StorePath):
        return ""
    return mark.times or path.store.etag(path.key)


class FileComparison(NamedTuple):
    """The result of comparing a file with what was recorded.

    Attributes
    ----------
    differences
        How it differs from what was recorded, one clause each.
    written
        Whether the same file has another time stamp, which by itself is not a difference.
    mark, files
        What it is now, and its data files; None: missing.
    """

    differences: list[str]
    written: bool
    mark: Mark | None
    files: DataFiles | None = None


def compare_file(path: Path, format: str, known: Identity) -> FileComparison:
    """Compare `path` with what was recorded; `OSError` if it exists and cannot be examined."""
    differences, mark, files = _compare_sizes(path, known, revalidate=False)
    if differences:
        differences, mark, files = _compare_sizes(path, known, revalidate=True)
    if mark is None:
        return FileComparison(differences, False, None)
    if known.etag and (etag := _etag(path, mark)):
        other = [f"its ETag is {etag}, expected {known.etag}"] if etag != known.etag else []
        return FileComparison([*differences, *other], False, mark, files)
    inode, _, mtime, _ = mark.status
    written = known.mtime_ns is not None and not same_time(mtime, known.mtime_ns)
    written = written and known.inode is not None and inode == known.inode
    if differences:
        return FileComparison([*differences, *([WRITTEN] if written else [])], written, mark)
    try:
        stated = formats.load(format).identity(path)
        facts = stated.values
        for key, value in known.facts.items():
            if facts.get(key) != value:
                differences.append(
                    f"its {key.replace('_', ' ')} is {facts.get(key)}, expected {value}"
                )
        if not differences and known.sampled:
            mark = replace(mark, sampled=sample(files))
            if mark.sampled != known.sampled and sample(files, ENDS) != known.sampled:
                differences.append("its content changed (sampled blocks differ)")
    except UsageError:  # such as that this process cannot make requests
        raise
    except DsprepError as error:
        differences.append(f"it cannot be read: {error}")
    differences += [WRITTEN] if differences and written else []
    return FileComparison(differences, written, mark, files)


def _compare_sizes(
    path: Path, known: Identity, *, revalidate: bool
) -> tuple[list[str], Mark | None, DataFiles]:
    """Return how sizes differ from what was recorded, the mark, and the data files.

    `revalidate`: ask the server, not the cache of the client.
    """
    try:
        mark, files = Mark.with_files(path, refresh=revalidate)
    except FileNotFoundError:
        return ["it is missing"], None, DataFiles.none(path)
    differences = []
    if mark.status.nbytes != known.nbytes:
        differences.append(f"it has {mark.status.nbytes:,} bytes, expected {known.nbytes:,}")
    if mark.files != known.files:
        differences.append(f"it has {mark.files:,} files, expected {known.files:,}")
    return differences, mark, files


def block_crc32c(path: Path, begin: int, end: int) -> int:
    """Return the CRC-32C of some bytes of a file, or of the data files of a directory by path.

    Raises `FormatError` or `OSError` if they end first, or cannot be read.
    """
    crc, at = 0, 0
    for file, nbytes in Mark.with_files(path)[1]:
        low, high = max(begin, at), min(end, at + nbytes)
        if low < high:
            with closing(open_file(file)) as opened:
                crc = read_crc32c(opened, low - at, high - at, crc)
        at += nbytes
    return crc
