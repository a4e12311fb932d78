"""The rows of a piece of a group, part by part."""

from __future__ import annotations

import numpy as np

from dsprep.core.schema import Arena, Array, Batch, Ragged
from dsprep.errors import FormatError
from dsprep.formats.hdf5.group_plan import GroupedFile, Part
from dsprep.formats.hdf5.writer import contiguous

_INT = np.dtype("<i8")


def rows_of(file: GroupedFile, batch: Batch, group: int, arena: Arena) -> list[Array]:
    """Return what a piece of a group puts into each part: C-contiguous arrays.

    Raises
    ------
    FormatError
        If a ragged field has not the rows that the groups were planned with.
    """
    return [_rows(part, batch, group, arena) for part in file.parts]


def _rows(part: Part, batch: Batch, group: int, arena: Arena) -> Array:
    field = part.plan.field
    column = batch[field.name]
    if not isinstance(column, Ragged):
        return contiguous(column, field.dtype, arena, f"write.{field.name}")
    if part.role == "count":
        return column.lengths.astype(_INT)
    if part.role == "first":
        return (column.offsets[:-1] + group * part.plan.chunk).astype(_INT)
    if len(column.values) != part.used[group]:
        raise FormatError(
            f"field {field.name} has changed since the groups were planned",
            where=f"group {group}",
            expected=f"{part.used[group]} rows",
            found=len(column.values),
            fix="start again with --restart",
        )
    return contiguous(column.values, field.dtype, arena, f"write.{field.name}")
