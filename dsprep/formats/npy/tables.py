"""Index tables in NumPy arrays: values beside them are ragged fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Field, Schema
from dsprep.formats.npy.arrays import StoredArray
from dsprep.layout.model import FileLayout
from dsprep.reading.layout_reader import LayoutReader
from dsprep.storage.base import Handle
from dsprep.storage.checksums import check_member, read_crc32


class StoredNumbers:
    """An array as an index table has it; see `dsprep.formats.index_tables.Numbers`."""

    def __init__(
        self, name: str, array: StoredArray, open_file: Callable[[str], Handle], where: str
    ) -> None:
        self.where, self._name, self.count = where, name, (*array.shape, 1)[0]
        layout = FileLayout(self.count, columns={name: array.column(whole_file=False)})
        schema = Schema((Field(name, array.dtype, array.shape[1:]),))
        self._reader = LayoutReader(layout, schema, open_file, where)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``."""
        some = np.arange(start, stop, dtype=np.int64)
        rows: Any = self._reader.read(some, (self._name,))
        return rows[self._name]  # type: ignore[no-any-return]


def check(file: Handle, name: str, array: StoredArray) -> None:
    """Compare the member of a ZIP file that has an array as it is with its CRC-32."""
    if array.member is not None:
        begin, end, crc32 = array.member
        check_member(read_crc32(file, begin, end), crc32, f"{file.path}, {name}")
