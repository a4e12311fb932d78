"""Samples on disk between the function that makes them and the output: parts, read as one source.

A part has the samples of the items ``START <= i < STOP``. It is a directory ``part-START-STOP``,
which gets this name when it is complete:

``data``
    Blocks of samples, back to back; see `dsprep.writing.samples.spool`.
``part.json``
    `Part`.

Numbers are in the machine's own byte order: the files are of use only to a rerun on such a machine.
The samples of the output are written from these; where parts begin, it does not show.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Ints, Schema, new_array
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError
from dsprep.formats.base import Opening
from dsprep.sidecar.spec import read_record
from dsprep.storage.checksums import crc32c
from dsprep.storage.local import LocalFile
from dsprep.writing.samples.spool import BlockSource, unpack

LISTED = 1000
"""Failed items that are kept with their reasons, at most; of further ones only the number."""

_NAME = re.compile(r"part-(\d+)-(\d+)")


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
    """Some consecutive items that are done.

    Attributes
    ----------
    start, stop
        The items, half-open.
    blocks
        Of each block the samples, where it begins, its bytes and its CRC-32C.
    schema
        The fields of the samples, as JSON; None if there is none.
    none
        Items of which nothing was to be kept.
    failures
        Items that failed.
    failed
        The first `LISTED` of them.
    """

    start: int
    stop: int
    blocks: Sequence[tuple[int, int, int, int]]
    schema: list[dict[str, Any]] | None
    none: int
    failures: int
    failed: tuple[Failed, ...] = ()

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(block[0] for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return sum(block[2] for block in self.blocks)


def part_name(start: int, stop: int) -> str:
    """Return the name of the directory of a part."""
    return f"part-{start}-{stop}"


def part_paths(directory: Path) -> list[tuple[int, int, Path]]:
    """Return the first and the last item + 1 of the parts in a directory, in order, by name."""
    paths = directory.iterdir() if directory.is_dir() else ()
    matches = [(m, path) for path in paths if (m := _NAME.fullmatch(path.name))]
    return sorted((int(m[1]), int(m[2]), path) for m, path in matches)


def read_part(path: Path) -> Part:
    """Return what a part has; `FormatError` if its files are not what was written."""
    try:
        content = read_record(path / "part.json")
        failed = tuple(Failed(int(n), str(i), str(e)) for n, i, e in content.pop("failed"))
        part = Part(**content, failed=failed)
        if (path / "data").stat().st_size == part.nbytes:
            return part
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    raise _damaged(path)


def _damaged(path: Path) -> FormatError:
    with suppress(FileNotFoundError):
        (path / "part.json").unlink()
    fix = "call it again with resume=True: the function is called again for these items"
    return FormatError("a temporary file is damaged", where=path, fix=fix)


class PartsSource(BlockSource):
    """The samples of all parts, in the order of the items.

    Parameters
    ----------
    directory, schema
        Where the parts are, and their fields.
    parts
        Without gaps between them.
    """

    version = "samples of items"
    repeatable = True

    def __init__(self, directory: Path, schema: Schema, parts: Sequence[Part]) -> None:
        self.path, self.schema = directory, schema
        self._parts = [part for part in parts if part.samples]
        self._starts = np.cumsum([0, *(part.samples for part in self._parts)])
        rows = [(i, *block) for i, part in enumerate(self._parts) for block in part.blocks]
        self._blocks = np.array(rows, np.int64).reshape(-1, 5)
        self.firsts = offsets_of(self._blocks[:, 1]).tolist()
        self._ragged = [f for f in schema if f.ragged]

    @override
    def block(self, number: int, some: slice, arena: Arena | None) -> tuple[Batch, slice]:
        _, count, _, nbytes, crc = self._blocks[number].tolist()
        data = new_array(arena, "parts.block", (nbytes,), np.dtype(np.uint8))
        path = self._read(number, data)
        if crc32c(data) != crc:
            raise _damaged(path)
        return unpack(self.schema, data, count), some

    def _read(self, number: int, out: Array, skipped: int = 0) -> Path:
        """Fill an array with the bytes of a block behind the first ones; return its part."""
        i, _, begin, _, _ = self._blocks[number].tolist()
        path = self.path / part_name(self._parts[i].start, self._parts[i].stop)
        with closing(LocalFile(path / "data")) as file:
            file.pread_into(out, begin + skipped)
        return path

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints:
        number, parts = self._ragged.index(self.schema[name]), [np.empty(0, np.int64)]
        for i, some in self.within(start, stop):
            rows = np.empty(self._blocks[i, 1], np.int64)
            self._read(i, rows, number * rows.nbytes)
            parts.append(rows[some])
        return np.concatenate(parts)

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Only the parts that hold some of the samples are opened.
        first = max(0, min(bisect_right(self._starts, start), len(self._parts)) - 1)
        last = bisect_right(self._starts, max(start, stop - 1))
        some = self._parts[first:last]
        opening = partial(PartsSource, self.path.absolute(), self.schema, some)
        return opening, int(self._starts[first])
