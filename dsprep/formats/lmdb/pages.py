"""The pages of an LMDB file: the newest tree, its leaves, and the offset of every key and value.

Reads with ``pread`` only. A file that is damaged or made to harm gives `FormatError`: every page
number, pointer and size is compared with the file before it is used, and no page is visited twice.

The format, LMDB 0.9 (data version 1) on a 64-bit little-endian machine, all integers unsigned and
little-endian, sizes in bytes, from ``mdb.c``:

- The file is pages of ``psize`` bytes, numbered from 0. A page begins with 16 bytes: its number
  u64, a pad u16, flags u16 (1 branch, 2 leaf, 4 overflow, 8 meta), then lower u16 and upper u16:
  free space is ``lower .. upper``. The first page of a run of overflow pages has the number of
  pages u32 instead; the others of the run have no header.
- Pages 0 and 1 are metas, the one with the larger transaction number counts. After the page's
  header: magic u32 = 0xBEEFC0DE, version u32 = 1, address u64, map size u64, the
  free and the main database (48 bytes each), last page u64, transaction u64.
- A database: pad u32 (in the free one of a meta: bytes per page), flags u16, depth u16, branch,
  leaf and overflow pages u64 each, entries u64, root page u64 (all ones when empty).
- Branch and leaf pages have ``(lower - 16) / 2`` nodes, in key order, each found by a u16 pointer
  from the start of the page, at offset 16 and after; nodes grow down from the page's end and begin
  at even places.
- A node of a leaf: value size u32, flags u16 (1 the value is on overflow pages, 2 it is a named
  database, 4 duplicates), key size u16, key, value. For a value on overflow pages the node has the
  number of the first page u64 in its place, and the value begins 16 bytes into that page.
- A node of a branch: the number of the child page, u48, key size u16, key. The key of the first
  node is not used and empty.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array, Bytes, Ints
from dsprep.core.spans import ranges
from dsprep.errors import FormatError
from dsprep.storage.base import Handle

MAGIC = 0xBEEFC0DE
VERSION = 1
P_META = 8
DUPSORT = 4
INTEGERKEY = 8
ENVIRONMENT = 0x4001  # flags that LMDB keeps with those of the free database
NO_PAGE = (1 << 64) - 1

META = struct.Struct("<QHHI IIQQ")
DATABASE = struct.Struct("<IHHQQQQQ")
TAIL = struct.Struct("<QQ")
META_NBYTES = META.size + 2 * DATABASE.size + TAIL.size
HEADER = 16
"""Bytes of a page's header."""
NODE = 8
"""Bytes of a node before its key."""
P_BRANCH, P_LEAF, P_OVERFLOW, P_LEAF2, P_SUBP = 1, 2, 4, 0x20, 0x40
F_BIGDATA, F_SUBDATA, F_DUPDATA = 1, 2, 4
MAX_DEPTH = 32
"""LMDB's own limit on the levels of a tree."""
PAGES_AT_ONCE = 1024


# --- the metas ---


@dataclass(frozen=True)
class Database:
    """One database's record: the shape of its tree, as in the file.

    `depth` counts the levels, leaves included; `root` is a page, `NO_PAGE` when the tree is empty.
    """

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    def pack(self) -> bytes:
        """Return the 48 bytes of the record; `unpack` is the inverse."""
        return DATABASE.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Database:
        """Return the record in 48 bytes."""
        return cls(*DATABASE.unpack(data))


EMPTY = Database(0, 0, 0, 0, 0, 0, 0, NO_PAGE)


@dataclass(frozen=True)
class Meta:
    """The facts of one meta page: of them ``last_page`` is the highest page number in use."""

    psize: int
    map_size: int
    main: Database
    last_page: int
    transaction: int

    def pack(self, page: int) -> bytes:
        """Return meta page number `page`, of ``psize`` bytes; `read_meta` is the inverse."""
        free = Database(self.psize, INTEGERKEY, 0, 0, 0, 0, 0, NO_PAGE)
        head = META.pack(page, 0, P_META, 0, MAGIC, VERSION, 0, self.map_size)
        tail = TAIL.pack(self.last_page, self.transaction)
        return (head + free.pack() + self.main.pack() + tail).ljust(self.psize, b"\0")


def looks_like(head: bytes) -> bool:
    """Return whether `head`, the first 32 bytes of a file, has the magic of any kind of LMDB."""
    magics = (MAGIC.to_bytes(4, "little"), MAGIC.to_bytes(4, "big"))
    return any(head[at : at + 4] in magics for at in (12, 16, 24))


def read_meta(file: Handle) -> Meta:
    """Return the newest meta of the file; `FormatError` if there is none that dsprep reads."""
    where = file.name
    head = file.pread(META_NBYTES, 0)
    _check_kind(head, where)
    first = _parse_meta(head, where)
    if not is_page_size(first.psize):
        raise FormatError("the page size is damaged", where=where, found=first.psize)
    page = file.pread(META_NBYTES, first.psize)
    second = None
    if len(page) == META_NBYTES and page[16:20] == head[16:20] and page[20:24] == head[20:24]:
        second = _parse_meta(page, where)
    if second is None or second.psize != first.psize:
        raise FormatError(
            "the second meta page is damaged",
            where=f"{where}, offset {first.psize}",
            fix="the file is truncated or still being written",
        )
    return max(first, second, key=lambda meta: meta.transaction)


