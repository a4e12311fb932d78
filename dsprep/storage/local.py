"""Files of this machine's file systems, read by ``preadv`` and ``io_uring``."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from typing_extensions import override

from dsprep.core.schema import Array, Bytes, Ints
from dsprep.errors import FormatError
from dsprep.storage.base import Handle
from dsprep.storage.ranges import close_quietly, fstat, pread_into, pread_most, read_each
from dsprep.storage.scatter import Runs, fill, read_files

OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags with which files are opened: without O_NONBLOCK, opening a FIFO would wait for a writer."""


_ITSELF = OPENED | os.O_NOFOLLOW


class LocalFile(Handle):
    """A regular file of a file system; one that is open already, by its descriptor, becomes its."""

    def __init__(self, path: str | Path, fd: int | None = None) -> None:
        self.fd = -1
        self.name = path
        self.fd = os.open(path, OPENED) if fd is None else fd
        facts = fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode):
            raise FormatError("this is not a regular file", where=path)
        self.nbytes, self.mtime_ns = facts.st_size, facts.st_mtime_ns

    @override
    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_quietly(fd)

    def __del__(self) -> None:
        self.close()

    @override
    def pread(self, nbytes: int, offset: int) -> bytes:
        return pread_most(self.fd, nbytes, offset)

    @override
    def pread_into(self, out: Array, offset: int) -> None:
        pread_into(self.fd, out, offset, self.name)

    @override
    def read_range(self, start: int, iovecs: Ints) -> tuple[int, int]:
        return fill(self.fd, start, iovecs, self.name)

    @override
    def read_runs(self, ranges: Runs) -> tuple[int, int]:
        if len(ranges.starts) == 1:
            return fill(self.fd, int(ranges.starts[0]), ranges.places, self.name)
        return read_files([(self.fd, ranges, self.name)])

    @classmethod
    @override
    def read_many(cls, parts: Sequence[tuple[Handle, Runs]]) -> tuple[int, int]:
        return read_files([(file.fd, ranges, file.name) for file, ranges in parts])

    @override
    def look(self, offset: int | None = None) -> tuple[int, int]:
        facts = fstat(self.fd, offset)
        return facts.st_size, facts.st_mtime_ns


class DirectoryGuard:
    """The directory of a dataset, out of which no symbolic link may lead.

    It is the directory that the user named, or that of the file. Files of a snapshot of the Hugging
    Face hub, ``NAME/snapshots/REVISION``, may be links to files in ``NAME/blobs``.

    Parameters
    ----------
    dataset
        The file or directory, itself perhaps a link: it is the user who named it.
    follow
        Whether links may lead anywhere.
    """

    def __init__(self, dataset: Path, follow: bool) -> None:
        self._dataset, self._follow = dataset.absolute(), follow
        self._inside: set[bytes] = set()  # directories

    @cached_property
    def _roots(self) -> tuple[str, ...]:
        if self._follow:
            return ()
        real, named = (Path(os.path.realpath(p)) for p in (self._dataset, self._dataset.parent))
        roots = [real] if real.is_dir() else [named, real.parent]
        roots += [up.parent / "blobs" for up in roots[0].parents if up.name == "snapshots"]
        return tuple(dict.fromkeys(map(str, roots)))

    def check(self, file: Handle) -> None:
        """Raise `FormatError` if an open file is outside."""
        if self._roots and file.fd >= 0:
            real = os.readlink(f"/proc/self/fd/{file.fd}")  # noqa: PTH115 (it is quick)
            self._check(real, file.name)

    def read_each(
        self, root: str, names: Sequence[bytes], begins: Ints, ends: Ints, out: Bytes
    ) -> list[os.stat_result | None]:
        """Fill ``out[begins[i]:ends[i]]`` with files below `root` of just as many bytes.

        Returns what each was after that; None where it takes more: of a link, of another size, in
        a store. Small files are read so: a directory is looked at once, and only
        what is not itself a link is opened.
        """
        if "://" in root:
            return [None] * len(names)
        prefix = os.fsencode(root) + b"/"
        for folder in {name.rpartition(b"/")[0] for name in names}:
            if self._roots and (directory := prefix + folder) not in self._inside:
                path = os.fsdecode(directory)
                self._check(f"{os.path.realpath(path)}/", path)
                self._inside.add(directory)
        paths = [prefix + name for name in names]
        return read_each(paths, _ITSELF, out.data, begins.tolist(), ends.tolist())

    def check_tree(self, path: Path) -> None:
        """Raise `FormatError` if a link at or below `path` leads outside."""
        todo = [path] if self._roots else []
        while todo:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        self._check(os.path.realpath(entry.path), entry.path)
                    elif entry.is_dir():
                        todo.append(Path(entry.path))

    def _check(self, real: str, where: object) -> None:
        if not any(real.startswith(f"{root.rstrip('/')}/") for root in self._roots):
            raise FormatError(
                "a symbolic link leads out of the directory of the dataset",
                where=where,
                expected=f"a file in {self._roots[0]}",
                found=real,
                fix="if it may be read, add --follow-external (follow_external=True)",
            )
