"""Parquet files as samples: rows, of the columns that are fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from dsprep.core.schema import (
    Arena,
    Attrs,
    Batch,
    Column,
    Field,
    Ragged,
    Schema,
    concatenate,
    empty_batch,
    new_array,
)
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.fields import missing_field, retype, wanted
from dsprep.formats.options import OpenOptions
from dsprep.formats.parquet import PARTITION, types
from dsprep.formats.parquet.footer import Footer
from dsprep.formats.parquet.footer import read as read_footer
from dsprep.formats.parquet.groups import KEPT, SMALL, STEP_NBYTES, RowGroup, RowGroups
from dsprep.formats.parquet.guard import arrow, library
from dsprep.formats.parquet.types import Leaf
from dsprep.layout.describe import FieldStorage, show_nbytes
from dsprep.layout.model import FileLayout
from dsprep.reading.files import File

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")

MAX_FEATURES = 64 << 10
"""Bytes of what Hugging Face's datasets keep of their features, up to which it is an attribute."""

SMALL_DICTIONARY = 4 << 20
"""Bytes of an encoded column up to which its dictionaries are left as they are."""


class ParquetSource(Source):
    """A file of rows, read through pyarrow."""

    def __init__(self, path: Path, options: OpenOptions, hint: Schema | None) -> None:
        self.path = path
        if any(s.index for s in options.fields):
            raise UsageError("fields of Parquet have no @INDEX", where=path)
        arrow()
        self._file = File(path)
        self._rows: RowGroups | None = None
        try:
            with library(path, "the footer cannot be read"):
                self._open(options, hint)
            self._file.check_same()
        except BaseException:
            self.close()
            raise

    def _open(self, options: OpenOptions, hint: Schema | None) -> None:
        self._footer = footer = read_footer(self._file)
        with arrow().parquet.ParquetFile(f"/proc/self/fd/{self._file.fd}") as opened:
            metadata, arrows = opened.metadata, opened.schema_arrow
        self.version = f"Parquet {footer.version}, written by {footer.written_by}"
        leaves = {leaf.name: leaf for leaf in types.leaves(arrows)}
        named = [leaf.name for leaf in types.leaves(arrows)]
        twice = {n for n in named if named.count(n) > 1}
        for name in twice:
            leaves[name] = replace(leaves[name], field=None, why="two columns are called so")
        parts = partitions(self.path, hint)
        chosen, notes = _chosen(leaves, parts, options, footer, self.path)
        self._partitions = {name: parts[name] for name in parts if name not in leaves}
        notes += [f"left out {n} of the path: a column is called so" for n in parts if n in leaves]
        notes += [f"{n} is from the name of the directory" for n in self._partitions]
        self._columns = [(leaves.get(name), field) for name, field in chosen]
        self._paths = [name for name, _ in chosen]
        self.schema, self.notes = Schema(tuple(f for _, f in chosen), _attrs(arrows)), tuple(notes)
        names = [leaf.name for leaf, _ in self._columns if leaf is not None]
        self._groups = _row_groups(footer, names, self.schema)
        self._starts = np.array([*(g.first for g in self._groups), sum(footer.rows)], np.int64)
        self._rows = RowGroups(self._file, metadata, names, _dictionaries(footer, names))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        parts = [self._part(*some) for some in self._ranges(start, stop)]
        self._file.check_same()
        if not parts:
            return empty_batch(self.schema)
        if len(parts) > 1:
            return concatenate(self.schema, parts)
        return {name: _own(column, f"parquet.{name}", arena) for name, column in parts[0].items()}

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[RowGroup, int, int]]:
        """Yield row groups, and the range of rows in each."""
        number = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            group = self._groups[number]
            end = min(stop, group.first + group.rows)
            if end > start:
                yield group, start - group.first, end - group.first
                start = end
            number += 1

    def _part(self, group: RowGroup, start: int, stop: int) -> Batch:
        assert self._rows is not None  # it is open
        where = f"{self.path}, row group {group.number}"
        table = None
        if any(leaf is not None for leaf, _ in self._columns):
            table = self._rows.read(group, start, stop)
        batch: Batch = {}
        for path, (leaf, field) in zip(self._paths, self._columns, strict=True):
            if leaf is None:
                batch[field.name] = _repeated(self._partitions[path][1], stop - start, field)
                continue
            assert leaf.field is not None  # it is one of the chosen
            assert table is not None
            here = f"{where}, column {leaf.name}"
            with library(here, "the column cannot be read"):
                found = []
                for chunk in table.column(leaf.path[0]).chunks:
                    inside = types.member(chunk, leaf.path[1:], here)
                    found.append({path: types.column(inside, leaf.field, here)})
                own = Schema((replace(leaf.field, name=path),))
                column = concatenate(own, found)[path] if found else empty_batch(own)[path]
                first = group.first + start
                batch[field.name] = retype(column, field, self.path, first)
        return batch

    def resident_nbytes(self) -> int:
        """Return the bytes of the row groups that are kept decoded."""
        most = max((g.nbytes for g in self._groups), default=0)
        return KEPT * (most if most <= SMALL else max(SMALL, 2 * STEP_NBYTES))

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored."""
        return {
            field.name: self._storage(path, leaf)
            for path, (leaf, field) in zip(self._paths, self._columns, strict=True)
        }

    def _storage(self, path: str, leaf: Leaf | None) -> FieldStorage:
        if leaf is None:
            return FieldStorage(storage="in the name of the directory", stored_nbytes=0)
        chunks = [c for group in self._footer.chunks for c in group if _is_of(c.name, [leaf.name])]
        rows = max(self._footer.rows, default=0)
        nbytes = max((c.encoded for c in chunks), default=0)
        codecs = sorted({c.codec for c in chunks} - {"none"})
        return FieldStorage(
            storage=f"row groups of {rows:,} samples, encoded",
            codecs=tuple(codecs),
            stored_nbytes=sum(c.stored for c in chunks),
            access=f"a row group ({show_nbytes(nbytes)} of this column) is read and decoded by "
            "pyarrow for one sample",
            reads=1,
            read_nbytes=nbytes,
        )

    def loading_code(self) -> str:
        """Return a program that loads sample 0 with pyarrow."""
        names = [leaf.name for leaf, _ in self._columns if leaf is not None]
        lines = ["import pyarrow.parquet as pq", ""]
        lines += [f"file = pq.ParquetFile({str(self.path)!r})"]
        lines += [f"table = file.read_row_group(0, columns={names!r}).slice(0, 1).flatten()"]
        lines += ["for name in table.column_names:", "    print(name, table[name].type)"]
        lines += [f"print({n!r}, {value!r})" for n, (_, value) in self._partitions.items()]
        return "\n".join(lines) + "\n"

    def extents(self, progress: object = None) -> FileLayout:
        """Raise `UnsupportedError`: see `Source.extents`."""
        raise UnsupportedError(
            "samples have no offsets in Parquet, whose pages are encoded",
            where=self.path,
            fix="dsprep repack DATA DST (or convert) writes them where they have: a file for "
            "dsprep.Reader",
        )

    def close(self) -> None:
        """Close the file."""
        if self._rows is not None:
            self._rows.close()
        self._file.close()


# --- columns -----------------------------------------------------------------------------------


def _chosen(
    leaves: Mapping[str, Leaf],
    parts: Mapping[str, tuple[Field, object]],
    options: OpenOptions,
    footer: Footer,
    path: Path,
) -> tuple[list[tuple[str, Field]], list[str]]:
    """Return the fields that are wanted, by path, and notes on those that are left out.

    Raises
    ------
    SchemaError, UnsupportedError
        If one is wanted that is not there, or is not a field, or none is left.
    FormatError
        If the footer counts nulls.
    """
    notes: list[str] = []
    asked = [s.path for s in options.fields]
    names = asked or [*leaves, *(n for n in parts if n not in leaves)]
    available: dict[str, Field] = {}
    rows = sum(footer.rows)
    counted = _null_counts(footer, {n for n in names if n in leaves and leaves[n].flat})
    for name in names:
        leaf = leaves.get(name)
        if leaf is None:
            if name not in parts:
                raise missing_field(name, [*leaves, *parts], path)
            available[name] = parts[name][0]
            continue
        only = rows and sum(counted.get(name, {}).values()) == rows
        why = leaf.why or ("it has only nulls" if only and not asked else "")
        if leaf.field is not None and not why:
            for group, count in counted.get(name, {}).items():
                raise types.nulls(count, f"{path}, row group {group}, column {name}")
            available[name] = leaf.field
        elif asked:
            raise UnsupportedError(f"column {name} is not a field: {why}", where=path)
        else:
            notes.append(f"left out {name}: {why}")
    if not available:
        raise UnsupportedError(
            "no column is a field", where=path, found="; ".join(notes)[:200] or "no columns"
        )
    return wanted(options.fields, available), notes


def _null_counts(footer: Footer, names: set[str]) -> dict[str, dict[int, int]]:
    """Return, by column and row group, the nulls that the footer counts, where there are any."""
    found: dict[str, dict[int, int]] = {}
    for i, chunks in enumerate(footer.chunks):
        for c in chunks:
            if c.nulls and c.name in names:
                found.setdefault(c.name, {})[i] = c.nulls
    return found


def _is_of(path: str, names: Sequence[str]) -> bool:
    """Whether a column in the file belongs to one that is wanted: itself, or its items."""
    return path in names or any(path.startswith(f"{name}.") for name in names)


def _row_groups(footer: Footer, names: Sequence[str], schema: Schema) -> list[RowGroup]:
    groups, first = [], 0
    row = sum(f.row_nbytes for f in schema if not f.ragged)
    for i, (rows, chunks) in enumerate(zip(footer.rows, footer.chunks, strict=True)):
        encoded = sum(c.encoded for c in chunks if _is_of(c.name, names))
        groups.append(RowGroup(i, first, rows, max(encoded, rows * row)))
        first += rows
    return groups


def _dictionaries(footer: Footer, names: Sequence[str]) -> list[str]:
    """Return the columns of strings whose dictionaries stay: values may be few and very large."""
    every = (c for chunks in footer.chunks for c in chunks if c.text and c.dictionary)
    small = (c for c in every if c.encoded < SMALL_DICTIONARY + 8 * c.values)
    return sorted({c.name for c in small}.intersection(names))


def _attrs(arrows: Any) -> Attrs:
    text = (arrows.metadata or {}).get(b"huggingface", b"")
    if not text or len(text) > MAX_FEATURES:
        return {}
    return {"huggingface": text.decode("utf-8", "replace")}


# --- partitions --------------------------------------------------------------------------------


def partitions(path: Path, hint: Schema | None) -> dict[str, tuple[Field, object]]:
    """Return the fields that directories right above a file give by names such as ``label=3``.

    Raises
    ------
    FormatError
        If one of them stands for null.
    """
    found: dict[str, tuple[Field, object]] = {}
    for folder in path.absolute().parents:
        key, equals, word = folder.name.partition("=")
        if not equals or not key:
            break
        text = unquote(word, errors="surrogateescape")
        if text == _NO_VALUE:
            raise types.nulls(1, f"{path}, directory {folder.name}")
        known = hint[key] if hint is not None and key in hint.names else None
        attrs = {PARTITION: "in the names of directories"}
        if _INTEGER.fullmatch(text) and (known is None or known.kind != "str"):
            found[key] = Field(key, np.dtype("<i8"), attrs=attrs), int(text)
        else:
            found[key] = Field.opaque(key, "str", attrs), text
    return dict(reversed(found.items()))


def _repeated(value: object, count: int, field: Field) -> Column:
    if field.kind == "str":
        return Ragged.pack([value] * count, field)
    return np.full(count, value, field.dtype)


def _own(column: Column, key: str, arena: Arena | None) -> Column:
    """Return a copy that holds no more memory than its own."""
    values = column.values if isinstance(column, Ragged) else column
    out = new_array(arena, key, values.shape, values.dtype)
    out[...] = values
    if isinstance(column, Ragged):
        return Ragged(out, column.offsets, column.kind)
    return out
