"""``dsprep cache list``, ``dsprep cache verify`` and ``dsprep cache purge``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import (
    note,
    print_json,
    print_rows,
    print_table,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from dsprep.cache.folder import CopyInfo
    from dsprep.verbs.cache import CopyVerdict, Listing, Purged

LIST = """
dsprep cache list /local/nvme

dsprep cache list /local/nvme --json

Exit status: 0 done, 2 wrong usage.
"""

VERIFY = """
dsprep cache verify /local/nvme

Exit status: 0 all is right, 1 something is not, 2 wrong usage.
"""

PURGE = """
dsprep cache purge /local/nvme --unused-since 7d

dsprep cache purge /local/nvme --dataset train.h5 --dry-run

dsprep cache purge /local/nvme --all

Exit status: 0 done, 1 some of it was kept, as it is in use or no copy, 2 wrong usage.
"""

SHOWN = 10
"""Wrong pieces of a copy that are listed, except in JSON."""

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


@opt.command(VERIFY)
def verify(
    root: Root,
    workers: int | None = opt.value(
        "N", "Threads that read (one per core, at most 8).", "--workers", "-j", min=1
    ),
    json: opt.Json = False,
) -> None:
    """Compare all copies of a cache with the checksums that they had when they were made.

    Copies may be in use. What is wrong is taken from the dataset from then on, by all loops that
    begin later, until dsprep stage copies it again. The sidecars of the datasets have to be there.
    """
    from dsprep.verbs.cache import list_copies, verify_copies

    copies = list_copies(root).copies
    count, payload = sum(c.ready for c in copies), sum(c.nbytes for c in copies)
    with progress_bar("verify", count, payload, not json, "pieces") as update:
        verdicts = list(verify_copies(root, workers=workers, progress=update))
    if json:
        print_json([v.to_json() for v in verdicts])
    for verdict in verdicts if not json else ():
        print_verdict(verdict)
    if not all(v.right for v in verdicts):
        raise typer.Exit(1)


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


def print_verdict(verdict: CopyVerdict) -> None:
    """Print whether a copy is right for a person."""
    from dsprep.core.units import show_nbytes

    for bad in verdict.bad[:SHOWN]:
        say(f"wrong: {bad}")
    if len(verdict.bad) > SHOWN:
        say(f"wrong: {len(verdict.bad) - SHOWN:,} more, which --json names")
    subject = f"{verdict.info.path}, a copy of {verdict.info.dataset or 'something'}"
    pieces = f"{verdict.compared:,} pieces, {show_nbytes(verdict.nbytes)}"
    counts = [f"{len(verdict.bad):,} wrong"] if verdict.bad else []
    if verdict.problem is not None:
        counts.append(f"not compared: {verdict.problem}")
    say(f"{subject}: {pieces}: {', '.join(counts) or 'right'}")


def print_purged(done: Purged, dry_run: bool) -> None:
    """Print what was removed for a person."""
    from dsprep.core.units import show_nbytes

    word = "would be removed" if dry_run else "removed"
    for c in done.removed:
        say(f"{word}: {c.path}, {show_nbytes(c.nbytes)} of {c.dataset or 'something'}")
    for c, reason in done.kept:
        say(f"{reason}, kept: {c.path}, {show_nbytes(c.nbytes)} of {c.dataset or 'something'}")
    say(f"{show_nbytes(done.nbytes)} {'would be ' if dry_run else ''}freed")
