"""Layout laws: the rules from which the offsets of all samples are computed.

A law gives int64 numbers, by name:

============= ===================================================================================
a number      the same for every index
``affine``    ``base + i * stride``: contiguous rows, records of one size
``runs``      affine runs: nearly everything that was written in some order
``table``     a number for each index: lengths that vary
``follow``    offsets of blocks back to back, from their lengths
``periodic``  a law that begins again every so many indices: the chunks of equal shards
``tree``      LMDB: a database written in one transaction, or copied compactly (closed form)
``replay``    LMDB: a database written in key order in several transactions
============= ===================================================================================

`fit` finds the smallest law that gives exactly the numbers that were found in a file; `parse`
reads one from a sidecar. A law never opens a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.packing import Sizes, Tables
from dsprep.core.packing import packed_nbytes as packed_size
from dsprep.core.schema import Ints
from dsprep.layout.laws import affine, runs
from dsprep.layout.laws.affine import Affine
from dsprep.layout.laws.base import LARGEST, Computed, Explicit, Law, damaged
from dsprep.layout.laws.runs import Runs
from dsprep.layout.laws.table import Table

__all__ = [
    "LARGEST",
    "LAWS",
    "Affine",
    "Computed",
    "Explicit",
    "Law",
    "Runs",
    "Table",
    "fit",
    "is_exact",
    "packed_nbytes",
    "parse",
]

LAWS = {
    "affine": "dsprep.layout.laws.affine:Affine",
    "runs": "dsprep.layout.laws.runs:Runs",
    "table": "dsprep.layout.laws.table:Table",
    "follow": "dsprep.layout.laws.follow:Follow",
    "periodic": "dsprep.layout.laws.periodic:Periodic",
    "tree": "dsprep.layout.laws.tree:Tree",
    "replay": "dsprep.layout.laws.replay:Replay",
}
"""Name to class; a law is one module and one line."""

_SLICE = 1 << 20
JUDGED = 1 << 14
"""Numbers by which laws are compared, as packing takes time: the first ones speak for all."""


def parse(json: Any, count: int, tables: Tables, lengths: Law | None = None) -> Law:
    """Return the law in a sidecar.

    Parameters
    ----------
    json
        A number, or an object whose ``law`` is one of `LAWS`.
    count
        Number of values that it has to give.
    tables
        Where its tables are.
    lengths
        The law of the lengths, where this is that of the offsets.

    Raises
    ------
    FormatError
        If it does not follow the specification.
    """
    from importlib import import_module

    if isinstance(json, int) and not isinstance(json, bool):
        return Affine.from_json({"base": json, "stride": 0}, count, tables, None)
    name = json.get("law") if isinstance(json, Mapping) else None
    if not isinstance(name, str) or name not in LAWS:
        raise damaged("there is no such law", tables, "one of " + ", ".join(LAWS), json)
    module, _, attribute = LAWS[name].partition(":")
    law: type[Law] = getattr(import_module(module), attribute)
    return law.from_json(json, count, tables, lengths)


def fit(values: Ints, candidates: Sequence[Law] = ()) -> Law:
    """Return the smallest law that gives exactly `values`.

    Tried are, in this order: an affine law, the `candidates`, and then runs and a table, of which
    the one that packs smaller is taken.
    """
    law = affine.fit(values)
    if law is not None:
        return law
    for candidate in candidates:
        if is_exact(candidate, values):
            return candidate
    some = values[:JUDGED]
    joined, table = runs.fit(some), Table(some)
    if packed_size(joined.pack()) <= packed_size(table.pack()):
        return joined if len(some) == len(values) else runs.fit(values)
    return table if len(some) == len(values) else Table(values)


def is_exact(law: Law, values: Ints) -> bool:
    """Return whether `law` gives exactly `values`."""
    n = len(values)
    if law.count != n:
        return False
    probes = np.unique(np.linspace(0, n - 1, min(n, 64)).astype(np.int64))
    if not np.array_equal(law.at(probes), values[probes]):
        return False
    return all(
        np.array_equal(law.span(a, min(a + _SLICE, n)), values[a : a + _SLICE])
        for a in range(0, n, _SLICE)
    )


def packed_nbytes(law: Law) -> int:
    """Return about how many bytes a law takes in a sidecar, tables packed."""
    import json

    if law.packed_nbytes is None:
        sizes = Sizes()
        law.packed_nbytes = len(json.dumps(law.to_json(sizes))) + sizes.nbytes
    return law.packed_nbytes
