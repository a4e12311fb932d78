"""The base of writers of records: a file whose groups are runs of its bytes, and their sums."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.groups import Grouping
from dsprep.core.schema import Ints
from dsprep.formats.base import State, Writer
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Blocks, Groups
from dsprep.storage.checksums import Sums, read_crc32c
from dsprep.storage.durable import close, preallocate, start_sync, sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import fstat

THREADS = 2
"""Threads that read back; more wait for each other's turn at Python."""

AHEAD = 256 << 20
"""Bytes for which space is reserved at a time, at most; never more than the file has already."""


class RecordWriter(Writer):
    """A file of records being written.

    Parameters
    ----------
    path
        The file itself.
    inside
        The file below the path of the dataset: empty if that is the file.
    grouping
        The samples, and their groups.
    state
        As for `FilePlan.create`.

    Attributes
    ----------
    fd
        The open file.
    sums
        Those of the groups, as far as they were written by this process.
    """

    def __init__(self, path: Path, inside: str, grouping: Grouping, state: State | None) -> None:
        self.path, self.inside, self.sums = path, inside, Sums()
        self.grouping = None if grouping.plain else grouping
        new = os.O_CREAT | os.O_TRUNC if state is None else 0
        self.fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | new, 0o666)
        self._allocated = fstat(self.fd).st_size

    def allocate(self, end: int) -> None:
        """Reserve space up to the offset `end`, and for more to come; `finish` truncates."""
        if end > self._allocated:
            begin, self._allocated = self._allocated, end + min(end, AHEAD)
            preallocate(self.fd, begin, self._allocated - begin)

    def sync(self) -> None:
        """Make all that has been written durable."""
        sync(self.fd, data=True)

    @override
    def start_sync(self) -> None:
        start_sync(self.fd)

    def close(self) -> None:
        """Close the file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    def sum_of(self, group: int, begin: int, end: int) -> int | None:
        """Return the sum of a group, from its begin to its end, if this process wrote all of it."""
        return self.sums.of(group, begin, end)

    @abstractmethod
    def group_ranges(self, edges: Ints) -> tuple[Ints, Ints]:
        """Return the offsets at which groups begin and end in the file: int64, ``(groups,)`` each.

        `edges` are the samples between them. Raises `FormatError` if the file was changed.
        """

    def groups(self) -> Groups | None:
        """Return the ranges of the groups with their checksums, None if there are none.

        What an earlier run has written is read back for its sums.
        """
        if self.grouping is None:
            return None
        begins, ends = self.group_ranges(self.grouping.edges)
        return stored_groups(
            lambda _: self.path, self.grouping, begins, ends, self.sum_of, self.inside
        )


def stored_groups(
    path_of: Callable[[int], Path],
    grouping: Grouping,
    begins: Ints,
    ends: Ints,
    sum_of: Callable[[int, int, int], int | None],
    inside: str = "",
    files: int | None = None,
) -> Groups:
    """Return ranges and checksums of groups; those that `sum_of` lacks are read from the file.

    `path_of` gives the file of a group; `inside` is its path below that of the dataset, and `files`
    are groups per file: see `model.Groups`.
    """

    def one(group: int, begin: int, end: int) -> int:
        known = sum_of(group, begin, end)
        if known is not None:
            return known
        with closing(open_file(path_of(group))) as file:
            return read_crc32c(file, begin, end)

    ranges = (range(grouping.count), begins.tolist(), ends.tolist())
    with ThreadPoolExecutor(THREADS) as pool:
        sums = np.fromiter(pool.map(one, *ranges), np.int64, grouping.count)
    return Groups(
        max(1, grouping.samples),
        Blocks(Explicit(begins), Explicit(ends - begins), inside),
        Explicit(sums),
        None if grouping.even else Explicit(grouping.edges[:-1].copy()),
        files,
    )
