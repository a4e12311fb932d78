"""The place of every value of a database: the truth that a sidecar is made from.

`Records` has found the values. Whether a field has an offset of its own in every value follows from
the encoding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsprep.core.schema import Field, Ints, Schema
from dsprep.formats.lmdb.datum import Datum
from dsprep.formats.lmdb.fields import describe_recipe
from dsprep.formats.lmdb.pages import HEADER
from dsprep.formats.lmdb.recover import recover
from dsprep.formats.lmdb.tree import PSIZE
from dsprep.formats.lmdb.values import Values
from dsprep.layout import model
from dsprep.layout.laws import Explicit
from dsprep.layout.model import FileLayout, Part


def written_layout(schema: Schema, key_nbytes: int, inside: str, positions: Ints) -> FileLayout:
    """Return the layout of samples that were written with their values at these positions.

    `positions` has offsets and sizes: int64, shape ``(2, samples)``, in the file that is at
    `inside` below the path of the dataset.
    """
    (offsets, sizes), n = positions, positions.shape[1]
    blocks = model.Blocks(Explicit(offsets), Explicit(sizes), inside)
    fields = [(f.name, f) for f in schema]
    framed = PSIZE if (offsets % PSIZE == HEADER).any() else 0
    laws, facts = recover(PSIZE, offsets, sizes, (key_nbytes, key_nbytes), 1, named=False)
    stored = records_of(blocks, Values(schema), fields, framed=framed)
    return FileLayout(n, stored, candidates=laws, facts=facts)


def records_of(
    blocks: model.Blocks,
    decoder: Values | Datum,
    fields: Sequence[tuple[str, Field]],
    order: Ints | None = None,
    framed: int = 0,
) -> model.Records:
    """Return the samples as records of a layout, in which `fields` are.

    `order` is the row of each sample, `framed` the bytes of a page if some values are on overflow
    pages.
    """
    parts = {f.name: Part() for _, f in fields}
    if isinstance(decoder, Values):
        known = decoder.parts()
        parts = {f.name: known[name] for name, f in fields}
    hidden = any(part.at is None for part in parts.values())
    return model.Records(
        blocks,
        parts,
        order=None if order is None else Explicit(order),
        recipe=describe_recipe(decoder, fields) if hidden else None,
        frame={"name": "lmdb", "psize": framed} if framed else None,
    )
