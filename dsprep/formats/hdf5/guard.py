"""The HDF5 library, as far as it opens files: its errors, its filters and its locks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsprep.errors import FormatError, MissingExtra
from dsprep.formats.library import library_errors
from dsprep.storage.base import Handle, stream
from dsprep.storage.paths import StorePath, open_file

_CHUNK_CACHE = 16 << 20
"""Bytes per dataset: a chunk that does not fit is decompressed again for every read in it."""

_REASON = re.compile(r"\((.*)\)$")
"""The innermost reason: the last parentheses."""


@contextmanager
def hdf5_errors(where: object, doing: str) -> Iterator[None]:
    """Turn exceptions of h5py, with a sentence per layer, into `FormatError`."""
    with library_errors(where, doing, _REASON):
        yield


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
