"""LMDB's allocation of pages: from the free database where it can, else from the end of the file.

Of LMDB 0.9 (``mdb_page_alloc``, ``mdb_page_touch`` and ``mdb_freelist_save`` in ``mdb.c``), for a
writer that only adds records, with no reader open:

- A page that a transaction changes is copied to a new one; the old one is free for the second
  transaction after it. What transaction t freed is record t of the free database.
- A transaction that needs k pages takes k adjacent ones out of the free pages that it has read,
  the lowest first; if there are none it reads the next record of the free database, and when there
  is none that is old enough it takes the pages behind the last page of the file.
- At the end, the free database loses the records that were read, gets one for the pages freed, and
  the pages that were read but not taken go back under the last number read. All this needs pages
  too.

The free database of such a writer is one page. Where it would not be, `Beyond` is raised: this
module knows no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsprep.layout.laws.lmdb import HEADER, NODE

_NEVER = 1 << 62


class Beyond(Exception):
    """The writer does something that is not described here."""


@dataclass
class _Record:
    """A record of the free database: room for `room` pages, of which `pages` are there, falling."""

    key: int
    room: int
    pages: list[int] = field(default_factory=list)


class Allocator:
    """The pages of a new environment, of `psize` bytes.

    `next` is the first page that was never given away, `transaction` the number of the one that is
    open or was the last. No `hopeless` adjacent pages are to be had from the free ones in it.
    """

    def __init__(self, psize: int) -> None:
        self._room = psize - HEADER
        self._node_max = (self._room // 2 & ~1) - 2
        self._full = self._room // 8 - 1
        self.next = 2
        self.transaction = 0
        self.hopeless = _NEVER
        self._records: list[_Record] = []
        self._root = 0  # of the free database; 0: it is empty
        self._root_is_new = False
        self._available: list[int] | None = None  # free pages that were read, falling
        self._read = 0  # the last record read
        self._freed: list[int] = []

    def begin(self) -> None:
        """Begin a transaction."""
        self.transaction += 1
        self.hopeless = _NEVER
        self._root_is_new = False
        self._available, self._read, self._freed = None, 0, []

    def take(self, pages: int) -> int:
        """Return the first of so many adjacent pages."""
        if pages >= self.hopeless:
            return self.extend(pages)
        tries = 60 * pages
        while True:
            available = self._available
            if available is not None and len(available) >= pages:
                for i in range(len(available) - 1, pages - 2, -1):
                    if available[i - pages + 1] == available[i] + pages - 1:
                        first = available[i]
                        del available[i - pages + 1 : i + 1]
                        return first
                tries -= 1
                if tries < 0:  # LMDB looks no further, though there may be more
                    return self.extend(pages)
            record = next((r for r in self._records if r.key > self._read), None)
            if record is None or record.key >= self.transaction - 1:
                self.hopeless = min(self.hopeless, pages) if self._available else 1
                return self.extend(pages)
            self._read = record.key
            self._available = sorted((self._available or []) + record.pages, reverse=True)

    def extend(self, pages: int) -> int:
        """Return the first of so many pages behind the end of the file."""
        first = self.next
        self.next += pages
        return first

    def replace(self, page: int) -> int:
        """Return the page for a copy of `page`, which is freed."""
        new = self.take(1)
        self._freed.append(page)
        return new

    def commit(self) -> None:
        """End the transaction: bring the free database up to date."""
        if self._available is not None:
            self._touch()
        begun, dropped, saved, last, room, total = True, 0, 0, 0, 0, 0
        while True:
            while dropped < self._read:
                dropped = last = self._records[0].key
                total = room = 0
                self._drop_first()
            if saved < len(self._freed):
                if not saved:
                    self._touch()
                while saved < len(self._freed):  # to put it may free more
                    saved = len(self._freed)
                    own = self._put(self.transaction, saved)
                self._freed.sort(reverse=True)
                own.pages = self._freed[:]
                continue
            left = len(self._available or ())
            if total == left:
                break
            if total > left:
                if not begun:
                    break
                begun = False
            total -= room
            room = max(0, left - total)
            if room >= self._full:
                raise Beyond
            self._put(last, room)
            total += room
        self._give_back()

    def _give_back(self) -> None:
        """Put the pages that were read but not taken into the records made for them."""
        available = self._available or []
        left = len(available)
        for record in self._records:
            if not left:
                break
            record.room = min(record.room, left)
            record.pages = available[left - record.room : left]
            left -= record.room

    def _touch(self) -> None:
        """Make the page of the free database one of this transaction."""
        if self._root and not self._root_is_new:
            self._root_is_new = True
            self._root = self.replace(self._root)

    def _drop_first(self) -> None:
        self._touch()
        del self._records[0]
        if not self._records:
            self._freed.append(self._root)
            self._root, self._root_is_new = 0, False

    def _put(self, key: int, room: int) -> _Record:
        """Give record `key` room for so many pages."""
        if self._root:
            self._touch()
        else:
            self._root, self._root_is_new = self.take(1), True
        at = next((i for i, r in enumerate(self._records) if r.key >= key), len(self._records))
        if at < len(self._records) and self._records[at].key == key:
            self._records[at].room = room
        else:
            self._records.insert(at, _Record(key, room))
        used = sum(NODE + 8 + 8 * (r.room + 1) + 2 for r in self._records)
        if used > self._room or NODE + 8 + 8 * (room + 1) > self._node_max:
            raise Beyond
        return self._records[at]
