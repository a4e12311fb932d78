"""The JSON of a layout; the specification is in `dsprep.sidecar.spec`."""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Mapping, Sequence
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


def to_json(layout: FileLayout, schema: Schema, tables: Tables) -> dict[str, Any]:
    """Return a layout whose laws have been fitted as JSON."""
    json: dict[str, Any] = {}
    if layout.records is not None:
        json["records"] = _records_json(layout.records, layout.count, tables)
    if layout.columns:
        json["columns"] = {
            name: _column_json(column, layout.count, schema[name], tables)
            for name, column in layout.columns.items()
        }
    if layout.files:
        json["files"] = {
            name: {"names": own.names.to_json(tables), "lengths": own.lengths.to_json(tables)}
            for name, own in layout.files.items()
        }
    if layout.given:
        json["given"] = {name: _given_json(given, tables) for name, given in layout.given.items()}
    if layout.unlocated:
        json["unlocated"] = dict(layout.unlocated)
    if layout.groups is not None:
        groups = layout.groups
        json["groups"] = {"samples": groups.samples, **_blocks_json(groups.blocks, tables)}
        if groups.crc32c is not None:
            json["groups"]["crc32c"] = groups.crc32c.to_json(tables)
        if groups.files is not None:
            json["groups"]["files"] = groups.files
        if groups.first is not None:
            json["groups"]["count"] = groups.blocks.count
            json["groups"]["first"] = groups.first.to_json(tables)
        if groups.rest is not None:
            rest = groups.rest
            crcs = rest.crc32c.to_json(tables)
            json["groups"]["rest"] = {"fields": list(rest.fields), "crc32c": crcs}
    if layout.facts:
        json["provenance"] = dict(layout.facts)
    return json


def from_json(json: Any, count: int, schema: Schema, tables: Tables) -> FileLayout:
    """Return the layout of a file of `count` samples.

    Raises
    ------
    FormatError
        If it does not follow the specification, or does not go with the schema.
    """
    top = _object(json, "a layout", tables)
    records = columns = None
    unlocated = {str(k): str(v) for k, v in _sub(top, "unlocated", tables).items()}
    if "records" in top and "names" not in _sub(top, "records", tables):
        records = _records(_sub(top, "records", tables), count, schema, tables)
    columns = {
        str(name): _column(_object(column, "a column", tables), count, str(name), schema, tables)
        for name, column in _sub(top, "columns", tables).items()
    }
    files = {
        str(name): _own_files(_object(own, "a field", tables), count, str(name), schema, tables)
        for name, own in _files(top, tables).items()
    }
    words = [own.names for own in files.values()]
    given = {
        str(name): _given(_object(one, "a field", tables), count, str(name), schema, tables, words)
        for name, one in _sub(top, "given", tables).items()
    }
    named = [*(records.parts if records else ()), *columns, *files, *given, *unlocated]
    if sorted(named) != sorted(schema.names):
        raise damaged("a layout has other fields than the schema", tables, schema.names, named)
    groups = None
    if "groups" in top:
        groups = _groups(_sub(top, "groups", tables), count, schema, tables)
    facts = _sub(top, "provenance", tables)
    return FileLayout(count, records, columns, unlocated, groups, facts, given=given, files=files)


# --- blocks ----------------------------------------------------------------------------------


def _blocks_json(blocks: Blocks, tables: Tables) -> dict[str, Any]:
    path = {"path": blocks.path} if blocks.path else {}
    offsets, lengths = blocks.offsets.to_json(tables), blocks.lengths.to_json(tables)
    return {**path, "offsets": offsets, "lengths": lengths}


def _blocks(json: Mapping[str, Any], count: int, axes: int, tables: Tables) -> Blocks:
    lengths = laws.parse(json.get("lengths"), count, tables)
    offsets = laws.parse(json.get("offsets"), count, tables, lengths)
    return Blocks(offsets, lengths, _path(json.get("path", ""), axes, tables))


# --- files of their own ----------------------------------------------------------------------


def _files(top: Mapping[str, Any], tables: Tables) -> Mapping[str, Any]:
    """Return the fields with files of their own; until 2026 they were records with names."""
    records = _sub(top, "records", tables)
    if "names" not in records:
        return _sub(top, "files", tables)
    parts = _sub(records, "parts", tables)
    if records.keys() - {"names", "offsets", "lengths", "parts"} or records.get("offsets") != 0:
        raise damaged("records in files of their own do not begin where these begin", tables)
    if any(part != [0, None] for part in parts.values()):
        raise damaged("records in files of their own have several fields", tables, found=parts)
    own = {key: records.get(key) for key in ("names", "lengths")}
    return {name: own for name in parts}  # noqa: C420


