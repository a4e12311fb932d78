"""``dsprep bench storage``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dsprep.cli import options as opt
from dsprep.cli.bench.output import check_target
from dsprep.cli.report import note, print_json, print_rows, remark, run_bar
from dsprep.errors import TargetError, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from dsprep.bench.storage import Measured, StoragePlan

EPILOG = """
dsprep bench storage /scratch/me --out storage.json

dsprep bench storage /scratch/me --size 256MiB --seconds 15 --streams 1,2,4

dsprep bench storage /local/nvme --engine direct --json

srun -N 8 -n 9 dsprep bench storage /scratch/me --out storage.json

Exit status: 0 done, 1 no space or not measured, 2 wrong usage.
"""


@opt.command(EPILOG)
def storage(
    executor: Executor | None,
    folder: Annotated[Path, opt.argument("DIR", "A directory on the storage.")],
    out: Path | None = opt.value("FILE", "Write the figures as JSON, for dsprep plan read."),
    size: str | None = opt.value("SIZE", "Bytes to write, of all workers (1GiB, or 128MiB each)."),
    seconds: float = opt.value("S", "How long it may take, about.", default=45.0, min=1, max=86400),
    streams: str | None = opt.value(
        "N,N,...", "Threads that read at a time: by default 1,2,4,8, up to 8 for each worker."
    ),
    engine: Literal["buffered", "direct"] = opt.value(
        "KIND", "buffered or direct reads.", default="buffered"
    ),
    evict_server: str | None = opt.value("CMD", "Run before each phase: drops the server's cache."),
    workers: int | None = opt.value(
        "N", "Processes of --executor, by default all; each reads a file.", "--workers", "-j", min=1
    ),
    overwrite: bool = opt.switch("Replace FILE.", "--overwrite"),
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Measure in a minute what a storage gives: latency, streams, seeks, spread, opens.

    Reads files that it writes to DIR, and removes, with cold caches and as dsprep reads datasets. A
    stream is a thread that reads large parts; a rank of training has up to 4 of them.
    """
    from dsprep.bench.storage import measure_storage, plan_storage
    from dsprep.core.units import parse_nbytes
    from dsprep.sidecar.spec import write_json

    if out is not None:
        check_target("--out", out)
        if out.exists() and not overwrite:
            raise TargetError("it exists already", where=out, fix="add --overwrite to replace it")
    plan = plan_storage(
        folder,
        size=None if size is None else parse_nbytes(size),
        seconds=seconds,
        streams=_numbers(streams),
        workers=_workers(executor, workers, dry_run),
        engine=engine,
        evict_server=evict_server,
    )
    if dry_run:
        print_rows(_planned(plan))
        return
    remark("; ".join(words for _, words in _planned(plan)[1:3]))
    with run_bar() as update:
        measured = measure_storage(plan, executor, update)
    if json:
        print_json(measured.figures.to_json())
    else:
        print_rows(_rows(measured))
    for words in measured.doubts:
        note(words)
    if out is not None:
        write_json(measured.figures.to_json(), out)
        remark(f"wrote {out}")


def _numbers(text: str | None) -> list[int]:
    """Return the numbers of a list such as ``1,2,4``."""
    try:
        return [] if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--streams {text!r} is not a list", expected="such as 1,2,4") from None


def _workers(executor: Executor | None, workers: int | None, dry_run: bool) -> int:
    """Return how many processes measure: as many as asked, or as the executor has."""
    from dsprep.executors import workers_of

    if executor is not None:
        return workers or getattr(executor, "present", 0) or workers_of(executor)
    if (workers or 1) > 1 and not dry_run:
        raise UsageError(
            "--workers are processes", fix="add --executor processes, or name threads by --streams"
        )
    return workers or 1


def _planned(plan: StoragePlan) -> list[tuple[str, str]]:
    """Return what would be done."""
    from dsprep.bench.storage.worker import FILES
    from dsprep.core.units import show_binary_nbytes

    parts = [f"{show_binary_nbytes(plan.nbytes)} and {FILES:,} small files"]
    if plan.workers > 1:
        parts.append(f"by each of {plan.workers} workers")
    return [
        ("streams", f"{', '.join(map(str, plan.streams))}; {plan.engine} reads"),
        ("to write", f"writes up to {' '.join(parts)} to {plan.scratch}, removed in the end"),
        ("time", f"takes about {plan.seconds:g} s at most"),
    ]


def _rows(measured: Measured) -> list[tuple[str, str]]:
    """Return the figures for a person."""
    from dsprep.bench.report.tables import show_seconds
    from dsprep.core.units import show_binary_nbytes, show_nbytes

    figures = measured.figures
    rows = [
        ("storage", f"{figures.name}; {figures.mount}"),
        ("one read", f"{show_seconds(figures.call_seconds)} for {show_binary_nbytes(4096)}"),
    ]
    for count, rate in figures.streams_measured:
        each = f", {show_nbytes(rate / count)}/s each" if count > 1 else ""
        rows.append((f"{count} stream{'s' * (count > 1)}", f"{show_nbytes(rate)}/s{each}"))
    total = figures.total_bytes_per_second
    rows.append(
        (
            "all streams",
            f"not saturated by {figures.streams_measured[-1][0]}"
            if total is None
            else f"{show_nbytes(total)}/s at most (A), one alone "
            f"{show_nbytes(figures.stream_bytes_per_second)}/s (W)",
        )
    )
    for nbytes, ordered, random in figures.transfers_measured:
        words = f"{show_seconds(ordered)} in sequence, {show_seconds(random)} at random"
        rows.append((show_binary_nbytes(nbytes), words))
    rows.append(("seek", show_seconds(figures.seek_seconds or 0.0)))
    if figures.read_seconds is not None:
        p50, p99, p999 = map(show_seconds, figures.read_seconds)
        size = show_binary_nbytes(figures.spread_nbytes or 0)
        words = f"{size}: p50 {p50}, p99 {p99}, p99.9 {p999} of {measured.reads:,} reads"
        rows.append(("spread", words))
    direct = figures.direct_bytes_per_second
    return [
        *rows,
        ("opens", f"{figures.opens_per_second or 0:,.0f}/s"),
        ("O_DIRECT", measured.refused if direct is None else f"{show_nbytes(direct)}/s a stream"),
        ("obtained", figures.obtained),
        ("so", measured.meaning),
    ]
