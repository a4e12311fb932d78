"""Where every value of a database lies in its file: the truth that a sidecar is made from.

The leaf pages alone are read, each of them once; and of Caffe's Datum messages what surrounds the
image. Of each sample stay 16 bytes, and 8 more if they are not in key order. Whether a field has a
place of its own in every value follows from the encoding and the lengths of all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.schema import Field, Ints
from dsprep.core.storage import pread_most
from dsprep.errors import FormatError
from dsprep.formats.lmdb import frame, recipe, recover
from dsprep.formats.lmdb.datum import CHANNELS, HEIGHT, WIDTH, Datum, parse
from dsprep.formats.lmdb.index import Index
from dsprep.formats.lmdb.pages import Nodes, Pages
from dsprep.formats.lmdb.values import Values
from dsprep.layout.laws import Affine, Explicit, Law, affine
from dsprep.layout.model import Blocks, FileLayout, Part, Records

KEYS = "keys lie in the leaf pages of the tree, not in the values"
_SLICE = 1 << 20
_AT_ONCE = 1 << 16
_MARGIN = 256  # bytes of a message on either side of its image that are read of every one


@dataclass(frozen=True, eq=False)
class Found:
    """The records that are samples, in key order.

    Attributes
    ----------
    pages
        The file.
    offsets, lengths
        int64, shape ``(n,)``: where each value lies, and its bytes.
    big
        How many of them are on overflow pages.
    key_sizes
        Bytes of the shortest and of the longest key.
    """

    pages: Pages
    offsets: Ints
    lengths: Ints
    big: int
    key_sizes: tuple[int, int]


class Finder:
    """Collects where values lie, while leaf pages are read."""

    def __init__(self) -> None:
        self._offsets = [np.zeros(0, np.int64)]
        self._lengths = [np.zeros(0, np.int64)]
        self._big = 0
        self._key_sizes = 1 << 16, 0

    def add(self, nodes: Nodes, samples: np.ndarray) -> None:
        """Take records, of which those in the mask `samples` are samples."""
        self._offsets.append(nodes.offset[samples])
        self._lengths.append(nodes.size[samples])
        self._big += int(nodes.big[samples].sum())
        sizes, (low, high) = nodes.key_size[samples], self._key_sizes
        self._key_sizes = int(sizes.min(initial=low)), int(sizes.max(initial=high))

    def found(self, pages: Pages) -> Found:
        """Return all that was collected."""
        offsets, lengths = np.concatenate(self._offsets), np.concatenate(self._lengths)
        return Found(pages, offsets, lengths, self._big, self._key_sizes)


def find(pages: Pages, index: Index, progress: Callable[[int, int], None] | None) -> Found:
    """Read every leaf page and return where its values lie.

    Raises
    ------
    FormatError
        If a page is damaged, a value reaches beyond the file, or the file has been changed.
    """
    expected = np.diff(index.first)
    finder = Finder()
    page = record = 0
    for counts, nodes in pages.every_node(index.leaves):
        if not np.array_equal(counts, expected[page : page + len(counts)]):
            raise FormatError(
                "a leaf page has another number of records than before",
                where=pages.where,
                fix="the file was changed since it was opened",
            )
        page += len(counts)
        kept = np.ones(len(nodes), bool)
        low, high = np.searchsorted(index.left_out, [record, record + len(nodes)])
        kept[index.left_out[low:high] - record] = False
        record += len(nodes)
        finder.add(nodes, kept)
        if progress is not None:
            progress(page, len(index.leaves))
    return finder.found(pages)


def history(found: Found, depth: int, named: bool) -> tuple[tuple[Law, ...], Mapping[str, Any]]:
    """Return the laws of the offsets that follow from how the file was made, and that as facts.

    Parameters
    ----------
    found
        The records.
    depth, named
        The levels of the database's tree, and whether it is a named one.
    """
    shortest, longest = found.key_sizes
    if shortest != longest:
        return (), {}
    told = recover.Found(
        psize=found.pages.psize,
        offsets=found.offsets,
        sizes=found.lengths,
        key_sizes=np.broadcast_to(np.int64(shortest), found.offsets.shape),
        transaction=found.pages.meta.transaction,
        last_page=found.pages.meta.last_page,
        depth=depth,
        named=named,
    )
    return recover.recover(told)


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
        The records, and which of them is which sample.
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
        _check(found.lengths, order, decoder, label)
        parts = _parts(decoder, inside)
    else:
        data = _data_part(found, decoder)
        parts = {f.name: data if name == "data" else Part() for name, f in inside}
    records = Records(
        Blocks(Explicit(found.offsets), _lengths(found.lengths), path),
        parts,
        order=None if order is None else Explicit(order),
        recipe=recipe.describe(decoder, inside) if _hidden(parts) else None,
        frame=frame.describe(found.pages.psize) if found.big else None,
    )
    keys = {f.name: KEYS for name, f in fields if name not in decoder.schema.names}
    return FileLayout(len(index), records, unlocated=keys)


def _hidden(parts: dict[str, Part]) -> bool:
    """Whether some part has no place of its own."""
    return any(part.at is None for part in parts.values())


def _order(index: Index) -> Ints | None:
    """Return which of the records found is each sample; None if they are in key order."""
    if index.order is None:
        return None
    order: Ints = index.order - np.searchsorted(index.left_out, index.order)
    law = affine.fit(order)
    return None if law is not None and law.base == 0 else order


def _lengths(lengths: Ints) -> Law:
    """Return the law of the lengths."""
    n = len(lengths)
    if n and int(lengths.min()) == int(lengths.max()):
        return Affine(n, int(lengths[0]))
    return Explicit(lengths)


def _check(lengths: Ints, order: Ints | None, decoder: Values, label: Callable[[int], str]) -> None:
    """Raise `FormatError` unless every record has a length that its fields can have."""
    for start in range(0, len(lengths), _SLICE):

        def here(i: int, start: int = start) -> str:
            record = start + i
            return label(record if order is None else int((order == record).argmax()))

        decoder.check_lengths(lengths[start : start + _SLICE], here)


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


# --- Datum messages --------------------------------------------------------------------------


def _data_part(found: Found, decoder: Datum) -> Part:
    """Return the place of the image in every message, if it is one and that is proven.

    A message is its fields one after another. If all begin with the same bytes, up to the image,
    and none has a field behind it that would replace or reshape it, the image is there in all.
    """
    n, lengths = len(found.lengths), found.lengths
    if not n or not decoder.fixed or decoder.floats:
        return Part()
    fd = found.pages.fd
    try:
        first = parse(pread_most(fd, int(lengths[0]), int(found.offsets[0])))
    except ValueError:  # reading says so, with the sample
        return Part()
    start, stop = first.data or (0, 0)
    if first.shape != decoder.shape or stop - start != decoder.nbytes or not decoder.nbytes:
        return Part()
    if start > _MARGIN or int(lengths.min()) < stop or int(lengths.max()) > stop + _MARGIN:
        return Part()
    head = pread_most(fd, start, int(found.offsets[0]))
    for a in range(0, n, _AT_ONCE):
        offsets = found.offsets[a : a + _AT_ONCE].tolist()
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
        found = parse(tail)
    except ValueError:
        return False
    return found.data is None and not found.numbers.keys() & {CHANNELS, HEIGHT, WIDTH}
