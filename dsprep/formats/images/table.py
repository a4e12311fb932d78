"""Tables of labels: a row per image, and a column of which each value names one.

CSV (RFC 4180), also separated by semicolons or tabs; JSON lines as Hugging Face's imagefolder has
them: an object a line, whose ``file_name`` is the path of an image; or a list of names, one a line.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from dsprep.core.memory import free_memory
from dsprep.core.schema import Field, Ints
from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UsageError
from dsprep.formats.samples import listed
from dsprep.layout.laws import LARGEST, Affine, Explicit
from dsprep.layout.model import Given
from dsprep.layout.words import Words

MAX_NBYTES = 1 << 30
"""No table is larger."""

MAX_AXES = 8
"""Lists in lists of which the values are an array."""

MAX_LINE = 16 << 20
"""Bytes of the longest line, and of the longest row of several lines."""

OVERHEAD = 24
"""What a table takes in memory, in its own bytes, until it is read: a cell of 3 bytes takes 60."""

LINES = ".jsonl"
"""How the name of a table ends whose lines are JSON."""

FILE_NAME = "file_name"
"""The column of JSON lines that names files."""

_KEY_NAMES = frozenset(
    ["file_name", "filename", "file", "path", "filepath", "image", "image_id", "img", "id", "name"]
)
"""What columns are called that name files, where another one could as well."""

_INT = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FLOAT = re.compile(
    r"[+-]?((0|[1-9][0-9]{0,14})(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf|nan", re.I | re.A
)

_BEYOND = 1 << 63

_KEYS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: str(PurePosixPath(name).with_suffix("")) if name else name,
    lambda name: name.rpartition("/")[2],
    lambda name: PurePosixPath(name).stem,
)
"""How a table may name a file: by its path in the folder or its name, with or without suffix."""


@dataclass(frozen=True)
class Table:
    """What a table says.

    Attributes
    ----------
    files
        The numbers of the samples that it names, rising, int64.
    fields
        Its columns, but for the one that names the files: the field, and its values by file.
    notes
        What was left out and assumed, one clause each.
    """

    files: Ints
    fields: tuple[tuple[Field, Given], ...]
    notes: tuple[str, ...]

    def of(self, rows: Ints) -> Table:
        """Return what it says of some of its files, by their numbers here."""
        if len(rows) == len(self.files):
            return self
        some = [
            (f, replace(g, value_numbers=Explicit(g.value_numbers.at(rows))))
            for f, g in self.fields
        ]
        return Table(self.files[rows], tuple(some), self.notes)


@dataclass(frozen=True)
class _Rows:
    """The cells of a table: those of JSON lines are values, and `by` names their key column."""

    header: list[str]
    columns: list[list[Any]]
    by: str | None = None


def read_table(path: Path, root: str, names: Sequence[Sequence[str]], taken: set[str]) -> Table:
    """Return what the table at `path` says of samples.

    Parameters
    ----------
    root
        The name of their folder, which may come before the paths in the table.
    names
        What samples are called, in the order of their numbers: one way or several.
    taken
        Names of fields that columns cannot have.

    Raises
    ------
    FormatError
        If it is not a table with a header line and rows of one length, or a row names a file that
        is not there, or that another row names too.
    UsageError
        If several columns name files and do not agree, or a column has the name of another field.
    """
    rows = _read_lines(path) if path.name.lower().endswith(LINES) else _read_csv(path)
    rows, key, files = _key(path, rows, root, names)
    order = np.argsort(files, kind="stable")
    files = files[order]
    twice = np.flatnonzero(files[1:] == files[:-1])
    if len(twice):
        raise FormatError(
            "two rows name the same file",
            where=path,
            found=names[0][int(files[twice[0]])],
            fix="a sample has one row: join those of each file; or --labels none reads no labels",
        )
    fields, unnamed, texts = [], 0, list[str]()
    for k, name in enumerate(rows.header):
        if k == key:
            continue
        if not name:
            unnamed += 1
            continue
        cells = [rows.columns[k][i] for i in order.tolist()]
        if rows.by is None:
            fields.append(_column(name, cells, path))
        else:
            fields.append(_values(name, cells, path, texts))
    for f, _ in fields:
        if f.name in taken:
            raise UsageError(
                f"a column has the name of another field: {f.name}",
                where=path,
                fix="give that column another name",
            )
    by = rows.header[key] or key
    notes = [f"labels of {path.name}, in which the column {by} names the files"]
    if unnamed:
        notes.append(f"left out columns of {path.name} without a name: {unnamed}")
    if texts:
        several = "values are" if len(texts) == 1 else "their values are"
        notes.append(f"{listed(texts)} of {path.name}: {several} JSON as text")
    if len(files) < len(names[0]):
        without = np.setdiff1d(np.arange(len(names[0])), files).tolist()
        shown = listed([names[0][i] for i in without[:4]])
        more = f" and {len(without) - 4:,} more" if len(without) > 4 else ""
        notes.append(f"left out {shown}{more}: not in {path.name}")
    return Table(files, tuple(fields), tuple(notes))


# --- files -------------------------------------------------------------------------------------


def _check_size(path: Path) -> None:
    nbytes, room = path.stat().st_size, free_memory() // OVERHEAD
    if nbytes > min(MAX_NBYTES, room):
        raise FormatError(
            "the table is too large" if nbytes > MAX_NBYTES else "the memory is too small for it",
            where=path,
            expected=f"at most {show_nbytes(min(MAX_NBYTES, room))}",
            found=show_nbytes(nbytes),
            fix="leave out columns that are no labels, or --labels none",
        )


class _Text:
    """The lines of a text file, none of which is too long."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path, self.number = file, path, 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(MAX_LINE + 1):
            self.number += 1
            where = f"{self._path}, line {self.number}"
            if len(line) > MAX_LINE:
                raise FormatError(
                    "a line of the table is too long", where=where, expected=f"<= {MAX_LINE} bytes"
                )
            try:
                yield line.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise FormatError("the table is not UTF-8", where=where, found=error) from error


