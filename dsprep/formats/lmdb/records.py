"""The records of one database of a file: which of them are samples, and where values are stored.

The tree is read once when the file is opened, and every node is checked; of it stays the number of
each leaf page and of its first record. Where a value is stored is looked up again in the leaf of
its record, by the laws of `Records.blocks`, which `dsprep.reading` reads by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from dsprep.core.schema import Arena, Ints, Schema
from dsprep.core.storage import pread_most
from dsprep.errors import FormatError, SchemaError
from dsprep.formats import decoders
from dsprep.formats.base import OpenOptions
from dsprep.formats.lmdb.index import build, named_databases
from dsprep.formats.lmdb.pages import P_LEAF, Database, Nodes, Pages
from dsprep.formats.lmdb.recover import Found
from dsprep.formats.samples import listed
from dsprep.layout import model
from dsprep.layout.laws import Computed
from dsprep.reading.files import File
from dsprep.reading.layout_reader import LayoutReader

_U8 = np.dtype(np.uint8)


class Records:
    """One database, open for reading; safe to use from several threads.

    Parameters
    ----------
    path, file
        The environment, and its data file.
    options
        Which database, and which of its records are samples in which order.
    survey
        Whether to keep where all values are stored, for `found`.

    Attributes
    ----------
    inside
        The file below `path`: empty if that is the file.
    file, pages, index
        The open file, its pages, and its samples.
    """

    def __init__(self, path: Path, file: Path, options: OpenOptions, survey: bool = False) -> None:
        self.path, self.named = path, options.database is not None
        self.inside = "" if file == path else file.name
        self.file = File(file)
        finder = _Finder() if survey else None
        try:
            self.pages = Pages(self.file.fd, path)
            self.database = self.pages.meta.main
            if options.database is not None:
                self.database = self._named(options.database)
            seen = None if finder is None else finder.add
            self.index = build(self.pages, self.database, options.order, options.skip_keys, seen)
            if self.index.databases and not len(self.index):
                raise SchemaError(
                    "the main database holds only named databases",
                    where=path,
                    expected="one of " + shown(self.index.databases),
                    fix="choose one with --db NAME",
                )
        except BaseException:
            self.file.close()
            raise
        self._found = None if finder is None else finder.found(self)
        self._last = threading.local()

    def _named(self, name: str) -> Database:
        databases = named_databases(self.pages)
        found = databases.get(name.encode("utf-8", "surrogateescape"))
        if found is None:
            raise SchemaError(
                f"there is no database {name}",
                where=self.path,
                expected="one of " + shown(databases) if databases else "no named database",
            )
        return found

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.index)

    # --- looking up ----------------------------------------------------------------------------

    def nodes(self, records: Ints) -> Nodes:
        """Return the nodes of `records`, from their leaves read again.

        They are valid until this thread asks for those of other records.
        """
        last = self._last
        known: Ints | None = getattr(last, "records", None)
        if known is None or not np.array_equal(known, records):
            last.records = None
            last.arena = getattr(last, "arena", None) or Arena()
            last.nodes, last.records = self._load(records, last.arena), records
        nodes: Nodes = last.nodes
        return nodes

    def _load(self, records: Ints, arena: Arena) -> Nodes:
        leaves, rows, slots = self.index.locate(records)
        numbers = self.index.leaves[leaves]
        out = arena.empty("pages", (len(leaves) * self.pages.psize,), _U8)
        pages, counts = self.pages.load(numbers, P_LEAF, out)
        first = self.index.first
        if (counts != first[leaves + 1] - first[leaves]).any():
            raise FormatError(
                "the number of records on a leaf page is not what it must be",
                where=self.path,
                fix="the file is damaged, or was changed since it was opened",
            )
        return self.pages.nodes(pages, numbers, rows, slots)

    def samples(self, start: int, stop: int) -> Nodes:
        """Return the nodes of the samples ``start <= i < stop``; see `nodes`."""
        return self.nodes(self.index.records(np.arange(start, stop, dtype=np.int64)))

    def leaf(self, number: int) -> Nodes:
        """Return all nodes of one leaf; see `nodes`."""
        return self.nodes(np.arange(self.index.first[number], self.index.first[number + 1]))

    def first(self, nbytes: int) -> tuple[bytes, bytes]:
        """Return the key of the first sample and the first bytes of its value."""
        if not len(self):
            return b"", b""
        nodes = self.samples(0, 1)
        size = min(nbytes, int(nodes.size[0]))
        return nodes.key(0), pread_most(self.file.fd, size, int(nodes.offset[0]))

    def probe(self, most: int, largest: int) -> list[bytes]:
        """Return up to `most` values of at most `largest` bytes, spread over the samples."""
        spread = np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64))
        found = []
        for i in spread.tolist():
            nodes = self.samples(i, i + 1)
            size, at = int(nodes.size[0]), int(nodes.offset[0])
            if size <= largest:
                found.append(pread_most(self.file.fd, size, at))
        return found

    # --- for the reader of layouts -------------------------------------------------------------

    def blocks(self) -> model.Blocks:
        """Return the values of all records as blocks, whose laws look into the leaves."""
        n = int(self.index.first[-1])
        return model.Blocks(
            Computed(n, lambda records: self.nodes(records).offset),
            Computed(n, lambda records: self.nodes(records).size),
            self.inside,
        )

    def reader(
        self, layout: model.FileLayout, schema: Schema, label: Callable[[int], str]
    ) -> LayoutReader:
        """Return what reads samples by a layout of this file; `label` names one for messages."""
        return LayoutReader(layout, schema, lambda _: self.file, self.path, decoders, label)

    def check_total(self, nbytes: int) -> None:
        """Raise `FormatError` if values have more bytes than the file, before memory is taken."""
        if nbytes > self.pages.nbytes:
            raise FormatError(
                "values overlap: together they are larger than the file",
                where=self.path,
                expected=f"at most {self.pages.nbytes} bytes",
                found=nbytes,
            )

    def found(self, progress: Callable[[int, int], None] | None = None) -> Found:
        """Return where the values of all samples are stored, in key order.

        The leaf pages are read again, unless that was asked for when the file was opened.

        Raises
        ------
        FormatError
            If a page is damaged, a value reaches beyond the file, or the file has been changed.
        """
        if self._found is not None:
            found, self._found = self._found, None
            return found
        index, finder = self.index, _Finder()
        expected = np.diff(index.first)
        page = record = 0
        for counts, nodes in self.pages.every_node(index.leaves):
            if not np.array_equal(counts, expected[page : page + len(counts)]):
                raise FormatError(
                    "a leaf page has another number of records than before",
                    where=self.path,
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
        return finder.found(self)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self.file.close()


class _Finder:
    """Collects where values are stored, while leaf pages are read."""

    def __init__(self) -> None:
        self._offsets = [np.zeros(0, np.int64)]
        self._lengths = [np.zeros(0, np.int64)]
        self._key_sizes = 1 << 16, 0

    def add(self, nodes: Nodes, samples: np.ndarray) -> None:
        """Take records, of which those in the mask `samples` are samples."""
        self._offsets.append(nodes.offset[samples])
        self._lengths.append(nodes.size[samples])
        sizes, (low, high) = nodes.key_size[samples], self._key_sizes
        self._key_sizes = int(sizes.min(initial=low)), int(sizes.max(initial=high))

    def found(self, records: Records) -> Found:
        """Return all that was collected."""
        return Found(
            psize=records.pages.psize,
            offsets=np.concatenate(self._offsets),
            sizes=np.concatenate(self._lengths),
            key_sizes=self._key_sizes,
            transaction=records.pages.meta.transaction,
            depth=records.database.depth,
            named=records.named,
        )


def shown(names: Iterable[bytes]) -> str:
    """Return keys or names of databases for a message."""
    return listed([name.decode("utf-8", "backslashreplace") for name in names])
