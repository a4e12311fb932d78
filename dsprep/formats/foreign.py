"""Files that no format reads, and directories of them: the best known, and what to do.

The formats are asked first. Nothing is decoded or unpickled: only first bytes are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dsprep.errors import FormatError
from dsprep.storage.paths import open_file

HEAD = 256
"""Bytes of a file that are looked at."""

WAY_OUT = (
    'give the samples from Python: import dsprep; dsprep.write("OUT.h5", ({"x": read(path)} for '
    "path in paths)), as in examples/write_samples.py"
)
"""The way that always helps: to be pasted, with a function that reads a file."""

_SAVED = "read it with the library that wrote it and " + WAY_OUT
_PICKLE = "a pickle", f"dsprep unpickles nothing, as that can run any program; {WAY_OUT}"
_PACKED = "compressed as a whole, so that no sample has an offset", "unpack it"

SIGNATURES = {
    b"version https://git-lfs.github.com/spec/": ("a Git LFS pointer", "git lfs pull"),
    b"MATLAB 5.0 MAT-file": ("a MATLAB file of version 5", "save it in MATLAB with -v7.3"),
    b"\x0e\x03\x13\x01": ("HDF4, which is not HDF5", "convert it: h4toh5 IN OUT"),
    b"GRIB": ("GRIB", "convert it: cdo -f nc4 copy IN OUT"),
    b"ARROW1": ("an Arrow file", _SAVED),
    b"PAR1": ("the metadata of a Parquet dataset", "name its directory, or its files"),
    b"PK\3\4": ("a ZIP archive", "unpack it, and name the directory"),
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff"), ("an image", "name the directory of all")),
    **dict.fromkeys((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"), _PACKED),
    **{bytes([0x80, version]): _PICKLE for version in range(2, 6)},
}
"""Kinds of files by their beginning, each with what to do about it."""

TABLES = {
    "_delta_log": "deltalake",
    ".hoodie": "hudi",
    "metadata/version-hint.text": "pyiceberg",
    "metadata/*.metadata.json": "pyiceberg",
}
"""Members of directories of tables that keep overwritten rows in files, and what reads them."""


def refused(path: Path, expected: Sequence[str]) -> FormatError:
    """Return the error for a file that no format reads, where those of `expected` would be."""
    head = _head(path) if path.is_file() else b""
    name, fix = _known(head) or ("not a format that dsprep reads", WAY_OUT)
    if path.is_file() and not any(head):
        name, fix = "of zeros, not written completely" if head else "empty", "write it again"
    return FormatError(
        f"this is {name}",
        where=path,
        expected=", ".join(expected),
        found=f"a file that begins with {head[:24]!r}" if head else None,
        fix=fix,
    )


def check_no_table(directory: Path, expected: Sequence[str]) -> None:
    """Raise `FormatError` if a log in a directory says which rows of its files still count."""
    for member, library in TABLES.items():
        if (directory / member.partition("/")[0]).exists() and any(directory.glob(member)):
            raise FormatError(
                "this is a table whose files also hold rows that were overwritten or removed since",
                where=directory,
                expected="files of " + ", ".join(expected),
                found=member,
                fix=f"read it with {library} and {WAY_OUT}",
            )


def nothing_in(directory: Path, files: Sequence[Path], expected: Sequence[str]) -> FormatError:
    """Return the error for a directory of `files` that no format reads."""
    known = _known(_head(files[0])) if files and files[0].is_file() else None
    inside = f"{len(files)} other files, such as {files[0].name}" if files else "nothing"
    return FormatError(
        "the directory holds no dataset",
        where=directory,
        expected="files of " + ", ".join(expected),
        found=f"{inside}, {known[0]}" if known else inside,
        fix=(known[1] if known else WAY_OUT) if files else None,
    )


def _known(head: bytes) -> tuple[str, str] | None:
    known = next((k for start, k in SIGNATURES.items() if head.startswith(start)), None)
    return _PICKLE if known and b"/data.pkl" in head else known


def _head(path: Path) -> bytes:
    with closing(open_file(path)) as file:
        return file.pread(HEAD, 0)
