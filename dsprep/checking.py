"""All that is wrong with a sidecar, or with the data that it describes, told at once.

The cheap check compares what is known of each file, parses every layout and computes every place:
none may lie outside its file. The full one opens the files by their own library, finds every place
again, compares all of them with those that the laws give, and reads: every checksum that there is,
and values, bit for bit. What goes wrong on the way, the system's errors too, is one more problem.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep import formats, identity, sidecar
from dsprep.dataset import find_files
from dsprep.errors import UsageError
from dsprep.formats.base import OpenOptions
from dsprep.laws import Affine
from dsprep.layout.codec import file_path
from dsprep.layout.extents import locate, rows_of
from dsprep.layout.model import Column, FileLayout, Records
from dsprep.located import Sidecar
from dsprep.problems import CAUGHT, Problem, problem
from dsprep.provenance import THREADS, dataset_of
from dsprep.reading.columns import ColumnReader
from dsprep.reading.files import File
from dsprep.reading.records import RecordReader
from dsprep.rechecking import against_files
from dsprep.schema import Ints, Schema
from dsprep.sidecar import Content, FileEntry

Progress: TypeAlias = Callable[[int, int], None]

ONLY_TOUCHED = (
    "its time stamp alone changed: its size, its format's own marks and the sampled blocks are as "
    "recorded, and --check full compares the rest"
)

SLICE = 1 << 18
"""Samples whose places are computed at once."""
MOST_PIECES = 1 << 24
"""Pieces of one sample, beyond which it is not looked at."""
OFTEN = 1000
"""Samples that may share a row."""


def check(
    paths: str | Path | Sequence[str | Path] | Sidecar,
    *,
    full: bool = False,
    at: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Problem]:
    """Return all problems of a sidecar and its data; none if both are as they should be.

    Parameters
    ----------
    paths
        The dataset, its sidecar, or an opened sidecar.
    full
        Compare every place with what the format's own library finds, and every checksum.
    at
        The sidecar, if it is not beside the dataset.
    progress
        Called with (done, in all), in files or in samples.

    Raises
    ------
    UsageError
        If there is no sidecar.
    """
    if isinstance(paths, Sidecar):
        path, dataset, asked = paths.path, paths.dataset, [paths.dataset]
    else:
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        path, dataset, asked = _named(given, None if at is None else Path(at))
    content, problems = _content(path)
    if content is None:
        return [*problems, *_salvaged(path, dataset)]
    problems += _unlisted(content, dataset, asked)
    problems += _identities(content.files, content.format, dataset, progress)
    opened, more = _opened(content, dataset, path)
    problems += more
    if full:
        problems += against_files(content, opened, dataset, path, progress)
    if opened is not None:
        opened.close()
    return list(dict.fromkeys(problems))


def _named(paths: Sequence[str | Path], at: Path | None) -> tuple[Path, Path, list[Path]]:
    """Return the sidecar, its dataset, and what of it is asked for."""
    first = Path(paths[0])
    asked = [Path(p) for p in paths]
    if len(paths) == 1 and first.name.endswith(sidecar.SUFFIX):
        dataset = first.with_name(first.name.removesuffix(sidecar.SUFFIX))
        return _there(first), dataset, [dataset]
    if len(paths) == 1 and (at is not None or sidecar.sidecar_path(first).is_file()):
        return _there(at or sidecar.sidecar_path(first)), first, asked
    files = [p.absolute() for p, _ in find_files(paths)[0]]
    dataset = dataset_of(files)
    path = at or sidecar.sidecar_path(dataset)
    above = sidecar.sidecar_path(dataset.parent)
    if at is None and len(files) == 1 and not path.is_file() and above.is_file():
        path, dataset = above, dataset.parent
    return _there(path), dataset, files


def _there(path: Path) -> Path:
    if not path.is_file():
        raise UsageError("there is no sidecar", where=path, fix="write one with dsprep provenance")
    return path


# --- the sidecar -----------------------------------------------------------------------------


def _content(path: Path) -> tuple[Content | None, list[Problem]]:
    try:
        content = sidecar.read(path)
    except CAUGHT as error:
        return None, [problem(error, path)]
    problems = []
    if content.format not in formats.FORMATS:
        known = ", ".join(formats.FORMATS)
        return None, [Problem(str(path), "it is of no known format", known, content.format)]
    try:
        OpenOptions.from_json(content.reading)
    except CAUGHT as error:
        problems.append(problem(error, path))
    said = json.loads(path.read_bytes()).get("samples")
    if said != content.samples:
        text = "it has another number of samples than its files"
        problems.append(Problem(str(path), text, content.samples, str(said)))
    return content, problems


def _salvaged(path: Path, dataset: Path) -> list[Problem]:
    """Return what else is wrong with a sidecar that cannot be read as a whole."""
    try:
        top = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError):
        return []
    if not isinstance(top, dict):
        return []
    missing = [k for k in ("format", "schema", "files", "lineage") if k not in top]
    problems = [Problem(str(path), f"it has no {key}") for key in missing]
    entries = top.get("files")
    good: list[FileEntry] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        try:
            good.append(FileEntry.from_json(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"file {number} of its list does not follow the specification"
            problems.append(Problem(str(path), text, None, f"{type(error).__name__}: {error}"))
    try:
        Schema.from_json(top.get("schema"))
    except (*CAUGHT, KeyError, TypeError, ValueError, AttributeError) as error:
        problems.append(Problem(str(path), "its schema is damaged", None, str(error)[:200]))
    if top.get("format") in formats.FORMATS:
        problems += _identities(tuple(good), top["format"], dataset, None)
    return problems


def _opened(content: Content, dataset: Path, path: Path) -> tuple[Sidecar | None, list[Problem]]:
    """Return the sidecar if all of its layouts can be used, and what is wrong with them."""
    if not content.layouts:
        return None, []  # the samples have no offsets
    problems: list[Problem] = []
    opened = Sidecar(content, dataset, path)
    tried: dict[tuple[int, int, tuple[int | None, ...]], list[Problem]] = {}
    usable, first = True, 0
    for i, entry in enumerate(content.files):
        root = dataset / entry.path
        try:
            layout = opened.layout(i)
            key = entry.layout, entry.samples, _sizes(layout, root)
            if key not in tried:
                _prepare(layout, content.schema, root)
                tried[key] = list(outside(layout, content.schema, root))
            for found in tried[key]:
                sample = None if found.sample is None else found.sample + first
                problems.append(replace(found, file=str(root), sample=sample))
        except CAUGHT as error:
            usable = False
            problems.append(problem(error, path))
        first += entry.samples
    return (opened if usable else None), list(dict.fromkeys(problems))


def _sizes(layout: FileLayout, root: Path) -> tuple[int | None, ...]:
    """Return the sizes of the files on which the check of a layout's places depends."""
    blocks = [layout.records.blocks] if layout.records is not None else []
    grids = [c.grid for c in layout.columns.values() if c.grid is not None]
    if any(g.files is not None for g in grids):
        return (hash(root),)
    names = {b.path for b in (*blocks, *(g.blocks for g in grids))}
    return tuple(_nbytes(root / n if n else root) for n in sorted(names))


