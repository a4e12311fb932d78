"""Numbers that begin again: ``of(i % period)``, such as the places of chunks in equal shards.

The JSON is ``{"law": "periodic", "period": k, "of": law}``, where the inner law gives k numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables
from dsprep.core.schema import Ints
from dsprep.layout import laws
from dsprep.layout.laws.base import Law, damaged, integer


class Periodic(Law):
    """A law that begins again every ``of.count`` indices.

    Parameters
    ----------
    count
        How many numbers there are; the last period may be cut off.
    of
        The numbers of one period, at least one.
    """

    name = "periodic"

    def __init__(self, count: int, of: Law) -> None:
        self.count, self.period, self.of = count, of.count, of

    @override
    def at(self, indices: Ints) -> Ints:
        return self.of.at(indices % self.period)

    @override
    def one(self, index: int) -> int:
        return self.of.one(index % self.period)

    def to_json(self, tables: Tables) -> Any:
        """``{"law": "periodic", "period": numbers of a period, "of": law}``."""
        return {"law": self.name, "period": self.period, "of": self.of.to_json(tables)}

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Periodic:
        # A period is no longer than all, and not made of periods.
        period = integer(json, "period", tables, 1, max(1, count))
        of = json.get("of")
        if isinstance(of, Mapping) and of.get("law") == cls.name:
            raise damaged("a period is made of periods", tables, found=of)
        return cls(count, laws.parse(of, period, tables))

    @override
    def words(self) -> str:
        return f"again every {self.period:,}: {self.of.words()}"


def fit(values: Ints, period: int) -> Periodic | None:
    """Return the law that gives exactly `values`, or None.

    None also where a period has one number, or there is no second one: simpler laws serve.
    """
    n = len(values)
    if not 1 < period < n:
        return None
    for start in range(period, n, _STEP):
        stop = min(start + _STEP, n)
        if not np.array_equal(values[start:stop], values[start - period : stop - period]):
            return None
    return Periodic(n, laws.fit(values[:period]))


_STEP = 1 << 20
