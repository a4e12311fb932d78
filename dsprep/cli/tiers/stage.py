"""``dsprep stage``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsprep.cli.command import command
from dsprep.cli.report import byte_bar, fail, note, print_done, print_json, print_rows
from dsprep.core.arguments import OrderArguments

if TYPE_CHECKING:
    from dsprep.verbs.stage import StageReport


@command
def stage(
    data: tuple[str, ...],
    /,
    ranks: int,
    ranks_per_node: int,
    batch_size: int,
    order: OrderArguments,
    to: Path | None = None,
    node: int | None = None,
    everything: bool = False,
    epochs: int = 1,
    first_epoch: int = 0,
    manifest: Path | None = None,
    cache_size: str | None = None,
    bandwidth: str | None = None,
    threads: int = 8,
    partial: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Copy what a node will read in some epochs to its own storage, before the job.

    Which groups that are, and in which order, is computed from the sidecar alone.

    Parameters
    ----------
    data : DATA...
        The dataset, or its sidecar.
    ranks
        Processes that will read.
    ranks_per_node : R
        Of them on a node: node K has K*R to K*R+R-1.
    batch_size
        Samples per step and rank.
    to : DIR
        Where to: the Reader's cache, on a faster tier.
    node : K
        The node, from 0; in a job of SLURM the one that this runs on.
    everything
        All nodes, which share the directory.
    epochs
        Epochs to stage; with --mini-epochs, of those.
    first_epoch
        The first of them.
    manifest
        Write the ranges, in the order of their use.
    cache_size : SIZE
        The bytes that the cache may take: 1.6TB, or 75% of those that are free or its own.
    bandwidth : RATE
        Copy so much at most, such as 2GB/s.
    threads
        Threads that copy.
    partial
        Stage what is read first, if not all fits.
    dry_run
        Show what would be done, and stop.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep stage x.h5 -P 64 --ranks-per-node 8 -M 32 --node 3 --to /local/cache
    dsprep stage x.h5 -P 64 --ranks-per-node 8 -M 32 --to /local/cache -E 2 -n
    dsprep stage x.h5 -P 64 --ranks-per-node 8 -M 32 --all --manifest ranges.jsonl

    Notes
    -----
    In a job of SLURM, srun -N 8 -n 8 runs it once on each of 8 nodes, for the ranks of that node.
    dsprep.Reader("x.h5", 32, cache="/local/cache") with the same options of the order then opens
    the sidecar alone, and no data file, as long as it reads what was staged; it copies what else it
    needs when it needs it. The same command continues where one was killed.

    Without --to only the manifest is written: JSON, a line of about 70 bytes and the file's name
    per range, after one about the whole.

    Exit status: 0 done, 1 bad data or no room, 2 wrong usage.
    """
    from dsprep.verbs.stage import stage as run

    slurm = os.environ.get("SLURM_NODEID", "")
    if everything:
        node = None
    elif node is None and slurm.isdecimal():
        node = int(slurm)
    elif node is None and ranks > ranks_per_node > 0:
        fail(f"which of the {-(-ranks // ranks_per_node)} nodes? add --node K, or --all", 2)
    elif node is None:
        node = 0
    if to is None and manifest is None:
        fail("add --to DIR to stage, or --manifest FILE to write the ranges alone", 2)
    with byte_bar("stage", not json) as update:
        report = run(
            data,
            ranks,
            batch_size,
            to,
            ranks_per_node=ranks_per_node,
            node=node,
            epochs=epochs,
            first_epoch=first_epoch,
            cache_size=cache_size,
            bandwidth=bandwidth,
            threads=threads,
            partial=partial,
            manifest=manifest,
            dry_run=dry_run,
            progress=update,
            **order,
        )
    if json:
        print_json(report_json(report))
    else:
        (print_rows if dry_run else print_done)(rows(report, dry_run))
    end(report)


def rows(report: StageReport, dry_run: bool) -> list[tuple[str, str]]:
    """Return the report of staging for a person."""
    from dsprep.core.units import show_nbytes, show_time

    def span(word: str, numbers: range) -> str:
        last = numbers[-1]
        return f"{word} {last:,}" if len(numbers) == 1 else f"{word}s {numbers[0]:,} to {last:,}"

    share = f"{report.groups:,} of {report.total:,} groups"
    if report.groups != report.ranges:
        share += f" in {report.ranges:,} ranges"
    table = [
        ("dataset", str(report.path)),
        ("read by", f"{span('rank', report.ranks)} in {span('epoch', report.epochs)}"),
        ("needed", f"{show_nbytes(report.nbytes)}: {share}"),
    ]
    done = report.outcome
    if done is None:
        return table
    if done.there:
        table.append(("there", show_nbytes(done.there)))
    text = show_nbytes(done.copied)
    if done.copied and not dry_run:
        rate = show_nbytes(done.copied / max(report.seconds, 1e-9))
        text += f" in {show_time(report.seconds)}, {rate}/s"
    return [*table, ("to copy" if dry_run else "copied", text)]


def end(report: StageReport) -> None:
    """Note what is not as it should be, and leave the command if something was refused."""
    from dsprep.core.units import show_nbytes

    if report.sorted_by:
        note(
            f"samples are sorted by {report.sorted_by}, and only those that are read together are "
            "shuffled: see --buffers-mixed, or repack with --shuffle SEED"
        )
    done = report.outcome
    if done is not None and done.left_out:
        note(f"{show_nbytes(done.left_out)} find no room, and will be read from the dataset")
    for line in done.refused[1:10] if done is not None else ():
        note(line)
    if done is not None and done.refused:
        more = len(done.refused) - 1
        fail(f"{done.refused[0]}" + (f"; and {more:,} more" if more else ""), 1)


def report_json(report: StageReport) -> dict[str, Any]:
    """Return the report of staging for other programs."""
    content = {**vars(report), "path": str(report.path)}
    for name in ("ranks", "epochs"):
        content[name] = [content[name].start, content[name].stop]
    content["outcome"] = None if report.outcome is None else vars(report.outcome)
    return content
