"""Where every value of a database lies in its file: the truth that a sidecar is made from.

The leaf pages alone are read, each of them once; of each record stay 16 bytes, and 8 more if the
samples are not simply the records in key order. Whether a field has a place of its own in every
value follows from the encoding and the lengths of all values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsprep.errors import FormatError
from dsprep.formats.lmdb import frame, recipe
from dsprep.formats.lmdb.datum import Datum
from dsprep.formats.lmdb.index import Index
from dsprep.formats.lmdb.pages import Pages
from dsprep.formats.lmdb.values import Values
from dsprep.laws import Affine, Explicit, Law, affine
from dsprep.layout.model import Blocks, FileLayout, Part, Records
from dsprep.schema import Field, Ints

KEYS = "keys lie in the leaf pages of the tree, not in the values"
_SLICE = 1 << 20


@dataclass(frozen=True, eq=False)
class Found:
    """All records of a database, in key order.

    Attributes
    ----------
    offsets, lengths
        int64, shape ``(n,)``: where each value lies, and its bytes.
    big
        How many of them are on overflow pages.
    psize
        Bytes per page.
    """

    offsets: Ints
    lengths: Ints
    big: int
    psize: int


def find(pages: Pages, index: Index, progress: Callable[[int, int], None] | None) -> Found:
    """Read every leaf page and return where its values lie.

    Raises
    ------
    FormatError
        If a page is damaged, a value reaches beyond the file, or the file has been changed.
    """
    n = int(index.first[-1])
    offsets, lengths = np.empty(n, np.int64), np.empty(n, np.int64)
    expected = np.diff(index.first)
    page = record = big = 0
    for counts, nodes in pages.every_node(index.leaves):
        if not np.array_equal(counts, expected[page : page + len(counts)]):
            raise FormatError(
                "a leaf page has another number of records than before",
                where=pages.where,
                fix="the file was changed since it was opened",
            )
        page += len(counts)
        offsets[record : record + len(nodes)] = nodes.offset
        lengths[record : record + len(nodes)] = nodes.size
        record += len(nodes)
        big += int(nodes.big.sum())
        if progress is not None:
            progress(page, len(index.leaves))
    return Found(offsets, lengths, big, pages.psize)


def file_layout(
    found: Found,
    index: Index,
    decoder: Values | Datum,
    fields: Sequence[tuple[str, Field]],
    path: str,
    label: Callable[[int], str],
) -> FileLayout:
    """Return the layout of the samples.

    Parameters
    ----------
    found, index
        All records, and which of them are samples.
    decoder, fields
        What is in a value, and ``(name there, field)`` of what is wanted; other names are keys.
    path
        The file below the dataset's path.
    label
        Gives the name of a sample, for messages.

    Raises
    ------
    FormatError
        If a value has a length that does not fit.
    """
    order = _order(index)
    inside = [(name, f) for name, f in fields if name in decoder.schema.names]
    if isinstance(decoder, Values):
        _check(found, index, decoder, label)
        parts = _parts(decoder, inside)
    else:
        parts = {f.name: Part() for _, f in inside}
    records = Records(
        Blocks(Explicit(found.offsets), _lengths(found.lengths), path),
        parts,
        order=None if order is None else Explicit(order),
        recipe=recipe.describe(decoder, inside) if _hidden(parts) else None,
        frame=frame.describe(found.psize) if found.big else None,
    )
    keys = {f.name: KEYS for name, f in fields if name not in decoder.schema.names}
    return FileLayout(len(index), records, unlocated=keys)


def _hidden(parts: dict[str, Part]) -> bool:
    """Whether some part has no place of its own."""
    return any(part.at is None for part in parts.values())


def _order(index: Index) -> Ints | None:
    """Return the record of each sample; None if they are all records in key order."""
    if index.order is None and not len(index.left_out):
        return None
    order = index.records(0, len(index))
    law = affine.fit(order) if len(order) == int(index.first[-1]) else None
    return None if law is not None and law.base == 0 else order


def _lengths(lengths: Ints) -> Law:
    """Return the law of the lengths."""
    n = len(lengths)
    if n and int(lengths.min()) == int(lengths.max()):
        return Affine(n, int(lengths[0]))
    return Explicit(lengths)


def _check(found: Found, index: Index, decoder: Values, label: Callable[[int], str]) -> None:
    """Raise `FormatError` unless every sample has a length that its fields can have."""
    for start in range(0, len(index), _SLICE):
        records = index.records(start, min(start + _SLICE, len(index)))

        def here(i: int, start: int = start) -> str:
            return label(start + i)

        decoder.check_lengths(found.lengths[records], here)


def _parts(decoder: Values, fields: Sequence[tuple[str, Field]]) -> dict[str, Part]:
    """Return the place of each field in a value; those behind a ragged one have none."""
    places = {}
    at = decoder.table
    for f in decoder.fixed:
        places[f.name] = Part(at, f.row_nbytes)
        at += f.row_nbytes
    for f in decoder.ragged:
        places[f.name] = Part() if decoder.table else Part(at)
    return {f.name: places[name] for name, f in fields}