def _read_csv(path: Path) -> _Rows:
    """Return a table whose rows are of one length; there is at least one row, or one line."""
    _check_size(path)
    with path.open("rb") as file:
        lines = _Text(file, path)
        first = next(iter(lines), "")
        delimiter = max(",;\t", key=first.count)
        rows = _csv_rows(path, lines, first, delimiter)
        header = [name.strip() for name in next(rows, [])]
        columns: list[list[str]] = [[] for _ in header]
        for row in rows:
            for cells, cell in zip(columns, row, strict=True):
                cells.append(cell)
    if not header or (len(header) > 1 and not columns[0]):
        raise FormatError("the table has no rows", where=path, expected="a header line and rows")
    named = [name for name in header if name]
    if len(set(named)) < len(named):
        raise FormatError("two columns of the table have one name", where=path, found=header)
    return _Rows(header, columns)


def _csv_rows(path: Path, lines: _Text, first: str, delimiter: str) -> Iterator[list[str]]:
    used = length = 0

    def text() -> Iterator[str]:
        nonlocal used
        yield first
        for line in lines:
            used += len(line)
            if used > MAX_LINE:
                raise FormatError(
                    "a row of the table is too long",
                    where=f"{path}, line {lines.number}",
                    expected=f"<= {MAX_LINE} bytes",
                )
            yield line

    try:
        for row in csv.reader(text(), delimiter=delimiter, strict=True):
            used = 0
            if not row:
                continue
            length = length or len(row)
            if len(row) != length:
                raise FormatError(
                    "a row of the table has another number of cells",
                    where=f"{path}, line {lines.number}",
                    expected=length,
                    found=len(row),
                )
            yield row
    except csv.Error as error:
        raise FormatError(
            f"the table is damaged: {error}", where=f"{path}, line {lines.number}"
        ) from error


