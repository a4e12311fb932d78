"""Index tables in NumPy arrays: values beside them are ragged fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Field, Schema
from dsprep.formats.npy.archive import Member
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


def check(file: Handle, member: Member) -> None:
    """Compare a stored member of a ZIP file with its CRC-32."""
    where = f"{file.path}, {member.name}"
    computed = read_crc32(file, member.offset, member.offset + member.nbytes)
    check_member(computed, member.crc32, where)
