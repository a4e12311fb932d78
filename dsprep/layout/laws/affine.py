"""``base + i * stride``: contiguous rows, records of one size, chunks in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables
from dsprep.core.schema import Ints
from dsprep.layout.laws.base import LARGEST, Law, damaged, integer


class Affine(Law):
    """The numbers ``base + i * stride``; with a stride of 0, one number for all."""

    name = "affine"

    def __init__(self, count: int, base: int, stride: int = 0) -> None:
        self.count, self.base, self.stride = count, base, stride

    @override
    def at(self, indices: Ints) -> Ints:
        out: Ints = indices * self.stride
        out += self.base
        return out

    @override
    def one(self, index: int) -> int:
        return self.base + index * self.stride

    def to_json(self, tables: Tables) -> Any:
        """Return a number if all are the same, else ``{"law": "affine", "base", "stride"}``."""
        if not self.stride:
            return self.base
        return {"law": self.name, "base": self.base, "stride": self.stride}

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Affine:
        base, stride = integer(json, "base", tables), integer(json, "stride", tables)
        if abs(base) + abs(stride) * max(0, count - 1) > LARGEST:
            raise damaged("an affine law leaves all files", tables, found=json)
        return cls(count, base, stride)

    @override
    def words(self) -> str:
        return f"{self.base:,} + i * {self.stride:,}" if self.stride else f"{self.base:,}"


def fit(values: Ints) -> Affine | None:
    """Return the law that gives exactly `values`, or None."""
    n = len(values)
    if not n:
        return Affine(0, 0)
    base = int(values[0])
    stride = int(values[1]) - base if n > 1 else 0
    if base + stride * (n - 1) != int(values[-1]):
        return None
    for start in range(0, n, _STEP):
        part = values[start : start + _STEP + 1]
        if len(part) > 1 and bool((np.diff(part) != stride).any()):
            return None
    return Affine(n, base, stride)


_STEP = 1 << 20
