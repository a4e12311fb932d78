"""Tables of labels: CSV (RFC 4180), JSON lines, or a JSON array of objects.

A row is of the image that its key column names: by its path in the folder, with or without suffix.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dsprep.core.memory import free_memory
from dsprep.core.schema import Field, Ints
from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UsageError
from dsprep.formats.samples import listed
from dsprep.layout.laws import LARGEST, Affine, Explicit
from dsprep.layout.model import Given
from dsprep.layout.words import Words

FILE_NAME = "file_name"
"""The column that names files, unless another one is said to."""

MAX_NBYTES = 1 << 30
"""Bytes of the largest table."""

OVERHEAD = 24
"""Memory of a table that is being read, as a multiple of its bytes: a cell of 3 takes 60."""

_INT = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FLOAT = re.compile(
    r"[+-]?((0|[1-9][0-9]{0,14})(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf|nan", re.I | re.A
)
_BEYOND = 1 << 63

Rows = Mapping[str, Sequence[Any]]
"""The cells of each column: text of CSV, values of JSON."""


def read_table(
    path: Path, key: str, names: Sequence[Sequence[str]], taken: set[str]
) -> tuple[Ints, list[tuple[Field, Given]], list[str]]:
    """Return the labels that a table gives.

    Parameters
    ----------
    key
        The column that names the images.
    names
        What these are called, in their order: one way or several.
    taken
        Names of fields that columns cannot have.

    Returns
    -------
    The numbers of the images that it names, rising, int64; its other columns: the field, and its
    values by image; and what was left out, one clause each.

    Raises
    ------
    FormatError
        If it is damaged, or a row names no image or one that another row names.
    UsageError
        If there is no such column, or a column has the name of another field.
    """
    rows = _read(path)
    if key not in rows:
        options = " or ".join(
            f"--labels {path.name}:{k} ({n})" for k, n in key_columns(path, names)
        )
        raise UsageError(
            f"no column {key} names the images of the rows",
            where=path,
            expected="file_name",
            found=listed([*rows]),
            fix=f"name the column: {options or '--labels TABLE:COLUMN'}",
        )
    files = _match(rows[key], names)
    if files is None:
        known = {way for column in names for name in column for way in _ways(name)}
        row = next((i for i, cell in enumerate(rows[key]) if _text(cell) not in known), 0)
        raise FormatError(
            f"row {row + 1} names no image of the folder",
            where=path,
            expected="its path in the folder, such as " + names[0][0],
            found=f"{key}: {rows[key][row]}",
            fix="leave out such rows, or name the column: --labels TABLE:COLUMN",
        )
    order = np.argsort(files, kind="stable")
    files = files[order]
    if len(twice := np.flatnonzero(files[1:] == files[:-1])):
        twice_named = names[0][int(files[twice[0]])]
        raise FormatError("two rows name the same image", where=path, found=twice_named)
    notes = [f"labels of {path.name}, in which the column {key} names the images"]
    fields = []
    for name, cells in rows.items():
        if name in taken:
            raise UsageError(
                f"a column has the name of another field: {name}",
                where=path,
                fix="give that column another name",
            )
        if name not in (key, ""):
            fields.append(_column(name, [cells[i] for i in order.tolist()], path, notes))
    if without := np.setdiff1d(np.arange(len(names[0])), files).tolist():
        notes.append(f"left out {listed([names[0][i] for i in without])}: not in {path.name}")
    return files, fields, notes


def key_columns(path: Path, names: Sequence[Sequence[str]]) -> list[tuple[str, int]]:
    """Return which columns of a table name an image in each row, and how many."""
    matches = {name: _match(cells, names) for name, cells in _read(path).items()}
    return [
        (name, len(files))
        for name, files in matches.items()
        if files is not None and len({*files.tolist()}) == len(files)
    ]


def _match(cells: Sequence[Any], names: Sequence[Sequence[str]]) -> Ints | None:
    """Return the image that each cell names, all in one way."""
    for column in names:
        for way in range(2):
            numbers: dict[str, int] = {}
            for i, name in enumerate(column):
                called = _ways(name)[way]
                numbers[called] = -1 if called in numbers else i
            files = np.array([numbers.get(_text(cell), -1) for cell in cells], np.int64)
            if files.min() >= 0:
                return files
    return None


def _ways(name: str) -> tuple[str, str]:
    return name, str(PurePosixPath(name).with_suffix("")) if name else name


def _text(cell: Any) -> str:
    return str(cell).removeprefix("./")


# --- files -------------------------------------------------------------------------------------


def _read(path: Path) -> Rows:
    """Return the cells of a table with at least one row."""
    nbytes, limit = path.stat().st_size, min(MAX_NBYTES, free_memory() // OVERHEAD)
    if nbytes > limit:
        expected = f"at most {show_nbytes(limit)}, the memory being what it is"
        raise FormatError("the table is too large", where=path, expected=expected, found=nbytes)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = _csv(text) if path.suffix.lower() in (".csv", ".tsv") else _json(path, text)
    except UnicodeDecodeError as error:
        raise FormatError("the table is not UTF-8", where=path, found=error) from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise FormatError(f"the table is damaged: {error}", where=path) from error
    if not any(map(len, rows.values())):
        raise FormatError("the table has no rows", where=path, expected="a header line and rows")
    return rows


def _csv(text: str) -> Rows:
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = [row for row in lines if row]
    header = [name.strip() for name in rows[0]] if rows else []
    if len(set(header)) < len(header):
        raise ValueError("two columns have one name")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(f"row {i} has {len(row)} cells, the header {len(header)}")
    return dict(zip(header, zip(*rows[1:], strict=True), strict=False))


def _json(path: Path, text: str) -> Rows:
    if path.suffix.lower() == ".jsonl":
        rows: Any = []
        for i, line in enumerate(text.split("\n"), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {i}: {error}") from error
    else:
        rows = json.loads(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is not a list of objects")
    return {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(k for r in rows for k in r)
    }


# --- columns -----------------------------------------------------------------------------------


def _column(name: str, cells: Sequence[Any], path: Path, notes: list[str]) -> tuple[Field, Given]:
    """Return a column as a field."""
    # Text of CSV is int64 or float64 where every cell is such a number: those with leading zeros,
    # or integers of more digits than these have, are not. Values of JSON are what they are, or,
    # where no type holds them exactly, their JSON.
    if all(type(cell) is str for cell in cells):
        if path.suffix.lower() in (".csv", ".tsv"):
            if all(map(_INT.fullmatch, cells)) and all(-_BEYOND <= int(c) < _BEYOND for c in cells):
                return _numbers(name, np.array([int(c) for c in cells], np.int64))
            if all(map(_FLOAT.fullmatch, cells)):
                return _numbers(name, np.array([float(c) for c in cells]))
        return _texts(name, cells, path)
    texts = [json.dumps(cell, ensure_ascii=False) for cell in cells]
    try:
        values = np.array(cells)
    except ValueError:  # lists of several lengths
        values = np.array(None)
    has_bools = any("true" in text or "false" in text for text in texts)
    has_floats = any("." in text or "e" in text for text in texts)
    kind = "b" if has_bools else "f" if has_floats else "i"
    if values.size and values.dtype.kind == kind and values.tolist() == [*cells]:
        return _numbers(name, values)
    notes.append(f"{name} of {path.name} is JSON as text")
    return _texts(name, texts, path)


def _numbers(name: str, values: Any) -> tuple[Field, Given]:
    field, every = Field(name, values.dtype, values.shape[1:]), Affine(len(values), 0, 1)
    exact = field.dtype == np.dtype(np.int64) and not field.inner
    if exact and -LARGEST < int(values.min()) <= int(values.max()) < LARGEST:
        return field, Given(Explicit(values))
    return field, Given(every, values)


def _texts(name: str, cells: Sequence[str], path: Path) -> tuple[Field, Given]:
    distinct = {cell: i for i, cell in enumerate(dict.fromkeys(cells))}
    numbers = np.array([distinct[cell] for cell in cells], np.int64)
    try:
        words = Words.of(cell.encode() for cell in distinct)
    except ValueError as error:
        raise FormatError(f"column {name}: {error}", where=path) from error
    return Field.opaque(name, "str"), Given(Explicit(numbers), words)
