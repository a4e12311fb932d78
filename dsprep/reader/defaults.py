"""Default numbers of threads and buffers: rules whose outcome a person can predict.

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


def threads_by_rule(share: int, decoded: bool = False) -> int:
    """Return the threads that read for a rank with so many cores.

    `decoded`: values are decoded, not only copied.

    >>> [threads_by_rule(share) for share in (64, 8, 2, 1)], threads_by_rule(8, decoded=True)
    ([4, 4, 2, 1], 8)
    """
    return share if decoded else min(MOST, share)


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


def cores_of(rank_info: RankInfo) -> int:
    """Return the cores of this rank, at least one: its share of those of this process."""
    return share(len(os.sched_getaffinity(0)), node_cores(os.environ), rank_info)


def node_cores(env: Mapping[str, str]) -> int:
    """Return the cores that the ranks of this job have on this node, all together."""
    count = os.cpu_count() or 1
    here = env.get("SLURM_CPUS_ON_NODE", "").strip()[:9]
    return min(count, int(here) or count) if here.isdecimal() else count


def share(count: int, of_node: int, rank_info: RankInfo) -> int:
    """Return the cores of a rank, of the `count` that its process may use.

    Ranks that a launcher bound to cores of their own share none: then all of them together have
    no more than the node (`of_node`). Where the number of ranks on the node is unknown, all count.
    """
    ranks = rank_info.world_size if rank_info.local_size is None else rank_info.local_size
    bound = rank_info.local_size is not None and count * ranks <= of_node
    return count if bound else max(1, count // ranks)
