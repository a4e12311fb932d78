"""A file of a dataset as its readers see it: ranges of bytes, a name, and an identity.

`Handle` is one file, open. Formats, sidecars and the reader see nothing else of a file, so that
they read from any place that has an implementation: `dsprep.storage.local`, copies, unpacked files.
"""

from __future__ import annotations

import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Array, Bytes, Ints
from dsprep.errors import ChangedError, changed, layout_mismatch
from dsprep.storage import copying
from dsprep.storage.ranges import as_bytes, ends_early
from dsprep.storage.scatter import Runs, runs

if TYPE_CHECKING:
    from dsprep.storage.identity import Identity


class Handle(ABC):
    """A file open for reading, by any number of threads; closed when nothing refers to it.

    All else follows from `pread` and `look`; implementations replace what they do faster.

    Attributes
    ----------
    name
        Its path as it was opened, for messages.
    nbytes, mtime_ns
        Its size and time stamp when it was opened.
    judge
        Returns how the data differ from what they were, of which this file has another time stamp
        now; that is a difference by itself where nobody knows more.
    fd
        The descriptor of a local file, for what only the kernel can do with one (``O_DIRECT``,
        ``mmap``, ``io_uring``); -1 if it has none.
    original
        Of a copy: the number of the dataset's file entry, and the path below it.
    """

    name: str | Path
    nbytes: int
    mtime_ns: int
    judge: Callable[[], str | None] | None = None
    fd: int = -1
    original: tuple[int, str] | None = None

    @property
    def path(self) -> Path:
        """Its name as a path."""
        return Path(self.name)

    @abstractmethod
    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return `nbytes` bytes from `offset` on, fewer only where the file ends first."""

    @abstractmethod
    def look(self, offset: int | None = None) -> tuple[int, int]:
        """Return size and time stamp now; an error names the file, and the `offset` of a read."""

    def check_same(self, offset: int | None = None) -> None:
        """Raise `ChangedError` if the file was written to since it was opened."""
        nbytes, mtime_ns = self.look(offset)
        if nbytes != self.nbytes:
            raise changed(self.path, f"it has {nbytes:,} bytes, expected {self.nbytes:,}")
        if mtime_ns != self.mtime_ns:
            how = "its time stamp is another one" if self.judge is None else self.judge()
            if how is not None:
                raise changed(self.path, how)
            self.mtime_ns = mtime_ns

    def close(self) -> None:  # noqa: B027 (not every file has something to close)
        """Close it at once; closing twice is allowed."""

    def opened(self, path: str) -> Self:
        """Return this file, whatever the path: what opens the files of a dataset of one file."""
        del path
        return self

    # --- reading -----------------------------------------------------------------------------

    def pread_exact(self, nbytes: int, offset: int) -> bytes:
        """Return `nbytes` bytes from `offset` on; for headers, not for payloads.

        Raises
        ------
        FormatError
            If the file ends first.
        """
        data = self.pread(nbytes, offset)
        if len(data) < nbytes:
            raise ends_early(self.name, offset, nbytes, len(data))
        return data

    def pread_blocks(self, nbytes: int, offsets: Sequence[int]) -> list[bytes]:
        """Return `nbytes` bytes from each of some offsets on, fewer where the file ends first."""
        return [self.pread(nbytes, offset) for offset in offsets]

    def pread_into(self, out: Array, offset: int) -> None:
        """Fill the C-contiguous array `out` from `offset` on; raises as `pread_exact`."""
        view = as_bytes(out)
        view[:] = self.pread_exact(len(view), offset)

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out` from `offset` on, of a file that is still the same."""
        self.pread_into(out, offset)
        self.check_same(offset)

    def read_whole(self, out: Bytes) -> None:
        """Fill `out` with all bytes of a file of this size that is still the same."""
        self.check_end(len(out))
        if len(out):
            self.read_into(out, 0)

    def read_range(self, start: int, iovecs: Ints) -> tuple[int, int]:
        """Read the bytes from `start` on to places, which that fills.

        Parameters
        ----------
        start, iovecs
            As `dsprep.storage.scatter.runs` returns them: int64, shape ``(m, 2)``, addresses
            and bytes.

        Returns
        -------
        calls, nbytes
            Read calls made, and the bytes that they asked for.

        Raises
        ------
        FormatError
            If the file ends before the last place is full.
        OSError
            If it cannot be read.
        """
        nbytes = int(iovecs[:, 1].sum())
        data = np.frombuffer(self.pread_exact(nbytes, start), np.uint8)
        copying.copy(data.ctypes.data, iovecs)
        return 1, nbytes

    def read_runs(self, ranges: Runs) -> tuple[int, int]:
        """Read many ranges to their places; returns and raises as `read_range`."""
        done = [self.read_range(start, iovecs) for start, iovecs in ranges]
        return sum(calls for calls, _ in done), sum(nbytes for _, nbytes in done)

    @classmethod
    def read_many(cls, parts: Sequence[tuple[Handle, Runs]]) -> tuple[int, int]:
        """Read ranges of files of this class to places; returns and raises as `read_range`."""
        done = [file.read_runs(ranges) for file, ranges in parts]
        return sum(calls for calls, _ in done), sum(nbytes for _, nbytes in done)

    def read_spans(self, offsets: Ints, lengths: Ints, out: Bytes, positions: Ints) -> None:
        """Read the bytes ``offsets[i] .. offsets[i] + lengths[i]`` to ``out[places[i]]`` and after.

        The spans are int64, shape ``(n,)``, in any order; `out` is uint8, C-contiguous.

        Raises
        ------
        FormatError
            If the file ends before a span does.
        """
        if not len(offsets):
            return
        first = int(offsets[0])
        if len(offsets) > 1 and (np.diff(offsets) < 0).any():
            order = np.argsort(offsets, kind="stable")
            offsets, lengths, positions = offsets[order], lengths[order], positions[order]
        if int(positions.min()) < 0 or int((positions + lengths).max()) > out.nbytes:
            raise ValueError("a span is placed outside its memory")
        self.read_runs(runs(offsets, lengths, positions + out.ctypes.data))
        self.check_same(first)

    # --- checks ------------------------------------------------------------------------------

    def check_end(self, end: int) -> None:
        """Raise `ChangedError` unless it ends at `end`, as when its records were located."""
        if end != self.nbytes:
            raise ChangedError(
                "the file has another size than when it was located",
                where=self.path,
                expected=f"{end:,} bytes",
                found=f"{self.nbytes:,} bytes",
                fix="where a sidecar gives the size, write it again with dsprep provenance; "
                "otherwise start again once nobody writes to it",
            )

    def check_extents(self, offsets: Ints, lengths: Ints, subject: str) -> None:
        """Raise `FormatError` unless every range, int64 of shape ``(n,)``, lies within the file.

        The ranges may be anything; `subject` names them in the message.
        """
        bad = (offsets < 0) | (lengths < 0) | (lengths > self.nbytes)
        bad |= offsets > self.nbytes - lengths
        if bad.any():
            i = int(bad.argmax())
            raise layout_mismatch(
                f"gives an extent of {subject} that is not in the file",
                self.path,
                f"within {self.nbytes} bytes",
                f"{lengths[i]} bytes at {offsets[i]}",
            )


