"""Takes fields out of ``tf.train.Example`` records, by the recipe that a layout has.

``{"name": "example", "features": {field: [feature, list]}, "others": true}``: the feature that
each field is read from, and the list it has, ``"bytes"``, ``"float"`` or ``"int64"``. Features
that are none of these are an error unless there are ``others``.

Evenly spaced ranges, one per record, become a view; everything else is gathered into one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Bytes,
    Column,
    Ints,
    Ragged,
    Schema,
    empty_batch,
)
from dsprep.errors import FormatError
from dsprep.formats.protobuf import Spans, WireError, decode_varints, read_varint
from dsprep.formats.tfrecord import example as wire
from dsprep.formats.tfrecord.example import BYTES, INT64, TYPES, Value
from dsprep.formats.tfrecord.features import Feature, Form
from dsprep.reading.records import Label, damaged_recipe

_LISTS: Mapping[str, tuple[int, Form]] = {
    **{name: (number, "value") for number, name in TYPES.items()},
    "strings": (BYTES, "strings"),
    "lengths": (BYTES, "lengths"),
}
"""A list's name in a recipe, and the part that is read."""


def describe(features: Sequence[Feature], others: bool) -> dict[str, Any]:
    """Return the recipe for `features` as JSON; `others` if records may have more of them."""
    lists = {
        f.field.name: [f.name, TYPES[f.type] if f.form == "value" else f.form] for f in features
    }
    return {"name": "example", "features": lists, **({"others": True} if others else {})}


def example(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes records of Examples; `FormatError` if `params` are damaged."""
    lists: Any = params.get("features")
    others = params.get("others", False)
    try:
        stored = {field: (name, *_LISTS[kind]) for field, (name, kind) in lists.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged_recipe("the recipe for Examples is damaged", found=lists) from error
    chosen = [(*stored[f.name], f) for f in schema if f.name in stored]
    features = [Feature(name, type_, f, form=form) for name, type_, form, f in chosen]
    names = [name for name, *_ in stored.values()]
    good = isinstance(others, bool) and all(isinstance(name, str) for name in names)
    if not good or not all(f.can_be(f.field) for f in features):
        raise damaged_recipe("the recipe for Examples does not fit the fields", found=lists)
    return Recipe(features, None if others else frozenset(names))


class Recipe:
    """Decodes Examples; see ``dsprep.reading.records``. `known` as for `locate`."""

    def __init__(self, features: Sequence[Feature], known: frozenset[str] | None) -> None:
        self._features, self._known = features, known

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
            return empty_batch(Schema(tuple(f.field for f in self._features)))
        spans = locate(buffer, starts, lengths, self._features, self._known, label)
        return {
            f.field.name: column(buffer, spans[f.name], f, label, arena) for f in self._features
        }

    def one(self, record: Bytes) -> Batch | None:
        """Return the fields of one record; None where only `decode` judges it."""
        out: Batch = {}
        try:
            parsed = wire.parse(record.data, 0, len(record))
            if self._known is not None and not parsed.keys() <= self._known:
                return None
            for f in self._features:
                field, value = f.field, parsed.get(f.name)
                if f.form == "lengths" or value is None or value.type != f.type:
                    return None
                ((a, b),) = value.ranges
                values: Array = record[a:b]
                if f.type == INT64:  # one, such as a label
                    number, end = read_varint(record.data, a, b)
                    exact = np.array([number & (1 << 64) - 1], np.uint64).view(np.int64)
                    values = exact.astype(field.dtype, copy=False)
                    if end < b or int(values[0]) != exact[0]:
                        return None
                rows = values.view(field.dtype).reshape(-1, *field.inner)
                edges = np.array([0, len(rows)])
                out[field.name] = Ragged(rows, edges, field.kind) if field.ragged else rows
                if len(rows) != 1 and not field.ragged:
                    return None
        except ValueError:  # of several ranges, or none; or not of whole rows
            return None
        return out


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
) -> Mapping[str, Spans]:
    """Return where the wanted features are in the payloads ``buffer[start:start + length]``.

    Records may have other features if they are `known`, or if `known` is None. Raises `FormatError`
    if one is not an Example, lacks a feature, has it in another list, or has one more.
    """
    spans = wire.parse_together(buffer, starts, lengths) if len(starts) > 1 else None
    if spans is not None and (known is None or spans.keys() <= known):
        types = {name: each.type for name, each in spans.items()}
        if all(types.get(f.name) == f.type for f in features):
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


def _join(records: Sequence[Mapping[str, Value]], feature: Feature, label: Label) -> Spans:
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
    buffer: Bytes, spans: Spans, feature: Feature, label: Label, arena: Arena | None
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
        values = spans.gather(buffer, arena, f"read.{field.name}")
        rows = values.view(field.dtype).reshape(-1, *field.inner)
        return Ragged.from_lengths(rows, spans.totals // nbytes, field.kind)
    if not nbytes:
        return np.empty((count, *field.inner), field.dtype)
    values = spans.rows(buffer, nbytes, arena, f"read.{field.name}")
    return values.view(field.dtype).reshape(count, *field.inner)


def _integers(buffer: Bytes, spans: Spans, feature: Feature, label: Label) -> Column:
    """Return an int64 feature, as the integer type that was asked for."""
    field = feature.field
    try:
        values, counts = decode_varints(spans.gather(buffer), spans.totals)
    except WireError as error:
        raise mismatch(label(0), f"feature {feature.name} is damaged", found=error) from error
    check_sizes(counts * field.dtype.itemsize, feature, label)
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
        rows = cast.reshape(-1, *field.inner)
        return Ragged.from_lengths(rows, counts // math.prod(field.inner))
    return cast.reshape(len(counts), *field.inner)


def check_sizes(nbytes: Ints, feature: Feature, label: Label) -> None:
    """Raise `FormatError` for the first record whose values do not fill the field's shape."""
    vary = f"{feature.field.name}:{feature.field.dtype.name}[None]"
    fix = f"leave its type out, or if it varies, say so as in --field {vary}"
    feature.field.check_nbytes(nbytes, label, fix)
