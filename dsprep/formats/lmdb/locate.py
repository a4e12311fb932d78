"""Where every value of a database is stored: the truth that a sidecar is made from.

`Records` has found the values; of Caffe's Datum messages what surrounds the image is read, too.
Whether a field has an offset of its own in every value follows from the encoding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsprep.core.schema import Field
from dsprep.formats.lmdb.datum import CHANNELS, HEIGHT, WIDTH, Datum, parse
from dsprep.formats.lmdb.fields import describe_recipe
from dsprep.formats.lmdb.overflow import describe_frame
from dsprep.formats.lmdb.parse import Records
from dsprep.formats.lmdb.recover import StoredValues, recover
from dsprep.formats.lmdb.values import Values
from dsprep.layout import model
from dsprep.layout.laws import Explicit
from dsprep.layout.model import FileLayout, Part
from dsprep.storage.base import Handle

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
        data = _data_part(records.file, positions, decoder)
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


def _data_part(file: Handle, stored: StoredValues, decoder: Datum) -> Part:
    """Return the place of the image in every message, if it is one and that is proven.

    A message is its fields, back to back. If all begin with the same bytes, up to the image,
    and none has a field behind it that would replace or reshape it, the image is there in all.
    """
    n, lengths = len(stored.sizes), stored.sizes
    if not n or not decoder.fixed or decoder.floats:
        return Part()
    try:
        first = parse(file.pread(int(lengths[0]), int(stored.offsets[0])))
    except ValueError:  # reading says so, with the sample
        return Part()
    start, stop = first.data or (0, 0)
    if first.shape != decoder.shape or stop - start != decoder.nbytes or not decoder.nbytes:
        return Part()
    if start > _MARGIN or int(lengths.min()) < stop or int(lengths.max()) > stop + _MARGIN:
        return Part()
    head = file.pread(start, int(stored.offsets[0]))
    for a in range(0, n, _AT_ONCE):
        offsets = stored.offsets[a : a + _AT_ONCE].tolist()
        rest = (lengths[a : a + _AT_ONCE] - stop).tolist()
        if {file.pread(start, at) for at in offsets} != {head}:
            return Part()
        tails = {file.pread(k, at + stop) for at, k in zip(offsets, rest, strict=True)}
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
