"""One clear line for any error of the HDF5 library about a damaged file.

The library reports damage as any of a dozen built-in exceptions with a sentence per layer. Here
they become one `FormatError` that names the file; errors of the operating system pass through.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsprep.errors import DsprepError, FormatError, MissingExtra
from dsprep.storage.base import Handle, stream
from dsprep.storage.paths import StorePath, open_file

_ERRNO = re.compile(r"\berrno = (\d+)")
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system says of a disk or a file that can take no more."""

_CHUNK_CACHE = 16 << 20
"""Bytes per dataset: a chunk that does not fit is decompressed again for every read in it."""

_REASON = re.compile(r"\((.*)\)\s*$", re.DOTALL)


@contextmanager
def hdf5_errors(where: object, doing: str) -> Iterator[None]:
    """Turn exceptions of h5py inside the block into `FormatError`.

    `where` is the file and, if known, the field; `doing` what fails: ``"it cannot be read"``.
    """
    try:
        yield
    except DsprepError:
        raise
    except MemoryError as error:
        raise FormatError(doing, where=where, found="sizes beyond the memory") from error
    except (
        OSError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        AttributeError,
        SystemError,
    ) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        number = _ERRNO.search(str(error))  # the library gives the number in its text only
        if number is not None and int(number[1]) in _NO_PLACE:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(where)) from error
        raise FormatError(f"{doing}: {_condense(error)}", where=where) from error


def _condense(error: Exception) -> str:
    """Return the innermost reason of an HDF5 message: what stands in its last parentheses."""
    text = " ".join(str(error).split())
    match = _REASON.search(text)
    return (match[1] if match else text) or type(error).__name__


def need_filters(dataset: object, where: object) -> None:
    """Raise `MissingExtra` if a filter is neither in the HDF5 library nor in hdf5plugin."""
    from h5py import h5z

    plist = dataset.id.get_create_plist()  # type: ignore[attr-defined]
    for i in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(i)
        if h5z.filter_avail(code):
            continue
        import_plugins()
        if not h5z.filter_avail(code):
            label = name.decode("utf-8", "replace").strip("\0 ") or "unnamed"
            message = f"HDF5 filter {code} ({label}) is not installed"
            raise MissingExtra(message, where=where, fix=_PLUGINS)


_PLUGINS = (
    "pip install 'dsprep[hdf5plugin]'; or, where the filter is installed, copy the file: h5repack "
    "-f NONE IN OUT (PyTables' ptrepack for lzo); --field takes the fields without it"
)


def import_plugins() -> bool:
    """Import hdf5plugin, which registers its filters; return whether it is installed."""
    try:
        import hdf5plugin
    except ImportError:
        return False
    return bool(hdf5plugin.__name__)


STREAM_NBYTES = 64 << 10
"""Bytes that are read at a time of files that the library has no path of."""


def open_hdf5(path: Path) -> Any:
    """Open a file for reading.

    With the library's own setting for locks, since it refuses a file that the process has open
    with another one; without locks where the file system has none.
    """
    import h5py

    if isinstance(path, StorePath):
        return h5py.File(stream(open_file(path), STREAM_NBYTES), "r", rdcc_nbytes=_CHUNK_CACHE)
    try:
        return h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE)
    except BlockingIOError as error:
        raise FormatError(
            "another program has the file open for writing",
            where=path,
            fix="wait for it, or set HDF5_USE_FILE_LOCKING=FALSE if it is gone",
        ) from error
    except OSError as error:
        if "lock" not in str(error):
            raise
        return h5py.File(path, "r", locking=False, rdcc_nbytes=_CHUNK_CACHE)


SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FARTHEST = 256 << 10


def signature(file: Handle) -> int | None:
    """Return where the signature is: at 0, or behind a user block at 512, 1024, 2048, ...

    Of files without a descriptor, which may be objects, only the first 256 KiB are looked at.
    """
    at, end = 0, file.nbytes if file.fd >= 0 else min(file.nbytes, _FARTHEST)
    while at + len(SIGNATURE) <= end:
        if file.pread(len(SIGNATURE), at) == SIGNATURE:
            return at
        at = max(512, 2 * at)
    return None
