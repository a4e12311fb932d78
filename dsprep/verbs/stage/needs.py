"""The pieces of a dataset that some ranks read, in order: pure, from the Reader's order."""

from __future__ import annotations

import numpy as np

from dsprep.cache.copies import Facts
from dsprep.cache.pieces import Pieces
from dsprep.core.schema import Ints
from dsprep.reader.order import Assignment, Sequence, Share, share


def ranks_of(node: int, ranks: int, ranks_per_node: int) -> range:
    """Return the ranks of a node: they are numbered from node to node."""
    return range(node * ranks_per_node, min(ranks, (node + 1) * ranks_per_node))


def needs(
    pieces: Pieces, order: Assignment, ranks: range, epochs: range
) -> list[tuple[Facts, Ints]]:
    """Return the copies from which ranks read in some epochs, and which pieces of each.

    With mini-epochs `epochs` are numbers of those, counted over all epochs, and a copy is that of
    one: the Reader reads all of it in some pass or other.

    Parameters
    ----------
    pieces
        Of the dataset.
    order
        Which samples come when; mini-epochs are passed once.
    ranks, epochs
        Which.

    Returns
    -------
    list
        Pairs of the copy and int64 of shape ``(n,)``: its pieces, each once, those first that are
        needed first.
    """
    if order.mini is None:
        return [(Facts.of(pieces), groups_needed(order, ranks, epochs))]
    groups_of: dict[Facts, Ints] = {}
    for number in epochs:
        mini_pass = order.mini.at(number)
        sooner = groups_needed(order, ranks, range(number, number + 1))
        for rank in ranks:
            pool = order.pool(mini_pass, rank)
            facts = Facts.of(pieces, pool)
            if facts not in groups_of:
                own = sooner[np.isin(sooner, pool)]
                groups_of[facts] = np.concatenate([own, np.setdiff1d(pool, own)])
    return list(groups_of.items())


def groups_needed(order: Assignment, ranks: range, epochs: range) -> Ints:
    """Return the pieces that ranks read in some epochs, each once, in the order of their first use.

    Ranks read side by side: what comes sooner in the share of its rank comes sooner here. In a
    global shuffle all pieces are read all the time.
    """
    count = len(order.stored_edges) - 1
    if order.shuffle == "global":
        return np.flatnonzero(np.diff(order.edges))
    taken, distinct = np.zeros(count, bool), [np.zeros(0, np.int64)]
    for number in epochs:
        sequence = order.sequence(number)
        parts = [_of_rank(sequence, _share(order, sequence, rank)) for rank in ranks]
        groups = np.concatenate([groups for groups, _ in parts])
        times = np.concatenate([times for _, times in parts])
        groups = groups[np.argsort(times, kind="stable")]
        first = np.sort(np.unique(groups, return_index=True)[1])
        new = groups[first][~taken[groups[first]]]
        taken[new] = True
        distinct.append(new)
    return np.concatenate(distinct)


def _share(order: Assignment, sequence: Sequence, rank: int) -> Share:
    sizes = order.world_size, rank, order.batch_size
    return share(len(sequence), *sizes, order.remainder, sequence.pools)


def _of_rank(sequence: Sequence, share: Share) -> tuple[Ints, Ints]:
    """Return the groups of a share, and how many samples it delivers before each: int64."""
    groups, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    done = 0
    for start, stop in share.stretches():
        numbers = sequence.groups_at(start, stop)
        low = int(np.searchsorted(sequence.ends, start, "right")) - 1
        begins = np.maximum(sequence.ends[low : low + len(numbers)], start)
        groups.append(numbers)
        times.append(done + begins - start)
        done += stop - start
    return np.concatenate(groups), np.concatenate(times)
