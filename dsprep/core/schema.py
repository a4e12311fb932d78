"""The contents of a dataset: fields, their types, and batches of samples.

A dataset is N samples; a sample has fields. Each field is of one of three kinds:

``array``
    Elements of one fixed-width dtype. The shape is fixed, ``(128, 128, 4)``, or its first axis
    varies from sample to sample (ragged), ``(None, 3)``.
``bytes``
    One opaque byte string of any length per sample.
``str``
    One Unicode string of any length per sample.

While samples move between formats, `bytes` and `str` are ragged ``uint8`` of shape ``(None,)``
(UTF-8 for `str`), so that every format has to handle only two cases: a fixed field is one array
of shape ``(n, *shape)``, and everything else is a `Ragged`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from dsprep.errors import FormatError, SchemaError, UsageError

Kind: TypeAlias = Literal["array", "bytes", "str"]
Array: TypeAlias = NDArray[Any]
DType: TypeAlias = np.dtype[Any]
Ints: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
Attrs: TypeAlias = Mapping[str, Any]

# --- dtypes ----------------------------------------------------------------------------------


def is_extension(dtype: DType) -> bool:
    """Return whether numpy knows `dtype` only through ``ml_dtypes``, such as bfloat16."""
    return bool(dtype.type.__module__.startswith("ml_dtypes"))


def extension(name: str) -> DType | None:
    """Return the ``ml_dtypes`` dtype called `name`, or None if there is none."""
    if not name.isidentifier() or not name.startswith(("bfloat", "float8", "float4", "float6")):
        return None
    import ml_dtypes

    scalar_type = getattr(ml_dtypes, name, None)
    return None if scalar_type is None else np.dtype(scalar_type)


def encode_dtype(dtype: DType) -> str | dict[str, Any]:
    """Return `dtype` as JSON; `decode_dtype` is the inverse: ``decode(encode(d)) == d``.

    Simple types are numpy's own short names with the byte order (``"<f4"``, ``"|S10"``),
    extension types their name (``"bfloat16"``), structured and sub-array types an object with
    explicit offsets.
    """
    if dtype.names is not None and dtype.fields is not None:
        return {
            "names": list(dtype.names),
            "formats": [encode_dtype(dtype.fields[n][0]) for n in dtype.names],
            "offsets": [int(dtype.fields[n][1]) for n in dtype.names],
            "itemsize": dtype.itemsize,
        }
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": encode_dtype(base), "shape": list(shape)}
    return dtype.name if is_extension(dtype) else dtype.str


def decode_dtype(text: Any) -> DType:
    """Return the dtype that `encode_dtype` wrote as `text`.

    Raises
    ------
    SchemaError
        If `text` is not such a description, or describes Python objects.
    """
    try:
        if isinstance(text, str):
            dtype = extension(text) or np.dtype(text)
        elif "base" in text:
            dtype = np.dtype((decode_dtype(text["base"]), tuple(int(n) for n in text["shape"])))
        else:
            dtype = np.dtype(
                {
                    "names": [str(n) for n in text["names"]],
                    "formats": [decode_dtype(f) for f in text["formats"]],
                    "offsets": [int(o) for o in text["offsets"]],
                    "itemsize": int(text["itemsize"]),
                }
            )
    except (TypeError, ValueError, KeyError, SyntaxError, OverflowError, RecursionError) as error:
        raise SchemaError(f"{str(text)[:80]!r} is not a dtype") from error
    check_dtype(dtype)
    return dtype


def check_dtype(dtype: DType, where: str | None = None) -> None:
    """Raise `SchemaError` unless every element of `dtype` has a fixed width above zero."""
    if dtype.hasobject or dtype.itemsize == 0:
        raise SchemaError(
            f"dtype {dtype} has no fixed width", where=where, expected="a fixed-width dtype"
        )


def show_dtype(dtype: DType) -> str:
    """Return `dtype` for a person to read: ``float32``, ``>i2``, ``{id: uint64, value: float32}``.

    Types of the machine's own byte order go without a mark.
    """
    if dtype.names is not None and dtype.fields is not None:
        inside = ", ".join(f"{n}: {show_dtype(dtype.fields[n][0])}" for n in dtype.names)
        return f"{{{inside}}}"
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{show_dtype(base)}[{','.join(map(str, shape))}]"
    if dtype.kind in "SUV" and not is_extension(dtype):
        return dtype.str.lstrip("|<")
    return dtype.name if dtype.isnative or is_extension(dtype) else dtype.str


def has_padding(dtype: DType) -> bool:
    """Return whether an element of `dtype` has bytes that belong to no member."""
    if dtype.subdtype is not None:
        return has_padding(dtype.subdtype[0])
    if dtype.names is None or dtype.fields is None:
        return False
    members = [dtype.fields[n][0] for n in dtype.names]
    return sum(m.itemsize for m in members) < dtype.itemsize or any(map(has_padding, members))


def copy_members(source: Array, target: Array) -> None:
    """Copy values member by member; numpy copies the padding along with whole structs."""
    if source.dtype.names is None:
        target[...] = source
    for name in source.dtype.names or ():
        copy_members(source[name], target[name])


def without_padding(array: Array) -> Array:
    """Return `array`, with zeros in the bytes that belong to no member of a structured dtype.

    They hold whatever memory held before: it must neither leak nor make two outputs differ.
    """
    if not has_padding(array.dtype):
        return array
    out = np.zeros(array.shape, array.dtype)
    copy_members(array, out)
    return out


LARGEST = 1 << 62
"""Bytes of a value that nothing has: sizes and offsets stay within int64."""

# --- fields ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One named value that every sample has.

    Attributes
    ----------
    name
        Unique in the schema. Slashes mean nesting where the format has it (``climate/data``).
    dtype
        The dtype of one element; ``uint8`` for `bytes` and `str`.
    shape
        The shape of one sample's value, without a sample axis; ``(None, ...)`` when ragged,
        ``(None,)`` for `bytes` and `str`, ``()`` for a scalar.
    kind
        ``"array"``, ``"bytes"`` or ``"str"``.
    attrs
        Attributes that the format keeps with the field: str, bytes, numbers, numpy arrays.
    """

    name: str
    dtype: DType
    shape: tuple[int | None, ...] = ()
    kind: Kind = "array"
    attrs: Attrs = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.name or "\0" in self.name:
            raise SchemaError(f"{self.name!r} is not a field name")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))
        check_dtype(self.dtype, f"field {self.name}")
        if any(n is None or n < 0 for n in self.shape[1:]) or (
            self.shape and self.shape[0] is not None and self.shape[0] < 0
        ):
            raise SchemaError(
                f"field {self.name} has shape {show_shape(self.shape)}",
                expected="sizes >= 0, only the first axis may vary",
            )
        if self.row_nbytes >= LARGEST:
            raise SchemaError(
                f"field {self.name} has {self.row_nbytes} bytes", expected=f"fewer than {LARGEST}"
            )
        if self.kind != "array" and (self.shape != (None,) or self.dtype != np.uint8):
            raise SchemaError(f"field {self.name}: {self.kind} is uint8 of shape (None,)")

    @classmethod
    def opaque(cls, name: str, kind: Kind = "bytes", attrs: Attrs | None = None) -> Field:
        """Return a field of one byte string (or, with ``kind="str"``, one string) per sample.

        Parameters
        ----------
        name, attrs
            As the attributes.
        kind
            ``"bytes"`` or ``"str"``.

        Returns
        -------
        Field
            Of dtype ``uint8`` and shape ``(None,)``.
        """
        return cls(name, np.dtype(np.uint8), (None,), kind, attrs or {})

    @cached_property
    def ragged(self) -> bool:
        """True if the first axis varies from sample to sample; true for `bytes` and `str`."""
        return bool(self.shape) and self.shape[0] is None

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The fixed axes: the whole shape, or all axes but the first when ragged."""
        return tuple(n for n in self.shape if n is not None)

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one sample's value, or of one row along the varying axis when ragged."""
        return math.prod(self.inner) * self.dtype.itemsize

    def excess(self, nbytes: Ints) -> Ints:
        """Return, of the bytes that values of a ragged field have, those beyond whole rows."""
        row = self.row_nbytes
        return nbytes % row if row else nbytes

    def check_nbytes(
        self, nbytes: Ints, label: Callable[[int], str], fix: str | None = None
    ) -> None:
        """Raise `FormatError` for the first value, named by `label`, with other bytes than its."""
        bad = self.excess(nbytes) != 0 if self.ragged else nbytes != self.row_nbytes
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"the bytes do not fit {self}",
                where=f"{label(i)}, field {self.name}",
                expected=f"{'a multiple of ' * self.ragged}{self.row_nbytes} bytes",
                found=f"{nbytes[i]} bytes",
                fix=fix,
            )

    def __str__(self) -> str:
        if self.kind != "array":
            return f"{self.name}: {self.kind}"
        return f"{self.name}: {show_dtype(self.dtype)}{show_shape(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """Return the field without its attributes as JSON; `from_json` is the inverse."""
        if self.kind != "array":
            return {"name": self.name, "kind": self.kind}
        return {"name": self.name, "dtype": encode_dtype(self.dtype), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Field:
        """Return the field that `to_json` wrote."""
        try:
            kind, name = json.get("kind", "array"), str(json["name"])
            if kind in ("bytes", "str"):
                return cls.opaque(name, kind)
            shape = tuple(json["shape"])
            if not all(n is None or type(n) is int for n in shape):  # True is an int to isinstance
                raise TypeError(f"{json['shape']!r} is not a shape")
            dtype = decode_dtype(json["dtype"])
            if dtype.subdtype is not None:
                raise ValueError(f"{dtype} has a shape of its own")
            return cls(name, dtype, shape)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"{json!r} does not describe a field") from error


def show_shape(shape: Sequence[int | None]) -> str:
    """Return a shape as it is typed in ``--field``: ``[128,128,4]``, ``[None,3]``, ``""``."""
    return f"[{','.join(map(str, shape))}]" if shape else ""


DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute of a field that names its axes, the samples' first, as xarray calls it."""


