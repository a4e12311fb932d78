"""How fields are taken out of ``tf.train.Example`` records, by the recipe that a layout has.

``{"name": "example", "features": {field: [feature, list]}, "others": true}``: the feature that
each field is read from, and the list it has, ``"bytes"``, ``"float"`` or ``"int64"``. Features
that are none of these are an error unless there are ``others``.

Evenly spaced ranges, one per record, become a view; everything else is gathered into one array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
from dsprep.formats.tfrecord.framing import FRAME
from dsprep.reading.records import damaged_recipe

Range: TypeAlias = tuple[int, int]
"""The first byte of a range, and the one behind its last."""

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
        self._like: Template | None = None
        self._schema = Schema(tuple(f.field for f in features))

    def decode(
        self,
        buffer: Bytes,
        starts: Ints,
        lengths: Ints,
        label: Callable[[int], str],
        arena: Arena | None = None,
    ) -> Batch:
        """Return the samples whose records are ``buffer[starts[i]:starts[i] + lengths[i]]``.

        Columns may be views of `buffer`. Raises `FormatError` if record i is not as the recipe
        says; ``label(i)`` is its name.
        """
        if not len(starts) or not self._features:
            return empty_batch(self._schema)
        try:
            spans = locate(buffer, starts, lengths, self._features, self._known)
            return {f.field.name: column(buffer, spans[f.name], f, arena) for f in self._features}
        except RecordMismatch as m:
            raise m.named(label) from m

    def one(self, record: Bytes) -> Batch | None:
        """Return the fields of one record; None if it is out of the ordinary.

        Most are like the one before, in which every value has been found already.
        """
        data, like = wire.view(record), self._like
        if like is None or not like.fits(data):
            like = self._like = Template.of(data, self._features, self._known)
        if like is None:
            return None
        out: Batch = {}
        for feature, (a, b) in zip(self._features, like.ranges, strict=True):
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


class Template:
    """A record in which the values of features have been found.

    Attributes
    ----------
    ranges
        Of each feature: where its values begin in the record and end.
    """

    def __init__(self, data: memoryview, glue: Sequence[Range], ranges: Sequence[Range]) -> None:
        self._nbytes, self.ranges = len(data), ranges
        self._glue = [(a, b, bytes(data[a:b])) for a, b in glue]

    @classmethod
    def of(
        cls, data: memoryview, features: Sequence[Feature], known: frozenset[str] | None
    ) -> Self | None:
        """Return a record; None unless it is an Example in which every feature has one range."""
        if any(f.form == "lengths" for f in features):
            return None
        try:
            parsed = wire.parse(data, 0, len(data))
        except WireError:
            return None
        glue = wire.glue(parsed, 0, len(data))
        if glue is None or any(value.loose for value in parsed.values()):
            return None
        if known is not None and not parsed.keys() <= known:
            return None
        values = [parsed.get(f.name) for f in features]
        ranges = [
            value.ranges[0]
            for f, value in zip(features, values, strict=True)
            if value is not None and value.ranges and value.type == f.type and f.field.row_nbytes
        ]
        return cls(data, glue, ranges) if len(ranges) == len(features) else None

    def fits(self, data: memoryview) -> bool:
        """Whether another record differs in nothing but its values."""
        return len(data) == self._nbytes and all(data[a:b] == same for a, b, same in self._glue)


# --- columns ---


class RecordMismatch(Exception):
    """A record is not like those that were inspected; a `FormatError` once the file is known."""

    def __init__(
        self,
        record: int,
        problem: str,
        expected: object = None,
        found: object = None,
        fix: str = "take the records whole with --raw-records",
    ) -> None:
        super().__init__(problem)
        self.record, self.problem = record, problem
        self.expected, self.found, self.fix = expected, found, fix

    def named(self, label: Callable[[int], str]) -> FormatError:
        """Return the error, given the names of the records at hand."""
        return FormatError(
            self.problem,
            where=label(self.record),
            expected=self.expected,
            found=self.found,
            fix=self.fix,
        )


def locate(
    buffer: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    features: Sequence[Feature],
    known: frozenset[str] | None = None,
) -> Mapping[str, FeatureSpans]:
    """Return where the wanted features are in the payloads ``buffer[start:start + length]``.

    Records may have other features if they are `known`, or if `known` is None. Raises
    `RecordMismatch` if one is not an Example, lacks a feature, has it in another list, or has one
    more.
    """
    spans: dict[str, FeatureSpans] | None = None
    if (lengths == lengths[0]).all():
        spans = wire.parse_alike(buffer, _stride(starts, lengths), starts, int(lengths[0]))
    if spans is None:
        spans = parse_together(buffer, starts, lengths)
    if spans is not None and (known is None or spans.keys() <= known):
        none = np.zeros(len(starts), np.int64)
        for f in features:
            if f.name not in spans and f.field.ragged:
                spans[f.name] = FeatureSpans(f.type, none, none, none, counts=none)
        if all(f.name in spans and spans[f.name].type == f.type for f in features):
            return spans
    records = wire.parse_each(buffer, starts, lengths)
    for i, record in enumerate(records):
        if isinstance(record, WireError):
            raise RecordMismatch(i, "the record is not a tf.train.Example", found=record)
        if known is not None and not record.keys() <= known:
            raise RecordMismatch(
                i,
                f"feature {min(record.keys() - known)} was not known when the file was opened",
                fix="the file or its sidecar was changed: dsprep provenance writes that again",
            )
    return {f.name: _join(records, f) for f in features}


def _stride(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Return how far apart the payloads are, or 0 if they are not evenly spaced."""
    steps = np.diff(starts)
    if not len(steps):
        return int(lengths[0]) + FRAME
    even = steps[0] >= lengths[0] and bool((steps == steps[0]).all())
    return int(steps[0]) if even else 0


