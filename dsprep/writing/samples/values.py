"""Values that a program gives: which fields they have, and whether they are of these fields.

=========================================== ==================================================
value                                       field
=========================================== ==================================================
array (of numpy, or what gives one)         its dtype and shape
numpy scalar                                its dtype, scalar
``bool``, ``int``, ``float``, ``complex``   ``bool``, ``int64``, ``float64``, ``complex128``
``list``, ``tuple``                         ragged: rows of numbers or of arrays of one shape
``bytes``, ``bytearray``                    `bytes`
``memoryview``                              `bytes`; an array, if it is not one of bytes
``str``                                     `str`
=========================================== ==================================================

A field whose values are arrays with a first axis that varies has to be declared; nothing in one
sample shows it. Python's own numbers have no dtype: they become that of the field if they fit.
Rows that have one have all the same, and a list of integers and floats is one of floats if these
hold each integer: nothing is rounded in order to make one array of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import (
    Array,
    Column,
    DType,
    Field,
    FieldSpec,
    Ragged,
    Schema,
    is_extension,
    show_dtype,
    show_shape,
)
from dsprep.errors import DsprepError, SchemaError, UsageError
from dsprep.writing.plan import Cast

Declared: TypeAlias = Schema | Mapping[str, Any]
"""A `Schema`, or field name to what the field is: ``"float32[None,3]"``, a `Field` or a dtype."""

_NUMBERS = (bool, int, float, complex)
_WIDER = "declare a wider type: schema="
_MOST_AXES = 64
"""Of an array of numpy."""


def declared(schema: Declared | None) -> Schema | None:
    """Return the fields that a user declares, None if there are none.

    Raises
    ------
    UsageError, SchemaError
        If it is not a declaration.
    """
    if schema is None or isinstance(schema, Schema):
        return schema
    if not isinstance(schema, Mapping):
        raise UsageError(
            f"a schema cannot be {_kind(schema)}",
            expected='dsprep.Schema, or a mapping such as {"x": "float32[None,3]"}',
        )
    return Schema(tuple(_declared_field(name, type_) for name, type_ in schema.items()))


def _declared_field(name: object, type_: object) -> Field:
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is not a field name", expected="a str")
    if isinstance(type_, Field):
        return replace(type_, name=name)
    try:
        if isinstance(type_, str):
            return replace(FieldSpec.parse(f"x:{type_}").to_field(), name=name)
        return Field(name, np.dtype(type_ or "none"))  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"schema: field {name} cannot be {type_!r}",
            expected='a type and a shape such as "float32", "int16[128,4]", "float32[None,3]", '
            '"bytes" or "str"',
        ) from error


def infer(sample: object, given: Schema | None = None, number: object = 0) -> Schema:
    """Return the fields of a sample, in its order.

    Parameters
    ----------
    sample
        Field name to value.
    given
        Fields that are declared; those of the sample that it names are taken from it.
    number
        The sample's number, or words for it.

    Raises
    ------
    SchemaError
        If it is not a sample, a value has no type, or it lacks a field that is declared.
    """
    names, label = names_of(sample, number), sample_label(number)
    known = {f.name: f for f in given or ()}
    for name in known:
        if name not in names:
            raise SchemaError(f"field {name} is missing", where=label, found=_list(names))
    named: Mapping[str, Any] = sample  # type: ignore[assignment]
    fields = [known.get(n) or _field_of(n, named[n], f"{label}, field {n}") for n in names]
    return Schema(tuple(fields), {} if given is None else given.attrs)


def columns_of(batch: object, number: object) -> tuple[dict[str, Column | list[Any]], int]:
    """Return the columns of a batch that a program gives, and its number of samples.

    Parameters
    ----------
    batch
        Field name to an array with an axis of samples before the field's own, to a `Ragged`, or to
        a list with a value per sample.
    number
        The number of the first sample, or words for the batch.

    Raises
    ------
    SchemaError
        If it is not a batch, or columns are of unequal length.
    """
    columns, count = dict[str, Any](), -1
    for name in names_of(batch, number):
        column: Any = batch[name]  # type: ignore[index]
        where = f"{sample_label(number)}, field {name}"
        if not isinstance(column, Ragged | list | tuple):
            column = as_array(column, where)
            if column.ndim == 0:
                raise SchemaError("a value in a batch has no axis of samples", where=where)
        if count not in (-1, len(column)):
            raise SchemaError(
                "the columns of a batch differ in their number of samples",
                where=where,
                expected=f"{count} as of {next(iter(columns))}",
                found=len(column),
            )
        columns[name], count = column, len(column)
    return columns, count


def with_ragged(given: Schema | None, columns: Mapping[str, Any]) -> Schema:
    """Return fields that are declared, and those of columns that are `Ragged`."""
    known = given or Schema(())
    fields = [
        Field(name, column.values.dtype, (None, *column.values.shape[1:]))
        for name, column in columns.items()
        if isinstance(column, Ragged) and column.kind == "array" and name not in known.names
    ]
    return Schema((*known.fields, *fields), known.attrs)


def sample_label(number: object) -> str:
    """Return the words for a sample: of a number, or those that are given."""
    return f"sample {number}" if isinstance(number, int) else str(number)


def names_of(sample: object, number: object) -> list[str]:
    """Return the fields of a sample or a batch; `SchemaError` if it is neither."""
    if not isinstance(sample, Mapping):
        raise SchemaError(
            "this is not a sample",
            where=sample_label(number),
            expected="a dict of field name to value",
            found=_kind(sample),
            fix="name the parts: ({'image': x, 'label': y} for x, y in samples)"
            if isinstance(sample, tuple)
            else None,
        )
    for name in sample:
        if not isinstance(name, str):
            raise SchemaError(
                f"{name!r} is not a field name", where=sample_label(number), expected="a str"
            )
    if not sample:
        raise SchemaError("it has no fields", where=sample_label(number))
    return list(sample)


def _field_of(name: str, value: Any, where: str) -> Field:
    """Return the field that a value is of."""
    if isinstance(value, str):
        return Field.opaque(name, "str")
    if _is_bytes(value):
        return Field.opaque(name)
    array = as_array(value, where)
    shape: tuple[int | None, ...] = array.shape
    if isinstance(value, list | tuple):
        if array.dtype.kind in "SU" or not (array.size or _leaves(value)[0]):
            raise SchemaError(
                f"the type of {show_value(value)} cannot be seen",
                where=where,
                expected="a list of numbers, or of arrays of one shape",
                fix=f'declare it: schema={{"{name}": "float32[None]"}}, or as it is',
            )
        shape = (None, *array.shape[1:])
    try:
        return Field(name, array.dtype, shape)
    except SchemaError as error:
        raise SchemaError(error.what, where=where, expected=error.expected) from error


def as_array(value: Any, where: str) -> Array:
    """Return the array that numpy makes of a value.

    Raises
    ------
    SchemaError
        If it is not an array, not numbers, or has values that are masked or that numpy would round.
    """
    is_list = isinstance(value, list | tuple)
    leaves, kinds = _leaves(value) if is_list else ([value], {type(value)})
    is_python = kinds <= {*_NUMBERS} or kinds in ({str}, {bytes})
    if not is_list:
        _check_kind(value, where)
    elif not is_python:
        types = {
            type(leaf).__name__
            if type(leaf) in (str, bytes)
            else show_dtype(as_array(leaf, where).dtype.newbyteorder("="))
            for leaf in leaves
        }
        if len(types) > 1:
            raise SchemaError(
                "the values of a list are of different types",
                where=where,
                found=_list(sorted(types)),
                fix="give all of them the same: numpy.asarray(x, DTYPE)",
            )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise SchemaError(
            f"{_kind(value)} cannot be made an array: {error}",
            where=where,
            expected="rows of one shape" if is_list else None,
        ) from error
    if array.dtype.hasobject:
        raise SchemaError(
            f"{show_value(value)} has no fixed-width dtype", where=where, found=f"{array.dtype}"
        )
    if is_list and is_python and array.dtype.kind not in "biu":
        for leaf, kept in zip(leaves, array.reshape(-1).tolist(), strict=True):
            if leaf == leaf and leaf != kept:
                raise SchemaError(
                    f"{leaf!r} does not fit {show_dtype(array.dtype)}, which numpy makes of a list",
                    where=where,
                    fix="give an array, or a field for each type",
                )
    return array


def _check_kind(value: Any, where: str) -> None:
    """Raise `SchemaError` if a value is not what numpy makes a whole array of."""
    is_known = isinstance(value, (np.ndarray, np.generic, memoryview, *_NUMBERS))
    fix = None
    if isinstance(value, np.ma.MaskedArray):
        is_known, fix = False, "fill it: x.filled(VALUE)"
    elif isinstance(value, Mapping):
        fix = "flatten what is nested: one field for each value"
    elif not is_known and hasattr(value, "to_numpy"):  # tables: with nulls, and of many types
        fix = "give what is meant: x.to_numpy()"
    else:
        is_known |= hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if not is_known:
        raise SchemaError(
            f"{_kind(value)} is not a value that is written",
            where=where,
            expected="an array, a number, bytes, str, or a list of rows",
            fix=fix,
        )


def _leaves(value: Any) -> tuple[list[Any], set[type]]:
    """Return what lists of lists hold, in order, and the types of that."""
    leaves, kinds = [value], {type(value)}
    for _ in range(_MOST_AXES):
        nested = {kind for kind in kinds if issubclass(kind, list | tuple)}
        if not nested:
            break
        rows = leaves if nested == kinds else (v if type(v) in nested else (v,) for v in leaves)
        leaves = list(chain.from_iterable(rows))
        kinds = set(map(type, leaves))
    return leaves, kinds


def _is_bytes(value: Any) -> bool:
    """Return whether a value is bytes, and not numbers of more of them."""
    if isinstance(value, memoryview):
        try:
            return value.ndim == 1 and value.format in ("B", "b", "c")
        except ValueError:  # it was released
            return False
    return isinstance(value, bytes | bytearray)


def checked(value: Any, field: Field, number: object) -> Array | bytes:
    """Return a sample's value of a field as it is written.

    Returns
    -------
    An array of the field's dtype and of its shape, or the bytes of a `bytes` or `str` field.

    Raises
    ------
    SchemaError
        If it is not such a value.
    """
    where = f"{sample_label(number)}, field {field.name}"
    if field.kind == "str":
        if not isinstance(value, str):
            raise _wrong(where, field, value)
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise SchemaError(f"the text is not Unicode: {error}", where=where) from error
    if field.kind == "bytes":
        if _is_bytes(value):
            return bytes(value)
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
            return value.tobytes()
        raise _wrong(where, field, value)
    if isinstance(value, str) or _is_bytes(value):
        text = value if isinstance(value, str) else bytes(value)
        value = np.asarray(text)
        if value.dtype.kind != field.dtype.kind or value[()] != text:  # it ends with NULs
            raise _wrong(where, field, text)
    return _fitting(value, field, where)


def _fitting(value: Any, field: Field, where: str) -> Array:
    array = as_array(value, where)
    if field.ragged and not array.size and array.ndim and not array.shape[0]:
        array = array.reshape(0, *field.inner) if isinstance(value, list | tuple) else array
    inner = array.shape[1:] if field.ragged else array.shape
    if inner != field.inner or array.ndim != len(field.shape):
        raise _wrong(where, field, array)
    if array.dtype == field.dtype:
        return array
    return _cast(array, field, _leaves(value)[1] <= {*_NUMBERS}, where)


def _cast(array: Array, field: Field, free: bool, where: str) -> Array:
    """Return values with the dtype of the field; only Python's own, that are `free`, change."""
    dtype = field.dtype
    text = array.dtype.kind in "SU" and array.dtype.kind == dtype.kind
    same = array.dtype.newbyteorder("=") == dtype.newbyteorder("=")
    if same or (text and array.dtype.itemsize <= dtype.itemsize):
        return array.astype(dtype, copy=False)
    numbers = _is_number(array.dtype) and _is_number(dtype)
    if not free or not numbers or (array.dtype.kind == "c" and dtype.kind != "c"):
        raise _wrong(where, field, array)
    try:
        cast = Cast(Field(field.name, array.dtype), dtype).apply(array.reshape(1, -1), 0)
    except SchemaError as error:
        raise SchemaError(error.what, where=where, fix=_WIDER) from error
    kept = np.asarray(cast).reshape(array.shape)
    if array.dtype.kind in "iu" and dtype.kind not in "biu":  # integers are exact, unlike floats
        with np.errstate(invalid="ignore"):
            lost = array[kept.astype(np.complex128).real.astype(array.dtype) != array]
        if lost.size:
            problem = f"{lost.flat[0]} does not fit {show_dtype(dtype)}"
            raise SchemaError(problem, where=where, fix=_WIDER)
    return kept