@dataclass(frozen=True, eq=False)
class StaticArray:
    """An array that belongs to all samples, such as the latitudes of a grid or names of classes.

    Attributes
    ----------
    field
        What it is: the shape is that of the whole array, text is of a dtype ``U``.
    values
        The array; None: only the files of the dataset have it.
    """

    field: Field
    values: Array | None


@dataclass(frozen=True)
class Schema:
    """The fields of a dataset, in order, and the attributes of the dataset as a whole.

    ``schema[name]`` is a field, ``len(schema)`` their number, and a loop yields them in order.

    Attributes
    ----------
    fields
        Of every sample, with unique names.
    attrs
        Attributes of the dataset: str, bytes, numbers, numpy arrays.
    static
        Arrays that are kept beside the samples.

    Raises
    ------
    SchemaError
        If two fields have the same name.
    """

    fields: tuple[Field, ...]
    attrs: Attrs = field(default_factory=dict, compare=False)
    static: tuple[StaticArray, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        if len(self._by_name) < len(self.fields):
            twice = min(n for n, k in Counter(self.names).items() if k > 1)
            raise SchemaError(f"field {twice} is named twice", fix="rename one of them")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The field names, in order."""
        return tuple(f.name for f in self.fields)

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {f.name: f for f in self.fields}

    @cached_property
    def ragged(self) -> bool:
        """True if any field is ragged, `bytes` or `str`."""
        return any(f.ragged for f in self.fields)

    @cached_property
    def fixed_nbytes(self) -> int:
        """Bytes of one sample's fixed fields together."""
        return sum(f.row_nbytes for f in self.fields if not f.ragged)

    def __getitem__(self, name: str) -> Field:
        field = self._by_name.get(name)
        if field is not None:
            return field
        raise SchemaError(f"there is no field {name}", expected="one of " + ", ".join(self.names))

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields))

    def beyond(self, other: Schema) -> list[Field]:
        """Return the fields that `other` lacks.

        Parameters
        ----------
        other
            Another schema.

        Returns
        -------
        list of Field
            Those whose names `other` does not have, in order.
        """
        return [f for f in self.fields if f.name not in other.names]

    def replace(self, *fields: Field) -> Schema:
        """Return a schema with these fields and the same attributes.

        Parameters
        ----------
        *fields
            All fields of the new schema, in order.

        Returns
        -------
        Schema
            With the attributes of this one.
        """
        return replace(self, fields=fields)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the fields without attributes as JSON; `from_json` is the inverse."""
        return [f.to_json() for f in self.fields]

    @classmethod
    def from_json(cls, json: Any) -> Schema:
        """Return the schema that `to_json` wrote."""
        if not isinstance(json, list):
            raise SchemaError(f"{json!r} does not describe a schema")
        return cls(tuple(Field.from_json(f) for f in json))


def known_axes(array: str, names: Sequence[str]) -> Attrs:
    """Return the attribute that names the axes of an array, none if `name_axes` made them up."""
    own = array.rpartition("/")[2]
    made_up = all(n in ("", f"{own}_{k}", "sample" * (not k)) for k, n in enumerate(names))
    return {} if made_up else {DIMENSIONS: np.array(names)}


def name_axes(schema: Schema, count: int) -> dict[str, list[str]]:
    """Return the names of the axes of all arrays of `count` samples but ragged ones.

    A name is made up where none is known, or the known one does not fit: it is not plain text, an
    axis of it has another length, or an array of it is not the coordinate along that axis.
    """
    shapes = {f.name: (count, *f.inner) for f in schema if not f.ragged}
    shapes |= {f.name: (count,) for f in schema if f.kind == "str"}
    shapes |= {s.field.name: s.field.inner for s in schema.static}
    axes: dict[str, list[str]] = {}
    for f in (*(f for f in schema if f.name in shapes), *(s.field for s in schema.static)):
        names = [str(n) for n in np.ravel(f.attrs.get(DIMENSIONS, ()))]
        names = [""] * (f.name in schema.names and len(names) == len(f.shape)) + names
        rank = len(shapes[f.name])
        axes[f.name] = names if len(names) == rank else [""] * rank
    first = next((axes[n][0] for n in schema.names if n in axes and axes[n][0]), "sample")
    axes = dict(sorted(axes.items(), key=lambda item: item[1] != [item[0]]))  # coordinates first
    arrays, sizes = {*schema.names, *shapes}, dict[str, int]()
    for array, names in axes.items():
        for k, length in enumerate(shapes[array]):
            name = names[k] or (first if k == 0 and array in schema.names else "")
            plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
            free = (name not in arrays or axes.get(name) == [name]) and name not in names[:k]
            if not (plain and free and sizes.setdefault(name, length) == length):
                name = f"{array.rpartition('/')[2]}_{k}"
            names[k] = name
    return axes


def differences(
    expected: Schema, actual: Schema, where: tuple[object, object] | None = None
) -> list[str]:
    """Return, one line each, how `actual` differs from `expected`; empty when it does not.

    Parameters
    ----------
    where
        What has the one schema and what the other, for lines that name both.
    """
    if where is not None:
        first, second = where
        lines = [f"field {f.name} is in {first}, not in {second}" for f in expected.beyond(actual)]
        lines += [f"field {f.name} is in {second}, not in {first}" for f in actual.beyond(expected)]
        both = [f for f in actual if f.name in expected.names and expected[f.name] != f]
        return lines + [f"field {expected[f.name]} in {first}, {f} in {second}" for f in both]
    lines = [f"field {f.name} is missing" for f in expected.beyond(actual)]
    for f in actual:
        if f.name not in expected.names:
            lines.append(f"field {f.name} is not in the other")
        elif expected[f.name] != f:
            lines.append(f"field {f.name}: expected {expected[f.name]}, found {f}")
    return lines


# --- batches ---------------------------------------------------------------------------------


class Ragged(Sequence[Any]):
    """The values of one ragged, `bytes` or `str` field for n consecutive samples.

    Indexing gives one sample's value (an array view, `bytes` or `str`); a slice gives a `Ragged`
    that shares the values.

    Attributes
    ----------
    values
        Shape ``(total, *inner)``: the samples' rows, one after another.
    offsets
        int64, shape ``(n + 1,)``, rising from 0 to ``total``: sample i has the rows
        ``offsets[i]:offsets[i + 1]``.
    kind
        As in `Field`.
    """

    __slots__ = ("kind", "offsets", "values")

    def __init__(self, values: Array, offsets: Array, kind: Kind = "array") -> None:
        self.values = values
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.kind: Kind = kind

    @classmethod
    def from_lengths(cls, values: Array, lengths: Array, kind: Kind = "array") -> Ragged:
        """Return the samples whose numbers of rows are `lengths`.

        Parameters
        ----------
        values
            Shape ``(total, *inner)``: the rows of all samples, one after another.
        lengths
            Integers, shape ``(n,)``, with the sum ``total``: rows of each sample.
        kind
            As in `Field`.

        Returns
        -------
        Ragged
            Of n samples; the values are shared, not copied.
        """
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets, kind)

    @classmethod
    def pack(cls, items: Sequence[Any], field: Field) -> Ragged:
        """Return the values `items` of `field` (arrays, `bytes` or `str`), copied together.

        Parameters
        ----------
        items
            One value per sample: an array of shape ``(rows, *inner)``, `bytes` or `str`.
        field
            The dtype, the inner shape and the kind.

        Returns
        -------
        Ragged
            Of ``len(items)`` samples; strings are kept as UTF-8.
        """
        if field.kind == "str":
            items = [s.encode("utf-8", "surrogateescape") for s in items]
        if field.kind != "array":
            lengths = np.fromiter(map(len, items), np.int64, len(items))
            return cls.from_lengths(np.frombuffer(b"".join(items), np.uint8), lengths, field.kind)
        arrays = [np.asarray(a, field.dtype).reshape(-1, *field.inner) for a in items]
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        empty = np.empty((0, *field.inner), field.dtype)
        return cls.from_lengths(np.concatenate([empty, *arrays], dtype=field.dtype), lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Rows of each sample, shape ``(n,)``."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of all values together."""
        return int(self.values.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Ragged: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise UsageError(f"step {step} is not supported, only 1")
            stop = max(start, stop)
            offsets = self.offsets[start : stop + 1]
            return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0], self.kind)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        value = self.values[self.offsets[index] : self.offsets[index + 1]]
        if self.kind == "array":
            return value
        data = value.tobytes()
        return data if self.kind == "bytes" else data.decode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        inner = show_shape((None, *self.values.shape[1:]))
        return f"Ragged({len(self)} samples of {show_dtype(self.values.dtype)}{inner}, {self.kind})"


