"""A page-level simulator of an LMDB 0.9 writer that puts rising keys: the laws' oracle.

It keeps every node of every page with its place in bytes, and knows no formula: what a page holds
follows from adding nodes to it. Any page size, sizes of keys and values may differ from record to
record. The free database has to fit one page, else `AssertionError`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEADER, NODE, POINTER = 16, 8, 2


def even(n):
    return n + n % 2


@dataclass
class Node:
    key: int  # bytes of the key; 0 for the first of a branch
    held: int  # bytes of the data in the node
    child: Page | None = None
    size: int = 0  # of the value
    run: int = 0  # its first overflow page, if it has any
    record: int = -1
    at: int = 0

    def nbytes(self):
        return even(NODE + self.key + self.held)


@dataclass(eq=False)
class Page:
    number: int
    written: int  # by which transaction
    upper: int
    nodes: list[Node] = field(default_factory=list)

    def left(self):
        return self.upper - HEADER - POINTER * len(self.nodes)

    def add(self, node):
        assert node.nbytes() + POINTER <= self.left()
        self.upper -= node.nbytes()
        node.at = self.upper
        self.nodes.append(node)


class Simulator:
    def __init__(self, psize, append=True, named=False):
        self.psize, self.append, self.named = psize, append, named
        self.node_max = (psize - HEADER) // 2 // 2 * 2 - 2
        self.end, self.txn = 2, 0
        self.root = None
        self.records = 0
        self.free = {}  # transaction -> [room, pages]
        self.free_page = self.free_written = 0
        self.main = self.main_written = 0
        if named:
            self.begin()
            self.main, self.main_written = self.allocate(), self.txn
            self.commit()

    # pages

    def begin(self):
        self.txn += 1
        self.pool, self.pool_used, self.upto, self.released = set(), False, 0, []

    def allocate(self, count=1):
        patience = 60 * count
        while True:
            if len(self.pool) >= count:
                for first in sorted(self.pool):
                    run = set(range(first, first + count))
                    if run <= self.pool:
                        self.pool -= run
                        return first
                patience -= 1
                if patience < 0:
                    break
            later = [t for t in sorted(self.free) if t > self.upto]
            if not later or later[0] >= self.txn - 1:
                break
            self.upto, self.pool_used = later[0], True
            self.pool |= set(self.free[later[0]][1])
        self.end += count
        return self.end - count

    def touch(self, page):
        if page.written != self.txn:
            new = self.allocate()
            self.released.append(page.number)
            page.number, page.written = new, self.txn

    def touch_main(self):
        if self.main_written != self.txn:
            new = self.allocate()
            self.released.append(self.main)
            self.main, self.main_written = new, self.txn

    def touch_free(self):
        if self.free_page and self.free_written != self.txn:
            new = self.allocate()
            self.released.append(self.free_page)
            self.free_page, self.free_written = new, self.txn

    def reserve(self, txn, room):
        if not self.free_page:
            self.free_page, self.free_written = self.allocate(), self.txn
        self.touch_free()
        self.free.setdefault(txn, [0, []])[0] = room
        assert sum(NODE + 18 + 8 * r for r, _ in self.free.values()) <= self.psize - HEADER
        assert NODE + 16 + 8 * room <= self.node_max

    def commit(self):
        if self.pool_used:
            self.touch_free()
        gone = recorded = total = room = spare = 0
        while True:
            while gone < self.upto:
                gone = min(self.free)
                total = room = 0
                self.touch_free()
                del self.free[gone]
                if not self.free:
                    self.released.append(self.free_page)
                    self.free_page = 0
            if recorded < len(self.released):
                if not recorded:
                    self.touch_free()
                recorded = -1
                while recorded < len(self.released):
                    recorded = len(self.released)
                    self.reserve(self.txn, recorded)
                self.free[self.txn][1] = list(self.released)
                continue
            kept = len(self.pool)
            if total == kept:
                break
            if total > kept:
                spare += 1
                if spare == 2:
                    break
            total -= room
            room = max(0, kept - total)
            self.reserve(gone, room)
            total += room
        rest = sorted(self.pool)
        for txn in sorted(self.free):
            if not rest:
                break
            entry = self.free[txn]
            entry[0] = min(entry[0], len(rest))
            entry[1], rest = rest[: entry[0]], rest[entry[0] :]

    # records

    def right_edge(self):
        path = [self.root]
        while path[-1].nodes[0].child is not None:
            path.append(path[-1].nodes[-1].child)
        return path

    def put(self, key, size):
        big = NODE + key + size > self.node_max
        node = Node(key, 8 if big else size, size=size, record=self.records)
        self.records += 1
        if self.root is None:
            self.root = Page(self.allocate(), self.txn, self.psize)
            path = [self.root]
        else:
            path = self.right_edge()
            if self.named and path[0].written != self.txn:
                self.touch_main()
            for page in path:
                self.touch(page)
        if node.nbytes() + POINTER > path[-1].left():
            self.split(path, node, self.append)
            leaf = self.right_edge()[-1]
        else:
            leaf = path[-1]
            leaf.add(node)
        assert leaf.nodes[-1] is node
        if big:
            node.run = self.allocate((HEADER + size + self.psize - 1) // self.psize)

    def split(self, path, node, append):
        """Put `node` behind all others of the last page of `path`, which is full."""
        page = path.pop()
        right = Page(self.allocate(), self.txn, self.psize)
        if not path:
            self.root = Page(self.allocate(), self.txn, self.psize)
            self.root.add(Node(0, 0, page))
            path.append(self.root)
        move = [] if append else [page.nodes.pop()]
        first = (move or [node])[0]
        if move:
            page.upper += first.nbytes()
        link = Node(first.key, 0, right)
        if path[-1].left() < NODE + link.key + POINTER:
            self.split(path, link, False)
        else:
            path[-1].add(link)
        if first.child is not None:
            first.key = 0
        for one in [*move, node]:
            right.add(one)

    def build(self, keys, sizes, plan):
        at = 0
        for records in plan:
            self.begin()
            for key, size in zip(keys[at : at + records], sizes[at : at + records], strict=True):
                self.put(key, size)
            if self.named:
                self.touch_main()
            self.commit()
            at += records
        return self

    # results

    def offsets(self):
        return [self._place(page.number, node) for page, node in self._walk(self.root)]

    def _place(self, number, node):
        if node.run:
            return node.run * self.psize + HEADER
        return number * self.psize + node.at + NODE + node.key

    def _walk(self, page):
        for node in page.nodes:
            if node.child is None:
                yield page, node
            else:
                yield from self._walk(node.child)

    def compact(self):
        """The offsets in a compact copy."""
        out, self.copied = [], 2
        self._copy(self.root, out)
        return out

    def _copy(self, page, out):
        for node in page.nodes:
            if node.child is not None:
                self._copy(node.child, out)
            elif node.run:
                out.append(self.copied * self.psize + HEADER)
                self.copied += (HEADER + node.size + self.psize - 1) // self.psize
        out += [
            self._place(self.copied, node) for node in page.nodes if not (node.child or node.run)
        ]
        self.copied += 1