def is_page_size(nbytes: int) -> bool:
    """Return whether a page of LMDB can have so many bytes."""
    return 256 <= nbytes <= 1 << 15 and nbytes & (nbytes - 1) == 0


def _check_kind(head: bytes, where: object) -> None:
    """Raise unless `head` begins a file of 64-bit little-endian LMDB 0.9."""
    if len(head) < META_NBYTES or head[16:24] != struct.pack("<II", MAGIC, VERSION):
        raise FormatError(
            "this is not a whole file of 64-bit little-endian LMDB 0.9",
            where=where,
            expected=f"{META_NBYTES} bytes or more, and data version {VERSION} at offset 20",
            found=f"{len(head)} bytes, version {int.from_bytes(head[20:24], 'little')}",
            fix="if another LMDB wrote it, copy it with that one's mdb_dump and mdb_load",
        )


def _parse_meta(page: bytes, where: object) -> Meta:
    """Return the facts of a meta page that begins with `page`."""
    flags, map_size = META.unpack_from(page)[2], META.unpack_from(page)[7]
    at = META.size
    free = Database.unpack(page[at : at + DATABASE.size])
    if not flags & P_META or free.flags & ~ENVIRONMENT != INTEGERKEY:
        flags_text = f"flags {flags:#x} and {free.flags:#x}"
        raise FormatError("a meta page is damaged", where=where, found=flags_text)
    main = Database.unpack(page[at + DATABASE.size : at + 2 * DATABASE.size])
    last_page, transaction = TAIL.unpack_from(page, at + 2 * DATABASE.size)
    return Meta(free.pad, map_size, main, last_page, transaction)


# --- the tree ---


@dataclass(frozen=True)
class Nodes:
    """Some nodes of leaf pages, in arrays of shape ``(n,)``.

    `pages` are those that they are on: uint8, shape ``(p, psize)``. `key_at` and `inline_at` are
    where the key begins in the flattened pages, and a value that is not on overflow pages; `offset`
    is where the value begins in the file, `big` whether it is on overflow pages, and `database`
    whether it is the record of a named database.
    """

    pages: Bytes
    key_at: Ints
    key_size: Ints
    inline_at: Ints
    offset: Ints
    size: Ints
    big: NDArray[np.bool_]
    database: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.size)

    def key(self, i: int) -> bytes:
        """Return the key of node i."""
        at = int(self.key_at[i])
        return self.pages.reshape(-1)[at : at + int(self.key_size[i])].tobytes()

    def value(self, i: int) -> bytes:
        """Return the value of node i, which must be inline."""
        at = int(self.inline_at[i])
        return self.pages.reshape(-1)[at : at + int(self.size[i])].tobytes()