Column: TypeAlias = Array | Ragged
Batch: TypeAlias = dict[str, Column]
"""Consecutive samples: field name to array of shape ``(n, *shape)``, or to `Ragged`."""


def column_of(batch: Batch, name: str) -> Column:
    """Return a field of a batch; `SchemaError` if there is none of this name."""
    if name not in batch:
        raise SchemaError(f"there is no field {name}", expected="one of " + ", ".join(batch))
    return batch[name]


def batch_nbytes(batch: Batch) -> int:
    """Return the payload bytes of all columns of `batch`."""
    return sum(int(column.nbytes) for column in batch.values())


def empty_batch(schema: Schema) -> Batch:
    """Return a batch of zero samples."""
    return {
        f.name: Ragged(np.empty((0, *f.inner), f.dtype), np.zeros(1, np.int64), f.kind)
        if f.ragged
        else np.empty((0, *f.inner), f.dtype)
        for f in schema
    }


def concatenate(schema: Schema, batches: Sequence[Batch]) -> Batch:
    """Return the samples of `batches`, one after another, as one batch."""
    if len(batches) == 1:
        return batches[0]
    out: Batch = {}
    for f in schema:
        columns = [b[f.name] for b in batches]
        if f.ragged:
            ragged = [c for c in columns if isinstance(c, Ragged)]
            empty = np.empty((0, *f.inner), f.dtype)
            out[f.name] = Ragged.from_lengths(
                np.concatenate([empty, *(c.values for c in ragged)], dtype=f.dtype),
                np.concatenate([np.zeros(0, np.int64), *(c.lengths for c in ragged)]),
                f.kind,
            )
        else:
            fixed = [np.asarray(c) for c in columns]
            empty = np.empty((0, *f.inner), f.dtype)
            out[f.name] = np.concatenate([empty, *fixed], dtype=f.dtype)  # keeps the byte order
    return out