def _is_number(dtype: DType) -> bool:
    return dtype.names is None and (dtype.kind in "biufc" or is_extension(dtype))


def _wrong(where: str, field: Field, value: Any) -> SchemaError:
    """Return the error for a sample's value that is not of its field."""
    fix = None
    alike = isinstance(value, np.ndarray) and value.ndim and field.kind == "array"
    if alike and value.dtype == field.dtype and value.shape[1:] == field.shape[1:]:
        text = f"{show_dtype(field.dtype)}{show_shape((None, *value.shape[1:]))}"
        fix = f'if its first axis varies, declare that: schema={{"{field.name}": "{text}"}}'
    return SchemaError(
        "the value is not of this field",
        where=where,
        expected=str(field).partition(": ")[2],
        found=show_value(value),
        fix=fix,
    )


def show_value(value: Any) -> str:
    """Return what a value is, for a person: the dtype and shape of an array, else its type."""
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
        return f"{show_dtype(value.dtype)}{show_shape(value.shape)}"
    return _kind(value)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0] in 'aeiou')} {name}"


def _list(names: list[str]) -> str:
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8)


def misnamed(sample: object, schema: Schema, number: object) -> DsprepError:
    """Return the error for a sample that has not the fields of the schema."""
    names = names_of(sample, number)
    lacking = [n for n in schema.names if n not in names]
    problem = f"field {lacking[0]} is missing" if lacking else ""
    if not problem:
        more = [n for n in names if n not in schema.names]
        problem = f"field {more[0]} is in none of the samples before" if more else "fields differ"
    return SchemaError(
        problem,
        where=sample_label(number),
        expected=_list(list(schema.names)),
        found=_list(names),
        fix="every sample has the same fields",
    )