def _nbytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _prepare(layout: FileLayout, schema: Schema, root: Path) -> None:
    """Raise if a frame, recipe or filter is unknown or has wrong parameters."""
    if layout.records is not None:
        RecordReader(layout.records, schema)
    for name, column in layout.columns.items():
        ColumnReader(column, schema[name], lambda path: File(root / path if path else root))


# --- places ----------------------------------------------------------------------------------


def outside(layout: FileLayout, schema: Schema, root: Path) -> Iterator[Problem]:
    """Yield the problems of places that the laws give: per field the first, and how many.

    Parameters
    ----------
    root
        The file or store.
    """
    known: dict[str, int | None] = {}

    def size(path: str) -> int | None:
        if path not in known:
            if len(known) > 1 << 16:
                known.clear()
            known[path] = _nbytes(root / path if path else root)
        return known[path]

    done = False
    for name in schema.names:
        if layout.records is not None and name in layout.records.parts:
            if not done:
                yield from _records_outside(layout.records, layout.count, size)
            done = True
        elif (column := layout.columns.get(name)) is not None and column.grid is not None:
            yield from _column_outside(layout, name, column, size)


def _slices(count: int, linear: bool) -> Iterator[Ints]:
    """Yield all indices in slices; where laws are linear, their ends tell all."""
    if linear and count > 2:
        yield np.array([0, count - 1], np.int64)
        return
    for start in range(0, count, SLICE):
        yield np.arange(start, min(start + SLICE, count), dtype=np.int64)


