"""How the reader of a sidecar takes fields out of LMDB values, where they have no fixed place.

``{"name": "values", "schema": [...], "fields": {...}}``
    A value of several ragged fields, as `values` describes it. ``schema`` has all fields that are
    in a value, in their order.
``{"name": "datum", "shape": [C, H, W] or null, "floats": bool, "sides": bool, "fields": {...}}``
    A Caffe Datum, see `datum`.

``fields`` gives, for every field of the dataset, what it is called in there; it is left out if the
names are the same. A field of bytes may be of any type in the dataset that its bytes fill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.pread import move_spans, packed
from dsprep.core.schema import Arena, Batch, Bytes, Column, Field, Ints, Schema
from dsprep.errors import DsprepError, FormatError
from dsprep.formats.base import retype
from dsprep.formats.lmdb.datum import Datum
from dsprep.formats.lmdb.values import Values


def describe(decoder: Values | Datum, fields: Sequence[tuple[str, Field]]) -> dict[str, Any]:
    """Return the recipe for `fields`, given as ``(name in the value, field)``, as JSON."""
    if isinstance(decoder, Datum):
        recipe = {"name": "datum", **decoder.to_json()}
    else:
        recipe = {"name": "values", "schema": decoder.schema.to_json()}
    if any(path != f.name for path, f in fields):
        recipe["fields"] = {f.name: path for path, f in fields}
    return recipe


def values(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes values of several ragged fields.

    Raises
    ------
    FormatError
        If `params` are not what `describe` returns, or do not go with `schema`.
    """
    try:
        return Recipe(Values(Schema.from_json(params.get("schema"))), params, schema)
    except FormatError:
        raise
    except (DsprepError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise _damaged("the schema of the values is damaged", found=error) from error


def datum(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes Caffe's Datum messages; see `values`."""
    try:
        decoder = Datum.from_json(params)
    except ValueError as error:
        raise _damaged("the recipe for Datum messages is damaged", found=error) from error
    return Recipe(decoder, params, schema)


class Recipe:
    """Decodes records that are LMDB values; see ``dsprep.records``.

    It gives those fields of `schema` that the recipe has; keys, for one, are not in values.
    """

    def __init__(self, decoder: Values | Datum, params: Mapping[str, Any], schema: Schema) -> None:
        self._decoder = decoder
        known = {f.name: f for f in decoder.schema}
        names = params.get("fields", {name: name for name in known})
        if not isinstance(names, Mapping):
            raise _damaged("the fields of a recipe are no object", found=names)
        self._fields: list[tuple[str, Field]] = []
        for f in schema:
            path = names.get(f.name)
            if path is None:
                continue
            if not isinstance(path, str) or path not in known:
                raise _damaged(f"there is no {path!r} in the values", expected=list(known))
            found = known[path]
            same = (found.dtype, found.shape, found.kind) == (f.dtype, f.shape, f.kind)
            if not same and found.kind != "bytes":
                raise _damaged(f"field {f.name} is of another type", expected=found, found=f)
            self._fields.append((path, f))

    def decode(
        self,
        buffer: Bytes,
        starts: Ints,
        lengths: Ints,
        label: Callable[[int], str],
        arena: Arena | None = None,
    ) -> Batch:
        """Return the samples whose values are ``buffer[starts[i]:starts[i] + lengths[i]]``.

        Raises
        ------
        FormatError
            If a value does not fit; `label` names it.
        """
        batch = self._decoder.decode(_together(buffer, starts, lengths), lengths, label)
        return {f.name: _typed(batch[path], f, label) for path, f in self._fields}


def _together(buffer: Bytes, starts: Ints, lengths: Ints) -> Bytes:
    """Return the bytes of all values, one after another; the buffer itself if they are so."""
    places = packed(lengths)
    first = int(starts[0]) if len(starts) else 0
    if np.array_equal(starts, places[:-1] + first):
        return buffer[first : first + int(places[-1])]
    out = np.empty(int(places[-1]), np.uint8)
    move_spans(buffer, starts, lengths, out, places[:-1])
    return out


def _typed(column: Column, field: Field, label: Callable[[int], str]) -> Column:
    """Return a column of bytes as the type of `field`."""
    try:
        return retype(column, field, "", 0)
    except FormatError:
        for i in range(len(column)):  # which one it is
            try:
                retype(column[i : i + 1], field, "", 0)
            except FormatError as error:
                raise FormatError(
                    error.what,
                    where=f"{label(i)}, field {field.name}",
                    expected=error.expected,
                    found=error.found,
                ) from error
        raise


def _damaged(what: str, expected: object = None, found: object = None) -> FormatError:
    return FormatError(
        what,
        where="the recipe of a sidecar",
        expected=expected,
        found=found,
        fix="write the sidecar again with dsprep provenance",
    )
