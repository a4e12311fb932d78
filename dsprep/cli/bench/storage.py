"""``dsprep bench storage``."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from dsprep.cli.bench.output import check_new
from dsprep.cli.command import command
from dsprep.cli.report import print_json, print_rows, remark, run_bar
from dsprep.errors import UsageError, require

if TYPE_CHECKING:
    from dsprep.planning.storage_figures import StorageFigures


@command
def storage(
    folder: Path,
    /,
    out: Path | None = None,
    size: str | None = None,
    seconds: float = 45.0,
    streams: str | None = None,
    engine: str = "buffered",
    workers: int | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Measure what a storage gives.

    In less than a minute: the time of a call, the bandwidth of 1, 2, 4, ... streams, the cost of
    random reads, the spread, and opens per second. It reads files that it writes to DIR, and
    removes, with cold caches and as dsprep reads datasets. A stream is a thread that reads large
    parts; a rank of training has up to 4 of them.

    Parameters
    ----------
    folder : DIR
        A directory on it.
    out
        Write the figures as JSON, for dsprep plan.
    size : SIZE
        Bytes to write, of all workers (1GiB, or 128MiB each).
    seconds : S
        Seconds that it may take, about.
    streams : N,N,...
        Threads that read (1,2,4,8, of each worker).
    engine : buffered|direct
        The engine that reads.
    workers
        Processes that read (all), each a file.
    executor : KIND
        processes, mpi or dask, as of dsprep convert.
    overwrite
        Replace FILE.
    dry_run
        Show what would be done, and stop.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep bench storage /scratch/me --out storage.json
    dsprep bench storage /local/nvme --size 256MiB --streams 1,2,4 --json

    Notes
    -----
    In a job of SLURM, srun -n 9 has 8 processes read, on the nodes of the job.

    Exit status: 0 done, 1 no space or not measured, 2 wrong usage.
    """
    from dsprep.bench.report import sweeping
    from dsprep.bench.storage import measure, plan_storage
    from dsprep.bench.storage.worker import FILES
    from dsprep.core.units import as_nbytes, show_binary_nbytes
    from dsprep.executors import workers_of
    from dsprep.reader.engines import NAMES
    from dsprep.reader.options import check_word
    from dsprep.sidecar.spec import write_json

    check_new(out, overwrite, "--out")
    check_word("engine", engine, NAMES)
    require(1 <= seconds <= 86400, UsageError, f"--seconds {seconds}", expected="1 to 86400")
    if executor is not None:
        workers = workers or getattr(executor, "present", 0) or workers_of(executor)
    elif (workers or 1) != 1 and not dry_run:
        raise UsageError("--workers are processes", fix="add --executor, or take --streams")
    counts = {sweeping.parse_count(n.strip()) for n in streams.split(",")} if streams else ()
    how = {"seconds": seconds, "engine": engine}
    plan = plan_storage(
        folder, None if size is None else as_nbytes(size), sorted(counts), workers or 1, **how
    )
    written = f"{show_binary_nbytes(plan.nbytes)} and {FILES:,} small files"
    written += f" by each of {plan.workers} workers" if plan.workers > 1 else ""
    words = f"up to {written} in {plan.scratch}, removed in the end; about {seconds:g} s"
    if dry_run:
        print_rows([("writes", words), ("streams", ", ".join(map(str, plan.streams)))])
        return
    remark(f"writes {words}")
    with run_bar() as update:
        figures = measure(plan, executor, update)
    if json:
        print_json(figures.to_json())
    else:
        print_rows(_rows(figures))
    if out is not None:
        write_json(figures.to_json(), out)
        remark(f"wrote {out}")


def _rows(figures: StorageFigures) -> list[tuple[str, str]]:
    """Return the figures for a person, and what they mean for training."""
    from dsprep.bench.report.tables import show_seconds
    from dsprep.core.units import show_binary_nbytes, show_nbytes

    rows = [("storage", f"{figures.name}, {figures.mount}")]
    for n, total in figures.streams_measured:
        rows.append((f"streams: {n}", f"{show_nbytes(total)}/s, {show_nbytes(total / n)}/s each"))
    for size, *times in figures.transfers_measured:
        words = "{} in sequence, {} at random".format(*map(show_seconds, times))
        rows.append((f"{show_binary_nbytes(size)} reads", words))
    if figures.rounds_ratio is not None:
        words = f"the same reads took up to {figures.rounds_ratio:.3g} times as long in one as in"
        rows.append(("rounds", f"{words} another"))
    spread = ", ".join(map(show_seconds, figures.read_seconds or ()))
    single, alone = 4096 / figures.call_seconds, figures.streams_measured[0][1]
    most, direct = figures.total_bytes_per_second, figures.direct_bytes_per_second
    limit = f"all together get up to {show_nbytes(most)}/s" if most else "more get still more"
    if direct and direct > 1.5 * alone:
        limit += f"; engine='direct' gives a thread {direct / alone:.3g} times as much"
    meaning = (
        f"a thread gets {show_nbytes(single)}/s by random reads of 4 KiB, {show_nbytes(alone)}/s "
        f"by parts of groups, {alone / single:,.0f} times that; {limit}"
    )
    return [
        *rows,
        ("seek", show_seconds(figures.seek_seconds or 0.0)),
        ("spread", f"{spread}: p50, p99, p99.9 of 1 MiB"),
        ("opens", f"{figures.opens_per_second or 0:,.0f}/s"),
        ("O_DIRECT", f"{show_nbytes(direct)}/s, 1 stream" if direct else "refused"),
        ("obtained", figures.obtained),
        ("so", meaning),
    ]
