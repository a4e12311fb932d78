"""Where every value of a database is stored: the truth that a sidecar is made from.

`Records` has found the values; of Caffe's Datum messages what surrounds the image is read, too.
Whether a field has an offset of its own in every value follows from the encoding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from dsprep.core.schema import Field, Ints, Schema
from dsprep.errors import FormatError
from dsprep.formats.lmdb.datum import CHANNELS, HEIGHT, WIDTH, Datum, parse
from dsprep.formats.lmdb.fields import describe_recipe
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.lmdb.overflow import Frame, describe_frame
from dsprep.formats.lmdb.pages import HEADER
from dsprep.formats.lmdb.parse import Records
from dsprep.formats.lmdb.recover import StoredValues, recover
from dsprep.formats.lmdb.tree import PSIZE
from dsprep.formats.lmdb.values import Values
from dsprep.formats.options import WriteOptions
from dsprep.layout import model
from dsprep.layout.laws import Explicit
from dsprep.layout.model import FileLayout, Part
from dsprep.storage.base import Handle
from dsprep.storage.paths import open_file

KEYS = "keys are in the leaf pages of the tree, not in the values"
_AT_ONCE = 1 << 16
_PROBED = 64  # values of a file just written that are compared with it
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
    stored = records_of(records.blocks, decoder, inside, parts, records.order, records.framed)
    laws, facts = recover(positions)
    return FileLayout(len(records), stored, unlocated=keys, candidates=laws, facts=facts)


def written_layout(
    schema: Schema,
    options: WriteOptions,
    data_file: Callable[[Path], Path],
    path: Path,
    positions: Ints | None,
) -> FileLayout | None:
    """Return the layout of samples that were written with their values at these positions.

    `positions` has offsets and sizes: int64, shape ``(2, samples)``; some are compared with the
    file, which `data_file` gives of `path`.
    """
    if positions is None:
        return None
    (offsets, sizes), n = positions, positions.shape[1]
    big, keys = offsets % PSIZE == HEADER, plan_keys(options.key_format, n)
    stored_in = data_file(path)
    with closing(open_file(stored_in)) as file:
        frame = Frame(describe_frame(PSIZE))
        for i in np.unique(np.linspace(0, n - 1, _PROBED).astype(np.int64)):
            nbytes = HEADER if big[i] else keys.nbytes
            before = file.pread(nbytes, int(offsets[i]) - nbytes)
            head, one = np.frombuffer(before, np.uint8)[None], slice(i, i + 1)
            if frame.wrong(head, offsets[one], sizes[one])[0] if big[i] else before != keys.one(i):
                what = "the file is not what was written to it"
                raise FormatError(what, where=f"{stored_in}, sample {i}")
    inside = "" if stored_in == path else stored_in.name
    blocks = model.Blocks(Explicit(offsets), Explicit(sizes), inside)
    fields = [(f.name, f) for f in schema]
    framed = PSIZE if big.any() else 0
    values = StoredValues(PSIZE, offsets, sizes, (keys.nbytes, keys.nbytes), 1, 0, named=False)
    laws, facts = recover(values)
    stored = records_of(blocks, Values(schema), fields, framed=framed)
    return FileLayout(n, stored, candidates=laws, facts=facts)


def records_of(
    blocks: model.Blocks,
    decoder: Values | Datum,
    fields: Sequence[tuple[str, Field]],
    parts: dict[str, Part] | None = None,
    order: Ints | None = None,
    framed: int = 0,
) -> model.Records:
    """Return the samples as records of a layout, in which `fields` are.

    `parts` gives their places; None: those that the types alone give. `order` is the row of each
    sample, `framed` the bytes of a page if some values are on overflow pages.
    """
    if parts is None and isinstance(decoder, Values):
        parts = _parts(decoder, fields)
    elif parts is None:
        parts = {f.name: Part() for _, f in fields}
    hidden = any(part.at is None for part in parts.values())
    return model.Records(
        blocks,
        parts,
        order=None if order is None else Explicit(order),
        recipe=describe_recipe(decoder, fields) if hidden else None,
        frame=describe_frame(framed) if framed else None,
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
