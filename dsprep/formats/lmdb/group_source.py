"""Reads samples out of values that hold a group each; `group_values` tells how.

Every head is read and compared when the file is opened. A read fetches just the rows that are
asked for, straight from the file. The memory is some 40 bytes per group.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsprep.core.pread import packed, read_spans
from dsprep.core.schema import Arena, Array, Batch, Bytes, Field, Ints, Ragged, Schema, new_array
from dsprep.core.storage import pread_most
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Layout, OpenOptions, Source, retype, wanted
from dsprep.formats.lmdb.group_values import HEAD, MAGIC, Packing, is_group
from dsprep.formats.lmdb.snippet import group_loading_code
from dsprep.formats.lmdb.source import LmdbSource
from dsprep.formats.lmdb.values import MAX_VALUE
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Column, FileLayout, Grid

VARIES = "it lies inside its group's value, at a place that only the value tells"
_U8 = np.dtype(np.uint8)


def grouped(
    source: LmdbSource, options: OpenOptions, hint: Schema | None
) -> LmdbGroupSource | None:
    """Return the samples in the groups that `source` has as values; None if it has none.

    They need `hint`, the fields. `source` then belongs to what is returned.
    """
    typed = any(s.dtype is not None for s in options.fields)
    if hint is None or typed or options.values != "opaque":
        return None
    key, head = source.first(HEAD.size)
    if not is_group(head) or HEAD.unpack(head)[4] != Packing(hint).digest:
        return None
    try:
        if options.keys_as is not None:
            raise UsageError("there are no keys of samples: each value is a group of them")
        return LmdbGroupSource(source, options, hint, key)
    except BaseException:
        source.close()
        raise


class LmdbGroupSource(Source):
    """The samples of a database of groups.

    Parameters
    ----------
    source
        The groups, as records.
    options, hint
        As for `Format.open`.
    key
        That of the first group.
    """

    def __init__(self, source: LmdbSource, options: OpenOptions, hint: Schema, key: bytes) -> None:
        self.path, self._groups, self._key = source.path, source, key
        self._database = options.database
        self._packing = Packing(hint)
        available = {f.name: f for f in hint}
        self._fields = wanted(options.fields, available)
        self.schema = Schema(tuple(f for _, f in self._fields), hint.attrs)
        self.version, self.notes = f"{source.version}, one value per group", ()
        found = source.places()
        self._file, self._fd = source.file, found.pages.fd
        self._offsets, self._lengths = found.offsets, found.lengths
        self._counts, self._capacities = self._heads()
        self._edges = packed(self._counts)

    def _heads(self) -> tuple[Ints, Ints]:
        """Return the samples of each group and its capacity, checked."""
        n, size = len(self._offsets), HEAD.size
        if bool((self._lengths < size).any()):
            self._refuse(int((self._lengths < size).argmax()), "is too short for a group")
        heads = b"".join(pread_most(self._fd, size, at) for at in self._offsets.tolist())
        if len(heads) != n * size:
            raise FormatError("the file has become shorter", where=self.path)
        dtype = np.dtype("S8,<u8,<u8,<u8,V16")
        rows = np.frombuffer(heads, dtype)
        raw = np.frombuffer(heads, np.uint8).reshape(n, size)
        counts, capacities, firsts = (rows[f"f{k}"].copy() for k in (1, 2, 3))
        good = (raw[:, :8] == np.frombuffer(MAGIC, np.uint8)).all(axis=1)
        good &= (raw[:, 32:] == np.frombuffer(self._packing.digest, np.uint8)).all(axis=1)
        good &= (counts > 0) & (counts <= capacities) & (capacities <= MAX_VALUE)
        if not good.all():
            self._refuse(int((~good).argmax()), "does not begin like the others")
        edges = packed(counts.astype(np.int64))
        bodies = self._bodies(capacities.astype(np.int64))
        fits = bodies <= self._lengths if self._packing.ragged else bodies == self._lengths
        fits &= firsts == edges[:-1].astype(np.uint64)
        if not fits.all():
            self._refuse(int((~fits).argmax()), "does not hold the samples that its head tells")
        return counts.astype(np.int64), capacities.astype(np.int64)

    def _bodies(self, capacities: Ints) -> Ints:
        """Return the bytes before the ragged values, at most those that no value can have."""
        each = self._packing.body(1) - HEAD.size
        most = MAX_VALUE // max(1, each) + 1
        bodies: Ints = HEAD.size + np.minimum(capacities, most) * each
        return bodies

    def _refuse(self, group: int, what: str) -> None:
        raise FormatError(
            f"the value {what}",
            where=f"{self.path}, group {group}, offset {self._offsets[group]}",
            fix="the file is damaged",
        )

    def __len__(self) -> int:
        return int(self._edges[-1])

    def close(self) -> None:
        """Close the file."""
        self._groups.close()

    # --- reading -----------------------------------------------------------------------------

    def _touched(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return ``(group, a, b)``: rows ``a .. b`` of each group that has some of the samples."""
        low, high = np.searchsorted(self._edges, [start, stop - 1], "right") - 1
        edges = self._edges
        return [
            (g, max(0, start - int(edges[g])), min(stop, int(edges[g + 1])) - int(edges[g]))
            for g in range(int(low), int(high) + 1)
        ]

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        touched = self._touched(start, stop) if start < stop else []
        tables = [self._tables(g, b) for g, _, b in touched] if self._packing.ragged else []
        ragged = [f.name for f in self._packing.ragged]
        batch: Batch = {}
        for name, field in self._fields:
            f = self._packing.schema[name]
            if not f.ragged:
                batch[field.name] = self._fixed(f, touched, stop - start, arena)
                continue
            k = ragged.index(name)
            spans, lengths = [], [np.zeros(0, np.int64)]
            for (g, a, b), (table, begins) in zip(touched, tables, strict=True):
                at = int(self._offsets[g]) + int(begins[k]) + int(table[k, :a].sum())
                lengths.append(table[k, a:b])
                spans.append((at, int(table[k, a:b].sum())))
            flat = self._spans(spans, name, arena)
            rows = flat.view(f.dtype).reshape(-1, *f.inner)
            sizes = np.concatenate(lengths) // f.row_nbytes
            column = Ragged.from_lengths(rows, sizes, f.kind)
            batch[field.name] = retype(column, field, self.path, start)
        return batch

    def _fixed(
        self, f: Field, touched: list[tuple[int, int, int]], count: int, arena: Arena | None
    ) -> Array:
        """Return a fixed field of `count` samples."""
        shape = (count, *f.inner)
        if not f.row_nbytes or not count:
            return np.empty(shape, f.dtype)
        spans = []
        for g, a, b in touched:
            at = int(self._offsets[g]) + self._packing.places(int(self._capacities[g]))[f.name]
            spans.append((at + a * f.row_nbytes, (b - a) * f.row_nbytes))
        return self._spans(spans, f.name, arena).view(f.dtype).reshape(shape)

    def _spans(self, spans: list[tuple[int, int]], name: str, arena: Arena | None) -> Bytes:
        """Return the bytes of ``(offset, length)`` of the file, one after another."""
        table = np.array(spans, np.int64).reshape(-1, 2)
        offsets, lengths = table[:, 0].copy(), table[:, 1].copy()
        places = packed(lengths)
        out = new_array(arena, f"read.{name}", (int(places[-1]),), _U8)
        kept = lengths > 0
        read_spans(self._fd, offsets[kept], lengths[kept], out, places[:-1][kept], self.path)
        return out

    def _tables(self, group: int, stop: int) -> tuple[Ints, Ints]:
        """Return the ragged bytes of the first samples of a group, and where each field begins.

        Returns
        -------
        int64, shape ``(ragged fields, stop)``, and int64, shape ``(ragged fields,)``, from the
        beginning of the value.
        """
        ragged, capacity = self._packing.ragged, int(self._capacities[group])
        at = int(self._offsets[group]) + self._packing.places(capacity)[ragged[0].name]
        table = self._spans([(at, 8 * capacity * len(ragged))], "lengths", None).view("<u8")
        table = table.reshape(len(ragged), capacity)
        body, length = self._packing.body(capacity), int(self._lengths[group])
        if bool((table > length).any()):
            self._refuse(group, "has lengths that lead out of it")
        sizes: Ints = table.astype(np.int64)
        totals = sizes.sum(axis=1)
        widths = np.array([f.row_nbytes for f in ragged])
        if body + int(totals.sum()) != length or bool((sizes % widths[:, None]).any()):
            self._refuse(group, "has lengths that do not add up to it")
        return sizes[:, :stop], body + packed(totals)[:-1]

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the payload bytes of each sample, from the tables of lengths."""
        chosen = {name for name, _ in self._fields}
        fixed = sum(f.row_nbytes for f in self._packing.fixed if f.name in chosen)
        out: Ints = np.full(stop - start, fixed, np.int64)
        rows = [k for k, f in enumerate(self._packing.ragged) if f.name in chosen]
        if rows and start < stop:
            for g, a, b in self._touched(start, stop):
                at = int(self._edges[g]) - start
                out[at + a : at + b] += self._tables(g, b)[0][rows, a:].sum(axis=0)
        return out

    # --- describing --------------------------------------------------------------------------

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every sample lies: fixed fields of even groups are arrays in chunks."""
        capacities, counts = self._capacities, self._counts
        n = len(capacities)
        even = bool((capacities == capacities[:1]).all()) and bool(
            (counts[:-1] == capacities[:-1]).all()
        )
        columns, unlocated = {}, {}
        for name, field in self._fields:
            f = self._packing.schema[name]
            if f.ragged or not even or not n:
                unlocated[field.name] = VARIES
            elif not f.row_nbytes:
                columns[field.name] = Column(None)
            else:
                capacity = int(capacities[0])
                at = self._packing.places(capacity)[name]
                blocks = Blocks(
                    Explicit(self._offsets + at),
                    Affine(n, capacity * f.row_nbytes),
                    self._groups.inside,
                )
                shape, chunk = (len(self), *f.inner), (capacity, *f.inner)
                columns[field.name] = Column(Grid(blocks, shape, f.dtype.itemsize, chunk))
        return FileLayout(len(self), columns=columns, unlocated=unlocated)

    def layouts(self) -> dict[str, Layout]:
        """Return how each field lies: all of a group's samples together."""
        most = int(self._counts.max(initial=0))
        access = "one contiguous read per field, also for all samples of a group"
        storage = f"values of up to {most} samples, field by field"
        return {
            f.name: Layout(
                storage=storage,
                access=access,
                reads=None if f.ragged else 1,
                read_nbytes=None if f.ragged else f.row_nbytes,
            )
            for _, f in self._fields
        }

    def loading_code(self) -> str:
        """Return a py-lmdb program that loads sample 0; see `Source.loading_code`."""
        capacity = int(self._capacities[0])
        file = Path(self._file)
        return group_loading_code(file, self._database, self._packing, capacity, self._key)
