"""How fields are taken out of ``tf.train.Example`` records, by the recipe that a layout has.

``{"name": "example", "features": {field: [feature, list]}, "others": true}``: the feature that
each field is read from, and the list it has, ``"bytes"``, ``"float"`` or ``"int64"``. Features
that are none of these are an error unless there are ``others``.

Evenly spaced ranges, one per record, become a view; everything else is gathered into one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Bytes,
    Column,
    Field,
    Ints,
    Ragged,
    Schema,
    empty_batch,
    new_array,
)
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import FormatError
from dsprep.formats.protobuf import WireError, read_varints
from dsprep.formats.tfrecord import example as wire
from dsprep.formats.tfrecord.batch_parser import parse_together
from dsprep.formats.tfrecord.example import BYTES, FLOAT, INT64, TYPES, FeatureSpans, Value
from dsprep.formats.tfrecord.features import FLOAT32, INT, Feature, Form, fits_int64
from dsprep.reading.records import Label, damaged_recipe

Like: TypeAlias = tuple[int, list[tuple[int, int, bytes]], list[tuple[int, int]]]
"""Of a record in which values have been found: its bytes, those between values with their ranges,
and the range of the values of each feature."""

FEW = 128
"""Bytes of packed integers up to which they are taken one by one."""

_LISTS: Mapping[str, tuple[int, Form]] = {
    **{name: (number, "value") for number, name in TYPES.items()},
    "strings": (BYTES, "strings"),
    "lengths": (BYTES, "lengths"),
}
"""What a recipe calls a list, and what is read of it."""


def describe(features: Sequence[Feature], others: bool) -> dict[str, Any]:
    """Return the recipe for `features` as JSON; `others` if records may have more of them."""
    lists = {
        f.field.name: [f.name, TYPES[f.type] if f.form == "value" else f.form] for f in features
    }
    return {"name": "example", "features": lists, **({"others": True} if others else {})}


def example(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes records of Examples; `FormatError` if `params` are damaged."""
    lists, others = params.get("features"), params.get("others", False)
    if not isinstance(lists, Mapping) or not isinstance(others, bool):
        raise damaged_recipe("the recipe for Examples is damaged", found=lists)
    by_field = {}
    for field, entry in lists.items():
        good = (
            isinstance(entry, list) and len(entry) == 2 and all(isinstance(p, str) for p in entry)
        )
        if not good or entry[1] not in _LISTS:
            raise damaged_recipe(
                f"the feature of field {field} is damaged",
                expected="its name and its list, one of " + ", ".join(_LISTS),
                found=entry,
            )
        by_field[field] = entry
    features = []
    for f in (f for f in schema if f.name in by_field):
        type_, form = _LISTS[by_field[f.name][1]]
        features.append(Feature(by_field[f.name][0], type_, f, form=form))
        if not _can_be(type_, form, f):
            raise damaged_recipe(f"a {by_field[f.name][1]} list cannot be the field {f}")
    return Recipe(features, None if others else frozenset(name for name, _ in by_field.values()))


def _can_be(type_: int, form: Form, field: Field) -> bool:
    """Whether a list of this type can be read as the field."""
    if form == "strings":
        return field.kind == "bytes"
    if form == "lengths":
        return field.dtype == INT and field.shape == (None,) and field.kind == "array"
    if type_ == BYTES:
        return True
    return field.kind == "array" and (
        field.dtype == FLOAT32 if type_ == FLOAT else fits_int64(field)
    )


