"""The JSON of a layout; the specification is in `dsprep.sidecar.spec`."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.core.schema import Field, Schema
from dsprep.layout import laws
from dsprep.layout.laws import LARGEST, Law
from dsprep.layout.laws.base import damaged, integer
from dsprep.layout.model import (
    Blocks,
    Column,
    FileLayout,
    Given,
    Grid,
    Groups,
    OwnFiles,
    Part,
    Records,
    Rest,
)
from dsprep.layout.words import Words

MAX_AXES = 32
MAX_CHUNK = 1 << 40
"""Bytes of a decoded chunk; what reading takes is checked against memory besides."""

_PLACEHOLDER = re.compile(r"\{([0-9]{1,2})\}")

_LEAVING = re.compile(rb"(?:\A|[\0/])\.{0,2}(?=[\0/])")
"""Among names that each have a NUL after them: a component that is empty, ``.`` or ``..``."""

_NONE = Blocks(laws.Affine(0, 0), laws.Affine(0, 0))


def file_path(template: str, file_index: Sequence[int]) -> str:
    """Return the path of the file at `file_index` in the grid of files."""
    return _PLACEHOLDER.sub(lambda m: str(file_index[int(m[1])]), template)


# --- writing ---------------------------------------------------------------------------------


def to_json(layout: FileLayout, schema: Schema, tables: Tables) -> dict[str, Any]:
    """Return a layout whose laws have been fitted as JSON."""
    count, records, groups = layout.count, layout.records, layout.groups
    json = {
        "records": records and _records_json(records, count, tables),
        "columns": {
            name: _column_json(column, count, tables) for name, column in layout.columns.items()
        },
        "files": {name: _encoded(tables, **vars(own)) for name, own in layout.files.items()},
        "given": {name: _given_json(given, tables) for name, given in layout.given.items()},
        "unlocated": dict(layout.unlocated),
        "groups": groups and _groups_json(groups, tables),
        "provenance": dict(layout.facts),
    }
    return {key: value for key, value in json.items() if value}


def _encoded(tables: Tables, **values: Any) -> dict[str, Any]:
    """Return values as JSON, without those that are None."""
    json = {}
    for key, value in values.items():
        if isinstance(value, Law | Words):
            json[key] = value.to_json(tables)
        elif value is not None:
            json[key] = [*value] if isinstance(value, tuple) else value
    return json


def _blocks_json(blocks: Blocks, tables: Tables) -> dict[str, Any]:
    return _encoded(
        tables, path=blocks.path or None, offsets=blocks.offsets, lengths=blocks.lengths
    )


def _records_json(records: Records, count: int, tables: Tables) -> dict[str, Any]:
    blocks, number = _blocks_json(records.blocks, tables), records.blocks.count
    facts = {"order": records.order, "frame": records.frame, "recipe": records.recipe}
    json = _encoded(tables, blocks=None if number == count else number, **facts)
    parts = records.parts.items()
    ranges = {name: None if part.at is None else [part.at, part.nbytes] for name, part in parts}
    return {**blocks, **json, "parts": ranges}


def _column_json(column: Column, count: int, tables: Tables) -> dict[str, Any]:
    grid, json = column.grid, dict[str, Any]()
    if grid is not None:
        is_complete = column.first is None and grid.shape[0] == count * column.lines
        json = _blocks_json(grid.blocks, tables) | _encoded(
            tables,
            rows=None if is_complete else grid.shape[0],
            inner=grid.shape[1:],
            itemsize=grid.itemsize,
            chunk=None if grid.chunk == grid.shape else grid.chunk,
            files=grid.files,
            filters=grid.filters or None,
            masks=grid.masks,
            which=grid.file_numbers,
            fill=None if grid.fill is None else base64.b64encode(grid.fill).decode(),
        )
    lines = None if column.lines == 1 else column.lines
    return json | _encoded(tables, lines=lines, count=column.count, first=column.first)


def _given_json(given: Given, tables: Tables) -> dict[str, Any]:
    json, values = _encoded(tables, which=given.value_numbers), given.values
    if isinstance(values, Words):
        json["words"] = values.to_json(tables)
    elif values is not None:
        json["values"] = {"count": len(values), "data": tables.put(values.tobytes())}
    return json


def _groups_json(groups: Groups, tables: Tables) -> dict[str, Any]:
    json = {"samples": groups.samples, **_blocks_json(groups.blocks, tables)}
    count = None if groups.first is None else groups.blocks.count
    json |= _encoded(
        tables, crc32c=groups.crc32c, files=groups.files, count=count, first=groups.first
    )
    return json | ({} if groups.rest is None else {"rest": _encoded(tables, **vars(groups.rest))})


# --- reading ---------------------------------------------------------------------------------


def from_json(json: Any, count: int, schema: Schema, tables: Tables) -> FileLayout:
    """Return the layout of a file of `count` samples.

    Raises
    ------
    FormatError
        If it does not follow the specification, or does not go with the schema.
    """
    return _Decoder(count, schema, tables).layout(json)


@dataclass(frozen=True)
class _Decoder:
    """Reads the JSON of a layout; what it finds damaged is a `FormatError`."""

    count: int
    schema: Schema
    tables: Tables

    def layout(self, json: Any) -> FileLayout:
        top = self.mapping(json, "a layout")
        unlocated = {str(k): str(v) for k, v in self.member(top, "unlocated").items()}
        records, own = None, self.member(top, "files")
        if "records" in top:
            inside = self.member(top, "records")
            if "names" in inside:
                own = self.own_of_records(inside)
            else:
                records = self.records(inside)
        columns = {str(n): self.column(c, str(n)) for n, c in self.member(top, "columns").items()}
        files = {str(name): self.own_files(each, str(name)) for name, each in own.items()}
        words = [each.names for each in files.values()]
        given = {
            str(name): self.given(each, str(name), words)
            for name, each in self.member(top, "given").items()
        }
        named = [*(records.parts if records else ()), *columns, *files, *given, *unlocated]
        text = "a layout has other fields than the schema"
        self.require(sorted(named) == sorted(self.schema.names), text, self.schema.names, named)
        groups = self.groups(self.member(top, "groups")) if "groups" in top else None
        facts = self.member(top, "provenance")
        return FileLayout(
            self.count, records, columns, unlocated, groups, facts, given=given, files=files
        )

    def require(
        self, condition: object, what: str, expected: object = None, found: object = None
    ) -> None:
        if not condition:
            raise damaged(what, self.tables, expected, found)

    def mapping(self, json: Any, subject: str) -> Mapping[str, Any]:
        self.require(isinstance(json, Mapping), f"{subject} is not a JSON object", found=json)
        return json  # type: ignore[no-any-return]

    def member(self, json: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        return self.mapping(json.get(key, {}), key)

    def law(self, json: Mapping[str, Any], key: str, count: int) -> Law | None:
        return laws.parse(json[key], count, self.tables) if key in json else None

    def sizes(self, json: Any) -> tuple[int, ...]:
        good = isinstance(json, list) and len(json) <= MAX_AXES
        good = good and all(type(n) is int and 0 < n <= LARGEST for n in json)
        self.require(good, "a shape is damaged", "positive integers", json)
        return tuple(json)

    def blocks(self, json: Mapping[str, Any], count: int, axes: int) -> Blocks:
        lengths = laws.parse(json.get("lengths"), count, self.tables)
        offsets = laws.parse(json.get("offsets"), count, self.tables, lengths)
        return Blocks(offsets, lengths, self.path(json.get("path", ""), axes))

    def path(self, path: Any, axes: int) -> str:
        """Return a path that stays below the dataset, whatever its placeholders stand for."""
        good = isinstance(path, str) and "\0" not in path
        self.require(good, "the path of a file is wrong", found=path)
        try:
            os.fsencode(path)
        except ValueError as error:
            raise damaged("no file can have this path", self.tables, found=path) from error
        inside = not path or not any(part in ("", ".", "..") for part in path.split("/"))
        self.require(inside, "the path of a file leaves the dataset", found=path)
        known = not axes or all(int(axis) < axes for axis in _PLACEHOLDER.findall(path))
        self.require(known, "the path of a file names an axis that is not there", found=path)
        return str(path)

    def own_of_records(self, json: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return fields with files of their own that are, as until 2026, records with names."""
        parts = self.member(json, "parts")
        alone = json.keys() <= {"names", "offsets", "lengths", "parts"}
        alone = alone and json.get("offsets") == 0
        self.require(alone, "records in files of their own do not begin where these begin")
        alone = all(part == [0, None] for part in parts.values())
        self.require(alone, "records in files of their own have several fields", found=parts)
        own = {key: json.get(key) for key in ("names", "lengths")}
        return {name: own for name in parts}  # noqa: C420

    def own_files(self, json: Any, name: str) -> OwnFiles:
        own = self.mapping(json, "a field")
        if name in self.schema.names:
            field = self.schema[name]
            good = field.ragged and field.row_nbytes == 1
            self.require(good, f"field {name} is not bytes", found=field)
        names, count = Words.from_json(own.get("names"), self.tables), self.count
        text = "there are not as many names as files"
        self.require(len(names) == count, text, count, len(names))
        if (match := _LEAVING.search(names.data)) is not None:
            near = names.data[max(0, match.start() - 40) : match.end() + 40]
            raise damaged("the path of a file leaves the dataset", self.tables, found=near)
        return OwnFiles(names, laws.parse(own.get("lengths"), count, self.tables))

    def records(self, json: Mapping[str, Any]) -> Records:
        number = integer({"blocks": self.count, **json}, "blocks", self.tables, 0)
        order = self.law(json, "order", self.count)
        text = "there are not as many records as samples"
        self.require(order is not None or number == self.count, text, self.count, number)
        blocks = self.blocks(json, number, 0)
        frame, recipe = (self.member(json, k) if k in json else None for k in ("frame", "recipe"))
        parts = {str(n): self.part(span) for n, span in self.member(json, "parts").items()}
        for name in parts.keys() & {*self.schema.names}:
            self.check_part(parts[name], self.schema[name], recipe)
        return Records(blocks, parts, order, recipe, frame)

    def part(self, span: Any) -> Part:
        if span is None:
            return Part()
        good = isinstance(span, list) and len(span) == 2
        self.require(good, "the offset of a field is damaged", "[at, nbytes]", span)
        at, nbytes = span
        for number in (at,) if nbytes is None else (at, nbytes):
            integer({"the offset": number}, "the offset", self.tables, 0)
        return Part(at, nbytes)

    def check_part(self, part: Part, field: Field, recipe: Mapping[str, Any] | None) -> None:
        nbytes, row, name = part.nbytes, field.row_nbytes, field.name
        if part.at is None:
            self.require(recipe is not None, f"field {name} has neither offset nor recipe")
            return
        self.require(row or not field.ragged, f"field {name} has rows of no bytes", found=field)
        fits = nbytes == row if not field.ragged else nbytes is None or not nbytes % row
        self.require(fits, f"field {name} has a wrong size", field, nbytes)

    def column(self, json: Any, name: str) -> Column:
        own, count = self.mapping(json, "a column"), self.count
        lines = integer({"lines": 1, **own}, "lines", self.tables, 1)
        first, number = None, self.law(own, "count", count)
        if number is not None:
            first = laws.parse(own.get("first"), count, self.tables, number)
        field = self.schema[name] if name in self.schema.names else None
        if "offsets" not in own:
            is_empty = field is None or not count or field.ragged or not field.row_nbytes
            self.require(is_empty, f"field {name} has no offset")
            return Column(None, lines, first, number)
        grid = self.grid({"rows": count * lines, **own})
        if field is None:
            return Column(grid, lines, first, number)
        text, rows = f"field {name} is laid out as another kind", 1 if field.ragged else lines
        if field.ragged:
            self.require(field.row_nbytes, f"field {name} has rows of no bytes", found=field)
            self.require(first is not None or lines == grid.shape[0], text, field)
        if number is not None and field.ragged:
            rows = field.row_nbytes // max(1, grid.row_nbytes)
        elif number is not None:
            constant = isinstance(number, laws.Affine) and not number.stride
            self.require(constant, text, field)
            rows = number.one(0)
        fits = rows * grid.row_nbytes == field.row_nbytes
        fits &= first is not None or grid.shape[0] == count * lines
        self.require(fits, f"field {name} has a wrong size", field, grid.shape)
        return Column(grid, lines, first, number)

    def grid(self, json: Mapping[str, Any]) -> Grid:
        shape = (integer(json, "rows", self.tables, 1), *self.sizes(json.get("inner")))
        chunk = self.sizes(json.get("chunk", list(shape)))
        files = self.sizes(json["files"]) if "files" in json else None
        itemsize = integer(json, "itemsize", self.tables, 1, 1 << 32)
        alike = len(chunk) == len(shape) and (files is None or len(files) == len(shape))
        self.require(alike, "chunks have other axes than their array", shape, chunk)
        possible = math.prod(shape) * itemsize <= LARGEST
        possible &= chunk == shape or math.prod(chunk) * itemsize <= MAX_CHUNK
        self.require(possible, "an array is impossibly large", found=shape)
        filters = self.filters(json.get("filters", []))
        fill = None if json.get("fill") is None else self.fill(json["fill"], itemsize)
        blocks = Grid(_NONE, shape, itemsize, chunk, files).block_count
        self.require(blocks <= LARGEST, "an array has impossibly many chunks", found=shape)
        located = self.blocks(json, blocks, len(shape))
        masks = self.law(json, "masks", blocks)
        file_numbers = self.law(json, "which", blocks) if files is None else None
        return Grid(located, shape, itemsize, chunk, files, filters, masks, fill, file_numbers)

    def filters(self, json: Any) -> tuple[Mapping[str, Any], ...]:
        good = isinstance(json, list) and len(json) <= 16
        self.require(good, "the filters of an array are damaged", found=json)
        parsed = tuple(self.mapping(f, "a filter") for f in json)
        named = all(isinstance(f.get("id"), str) for f in parsed)
        self.require(named, "a filter has no name", found=json)
        return parsed

    def fill(self, text: Any, itemsize: int) -> bytes:
        try:
            fill = base64.b64decode(text, validate=True)
        except (TypeError, ValueError) as error:
            raise damaged("a fill value is damaged", self.tables, found=text) from error
        self.require(len(fill) == itemsize, "a fill value has a wrong size", itemsize, len(fill))
        return fill

    def groups(self, json: Mapping[str, Any]) -> Groups:
        samples = integer(json, "samples", self.tables, 1)
        number, rest = -(-self.count // samples), None
        if "first" in json:
            number = integer(json, "count", self.tables, 0, self.count)
        first, crcs = self.law(json, "first", number), self.law(json, "crc32c", number)
        files = integer(json, "files", self.tables, 1) if "files" in json else None
        if "rest" in json:
            beside = self.member(json, "rest")
            names = beside.get("fields")
            known = isinstance(names, list) and all(name in self.schema.names for name in names)
            self.require(known, "fields with checksums are not in the schema", found=names)
            sums = laws.parse(beside.get("crc32c"), number, self.tables)
            rest = Rest(tuple(names or ()), sums)
        blocks = self.blocks(json, number, 0 if files is None else 1)
        return Groups(samples, blocks, crcs, first, files, rest)

    def given(self, json: Any, name: str, known_words: Sequence[Words]) -> Given:
        """Return a field that is given; its values may be `known_words`, the names of files."""
        own, text = self.mapping(json, "a field"), "a layout has other fields than the schema"
        self.require(name in self.schema.names, text, self.schema.names, name)
        numbers, field = laws.parse(own.get("which"), self.count, self.tables), self.schema[name]
        if "words" in own:
            self.require(field.kind != "array", f"field {name} is not bytes", field)
            values = Words.from_json(own["words"], self.tables)
            return Given(numbers, next((known for known in known_words if known == values), values))
        counted = field.dtype == np.dtype(np.int64) and not field.inner
        stated = not field.ragged and ("values" in own or counted)
        self.require(stated, f"field {name} has no values", field)
        if "values" not in own:
            return Given(numbers)
        table = self.member(own, "values")
        data, number = self.tables.get(table.get("data")), integer(table, "count", self.tables, 0)
        nbytes = number * field.row_nbytes
        complete = field.row_nbytes and len(data) == nbytes
        self.require(complete, f"the values of field {name} are cut off", nbytes, len(data))
        return Given(numbers, np.frombuffer(data, field.dtype).reshape(number, *field.inner))
