"""Writes an LMDB environment in its compact form, in one go and without liblmdb.

The file is, byte for byte, what ``mdb_copy -c`` makes of the same keys and values put in order
with ``MDB_APPEND`` in one transaction, except:

- the map size is that of the file (LMDB copies the one that the environment was opened with); a
  process that wants to add to the file opens it with a larger one, as always;
- unused bytes between a page's pointers and its nodes are zero, where LMDB leaves what was in
  memory;
- the place of a few branch pages when values differ in size (see `tree`).

Every value is stored at ``page * 4096 + 16`` or inside a leaf. The kernel gathers a piece from
headers, leaves and, unless they are small, the values in the batch itself, by a list of addresses.

LMDB decides where values are stored, so groups begin at pages, not at stripes. Where every sample
is a value of its own, a group is all from the header of its first value's pages (or from its first
leaf) to the end of its last value: the tree's pages are between the values. (Where some values are
small enough for leaves and others are not, a leaf follows all large values of its samples, also
those of other groups, so ranges overlap.) Where ragged values are is noted as they are placed; the
finished tree is read for others, and for what an earlier run wrote. The sums of groups are those of
what has just been written, read back piece by piece while the page cache has it; where values are
small, or an earlier run wrote them, the whole group is read for that in the end.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Batch, Bytes, Ints, Schema
from dsprep.core.spans import move_spans, offsets_of, ranges
from dsprep.errors import UnsupportedError
from dsprep.formats.base import State
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.lmdb.locate import written_layout
from dsprep.formats.lmdb.overflow import overflow_spans
from dsprep.formats.lmdb.pages import EMPTY, F_BIGDATA, HEADER, NODE, P_BRANCH, P_LEAF, Meta
from dsprep.formats.lmdb.parse import Records
from dsprep.formats.lmdb.tree import PSIZE, ROOM, Branch, Child, Tree, cut, node_sizes
from dsprep.formats.lmdb.values import MAX_VALUE, Values
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.formats.record_writer import RecordWriter
from dsprep.formats.stored_rows import RowSpans
from dsprep.layout.model import FileLayout
from dsprep.storage.checksums import read_crc32c
from dsprep.storage.durable import sync, sync_directory
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import CALL_NBYTES, pwrite_all, truncate
from dsprep.storage.scatter import drain

NOTED = 1 << 26
"""Ragged samples up to which it is noted where each one is: 16 bytes of memory each."""

_U16 = np.dtype("<u2")


@dataclass
class Piece:
    """Samples on their way into the file.

    `sizes`, `node_sizes` and `runs` are the bytes of each value and of its node, and its overflow
    pages; `parts` is what the values on these are made of. The page numbers in `nodes` are filled
    in by `reserve`, which also gives the piece its first page, the nodes of the leaf that was open
    before it (`carried`), and where all is placed.
    """

    start: int
    stop: int
    arena: Arena
    parts: list[RowSpans]
    sizes: Ints
    node_sizes: Ints
    runs: Ints
    nodes: Bytes
    page: int = 0
    carried: bytes = b""
    carried_sizes: list[int] = field(default_factory=list)
    ends: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    value_pages: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    leaf_pages: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    branches: list[Branch] = field(default_factory=list)


class LmdbWriter(RecordWriter):
    """An LMDB file being written; see the module for its form."""

    def __init__(
        self,
        path: Path,
        inside: str,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        super().__init__(path, inside, grouping, state)
        self._count = grouping.total
        self._schema = schema
        keys = self._keys = plan_keys(options.key_format, self._count)
        self._values = Values(schema)
        possible = [self._values.head, *([MAX_VALUE] if schema.ragged else [])]  # has a small node
        nodes, _ = node_sizes(keys.nbytes, np.array(possible))
        self._nodes_per_leaf = ROOM // (int(nodes.min()) + 2)  # nodes on a leaf
        self._even = not schema.ragged
        self._tree = Tree(keys.nbytes)
        self._first = 0  # first sample of the open leaf
        self._open, self._open_sizes = b"", list[int]()
        self._positions: Ints | None = None  # offset and size of each value
        if state is None and self._count <= NOTED:
            self._positions = np.zeros((2, self._count), np.int64)
        if state is not None:
            self._tree = Tree.from_json(state["tree"])
            self._first = int(state["first"])
            self._open = bytes.fromhex(state["open"])
            self._open_sizes = [int(n) for n in state["open_sizes"]]

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """Build the nodes of the samples, all but the page numbers in them."""
        parts = self._values.encode(batch)
        sizes: Ints = np.sum([part.lengths for part in parts], axis=0, dtype=np.int64)
        n = len(sizes)
        if n and sizes.max() > MAX_VALUE:
            i = int(sizes.argmax())
            raise UnsupportedError(
                "a sample is larger than an LMDB value can be",
                where=f"{self.path}, sample {start + i}",
                expected=f"at most {MAX_VALUE} bytes",
                found=int(sizes[i]),
            )
        widths, runs = node_sizes(self._keys.nbytes, sizes)
        nodes = self._build_nodes(parts, sizes, widths, runs, start, arena)
        return Piece(start, start + n, arena, parts, sizes, widths, runs, nodes)

    def _build_nodes(
        self,
        parts: list[RowSpans],
        sizes: Ints,
        widths: Ints,
        runs: Ints,
        start: int,
        arena: Arena,
    ) -> Bytes:
        """Return the nodes back to back, with zeros for the page numbers."""
        n, key = len(sizes), self._keys.nbytes
        offsets = offsets_of(widths)
        nodes = arena.empty("write.nodes", (int(offsets[-1]),), np.dtype(np.uint8))
        nodes[:] = 0
        at = offsets[:-1]
        words, half = nodes.view(_U16), at >> 1
        words[half] = sizes & 0xFFFF
        words[half + 1] = sizes >> 16
        words[half + 2] = np.where(runs > 0, F_BIGDATA, 0)
        words[half + 3] = key
        keys = self._keys.make(np.arange(start, start + n)).reshape(-1)
        lengths = np.full(n, key, np.int64)
        move_spans(keys, np.arange(n, dtype=np.int64) * key, lengths, nodes, at + NODE)
        inline = runs == 0
        target = at[inline] + NODE + key
        for part in parts:
            length = part.lengths[inline]
            move_spans(part.data, part.starts[inline], length, nodes, target)
            target = target + length
        return nodes

    def reserve(self, piece: Piece) -> None:
        """Cut the samples into leaves, and give pages to all that they complete."""
        tree, last = self._tree, piece.stop == self._count
        n = piece.stop - piece.start
        used = sum(self._open_sizes) + 2 * len(self._open_sizes)
        ends = cut(piece.node_sizes, used)
        if n and (last or (self._even and not piece.stop % self._nodes_per_leaf)):
            ends = np.append(ends, n)
        begun = int(ends[-1]) if len(ends) else -len(self._open_sizes)  # the open leaf's first
        to_come = 0 if last else -(-(n - begun + self._count - piece.stop) // self._nodes_per_leaf)
        firsts = np.empty(len(ends), np.int64)
        firsts[:1] = self._first
        firsts[1:] = piece.start + ends[:-1]
        piece.page, piece.ends = tree.next_page, ends
        piece.carried, piece.carried_sizes = self._open, self._open_sizes
        piece.value_pages, piece.leaf_pages, piece.branches = tree.assign_pages(
            piece.runs, ends, firsts, to_come, last
        )
        self.allocate(tree.next_page * PSIZE)
        offsets = offsets_of(piece.node_sizes)
        self._fill_in_pages(piece, offsets)
        if self._positions is not None:
            big = np.where(piece.runs > 0, piece.value_pages * PSIZE + HEADER, 0)
            self._positions[:, piece.start : piece.stop] = big, piece.sizes
        left = int(ends[-1]) if len(ends) else 0
        tail = piece.nodes[int(offsets[left]) :].tobytes()
        sizes = piece.node_sizes[left:].tolist()
        if len(ends):
            self._first, self._open, self._open_sizes = piece.start + left, tail, sizes
        else:
            self._open, self._open_sizes = self._open + tail, self._open_sizes + sizes

    def _fill_in_pages(self, piece: Piece, offsets: Ints) -> None:
        """Put the page numbers of the values into their nodes."""
        big = piece.runs > 0
        target = offsets[:-1][big] + NODE + self._keys.nbytes
        pages = piece.value_pages[big].astype("<u8").view(np.uint8)
        eight = np.full(len(target), 8, np.int64)
        move_spans(pages, np.arange(len(target), dtype=np.int64) * 8, eight, piece.nodes, target)

    def write(self, piece: Piece) -> None:
        """Write the piece's pages, which are one range of the file, from where their bytes are."""
        leaves = self._build_leaves(piece)
        pages = [self._branch_page(*branch) for branch in piece.branches]
        branches = np.frombuffer(b"".join(pages), np.uint8)
        heads, spans = overflow_spans(piece.parts, piece.sizes, piece.runs, piece.value_pages)
        after = np.array([page for page, _ in piece.branches], np.int64)
        for rows, numbers in ((leaves, piece.leaf_pages), (branches, after)):
            at = rows.ctypes.data + np.arange(len(numbers)) * PSIZE
            spans.append((numbers * PSIZE, at, np.full(len(numbers), PSIZE)))
        offsets, addresses, lengths = (np.concatenate(each) for each in zip(*spans, strict=True))
        order = np.flatnonzero(lengths)
        order = order[np.argsort(offsets[order], kind="stable")]
        if not len(order):
            return
        ends = offsets[order] + lengths[order]
        assert (offsets[order[1:]] == ends[:-1]).all()  # and `heads` is still there
        begin, buffers = piece.page * PSIZE, np.stack([addresses, lengths], axis=1)[order]
        drain(self.fd, begin, buffers, self.path)
        del heads
        self._sum(piece, begin, int(ends[-1]))

    def _sum(self, piece: Piece, begin: int, end: int) -> None:
        """Keep the sums of what belongs to a group of what has just been written, read back."""
        if self.grouping is None or not piece.runs.all():
            return
        group = self.grouping.of(piece.start)
        first = int(piece.value_pages[0]) * PSIZE
        last = int(piece.value_pages[-1]) * PSIZE + HEADER + int(piece.sizes[-1])
        window = piece.arena.empty("write.window", (CALL_NBYTES,), np.dtype(np.uint8))
        edges = sorted({begin, end, *(edge for edge in (first, last) if begin < edge < end)})
        with closing(open_file(self.path)) as file:  # the other one is for writing only
            for a, b in pairwise(edges):
                self.sums.add(group, a, b - a, read_crc32c(file, a, b, window=window))

    def _build_leaves(self, piece: Piece) -> Bytes:
        """Return the leaf pages that the piece completes: uint8, shape ``(k, PSIZE)``."""
        k, carried = len(piece.ends), len(piece.carried_sizes)
        pages = piece.arena.empty("write.leaves", (k, PSIZE), np.dtype(np.uint8))
        pages[:] = 0
        if not k:
            return pages
        n = int(piece.ends[-1])
        ends = piece.ends + carried  # from here on nodes count from the carried ones
        sizes = np.concatenate([piece.carried_sizes, piece.node_sizes[:n]]).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        offsets = offsets_of(sizes)
        leaf = np.repeat(np.arange(k), counts)
        slot = ranges(np.zeros(k), counts)
        begin = offsets[ends - counts]
        upper = PSIZE - (offsets[1:] - begin[leaf])
        words = pages.view(_U16)
        pages[:, :8] = piece.leaf_pages.astype("<u8").view(np.uint8).reshape(k, 8)
        words[:, 5] = P_LEAF
        words[:, 6] = HEADER + 2 * counts
        words[:, 7] = PSIZE - (offsets[ends] - begin)
        words.reshape(-1)[leaf * (PSIZE >> 1) + (HEADER >> 1) + slot] = upper
        at = leaf * PSIZE + upper
        if self._positions is not None:  # those inside leaves are known only now
            known = self._positions[0, piece.start - carried : piece.start + n]
            own = piece.leaf_pages[leaf] * PSIZE + upper + NODE + self._keys.nbytes
            known[:] = np.where(known > 0, known, own)
        flat = pages.reshape(-1)
        old = np.frombuffer(piece.carried, np.uint8)
        move_spans(old, offsets[:carried], sizes[:carried], flat, at[:carried])
        starts = offsets[carried:-1] - offsets[carried]
        move_spans(piece.nodes, starts, sizes[carried:], flat, at[carried:])
        return pages

    def _branch_page(self, number: int, below: list[Child]) -> bytes:
        """Return a branch page; the key of a child is that of the first sample below it."""
        n, key, children = len(below), self._keys.nbytes, np.array(below, np.int64)
        nodes = np.zeros((n, (NODE + key + 1) & ~1), np.uint8)
        nodes[:, :8] = children[:, 0].astype("<u8").view(np.uint8).reshape(n, 8)
        nodes.view(_U16)[:, 3] = key
        nodes[:, NODE : NODE + key] = self._keys.make(children[:, 1]).reshape(n, key)
        nodes[0, 6:] = 0
        page = np.zeros(PSIZE, np.uint8)
        words, upper = page.view(_U16), PSIZE - NODE - (n - 1) * nodes.shape[1]
        page[PSIZE - NODE :] = nodes[0, :NODE]
        page[upper : PSIZE - NODE] = nodes[:0:-1].reshape(-1)
        page[:8] = np.array([number], "<u8").view(np.uint8)
        words[5:8] = P_BRANCH, HEADER + 2 * n, upper
        words[HEADER >> 1 :][:n] = PSIZE - NODE - np.arange(n) * nodes.shape[1]
        return page.tobytes()

    @override
    def layout(self) -> FileLayout | None:
        if self._positions is None:
            return None
        return written_layout(self._schema, self._keys.nbytes, self.inside, self._positions)

    def checkpoint(self) -> State:
        """Return the tree's right edge and the nodes of the open leaf: some kilobytes."""
        return {
            "tree": self._tree.to_json(),
            "first": self._first,
            "open": self._open.hex(),
            "open_sizes": self._open_sizes,
        }

    def finish(self) -> None:
        """Write the metas, which make it an LMDB file."""
        pages = self._tree.next_page
        nbytes = pages * PSIZE
        truncate(self.fd, nbytes)
        main = self._tree.database(self._count)
        empty = Meta(PSIZE, nbytes, EMPTY, 1, 0)
        full = Meta(PSIZE, nbytes, main, pages - 1, 1 if self._count else 0)
        if self.durable:
            sync(self.fd, data=True)  # the pages before the metas that point to them
        pwrite_all(self.fd, [empty.pack(0), full.pack(1)], 0)
        if self.durable:
            sync(self.fd)
            sync_directory(self.path.parent)
        self.close()

    @override
    def group_ranges(self, edges: Ints) -> tuple[Ints, Ints]:
        if self._positions is not None:
            offsets, sizes = self._positions
        else:  # the tree is read again
            with closing(Records(self.path, self.path, OpenOptions())) as records:
                offsets, sizes = (
                    law.span(0, law.count) for law in (records.offsets, records.lengths)
                )
        inside = offsets % PSIZE
        # A value right after a page's header is on overflow pages; leaves have pointers.
        begins = offsets - np.where(inside == HEADER, HEADER, inside)
        ends = offsets + sizes
        if len(edges) == 1:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts = edges[:-1]
        return np.minimum.reduceat(begins, starts), np.maximum.reduceat(ends, starts)