def _read_lines(path: Path) -> _Rows:
    """Return a table of JSON lines; a value that a line does not have is None."""
    _check_size(path)
    columns: dict[str, list[Any]] = {}
    count = 0
    with path.open("rb") as file:
        lines = _Text(file, path)
        for line in lines:
            if not line.strip():
                continue
            where = f"{path}, line {lines.number}"
            try:
                values = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                raise FormatError(
                    f"the line is not JSON: {error}", where=where, found=line[:80]
                ) from error
            if not isinstance(values, dict) or not isinstance(values.get(FILE_NAME), str):
                raise FormatError(
                    "the line names no file",
                    where=where,
                    expected=f'an object: {{"{FILE_NAME}": "0001.png", ...}}',
                    found=line.strip()[:80],
                )
            for name in (name for name in values if name not in columns):
                columns[name] = [None] * count
            for name, cells in columns.items():
                cells.append(values.get(name))
            count += 1
    if not count:
        raise FormatError("the table has no rows", where=path, expected="a JSON object a line")
    return _Rows([*columns], [*columns.values()], FILE_NAME)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        raise ValueError("two values have one name")
    return cells


# --- which column names the files --------------------------------------------------------------


def _key(
    path: Path, rows: _Rows, root: str, names: Sequence[Sequence[str]]
) -> tuple[_Rows, int, Ints]:
    """Return the table, which of its columns names the files, and the file of each row."""
    if rows.by is None and len(rows.header) == 1 and _is_list(rows.header[0], names):
        rows = _Rows([""], [[rows.header[0], *rows.columns[0]]])
    if not rows.columns[0]:
        raise FormatError("the table has no rows", where=path, expected="a header line and rows")
    columns = {
        k: cells for k, cells in enumerate(rows.columns) if rows.by in (None, rows.header[k])
    }
    best, missing = 0, ""
    for called in _ways(names):
        matches: dict[int, list[int]] = {}
        for k, cells in columns.items():
            files = [called.get(cell.removeprefix("./"), -1) for cell in cells]
            if root and files.count(-1) == len(files):
                files = [called.get(_below(cell, root), -1) for cell in cells]
            there = len(files) - files.count(-1)
            if there == len(files):
                matches[k] = files
            elif there > best:
                at = files.index(-1)
                best, missing = there, f"column {rows.header[k]}, row {at + 1}: {cells[at]!r}"
        if matches:
            k = _one_of(matches, rows.header, path)
            return rows, k, np.array(matches[k], np.int64)
    if {name for column in names for name in column} & set(rows.header):
        raise FormatError("the table has no header line", where=path, expected="names of columns")
    raise FormatError(
        "a row of the table names no file, or one of several"
        if best
        else "no column of the table names the files",
        where=path,
        expected="in one column, of every row, the path of a file in the folder or its name, with "
        "or without suffix",
        found=missing or ", ".join(rows.header),
        fix="leave rows of other files out of the table; or --labels none reads no labels",
    )


def _ways(names: Sequence[Sequence[str]]) -> Iterator[Mapping[str, int]]:
    """Yield how samples may be called: the number of each, or -1 where two are called the same."""
    for shorten in _KEYS:
        for column in names:
            numbers: dict[str, int] = {}
            for i, name in enumerate(column):
                called = shorten(name)
                numbers[called] = -1 if called in numbers else i
            yield numbers


def _is_list(first: str, names: Sequence[Sequence[str]]) -> bool:
    """Whether the first line of a file names a file, so that it has no header."""
    return any(called.get(first.removeprefix("./"), -1) >= 0 for called in _ways(names))


def _below(cell: str, root: str) -> str:
    """Return the part of a path that is below the folder called `root`, the last in it."""
    _, slash, after = f"/{cell}".rpartition(f"/{root}/")
    return after if slash else cell


