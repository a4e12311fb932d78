"""Decodes values whose fields have no offset of their own, by the recipe that a layout has.

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

from dsprep.core.schema import Arena, Batch, Bytes, Field, Ints, Schema
from dsprep.errors import DsprepError
from dsprep.formats.fields import retype
from dsprep.formats.lmdb.datum import Datum
from dsprep.formats.lmdb.values import Values
from dsprep.reading.records import damaged_recipe


def describe_recipe(decoder: Values | Datum, fields: Sequence[tuple[str, Field]]) -> dict[str, Any]:
    """Return the recipe for `fields`, given as ``(name in the value, field)``, as JSON."""
    if isinstance(decoder, Datum):
        recipe = {"name": "datum", **decoder.to_json()}
    else:
        recipe = {"name": "values", "schema": decoder.schema.to_json()}
    if any(path != f.name for path, f in fields):
        recipe["fields"] = {f.name: path for path, f in fields}
    return recipe


_DAMAGE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""Errors that parameters of another form raise."""


class Recipe:
    """Decodes records that are LMDB values; see ``dsprep.reading.records``.

    It gives those fields of `schema` that the recipe has; keys, for one, are not in values. Raises
    `FormatError` if the recipe is damaged.
    """

    def __init__(self, params: Mapping[str, Any], schema: Schema) -> None:
        self._decoder: Values | Datum
        try:
            if params.get("name") == "datum":
                self._decoder = Datum.from_json(params)
            else:
                self._decoder = Values(Schema.from_json(params.get("schema")))
            known = {f.name: f for f in self._decoder.schema}
            names = params.get("fields", {name: name for name in known})
            self._fields = [(names[f.name], f) for f in schema if names.get(f.name) is not None]
            pairs = [(known[path], f) for path, f in self._fields]
        except (DsprepError, *_DAMAGE) as error:
            raise damaged_recipe("the recipe of LMDB values is damaged", found=error) from error
        for stored, f in pairs:
            same = (stored.dtype, stored.shape, stored.kind) == (f.dtype, f.shape, f.kind)
            if not same and stored.kind != "bytes":
                raise damaged_recipe(f"field {f.name} is of another type", expected=stored, found=f)

    def decode(
        self,
        buffer: Bytes,
        starts: Ints,
        lengths: Ints,
        label: Callable[[int], str],
        arena: Arena | None = None,
    ) -> Batch:
        """Return the samples whose values are ``buffer[starts[i]:starts[i] + lengths[i]]``.

        Raises `FormatError` if value i does not fit; ``label(i)`` is its name.
        """
        batch = self._decoder.decode(buffer, starts, lengths, label)
        return {f.name: retype(batch[path], f, label, 0) for path, f in self._fields}

    def one(self, record: Bytes) -> Batch | None:
        """Return None: values are always judged by `decode`."""
        return None