class Recipe:
    """Decodes Examples; see ``dsprep.reading.records``. `known` as for `locate`."""

    def __init__(self, features: Sequence[Feature], known: frozenset[str] | None) -> None:
        self._features, self._known = features, known
        self._like: Like | None = None
        self._schema = Schema(tuple(f.field for f in features))

    def decode(
        self,
        buffer: Bytes,
        starts: Ints,
        lengths: Ints,
        label: Label,
        arena: Arena | None = None,
    ) -> Batch:
        """Return the samples whose records are ``buffer[starts[i]:starts[i] + lengths[i]]``.

        Columns may be views of `buffer`. Raises `FormatError` if record i is not as the recipe
        says; ``label(i)`` is its name.
        """
        if not len(starts) or not self._features:
            return empty_batch(self._schema)
        spans = locate(buffer, starts, lengths, self._features, self._known, label)
        return {
            f.field.name: column(buffer, spans[f.name], f, label, arena) for f in self._features
        }

    def one(self, record: Bytes) -> Batch | None:
        """Return the fields of one record; None if it is out of the ordinary.

        Most are like the one before, in which every value has been found already.
        """
        data, like = record.data, self._like
        if like is None or len(data) != like[0] or any(data[a:b] != x for a, b, x in like[1]):
            like = self._like = self._learn(data)
        if like is None:
            return None
        out: Batch = {}
        for feature, (a, b) in zip(self._features, like[2], strict=True):
            field = feature.field
            values = _few_integers(record[a:b], field) if feature.type == INT64 else record[a:b]
            if values is None or len(values) * values.itemsize % field.row_nbytes:
                return None
            rows = values.view(field.dtype).reshape(-1, *field.inner)
            if field.ragged:
                out[field.name] = Ragged(rows, np.array([0, len(rows)]), field.kind)
            elif len(rows) == 1:
                out[field.name] = rows
            else:
                return None
        return out

    def _learn(self, data: memoryview) -> Like | None:
        """Return what a record says of those like it; None unless each feature has one range."""
        try:
            parsed = wire.parse(data, 0, len(data))
        except WireError:
            return None
        glue = wire.glue(parsed, 0, len(data))
        values = [parsed.get(f.name) for f in self._features if f.form != "lengths"]
        ranges = [
            value.ranges[0]
            for f, value in zip(self._features, values, strict=False)
            if value is not None and value.ranges and value.type == f.type and f.field.row_nbytes
        ]
        if glue is None or len(ranges) < len(self._features):
            return None
        if any(value.loose for value in parsed.values()):
            return None
        if self._known is not None and not parsed.keys() <= self._known:
            return None
        return len(data), [(a, b, bytes(data[a:b])) for a, b in glue], ranges


# --- columns ---


def mismatch(
    where: str,
    problem: str,
    expected: object = None,
    found: object = None,
    fix: str = "take the records whole with --raw-records",
) -> FormatError:
    """Return the error for a record that is not like those that were inspected."""
    return FormatError(problem, where=where, expected=expected, found=found, fix=fix)


def locate(
    buffer: Bytes,
    starts: Ints,
    lengths: Ints,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    label: Label,
) -> Mapping[str, FeatureSpans]:
    """Return where the wanted features are in the payloads ``buffer[start:start + length]``.

    Records may have other features if they are `known`, or if `known` is None. Raises `FormatError`
    if one is not an Example, lacks a feature, has it in another list, or has one more.
    """
    spans = parse_together(buffer, starts, lengths)
    if spans is not None and (known is None or spans.keys() <= known):
        none = np.zeros(len(starts), np.int64)
        for f in features:
            if f.name not in spans and f.field.ragged:
                spans[f.name] = FeatureSpans(f.type, none, none, none, counts=none)
        if all(f.name in spans and spans[f.name].type == f.type for f in features):
            return spans
    records = []
    ends = (starts + lengths).tolist()
    for i, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        try:
            records.append(wire.parse(buffer.data, start, end))
        except WireError as error:
            raise mismatch(label(i), "the record is not a tf.train.Example", found=error) from error
        if known is not None and not records[-1].keys() <= known:
            raise mismatch(
                label(i),
                f"feature {min(records[-1].keys() - known)} was not known when the file was opened",
                fix="the file or its sidecar was changed: dsprep provenance writes that again",
            )
    return {f.name: _join(records, f, label) for f in features}


def _join(records: Sequence[Mapping[str, Value]], feature: Feature, label: Label) -> FeatureSpans:
    """Return one feature of records that were taken apart one by one."""
    values = [record.get(feature.name) for record in records]
    for i, value in enumerate(values):
        if value is not None and value.type != feature.type:
            raise mismatch(
                label(i),
                f"feature {feature.name} is of another type",
                expected=f"a {TYPES[feature.type]} list",
                found=f"a {TYPES[value.type]} list",
            )
        one = feature.type == BYTES and feature.form == "value"
        if one and value is not None and len(value.ranges) > 1:
            raise mismatch(
                label(i),
                f"feature {feature.name} has several values",
                expected="one byte string",
                found=len(value.ranges),
            )
        absent = value is None or (feature.type == BYTES and not value.ranges)
        if absent and not feature.field.ragged:
            problem = f"feature {feature.name} is missing"
            raise mismatch(label(i), problem, expected=str(feature.field))
    return wire.join(values, feature.type)