def _own_files(
    json: Mapping[str, Any], count: int, name: str, schema: Schema, tables: Tables
) -> OwnFiles:
    if name in schema.names and (not schema[name].ragged or schema[name].row_nbytes != 1):
        raise damaged(f"field {name} is not bytes", tables, found=schema[name])
    return OwnFiles(
        _names(json.get("names"), count, tables), laws.parse(json.get("lengths"), count, tables)
    )


def _names(json: Any, count: int, tables: Tables) -> Words:
    """Return names of files, all of which stay below the dataset."""
    names = Words.from_json(json, tables)
    if len(names) != count:
        raise damaged("there are not as many names as files", tables, count, len(names))
    match = _LEAVING.search(names.data)
    if match is not None:
        near = names.data[max(0, match.start() - 40) : match.end() + 40]
        raise damaged("the path of a file leaves the dataset", tables, found=near)
    return names


_LEAVING = re.compile(rb"(?:\A|[\0/])\.{0,2}(?=[\0/])")
"""Among names that each have a NUL after them: a component that is empty, ``.`` or ``..``."""


def _path(path: Any, axes: int, tables: Tables) -> str:
    """Return a path that stays below the dataset, whatever its placeholders stand for."""
    if not isinstance(path, str) or "\0" in path:
        raise damaged("the path of a file is wrong", tables, found=path)
    try:
        os.fsencode(path)
    except ValueError as error:
        raise damaged("no file can have this path", tables, found=path) from error
    if path and (path.startswith("/") or any(p in ("", ".", "..") for p in path.split("/"))):
        raise damaged("the path of a file leaves the dataset", tables, found=path)
    if any(int(axis) >= axes for axis in _PLACEHOLDER.findall(path)) and axes:
        raise damaged("the path of a file names an axis that is not there", tables, found=path)
    return path


def file_path(template: str, file_index: Sequence[int]) -> str:
    """Return the path of the file at `file_index` in the grid of files."""
    return _PLACEHOLDER.sub(lambda m: str(file_index[int(m[1])]), template)


# --- records ---------------------------------------------------------------------------------


def _records_json(records: Records, count: int, tables: Tables) -> dict[str, Any]:
    json = _blocks_json(records.blocks, tables)
    if records.blocks.count != count:
        json["blocks"] = records.blocks.count
    if records.order is not None:
        json["order"] = records.order.to_json(tables)
    if records.frame is not None:
        json["frame"] = dict(records.frame)
    if records.recipe is not None:
        json["recipe"] = dict(records.recipe)
    json["parts"] = {
        name: None if part.at is None else [part.at, part.nbytes]
        for name, part in records.parts.items()
    }
    return json


def _records(json: Mapping[str, Any], count: int, schema: Schema, tables: Tables) -> Records:
    number = integer({"blocks": count, **json}, "blocks", tables, 0)
    order = None
    if "order" in json:
        order = laws.parse(json["order"], count, tables)
    elif number != count:
        raise damaged("there are not as many records as samples", tables, count, number)
    blocks = _blocks(json, number, 0, tables)
    frame = _sub(json, "frame", tables) if "frame" in json else None
    recipe = _sub(json, "recipe", tables) if "recipe" in json else None
    parts = {}
    for name, span in _sub(json, "parts", tables).items():
        parts[str(name)] = part = _part(span, tables)
        if str(name) in schema.names:
            _check_part(part, schema[str(name)], recipe, tables)
    return Records(blocks, parts, order, recipe, frame)


def _part(span: Any, tables: Tables) -> Part:
    if span is None:
        return Part()
    if not isinstance(span, list) or len(span) != 2:
        raise damaged("the offset of a field is damaged", tables, "[at, nbytes]", span)
    at, nbytes = span
    limited = {"at": at} if nbytes is None else {"at": at, "nbytes": nbytes}
    for key in limited:
        integer(limited, key, tables, 0)
    return Part(at, nbytes)


def _check_part(part: Part, field: Field, recipe: Mapping[str, Any] | None, tables: Tables) -> None:
    if part.at is None:
        if recipe is None:
            raise damaged(f"field {field.name} has neither offset nor recipe", tables)
        return
    if not field.ragged and part.nbytes != field.row_nbytes:
        raise damaged(f"field {field.name} has a wrong size", tables, field.row_nbytes, part.nbytes)
    if field.ragged and not field.row_nbytes:
        raise damaged(f"field {field.name} has rows of no bytes", tables, found=str(field))
    if field.ragged and part.nbytes is not None and part.nbytes % field.row_nbytes:
        raise damaged(f"field {field.name} has a wrong size", tables, field, part.nbytes)