class Arena:
    """Memory that is used again for each batch, one block per key.

    Fresh memory costs a page fault every 4 KiB, about as much as the copy into it. An array from
    `empty` is valid until the same key is asked for again. Each thread that
    calls `Source.read` or `Sidecar.read` in a loop needs its own.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, NDArray[np.uint8]] = {}
        self._parts: dict[str, Arena] = {}

    def part(self, name: str) -> Arena:
        """Return memory of its own, for one of several readers that use the same keys.

        Parameters
        ----------
        name
            Which reader.

        Returns
        -------
        Arena
            The same one for the same name.
        """
        return self._parts.setdefault(name, Arena())

    def empty(self, key: str, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialised C-contiguous array on the block called `key`.

        Parameters
        ----------
        key
            The block.
        shape, dtype
            Of the array.

        Returns
        -------
        array
            Of that shape and dtype; valid until the same key is asked for again.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._blocks.get(key)
        if block is None or block.nbytes < nbytes:
            self._blocks.pop(key, None)  # free the old block before taking the larger one
            block = self._blocks[key] = np.empty(nbytes, np.uint8)
        return block[:nbytes].view(dtype).reshape(shape)


def new_array(arena: Arena | None, key: str, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return an uninitialised array from `arena`, or a fresh one if there is none."""
    return np.empty(shape, dtype) if arena is None else arena.empty(key, shape, dtype)


