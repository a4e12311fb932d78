"""``stage``: what a node will read of a dataset is brought to its own storage before the job.

Which pieces that are follows from the sidecar and the Reader's order. They are copied into a cache
as a `dsprep.Reader` keeps it, so that one that is given the same directory finds them there, and
opens no data file as long as it reads nothing else. Source: Pumma et al., section 6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from dsprep.cache.pieces import Pieces
from dsprep.core.arguments import OrderArguments
from dsprep.core.schema import Ints
from dsprep.errors import UsageError
from dsprep.reader.cached import Cache
from dsprep.reader.data import Paths, open_data
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.reader.options import ReaderOptions, assign, at_least, chosen_fields
from dsprep.reader.order import Assignment
from dsprep.source.alike import sorting_field
from dsprep.verbs.stage.copying import Outcome, PiecesNeeded, copy_all, look
from dsprep.verbs.stage.manifest import write
from dsprep.verbs.stage.needs import groups_needed, needs, ranks_of

THREADS = 8
"""Threads that copy, by default."""


@dataclass(frozen=True)
class StageReport:
    """The groups that are needed, and those that were staged.

    Attributes
    ----------
    path
        The dataset.
    ranks, epochs
        Whose, and of which epochs, or mini-epochs.
    groups, total
        Groups, or ranges of samples where there are none: those needed, and all of the dataset.
    ranges, nbytes
        Byte ranges of those needed, and their bytes.
    outcome
        What was copied; None: a manifest was written alone.
    sorted_by
        The field by which samples are sorted, although only groups are shuffled; empty: none.
    seconds
        That it took.
    """

    path: Path
    ranks: range
    epochs: range
    groups: int
    total: int
    ranges: int
    nbytes: int
    outcome: Outcome | None = None
    sorted_by: str = ""
    seconds: float = 0.0


def stage(
    path: Paths,
    ranks: int,
    batch_size: int,
    to: str | Path | None = None,
    *,
    ranks_per_node: int,
    node: int | None = None,
    epochs: int = 1,
    first_epoch: int = 0,
    cache_size: int | str | None = None,
    bandwidth: int | str | None = None,
    threads: int = THREADS,
    partial: bool = False,
    manifest: str | Path | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **order: Unpack[OrderArguments],
) -> StageReport:
    """Copy what a node will read in some epochs to a faster tier, as ``Reader(cache=)`` finds it.

    What is there already is not copied again, so that the same call continues where one was killed.

    Parameters
    ----------
    path
        The dataset, or its sidecar; as for `Reader`.
    ranks
        Processes that will read.
    batch_size
        As for the `Reader`.
    to
        The directory: the Reader's `cache`. None: nothing is copied.
    ranks_per_node
        How many are on a node: it has as many ranks in a row.
    node
        Whose ranks, from 0; None: all nodes, which share the directory.
    epochs, first_epoch
        How many epochs, and the first of them; with mini-epochs, of those, over all epochs.
    cache_size
        As for the `Reader`.
    bandwidth
        Bytes per second, or text such as ``"2GB/s"``, that are copied at most.
    threads
        That copy.
    partial
        Whether to copy what there is room for, what is needed first, if not all of it fits.
    manifest
        A file to write with the ranges that are needed; see `dsprep.verbs.stage.manifest`.
    dry_run
        Compute and compare with the room there is, and write nothing.
    progress
        Called with bytes copied so far, and in all; from any thread.
    **order
        What decides which samples come, and in which order: see
        `dsprep.core.arguments.OrderArguments`.

    Returns
    -------
    StageReport
        What is needed, and what was copied of it.

    Raises
    ------
    UsageError
        If arguments are not possible.
    TargetError
        If it does not fit.
    MissingError, StaleError, FormatError
        If the dataset has no sidecar, or not its own, or a damaged one.
    OSError
        If something cannot be read or written.
    """
    began = time.monotonic()
    if to is None and manifest is None:
        raise UsageError("there is nothing to write", fix="give to= a directory, or manifest=")
    if to is None and (cache_size, bandwidth) != (None, None):
        raise UsageError("cache_size is that of a cache", fix="give to= a directory")
    settings = ReaderOptions.of(
        path,
        batch_size,
        order,
        cache=None if to is None else Cache(to, cache_size, bandwidth=bandwidth),
    )
    how, threads = settings.cache_options, at_least("threads", threads, 1)
    nodes = _nodes(ranks, ranks_per_node, node, settings.mini)
    first = at_least("first_epoch", first_epoch, 0)
    span = range(first, first + at_least("epochs", epochs, 1))
    with open_data(settings.path, settings.data) as opened:
        assigned = assign(settings, opened, ranks)
        pieces = Pieces(opened, assigned.stored_edges, chosen_fields(settings, opened).names)
        chosen = range(nodes[0].start, nodes[-1].stop)
        wants = [PiecesNeeded(pieces, *need) for need in needs(pieces, assigned, chosen, span)]
        outcome = None
        if manifest is not None and not dry_run:
            lists = _lists(assigned, wants, nodes, span)
            write(Path(manifest), pieces, lists, _header(settings, ranks, nodes, span))
        if how is not None and dry_run:
            outcome = look(wants, how, partial)
        elif how is not None:
            outcome = copy_all(pieces, wants, how, threads, partial, progress)
        several = assigned.shuffle == "group" and assigned.mixed < len(pieces)
        alike = sorting_field(opened) if several and settings.buffers_mixed is None else ""
    return StageReport(
        opened.dataset,
        chosen,
        span,
        sum(len(w.groups) for w in wants),
        len(pieces),
        sum(int(w.table[0].sum()) for w in wants),
        sum(int(w.nbytes.sum()) for w in wants),
        outcome,
        alike,
        time.monotonic() - began,
    )


def _nodes(ranks: int, per_node: int, node: int | None, mini: MiniEpochs | None) -> list[range]:
    """Return the ranks of the node that is meant, or of each; `UsageError` if there is none."""
    per_node = at_least("ranks_per_node", per_node, 1)
    count = -(-at_least("ranks", ranks, 1) // per_node)
    if node is None and mini is not None and count > 1:
        raise UsageError("copies of mini-epochs are those of one node", fix="give its number, too")
    if node is not None and at_least("node", node, 0) >= count:
        expected = f"less than {count}: {ranks} ranks, {per_node} on a node"
        raise UsageError(f"node is {node}", expected=expected)
    return [ranks_of(k, ranks, per_node) for k in (range(count) if node is None else (node,))]


def _lists(
    order: Assignment, wants: Sequence[PiecesNeeded], nodes: Sequence[range], epochs: range
) -> list[tuple[int | None, Ints]]:
    """Return the pieces for a manifest: of one node, or of each with its number."""
    if len(nodes) > 1:
        return [(k, groups_needed(order, ranks, epochs)) for k, ranks in enumerate(nodes)]
    return [(None, np.concatenate([want.groups for want in wants]))]


def _header(
    settings: ReaderOptions, ranks: int, nodes: Sequence[range], epochs: range
) -> dict[str, Any]:
    """Return the facts of a manifest besides dataset and totals."""
    names = ("batch_size", "buffer_size", "seed", "shuffle", "remainder", "buffers_mixed")
    options = {name: getattr(settings, name) for name in names}
    if (mini := settings.mini) is not None:
        options |= {"mini_epochs": mini.parts, "recompose": mini.recompose, "pools": mini.pools}
    return {
        "options": {**options, "fields": list(settings.fields)},
        "world_size": ranks,
        "ranks": [nodes[0].start, nodes[-1].stop],
        "epochs": [epochs.start, epochs.stop],
    }