# --- columns ---------------------------------------------------------------------------------


def _column_json(column: Column, count: int, field: Field, tables: Tables) -> dict[str, Any]:
    json: dict[str, Any] = {}
    grid = column.grid
    if grid is not None:
        json = _grid_json(grid, tables)
        if column.first is None and grid.shape[0] == count * column.lines:
            del json["rows"]
    if column.lines != 1:
        json["lines"] = column.lines
    if column.first is not None and column.count is not None:
        json["count"] = column.count.to_json(tables)
        json["first"] = column.first.to_json(tables)
    return json


def _grid_json(grid: Grid, tables: Tables) -> dict[str, Any]:
    json = _blocks_json(grid.blocks, tables)
    json |= {"rows": grid.shape[0], "inner": list(grid.shape[1:]), "itemsize": grid.itemsize}
    if grid.chunk != grid.shape:
        json["chunk"] = list(grid.chunk)
    if grid.files is not None:
        json["files"] = list(grid.files)
    if grid.filters:
        json["filters"] = [dict(f) for f in grid.filters]
    if grid.masks is not None:
        json["masks"] = grid.masks.to_json(tables)
    if grid.file_numbers is not None:
        json["which"] = grid.file_numbers.to_json(tables)
    if grid.fill is not None:
        json["fill"] = base64.b64encode(grid.fill).decode()
    return json


def _column(
    json: Mapping[str, Any], count: int, name: str, schema: Schema, tables: Tables
) -> Column:
    lines = integer({"lines": 1, **json}, "lines", tables, 1)
    first = number = None
    if "count" in json:
        number = laws.parse(json["count"], count, tables)
        first = laws.parse(json.get("first"), count, tables, number)
    field = schema[name] if name in schema.names else None
    if "offsets" not in json:
        if field is not None and count and not field.ragged and field.row_nbytes:
            raise damaged(f"field {name} has no offset", tables)
        return Column(None, lines, first, number)
    grid = _grid({"rows": count * lines, **json}, tables)
    if field is not None:
        if field.ragged and not field.row_nbytes:
            raise damaged(f"field {name} has rows of no bytes", tables, found=str(field))
        if field.ragged and first is None and lines != grid.shape[0]:
            raise damaged(f"field {name} is laid out as another kind", tables, field)
        per = grid.row_nbytes * (1 if field.ragged else lines)
        if number is not None:
            per = _rows_nbytes(field, grid, number, tables)
        if per != field.row_nbytes or (first is None and grid.shape[0] != count * lines):
            raise damaged(f"field {name} has a wrong size", tables, field, grid.shape)
    return Column(grid, lines, first, number)


def _rows_nbytes(field: Field, grid: Grid, number: Law, tables: Tables) -> int:
    """Return the bytes of the rows of the array that are a row of a field; see `Column`."""
    if field.ragged:
        rows = field.row_nbytes // max(1, grid.row_nbytes)
    elif isinstance(number, laws.Affine) and not number.stride:
        rows = number.base
    else:
        raise damaged(f"field {field.name} is laid out as another kind", tables, field)
    return rows * grid.row_nbytes


def _grid(json: Mapping[str, Any], tables: Tables) -> Grid:
    rows = integer(json, "rows", tables, 1)
    shape = (rows, *_sizes(json.get("inner"), tables))
    chunk = _sizes(json.get("chunk", list(shape)), tables)
    files = _sizes(json["files"], tables) if "files" in json else None
    itemsize = integer(json, "itemsize", tables, 1, 1 << 32)
    if len(chunk) != len(shape) or (files is not None and len(files) != len(shape)):
        raise damaged("chunks have other axes than their array", tables, shape, chunk)
    chunk_nbytes = math.prod(chunk) * itemsize
    if math.prod(shape) * itemsize > LARGEST or (chunk != shape and chunk_nbytes > MAX_CHUNK):
        raise damaged("an array is impossibly large", tables, found=shape)
    fill = json.get("fill")
    if fill is not None:
        fill = _fill(fill, itemsize, tables)
    grid = Grid(_NONE, shape, itemsize, chunk, files, _filters(json, tables), None, fill)
    if grid.block_count > LARGEST:
        raise damaged("an array has impossibly many chunks", tables, found=shape)
    blocks = _blocks(json, grid.block_count, len(shape), tables)
    masks = file_numbers = None
    if "masks" in json:
        masks = laws.parse(json["masks"], grid.block_count, tables)
    if "which" in json and files is None:
        file_numbers = laws.parse(json["which"], grid.block_count, tables)
    return Grid(blocks, shape, itemsize, chunk, files, grid.filters, masks, fill, file_numbers)


