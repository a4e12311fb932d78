"""How the reader of a sidecar takes fields out of ``tf.train.Example`` records.

``{"name": "example", "features": {field: [feature, list]}, "others": true}``: the feature that
each field is read from, and the list it has, ``"bytes"``, ``"float"`` or ``"int64"``. Features
that are none of these are an error unless there are ``others``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsprep.core.schema import Arena, Batch, Bytes, Field, Ints, Schema, empty_batch
from dsprep.errors import FormatError
from dsprep.formats.tfrecord import columns
from dsprep.formats.tfrecord.columns import Misfit
from dsprep.formats.tfrecord.example import BYTES, FLOAT, TYPES
from dsprep.formats.tfrecord.features import FLOAT32, Feature, fits_int64

_NUMBERS = {name: number for number, name in TYPES.items()}


def describe(features: Sequence[Feature], others: bool) -> dict[str, Any]:
    """Return the recipe for `features` as JSON; `others` if records may have more of them."""
    lists = {f.field.name: [f.name, TYPES[f.type]] for f in features}
    return {"name": "example", "features": lists, **({"others": True} if others else {})}


def example(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes records of Examples.

    Raises
    ------
    FormatError
        If `params` are not what `describe` returns, or do not go with `schema`.
    """
    lists, others = params.get("features"), params.get("others", False)
    if not isinstance(lists, Mapping) or not isinstance(others, bool):
        raise _damaged("the recipe for Examples is damaged", found=lists)
    found = {}
    for field, place in lists.items():
        good = (
            isinstance(place, list) and len(place) == 2 and all(isinstance(p, str) for p in place)
        )
        if not good or place[1] not in _NUMBERS:
            raise _damaged(
                f"the feature of field {field} is damaged",
                expected="its name and its list, one of " + ", ".join(_NUMBERS),
                found=place,
            )
        found[field] = place
    features = [
        Feature(found[f.name][0], _NUMBERS[found[f.name][1]], f) for f in schema if f.name in found
    ]
    for feature in features:
        if not _can_be(feature.type, feature.field):
            raise _damaged(f"a {TYPES[feature.type]} list cannot be the field {feature.field}")
    return Recipe(features, None if others else frozenset(name for name, _ in found.values()))


def _can_be(type_: int, field: Field) -> bool:
    """Whether a list of this type can be read as the field."""
    if type_ == BYTES:
        return True
    return field.kind == "array" and (
        field.dtype == FLOAT32 if type_ == FLOAT else fits_int64(field)
    )


class Recipe:
    """Decodes Examples; see ``dsprep.records``.

    Parameters
    ----------
    features
        What is wanted of each record.
    known
        The names of all features that a record may have; None: any.
    """

    def __init__(self, features: Sequence[Feature], known: frozenset[str] | None) -> None:
        self._features, self._known = features, known
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

        Columns may be views of `buffer`.

        Raises
        ------
        FormatError
            If a record is not as the recipe says; `label` names it.
        """
        if not len(starts) or not self._features:
            return empty_batch(self._schema)
        try:
            places = columns.locate(buffer, starts, lengths, self._features, self._known)
            return {
                f.field.name: columns.column(buffer, places[f.name], f, arena)
                for f in self._features
            }
        except Misfit as m:
            raise m.named(label) from m


def _damaged(what: str, expected: object = None, found: object = None) -> FormatError:
    return FormatError(
        what,
        where="the recipe of a sidecar",
        expected=expected,
        found=found,
        fix="write the sidecar again with dsprep provenance",
    )
