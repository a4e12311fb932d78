"""``dsprep cache list`` and ``dsprep cache purge``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsprep.cli.command import command
from dsprep.cli.report import note, print_json, print_rows, print_table, say

if TYPE_CHECKING:
    from dsprep.cache.folder import CopyInfo


@command
def list_(root: Path, /, json: bool = False) -> None:
    """List the copies of a cache: what of which dataset, its size, who uses it.

    Parameters
    ----------
    root : DIR
        The directory that a Reader has as cache=.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep cache list /local/nvme
    dsprep cache list /local/nvme --json

    Notes
    -----
    Exit status: 0 done, 2 wrong usage.
    """
    from dsprep.cache.folder import CacheFolder
    from dsprep.storage.trees import free_nbytes

    copies, free = CacheFolder(root, create=False).infos(), free_nbytes(root)
    nbytes = sum(c.nbytes for c in copies)
    if json:
        listed = [c.to_json() for c in copies]
        print_json({"root": str(root), "copies": listed, "nbytes": nbytes, "free": free})
    else:
        print_listing(copies, nbytes, free)


@command
def purge(
    root: Path,
    /,
    dataset: str | None = None,
    unused_since: str | None = None,
    everything: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Remove copies from a cache that are not in use; nothing but copies is removed.

    Of several options that choose copies, all have to hold.

    Parameters
    ----------
    root : DIR
        The directory that a Reader has as cache=.
    dataset : PATH
        Copies of this dataset.
    unused_since : TIME
        Copies not used for so long: 12h, 7d.
    everything
        All copies.
    dry_run
        Show what would be done, and stop.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep cache purge /local/nvme --unused-since 7d
    dsprep cache purge /local/nvme --dataset train.h5 --dry-run
    dsprep cache purge /local/nvme --all

    Notes
    -----
    Exit status: 0 done, 1 some of it was kept, as it is in use or no copy, 2 wrong usage.
    """
    from dsprep.core.units import parse_seconds
    from dsprep.verbs.cache import purge as remove

    removed, kept = remove(
        root,
        dataset=dataset,
        unused_since=None if unused_since is None else parse_seconds(unused_since),
        everything=everything,
        dry_run=dry_run,
    )
    nbytes = sum(info.nbytes for info in removed)
    if json:
        print_json(
            {
                "removed": [info.to_json() for info in removed],
                "kept": [{**info.to_json(), "why": reason} for info, reason in kept],
                "nbytes": nbytes,
            }
        )
    else:
        from dsprep.core.units import show_nbytes

        would = "would be " if dry_run else ""
        for c in removed:
            print_copy(f"{would}removed", c)
        for c, reason in kept:
            print_copy(f"{reason}, kept", c)
        say(f"{show_nbytes(nbytes)} {would}freed")
    if kept and not dry_run:
        raise typer.Exit(1)


def print_listing(copies: list[CopyInfo], nbytes: int, free: int) -> None:
    """Print what a cache holds for a person."""
    from dsprep.core.units import show_nbytes

    rows = [("copy", "groups", "size", "last use", "state", "dataset")]
    rows += [
        (
            "mini-epoch" if c.part else "whole",
            f"{c.ready:,} of {c.pieces:,}",
            show_nbytes(c.nbytes),
            f"{_ago(c.used)} ago",
            _state(c),
            c.dataset or str(c.path),
        )
        for c in copies
    ]
    if copies:
        print_table(rows)
        say("")
    used = sum(c.in_use for c in copies)
    print_rows(
        [
            ("copies", f"{len(copies):,}, {used:,} in use"),
            ("size", show_nbytes(nbytes)),
            ("free", show_nbytes(free)),
        ]
    )
    for c in copies:
        if c.problem is not None:
            note(f"{c.path} is worthless: {c.problem}")


def _state(info: CopyInfo) -> str:
    word = "worthless" if info.problem else "complete" if info.complete else "incomplete"
    return f"{word}, in use" if info.in_use else word


def _ago(used: float) -> str:
    """Return the age of a time, in words."""
    import time

    from dsprep.core.units import show_time

    seconds = max(0.0, time.time() - used)
    return show_time(seconds) if seconds < 2 * 86400 else f"{seconds // 86400:.0f} d"


def print_copy(words: str, info: CopyInfo) -> None:
    """Print what becomes of a copy."""
    from dsprep.core.units import show_nbytes

    say(f"{words}: {info.path}, {show_nbytes(info.nbytes)} of {info.dataset or 'something'}")
