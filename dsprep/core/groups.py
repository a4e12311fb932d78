"""Groups: consecutive samples that one read fetches, and how an output is cut into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dsprep.core.schema import Ints


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of one output file.

    Attributes
    ----------
    edges
        int64, shape ``(groups + 1,)``, rising from 0 to the samples of the file: group g has the
        samples ``edges[g] .. edges[g + 1]``.
    align
        Bytes, a power of two, at whose multiples groups should begin: the stripe size. 1: anywhere.
    rows
        By ragged field: int64, shape ``(groups,)``, how many rows all its samples in a group have.
        Without groups they may be unknown, which is empty.
    plain
        Whether the samples have no groups: they may be cut anywhere, and are one here.
    """

    edges: Ints
    align: int = 1
    rows: Mapping[str, Ints] = field(default_factory=dict)
    plain: bool = False

    @property
    def total(self) -> int:
        """The number of samples."""
        return int(self.edges[-1])

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.edges) - 1

    @property
    def samples(self) -> int:
        """Samples of the largest group."""
        return int(np.diff(self.edges).max(initial=0))

    @property
    def even(self) -> bool:
        """True if all groups but the last have equally many samples."""
        sizes = np.diff(self.edges)
        return bool((sizes[:-1] == sizes[:1]).all()) and bool((sizes[-1:] <= sizes[:1]).all())

    def of(self, sample: int) -> int:
        """Return the group that holds `sample`."""
        return int(np.searchsorted(self.edges, sample, "right")) - 1


def plain(samples: int, rows: Mapping[str, int] | None = None) -> Grouping:
    """Return the grouping of ungrouped samples; `rows`: total by ragged field, if known."""
    each = {name: np.array([number], np.int64) for name, number in (rows or {}).items()}
    return Grouping(np.array([0, samples], np.int64), 1, each, plain=True)


def even(samples: int, per_group: int, align: int = 1) -> Grouping:
    """Return groups of `per_group` samples; the last may have fewer."""
    edges = np.append(np.arange(0, samples, per_group, dtype=np.int64), samples)
    return Grouping(edges, align)


def round_up(nbytes: int, align: int) -> int:
    """Return the next multiple of `align`."""
    return -(-nbytes // align) * align


EMPTY = plain(0)