class _Tally:
    """Counts what is wrong and keeps the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, None
        self.number = -1

    first: tuple[int, int] | None

    def add(self, bad: Any, numbers: Ints, offset: Ints, length: Ints) -> None:
        k = int(bad.sum())
        if k and self.first is None:
            i = int(bad.argmax())
            self.number, self.first = int(numbers[i]), (int(offset[i]), int(length[i]))
        self.count += k

    def problem(self, what: str, nbytes: int | None, name: str | None) -> Iterator[Problem]:
        if self.first is None:
            return
        offset, length = self.first
        more = f", and {self.count - 1:,} more" if self.count > 1 else ""
        expected = "a file" if nbytes is None else f"within {nbytes:,} bytes"
        found = f"{length:,} bytes at {offset:,}"
        yield Problem("", what + more, expected, found, name, self.number)


def _beyond(offset: Ints, length: Ints, nbytes: int | None) -> Any:
    size = -1 if nbytes is None else nbytes
    return (offset < 0) | (length < 0) | (length > size) | (offset > size - length)


def _records_outside(
    records: Records, count: int, size: Callable[[str], int | None]
) -> Iterator[Problem]:
    blocks, order, nbytes = records.blocks, records.order, size(records.blocks.path)
    linear = all(
        law is None or isinstance(law, Affine) for law in (blocks.offsets, blocks.lengths, order)
    )
    far, short = _Tally(), _Tally()
    least = max(
        (p.at + (p.nbytes or 0) for p in records.parts.values() if p.at is not None), default=0
    )
    for indices in _slices(count, linear):
        numbers = indices if order is None else order.at(indices)
        wrong = (numbers < 0) | (numbers >= blocks.count)
        if wrong.any():
            i = int(wrong.argmax())
            text = "the sidecar gives a sample a record that does not exist"
            found = int(numbers[i])
            yield Problem("", text, f"below {blocks.count:,}", found, None, int(indices[i]))
            return
        offset, length = blocks.offsets.at(numbers), blocks.lengths.at(numbers)
        far.add(_beyond(offset, length, nbytes), indices, offset, length)
        short.add(length < least, indices, offset, length)
    yield from far.problem("the sidecar gives a place that is not in the file", nbytes, None)
    yield from short.problem("a record is too short for its fields", least, None)


def _column_outside(
    layout: FileLayout, name: str, column: Column, size: Callable[[str], int | None]
) -> Iterator[Problem]:
    grid = column.grid
    assert grid is not None
    tally = _Tally()
    limit: int | None = None
    seen = 0
    one = grid.files is None and grid.block_count == 1 and grid.plain
    linear = column.first is None and one
    for indices in _slices(layout.count, linear):
        first, count = rows_of(column, indices)
        rows = grid.shape[0]
        bad = (first < 0) | (count < 0) | (count > rows) | (first > rows - count)
        seen += int(count.astype(float).sum()) if not bad.any() else 0
        if bad.any() or seen > OFTEN * rows:
            i = int(bad.argmax())
            text = "the sidecar gives samples rows that do not exist, or overlap"
            found = f"{count[i]:,} rows from {first[i]:,} on"
            yield Problem("", text, f"within {rows:,} rows", found, name, int(indices[i]))
            return
        side = int(np.prod(np.array(grid.chunks[1:], float)))
        pieces = (count // grid.chunk[0] + 2).astype(float) * side
        if float(pieces.max(initial=0)) > MOST_PIECES:
            yield Problem("", "a sample has impossibly many chunks", field=name)
            return
        parts = max(1, int(pieces.sum() // (SLICE * 4)) + 1)
        for some in np.array_split(indices, min(parts, len(indices))):
            found_ = locate(layout, name, some)
            stored = (found_.offset >= 0) & (found_.length > 0)
            if grid.fill is None:
                stored[:] = True
            offset, length = found_.offset[stored], found_.length[stored]
            numbers = some[found_.request[stored]]
            for path, which in _by_path(found_.template, found_.place, stored):
                nbytes = size(path)
                if tally.first is None:
                    limit = nbytes
                where = offset[which], length[which]
                tally.add(_beyond(*where, nbytes), numbers[which], *where)
    yield from tally.problem("the sidecar gives a place that is not in the file", limit, name)


def _by_path(template: str, place: Ints | None, stored: Any) -> Iterator[tuple[str, Any]]:
    """Yield each file with which of the stored ranges it holds."""
    if place is None:
        yield template, slice(None)
        return
    kept = place[:, stored]
    if not kept.shape[1]:
        return
    places, which = np.unique(kept, axis=1, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    edges = np.searchsorted(which.reshape(-1)[order], np.arange(places.shape[1] + 1))
    for k, spot in enumerate(places.T.tolist()):
        yield file_path(template, spot), order[edges[k] : edges[k + 1]]


# --- the files -------------------------------------------------------------------------------


def _unlisted(content: Content, dataset: Path, asked: Sequence[Path]) -> list[Problem]:
    """Return the files that are in the dataset and not in the sidecar."""
    try:
        found = [p.absolute() for p, _ in find_files(asked)[0]]
    except CAUGHT:
        return []  # what is missing is told of each file
    listed = {(dataset / f.path).absolute() for f in content.files}
    return [
        Problem(str(p), "it is in the dataset, and the sidecar does not list it")
        for p in found
        if p not in listed
    ]


def _identities(
    files: Sequence[FileEntry], format: str, dataset: Path, progress: Progress | None
) -> list[Problem]:
    """Return how the files differ from what is known of them."""
    done = 0

    def one(entry: FileEntry) -> list[Problem]:
        nonlocal done
        path = dataset / entry.path
        try:
            lines = _changes(path, format, entry)
        except CAUGHT as error:
            return [problem(error, path)]
        done += 1
        if progress is not None:
            progress(done, len(files))
        return [Problem(str(path), line) for line in lines]

    if len(files) < 2:
        return [p for f in files for p in one(f)]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [p for some in pool.map(one, files) for p in some]


def _changes(path: Path, format: str, entry: FileEntry) -> list[str]:
    """Return how a file changed, told apart from a time stamp that alone did."""
    lines = identity.differences(path, format, entry.identity)
    if len(lines) != 1 or "time stamp" not in lines[0]:
        return lines
    rest = identity.differences(path, format, replace(entry.identity, mtime_ns=None))
    if rest:
        return lines + rest
    return [ONLY_TOUCHED]
