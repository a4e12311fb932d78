"""The list of ``tf.train.Example`` that carries a field, and the field that a list is read as.

Writing (`plan`): a feature per field, in the schema's order.

=================================  ==========  ===================================================
field                              list        values
=================================  ==========  ===================================================
float32, at most 1024 elements,    float_list  packed, bit for bit
or ragged without inner axes
int64, at most 1024 elements,      int64_list  packed, each varint padded to 10 bytes, so that
or ragged without inner axes                   records of one shape have one size
everything else                    bytes_list  one value: the elements' bits in C order; UTF-8
=================================  ==========  ===================================================

A schema of nothing but one `bytes` field called ``record`` is written as raw records: that is how
records that are no Examples are read, so that they come out as they went in.

Reading: a feature of several byte strings in a record is two fields, the strings back to back, and
the bytes of each: `LENGTHS` behind its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import numpy as np

from dsprep.core.schema import Field, FieldSpec, Schema, show_dtype
from dsprep.errors import DsprepError, FormatError, UnsupportedError, UsageError, require
from dsprep.formats.fields import ENCODED, LENGTHS, LENGTHS_OF, lengths_field, missing_field
from dsprep.formats.options import FeatureType, WriteOptions
from dsprep.formats.samples import listed
from dsprep.formats.tfrecord.example import BYTES, FLOAT, INT64, LARGEST, PADDED_VARINT, TYPES

RECORD = "record"
"""The name of the field that holds whole records."""
MOST_NUMBERS = 1024
"""Elements of one sample that go to a list of numbers rather than to bytes."""

FLOAT32 = np.dtype("<f4")
INT = np.dtype("<i8")
Form: TypeAlias = Literal["value", "strings", "lengths"]
"""The content of a field: one value of a feature or its numbers; or, of several byte
strings, these back to back, or their lengths."""
NUMBERS: Mapping[FeatureType, int] = {"bytes": BYTES, "float": FLOAT, "int64": INT64}


def is_opaque(schema: Schema) -> bool:
    """Return whether samples of this schema are written as raw records."""
    return schema.names == (RECORD,) and schema.fields[0].kind == "bytes"


# --- writing ---------------------------------------------------------------------------------


def plan(schema: Schema, options: WriteOptions) -> dict[str, int]:
    """Return the list that carries each field: `BYTES`, `FLOAT` or `INT64`.

    Raises `UnsupportedError` if no list, or not the one asked for, can hold a field bit for bit,
    and `UsageError` if a list is asked for a field that is not there.
    """
    for name in options.features:
        if name not in schema.names:
            raise UsageError(f"a feature type is given for {name}, which is not a field")
    if is_opaque(schema):
        if options.features.get(RECORD, "bytes") != "bytes":
            raise UnsupportedError("field record holds whole records", expected="bytes")
        return {RECORD: BYTES}
    types = {f.name: _choose(f, options.features.get(f.name)) for f in schema}
    total = sum(row_nbytes(f, types[f.name]) for f in schema if not f.ragged)
    if total > LARGEST - (1 << 16):
        raise UnsupportedError(
            "a sample is too large for tf.train.Example",
            expected=f"at most {LARGEST} bytes",
            found=total,
            fix="convert to hdf5 or zarr",
        )
    return types


def _choose(f: Field, requested: FeatureType | None) -> int:
    try:
        f.name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"the name of field {f.name!r} is not UTF-8", fix="rename the field"
        ) from error
    if f.ragged and f.row_nbytes == 0:
        raise UnsupportedError(
            f"field {f} has rows of zero bytes, whose number tfrecord cannot keep",
            fix="leave it out, or convert to hdf5 or zarr",
        )
    can = {BYTES}
    if f.kind == "array" and not (f.ragged and f.inner):
        can |= {FLOAT} if f.dtype == FLOAT32 else set()
        can |= {INT64} if fits_int64(f) else set()
    if requested is not None:
        if NUMBERS[requested] not in can:
            nearest = ", ".join(TYPES[k] for k in sorted(can, reverse=True))
            raise UnsupportedError(
                f"field {f} does not fit into a {requested} list bit for bit",
                expected=f"one of {nearest}",
                fix="choose one of these, or change the dtype with --cast",
            )
        return NUMBERS[requested]
    few = f.ragged or math.prod(f.inner) <= MOST_NUMBERS
    if few and FLOAT in can:
        return FLOAT
    return INT64 if few and INT64 in can and f.dtype == INT else BYTES


def fits_int64(f: Field) -> bool:
    """Return whether every value of the field is an int64."""
    return f.dtype.kind in "bi" or (f.dtype.kind == "u" and f.dtype.itemsize < 8)


def row_nbytes(f: Field, type_: int) -> int:
    """Return the encoded bytes of a sample, or of a row when ragged, in a list of this kind."""
    return math.prod(f.inner) * PADDED_VARINT if type_ == INT64 else f.row_nbytes


def loses_type(f: Field, type_: int) -> bool:
    """Return whether the file alone does not state the field's dtype and shape."""
    if f.kind != "array" or type_ == BYTES:
        return f.kind != "bytes"
    return len(f.shape) > 1 or f.shape in ((0,), (1,)) or f.dtype not in (FLOAT32, INT)


