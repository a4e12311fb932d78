"""The fields that a user asks for, among those that a file has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from dsprep.core.schema import Column, Field, FieldSpec, Ragged, Schema, renamed
from dsprep.errors import FormatError, SchemaError, UnsupportedError, UsageError

LENGTHS = ".lengths"
"""The suffix to the name of a field of several strings or lists, for their lengths."""
LENGTHS_OF = "lengths_of"
"""The attribute of a field of lengths that tells it from one that has such a name in the file."""


def lengths_field(name: str) -> Field:
    """Return the field of the lengths of the strings or lists that field `name` has joined."""
    return Field(name + LENGTHS, np.dtype("<i8"), (None,), attrs={LENGTHS_OF: name})


ENCODED = (
    "bytes with a header, such as serialised tensors, are decoded in a transform=, or by a program "
    "of your own that calls dsprep.write"
)
"""The remedy for bytes that are not of the type that a field was given."""


class MissingField(SchemaError):
    """A field was asked for that a file does not have: `path` is what it would be called there."""

    path: str
    names: frozenset[str]


def missing_field(path: str, available: Iterable[str], where: object = None) -> MissingField:
    """Return the error for a field that is not there, with the names that are."""
    names = sorted(available)
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    fix = "what follows the colon is not a dtype such as float32, >i2, bfloat16, S10"
    error = MissingField(
        f"there is no field {path}",
        where=where,
        expected=f"one of {shown}",
        fix=fix if ":" in path else None,
    )
    error.path, error.names = path, frozenset(names)
    return error


def wanted(specs: tuple[FieldSpec, ...], available: Mapping[str, Field]) -> list[tuple[str, Field]]:
    """Return ``(path, field)`` for each field that the user asked for, or for all.

    A spec without a dtype keeps the type that was found. One with a dtype gives `bytes` fields
    (and only those) that type; `retype` converts their columns.

    Raises
    ------
    SchemaError
        If a path is not in `available`, or a type is asked for that the field does not have.
    """
    if not specs:
        return list(available.items())
    chosen = []
    for spec in specs:
        known = available.get(spec.spelled)
        if known is None:
            raise missing_field(spec.spelled, available)
        requested = Field(spec.name, known.dtype, known.shape, known.kind, known.attrs)
        if spec.dtype is not None:
            requested = spec.to_field(known.attrs)
            same = (requested.dtype, requested.shape, requested.kind) == (
                known.dtype,
                known.shape,
                known.kind,
            )
            if not same and known.kind != "bytes":
                raise UsageError(
                    f"field {spec.name} already has a type",
                    expected=str(known),
                    found=str(requested),
                    fix="leave the type out, or convert with --cast",
                )
        chosen.append((spec.spelled, requested))
    return chosen


def retype(column: Column, field: Field, where: object, start: int) -> Column:
    """Return a `bytes` column as the type that the user gave it.

    Parameters
    ----------
    column
        A `Ragged` of ``uint8``, or any column that already has the type.
    field
        The field as asked for.
    where, start
        The file, and the number of the first sample, for messages; or what names a sample.

    Raises
    ------
    FormatError
        If a sample's bytes do not fill whole elements of that type and shape, or a text holds a
        number that is not a character.
    """
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.kind == "U" and values.size:  # numpy raises an unspecific error, far from here
        codes = np.ascontiguousarray(values).reshape(-1).view(f"{values.dtype.str[0]}u4")
        if int(codes.max()) > sys.maxunicode:
            raise FormatError(
                f"the text of field {field.name} holds numbers that are not characters",
                where=where(0) if callable(where) else where,
            )
    if not isinstance(column, Ragged) or column.kind != "bytes" or field.kind == "bytes":
        return column
    if field.kind == "str":
        return Ragged(column.values, column.offsets, "str")
    label = where if callable(where) else lambda i: f"{where}, sample {start + i}"
    field.check_nbytes(column.lengths, label, ENCODED)
    flat = np.ascontiguousarray(column.values).view(field.dtype)
    if field.ragged:
        return Ragged(flat.reshape(-1, *field.inner), column.offsets // max(1, field.row_nbytes))
    return flat.reshape(len(column), *field.inner)


def check_paths(
    schema: Schema, format: str, is_reserved: Callable[[str], bool] = lambda _: False
) -> None:
    """Raise `UnsupportedError` for names that are not paths in a file, or inside one another.

    `is_reserved` tells which names between slashes are not possible either.
    """
    names = set(schema.names)
    for name in (*schema.names, *(s.field.name for s in schema.static)):
        parts, is_unicode = name.split("/"), name.encode("utf-8", "ignore").decode() == name
        if not is_unicode or any(p in ("", ".", "..") or is_reserved(p) for p in parts):
            raise UnsupportedError(
                f"{format} cannot hold an array called {name!r}", fix=f"rename it: {renamed(name)}"
            )
        for outer in names & {"/".join(parts[:k]) for k in range(1, len(parts))}:
            raise UnsupportedError(
                f"{format} cannot hold field {name} inside field {outer}",
                fix=f"rename one of them: {renamed(outer)}",
            )