class Pages:
    """The pages of an open file, read and checked; the file stays the caller's."""

    def __init__(self, file: Handle) -> None:
        self.file = file
        self.where = file.name
        self.meta = read_meta(file)
        self.psize = self.meta.psize
        self.nbytes = file.nbytes
        self.count = min(self.meta.last_page + 1, self.nbytes // self.psize)

    def load(self, numbers: Ints, flag: int, out: Bytes) -> tuple[Bytes, Ints]:
        """Return pages as ``(pages, counts)``: uint8 ``(p, psize)``, and the nodes on each.

        They are read into `out`. Raises `FormatError` if a number is beyond the file, or a page is
        not what `flag` says it must be: `P_BRANCH` or `P_LEAF`.
        """
        self._check(numbers, (numbers < 2) | (numbers >= self.count), "a page number is damaged")
        n = len(numbers)
        targets = np.arange(n, dtype=np.int64) * self.psize
        sizes = np.full(n, self.psize, np.int64)
        self.file.read_spans(numbers * self.psize, sizes, out, targets)
        pages = out.reshape(n, self.psize)
        words = pages.view("<u2")
        own = pages[:, :8].copy().view("<u8")[:, 0]
        kinds = P_BRANCH | P_LEAF | P_OVERFLOW | P_META | P_LEAF2 | P_SUBP
        bad = (own != numbers.astype(np.uint64)) | ((words[:, 5] & kinds) != flag)
        self._check(numbers, bad, "a branch or leaf page was expected here")
        lower = words[:, 6].astype(np.int64)
        bad = (lower < HEADER + 2) | (lower % 2 == 1) | (lower > self.psize)
        self._check(numbers, bad, "a page's header is damaged")
        return pages, (lower - HEADER) >> 1

    def leaves(self, database: Database) -> Ints:
        """Return the page numbers of the leaves of `database`, in key order.

        Raises
        ------
        FormatError
            If its tree is damaged.
        """
        if database.flags & DUPSORT:
            raise FormatError(
                "the database keeps several values per key (DUPSORT), which is not supported",
                where=self.where,
            )
        if database.root == NO_PAGE:
            return np.zeros(0, np.int64)
        if not 1 <= database.depth <= MAX_DEPTH or database.root >= self.count:
            raise FormatError(
                "the root of the tree is damaged",
                where=self.where,
                expected=f"a page below {self.count}",
                found=f"page {database.root}, depth {database.depth}",
                fix="the file is truncated or still being written",
            )
        level = np.array([database.root], np.int64)
        for _ in range(database.depth - 1):
            parts: list[Ints] = []
            total = 0
            for start in range(0, len(level), PAGES_AT_ONCE):
                parts.append(self._children(level[start : start + PAGES_AT_ONCE]))
                total += len(parts[-1])
                if total > self.count:
                    raise FormatError(
                        "the tree has more pages than the file: it runs in circles",
                        where=self.where,
                        expected=f"at most {self.count} pages",
                    )
            level = np.concatenate(parts)
        if len(np.unique(level)) < len(level):
            raise FormatError("a leaf page belongs to the tree twice", where=self.where)
        return level

    def _children(self, numbers: Ints) -> Ints:
        """Return the page numbers below the branch pages `numbers`, in key order."""
        out = np.empty(len(numbers) * self.psize, np.uint8)
        pages, counts = self.load(numbers, P_BRANCH, out)
        rows = np.repeat(np.arange(len(numbers)), counts)
        pointers = self._pointers(pages, numbers, rows, ranges(np.zeros(len(counts)), counts))
        words = out.view("<u2")
        at = (rows * self.psize + pointers) >> 1
        low, middle, high = (words[at + k].astype(np.int64) for k in range(3))
        children: Ints = low | middle << 16 | high << 32
        return children

    def _pointers(self, pages: Bytes, numbers: Ints, rows: Ints, slots: Ints) -> Ints:
        """Return where node ``slots[i]`` of page ``rows[i]`` begins within its page."""
        words = pages.reshape(-1).view("<u2")
        half = self.psize >> 1
        pointers: Ints = words[rows * half + (HEADER >> 1) + slots].astype(np.int64)
        lower = pages.view("<u2")[:, 6].astype(np.int64)[rows]
        bad = (pointers < lower) | (pointers > self.psize - NODE) | (pointers & 1 == 1)
        self._check(numbers[rows], bad, "a node's pointer is damaged")
        return pointers

    def nodes(self, pages: Bytes, numbers: Ints, rows: Ints, slots: Ints) -> Nodes:
        """Return the nodes ``slots[i]`` of the leaf pages ``rows[i]`` that `load` returned.

        Raises `FormatError` if a node reaches beyond its page, or its value beyond the file.
        """
        at = rows * self.psize + self._pointers(pages, numbers, rows, slots)
        flat = pages.reshape(-1)
        words, half = flat.view("<u2"), at >> 1
        size = words[half].astype(np.int64) | words[half + 1].astype(np.int64) << 16
        flags, key_size = words[half + 2], words[half + 3].astype(np.int64)
        owners = numbers[rows]
        duplicates = (flags & F_DUPDATA) != 0
        self._check(owners, duplicates, "several values per key (DUPSORT) are not supported")
        big = (flags & F_BIGDATA) != 0
        inline_at = at + NODE + key_size
        room = (rows + 1) * self.psize - inline_at
        self._check(owners, room < np.where(big, 8, size), "a node reaches beyond its page")
        offset = inline_at + (owners - rows) * self.psize
        if big.any():
            first = flat[inline_at[big][:, None] + np.arange(8)].view("<u8")[:, 0]
            last = (self.nbytes - HEADER - size[big]) // self.psize  # at which it still fits
            wrong = (first < 2) | (first >= self.count) | (first.view(np.int64) > last)
            self._check(owners[big], wrong, "a value reaches beyond the end of the file")
            offset[big] = first.view(np.int64) * self.psize + HEADER
        database = (flags & F_SUBDATA) != 0
        return Nodes(pages, at + NODE, key_size, inline_at, offset, size, big, database)

    def every_node(self, leaves: Ints) -> Iterator[tuple[Ints, Nodes]]:
        """Yield ``(counts, nodes)``: the nodes per page and all nodes, some leaves at a time."""
        for start in range(0, len(leaves), PAGES_AT_ONCE):
            numbers = leaves[start : start + PAGES_AT_ONCE]
            pages, counts = self.load(
                numbers, P_LEAF, np.empty(len(numbers) * self.psize, np.uint8)
            )
            rows = np.repeat(np.arange(len(numbers)), counts)
            yield counts, self.nodes(pages, numbers, rows, ranges(np.zeros(len(counts)), counts))

    def _check(self, numbers: Array, bad: Array, problem: str) -> None:
        """Raise `FormatError` for the first page whose `bad` is set."""
        if bad.any():
            number = int(numbers[int(bad.argmax())])
            raise FormatError(
                problem,
                where=f"{self.where}, page {number}, offset {number * self.psize}",
                fix="the file is damaged, truncated or still being written",
            )