def describe(f: Field, type_: int) -> str:
    """Return the storage of a field, for a person to read."""
    if type_ == BYTES:
        content = "UTF-8" if f.kind == "str" else "bytes" if f.kind == "bytes" else ""
        return f"bytes_list of one value: {content or f'the bits of {show_dtype(f.dtype)}'}"
    count = "a varying number" if f.ragged else str(math.prod(f.inner))
    return f"{TYPES[type_]}_list of {count}, packed"


# --- reading ---------------------------------------------------------------------------------


@dataclass(slots=True)
class FeatureStats:
    """The facts about one feature in some records.

    `types` carry it; it has `fewest` to `most_values` values, together of `shortest` to
    `longest` bytes, in `records` of them; `ranges` are those of its values, from the beginning of
    the record, if all have the same.
    """

    types: frozenset[int]
    fewest: int
    most_values: int
    shortest: int
    longest: int
    records: int
    ranges: list[tuple[int, int]] | None

    def with_(self, more: FeatureStats) -> FeatureStats:
        """Return what these records and `more` hold."""
        return FeatureStats(
            self.types | more.types,
            min(self.fewest, more.fewest),
            max(self.most_values, more.most_values),
            min(self.shortest, more.shortest),
            max(self.longest, more.longest),
            self.records + more.records,
            self.ranges if self.ranges == more.ranges else None,
        )

    def kind(self, records: int) -> tuple[object, ...]:
        """Return what decides which kind of field it is, given that there are `records`."""
        of_bytes = BYTES in self.types and self.shortest == self.longest
        return self.types, self.fewest == self.most_values, of_bytes, self.records == records


@dataclass(frozen=True)
class Feature:
    """A feature of the file, its list, and the field that it is read as.

    `sizes` are the smallest and the largest value: bytes, or how many numbers; 0 where it is
    missing. None if no record was looked at.
    """

    name: str
    type: int
    field: Field
    sizes: tuple[int, int] | None = None
    form: Form = "value"

    @property
    def key(self) -> str:
        """The name of the field unless the user renames it."""
        return self.name + LENGTHS if self.form == "lengths" else self.name

    def can_be(self, field: Field) -> bool:
        """Return whether a list of this type can be read as `field`, if sizes fit."""
        if field.ragged and not field.row_nbytes:  # of which the number would be lost
            return False
        if self.form == "strings":
            return field.kind == "bytes"
        if self.form == "lengths":
            return (field.dtype, field.shape, field.kind) == (INT, (None,), "array")
        if self.type == BYTES:
            return True
        exact = field.dtype == FLOAT32 if self.type == FLOAT else fits_int64(field)
        return field.kind == "array" and exact


def discover(
    stats: Mapping[str, FeatureStats], records: int, unlike: Mapping[str, FormatError]
) -> tuple[dict[str, Feature], list[str]]:
    """Return the features by the names of their fields, and notes on what was assumed.

    Left out are those that are `unlike`: of several types.
    """
    features: dict[str, Feature] = {}
    notes = []
    for name, s in stats.items():
        if name in unlike:
            notes.append(f"left out {name}: it is of several types")
            continue
        (type_,) = s.types
        sizes = (s.shortest, s.longest) if type_ == BYTES else (s.fewest, s.most_values)
        if s.records < records:
            sizes = 0, sizes[1]
        if type_ == BYTES:
            if s.most_values > 1 and name + LENGTHS in stats:
                notes.append(
                    f"left out {name}: several byte strings in some records, whose lengths "
                    f"cannot be called {name + LENGTHS}, as another feature is"
                )
                continue
            if s.most_values > 1:
                notes.append(
                    f"feature {name} has several byte strings in some records: they are read "
                    f"back to back, and the bytes of each as {name + LENGTHS}"
                )
                features |= {f.key: f for f in of_strings(name)}
                continue
            as_field = Field.opaque(name)
        else:
            shape: tuple[int | None, ...] = (None,)
            if sizes[0] == sizes[1] > 0:
                shape = () if s.most_values == 1 else (s.most_values,)
            as_field = Field(name, FLOAT32 if type_ == FLOAT else INT, shape)
        features[name] = Feature(name, type_, as_field, sizes)
        if s.records < records or (type_ == BYTES and s.fewest == 0):
            notes.append(f"feature {name} is missing in some records, where it is read as empty")
    return features, notes


