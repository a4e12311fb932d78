"""The records of one database of a file: which of them are samples, and where their values are.

A record is one key and its value. All leaf pages are read once, when the file is opened, and every
node is checked; what stays is where each value is stored, at most 12 bytes per sample. Samples are
the records without those that are left out (named databases, keys to skip, facts), in the order
asked for; an order other than by key costs 8 bytes per sample. Keys are read again where they are
asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Array, Ints
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats.lmdb.families import COUNTS, DIGITS, OTHERS, Counter, is_fact, numbers
from dsprep.formats.lmdb.pages import DATABASE, DUPSORT, HEADER, P_LEAF, Database, Nodes, Pages
from dsprep.formats.lmdb.recover import recover
from dsprep.formats.options import OpenOptions
from dsprep.formats.samples import listed
from dsprep.layout import model
from dsprep.layout.laws import Affine, Explicit, Law, Table
from dsprep.storage.paths import open_file


class Records:
    """One database, open for reading; safe to use from several threads.

    Parameters
    ----------
    path, file
        The environment, and its data file.
    options
        Which database, and which of its records are samples in which order.

    Attributes
    ----------
    inside
        The file below `path`: empty if that is the file.
    file, pages, database
        The open file, its pages, and the tree.
    offsets, lengths
        Of the values, by **row**: the number of a sample in key order.
    order
        int64, shape ``(n,)``: the row of each sample; None for key order.
    databases, skipped
        The names of the databases among the records, and the keys to skip that were found.
    facts
        The keys that are facts about the dataset.
    keys
        Whether the keys of the samples count, in key order.
    counter
        Whether they do in the order of the samples.
    key_sizes
        Bytes of the shortest and of the longest.
    smallest, largest
        Bytes of the smallest and of the largest value.
    framed
        The bytes of a page if there are values on overflow pages, else 0.
    """

    def __init__(self, path: Path, file: Path, options: OpenOptions) -> None:
        self.path, self.named = path, options.database is not None
        self.inside = "" if file == path else file.name
        self.file = open_file(file)
        self.databases: list[bytes] = []
        self.skipped: set[bytes] = set()
        self.facts: list[bytes] = []
        self.keys = Counter()
        self.key_sizes = 1 << 16, 0
        self.order: Ints | None = None
        with failure_closes(self.file.close):
            self.pages = Pages(self.file)
            self.database = self.pages.meta.main
            if options.database is not None:
                self.database = self._named(options.database)
            self._walk(options)

    def _named(self, name: str) -> Database:
        databases = named_databases(self.pages)
        database = databases.get(name.encode("utf-8", "surrogateescape"))
        if database is None:
            raise SchemaError(
                f"there is no database {name}",
                where=self.path,
                expected="one of " + shown(databases) if databases else "no named database",
            )
        return database

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.offsets.count

    # --- the walk ------------------------------------------------------------------------------

    def _walk(self, options: OpenOptions) -> None:
        """Read every leaf once, and check it."""
        leaves = self.pages.leaves(self.database)
        counts = np.zeros(len(leaves), np.int64)
        none = np.zeros(0, np.int64)
        left_out, ranks = [none], [none]
        offsets, lengths = [none], [none.astype(np.uint32)]
        page = record = 0
        for per_page, nodes in self.pages.every_node(leaves):
            counts[page : page + len(per_page)] = per_page
            page += len(per_page)
            out = self._left_out(nodes, options)
            kept = np.flatnonzero(~out)
            left_out.append(np.flatnonzero(out) + record)
            record += len(nodes)
            self.keys.add(nodes.pages.reshape(-1), nodes.key_at[kept], nodes.key_size[kept])
            keys, (low, high) = nodes.key_size[kept], self.key_sizes
            self.key_sizes = int(keys.min(initial=low)), int(keys.max(initial=high))
            offsets.append(nodes.offset[kept])
            lengths.append(nodes.size[kept].astype(np.uint32))
            if options.order == "numeric":
                ranks.append(self._numbers(nodes, kept))
        self._leaves, self._first = leaves, offsets_of(counts)
        self._out = np.concatenate(left_out)
        starts = np.concatenate(offsets)
        sizes: Array = np.concatenate(lengths)
        self.offsets: Law = Explicit(starts)
        self._check(record, int(sizes.sum(dtype=np.int64)))
        self.largest = int(sizes.max(initial=0))
        self.smallest = int(sizes.min(initial=self.largest))
        even = self.smallest == self.largest
        self.lengths: Law = Affine(len(self), self.largest) if even else Table(sizes)
        self.framed = self.pages.psize if (starts % self.pages.psize == HEADER).any() else 0
        self.counter = self.keys.counts
        if options.order == "file":
            ranks = [self.offsets.span(0, len(self))]
        if options.order != "key":
            self._sort(np.concatenate(ranks), numeric=options.order == "numeric")

    def _check(self, count: int, payload: int) -> None:
        """Raise unless the tree has all its records, samples among them, of bytes of the file."""
        if count != self.database.entries:
            raise FormatError(
                "the tree does not have the records that its head names",
                where=self.path,
                expected=self.database.entries,
                found=count,
                fix="the file is damaged or still being written",
            )
        if self.databases and not len(self):
            raise SchemaError(
                "the main database holds only named databases",
                where=self.path,
                expected="one of " + shown(self.databases),
                fix="choose one with --db NAME",
            )
        if payload > self.pages.nbytes:
            raise FormatError(
                "values overlap: together they are larger than the file",
                where=self.path,
                expected=f"at most {self.pages.nbytes} bytes",
                found=payload,
            )

    def _left_out(self, nodes: Nodes, options: OpenOptions) -> np.ndarray:
        """Return which nodes are not samples: bool, shape ``(n,)``."""
        out = nodes.database.copy()
        self.databases += [nodes.key(i) for i in np.flatnonzero(out).tolist()]
        for key in options.skip_keys:
            same = _around(nodes, key, b"", exact=True)
            if len(same):
                out[same] = True
                self.skipped.add(key)
        known = [_around(nodes, name.encode(), b"", exact=True) for name in COUNTS | OTHERS]
        for i in np.unique(np.concatenate([_around(nodes, b"__", b"__"), *known])).tolist():
            value = b"" if nodes.big[i] else nodes.value(i)
            if not out[i] and is_fact(nodes.key(i), value):
                out[i] = True
                self.facts.append(nodes.key(i))
        return out

    def _numbers(self, nodes: Nodes, kept: Ints) -> Ints:
        """Return the numbers that the keys of the kept nodes spell."""
        values, bad = numbers(nodes.pages.reshape(-1), nodes.key_at[kept], nodes.key_size[kept])
        if bad.any():
            raise UsageError(
                "a key is not a decimal number",
                where=self.path,
                expected=f"at most {DIGITS} digits",
                found=repr(nodes.key(int(kept[int(bad.argmax())]))),
                fix="leave it out with --skip-key, or use --order key",
            )
        return values

    def _sort(self, ranks: Ints, *, numeric: bool) -> None:
        """Put the samples in the order of these ranks, one for each row."""
        order = np.argsort(ranks, kind="stable")
        if numeric:
            self.counter = bool((np.diff(ranks[order]) == 1).all())
        if bool((np.diff(order) < 0).any()):
            self.order = order

    # --- looking up ----------------------------------------------------------------------------

    def rows(self, start: int, stop: int) -> Ints:
        """Return the rows of the samples ``start <= i < stop``."""
        return np.arange(start, stop) if self.order is None else self.order[start:stop]

    def nodes(self, rows: Ints) -> Nodes:
        """Return the nodes of rows, from their leaves read again.

        Raises
        ------
        FormatError
            If a leaf is damaged, or is not the one that it was.
        """
        before = self._out - np.arange(len(self._out))  # samples before each record left out
        records = rows + np.searchsorted(before, rows, "right")
        leaf = np.searchsorted(self._first, records, "right") - 1
        leaves, owner = np.unique(leaf, return_inverse=True)
        numbers = self._leaves[leaves]
        out = np.empty(len(leaves) * self.pages.psize, np.uint8)
        pages, counts = self.pages.load(numbers, P_LEAF, out)
        if (counts != self._first[leaves + 1] - self._first[leaves]).any():
            raise FormatError(
                "the number of records on a leaf page is not what it must be",
                where=self.path,
                fix="the file is damaged, or was changed since it was opened",
            )
        return self.pages.nodes(pages, numbers, owner, records - self._first[leaf])

    def numbered(self, around: Mapping[str, tuple[bytes, bytes]]) -> dict[str, tuple[Ints, Ints]]:
        """Return the rows whose keys are numbers with these bytes around: numbers, rising; rows."""
        parts: dict[str, list[Ints]] = {name: [np.zeros((2, 0), np.int64)] for name in around}
        record = 0
        for _, nodes in self.pages.every_node(self._leaves):
            for name, (before, after) in around.items():
                some = _around(nodes, before, after)
                some = some[~np.isin(record + some, self._out)]
                at, nbytes = nodes.key_at[some] + len(before), len(before) + len(after)
                size = nodes.key_size[some] - nbytes
                values, bad = numbers(nodes.pages.reshape(-1), at, size)
                records = record + some
                rows = records - np.searchsorted(self._out, records)
                parts[name].append(np.stack([values, rows])[:, ~bad])
            record += len(nodes)
        joined = {name: np.concatenate(each, axis=1) for name, each in parts.items()}
        ordered = {name: each[:, each[0].argsort(kind="stable")] for name, each in joined.items()}
        return {name: (each[0], each[1]) for name, each in ordered.items()}

    def key(self, sample: int) -> bytes:
        """Return the key of a sample."""
        return self.nodes(self.rows(sample, sample + 1)).key(0)

    def probe(self, count: int, largest: int) -> list[bytes]:
        """Return up to `count` values of at most `largest` bytes, spread over the samples."""
        spread = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))
        rows = spread if self.order is None else self.order[spread]
        extents = zip(self.offsets.at(rows).tolist(), self.lengths.at(rows).tolist(), strict=True)
        return [self.file.pread(nbytes, at) for at, nbytes in extents if nbytes <= largest]

    # --- the layout ----------------------------------------------------------------------------

    @property
    def blocks(self) -> model.Blocks:
        """The values, by row."""
        return model.Blocks(self.offsets, self.lengths, self.inside)

    def recover(self) -> tuple[tuple[Law, ...], dict[str, Any]]:
        """Return how the database was made, if that shows; see `recover.recover`."""
        n, transaction = len(self), self.pages.meta.transaction
        offsets, lengths = self.offsets.span(0, n), self.lengths.span(0, n)
        return recover(self.pages.psize, offsets, lengths, self.key_sizes, transaction, self.named)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self.file.close()


def _around(nodes: Nodes, before: bytes, after: bytes, exact: bool = False) -> Ints:
    """Return the nodes whose keys begin and end so, and have nothing between if `exact`."""
    flat, nbytes = nodes.pages.reshape(-1), len(before) + len(after)
    some = np.flatnonzero(nodes.key_size == nbytes if exact else nodes.key_size >= nbytes)
    ends = nodes.key_at + nodes.key_size - len(after)
    for begins, text in ((nodes.key_at, before), (ends, after)):
        for k, byte in enumerate(text):
            some = some[flat[begins[some] + k] == byte]
    return some


def named_databases(pages: Pages) -> dict[bytes, Database]:
    """Return the named databases of the file.

    Raises
    ------
    FormatError
        If the main database is damaged.
    """
    databases: dict[bytes, Database] = {}
    main = pages.meta.main
    if main.flags & DUPSORT:
        return databases
    for _, nodes in pages.every_node(pages.leaves(main)):
        for i in np.flatnonzero(nodes.database & ~nodes.big).tolist():
            if nodes.size[i] != DATABASE.size:
                raise FormatError(
                    "the record of a named database is damaged",
                    where=f"{pages.where}, key {nodes.key(i)!r}",
                    expected=f"{DATABASE.size} bytes",
                    found=int(nodes.size[i]),
                )
            databases[nodes.key(i)] = Database.unpack(nodes.value(i))
    return databases


def shown(names: Iterable[bytes]) -> str:
    """Return keys or names of databases for a message."""
    return listed([name.decode("utf-8", "backslashreplace") for name in names])
