"""Many byte strings as one array: the names of files, and values that a layout itself gives.

A million names take their bytes and 8 more each, not an object each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.core.schema import Bytes, Ints
from dsprep.core.spans import move_spans, offsets_of
from dsprep.layout.laws.base import damaged, integer


class Words:
    """Byte strings without NUL, numbered from 0.

    Parameters
    ----------
    data
        The strings, each with a NUL after it.

    Raises
    ------
    ValueError
        If the last one has no NUL after it.
    """

    def __init__(self, data: bytes) -> None:
        if data and data[-1]:
            raise ValueError("a string is cut off")
        self.data = data
        self._flat: Bytes = np.frombuffer(data, np.uint8)
        self._ends: Ints = np.flatnonzero(self._flat == 0)

    @classmethod
    def of(cls, words: Iterable[bytes]) -> Words:
        """Return the strings, none of which holds a NUL; `ValueError` if one does."""
        words = list(words)
        made = cls(b"".join([word + b"\0" for word in words]))
        if len(made) != len(words):
            raise ValueError("a string holds a NUL")
        return made

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        begin = int(self._ends[number - 1]) + 1 if number else 0
        return self.data[begin : int(self._ends[number])]

    def some(self, numbers: Ints) -> list[bytes]:
        """Return some strings."""
        begins, ends = self._begins(numbers).tolist(), self._ends[numbers].tolist()
        return [self.data[a:b] for a, b in zip(begins, ends, strict=True)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def lengths(self, numbers: Ints) -> Ints:
        """Return the bytes of some strings, int64 of shape ``(n,)``."""
        lengths: Ints = self._ends[numbers] - self._begins(numbers)
        return lengths

    def take(self, numbers: Ints) -> tuple[Bytes, Ints]:
        """Return some strings back to back, uint8, and where each begins and the last ends."""
        offsets = offsets_of(self.lengths(numbers))
        out = np.empty(int(offsets[-1]), np.uint8)
        move_spans(self._flat, self._begins(numbers), np.diff(offsets), out, offsets[:-1])
        return out, offsets

    def _begins(self, numbers: Ints) -> Ints:
        begins: Ints = np.where(numbers > 0, self._ends[numbers - 1] + 1, 0)
        return begins

    def to_json(self, tables: Tables) -> Any:
        """``{"count": how many, "data": packed}``."""
        return {"count": len(self), "data": tables.put(self.data)}

    @classmethod
    def from_json(cls, json: Any, tables: Tables) -> Words:
        """Return the words that `to_json` wrote; `FormatError` if they are damaged."""
        if not isinstance(json, dict):
            raise damaged("a table of strings is damaged", tables, found=json)
        try:
            words = cls(tables.get(json.get("data")))
        except ValueError as error:
            raise damaged("a table of strings is damaged", tables, found=error) from error
        if len(words) != integer(json, "count", tables, 0):
            raise damaged("a table has another number of strings", tables, json["count"])
        return words