class Store(ABC):
    """Files by names with slashes; a name that others begin with, and a slash, is a directory.

    What is written is staged in local files, and published by `put`.
    """

    part_nbytes = 1 << 30
    """Bytes of a long range that one request reads."""

    @abstractmethod
    def open(self, name: str, path: str, known: Identity | None = None) -> Handle:
        """Open a file, which messages call `path`; `OSError` if that fails.

        `known`: reading fails with `ChangedError` unless it is this version.
        """

    def etag(self, name: str) -> str:
        """Return the version of a file, which another content never has; empty without one."""
        del name
        return ""

    @abstractmethod
    def stat(self, name: str) -> os.stat_result:
        """Return what a file or directory is; see `made_status`.

        Raises
        ------
        FileNotFoundError
            If there is neither.
        """

    @abstractmethod
    def listing(self, directory: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names directly in a directory, and what they are; raises as `stat`."""

    def forget(self, name: str) -> None:  # noqa: B027 (not every store keeps answers)
        """Ask anew what a file is, whatever was answered before."""

    def check_writable(self, name: str) -> None:  # noqa: B027 (most stores are)
        """Raise `UsageError` if no file can be written under a name."""

    @abstractmethod
    def put(self, name: str, data: Path | bytes, *, overwrite: bool | str) -> str:
        """Publish a local file, or some bytes, under a name, at once or not at all.

        Parameters
        ----------
        overwrite
            Whether it may replace what has the name; or which version that has to be, as `etag`
            gives it.

        Returns
        -------
        The version that was written, as `etag` gives it.

        Raises
        ------
        FileExistsError
            If the name is that of a file, or of another version, that is not to be replaced.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""


def made_status(nbytes: int | None, mtime_ns: int = 0, version: int = 0) -> os.stat_result:
    """Return the status of a file of so many bytes, or (None) of a directory.

    The number of its `version` takes the place of the change time.
    """
    mode = 0o555 | (stat.S_IFDIR if nbytes is None else stat.S_IFREG)
    seconds = mtime_ns // 10**9
    fields = (mode, 0, 0, 1, 0, 0, nbytes or 0, seconds, seconds, seconds)
    return os.stat_result(fields, {"st_mtime_ns": mtime_ns, "st_ctime_ns": version})


class _Stream(io.RawIOBase):
    """A file as Python's libraries read one; closing it leaves the handle open."""

    def __init__(self, file: Handle) -> None:
        self._file, self._at = file, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.nbytes}[whence]
        if start + offset < 0:
            raise ValueError("a file has no bytes before its first")
        self._at = start + offset
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        data = self._file.pread(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def stream(file: Handle, buffer_nbytes: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Return a file as libraries of Python read one: a seekable binary stream."""
    return io.BufferedReader(_Stream(file), buffer_nbytes)


def for_library(file: Handle) -> str | io.BufferedReader:
    """Return what a library opens that takes a path or a stream: this file, whatever its name."""
    return f"/proc/self/fd/{file.fd}" if file.fd >= 0 else stream(file)