_NONE = Blocks(laws.Affine(0, 0), laws.Affine(0, 0))


def _filters(json: Mapping[str, Any], tables: Tables) -> tuple[Mapping[str, Any], ...]:
    filters = json.get("filters", [])
    if not isinstance(filters, list) or len(filters) > 16:
        raise damaged("the filters of an array are damaged", tables, found=filters)
    parsed = tuple(_object(f, "a filter", tables) for f in filters)
    if not all(isinstance(f.get("id"), str) for f in parsed):
        raise damaged("a filter has no name", tables, found=filters)
    return parsed


def _fill(text: Any, itemsize: int, tables: Tables) -> bytes:
    try:
        fill = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise damaged("a fill value is damaged", tables, found=text) from error
    if len(fill) != itemsize:
        raise damaged("a fill value has a wrong size", tables, itemsize, len(fill))
    return fill


def _groups(json: Mapping[str, Any], count: int, schema: Schema, tables: Tables) -> Groups:
    samples = integer(json, "samples", tables, 1)
    number, first = -(-count // samples), None
    if "first" in json:
        number = integer(json, "count", tables, 0, count)
        first = laws.parse(json["first"], number, tables)
    crcs = laws.parse(json["crc32c"], number, tables) if "crc32c" in json else None
    files = integer(json, "files", tables, 1) if "files" in json else None
    axes = 0 if files is None else 1
    rest = None
    if "rest" in json:
        beside = _sub(json, "rest", tables)
        names = beside.get("fields")
        if not isinstance(names, list) or any(n not in schema.names for n in names):
            raise damaged("fields with checksums are not in the schema", tables, found=names)
        rest = Rest(tuple(names), laws.parse(beside.get("crc32c"), number, tables))
    return Groups(samples, _blocks(json, number, axes, tables), crcs, first, files, rest)


# --- values ----------------------------------------------------------------------------------


def _given_json(given: Given, tables: Tables) -> dict[str, Any]:
    json: dict[str, Any] = {"which": given.value_numbers.to_json(tables)}
    values = given.values
    if isinstance(values, Words):
        json["words"] = values.to_json(tables)
    elif values is not None:
        json["values"] = {"count": len(values), "data": tables.put(values.tobytes())}
    return json


def _given(
    json: Mapping[str, Any],
    count: int,
    name: str,
    schema: Schema,
    tables: Tables,
    known_words: Sequence[Words],
) -> Given:
    """Return a field that is given; its values may be `known_words`, the names of files."""
    if name not in schema.names:
        raise damaged("a layout has other fields than the schema", tables, schema.names, name)
    numbers, field = laws.parse(json.get("which"), count, tables), schema[name]
    if "words" in json:
        if field.kind == "array":
            raise damaged(f"field {name} is not bytes", tables, field)
        values = Words.from_json(json["words"], tables)
        return Given(numbers, next((known for known in known_words if known == values), values))
    if field.ragged:
        raise damaged(f"field {name} has no values", tables, field)
    if "values" not in json:
        if field.dtype != np.dtype(np.int64) or field.inner:
            raise damaged(f"field {name} has no values", tables, field)
        return Given(numbers)
    table = _sub(json, "values", tables)
    data, number = tables.get(table.get("data")), integer(table, "count", tables, 0)
    if not field.row_nbytes or len(data) != number * field.row_nbytes:
        expected = number * field.row_nbytes
        raise damaged(f"the values of field {name} are cut off", tables, expected, len(data))
    return Given(numbers, np.frombuffer(data, field.dtype).reshape(number, *field.inner))


# --- checking --------------------------------------------------------------------------------


def _object(json: Any, subject: str, tables: Tables) -> Mapping[str, Any]:
    if not isinstance(json, Mapping):
        raise damaged(f"{subject} is not a JSON object", tables, found=json)
    return json


def _sub(json: Mapping[str, Any], key: str, tables: Tables) -> Mapping[str, Any]:
    return _object(json.get(key, {}), key, tables)


def _sizes(json: Any, tables: Tables) -> tuple[int, ...]:
    good = isinstance(json, list) and len(json) <= MAX_AXES
    if not good or not all(
        isinstance(n, int) and not isinstance(n, bool) and 0 < n <= LARGEST for n in json
    ):
        raise damaged("a shape is damaged", tables, "positive integers", json)
    return tuple(json)
