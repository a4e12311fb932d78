"""Which record is which sample: 16 bytes per leaf page, and nothing per sample in key order.

A record is one key and its value; records are numbered in key order. Samples are the records
without those that are left out (named databases, keys to skip), in the order asked for; an order
other than by key costs 8 bytes per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dsprep.core.pread import packed, ranges
from dsprep.core.schema import Bytes, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.formats.lmdb.families import DIGITS, Keys, fact, maybe_facts
from dsprep.formats.lmdb.pages import DATABASE, DUPSORT, Database, Nodes, Pages

MOST_FACT = 4096
"""Bytes of a value that is looked at to see whether it is a number."""


@dataclass
class Index:
    """The samples of a database.

    Attributes
    ----------
    leaves
        int64, shape ``(k,)``: the leaf pages, in key order.
    first
        int64, shape ``(k + 1,)``: the first record on each leaf, and the number of records.
    left_out
        int64, rising: the records that are not samples.
    order
        int64, shape ``(n,)``: the record of each sample; None for key order.
    databases
        The names of the databases among the records.
    skipped
        The keys to skip that were found.
    facts
        The keys that are facts about the dataset, and the samples that they count.
    keys
        What the keys of the others say.
    counter
        Whether they are a counter in the order of the samples.
    smallest, largest, payload, big
        Bytes of the smallest and the largest value and of all values together, and how many are on
        overflow pages: of all samples.
    backward
        How many values are stored before that of the record before.
    """

    leaves: Ints
    first: Ints
    left_out: Ints
    order: Ints | None = None
    databases: list[bytes] = field(default_factory=list)
    skipped: set[bytes] = field(default_factory=set)
    facts: dict[bytes, int | None] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)
    counter: bool = True
    smallest: int = 0
    largest: int = 0
    payload: int = 0
    big: int = 0
    backward: int = 0

    def __len__(self) -> int:
        return int(self.first[-1]) - len(self.left_out)

    def records(self, samples: Ints) -> Ints:
        """Return the records of samples."""
        if self.order is not None:
            return self.order[samples]
        if len(self.left_out):
            kept_before = self.left_out - np.arange(len(self.left_out))
            return samples + np.searchsorted(kept_before, samples, "right")
        return samples

    def locate(self, records: Ints) -> tuple[Ints, Ints, Ints]:
        """Return ``(leaves, rows, slots)``.

        Record i is node ``slots[i]`` of leaf ``leaves[rows[i]]``; the leaves are places in
        `self.leaves`, rising.
        """
        leaf = np.searchsorted(self.first, records, "right") - 1
        slots = records - self.first[leaf]
        if len(leaf) and leaf[-1] - leaf[0] < len(leaf) and (np.diff(leaf) >= 0).all():
            whole = np.arange(leaf[0], leaf[-1] + 1)
            return whole, leaf - leaf[0], slots
        whole, rows = np.unique(leaf, return_inverse=True)
        return whole, rows, slots


def build(
    pages: Pages,
    database: Database,
    order: Literal["key", "file", "numeric"],
    skip: Sequence[bytes],
    seen: Callable[[Nodes, np.ndarray], None] | None = None,
) -> Index:
    """Read every leaf of `database` once, check it, and return its samples.

    Parameters
    ----------
    seen
        Called with the records, some at a time, and which of them are samples: bool, ``(n,)``.

    Raises
    ------
    FormatError
        If the tree is damaged.
    UsageError
        If the order is ``"numeric"`` and a key is not a decimal number.
    """
    leaves = pages.leaves(database)
    index = Index(leaves, np.zeros(1, np.int64), np.zeros(0, np.int64), smallest=1 << 62)
    counts = np.zeros(len(leaves), np.int64)
    left_out: list[Ints] = []
    ranks: list[Ints] = []
    page = record = before = 0
    for per_page, nodes in pages.every_node(leaves):
        counts[page : page + len(per_page)] = per_page
        page += len(per_page)
        out = _left_out(nodes, skip, index)
        kept = np.flatnonzero(~out)
        _count(nodes, kept, index)
        flat = nodes.pages.reshape(-1)
        index.keys.add(flat, nodes.key_at[kept], nodes.key_size[kept], kept + record)
        left_out.append(np.flatnonzero(out) + record)
        if seen is not None:
            seen(nodes, ~out)
        index.backward += int((np.diff(nodes.offset, prepend=before) < 0)[nodes.big].sum())
        before = int(nodes.offset[-1])
        record += len(nodes)
        if order == "file":
            ranks.append(nodes.offset[~out])
        elif order == "numeric":
            ranks.append(_numbers(nodes, out, pages.where))
    index.first = packed(counts)
    index.left_out = np.concatenate([np.zeros(0, np.int64), *left_out])
    index.smallest = min(index.smallest, index.largest)
    if record != database.entries:
        raise FormatError(
            "the tree does not have the records that its head names",
            where=pages.where,
            expected=database.entries,
            found=record,
            fix="the file is damaged or still being written",
        )
    index.counter = index.keys.counter
    if order != "key":
        _sort(index, np.concatenate([np.zeros(0, np.int64), *ranks]), order)
    return index


def _sort(index: Index, ranks: Ints, order: Literal["file", "numeric"]) -> None:
    """Put the samples in the order of these ranks, one for each in key order."""
    chosen = np.argsort(ranks, kind="stable")
    index.order = index.records(np.arange(len(index)))[chosen]
    if order == "numeric":
        index.counter = bool((np.diff(ranks[chosen]) == 1).all())


def _left_out(nodes: Nodes, skip: Sequence[bytes], index: Index) -> np.ndarray:
    """Return which nodes are no samples: bool, shape ``(n,)``."""
    out = nodes.database.copy()
    index.databases += [nodes.key(i) for i in np.flatnonzero(out).tolist()]
    flat = nodes.pages.reshape(-1)
    for key in skip:
        same = np.flatnonzero(nodes.key_size == len(key))
        for at, byte in enumerate(key):
            same = same[flat[nodes.key_at[same] + at] == byte]
        if len(same):
            out[same] = True
            index.skipped.add(key)
    for i in maybe_facts(flat, nodes.key_at, nodes.key_size).tolist():
        if not out[i]:
            small = not nodes.big[i] and nodes.size[i] <= MOST_FACT
            found, count = fact(nodes.key(i), nodes.value(i) if small else b"")
            if found:
                out[i] = True
                index.facts[nodes.key(i)] = count
    return out


def _count(nodes: Nodes, kept: Ints, index: Index) -> None:
    """Add the values of the nodes `kept` to the totals."""
    sizes = nodes.size[kept]
    if len(sizes):
        index.smallest = min(index.smallest, int(sizes.min()))
        index.largest = max(index.largest, int(sizes.max()))
        index.payload += int(sizes.sum())
        index.big += int(nodes.big[kept].sum())


def numbers(flat: Bytes, key_at: Ints, key_size: Ints) -> tuple[Ints, np.ndarray]:
    """Return the decimal numbers that keys spell, and which keys spell none.

    Parameters
    ----------
    flat
        uint8, 1-D.
    key_at, key_size
        int64, shape ``(n,)``: where the keys are in it.
    """
    digits = flat[ranges(key_at, key_size)].astype(np.int64) - ord("0")
    owner = np.repeat(np.arange(len(key_size)), key_size)
    ends = np.cumsum(key_size)
    power = ends[owner] - 1 - np.arange(len(owner))
    wrong = np.bincount(
        owner, (digits < 0) | (digits > 9) | ((power >= DIGITS) & (digits != 0)), len(key_size)
    )
    bad = (wrong > 0) | (key_size == 0)
    digits *= np.int64(10) ** np.minimum(power, DIGITS - 1)
    digits[power >= DIGITS] = 0
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(digits)])
    return total[ends] - total[ends - key_size], bad


def _numbers(nodes: Nodes, out: np.ndarray, where: object) -> Ints:
    """Return the numbers that the keys of the kept nodes spell."""
    kept = np.flatnonzero(~out)
    found, bad = numbers(nodes.pages.reshape(-1), nodes.key_at[kept], nodes.key_size[kept])
    if bad.any():
        key = nodes.key(int(kept[int(bad.argmax())]))
        raise UsageError(
            "a key is not a decimal number",
            where=where,
            expected=f"at most {DIGITS} digits",
            found=repr(key),
            fix="leave it out with --skip-key, or use --order key",
        )
    return found


def named_databases(pages: Pages) -> dict[bytes, Database]:
    """Return the named databases of the file.

    Raises
    ------
    FormatError
        If the main database is damaged.
    """
    found: dict[bytes, Database] = {}
    main = pages.meta.main
    if main.flags & DUPSORT:
        return found
    for _, nodes in pages.every_node(pages.leaves(main)):
        for i in np.flatnonzero(nodes.database & ~nodes.big).tolist():
            if nodes.size[i] != DATABASE.size:
                raise FormatError(
                    "the record of a named database is damaged",
                    where=f"{pages.where}, key {nodes.key(i)!r}",
                    expected=f"{DATABASE.size} bytes",
                    found=int(nodes.size[i]),
                )
            found[nodes.key(i)] = Database.unpack(nodes.value(i))
    return found
