"""Ragged fields as arrays of one shape: `pad` and `pack`, transforms of whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, DType, Ragged, is_extension
from dsprep.errors import UsageError
from dsprep.reader.transforms import RaggedTransform


def pad(field: str, length: int | None = None, *, fill: Any = 0) -> Callable[[Batch], Batch]:
    """Return a ``transform`` that gives all samples of a ragged field as many rows.

    Parameters
    ----------
    field
        Its name.
    length
        Rows; None: those of the longest sample of each batch. With a length, a longer sample is an
        error: nothing is cut off in silence.
    fill
        What stands behind the rows of shorter samples.

    Returns
    -------
    function
        Of a batch. It replaces the field by an array of shape ``(n, length, *inner)``, and adds
        ``FIELD_lengths``, int64 of shape ``(n,)``.

    Raises
    ------
    UsageError
        From the function: if there is no such ragged field, or a sample is longer.
    """
    _check_length(length)
    names = (f"{field}_lengths",)

    def padded(batch: Batch) -> Batch:
        column = _ragged(batch, field, fill, names)
        lengths = column.lengths
        longest = int(lengths.max(initial=0))
        if length is not None and longest > length:
            raise UsageError(
                f"field {field} has a sample of {longest} rows", expected=f"at most {length}"
            )
        rows = longest if length is None else length
        out = np.full((len(column), rows, *column.values.shape[1:]), fill, column.values.dtype)
        out[np.arange(rows) < lengths[:, None]] = _values(column)
        return {**batch, field: out, names[0]: lengths}

    return RaggedTransform(padded, {field: 1} if length is None else {})


def pack(field: str, length: int, *, fill: Any = 0) -> Callable[[Batch], Batch]:
    """Return a ``transform`` that writes the documents of a batch one behind another into rows.

    Nearly all of each row is used, where `pad` fills what is missing to the longest one. Documents
    go on in the next row; only the last row of a batch is filled up. Each batch is packed by
    itself, so that what it has, and a state, are as exact as without.

    Parameters
    ----------
    field
        A ragged field of numbers, such as tokens.
    length
        Of a row.
    fill
        What the last row is filled up with.

    Returns
    -------
    function
        Of a batch of n documents. It replaces the field by an array of shape ``(rows, length)``;
        ``FIELD_documents``, int64, says which document of the batch each value is of (-1: none), so
        that attention stays within it; ``FIELD_positions``, int64, which of its values it is. Other
        fields stay as they are: one value for each document.

    Raises
    ------
    UsageError
        If the length is below 1; from the function: if there is no such ragged field.
    """
    _check_length(length)
    names = (f"{field}_documents", f"{field}_positions")

    def packed(batch: Batch) -> Batch:
        column = _ragged(batch, field, fill, names)
        values, lengths = _values(column), column.lengths
        total = len(values)
        shape = (-(-total // length), length)
        documents, positions = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        out = np.full((*shape, *values.shape[1:]), fill, values.dtype)
        out.reshape(-1, *values.shape[1:])[:total] = values
        documents.reshape(-1)[:total] = np.repeat(np.arange(len(lengths)), lengths)
        starts = np.repeat(column.offsets[:-1] - column.offsets[0], lengths)
        positions.reshape(-1)[:total] = np.arange(total) - starts
        return {**batch, field: out, names[0]: documents, names[1]: positions}

    return RaggedTransform(packed, dict.fromkeys((field, *names), 0))


def _check_length(length: int | None) -> None:
    if length is not None and length < 1:
        raise UsageError(f"length is {length}", expected="rows, at least 1")


def _ragged(batch: Batch, field: str, fill: Any, added: Sequence[str]) -> Ragged:
    """Return a ragged field; `UsageError` if what is to be made of it does not fit."""
    column = batch.get(field)
    if not isinstance(column, Ragged):
        known = ", ".join(n for n, c in batch.items() if isinstance(c, Ragged)) or "none"
        raise UsageError(f"{field} is not a ragged field", expected=f"one of these: {known}")
    for name in (n for n in added if n in batch):
        fix = "name the other fields that are read with fields=, or convert it under another name"
        raise UsageError(f"{name} of {field} would replace the field of this name", fix=fix)
    if not _holds(column.values.dtype, fill):
        fix = "give another fill=, or convert the field to another dtype"
        raise UsageError(f"{field} of {column.values.dtype} cannot hold fill={fill!r}", fix=fix)
    return column


def _holds(dtype: DType, fill: Any) -> bool:
    """Return whether a dtype holds a value, or rounds it if it is a fraction."""
    try:
        given = np.asarray(fill)
        with np.errstate(all="ignore"):
            cast = np.full(given.shape, given, dtype)
        if cast.tolist() == given.tolist() or (dtype.kind in "mMV" and not is_extension(dtype)):
            return True
        rounds = given.dtype.kind in "fc" and ("float" in dtype.name or dtype.kind == "c")
        return rounds and bool((np.isfinite(cast) == np.isfinite(given)).all())
    except (TypeError, ValueError, OverflowError):
        return False


def _values(column: Ragged) -> Array:
    """Return the rows of all samples, one after another."""
    return column.values[int(column.offsets[0]) : int(column.offsets[-1])]
