"""Classic netCDF files made by hand: also such as no library writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TYPES = ("i1", "S1", "i2", "i4", "f4", "f8", "u1", "u2", "u4", "i8", "u8")


@dataclass
class Var:
    """A variable: an array, and the names of its dimensions; ``records`` is that of records."""

    array: np.ndarray
    dims: Sequence[str]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    begin: int | None = None  # another offset than that which it has
    name: bytes | None = None

    @property
    def record(self) -> bool:
        return self.dims[:1] == ["records"] or tuple(self.dims[:1]) == ("records",)

    @property
    def row(self) -> int:
        return math.prod(self.array.shape[self.record :]) * self.array.itemsize

    @property
    def stored(self) -> np.ndarray:
        return self.array.astype(self.array.dtype.newbyteorder(">"))


@dataclass
class Classic:
    """A file; `numrecs` is what the header says, if not the truth."""

    variables: Mapping[str, Var]
    version: int = 1
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, int] | None = None
    numrecs: int | None = None

    def count(self, n: int) -> bytes:
        return n.to_bytes(8 if self.version == 5 else 4, "big")

    def name(self, name: str | bytes) -> bytes:
        data = name if isinstance(name, bytes) else name.encode()
        return self.count(len(data)) + padded(data)

    def list(self, tag: int, items: Sequence[bytes]) -> bytes:
        return (tag if items else 0).to_bytes(4, "big") + self.count(len(items)) + b"".join(items)

    def attributes(self, attrs: Mapping[str, Any]) -> bytes:
        return self.list(12, [self.name(n) + self.value(v) for n, v in attrs.items()])

    def value(self, value: Any) -> bytes:
        if isinstance(value, str | bytes):
            data = value if isinstance(value, bytes) else value.encode()
            return (2).to_bytes(4, "big") + self.count(len(data)) + padded(data)
        array = np.atleast_1d(np.asarray(value))
        code = TYPES.index(array.dtype.str[1:]) + 1
        data = array.astype(array.dtype.newbyteorder(">")).tobytes()
        return code.to_bytes(4, "big") + self.count(len(array)) + padded(data)

    @property
    def records(self) -> int:
        return max((len(v.array) for v in self.variables.values() if v.record), default=0)

    @property
    def stride(self) -> int:
        rows = [v.row for v in self.variables.values() if v.record]
        return rows[0] if len(rows) == 1 else sum(-(-row // 4) * 4 for row in rows)

    def sizes(self) -> Mapping[str, int]:
        if self.dims is not None:
            return self.dims
        found: dict[str, int] = {}
        for v in self.variables.values():
            found |= zip(v.dims, v.array.shape, strict=True)
        return {d: 0 if d == "records" else n for d, n in found.items()}

    def header(self, begins: Mapping[str, int]) -> bytes:
        sizes = self.sizes()
        known = list(sizes)
        variables = []
        for name, v in self.variables.items():
            ids = b"".join(self.count(known.index(d)) for d in v.dims)
            size = min(-(-v.row // 4) * 4, (1 << 32) - 1)
            begin = begins[name] if v.begin is None else v.begin
            variables.append(
                self.name(name if v.name is None else v.name)
                + self.count(len(v.dims))
                + ids
                + self.attributes(v.attrs)
                + (TYPES.index(v.array.dtype.str[1:]) + 1).to_bytes(4, "big")
                + self.count(size)
                + begin.to_bytes(4 if self.version == 1 else 8, "big")
            )
        return (
            b"CDF"
            + bytes([self.version])
            + self.count(self.records if self.numrecs is None else self.numrecs)
            + self.list(10, [self.name(d) + self.count(n) for d, n in sizes.items()])
            + self.attributes(self.attrs)
            + self.list(11, variables)
        )

    def begins(self) -> dict[str, int]:
        """Return where each variable lies, those without records first."""
        at = len(self.header(dict.fromkeys(self.variables, 0)))
        found = {}
        for name, v in sorted(self.variables.items(), key=lambda item: item[1].record):
            found[name] = at
            at += -(-v.row // 4) * 4
        return found

    def to_bytes(self) -> bytes:
        begins, stride = self.begins(), self.stride
        data = bytearray(self.header(begins))
        for name, v in self.variables.items():
            content = v.stored.tobytes()
            for i in range(len(v.array) if v.record else 1):
                at = begins[name] + i * stride
                data.extend(bytes(max(0, at + v.row - len(data))))
                data[at : at + v.row] = content[i * v.row : (i + 1) * v.row]
        if self.records and stride % 4 == 0:
            first = min(begins[n] for n, v in self.variables.items() if v.record)
            data.extend(bytes(max(0, first + self.records * stride - len(data))))
        return bytes(data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