def of_strings(name: str) -> tuple[Feature, Feature]:
    """Return the two fields that a feature of several byte strings is."""
    strings = Feature(name, BYTES, Field.opaque(name), form="strings")
    return strings, Feature(name, BYTES, lengths_field(name), form="lengths")


def agree(a: Schema, b: Schema) -> Schema | None:
    """Return the fields that hold the records of two files; None if they do not go together.

    A feature that one of them lacks is read as empty there, so its field is ragged.
    """
    if is_opaque(a) != is_opaque(b):
        return None
    fields = []
    for name in dict.fromkeys((*a.names, *b.names)):
        both = [s[name] for s in (a, b) if name in s.names]
        f, g = both[0], both[-1]
        if (f.dtype, f.kind, f.shape[1:]) != (g.dtype, g.kind, g.shape[1:]):
            return None
        if f.attrs.get(LENGTHS_OF) != g.attrs.get(LENGTHS_OF):
            return None
        fixed = len(both) == 2 and f.shape == g.shape
        fields.append(f if fixed else replace(f, shape=(None, *f.shape[1:])))
    return Schema(tuple(fields), a.attrs)


def choose(
    available: Mapping[str, Feature],
    specs: tuple[FieldSpec, ...],
    hint: Schema | None,
    where: object,
) -> list[Feature]:
    """Return the features to read: those asked for, else those of the sidecar, else all found.

    A feature of bytes may be given any type; one of numbers any shape, and integers any integer
    type (their range is checked as they are read). A field asked for without a type has the
    sidecar's. Raises `SchemaError` if a field that was asked for is not there, `UsageError` or
    `FormatError` if a type that was asked for, or that the sidecar gives, does not go with the
    feature.
    """
    typed = {f.name: f for f in hint or ()}
    available = {**available, **_known_strings(available, typed.values())}
    requests: list[tuple[str, Field | FieldSpec]] = [*typed.items()]
    if specs:
        requests = [(s.spelled if s.index else s.path, s) for s in specs]
    chosen = []
    for path, request in requests:
        feature = available.get(path) or _absent(typed.get(path))
        if feature is None and specs:
            raise missing_field(path, available, where)
        if feature is None:
            problem = f"there is no feature {path}, which the sidecar names"
            raise FormatError(problem, where=where, expected=listed(sorted(available)))
        f, error = typed.get(path, feature.field), cast(type[DsprepError], FormatError)
        attrs = f.attrs
        if isinstance(request, FieldSpec) and request.dtype is not None:
            f, error = request.to_field(), UsageError
        _check(feature, f, error, where)
        f = Field(request.name, f.dtype, f.shape, f.kind, attrs)
        chosen.append(replace(feature, field=f))
    return chosen or list(available.values())


def _known_strings(available: Mapping[str, Feature], typed: Iterable[Field]) -> dict[str, Feature]:
    """Return the features that the hint knows to have several byte strings in other records."""
    names = [str(f.attrs[LENGTHS_OF]) for f in typed if LENGTHS_OF in f.attrs]
    names = [name for name in names if name + LENGTHS not in available]  # where it is a feature
    features = [f for name in names for f in of_strings(name)]
    return {f.key: f for f in features if available.get(f.name, f).type == BYTES}


def _absent(known: Field | None) -> Feature | None:
    """Return a feature that none of the records looked at has, if it may be missing."""
    if known is None or not known.ragged:
        return None
    numbers = known.kind == "array" and not known.inner
    type_ = {FLOAT32: FLOAT, INT: INT64}.get(known.dtype, BYTES) if numbers else BYTES
    return Feature(known.name, type_, known)


def left_out(available: Mapping[str, Feature], chosen: Sequence[Feature]) -> list[str]:
    """Return a note on the features that were found and not asked for, if there are any."""
    names = sorted(available.keys() - {f.key for f in chosen})
    return [f"left out {listed(names)}: not among the fields asked for"] if names else []


def _check(feature: Feature, requested: Field, error: type[DsprepError], where: object) -> None:
    """Raise `error` unless `feature` can be read as `requested`."""
    fits, expected = feature.can_be(requested), str(feature.field)
    if feature.sizes is not None:
        smallest, largest = feature.sizes
        unit = requested.row_nbytes if feature.type == BYTES else math.prod(requested.inner)
        if requested.ragged:
            fits &= bool(unit) and smallest % unit == largest % unit == 0
        else:
            fits &= smallest == largest == unit
        expected += f" of {smallest} to {largest} bytes" if feature.type == BYTES else ""
    require(
        fits,
        error,
        f"feature {feature.name} is not {requested}",
        where=where,
        expected=expected,
        fix=f"leave the type out, or convert with --cast; {ENCODED}",
    )