def _one_of(matches: Mapping[int, list[int]], header: Sequence[str], path: Path) -> int:
    """Return the column that names the files, of those of which each cell is the name of one."""
    once = {k: files for k, files in matches.items() if len(set(files)) == len(files)} or matches
    first = next(iter(once))
    if all(files == once[first] for files in once.values()):
        return first
    named = [k for k in once if header[k].lower() in _KEY_NAMES]
    if len(named) == 1:
        return named[0]
    raise UsageError(
        "several columns of the table name files, and not the same ones",
        where=path,
        found=", ".join(header[k] for k in once),
        fix="leave all but one of them out, or call that one file_name",
    )


# --- columns -----------------------------------------------------------------------------------


def _column(name: str, cells: list[str], path: Path) -> tuple[Field, Given]:
    """Return a column as a field: int64 or float64 where every cell is such a number, else str.

    Numbers with leading zeros, or integers of more digits than such a number has, are none.
    """
    if all(map(_INT.fullmatch, cells)) and all(-_BEYOND <= int(c) < _BEYOND for c in cells):
        return _numbers(name, np.array([int(c) for c in cells], np.int64))
    if all(map(_FLOAT.fullmatch, cells)):
        return _numbers(name, np.array([float(c) for c in cells]))
    return _texts(name, cells, path)


def _values(name: str, cells: list[Any], path: Path, texts: list[str]) -> tuple[Field, Given]:
    """Return a column of JSON values: numbers, lists of numbers of one shape, and strings.

    Of others, the text is the field; they are added to `texts`.
    """
    if all(type(cell) is str for cell in cells):
        return _texts(name, cells, path)
    shapes = {_shape(cell) for cell in cells}
    regular = len(shapes) == 1 and not shapes & {None} and 0 not in (next(iter(shapes)) or ())
    leaves = [leaf for cell in cells for leaf in _leaves(cell)] if regular else [None]
    kinds = {type(leaf) for leaf in leaves}
    exact = kinds == {bool} or (
        kinds <= {int, float}
        and all(-_BEYOND <= n < _BEYOND for n in leaves if type(n) is int)
        and (float not in kinds or all(abs(n) <= 1 << 53 for n in leaves if type(n) is int))
    )
    if exact:
        dtype = np.dtype(np.bool_ if kinds == {bool} else "<f8" if float in kinds else "<i8")
        return _numbers(name, np.array(cells, dtype))
    texts.append(name)
    try:
        return _texts(name, [json.dumps(cell, ensure_ascii=False) for cell in cells], path)
    except RecursionError as error:
        raise FormatError(f"values of {name} are lists in too many lists", where=path) from error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _shape(value: Any, depth: int = 0) -> tuple[int, ...] | None:
    """Return the shape of lists in lists, of which all at one depth are of one length, or None."""
    if not isinstance(value, list):
        return ()
    inner = {_shape(each, depth + 1) for each in value} if depth < MAX_AXES else {None}
    if len(inner) > 1 or None in inner:
        return None
    return (len(value), *(next(iter(inner), ()) or ()))


def _numbers(name: str, values: Any) -> tuple[Field, Given]:
    field, every = Field(name, values.dtype, values.shape[1:]), Affine(len(values), 0, 1)
    exact = field.dtype == np.dtype(np.int64) and not field.inner
    if exact and -LARGEST < int(values.min()) <= int(values.max()) < LARGEST:
        return field, Given(Explicit(values))
    return field, Given(every, values)


def _texts(name: str, cells: list[str], path: Path) -> tuple[Field, Given]:
    distinct = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    numbers = np.array([distinct[cell] for cell in cells], np.int64)
    try:
        words = Words.of(cell.encode() for cell in distinct)
    except ValueError as error:
        raise FormatError(f"column {name}: {error}", where=path) from error
    return Field.opaque(name, "str"), Given(Explicit(numbers), words)
