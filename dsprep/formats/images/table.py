"""A CSV of labels (RFC 4180): a row per image, and a column of which each value names one."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dsprep.core.schema import Field, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.formats.samples import listed
from dsprep.layout.laws import LARGEST, Affine, Explicit
from dsprep.layout.model import Given
from dsprep.layout.words import Words

MAX_NBYTES = 1 << 30
"""No table is larger."""

_INT = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FLOAT = re.compile(
    r"[+-]?((0|[1-9][0-9]{0,14})(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf|nan", re.I | re.A
)

_BEYOND = 1 << 63

_KEYS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: str(PurePosixPath(name).with_suffix("")),
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
        The numbers of the files that it names, rising, int64.
    fields
        Its columns, but for the one that names the files: the field, and its values by file.
    notes
        What was left out and assumed, one clause each.
    """

    files: Ints
    fields: tuple[tuple[Field, Given], ...]
    notes: tuple[str, ...]


def read_table(path: Path, names: Sequence[str]) -> Table:
    """Return what the table at `path` says of files.

    Parameters
    ----------
    names
        The paths of the files in their folder.

    Raises
    ------
    FormatError
        If it is not a table with a header line and rows of one length, or a row names a file that
        is not there, or that another row names too.
    UsageError
        If several columns name files and do not agree, or a column has the name of another field.
    """
    header, rows = _rows(path)
    columns = list(zip(*rows, strict=True))
    key, found = _key(path, header, columns, names)
    order = np.argsort(found, kind="stable")
    files = found[order]
    twice = np.flatnonzero(files[1:] == files[:-1])
    if len(twice):
        raise FormatError(
            "two rows name the same file", where=path, found=names[int(files[twice[0]])]
        )
    fields, unnamed = [], 0
    for k, name in enumerate(header):
        if k == key:
            continue
        if not name:
            unnamed += 1
            continue
        cells = [columns[k][i] for i in order.tolist()]
        fields.append(_column(name, cells, path))
    for f, _ in fields:
        if f.name in ("image", "name"):
            raise UsageError(
                f"a column has the name of another field: {f.name}",
                where=path,
                fix="give that column another name",
            )
    notes = [f"labels of {path.name}, in which the column {header[key] or key} names the files"]
    if unnamed:
        notes.append(f"left out columns of {path.name} without a name: {unnamed}")
    if len(files) < len(names):
        without = np.setdiff1d(np.arange(len(names)), files).tolist()
        shown = listed([names[i] for i in without[:4]])
        more = f" and {len(without) - 4:,} more" if len(without) > 4 else ""
        notes.append(f"left out {shown}{more}: not in {path.name}")
    return Table(files, tuple(fields), tuple(notes))


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows, all of one length; there is at least one."""
    if path.stat().st_size > MAX_NBYTES:
        raise FormatError(
            "the table is too large", where=path, expected=f"at most {MAX_NBYTES:,} bytes"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError("the table is not UTF-8", where=path, found=error) from error
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            if rows and row and len(row) != len(rows[0]):
                raise FormatError(
                    "a row of the table has another number of cells",
                    where=f"{path}, line {reader.line_num}",
                    expected=len(rows[0]),
                    found=len(row),
                )
            if row:
                rows.append(row)
    except csv.Error as error:
        raise FormatError(
            f"the table is damaged: {error}", where=f"{path}, line {reader.line_num}"
        ) from error
    if len(rows) < 2:
        raise FormatError("the table has no rows", where=path, expected="a header line and rows")
    header = [name.strip() for name in rows[0]]
    named = [name for name in header if name]
    if len(set(named)) < len(named):
        raise FormatError("two columns of the table have one name", where=path, found=header)
    return header, rows[1:]


def _key(
    path: Path, header: list[str], columns: Sequence[Sequence[str]], names: Sequence[str]
) -> tuple[int, Ints]:
    """Return which column names the files, and the file of each row."""
    best, missing = 0, ""
    for short in _KEYS:
        numbers: dict[str, int] = {}
        for i, name in enumerate(names):
            called = short(name)
            numbers[called] = -1 if called in numbers else i
        found: dict[int, list[int]] = {}
        for k, cells in enumerate(columns):
            files = [numbers.get(cell.removeprefix("./"), -1) for cell in cells]
            there = len(files) - files.count(-1)
            if there == len(files):
                found[k] = files
            elif there > best:
                best, missing = there, f"column {header[k]}, row {files.index(-1) + 1}"
                missing += f": {cells[files.index(-1)]!r}"
        if found:
            first = next(iter(found.values()))
            if any(files != first for files in found.values()):
                several = [header[k] for k in found]
                raise UsageError(
                    "several columns of the table name files, and not the same ones",
                    where=path,
                    found=", ".join(several),
                    fix="leave all but one of them out",
                )
            return next(iter(found)), np.array(first, np.int64)
    if set(header) & set(names):
        raise FormatError("the table has no header line", where=path, expected="names of columns")
    raise FormatError(
        "a row of the table names no file, or one of several"
        if best
        else "no column of the table names the files",
        where=path,
        expected="in one column, of every row, the path of a file in the folder or its name, with "
        "or without suffix",
        found=missing or ", ".join(header),
        fix="--labels none reads no labels",
    )


def _column(name: str, cells: list[str], path: Path) -> tuple[Field, Given]:
    """Return a column as a field: int64 or float64 where every cell is such a number, else str.

    Numbers with leading zeros, or integers of more digits than such a number has, are none.
    """
    count = len(cells)
    every = Affine(count, 0, 1)
    if all(map(_INT.fullmatch, cells)) and all(-_BEYOND <= int(c) < _BEYOND for c in cells):
        numbers = np.array([int(c) for c in cells], np.int64)
        exact = -LARGEST < int(numbers.min()) <= int(numbers.max()) < LARGEST
        return Field(name, numbers.dtype), (
            Given(Explicit(numbers)) if exact else Given(every, numbers)
        )
    if all(map(_FLOAT.fullmatch, cells)):
        return Field(name, np.dtype("<f8")), Given(every, np.array([float(c) for c in cells]))
    distinct = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    which = np.array([distinct[cell] for cell in cells], np.int64)
    try:
        words = Words.of(cell.encode() for cell in distinct)
    except ValueError as error:
        raise FormatError(f"column {name}: {error}", where=path) from error
    return Field.opaque(name, "str"), Given(Explicit(which), words)
