"""Transforms of batches: how several follow one another, and those of single fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Batch, Ragged, Schema, column_of, concatenate
from dsprep.errors import UsageError
from dsprep.reader.each import Each, check_call

Function: TypeAlias = Callable[..., Array]
Transform: TypeAlias = Callable[..., Any] | Each
Transforms: TypeAlias = Transform | Sequence[Transform] | None

_MAKERS = {"unpacked": "mask_and_scale", "normalised": "normalise"}


@dataclass(frozen=True, eq=False)
class FieldTransform:
    """A transform that applies functions to the numbers of fields, ragged or not.

    Attributes
    ----------
    makes
        What it makes of values as stored.
    functions
        By field; those that normalise also take ``is_unpacked``.
    """

    makes: Literal["unpacked", "normalised"]
    functions: Mapping[str, Function]

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with the fields changed."""
        out = dict(batch)
        for name, function in self.functions.items():
            column = column_of(batch, name)
            if isinstance(column, Ragged):
                first = int(column.offsets[0])
                rows = column.values[first : int(column.offsets[-1])]
                out[name] = Ragged(function(rows), column.offsets - first)
            else:
                out[name] = function(np.asarray(column))
        return out


@dataclass(frozen=True, eq=False)
class RaggedTransform:
    """A transform that makes arrays of a ragged field.

    Attributes
    ----------
    function
        Of a batch, also of one without samples, which shows dtypes and shapes.
    varying
        By field, the axis whose length differs from batch to batch.
    """

    function: Callable[[Batch], Batch]
    varying: Mapping[str, int]

    def __call__(self, batch: Batch) -> Batch:
        """Return what the function returns."""
        return self.function(batch)


def transformed(schema: Schema, transforms: Sequence[Any]) -> tuple[Batch, dict[str, int]] | None:
    """Return what becomes of no samples, and which axes vary; None if a function is unknown.

    Raises
    ------
    UsageError, SchemaError
        If a transform does not fit the fields.
    """
    batch, varying = concatenate(schema, []), dict[str, int]()
    for each in transforms:
        if not isinstance(each, (Each, FieldTransform, RaggedTransform)):
            return None
        batch = each.empty(batch) if isinstance(each, Each) else each(batch)
        varying |= each.varying if isinstance(each, RaggedTransform) else {}
    return batch, varying


def as_transforms(given: Transforms, of: str = "batch") -> tuple[Any, ...]:
    """Return transforms `of` a batch, or of a sample, in the order in which they are applied.

    Raises
    ------
    UsageError
        If one is not a transform, or changes a field that an earlier one has changed already.
    """
    every = [] if given is None else [given]
    if isinstance(given, Sequence) and not callable(given):
        every = [*given]
    made: dict[str, str] = {}
    out: list[Any] = []
    for each in every:
        if not isinstance(each, Each) or of != "batch":
            check_call("transform", each, of)
        if isinstance(each, FieldTransform):
            for name in each.functions.keys() & made.keys():
                if made[name] != "unpacked" or each.makes != "normalised":
                    raise UsageError(
                        f"{_MAKERS[each.makes]} comes after {_MAKERS[made[name]]}: field {name} "
                        f"is {made[name]} already",
                        fix="transform=[mask_and_scale(...), normalise(...)], or normalise alone, "
                        "which unpacks values, too",
                    )
            after = {
                n: partial(f, is_unpacked=True) for n, f in each.functions.items() if n in made
            }
            made |= dict.fromkeys(each.functions, each.makes)
            each = replace(each, functions={**each.functions, **after})
        out.append(each)
    return tuple(out)
