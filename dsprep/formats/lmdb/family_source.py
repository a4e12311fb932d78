"""Reads samples of which each field is a record of its own; `families` finds them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsprep.core.pread import packed
from dsprep.core.schema import Arena, Batch, Field, Ints, Ragged, Schema
from dsprep.formats.base import Layout, OpenOptions, Source, retype, wanted
from dsprep.formats.lmdb.families import KEY
from dsprep.formats.lmdb.snippet import family_loading_code
from dsprep.formats.lmdb.source import LmdbSource
from dsprep.layout.model import FileLayout

APART = "a sample is several records, each at an offset of its own, which sidecars do not keep"


class LmdbFamilySource(Source):
    """The samples of a database whose keys are families.

    Parameters
    ----------
    source
        The records; it then belongs to this one.
    options, hint
        As for `Format.open`.
    """

    def __init__(self, source: LmdbSource, options: OpenOptions, hint: Schema | None) -> None:
        self.path, self._records, self._families = source.path, source, source.families
        self._database = options.database
        available = {name: Field.opaque(name) for name in self._families}
        self._numbers = next(iter(self._families.values())).numbers
        if not bool((np.diff(self._numbers) == 1).all()):
            available[KEY] = Field(KEY, np.dtype(np.int64))
        known = {f.name: f for f in hint or () if f.name in available}
        self._fields = wanted(options.fields, available)
        if not options.fields:
            self._fields = [(path, known.get(path, f)) for path, f in self._fields]
        attrs = hint.attrs if hint is not None else {}
        self.schema = Schema(tuple(f for _, f in self._fields), attrs)
        self.version, self.notes = f"{source.version}, a record per field", source.notes

    def __len__(self) -> int:
        return len(self._numbers)

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        batch: Batch = {}
        for path, f in self._fields:
            if path not in self._families:
                batch[f.name] = self._numbers[start:stop]
                continue
            records = self._families[path].records[start:stop]
            data, sizes = self._records.values_of(records, arena, f.name)
            column = Ragged(data, packed(sizes), "bytes")
            batch[f.name] = retype(column, f, self.path, start)
        return batch

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the payload bytes of each sample, from the tree alone."""
        total = np.zeros(stop - start, np.int64)
        for path, f in self._fields:
            if path in self._families:
                total += self._records.sizes_of(self._families[path].records[start:stop])
            else:
                total += f.row_nbytes
        return total

    def layouts(self) -> dict[str, Layout]:
        """Return how each field lies: in a record of its own."""
        access = "a page of the tree and a value per field: their offsets are not computed"
        own = Layout(storage="a record per field", access=access)
        number = Layout(storage="the number in the keys", access=access)
        return {f.name: own if path in self._families else number for path, f in self._fields}

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return that no field is located; see `Source.extents`."""
        return FileLayout(len(self), unlocated={f.name: APART for f in self.schema})

    def loading_code(self) -> str:
        """Return a py-lmdb program that loads sample 0; see `Source.loading_code`."""
        keys = {
            f.name: self._records.key_of(int(self._families[path].records[0]))
            for path, f in self._fields
            if path in self._families
        }
        return family_loading_code(self._records.file, self._database, keys)
