"""How many threads read by default: a rule whose outcome a person can predict.

``min(4, cores of this process / ranks of this node that share them)``, at least 1; where values are
decoded all of that share, since decoding is work of the processor. From an object store, where
threads wait for answers and copy them, as many as it takes to ask for 128 MiB, a unit each, at
least 1 and at most 31: more than is in flight at a time, so that the next is there when one ends.
Nothing is measured here: ``dsprep bench read --sweep threads=1..8`` (or ``engine=buffered,direct``)
measures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsprep.reader.ranks import RankInfo

SMALL_NBYTES = 32 << 20
"""Up to this much memory, each reading thread has a unit of its own."""

MOST = 4
"""Threads that copy from the page cache as fast as memory allows, and keep a device busy."""

AHEAD_NBYTES = 128 << 20
"""Bytes of units that are asked for from an object store at a time: more than the 96 MiB in flight,
so that a unit waits for its turn whenever another one has come."""

AHEAD_MOST = 31
"""Units on the way at a time, at most."""


@dataclass(frozen=True)
class Choice:
    """How to read: engine, threads that read at a time, and the reason, for a person."""

    engine: str
    threads: int
    why: str


@dataclass(frozen=True)
class Cores:
    """The cores that a process may use, and the ranks that share them, this one included."""

    count: int
    ranks: int
    whose: str  # the same, for a person

    @property
    def share(self) -> int:
        """Cores of each of the ranks, at least one."""
        return max(1, self.count // self.ranks)


def threads_by_rule(cores: Cores, decoded: bool = False) -> int:
    """Return the threads that read for a rank; `decoded`: values are decoded, not only copied.

    >>> [threads_by_rule(Cores(64, ranks, "")) for ranks in (1, 8, 32, 128)]
    [4, 4, 2, 1]
    >>> threads_by_rule(Cores(64, 8, ""), decoded=True)
    8
    """
    return cores.share if decoded else min(MOST, cores.share)


def buffers_by_rule(unit_nbytes: float, threads: int) -> int:
    """Return the units in memory at a time: 2, and of small ones one for each thread, and one more.

    >>> [buffers_by_rule(mib << 20, 4) for mib in (1, 8, 12, 64)]
    [5, 4, 2, 2]
    """
    return max(2, min(threads + 1, int(SMALL_NBYTES // max(1.0, unit_nbytes))))


def units_ahead(unit_nbytes: float) -> int:
    """Return the units that are on the way from an object store, each by a thread that waits.

    >>> [units_ahead(mib << 20) for mib in (1, 5, 64, 512)]
    [31, 26, 2, 1]
    """
    return int(min(AHEAD_MOST, max(1, -(-AHEAD_NBYTES // max(1.0, unit_nbytes)))))


def choose(
    engine: str, threads: int | None, cores: Cores, decoded: bool = False, ahead: int | None = None
) -> Choice:
    """Return how to read: with as many `threads` as asked, or by the rule.

    `ahead`: the units that are read ahead from an object store; None: from files.
    """
    if threads is not None:
        return Choice(engine, threads, "as asked")
    if ahead is not None:
        return Choice(engine, ahead, f"rule: {AHEAD_NBYTES >> 20} MiB ahead from the store")
    count = threads_by_rule(cores, decoded)
    reason = f"rule: {count} of {cores.count} core{'s' * (cores.count > 1)}, {cores.whose}"
    return Choice(engine, count, reason + ("; values are decoded" if decoded else ""))


def cores_of(rank_info: RankInfo) -> Cores:
    """Return the cores of this process."""
    return shared(len(os.sched_getaffinity(0)), node_cores(os.environ), rank_info)


def node_cores(env: Mapping[str, str]) -> int:
    """Return the cores that the ranks of this job have on this node, all together."""
    count = os.cpu_count() or 1
    here = env.get("SLURM_CPUS_ON_NODE", "").strip()[:9]
    return min(count, int(here) or count) if here.isdecimal() else count


def shared(count: int, of_node: int, rank_info: RankInfo) -> Cores:
    """Return who uses the cores of a process.

    Ranks that a launcher bound to cores of their own share none: then all of them together have
    no more than the node (`of_node`). Where the number of ranks on the node is unknown, all count.
    """
    ranks = rank_info.world_size if rank_info.local_size is None else rank_info.local_size
    if rank_info.local_size is None and ranks > 1:
        owner = f"{ranks} ranks, all counted as on this node"
    elif ranks > 1 and count * ranks <= of_node:
        ranks, owner = 1, f"its own of {ranks} ranks on this node"
    else:
        owner = f"{ranks} rank{'s' * (ranks > 1)} on this node"
    return Cores(count, ranks, owner)
