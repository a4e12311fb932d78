"""Records of an LMDB in the order of their keys, by cursor or by ``pread``, into given memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.core.storage import as_bytes, pread_into
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import WriteOptions
from dsprep.formats.lmdb import data_file
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.sidecar.sidecar import Sidecar

NEAR = 256 << 10
"""Bytes between two records that are read along, such as pages of the tree."""

Memory: TypeAlias = Callable[[int], Bytes]
"""Gives memory of at least that many bytes."""

Turn: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Entered while data are read."""


class Records(Protocol):
    """What a root reads.

    The memory that is filled begins with two rows of int64, one number for each record: where its
    value begins, counted from the beginning of the memory, and its bytes; see `table`.
    """

    def read(self, first: int, stop: int, memory: Memory, turn: Turn) -> None:
        """Read the records ``first <= i < stop``."""

    def close(self) -> None:
        """Let the file go."""


class Offsets(Protocol):
    """What gives the offsets of records in the file."""

    def of(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """Return offsets and lengths of the values of some records."""

    def close(self) -> None:
        """Let the file go."""


def table(memory: Bytes, count: int) -> tuple[Ints, Ints]:
    """Return where the values of `count` records begin in memory, and their bytes."""
    rows = memory[: 16 * count].view(np.int64).reshape(2, count)
    return rows[0], rows[1]


class Cursor:
    """Values copied out of the mapping by a cursor of py-lmdb: page faults bring them in.

    Parameters
    ----------
    path
        The environment.
    samples
        Its records.
    jumps
        Whether it goes to a record by its key, not record by record.
    """

    def __init__(self, path: Path, samples: int, jumps: bool) -> None:
        import lmdb

        self._path, self._jumps = path, jumps
        self._keys = plan_keys(WriteOptions().key_format, samples)
        self._env: Any = lmdb.open(str(path), readonly=True, lock=False, subdir=path.is_dir())
        self._transaction = self._env.begin(buffers=True)
        self._cursor = self._transaction.cursor()
        self._at: int | None = None  # the record that the cursor is at

    def values(self, first: int, stop: int) -> list[memoryview]:
        """Return the values of some records in the mapping; nothing is copied."""
        cursor = self._cursor
        if self._jumps or self._at is None or self._at > first:
            there = cursor.set_key(self._keys.one(first)) if self._jumps else cursor.first()
            self._found(there, first)
            self._at = first if self._jumps else 0
        for _ in range(self._at, first):
            self._found(cursor.next(), first)
        out = []
        for i in range(first, stop):
            if i > first:
                self._found(cursor.next(), i)
            out.append(cursor.value())
        self._at = stop - 1
        return out

    def _found(self, there: bool, record: int) -> None:
        if not there:
            raise FormatError(f"there is no record {record}", where=self._path)

    def read(self, first: int, stop: int, memory: Memory, turn: Turn) -> None:
        """Copy the values of some records; see `Records`."""
        with turn():
            values = self.values(first, stop)
            lengths = np.array([len(v) for v in values], np.int64)
            head = 16 * len(values)
            out = memory(head + int(lengths.sum()))
            starts, sizes = table(out, len(values))
            starts[:], sizes[:] = head + np.cumsum(lengths) - lengths, lengths
            view = as_bytes(out)
            for value, at, size in zip(values, starts.tolist(), lengths.tolist(), strict=True):
                view[at : at + size] = value

    def close(self) -> None:
        """Unmap the file."""
        if self._env is not None:
            self._cursor.close()
            self._transaction.abort()
            self._env.close()
        self._env = None


class Seen:
    """The offsets at which a cursor finds values: their addresses, less that of the mapping."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._base: int | None = None

    def of(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """Return the offsets of some records; their pages of the tree are touched."""
        values = self._cursor.values(first, stop)
        lengths = np.array([len(v) for v in values], np.int64)
        addresses = [np.frombuffer(v, np.uint8).ctypes.data if len(v) else 0 for v in values]
        if self._base is None and any(addresses):
            self._base = _mapped_at(next(filter(None, addresses)))
        return np.where(lengths > 0, np.array(addresses, np.int64) - (self._base or 0), 0), lengths

    def close(self) -> None:
        """Unmap the file."""
        self._cursor.close()


def _mapped_at(address: int) -> int:
    """Return the address of byte 0 of the file whose mapping holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_ = line.split()
        low, high = (int(word, 16) for word in span.split("-"))
        if low <= address < high:
            return low - int(offset, 16)
    raise UsageError("the system does not tell where the file is mapped")


class Computed:
    """The offsets that the sidecar's law gives; the file is not touched."""

    def __init__(self, path: Path) -> None:
        self._sidecar = Sidecar.open(path)
        files = self._sidecar.content.files
        records = self._sidecar.layout(0).records if len(files) == 1 else None
        if records is None:
            raise UsageError("this is not one LMDB with a sample per record", where=path)
        self._records = records

    def of(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """Return the offsets of some records."""
        blocks, order = self._records.blocks, self._records.order
        if order is None:
            return blocks.offsets.span(first, stop), blocks.lengths.span(first, stop)
        chosen = order.span(first, stop)
        return blocks.offsets.at(chosen), blocks.lengths.at(chosen)

    def close(self) -> None:
        """Forget the sidecar."""
        self._sidecar.close()


class Explicit:
    """Values by ``pread`` at their offsets: records near each other by one call.

    Parameters
    ----------
    path
        The environment.
    offsets
        Where records are stored.
    transfer_size
        Bytes of one call at most.
    """

    def __init__(self, path: Path, offsets: Offsets, transfer_size: int | None) -> None:
        self._path, self._offsets, self._transfer = data_file(path), offsets, transfer_size
        self._fd: int | None = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, first: int, stop: int, memory: Memory, turn: Turn) -> None:
        """Read some records; see `Records`."""
        assert self._fd is not None, "open comes first"
        offsets, lengths = self._offsets.of(first, stop)
        starts, ranges = _joined(offsets, lengths)
        done = 16 * (stop - first)
        out = memory(done + sum(b - a for a, b in ranges))
        at, sizes = table(out, stop - first)
        at[:], sizes[:] = starts + done, lengths
        with turn():
            for low, high in ranges:
                step = self._transfer or max(1, high - low)
                for a in range(low, high, step):
                    size = min(step, high - a)
                    pread_into(self._fd, out[done : done + size], a, self._path)
                    done += size

    def close(self) -> None:
        """Close the file."""
        self._offsets.close()
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def _joined(offsets: Ints, lengths: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Return ranges of a file that hold some records, and where each begins among their bytes."""
    if not len(offsets):
        return offsets, []
    order = np.argsort(offsets, kind="stable")
    low, size = offsets[order], lengths[order]
    reach = np.maximum.accumulate(low + size)
    new = np.flatnonzero(low[1:] - reach[:-1] > NEAR) + 1
    edges = np.concatenate([[0], new, [len(low)]])
    begins, ends = low[edges[:-1]], reach[edges[1:] - 1]
    before = np.cumsum(ends - begins) - (ends - begins)
    which = np.repeat(np.arange(len(begins)), np.diff(edges))
    starts = np.empty_like(offsets)
    starts[order] = before[which] + low - begins[which]
    return starts, list(zip(begins.tolist(), ends.tolist(), strict=True))
