"""Samples put together to batches, each one checked against the fields of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import (
    Array,
    Batch,
    Column,
    DType,
    Field,
    Ragged,
    Schema,
    show_dtype,
    show_shape,
)
from dsprep.errors import SchemaError
from dsprep.writing.samples.values import checked, misnamed

FIRST = 64
"""Samples to make room for at first, if their number is unknown."""

_Step: TypeAlias = tuple[str, Array, DType, tuple[int, ...], frozenset[type], Field]


class Assembler:
    """Packs samples into a `Batch`; values are copied, so that the caller may change them after.

    Parameters
    ----------
    schema
        The fields of every sample.
    count
        For how many samples there is room at first; it grows when more come.

    Raises
    ------
    SchemaError
        If rows of a ragged field have no bytes.

    Examples
    --------
    >>> from dsprep.writing.samples.values import infer
    >>> packed = Assembler(infer({"x": np.zeros(3, np.float32), "label": 1}))
    >>> packed.add({"x": np.ones(3, np.float32), "label": 7}, 0)
    >>> packed.take()["label"]
    array([7])
    """

    def __init__(self, schema: Schema, count: int = FIRST) -> None:
        for f in schema:
            if f.ragged and not f.row_nbytes:
                raise SchemaError(
                    f"field {f.name} has rows of no bytes, whose number would be lost",
                    expected="inner axes above zero",
                    found=f"{show_dtype(f.dtype)}{show_shape(f.shape)}",
                )
        self.schema, self.ragged, self._room = schema, schema.ragged, max(1, count)
        self._names = frozenset(schema.names)
        self._fixed = [f for f in schema if not f.ragged]
        self._plain = {f.name: _plain_types(f) for f in self._fixed}
        self._out = {f.name: np.empty((self._room, *f.inner), f.dtype) for f in self._fixed}
        self._ragged = [_Values(f) for f in schema if f.ragged]
        self._count = 0
        self._each, self._width = schema.fixed_nbytes, len(self._names)
        self._steps = self._planned()

    def __len__(self) -> int:
        return self._count

    @property
    def room(self) -> int:
        """For how many samples there is memory; it grows when more come."""
        return self._room

    @property
    def nbytes(self) -> int:
        """Payload bytes of the samples that are there."""
        nbytes = self._each * self._count
        for column in self._ragged:
            nbytes += column.nbytes
        return nbytes

    def use(self, arrays: Mapping[str, Array]) -> None:
        """Begin with no samples, and put those that come into these arrays; none is ragged.

        Parameters
        ----------
        arrays
            Of every field one of shape ``(count, *field.shape)``, for as many samples as come.
        """
        self._out = dict(arrays)
        self._room = len(next(iter(arrays.values())))
        self._count = 0
        self._steps = self._planned()

    def add(self, sample: Mapping[str, Any], number: object) -> None:
        """Add a sample.

        Parameters
        ----------
        sample
            Field name to value.
        number
            Its number, or words for it such as ``"item 7"``: for messages.

        Raises
        ------
        SchemaError
            If it has other fields, or a value is not of its field; the batch is as before.
        """
        at = self._count
        if at == self._room:
            self._grow(at + 1)
        try:
            if len(sample) != self._width:
                raise KeyError
            if type(sample) is not dict and not _named(sample, self._names):
                raise KeyError  # those that give a value for any key are asked which they have
            for name, out, dtype, shape, plain, field in self._steps:
                value = sample[name]
                kind = type(value)
                if kind in plain or (
                    kind is np.ndarray and value.dtype == dtype and value.shape == shape
                ):
                    out[at] = value
                else:
                    out[at] = checked(value, field, number)
            for rows in self._ragged:
                rows.put(sample[rows.name], number)
        except BaseException as error:
            self.cut(at)
            if isinstance(error, KeyError | TypeError) and not _named(sample, self._names):
                raise misnamed(sample, self.schema, number) from None
            if isinstance(error, OverflowError):  # an int is too large
                for f in self._fixed:
                    checked(sample[f.name], f, number)
            raise
        self._count = at + 1

    def takes(self, columns: Mapping[str, Any]) -> bool:
        """Return whether columns are arrays of the fields, none of which is ragged."""
        return (
            not self.ragged
            and columns.keys() == self._names
            and all(
                isinstance(columns[f.name], np.ndarray)
                and (columns[f.name].dtype, columns[f.name].shape[1:]) == (f.dtype, f.inner)
                for f in self._fixed
            )
        )

    def extend(self, columns: Mapping[str, Any], start: int, stop: int) -> None:
        """Add samples ``start <= i < stop`` of columns that it `takes`."""
        at, end = self._count, self._count + stop - start
        if end > self._room:
            self._grow(end)
        for name, out in self._out.items():
            out[at:end] = columns[name][start:stop]
        self._count = end

    def cut(self, count: int) -> None:
        """Forget the samples that come after so many."""
        self._count = count
        for rows in self._ragged:
            rows.cut(count)

    def _grow(self, minimum: int) -> None:
        self._room = max(minimum, 2 * self._room)
        for name, out in self._out.items():
            self._out[name] = np.empty((self._room, *out.shape[1:]), out.dtype)
            self._out[name][: self._count] = out[: self._count]
        self._steps = self._planned()

    def _planned(self) -> list[_Step]:
        """Return the fixed fields as `add` wants them: looking them up takes longer than a copy."""
        return [
            (f.name, self._out[f.name], f.dtype, f.inner, self._plain[f.name], f)
            for f in self._fixed
        ]

    def take(self) -> Batch:
        """Return the samples that were added since the last call, in memory of their own."""
        taken: dict[str, Column] = {name: out[: self._count] for name, out in self._out.items()}
        taken |= {c.name: c.take() for c in self._ragged}
        self._count = 0
        for f in self._fixed:
            self._out[f.name] = np.empty((self._room, *f.inner), f.dtype)
        self._steps = self._planned()
        return {name: taken[name] for name in self.schema.names}


def _named(sample: object, names: frozenset[str]) -> bool:
    return isinstance(sample, Mapping) and sample.keys() == names


def _plain_types(field: Field) -> frozenset[type]:
    """Return the types of scalars that numpy puts into an array of a field as they are."""
    # An `int` that is too large is refused.
    dtype = field.dtype
    if field.shape or dtype.kind not in "biufc" or not dtype.isnative:
        return frozenset()
    python = {"b": bool, "i": int, "u": int}.get(dtype.kind, float)
    same = dtype.kind in "biu" or dtype == np.float64
    return frozenset({dtype.type, python} if same else {dtype.type})


class _Values:
    """The column of a ragged field: the value of each sample."""

    def __init__(self, field: Field) -> None:
        self.field, self.name, self.nbytes = field, field.name, 0
        self._dtype, self._inner, self._ndim = field.dtype, field.inner, len(field.shape)
        self._is_array, self._row_nbytes = field.kind == "array", field.row_nbytes
        self._parts = list[Any]()

    def put(self, value: Any, number: object) -> None:
        """Add a sample's value."""
        if not self._is_array:
            plain = type(value) is bytes and self.field.kind == "bytes"
            value = value if plain else bytes(checked(value, self.field, number))
        elif (
            type(value) is np.ndarray
            and value.dtype == self._dtype
            and value.ndim == self._ndim
            and value.shape[1:] == self._inner
        ):
            value = value.copy()
        else:
            value = np.array(checked(value, self.field, number))
        self._parts.append(value)
        self.nbytes += len(value) * self._row_nbytes

    def cut(self, count: int) -> None:
        """Forget what comes after so many samples."""
        self.nbytes -= self._row_nbytes * sum(map(len, self._parts[count:]))
        del self._parts[count:]

    def take(self) -> Ragged:
        """Return the values that are there, and begin with none."""
        parts, self._parts, self.nbytes = self._parts, [], 0
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        if not self._is_array:
            values: Array = np.frombuffer(b"".join(parts), np.uint8)
        else:
            values = np.empty((int(lengths.sum()), *self._inner), self._dtype)
            if parts:
                np.concatenate(parts, out=values)
        return Ragged.from_lengths(values, lengths, self.field.kind)
