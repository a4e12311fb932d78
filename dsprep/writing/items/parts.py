"""Samples on disk between the function that makes them and the output: parts, read as one source.

A part has the samples of the items ``START <= i < STOP``. It is a directory ``part-START-STOP``,
which gets this name when it is complete:

``data``
    Blocks of samples, back to back. A block has all values of the first field, then of the second
    one and so on; of a ragged field the rows of all samples.
``lengths``
    int64: of each block, of each ragged field, the rows of each sample.
``part.json``
    What `Part` has, and of each block its samples, its bytes and their CRC-32C.

Numbers are in the machine's own byte order: the files are of use only to a rerun on such a machine.
The samples of the output are written from these; where parts begin, it does not show.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from typing_extensions import override

from dsprep.core.gather import Assembly
from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Ints,
    Ragged,
    Schema,
    empty_batch,
    new_array,
)
from dsprep.errors import FormatError
from dsprep.formats.base import Opening, Source
from dsprep.layout.describe import FieldStorage
from dsprep.sidecar.spec import read_record, write_record
from dsprep.storage.checksums import crc32c, pwrite_crc32c
from dsprep.storage.durable import close, sync
from dsprep.storage.nodes import wait_for
from dsprep.storage.ranges import close_quietly, pread_into, truncate
from dsprep.storage.trees import remove

BLOCK_NBYTES = 1 << 20
"""Payload of a block, about: what is read of one to get a sample."""

LISTED = 1000
"""How many failed items are kept with their reasons; of further ones only the number."""

_NAME = re.compile(r"part-(\d+)-(\d+)")


class LostError(FormatError):
    """Samples of some parts are not there any more; a rerun makes them again."""


class Failed(NamedTuple):
    """An item that was left out since the function, or its sample, was wrong.

    Attributes
    ----------
    number
        Of the item, counted from 0.
    item
        Its `repr`, cut to a bearable length.
    error
        The kind of the error, and what it said.
    """

    number: int
    item: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """What became of some consecutive items.

    Attributes
    ----------
    start, stop
        The items, half-open.
    samples, nbytes
        Samples, and the bytes of their values.
    none
        Items of which nothing was to be kept.
    failures
        Items that failed.
    failed
        The first `LISTED` of them.
    """

    start: int
    stop: int
    samples: int
    nbytes: int
    none: int
    failures: int
    failed: tuple[Failed, ...] = ()

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"part-{self.start}-{self.stop}"


class _Block(NamedTuple):
    """Samples of a block, their bytes, and the CRC-32C of their lengths and values."""

    samples: int
    nbytes: int
    crc32c: int


class PartWriter:
    """Writes the samples of a part into a directory; it is complete when that is renamed.

    Parameters
    ----------
    directory
        An empty directory.
    schema
        The samples' fields.
    """

    def __init__(self, directory: Path, schema: Schema) -> None:
        self._directory = directory
        self._ragged = sum(f.ragged for f in schema)
        self._blocks: list[_Block] = []
        self._samples = self._end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        names = ("data", "lengths")
        self._files = [os.open(directory / name, flags, 0o666) for name in names]

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def append(self, batch: Batch) -> None:
        """Write samples, which have the fields of the schema in its order, as a block."""
        samples = len(next(iter(batch.values())))
        lengths, values = list[Array](), list[Array]()
        for column in batch.values():
            if isinstance(column, Ragged):
                lengths.append(np.ascontiguousarray(column.lengths, np.int64))
                column = column.values
            values.append(np.ascontiguousarray(column))
        data, tables = self._files
        crc = pwrite_crc32c(tables, lengths, 8 * self._ragged * self._samples)
        crc = pwrite_crc32c(data, values, self._end, crc)
        nbytes = sum(int(v.nbytes) for v in values)
        self._blocks.append(_Block(samples, nbytes, crc))
        self._samples, self._end = self._samples + samples, self._end + nbytes

    def take_back(self, blocks: int) -> None:
        """Leave only so many blocks, the first ones."""
        self._samples -= sum(block.samples for block in self._blocks[blocks:])
        self._end -= sum(block.nbytes for block in self._blocks[blocks:])
        del self._blocks[blocks:]

    def finish(self, part: Part, durable: bool) -> Part:
        """Complete the files, and record what the part has; return that."""
        data, tables = self._files
        part = replace(part, samples=self._samples, nbytes=self._end)
        truncate(data, self._end)
        truncate(tables, 8 * self._ragged * part.samples)
        for fd in self._files if durable else ():
            sync(fd, data=True)
        self.close()
        content = {**asdict(part), "blocks": self._blocks}
        write_record(content, self._directory / "part.json", durable=durable)
        return part

    def close(self) -> None:
        """Close the files."""
        files, self._files = self._files, []
        close(*files)


def parts_in(directory: Path, released: bool) -> Iterator[Part]:
    """Yield the parts that are there, in order; what is not whole is removed.

    `released`: the data of some are in the output, and were removed here.
    """
    matches = [(m, p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))]
    for _, path in sorted(matches, key=lambda pair: int(pair[0][1])):
        part = read_part(path, released)
        if part is None:
            remove(path)
        else:
            yield part


def count_items(directory: Path) -> int:
    """Return of how many items there are parts, by their names."""
    names = directory.iterdir() if directory.is_dir() else ()
    return sum(int(m[2]) - int(m[1]) for p in names if (m := _NAME.fullmatch(p.name)))


def read_part(path: Path, released: bool = False) -> Part | None:
    """Return what a part has; None if its files are not what was written; see `parts_in`."""
    try:
        content = read_record(path / "part.json")
        del content["blocks"]
        failed = tuple(Failed(int(n), str(i), str(e)) for n, i, e in content.pop("failed"))
        part = Part(**content, failed=failed)
        there = (path / "data").stat().st_size == part.nbytes
    except FileNotFoundError:
        there = (path / "part.json").exists() and released
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return part if there and part.name == path.name else None


class _Table(NamedTuple):
    """The blocks of a part: int64, where the samples and bytes of each begin, and their CRCs."""

    samples: Ints
    offsets: Ints
    crc32c: Ints

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the blocks of the part in the directory `path`."""
        rows = read_record(path / "part.json")["blocks"]
        blocks = np.array(rows, np.int64).reshape(-1, 3)
        edges = np.zeros((2, len(blocks) + 1), np.int64)
        np.cumsum(blocks[:, :2].T, axis=1, out=edges[:, 1:])
        return cls(edges[0], edges[1], blocks[:, 2])