# --- what the user asks for ------------------------------------------------------------------

_SPEC = re.compile(
    r"(?P<name>[^=:@\[\]][^=@\[\]]*?)"
    r"(=(?P<path>[^@\[\]]*?))?"
    r"(@(?P<index>[^\[\]]+?))?"
    r"(:(?P<dtype>[^:\[\]]+)(\[(?P<shape>[^\]]*)\])?)?"
)


OTHERS = "*"
"""The field name that requests all other fields too."""


@dataclass(frozen=True)
class FieldSpec:
    """A field that the user asked for: ``NAME[=PATH][@INDEX...][:DTYPE[SHAPE]]``.

    The name `OTHERS` alone stands for all fields that no other spec names (`with_others`). What
    is not a dtype belongs to the name: ``input:0``.

    Attributes
    ----------
    name
        The field's name in dsprep and in the output.
    path
        Where the source keeps it: a dataset, feature or field name. The name if not given.
    index
        For ragged HDF5 data, the index tables from the sample axis to the values, each either
        one table with a first and a count column or ``first,count``.
    dtype, shape, kind
        What its bytes mean, where the source does not say: None, or as in `Field`.
    """

    name: str
    path: str
    index: tuple[str, ...] = ()
    dtype: DType | None = None
    shape: tuple[int | None, ...] = ()
    kind: Kind = "array"

    @classmethod
    def parse(cls, text: str) -> FieldSpec:
        """Return the field that `text` asks for.

        Parameters
        ----------
        text
            As after ``--field``.

        Returns
        -------
        FieldSpec
            Without a dtype where `text` gives none.

        Raises
        ------
        UsageError
            If `text` does not follow the pattern.

        Examples
        --------
        >>> FieldSpec.parse("x:int16[128,4]").shape
        (128, 4)
        >>> FieldSpec.parse("x=climate/data").path
        'climate/data'
        """
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"--field {text!r} is not understood",
                expected="NAME[=PATH][@INDEX][:DTYPE[SHAPE]], such as x=climate/data:float32[16,4]",
            )
        name = match["name"].strip()
        if OTHERS in (name, (match["path"] or "").strip()) and text.strip() != OTHERS:
            raise UsageError(
                f"--field {text!r} is not understood",
                expected=f"{OTHERS} alone, for all fields that are not named otherwise",
            )
        path = (match["path"] or name).strip().strip("/")
        index = (
            tuple(p.strip().strip("/") for p in match["index"].split("@")) if match["index"] else ()
        )
        if match["dtype"] is None:
            return cls(name, path, index)
        word = match["dtype"].strip()
        if word in ("bytes", "str"):
            if match["shape"]:
                raise UsageError(f"--field {text!r}: {word} has no shape")
            return cls(name, path, index, np.dtype(np.uint8), (None,), word)  # type: ignore[arg-type]
        try:
            dtype = parse_dtype(word)
        except UsageError:
            start = text.index("=") + 1 if match["path"] else 0
            text_path = text[start:].strip().strip("/")
            return cls(name if match["path"] else text_path, text_path)
        return cls(name, path, index, dtype, parse_shape(match["shape"] or ""))

    def __str__(self) -> str:
        """Return the spec as it is typed; `parse` is the inverse."""
        path = f"={self.path}" if self.path != self.name else ""
        index = "".join(f"@{p}" for p in self.index)
        if self.dtype is None:
            return f"{self.name}{path}{index}"
        kind = self.kind
        if kind == "array":
            kind = f"{show_dtype(self.dtype)}{show_shape(self.shape)}"  # type: ignore[assignment]
        return f"{self.name}{path}{index}:{kind}"

    @property
    def spelled(self) -> str:
        """The path with the index tables, as the user spelled them."""
        return "@".join((self.path, *self.index))

    def settled(self, names: Collection[str]) -> FieldSpec:
        """Return the spec of the longest of `names` that its text begins with, if any does.

        >>> str(FieldSpec.parse("x=a@b").settled(["a@b"])), FieldSpec.parse("x=a@b").index
        ('x=a@b', ('b',))
        """
        for start in ("", f"{self.name}="):
            rest = str(self).removeprefix(start)
            ends = (len(rest), *(m.start() for m in [*re.finditer("[@:]", rest)][::-1]))
            for path in (rest[:end] for end in ends):
                spec = FieldSpec.parse(f"x{rest.removeprefix(path)}")
                if path in names and spec.path == "x":
                    return replace(spec, name=start[:-1] or path, path=path)
        return self

    def to_field(self, attrs: Attrs | None = None) -> Field:
        """Return the field; the spec must have a dtype.

        Parameters
        ----------
        attrs
            The attributes of the field.

        Returns
        -------
        Field
            Of the name, dtype, shape and kind of the spec.
        """
        if self.dtype is None:
            raise UsageError(
                f"field {self.name} needs a dtype",
                fix=f"give it as --field {self.name}:float32[...]",
            )
        return Field(self.name, self.dtype, self.shape, self.kind, attrs or {})


