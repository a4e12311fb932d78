"""``dsprep cache list`` and ``dsprep cache purge``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import note, print_json, print_rows, print_table, say

if TYPE_CHECKING:
    from dsprep.cache.folder import CopyInfo
    from dsprep.verbs.cache import Listing, Purged

LIST = """
dsprep cache list /local/nvme

dsprep cache list /local/nvme --json

Exit status: 0 done, 2 wrong usage.
"""

PURGE = """
dsprep cache purge /local/nvme --unused-since 7d

dsprep cache purge /local/nvme --dataset train.h5 --dry-run

dsprep cache purge /local/nvme --all

Exit status: 0 done, 1 some of it was kept, as it is in use or no copy, 2 wrong usage.
"""

Root = Annotated[Path, opt.argument("DIR", "The directory that a Reader has as cache=.")]


@opt.command(LIST)
def list_(root: Root, json: opt.Json = False) -> None:
    """List the copies of a cache: what of which dataset, its size, who uses it."""
    from dsprep.verbs.cache import list_copies

    listing = list_copies(root)
    if json:
        print_json(listing.to_json())
    else:
        print_listing(listing)


@opt.command(PURGE)
def purge(
    root: Root,
    dataset: str | None = opt.value("PATH", "Copies of this dataset."),
    unused_since: str | None = opt.value("TIME", "Copies not used for so long: 12h, 7d."),
    everything: bool = opt.switch("All copies.", "--all"),
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Remove copies from a cache that are not in use; nothing but copies is removed.

    Of several options that choose copies, all have to hold.
    """
    from dsprep.core.units import parse_seconds
    from dsprep.verbs.cache import purge as remove

    done = remove(
        root,
        dataset=dataset,
        unused_since=None if unused_since is None else parse_seconds(unused_since),
        everything=everything,
        dry_run=dry_run,
    )
    if json:
        print_json(done.to_json())
    else:
        print_purged(done, dry_run)
    if done.kept and not dry_run:
        raise typer.Exit(1)


def print_listing(listing: Listing) -> None:
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
        for c in listing.copies
    ]
    if listing.copies:
        print_table(rows)
        say("")
    used = sum(c.in_use for c in listing.copies)
    print_rows(
        [
            ("copies", f"{len(listing.copies):,}, {used:,} in use"),
            ("size", show_nbytes(listing.nbytes)),
            ("free", show_nbytes(listing.free)),
        ]
    )
    for c in listing.copies:
        if c.problem is not None:
            note(f"{c.path} is worthless: {c.problem}")


def _state(info: CopyInfo) -> str:
    word = "worthless" if info.problem else "complete" if info.complete else "incomplete"
    return f"{word}, in use" if info.in_use else word


def _ago(used: float) -> str:
    """Return how long ago a time is."""
    import time

    from dsprep.core.units import show_time

    seconds = max(0.0, time.time() - used)
    return show_time(seconds) if seconds < 2 * 86400 else f"{seconds // 86400:.0f} d"


def print_purged(done: Purged, dry_run: bool) -> None:
    """Print what was removed for a person."""
    from dsprep.core.units import show_nbytes

    word = "would be removed" if dry_run else "removed"
    for c in done.removed:
        say(f"{word}: {c.path}, {show_nbytes(c.nbytes)} of {c.dataset or 'something'}")
    for c, reason in done.kept:
        say(f"{reason}, kept: {c.path}, {show_nbytes(c.nbytes)} of {c.dataset or 'something'}")
    say(f"{show_nbytes(done.nbytes)} {'would be ' if dry_run else ''}freed")
