"""Parquet files as samples: rows, of the columns that are fields."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dsprep.core.closing import failure_closes
from dsprep.core.gather import ranges_in
from dsprep.core.schema import (
    Arena,
    Attrs,
    Batch,
    Column,
    Field,
    Ints,
    Ragged,
    Schema,
    concatenate,
    empty_batch,
    new_array,
)
from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UnsupportedError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.fields import missing_field, retype, wanted
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.library import library_errors
from dsprep.formats.options import OpenOptions
from dsprep.formats.parquet import types
from dsprep.formats.parquet.guard import arrow
from dsprep.formats.parquet.row_groups import RowGroups, chunks
from dsprep.formats.parquet.types import Leaf
from dsprep.formats.samples import listed
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import FileLayout
from dsprep.storage.base import for_library
from dsprep.storage.paths import open_file

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")

PARTITION = "partition"
"""The attribute of a field that is a part of the file's path."""

SHOWN = 12
"""Columns that an error names."""

MAX_FEATURES = 64 << 10
"""Bytes of what Hugging Face's datasets keep of their features, up to which it is an attribute."""


class ParquetSource(Source):
    """A file of rows, read through pyarrow."""

    def __init__(self, path: Path, options: OpenOptions, hint: Schema | None) -> None:
        self.path = path
        arrow()
        self._file = open_file(path)
        self._rows: RowGroups | None = None
        with failure_closes(self.close):
            with library_errors(path, "the footer cannot be read"):
                self._open(options, hint)
            self._file.check_same()

    def _open(self, options: OpenOptions, hint: Schema | None) -> None:
        with arrow().parquet.ParquetFile(for_library(self._file)) as opened:
            self._metadata, arrows = opened.metadata, opened.schema_arrow
        facts, every_leaf = self._metadata, list(types.leaves(arrows))
        self._groups = [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
        self.version = f"Parquet {facts.format_version[0]}, written by {facts.created_by}"
        leaves = {leaf.name: leaf for leaf in every_leaf}
        for name, count in Counter(leaf.name for leaf in every_leaf).items():
            if count > 1:
                leaves[name] = replace(leaves[name], field=None, reason="two columns are called so")
        self._parts = parts = partitions(self.path, hint)
        available, notes = self._available(leaves, parts, options, hint)
        chosen = wanted(options.fields, available)
        self._partitions = {name: parts[name] for name in parts if name not in leaves}
        notes += [f"left out {n} of the path: a column is called so" for n in parts if n in leaves]
        notes += [f"{n} is from the name of the directory" for n in self._partitions]
        self._columns = [(leaves.get(name), field) for name, field in chosen]
        self._paths = [name for name, _ in chosen]
        self.schema, self.notes = Schema(tuple(f for _, f in chosen), _attrs(arrows)), tuple(notes)
        used = [leaf for leaf, _ in self._columns if leaf is not None]
        self._rows = self._rows_of(used, options)
        self._kept: list[Ints | None] = [None] * len(self._groups)
        if options.nulls == "drop-rows":
            self._kept = self._complete_rows(used, options)
        counts = [
            rows if kept is None else len(kept)
            for rows, kept in zip(self._groups, self._kept, strict=True)
        ]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.dropped = sum(self._groups) - len(self)

    def _rows_of(self, leaves: Sequence[Leaf], options: OpenOptions) -> RowGroups:
        names = list(dict.fromkeys(leaf.column for leaf in leaves))
        fields = [leaf.field for leaf in leaves]
        row = sum(f.row_nbytes for f in fields if f is not None and not f.ragged)
        return RowGroups(self._file, self._metadata, names, row, options.memory_limit)

    def _available(
        self,
        leaves: Mapping[str, Leaf],
        parts: Mapping[str, tuple[Field, object]],
        options: OpenOptions,
        hint: Schema | None,
    ) -> tuple[dict[str, Field], list[str]]:
        """Return the fields of the columns and partitions that matter, and notes on the others."""
        notes: list[str] = []
        requested = [s.spelled for s in options.fields]
        names = requested or [*leaves, *(n for n in parts if n not in leaves)]
        if hint is not None and not requested:
            names = [name for name in names if name in hint.names]
        available: dict[str, Field] = {}
        for name in names:
            leaf = leaves.get(name)
            if leaf is None and name not in parts:
                raise missing_field(name, [*leaves, *parts], self.path)
            field = parts[name][0] if leaf is None else leaf.field
            if field is not None:
                available[name] = field
                continue
            assert leaf is not None  # the path has a value of each of its names
            if requested:
                raise UnsupportedError(
                    f"column {name} is not a field: {leaf.reason}", where=self.path, fix=WAY_OUT
                )
            notes.append(f"left out {name}: {leaf.reason}")
        notes += self._leave_out_nulls(available, leaves, options)
        if not available:
            raise UnsupportedError(
                "no column is a field",
                where=self.path,
                found="; ".join(notes)[:200] or "no columns",
                fix=WAY_OUT,
            )
        for spec in options.fields:
            leaf = leaves.get(spec.path)
            joined = leaf is not None and leaf.form == "joined" and spec.dtype is not None
            if joined and spec.to_field() != replace(available[spec.path], name=spec.name):
                raise UsageError(
                    f"column {spec.path} has lists of lists or strings, read back to back: it "
                    f"cannot be given a type by --field {spec}",
                    where=self.path,
                    fix="leave the type out",
                )
        return available, notes

    # --- nulls ---

    def _leave_out_nulls(
        self, available: dict[str, Field], leaves: Mapping[str, Leaf], options: OpenOptions
    ) -> list[str]:
        """Take out columns of nothing but nulls that were not asked for; return notes."""
        # Nulls are known of the columns of which the footer counts them, and of partitions.
        notes, nulls, empty = list[str](), dict[str, tuple[int, str]](), False
        for name in [*available]:
            leaf = leaves.get(name)
            counts = self._groups if leaf is None else self._footer_nulls(leaf) or []
            if not any(counts) or (leaf is None and self._parts[name][1] is not None):
                continue
            only = leaf is not None and sum(counts) == sum(self._groups)
            if only and not options.fields:
                del available[name]
                notes.append(f"left out {name}: it has only nulls")
                continue
            empty = empty or only
            first = next(i for i, count in enumerate(counts) if count)
            nulls[name] = sum(counts), f"{self._group(first)}, column {name}"
        if nulls and (options.nulls == "refuse" or empty):
            raise refusal(nulls, [name for name in available if name not in nulls])
        if nulls:
            notes.append(f"left out the rows with nulls in {listed([*nulls])}")
        return notes

    def _footer_nulls(self, leaf: Leaf) -> list[int] | None:
        """Return the rows with nulls of each row group; None if the footer does not tell."""
        if leaf.form == "null":
            return self._groups
        counts = []
        for number in range(len(self._groups)):
            count = 0
            for chunk in chunks(self._metadata, number, [leaf.column]):
                if not chunk.is_stats_set or not chunk.statistics.has_null_count:
                    return None
                count += int(chunk.statistics.null_count)
            if count < 0 or (count and not leaf.flat):
                return None
            counts.append(count)
        return counts

    def _complete_rows(self, leaves: Sequence[Leaf], options: OpenOptions) -> list[Ints | None]:
        """Return the numbers of the rows without nulls in each row group; None: all of them."""
        if any(self._partitions[n][1] is None for n in self._paths if n in self._partitions):
            return [np.zeros(0, np.int64)] * len(self._groups)
        doubtful = [x for x in leaves if (c := self._footer_nulls(x)) is None or any(c)]
        if not doubtful:
            return [None] * len(self._groups)
        complete: list[Ints | None] = []
        with closing(self._rows_of(doubtful, options)) as groups:
            for number, rows in enumerate(groups.rows):
                mask = np.ones(rows, np.bool_)
                for start in range(0, rows, step := groups.step(number)):
                    table = groups.read(number, start, min(rows, start + step))
                    with library_errors(self._group(number), "nulls cannot be counted"):
                        for leaf in doubtful:
                            mask[start : start + step] &= _complete(table, leaf)
                complete.append(None if mask.all() else np.flatnonzero(mask))
        return complete

    def _group(self, number: int) -> str:
        return f"{self.path}, row group {number}"

    # --- reading ---

    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        parts = [self._part(*some) for some in ranges_in(self._starts, start, stop)]
        self._file.check_same()
        if not parts:
            return empty_batch(self.schema)
        if len(parts) > 1:
            return concatenate(self.schema, parts)
        return {name: _own(column, f"parquet.{name}", arena) for name, column in parts[0].items()}

    def _part(self, number: int, start: int, stop: int) -> Batch:
        where = self._group(number)
        table = self._table(number, start, stop)
        batch: Batch = {}
        for path, (leaf, field) in zip(self._paths, self._columns, strict=True):
            if leaf is None:
                batch[field.name] = _repeated(self._partitions[path][1], stop - start, field)
                continue
            assert leaf.field is not None  # it is one of the chosen
            here = f"{where}, column {leaf.name}"
            with library_errors(here, "the column cannot be read"):
                chunks = table.column(leaf.path[0]).chunks
                columns = [{path: types.column(chunk, leaf, here)} for chunk in chunks]
                own = Schema((replace(leaf.field, name=path),))
                column = concatenate(own, columns)[path] if columns else empty_batch(own)[path]
                first = int(self._starts[number]) + start
                batch[field.name] = retype(column, field, self.path, first)
        return batch

    def _table(self, number: int, start: int, stop: int) -> Any:
        """Return samples of a row group as a table; None if no column is needed for them."""
        assert self._rows is not None  # it is open
        if not any(leaf is not None for leaf, _ in self._columns):
            return None
        kept = self._kept[number]
        if kept is None:
            return self._rows.read(number, start, stop)
        rows = kept[start:stop]
        first, last = int(rows[0]), int(rows[-1]) + 1
        table = self._rows.read(number, first, last)
        return table if last - first == len(rows) else _taken(table, rows - first)

    def resident_nbytes(self) -> int:
        """Return the bytes of the row groups that are kept decoded."""
        return 0 if self._rows is None else self._rows.resident_nbytes()

    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of each field."""
        return {
            field.name: self._storage(path, leaf)
            for path, (leaf, field) in zip(self._paths, self._columns, strict=True)
        }

    def _storage(self, path: str, leaf: Leaf | None) -> FieldStorage:
        if leaf is None:
            return FieldStorage(storage="in the name of the directory", stored_nbytes=0)
        numbers = range(len(self._groups))
        groups = [chunks(self._metadata, number, [leaf.column]) for number in numbers]
        rows = max(self._groups, default=0)
        every = [c for group in groups for c in group]
        nbytes = max((int(c.total_uncompressed_size) for c in every), default=0)
        codecs = sorted({c.compression.lower() for c in every} - {"uncompressed"})
        return FieldStorage(
            storage=f"row groups of {rows:,} samples, encoded",
            codecs=tuple(codecs),
            stored_nbytes=sum(int(c.total_compressed_size) for c in every),
            access=f"a row group ({show_nbytes(nbytes)} of this column) is read and decoded by "
            "pyarrow for one sample",
            reads=1,
            read_nbytes=nbytes,
        )

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


def _taken(table: Any, rows: Ints) -> Any:
    """Return some rows of a table."""
    try:
        return table.take(rows)
    except NotImplementedError:  # of some types pyarrow takes no rows one by one
        edges = np.flatnonzero(np.diff(rows, prepend=-2, append=rows[-1] + 2) != 1)
        starts, counts = rows[edges[:-1]].tolist(), np.diff(edges).tolist()
        runs = [table.slice(a, n) for a, n in zip(starts, counts, strict=True)]
        return arrow().concat_tables(runs)


def _complete(table: Any, leaf: Leaf) -> NDArray[np.bool_]:
    masks = [types.complete(chunk, leaf) for chunk in table.column(leaf.path[0]).chunks]
    return np.concatenate([np.ones(0, np.bool_), *masks])


def _attrs(arrows: Any) -> Attrs:
    text = (arrows.metadata or {}).get(b"huggingface", b"")
    if not text or len(text) > MAX_FEATURES:
        return {}
    return {"huggingface": text.decode("utf-8", "replace")}


# --- partitions --------------------------------------------------------------------------------


def partitions(path: Path, hint: Schema | None) -> dict[str, tuple[Field, object]]:
    """Return the fields that directories right above a file give by names such as ``label=3``.

    With each is its value there; None: null.
    """
    fields: dict[str, tuple[Field, object]] = {}
    attrs = {PARTITION: "in the names of directories"}
    for folder in path.absolute().parents:
        key, equals, word = folder.name.partition("=")
        if not equals or not key:
            break
        text = unquote(word, errors="surrogateescape")
        known = hint[key] if hint is not None and key in hint.names else None
        integer = _INTEGER.fullmatch(text) or text == _NO_VALUE
        if integer and (known is None or known.kind != "str"):
            number = None if text == _NO_VALUE else int(text)
            fields[key] = Field(key, np.dtype("<i8"), attrs=attrs), number
        else:
            fields[key] = Field.opaque(key, "str", attrs), None if text == _NO_VALUE else text
    return dict(reversed(fields.items()))


def together(f: Field, g: Field) -> Field | None:
    """Return the field that two parts have; None if they are not of one type.

    What paths give is an integer if it is in both.
    """
    if f == g:
        return f
    if PARTITION in f.attrs and PARTITION in g.attrs:
        return f if f.kind == "str" else g
    return None


def refusal(nulls: Mapping[str, tuple[int, str]], others: Sequence[str]) -> FormatError:
    """Return the error for columns with nulls, which names what helps.

    `nulls` has how many rows of each column have some, and where; `others` have none.
    """
    ways = ["--nulls drop-rows leaves these rows out"]
    if 0 < len(others) <= SHOWN:
        ways.append("or name the others: " + " ".join(f"--field {shlex.quote(n)}" for n in others))
    counts = listed([f"{name} ({count:,})" for name, (count, _) in nulls.items()], SHOWN)
    return FormatError(
        "there are nulls, which are not values",
        where=next(iter(nulls.values()))[1],
        expected="a value in each row",
        found=f"nulls in {counts}",
        fix=", ".join(ways),
    )


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
