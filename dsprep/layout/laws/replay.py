"""LMDB written in rising key order in several transactions: the writer's page numbers, replayed.

Where each transaction begins, LMDB copies the pages at the right edge of the tree, and takes pages
that earlier transactions freed; so the offsets have no short formula. But they follow from the
numbers in `dsprep.layout.laws.lmdb.Shape` and from how many records each transaction put, if the
environment was new, nothing was deleted and no reader was open. The replay does work per
transaction and per leaf, not per record, the first time that an offset is asked for; what comes
out is kept as affine runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables
from dsprep.core.schema import Ints
from dsprep.errors import FormatError
from dsprep.layout.laws.affine import Affine
from dsprep.layout.laws.allocator import Allocator, Beyond
from dsprep.layout.laws.base import Law, damaged
from dsprep.layout.laws.follow import Follow
from dsprep.layout.laws.lmdb import HEADER, Shape, overflow, parse
from dsprep.layout.laws.runs import Runs

MAX_STEPS = 4_000_000
"""Transactions and leaves together that are replayed: half a minute."""
_MAX_LINES = 4096  # lines of a commit plan

Plan = tuple[tuple[int, int], ...]
"""``(times, records)``: so many transactions of so many records each, one after another."""


class Replay(Law):
    """The offsets of the values, in key order.

    In a sidecar: ``{"law": "replay", "psize": 4096, "key": 8, "append": true, "named": false,
    "commit": 1000}``, the last transaction with what remains; or ``"commit": [[10, 1000], [1,
    57]]``, transactions and the records of each. ``"together": true`` where the named database was
    created in the transaction that put the first records, not in one before it. The law of the
    lengths beside it gives the rest.

    Parameters
    ----------
    shape
        Its `value` is what `lengths` says.
    lengths
        The law of the values' lengths, as many as `plan` has records.
    plan
        The transactions.
    together
        As above.
    """

    name = "replay"

    def __init__(self, shape: Shape, lengths: Law, plan: Plan, together: bool = False) -> None:
        self.count = lengths.count
        self.shape, self.plan, self.together = shape, plan, together
        self.lengths = lengths
        self._law: Law | None = None

    @property
    def steps(self) -> int:
        """The number of steps of the replay."""
        return steps(self.shape, self.lengths, self.plan)

    @override
    def at(self, indices: Ints) -> Ints:
        return self._replayed().at(indices)

    @override
    def one(self, index: int) -> int:
        return self._replayed().one(index)

    @override
    def span(self, start: int, stop: int) -> Ints:
        return self._replayed().span(start, stop)

    def _replayed(self) -> Law:
        """Return the law of what came out; `FormatError` if there is none."""
        if self._law is None:
            build = Build(self.shape, self.lengths, self.together)
            try:
                for records in transactions(self.plan):
                    build.commit(records)
            except Beyond:
                raise FormatError(
                    "the law of an LMDB file leads where it does not hold",
                    expected="a free database of one page",
                    found=self.to_json(Tables()),
                    fix="write the sidecar again with dsprep provenance",
                ) from None
            self._law = build.law()  # threads that come at once make the same
        return self._law

    def to_json(self, tables: Tables) -> Any:
        """Return the parameters; see the class."""
        commit: Any = max(1, self.plan[0][1])
        if self.plan != regular(self.count, commit):
            commit = [list(line) for line in self.plan]
        json = {"law": self.name, **self.shape.to_json(), "commit": commit}
        return {**json, "together": True} if self.together else json

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Replay:
        shape = parse(json, count, tables, lengths)
        assert lengths is not None
        commit = json.get("commit")
        if isinstance(commit, int) and not isinstance(commit, bool) and commit >= 1:
            plan = regular(count, commit)
        else:
            plan = _plan(commit, tables)
        if sum(times * records for times, records in plan) != count:
            raise damaged("the transactions of a law do not add up", tables, count)
        if not feasible(shape, lengths, plan):
            raise damaged("a law takes too long to follow", tables, f"{MAX_STEPS} steps", commit)
        together = json.get("together", False)
        if not isinstance(together, bool) or (together and not shape.named):
            raise damaged("together of a law is wrong", tables, "true for a named one", together)
        return cls(shape, lengths, plan, together)

    @override
    def words(self) -> str:
        each = {records for _, records in self.plan[:-1]} or {self.plan[0][1]}
        often = f"{each.pop():,}" if len(each) == 1 else "varying numbers of"
        return f"an LMDB tree replayed, a commit every {often} records: {self.shape.words()}"


def regular(count: int, each: int) -> Plan:
    """Return the transactions of `count` records, `each` in every one but the last."""
    full, rest = divmod(count, each)
    plan = ((full, each),) if full else ()
    return (*plan, (1, rest)) if rest or not full else plan


def _plan(commit: Any, tables: Tables) -> Plan:
    """Return the transactions that a sidecar lists."""
    if not isinstance(commit, list) or not 1 <= len(commit) <= _MAX_LINES:
        raise damaged("commit of a law is wrong", tables, "a number, or pairs of numbers", commit)
    for line in commit:
        good = isinstance(line, list) and len(line) == 2
        if not good or not all(type(n) is int and 1 <= n < 1 << 60 for n in line):
            raise damaged("commit of a law is wrong", tables, "[transactions, records]", line)
    return tuple((line[0], line[1]) for line in commit)


def feasible(shape: Shape, lengths: Law, plan: Plan) -> bool:
    """Return whether the replay ends soon."""
    return steps(shape, lengths, plan) <= MAX_STEPS


def steps(shape: Shape, lengths: Law, plan: Plan) -> int:
    """Return the number of steps of a replay, each of some 5 to 10 microseconds."""
    events = sum(times for times, _ in plan) + lengths.count // shape.step
    if not (isinstance(lengths, Affine) and not lengths.stride):
        events += lengths.count >> 3  # a value may have to be looked at on its own
    return events


def transactions(plan: Plan) -> Iterator[int]:
    """Yield the records of each transaction."""
    for times, records in plan:
        for _ in range(times):
            yield records


class Build:
    """A database that grows at its right edge; `put` are its records so far.

    `pages` are those at the right edge, from the leaf to the root. The parameters are as for
    `Replay`.
    """

    def __init__(self, shape: Shape, lengths: Law, together: bool = False) -> None:
        self._shape, self._lengths = shape, lengths
        self._alloc = Allocator(shape.psize)
        self._big, self._leaf = shape.big, shape.leaf
        self._even = 0  # overflow pages of each value, if they are as many
        self._ends: Ints | None = None  # else those of all values before each one
        if isinstance(before := overflow(shape, lengths), Affine):
            self._min_pages = self._even = before.stride // shape.psize
        else:
            pages = (lengths.span(0, lengths.count) + (HEADER - 1)) // shape.psize + 1
            self._ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(pages)])
            self._min_pages = int(pages.min(initial=1 << 62))
        self.put = 0
        self.pages: list[int] = []
        self._nodes: list[int] = []
        self._first = 0  # the first record of the open leaf
        self._from, self._rest = array("q"), array("q")  # runs, as `law` puts them together
        self._main = 0  # the leaf with the name of the database
        self._together = together
        if shape.named and not together:
            self._alloc.begin()
            self._main = self._alloc.take(1)
            self._alloc.commit()

    def commit(self, records: int) -> None:
        """Put so many records in one transaction."""
        alloc, pages, leaf = self._alloc, self.pages, self._leaf
        alloc.begin()
        new = not pages
        if new:
            if self._together:
                self._main = alloc.take(1)
            pages.append(alloc.take(1))
            self._nodes.append(0)
        else:
            if self._main:
                self._main = alloc.replace(self._main)
            for level in range(len(pages) - 1, -1, -1):
                pages[level] = alloc.replace(pages[level])
        end = self.put + records
        while self.put < end:
            if self._nodes[0] == leaf:
                self._split()
            some = min(leaf - self._nodes[0], end - self.put)
            if self._big:
                self._overflow(self.put, self.put + some)
            self.put += some
            self._nodes[0] += some
        if new and self._main and not self._together:
            self._main = alloc.replace(self._main)
        alloc.commit()

    def _split(self) -> None:
        """Begin a leaf, and the branches that this takes."""
        shape, alloc, pages, nodes = self._shape, self._alloc, self.pages, self._nodes
        if not self._big:
            self._close()
            self._first = self.put if shape.append else self.put - 1
        new, level = alloc.take(1), 0
        while True:
            above = level + 1
            if above == len(pages):
                pages.append(alloc.take(1))
                nodes.append(1)
            pages[level] = new
            if nodes[above] < shape.branch:
                nodes[above] += 1
                break
            new = alloc.take(1)
            nodes[above] = 2
            level = above
        nodes[0] = 0 if shape.append else 1

    def _overflow(self, start: int, stop: int) -> None:
        """Give pages to the values of these records."""
        alloc, ends, even = self._alloc, self._ends, self._even
        while start < stop:
            before = start * even if ends is None else int(ends[start])
            many = alloc.hopeless <= self._min_pages  # none of them fits into free pages
            until = stop if many else start + 1
            pages = (until * even if ends is None else int(ends[until])) - before
            first = alloc.extend(pages) if many else alloc.take(pages)
            self._run(start, (first - before) * self._shape.psize + HEADER)
            start = until

    def _close(self) -> None:
        """Note where the open leaf's records are, if values are in leaves."""
        shape = self._shape
        base = self.pages[0] * shape.psize + shape.inside
        self._run(self._first, base + self._first * shape.node)

    def _run(self, first: int, rest: int) -> None:
        """Note that from a record on offsets are `rest` and what `law` adds for each record."""
        if not self._rest or self._rest[-1] != rest:
            self._from.append(first)
            self._rest.append(rest)

    def law(self) -> Law:
        """Return the offsets of all records put."""
        if not self._big and self.put:
            self._close()
            self._first = self.put
        first, rest = np.array(self._from, np.int64), np.array(self._rest, np.int64)
        if self._ends is not None:
            runs = Runs(self.put, first, rest, np.zeros_like(rest))
            return Follow(self._lengths, runs, HEADER, self._shape.psize)
        step = self._even * self._shape.psize if self._big else -self._shape.node
        return Runs(self.put, first, rest + first * step, np.full_like(rest, step))
