"""Reads samples out of values that hold a group each; see `values`.

Every head is read and compared when the file is opened. A read fetches only the rows that are
asked for, straight from the file. The memory is some 40 bytes per group, and the tables of lengths
of the groups read last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Ints, Schema
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError, UsageError
from dsprep.formats.fields import wanted
from dsprep.formats.lmdb.records import Records
from dsprep.formats.lmdb.snippet import group_loading_code
from dsprep.formats.lmdb.source import RecordsSource
from dsprep.formats.lmdb.values import HEAD, MAGIC, MAX_VALUE, Packing, is_group
from dsprep.formats.options import OpenOptions
from dsprep.layout import model
from dsprep.layout.describe import FieldStorage
from dsprep.layout.laws import Affine, Computed, Explicit
from dsprep.layout.model import Blocks, Column, FileLayout, Grid, Part
from dsprep.storage.ranges import pread_exact, pread_most

VARIES = "it is inside its group's value, at an offset that only the value states"


def grouped(records: Records, options: OpenOptions, hint: Schema | None) -> LmdbGroupSource | None:
    """Return the samples in the groups that are the values of a file; None if they are not.

    They need `hint`, the fields. `records` then belongs to what is returned.
    """
    typed = any(s.dtype is not None for s in options.fields)
    if hint is None or typed or options.values != "opaque":
        return None
    head = records.head(0, HEAD.size) if len(records) else b""
    if not is_group(head) or HEAD.unpack(head)[4] != Packing(hint).digest:
        return None
    if options.keys_as is not None:
        raise UsageError("there are no keys of samples: each value is a group of them")
    return LmdbGroupSource(records, options, hint)


class LmdbGroupSource(RecordsSource):
    """The samples of a database of groups, whose file then belongs to this source."""

    def __init__(self, records: Records, options: OpenOptions, hint: Schema) -> None:
        super().__init__(records)
        self._database = options.database
        self._packing = Packing(hint)
        available = {f.name: f for f in hint}
        self._fields = wanted(options.fields, available)
        self.schema = Schema(tuple(f for _, f in self._fields), hint.attrs)
        self.version = f"LMDB 0.9, data version 1, pages of {records.pages.psize} bytes"
        self.version += ", one value per group"
        found = records.found()
        self._offsets, self._lengths = found.offsets, found.sizes
        self._counts, self._capacities = self._heads()
        self._edges = offsets_of(self._counts)
        self._tables = lru_cache(maxsize=8)(self._read_tables)
        for name, field in self._fields:
            stored = model.Records(self._blocks(name), {field.name: Part(0)})
            self.add_reader(FileLayout(len(self), stored), Schema((field,)))

    def _heads(self) -> tuple[Ints, Ints]:
        """Return the samples of each group and its capacity, checked."""
        n, size = len(self._offsets), HEAD.size
        if bool((self._lengths < size).any()):
            self._refuse(int((self._lengths < size).argmax()), "is too short for a group")
        heads = b"".join(
            pread_most(self.records.file.fd, size, at) for at in self._offsets.tolist()
        )
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
        edges = offsets_of(counts.astype(np.int64))
        bodies = self._bodies(capacities.astype(np.int64))
        fits = bodies <= self._lengths if self._packing.ragged else bodies == self._lengths
        fits &= firsts == edges[:-1].astype(np.uint64)
        if not fits.all():
            self._refuse(int((~fits).argmax()), "does not hold the samples that its head states")
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

    # --- reading -----------------------------------------------------------------------------

    def _blocks(self, name: str) -> model.Blocks:
        """Return where a field of each sample is stored; for a ragged one, heads are looked up."""
        n, f = len(self), self._packing.schema[name]
        if f.ragged:
            k = [g.name for g in self._packing.ragged].index(name)
            return model.Blocks(
                Computed(n, lambda samples: self._ragged(k, samples)[0]),
                Computed(n, lambda samples: self._ragged(k, samples)[1]),
                self.records.inside,
            )
        places = [self._packing.places(c)[name] for c in self._capacities.tolist()]
        begins = self._offsets + np.array(places, np.int64)

        def offsets(samples: Ints) -> Ints:
            group = self._group_of(samples)
            found: Ints = begins[group] + (samples - self._edges[group]) * f.row_nbytes
            return found

        return model.Blocks(Computed(n, offsets), Affine(n, f.row_nbytes), self.records.inside)

    def _group_of(self, samples: Ints) -> Ints:
        return np.searchsorted(self._edges, samples, "right") - 1

    def _ragged(self, k: int, samples: Ints) -> tuple[Ints, Ints]:
        """Return where ragged field number k of each sample is stored, and its bytes."""
        groups = self._group_of(samples)
        offsets, lengths = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        for g in np.unique(groups).tolist():
            places, sizes = self._tables(g)
            mine = groups == g
            rows = samples[mine] - self._edges[g]
            offsets[mine], lengths[mine] = places[k, rows], sizes[k, rows]
        return offsets, lengths

    def _read_tables(self, group: int) -> tuple[Ints, Ints]:
        """Return where each ragged field of each sample of a group is stored, and its bytes.

        Both are int64, of shape ``(ragged fields, capacity)``.
        """
        ragged, capacity = self._packing.ragged, int(self._capacities[group])
        start, length = int(self._offsets[group]), int(self._lengths[group])
        at = start + self._packing.places(capacity)[ragged[0].name]
        data = pread_exact(self.records.file.fd, 8 * capacity * len(ragged), at, self.path)
        table = np.frombuffer(data, "<u8").reshape(len(ragged), capacity)
        body = self._packing.body(capacity)
        if bool((table > length).any()):
            self._refuse(group, "has lengths that lead out of it")
        sizes: Ints = table.astype(np.int64)
        widths = np.array([f.row_nbytes for f in ragged])
        if body + int(sizes.sum()) != length or bool((sizes % widths[:, None]).any()):
            self._refuse(group, "has lengths that do not add up to it")
        places = start + body + offsets_of(sizes.reshape(-1))[:-1]
        return places.reshape(sizes.shape), sizes

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the payload bytes of each sample, from the tables of lengths."""
        samples = np.arange(start, stop, dtype=np.int64)
        total = np.zeros(stop - start, np.int64)
        for name, _ in self._fields:
            total += self._blocks(name).lengths.at(samples)
        return total

    # --- describing --------------------------------------------------------------------------

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every sample is stored: fixed fields of even groups are arrays in chunks."""
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
                    self.records.inside,
                )
                shape, chunk = (len(self), *f.inner), (capacity, *f.inner)
                columns[field.name] = Column(Grid(blocks, shape, f.dtype.itemsize, chunk))
        return FileLayout(len(self), columns=columns, unlocated=unlocated)

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored: all of a group's samples together."""
        most = int(self._counts.max(initial=0))
        access = "one contiguous read per field, also for all samples of a group"
        storage = f"values of up to {most} samples, field by field"
        return {
            f.name: FieldStorage(
                storage=storage,
                access=access,
                reads=None if f.ragged else 1,
                read_nbytes=None if f.ragged else f.row_nbytes,
            )
            for _, f in self._fields
        }

    @override
    def loading_code(self) -> str:
        capacity = int(self._capacities[0])
        return group_loading_code(
            self.records.file.path, self._database, self._packing, capacity, self.records.key(0)
        )