@dataclass(frozen=True, kw_only=True)
class PartsOpening(Opening):
    """The parts in a directory that another process has completed on `node`."""

    directory: Path
    schema: Schema
    parts: tuple[Part, ...]
    node: str

    def open(self) -> Source:
        """Open the parts."""
        for part in self.parts:
            wait_for(self.directory / part.name / "data", self.node)
        return PartsSource(self.directory, self.schema, self.parts, self.node)


class PartsSource(Source):
    """The samples of all parts, in the order of the items.

    Parameters
    ----------
    directory, schema
        Where the parts are, and their fields.
    parts
        Without gaps between them.
    node
        Where they were seen complete; see `storage.node`.
    """

    version = "samples of items"

    def __init__(
        self, directory: Path, schema: Schema, parts: Sequence[Part], node: str = ""
    ) -> None:
        self.path, self.schema, self._node = directory, schema, node
        self._parts = [part for part in parts if part.samples]
        self._starts = np.cumsum([0, *(part.samples for part in self._parts)])
        self._ragged = [f for f in schema if f.ragged]
        self._table = lru_cache(maxsize=16)(_Table.read)
        self._released = 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    def files(self) -> list[Path]:
        """Return nothing: a program made the samples."""
        return []

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """Yield the directories that hold samples of ``start .. stop``, and which, half-open."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = map(int, self._starts[index : index + 2])
            yield self.path / self._parts[index].name, start - base, min(stop, end) - base
            start, index = min(stop, end), index + 1

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        assembly = Assembly(self.schema, stop - start, arena, "parts")
        at = 0
        for path, first, last in self._ranges(start, stop):
            for batch in self._read_part(path, first, last, None if self._ragged else arena):
                assembly.put(at, batch)
                at += len(next(iter(batch.values())))
        return assembly.batch()

    def _blocks(self, path: Path, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks of a part that hold some samples, and which samples each has."""
        samples = self._table(path).samples
        for block in range(bisect_right(samples, first) - 1, len(samples) - 1):
            begin, end = map(int, samples[block : block + 2])
            if begin >= last:
                return
            yield block, begin, end

    def _read_part(self, path: Path, first: int, last: int, arena: Arena | None) -> Iterator[Batch]:
        """Yield samples of a part, block by block; those before are lost with the next ones."""
        table = self._table(path)
        try:
            fds = [os.open(path / n, os.O_RDONLY | os.O_CLOEXEC) for n in ("data", "lengths")]
        except FileNotFoundError as error:
            raise self._lost(path) from error
        try:
            for block, begin, end in self._blocks(path, first, last):
                batch = self._read_block(path, fds, table, block, arena)
                low, high = max(first, begin) - begin, min(last, end) - begin
                yield {name: column[low:high] for name, column in batch.items()}
        finally:
            for fd in fds:
                close_quietly(fd)

    def _read_block(
        self, path: Path, fds: Sequence[int], table: _Table, block: int, arena: Arena | None
    ) -> Batch:
        begin, end = map(int, table.samples[block : block + 2])
        offset, stop = map(int, table.offsets[block : block + 2])
        values = new_array(arena, "parts.block", (stop - offset,), np.dtype(np.uint8))
        pread_into(fds[0], values, offset, path)
        rows = self._read_rows(fds[1], begin, end, path)
        if crc32c(values, crc32c(rows)) != int(table.crc32c[block]):
            raise self._damaged(path)
        lengths = dict(zip((f.name for f in self._ragged), rows, strict=True))
        return _columns(self.schema, values, end - begin, lengths)

    def _read_rows(self, fd: int, begin: int, end: int, path: Path) -> Ints:
        """Return the rows of some samples of one block: int64, shape ``(ragged fields, n)``."""
        rows = np.empty((len(self._ragged), end - begin), np.int64)
        pread_into(fd, rows, 8 * len(self._ragged) * begin, path)
        return rows

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints:
        rows: Ints = self._rows(start, stop)[self._ragged.index(self.schema[name])]
        return rows

    def _rows(self, start: int, stop: int) -> Ints:
        """Return the rows of samples: int64, shape ``(ragged fields, stop - start)``."""
        out = np.empty((len(self._ragged), stop - start), np.int64)
        at = 0
        for path, first, last in self._ranges(start, stop):
            fd = os.open(path / "lengths", os.O_RDONLY | os.O_CLOEXEC)
            try:
                for _, begin, end in self._blocks(path, first, last):
                    low, high = max(first, begin), min(last, end)
                    rows = self._read_rows(fd, begin, end, path)
                    out[:, at : at + high - low] = rows[:, low - begin : high - begin]
                    at += high - low
            finally:
                close_quietly(fd)
        return out

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if not self._ragged:
            return super().sizes(start, stop)
        out = np.full(stop - start, self.schema.fixed_nbytes, np.int64)
        for f, rows in zip(self._ragged, self._rows(start, stop), strict=True):
            out += rows * f.row_nbytes
        return out

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Only the parts that hold some of the samples are opened.
        first = max(0, min(bisect_right(self._starts, start), len(self._parts)) - 1)
        last = bisect_right(self._starts, max(start, stop - 1))
        opening = PartsOpening(
            directory=self.path.absolute(),
            schema=self.schema,
            parts=tuple(self._parts[first:last]),
            node=self._node,
        )
        return opening, int(self._starts[first])

    def release(self, first: int) -> None:
        """Remove the data of parts whose samples are all before this one: the output has them."""
        while self._released < len(self._parts) and self._starts[self._released + 1] <= first:
            remove(self.path / self._parts[self._released].name / "data")
            self._released += 1

    def need(self, first: int) -> None:
        """Raise `LostError` if some of the samples from this one on were released."""
        for part, end in zip(self._parts, self._starts[1:], strict=True):
            if end > first and not (self.path / part.name / "data").exists():
                raise self._lost(self.path / part.name)

    def _lost(self, path: Path) -> LostError:
        for part in self._parts:  # all that a rerun would not find, so that it makes them again
            if not (self.path / part.name / "data").exists():
                remove(self.path / part.name)
        return _again("samples are needed that were removed when the output had them", path)

    def _damaged(self, path: Path) -> LostError:
        with suppress(FileNotFoundError):
            (path / "part.json").unlink()
        return _again("a temporary file is damaged", path)

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing: they are temporary files."""
        return {}


def _again(detail: str, path: Path) -> LostError:
    fix = "call it again with resume=True: the function is called again for these items"
    return LostError(detail, where=path, fix=fix)


def _columns(schema: Schema, values: Array, count: int, rows: Mapping[str, Ints]) -> Batch:
    """Return the columns of a block, which refer to its bytes."""
    batch: Batch = {}
    at = 0
    for f in schema:
        total = int(rows[f.name].sum()) if f.ragged else count
        stop = at + total * f.row_nbytes
        column: Any = values[at:stop].view(f.dtype).reshape(total, *f.inner)
        batch[f.name] = Ragged.from_lengths(column, rows[f.name], f.kind) if f.ragged else column
        at = stop
    return batch
