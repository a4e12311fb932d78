"""The head of an LMDB file: its two meta pages, and the records of its databases.

All integers are unsigned and little-endian, as 64-bit LMDB 0.9 (data version 1) writes them:

- Pages 0 and 1 are metas, the one with the larger transaction number counts. After the page's
  header (see `pages`): magic u32 = 0xBEEFC0DE, version u32 = 1, address u64, map size u64, the
  free and the main database (48 bytes each), last page u64, transaction u64.
- A database: pad u32 (in the free one of a meta: bytes per page), flags u16, depth u16, branch,
  leaf and overflow pages u64 each, entries u64, root page u64 (all ones when empty).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dsprep.core.storage import pread_most
from dsprep.errors import FormatError

MAGIC = 0xBEEFC0DE
VERSION = 1
P_META = 8
DUPSORT = 4
INTEGERKEY = 8
NO_PAGE = (1 << 64) - 1

META = struct.Struct("<QHHI IIQQ")
DATABASE = struct.Struct("<IHHQQQQQ")
TAIL = struct.Struct("<QQ")
META_NBYTES = META.size + 2 * DATABASE.size + TAIL.size


@dataclass(frozen=True)
class Database:
    """One database's record: the shape of its tree.

    Attributes
    ----------
    pad, flags, depth
        As in the file; `depth` counts the levels, leaves included.
    branch_pages, leaf_pages, overflow_pages, entries
        What the tree has.
    root
        The root's page number, `NO_PAGE` when the tree is empty.
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
        return DATABASE.pack(
            self.pad,
            self.flags,
            self.depth,
            self.branch_pages,
            self.leaf_pages,
            self.overflow_pages,
            self.entries,
            self.root,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Database:
        """Return the record in 48 bytes."""
        return cls(*DATABASE.unpack(data))


EMPTY = Database(0, 0, 0, 0, 0, 0, 0, NO_PAGE)


@dataclass(frozen=True)
class Meta:
    """The facts of one meta page.

    Attributes
    ----------
    psize
        Bytes per page.
    map_size
        Bytes that a process maps to open the file.
    main
        The main database.
    last_page
        The highest page number in use.
    transaction
        The number of the transaction that wrote it.
    """

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
    """Whether `head`, the first 32 bytes of a file, has LMDB's magic, of any kind of LMDB."""
    magics = (MAGIC.to_bytes(4, "little"), MAGIC.to_bytes(4, "big"))
    return any(head[at : at + 4] in magics for at in (12, 16, 24))


def read_meta(fd: int, where: object) -> Meta:
    """Return the newest meta of the file.

    Raises
    ------
    FormatError
        If there is none, or the file is of an LMDB that dsprep does not read.
    """
    head = pread_most(fd, META_NBYTES, 0)
    _check_kind(head, where)
    first = _parse_meta(head, where)
    if not is_page_size(first.psize):
        raise FormatError("the page size is damaged", where=where, found=first.psize)
    page = pread_most(fd, META_NBYTES, first.psize)
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
    """Whether a page of LMDB can have so many bytes."""
    return 256 <= nbytes <= 1 << 15 and nbytes & (nbytes - 1) == 0


def _check_kind(head: bytes, where: object) -> None:
    """Raise unless `head` begins a file of 64-bit little-endian LMDB 0.9."""
    little, big = MAGIC.to_bytes(4, "little"), MAGIC.to_bytes(4, "big")
    if head[16:20] == little and len(head) == META_NBYTES:
        version = int.from_bytes(head[20:24], "little")
        if version != VERSION:
            raise FormatError(
                "this LMDB data version is not supported",
                where=where,
                expected=VERSION,
                found=version,
            )
        return
    what = "this is not an LMDB file"
    if head[24:28] == little:
        what = "the file is of LMDB 1.0, whose format is not supported"
    elif head[12:16] in (little, big):
        what = "the file was written by a 32-bit LMDB, whose format is not supported"
    elif head[16:20] == big:
        what = "the file was written on a big-endian machine, which is not supported"
    elif head[16:20] == little:
        what = "the file is truncated within its first page"
    raise FormatError(
        what,
        where=where,
        expected="64-bit little-endian LMDB 0.9",
        fix="copy it with mdb_dump and mdb_load of that LMDB",
    )


def _parse_meta(page: bytes, where: object) -> Meta:
    """Return the facts of a meta page that begins with `page`."""
    flags, map_size = META.unpack_from(page)[2], META.unpack_from(page)[7]
    if not flags & P_META:
        raise FormatError("a meta page is damaged", where=where, found=f"page flags {flags:#x}")
    at = META.size
    free = Database.unpack(page[at : at + DATABASE.size])
    main = Database.unpack(page[at + DATABASE.size : at + 2 * DATABASE.size])
    last_page, transaction = TAIL.unpack_from(page, at + 2 * DATABASE.size)
    return Meta(free.pad, map_size, main, last_page, transaction)
