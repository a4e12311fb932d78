"""Ragged fields of NumPy arrays: values beside index tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Field, FieldSpec
from dsprep.formats.npy.archive import Member
from dsprep.formats.npy.arrays import Arrays, StoredArray
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import ArrayTree, find_tables, indexed, routes_of
from dsprep.formats.samples import Sized
from dsprep.layout.laws import Explicit
from dsprep.reading.columns import ColumnReader, read_columns
from dsprep.storage.base import Handle
from dsprep.storage.checksums import check_member, read_crc32


class Tables:
    """Which of the arrays that were found are ragged fields, and what each field is.

    Attributes
    ----------
    routes
        How to reach the values of the ragged fields, by the names of these.
    sized
        The shapes of all fields, with their samples.
    """

    def __init__(
        self,
        inside: Arrays,
        specs: Sequence[FieldSpec],
        options: OpenOptions,
        path: Path,
        open_file: Callable[[str], Handle],
        archive: Handle | None,
    ) -> None:
        self._inside, self._open, self._archive = inside, open_file, archive
        self._where = path
        arrays = inside.arrays
        tree = ArrayTree(arrays, {"": ()})
        ragged = find_tables(tree, tree.groups if options.sample_axis != "none" else (), self._rows)
        self.more = partial(indexed, tree, self._rows)
        known = [s for s in specs if s.index or s.path in arrays]  # others have errors of their own
        routes = routes_of(known, tree, ragged, self._rows, path) if known or not specs else {}
        self._paths = {name: values for name, (values, _) in routes.items()}
        self.routes = {name: route for name, (_, route) in routes.items() if route is not None}
        self.sized = {}
        for name, (values, route) in routes.items():
            array = arrays[values]
            shape = array.shape if route is None else (route.tables[0].rows,)
            dtype = array.dtype if route is None else None
            self.sized[name] = Sized(shape, array.stored, dtype=dtype)

    def values_of(self, name: str) -> str:
        """Return the array that has the values of a field."""
        return self._paths.get(name, name)

    def rows(self, name: str) -> tuple[Explicit, Explicit]:
        """Return the first row of each sample of a ragged field, and how many it has."""
        first, end = self.routes[name].spans(self._inside.arrays[self.values_of(name)].shape[0])
        return Explicit(first), Explicit(end - first)

    def _rows(self, name: str) -> StoredNumbers:
        array = self._inside.arrays[name]
        member = self._inside.members.get(name)
        if member is not None and self._archive is not None:
            check(self._archive, member)
        return StoredNumbers(name, array, self._open, f"{self._where}, array {name}")


class StoredNumbers:
    """An array as an index table has it; see `dsprep.formats.index_tables.Numbers`."""

    def __init__(
        self, name: str, array: StoredArray, open_file: Callable[[str], Handle], where: str
    ) -> None:
        self.where, self._array = where, array
        self.count = (*array.shape, 1)[0]
        field = Field(name, array.dtype, array.shape[1:])
        self._reader = ColumnReader(array.column(whole_file=False), field, open_file)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``."""
        numbers = np.arange(start, stop, dtype=np.int64)
        rows: Any = read_columns({"": self._reader}, numbers, None)[""]
        found: Array = rows
        return found


def check(file: Handle, member: Member) -> None:
    """Compare a stored member of a ZIP file with its CRC-32."""
    where = f"{file.path}, {member.name}"
    computed = read_crc32(file, member.offset, member.offset + member.nbytes)
    check_member(computed, member.crc32, where)