def with_others(specs: Iterable[FieldSpec], names: Iterable[str]) -> tuple[FieldSpec, ...]:
    """Return `specs` with one for each of `names` that none of them reads in place of `OTHERS`.

    >>> [str(s) for s in with_others(map(FieldSpec.parse, ("new=b", "*")), ("a", "b", "c"))]
    ['new=b', 'a', 'c']
    """
    specs = tuple(specs)
    read = {s.path for s in specs}
    others = tuple(FieldSpec(name, name) for name in names if name not in read)
    out: list[FieldSpec] = []
    for spec in dict.fromkeys(specs):
        out += others if spec.name == OTHERS else (spec,)
    return tuple(out)


def renamed(name: str) -> str:
    """Return the options that give field `name` another name and keep all others."""
    return f"--field {shlex.quote(f'NEW={name}')} --field '{OTHERS}'"


def parse_dtype(text: str) -> DType:
    """Return the dtype that a user typed: ``float32``, ``>i2``, ``bfloat16``, ``S10``.

    Raises
    ------
    UsageError
        If numpy does not know it, or it has no fixed width.
    """
    try:
        dtype = extension(text) or np.dtype(text)
        check_dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise UsageError(
            f"{text!r} is not a fixed-width dtype",
            expected="one such as float32, >i2, bfloat16, S10",
        ) from error
    return dtype


def parse_shape(text: str) -> tuple[int | None, ...]:
    """Return the shape that a user typed between brackets; ``None``, ``*`` or ``?`` varies."""
    sizes: list[int | None] = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        if word in ("None", "*", "?") and not sizes:
            sizes.append(None)
        elif word.isdecimal():
            sizes.append(int(word))
        else:
            raise UsageError(
                f"[{text}] is not a shape", expected="sizes, of which the first may be None"
            )
    return tuple(sizes)
