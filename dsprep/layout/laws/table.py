"""A table: one number for each index, for what follows no rule, such as varying lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables, from_planes, to_planes
from dsprep.core.schema import Array, Ints
from dsprep.layout.laws.base import LARGEST, Law, damaged


class Table(Law):
    """Numbers that are stored, in the smallest integer type that holds them all."""

    name = "table"

    def __init__(self, values: Ints) -> None:
        self.count = len(values)
        self._values: Array = narrow(values)

    @override
    def at(self, indices: Ints) -> Ints:
        return self._values[indices].astype(np.int64)

    @override
    def one(self, index: int) -> int:
        return int(self._values[index])

    @override
    def span(self, start: int, stop: int) -> Ints:
        return self._values[start:stop].astype(np.int64)

    def to_json(self, tables: Tables) -> Any:
        """``{"law": "table", "data": packed}``."""
        return {"law": self.name, "data": tables.put(self.pack())}

    def pack(self) -> bytes:
        """Return the byte planes of the numbers."""
        return to_planes(self._values.astype(np.int64))

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Table:
        try:
            values = from_planes(tables.get(json.get("data")))
        except ValueError as error:
            raise damaged("the table of a law is damaged", tables, found=error) from error
        if len(values) != count:
            raise damaged("the table of a law has another length", tables, count, len(values))
        if count and (int(values.max()) > LARGEST or int(values.min()) < -LARGEST):
            raise damaged("the table of a law leaves all files", tables)
        return cls(values)

    @override
    def words(self) -> str:
        if not self.count:
            return "a table of nothing"
        low, high = int(self._values.min()), int(self._values.max())
        return f"a table of {self.count:,} numbers, {low:,} to {high:,}"


def narrow(values: Ints) -> Array:
    """Return the values in the smallest integer type that holds them."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    kinds = (np.int8, np.int16, np.int32) if low < 0 else (np.uint8, np.uint16, np.uint32)
    fits = (k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return values.astype(next(fits, np.int64))
