"""Where every value of a database is stored: the truth that a sidecar is made from.

`Records` has found the values; of Caffe's Datum messages what surrounds the image is read, too.
Whether a field has a place of its own in every value follows from the encoding alone.

The other fields are taken out of values by a recipe:

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

import numpy as np

from dsprep.core.schema import Arena, Batch, Bytes, Column, Field, Ints, Schema
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import DsprepError, FormatError
from dsprep.formats.fields import retype
from dsprep.formats.lmdb.datum import CHANNELS, HEIGHT, WIDTH, Datum, parse
from dsprep.formats.lmdb.overflow import describe_frame
from dsprep.formats.lmdb.records import Records
from dsprep.formats.lmdb.recover import StoredValues, recover
from dsprep.formats.lmdb.values import Values
from dsprep.layout import model
from dsprep.layout.laws import Explicit
from dsprep.layout.model import FileLayout, Part
from dsprep.reading.records import damaged_recipe
from dsprep.storage.ranges import pread_most

KEYS = "keys are in the leaf pages of the tree, not in the values"
_AT_ONCE = 1 << 16
_MARGIN = 256  # bytes of a message on either side of its image that are read of every one


def file_layout(
    records: Records,
    decoder: Values | Datum,
    fields: Sequence[tuple[str, Field]],
) -> FileLayout:
    """Return the layout of the samples with all that shows of it.

    `decoder` and `fields` are what is in a value, and ``(name there, field)`` of what is wanted;
    other names are keys.
    """
    positions = records.stored_values()
    inside = [(name, f) for name, f in fields if name in decoder.schema.names]
    parts = None
    if isinstance(decoder, Datum):
        data = _data_part(records.file.fd, positions, decoder)
        parts = {f.name: data if name == "data" else Part() for name, f in inside}
    keys = {f.name: KEYS for name, f in fields if name not in decoder.schema.names}
    stored = records_of(records, decoder, inside, parts)
    laws, facts = recover(positions)
    return FileLayout(len(records), stored, unlocated=keys, candidates=laws, facts=facts)


def records_of(
    records: Records,
    decoder: Values | Datum,
    fields: Sequence[tuple[str, Field]],
    parts: dict[str, Part] | None = None,
) -> model.Records:
    """Return the samples as records of a layout, in which `fields` are.

    `parts` gives their places; None: those that the types alone give.
    """
    if parts is None and isinstance(decoder, Values):
        parts = _parts(decoder, fields)
    elif parts is None:
        parts = {f.name: Part() for _, f in fields}
    hidden = any(part.at is None for part in parts.values())
    return model.Records(
        records.blocks,
        parts,
        order=None if records.order is None else Explicit(records.order),
        recipe=describe_recipe(decoder, fields) if hidden else None,
        frame=describe_frame(records.pages.psize) if records.big else None,
    )


def _parts(decoder: Values, fields: Sequence[tuple[str, Field]]) -> dict[str, Part]:
    """Return the place of each field in a value; those behind a ragged one have none."""
    parts = {}
    at = decoder.table
    for f in decoder.fixed:
        parts[f.name] = Part(at, f.row_nbytes)
        at += f.row_nbytes
    for f in decoder.ragged:
        parts[f.name] = Part() if decoder.table else Part(at)
    return {f.name: parts[name] for name, f in fields}


# --- Datum messages --------------------------------------------------------------------------


def _data_part(fd: int, stored: StoredValues, decoder: Datum) -> Part:
    """Return the place of the image in every message, if it is one and that is proven.

    A message is its fields, back to back. If all begin with the same bytes, up to the image,
    and none has a field behind it that would replace or reshape it, the image is there in all.
    """
    n, lengths = len(stored.sizes), stored.sizes
    if not n or not decoder.fixed or decoder.floats:
        return Part()
    try:
        first = parse(pread_most(fd, int(lengths[0]), int(stored.offsets[0])))
    except ValueError:  # reading says so, with the sample
        return Part()
    start, stop = first.data or (0, 0)
    if first.shape != decoder.shape or stop - start != decoder.nbytes or not decoder.nbytes:
        return Part()
    if start > _MARGIN or int(lengths.min()) < stop or int(lengths.max()) > stop + _MARGIN:
        return Part()
    head = pread_most(fd, start, int(stored.offsets[0]))
    for a in range(0, n, _AT_ONCE):
        offsets = stored.offsets[a : a + _AT_ONCE].tolist()
        rest = (lengths[a : a + _AT_ONCE] - stop).tolist()
        if {pread_most(fd, start, at) for at in offsets} != {head}:
            return Part()
        tails = {pread_most(fd, k, at + stop) for at, k in zip(offsets, rest, strict=True)}
        if not all(map(_leaves_image, tails)):
            return Part()
    return Part(start, stop - start)


def _leaves_image(tail: bytes) -> bool:
    """Whether what follows an image in a message neither replaces nor reshapes it."""
    try:
        message = parse(tail)
    except ValueError:
        return False
    return message.data is None and not message.numbers.keys() & {CHANNELS, HEIGHT, WIDTH}


# --- recipes ---------------------------------------------------------------------------------


def describe_recipe(decoder: Values | Datum, fields: Sequence[tuple[str, Field]]) -> dict[str, Any]:
    """Return the recipe for `fields`, given as ``(name in the value, field)``, as JSON."""
    if isinstance(decoder, Datum):
        recipe = {"name": "datum", **decoder.to_json()}
    else:
        recipe = {"name": "values", "schema": decoder.schema.to_json()}
    if any(path != f.name for path, f in fields):
        recipe["fields"] = {f.name: path for path, f in fields}
    return recipe


def values(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes values of several ragged fields; `FormatError` for bad `params`."""
    try:
        return Recipe(Values(Schema.from_json(params.get("schema"))), params, schema)
    except FormatError:
        raise
    except (DsprepError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise damaged_recipe("the schema of the values is damaged", found=error) from error


def datum(params: Mapping[str, Any], schema: Schema) -> Recipe:
    """Return what decodes Caffe's Datum messages; see `values`."""
    try:
        decoder = Datum.from_json(params)
    except ValueError as error:
        raise damaged_recipe("the recipe for Datum messages is damaged", found=error) from error
    return Recipe(decoder, params, schema)


class Recipe:
    """Decodes records that are LMDB values; see ``dsprep.reading.records``.

    It gives those fields of `schema` that the recipe has; keys, for one, are not in values.
    """

    def __init__(self, decoder: Values | Datum, params: Mapping[str, Any], schema: Schema) -> None:
        self._decoder = decoder
        known = {f.name: f for f in decoder.schema}
        names = params.get("fields", {name: name for name in known})
        if not isinstance(names, Mapping):
            raise damaged_recipe("the fields of a recipe are not an object", found=names)
        self._fields: list[tuple[str, Field]] = []
        for f in schema:
            path = names.get(f.name)
            if path is None:
                continue
            if not isinstance(path, str) or path not in known:
                raise damaged_recipe(f"there is no {path!r} in the values", expected=list(known))
            field = known[path]
            same = (field.dtype, field.shape, field.kind) == (f.dtype, f.shape, f.kind)
            if not same and field.kind != "bytes":
                raise damaged_recipe(f"field {f.name} is of another type", expected=field, found=f)
            self._fields.append((path, f))

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
        batch = self._decoder.decode(_together(buffer, starts, lengths), lengths, label)
        return {f.name: _typed(batch[path], f, label) for path, f in self._fields}

    def one(self, record: Bytes) -> Batch | None:
        """See ``dsprep.reading.records``: values are always judged by `decode`."""
        return None


def _together(buffer: Bytes, starts: Ints, lengths: Ints) -> Bytes:
    """Return the bytes of all values back to back; the buffer itself if they are contiguous."""
    ends = offsets_of(lengths)
    first = int(starts[0]) if len(starts) else 0
    if np.array_equal(starts, ends[:-1] + first):
        return buffer[first : first + int(ends[-1])]
    out = np.empty(int(ends[-1]), np.uint8)
    move_spans(buffer, starts, lengths, out, ends[:-1])
    return out


def _typed(column: Column, field: Field, label: Callable[[int], str]) -> Column:
    """Return a column of bytes as the type of `field`."""
    try:
        return retype(column, field, "", 0)
    except FormatError:
        for i in range(len(column)):  # which one it is
            try:
                retype(column[i : i + 1], field, "", 0)
            except FormatError as error:
                raise FormatError(
                    error.what,
                    where=f"{label(i)}, field {field.name}",
                    expected=error.expected,
                    found=error.found,
                ) from error
        raise