def column(
    buffer: Bytes, spans: FeatureSpans, feature: Feature, label: Label, arena: Arena | None
) -> Column:
    """Return one field of the records that `spans` are of; `FormatError` if values do not fit."""
    field = feature.field
    if feature.form == "lengths":
        counts = np.ones_like(spans.totals) if spans.counts is None else spans.counts
        return Ragged.from_lengths(spans.lengths.astype(field.dtype), counts)
    if feature.type == INT64:
        return _integers(buffer, spans, feature, label)
    nbytes, count = field.row_nbytes, len(spans.totals)
    check_sizes(spans.totals, feature, label)
    if field.ragged:
        values = gather(buffer, spans, arena, f"read.{field.name}")
        rows = values.view(field.dtype).reshape(-1, *field.inner)
        return Ragged.from_lengths(rows, spans.totals // nbytes, field.kind)
    if not nbytes:
        return np.empty((count, *field.inner), field.dtype)
    steps = np.diff(spans.starts)
    if spans.counts is None and count > 1 and steps[0] >= nbytes and (steps == steps[0]).all():
        strides = int(steps[0]), 1
        first = buffer[int(spans.starts[0]) :]
        values = as_strided(first, (count, nbytes), strides, writeable=False)
    else:
        values = gather(buffer, spans, arena, f"read.{field.name}").reshape(count, nbytes)
    return values.view(field.dtype).reshape(count, *field.inner)


def _integers(buffer: Bytes, spans: FeatureSpans, feature: Feature, label: Label) -> Column:
    """Return an int64 feature, as the integer type that was asked for."""
    field, rows = feature.field, math.prod(feature.field.inner)
    try:
        values, counts = wire.decode_varints(gather(buffer, spans, None, ""), spans.totals)
    except WireError as error:
        raise mismatch(label(0), f"feature {feature.name} is damaged", found=error) from error
    check_sizes(counts, feature, label)
    cast: Array = values
    if field.dtype != values.dtype:
        cast = values.astype(field.dtype)
        lost = cast.astype(np.int64) != values
        if lost.any():
            i = int(lost.argmax())
            record = int(np.searchsorted(np.cumsum(counts), i, side="right"))
            problem = f"feature {feature.name} does not fit"
            raise mismatch(label(record), problem, str(field), int(values[i]))
    if field.ragged:
        return Ragged.from_lengths(cast.reshape(-1, *field.inner), counts // rows)
    return cast.reshape(len(counts), *field.inner)


def _few_integers(data: Bytes, field: Field) -> Array | None:
    """Return the packed integers of one record as the type of a field; None if they do not fit."""
    try:
        if len(data) > FEW:
            numbers = wire.decode_varints(data, np.array([len(data)]))[0]
        else:
            numbers = np.array([*read_varints(data.data, len(data))], np.uint64).view(np.int64)
    except WireError:
        return None
    cast: Array = numbers.astype(field.dtype, copy=False)
    same = cast is numbers or bool((cast.astype(np.int64) == numbers).all())
    return cast if same else None


def check_sizes(have: Ints, feature: Feature, label: Label) -> None:
    """Raise `FormatError` for the first record whose values do not fill the field's shape.

    They are counted in numbers of an int64 list, in bytes of others.
    """
    field, integers = feature.field, feature.type == INT64
    want = math.prod(field.inner) if integers else field.row_nbytes
    unit = 1 if integers else field.dtype.itemsize
    bad = have % want != 0 if field.ragged and want else have != want
    if field.ragged and not want:
        raise mismatch(label(0), f"feature {feature.name} cannot be {field}", "rows of >= 1 byte")
    if not bad.any():
        return
    i = int(bad.argmax())
    unit = unit if have[i] % unit == 0 else 1
    elements = "bytes" if field.dtype.itemsize > unit and not integers else "elements"
    raise mismatch(
        label(i),
        f"feature {feature.name} does not fit {field}",
        f"{'a multiple of ' if field.ragged else ''}{want // unit} {elements}",
        int(have[i]) // unit,
        "leave its type out"
        if field.ragged
        else f"if it varies, say so as in --field {field.name}:{field.dtype.name}[None]",
    )


def gather(buffer: Bytes, spans: FeatureSpans, arena: Arena | None, key: str) -> Bytes:
    """Return the bytes of all ranges, one after another; of one range a view."""
    lengths = spans.lengths
    if len(lengths) == 1:
        return buffer[int(spans.starts[0]) :][: int(lengths[0])]
    out = new_array(arena, key, (int(lengths.sum()),), np.dtype(np.uint8))
    move_spans(buffer, spans.starts, lengths, out, offsets_of(lengths)[:-1])
    return out
