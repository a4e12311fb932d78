"""The contract of a layout law: numbers that are computed, not stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables
from dsprep.core.schema import Ints
from dsprep.errors import FormatError

LARGEST = 1 << 60
"""Numbers of a law, and what they are made from, are smaller: sums of two fit into int64."""


class Law(ABC):
    """The numbers a(0) .. a(count - 1), int64: offsets or lengths in bytes, or numbers of blocks.

    A law is immutable, and `at` may be called from several threads at once.

    Attributes
    ----------
    name
        Its name in sidecars.
    count
        Number of values.
    packed_nbytes
        What `laws.packed_nbytes` has found.
    """

    name: ClassVar[str]
    count: int
    packed_nbytes: int | None = None

    @abstractmethod
    def at(self, indices: Ints) -> Ints:
        """Return a(i) for each index, which the caller keeps within ``0 <= i < count``.

        Vectorised; time and memory grow with the indices, not with `count`.
        """

    def span(self, start: int, stop: int) -> Ints:
        """Return a(i) for ``start <= i < stop``."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def one(self, index: int) -> int:
        """Return a(index), for reads of single samples, where arrays would cost more."""
        return int(self.at(np.array([index], np.int64))[0])

    @abstractmethod
    def to_json(self, tables: Tables) -> Any:
        """Return the law as JSON; what is long goes to `tables`. `count` is not part of it."""

    @classmethod
    @abstractmethod
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Law:
        """Return the law that `to_json` wrote, for `count` numbers.

        Parameters
        ----------
        lengths
            The law of the blocks' lengths, where this is that of their offsets.

        Raises
        ------
        FormatError
            If it does not follow the specification, or its tables do not have `count` numbers.
        """

    @abstractmethod
    def words(self) -> str:
        """Return the law for a person: ``2048 + i * 3072``."""


class Unfitted(Law):
    """Numbers as a format found them, to be fitted; never in a sidecar."""

    name = "explicit"

    def to_json(self, tables: Tables) -> Any:
        """Not possible: fit a law first."""
        raise TypeError("explicit numbers are fitted before they are written")

    @classmethod
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Law:
        """Not possible: no sidecar has them."""
        raise TypeError("explicit numbers are in no sidecar")

    @override
    def words(self) -> str:
        return f"{self.count} numbers"


class Explicit(Unfitted):
    """Numbers that are in memory."""

    def __init__(self, values: Ints) -> None:
        self.values = values
        self.count = len(values)

    @override
    def at(self, indices: Ints) -> Ints:
        return self.values[indices]

    @override
    def one(self, index: int) -> int:
        return int(self.values[index])

    @override
    def span(self, start: int, stop: int) -> Ints:
        return self.values[start:stop]


class Computed(Unfitted):
    """Numbers that a format looks up when they are asked for, which may read its file."""

    def __init__(self, count: int, at: Callable[[Ints], Ints]) -> None:
        self.count, self._at = count, at

    @override
    def at(self, indices: Ints) -> Ints:
        return self._at(indices)


def integer(
    json: Mapping[str, Any], key: str, tables: Tables, low: int = -LARGEST, high: int = LARGEST
) -> int:
    """Return ``json[key]``, an integer ``low <= n <= high``; `FormatError` if it is not one."""
    value = json.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise damaged(f"{key} of a law is wrong", tables, f"{low} to {high}", value)
    return value


def damaged(
    message: str, tables: Tables, expected: object = None, found: object = None
) -> FormatError:
    """Return the error for a law that does not follow the specification."""
    shown = repr(found)[:80] if found is not None else None
    return FormatError(
        message,
        where=tables.where,
        expected=expected,
        found=shown,
        fix="write the sidecar again with dsprep provenance",
    )