def _join(records: Sequence[dict[str, Value] | WireError], feature: Feature) -> FeatureSpans:
    """Return one feature of records that were taken apart one by one."""
    values = []
    for i, record in enumerate(records):
        value = record.get(feature.name) if isinstance(record, dict) else None
        if value is not None and value.type != feature.type:
            raise RecordMismatch(
                i,
                f"feature {feature.name} is of another type",
                expected=f"a {TYPES[feature.type]} list",
                found=f"a {TYPES[value.type]} list",
            )
        one = feature.type == BYTES and feature.form == "value"
        if one and value is not None and len(value.ranges) > 1:
            raise RecordMismatch(
                i,
                f"feature {feature.name} has several values",
                expected="one byte string",
                found=len(value.ranges),
            )
        absent = value is None or (feature.type == BYTES and not value.ranges)
        if absent and not feature.field.ragged:
            raise RecordMismatch(
                i, f"feature {feature.name} is missing", expected=str(feature.field)
            )
        values.append(value)
    return wire.join(values, feature.type)


def column(
    buffer: NDArray[np.uint8], spans: FeatureSpans, feature: Feature, arena: Arena | None
) -> Column:
    """Return one field of the records that `spans` are of.

    Raises `RecordMismatch` if values do not fit it.
    """
    field = feature.field
    if feature.form == "lengths":
        counts = np.ones_like(spans.totals) if spans.counts is None else spans.counts
        return Ragged.from_lengths(spans.lengths.astype(field.dtype), counts)
    if feature.type == INT64:
        return _integers(buffer, spans, feature)
    nbytes, count = field.row_nbytes, len(spans.totals)
    check_sizes(spans.totals, nbytes, feature, field.dtype.itemsize)
    if field.ragged:
        values = gather(buffer, spans, arena, f"read.{field.name}")
        rows = values.view(field.dtype).reshape(-1, *field.inner)
        return Ragged.from_lengths(rows, spans.totals // nbytes, field.kind)
    if not nbytes:
        return np.empty((count, *field.inner), field.dtype)
    if spans.stride:
        values = _even(buffer, spans)
    else:
        values = gather(buffer, spans, arena, f"read.{field.name}").reshape(count, nbytes)
    return values.view(field.dtype).reshape(count, *field.inner)


def _integers(buffer: NDArray[np.uint8], spans: FeatureSpans, feature: Feature) -> Column:
    """Return an int64 feature, as the integer type that was asked for."""
    field, rows = feature.field, math.prod(feature.field.inner)
    try:
        values, counts = wire.decode_varints(gather(buffer, spans, None, ""), spans.totals)
    except WireError as error:
        raise RecordMismatch(0, f"feature {feature.name} is damaged", found=error) from error
    check_sizes(counts, rows, feature, 1)
    cast: Array = values
    if field.dtype != values.dtype:
        cast = values.astype(field.dtype)
        lost = cast.astype(np.int64) != values
        if lost.any():
            i = int(lost.argmax())
            record = int(np.searchsorted(np.cumsum(counts), i, side="right"))
            raise RecordMismatch(
                record, f"feature {feature.name} does not fit", str(field), int(values[i])
            )
    if field.ragged:
        return Ragged.from_lengths(cast.reshape(-1, *field.inner), counts // rows)
    return cast.reshape(len(counts), *field.inner)


def _few_integers(data: Bytes, field: Field) -> Array | None:
    """Return the packed integers of one record as the type of a field; None if they do not fit."""
    try:
        if len(data) > FEW:
            numbers = wire.decode_varints(data, np.array([len(data)]))[0]
        else:
            numbers = np.array([*read_varints(wire.view(data), len(data))], np.uint64).view(
                np.int64
            )
    except WireError:
        return None
    cast: Array = numbers.astype(field.dtype, copy=False)
    same = cast is numbers or bool((cast.astype(np.int64) == numbers).all())
    return cast if same else None


def check_sizes(have: NDArray[np.int64], want: int, feature: Feature, unit: int) -> None:
    """Raise `RecordMismatch` for the first record whose values do not fill the field's shape.

    `want` is the size of a sample, or of a row of a ragged field; both count `unit` per element.
    """
    field = feature.field
    bad = have % want != 0 if field.ragged and want else have != want
    if field.ragged and not want:
        raise RecordMismatch(
            0, f"feature {feature.name} cannot be {field}", "rows of at least one byte"
        )
    if not bad.any():
        return
    i = int(bad.argmax())
    unit = unit if have[i] % unit == 0 else 1
    elements = "bytes" if field.dtype.itemsize > unit and feature.type != INT64 else "elements"
    raise RecordMismatch(
        i,
        f"feature {feature.name} does not fit {field}",
        f"{'a multiple of ' if field.ragged else ''}{want // unit} {elements}",
        int(have[i]) // unit,
        "leave its type out"
        if field.ragged
        else f"if it varies, say so as in --field {field.name}:{field.dtype.name}[None]",
    )


def _even(buffer: NDArray[np.uint8], spans: FeatureSpans) -> NDArray[np.uint8]:
    """Return ranges of one length at one stride as a view, shape ``(n, length)``."""
    shape = (len(spans.lengths), int(spans.lengths[0]))
    first = buffer[int(spans.starts[0]) :]
    return np.lib.stride_tricks.as_strided(first, shape, (spans.stride, 1), writeable=False)


def gather(
    buffer: NDArray[np.uint8], spans: FeatureSpans, arena: Arena | None, key: str
) -> NDArray[np.uint8]:
    """Return the bytes of all ranges, one after another; of one range a view."""
    lengths = spans.lengths
    if len(lengths) == 1:
        return buffer[int(spans.starts[0]) :][: int(lengths[0])]
    out = new_array(arena, key, (int(lengths.sum()),), np.dtype(np.uint8))
    move_spans(buffer, spans.starts, lengths, out, offsets_of(lengths)[:-1])
    return out
