"""LMDB written in one transaction, or copied compactly: the place of every record in closed form.

Records are in key order, their keys have one size, and their values have one size or all are on
overflow pages. Then the tree and the order in which its pages are taken depend on nothing but the
numbers in `dsprep.layout.laws.lmdb.Shape`, and the page of a record is the sum of what comes before
it:

``one``
    All records put in rising order in one transaction of a new environment. Pages are taken from
    the end of the file: the first leaf, the overflow pages of its values, and at each split the
    new leaf, the branches that this splits or begins, and on. Page 2 is the first; with a named
    database, whose name is on page 2, it is page 3.
``compact``
    What ``mdb_env_copy2`` with ``MDB_CP_COMPACT`` writes, and ``dsprep convert``: the overflow
    pages of a leaf's values, the leaf, and behind its last child each branch, from page 2 on.

It costs a few divisions per record and level, and no memory but for values of different sizes,
whose pages are added up once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables
from dsprep.core.schema import Ints
from dsprep.layout.laws.base import Law, damaged, integer
from dsprep.layout.laws.lmdb import HEADER, Shape, overflow, parse

_SLICE = 1 << 15  # numbers at once: they stay in the cache
_MAX_MOVES, _MAX_DISTANCE = 64, 16


class _Bounds(NamedTuple):
    """Keep numbers at most or at least at a bound; an array becomes the result itself."""

    at_most: Callable[[Any, int], Any]
    at_least: Callable[[Any, int], Any]


_NUMBERS = _Bounds(min, max)
_ARRAYS = _Bounds(lambda a, b: np.minimum(a, b, out=a), lambda a, b: np.maximum(a, b, out=a))


class Tree(Law):
    """The offsets of the values, in key order.

    In a sidecar: ``{"law": "tree", "kind": "compact", "psize": 4096, "key": 8, "append": true,
    "named": false}``. How long the values are is not said again: the law of the lengths beside it
    states it. ``moved``, where it is there, is a list of ``[record, pages]``: from this record on
    the values are so many pages behind (or before) where the rules put them. dsprep itself puts a
    few branches later than a copy by LMDB when it cannot yet know whether another page follows.

    Parameters
    ----------
    kind
        ``one`` or ``compact``.
    shape
        Its `value` is what `lengths` says.
    lengths
        The law of the values' lengths.
    moved
        As above, the records rising.
    before
        What `dsprep.layout.laws.lmdb.overflow` gives for them, if it is there already.
    """

    name = "tree"

    def __init__(
        self,
        kind: Literal["one", "compact"],
        shape: Shape,
        lengths: Law,
        moved: tuple[tuple[int, int], ...] = (),
        before: Law | None = None,
    ) -> None:
        self.count = lengths.count
        self.kind, self.shape, self.moved = kind, shape, moved
        self._before = before or overflow(shape, lengths)
        if shape.append:
            self._last = max(0, self.count - 1) // shape.leaf
        else:
            self._last = max(0, self.count - 2) // shape.step
        self._from = np.array([record for record, _ in moved], np.int64)
        pages = np.array([0, *(pages for _, pages in moved)], np.int64)
        self._by = pages * shape.psize

    @override
    def at(self, indices: Ints) -> Ints:
        out = np.empty(len(indices), np.int64)
        for start in range(0, len(indices), _SLICE):
            some = np.asarray(indices[start : start + _SLICE], np.int64)
            part = out[start : start + _SLICE]
            part[:] = (self._one if self.kind == "one" else self._compact)(some, _ARRAYS)
            if self.shape.big:
                part += self._before.at(some)
            if self.moved:
                part += self._by[np.searchsorted(self._from, some, "right")]
        return out

    @override
    def one(self, index: int) -> int:
        out: int = (self._one if self.kind == "one" else self._compact)(index, _NUMBERS)
        if self.shape.big:
            out += self._before.one(index)
        if self.moved:
            out += int(self._by[self._from.searchsorted(index, "right")])
        return out

    # What follows takes one number or an array of them, with the functions of either.

    def _one(self, i: Any, of: _Bounds) -> Any:
        """Return the offsets without overflow pages, for one transaction."""
        shape, base = self.shape, 3 if self.shape.named else 2
        if shape.big:
            leaf = i // shape.leaf if shape.append else of.at_least(i - 1, 0) // shape.step
            pages = leaf + self._branches(leaf, of)  # a value comes behind the branches of its leaf
            pages += base + 1
            pages *= shape.psize
            pages += HEADER
            return pages
        leaf = of.at_most(i // shape.step, self._last)
        pages = leaf + self._branches(of.at_least(leaf - 1, 0), of)  # a leaf comes before them
        pages += base
        return self._inside(i, leaf, pages)

    def _compact(self, i: Any, of: _Bounds) -> Any:
        """Return the offsets without overflow pages, for a compact copy."""
        shape, each = self.shape, self.shape.branch - 1
        leaf = of.at_most(i // shape.step, self._last)
        pages, above, last = leaf + 2, leaf, self._last
        while last >= 1:
            last = (last - 1) // each
            above = of.at_most(above // each, last)
            pages += above
        if shape.big:
            pages *= shape.psize
            pages += HEADER
            return pages
        return self._inside(i, leaf, pages)

    def _branches(self, leaf: Any, of: _Bounds) -> Any:
        """Return how many branches there are when this leaf has been begun; writes to nothing."""
        each, last = self.shape.branch - 1, self._last
        total, pages = leaf * 0, leaf
        while last >= 1:
            total += pages >= 1
            pages = of.at_least((pages - 1) // each, 0)
            total += pages
            last = (last - 1) // each
        return total

    def _inside(self, i: Any, leaf: Any, pages: Any) -> Any:
        """Return the offsets of values in these leaves; `leaf` and `pages` are used up."""
        shape = self.shape
        leaf *= shape.step
        pages *= shape.psize
        pages += shape.inside
        pages -= (i - leaf) * shape.node
        return pages

    def to_json(self, tables: Tables) -> Any:
        """Return the parameters; see the class."""
        json = {"law": self.name, "kind": self.kind, **self.shape.to_json()}
        if self.moved:
            json["moved"] = [list(pair) for pair in self.moved]
        return json

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Tree:
        kind = json.get("kind")
        if kind not in ("one", "compact"):
            raise damaged("there is no such kind of tree", tables, "one or compact", kind)
        shape = parse(json, count, tables, lengths)
        assert lengths is not None
        given = json.get("moved", [])
        if not isinstance(given, list) or len(given) > _MAX_MOVES:
            raise damaged("moved of a law is a short list", tables, found=given)
        moved: list[tuple[int, int]] = []
        for pair in given:
            if not isinstance(pair, list) or len(pair) != 2:
                raise damaged("moved of a law has pairs", tables, "[record, pages]", pair)
            numbers = dict(zip(("record", "pages"), pair, strict=True))
            record = integer(numbers, "record", tables, moved[-1][0] + 1 if moved else 0, count - 1)
            moved.append((record, integer(numbers, "pages", tables, -_MAX_DISTANCE, _MAX_DISTANCE)))
        law = cls(kind, shape, lengths, tuple(moved))
        if bool((law.at(law._from) < 2 * shape.psize).any()):
            raise damaged("moved of a law leaves the file", tables, found=given)
        return law

    @override
    def words(self) -> str:
        how = "written in one transaction" if self.kind == "one" else "copied compactly"
        besides = f", moved at {len(self.moved)} records" if self.moved else ""
        return f"an LMDB tree {how}: {self.shape.words()}{besides}"
