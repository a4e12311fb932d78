"""``dsprep bench storage``: what a storage gives, in figures that predict how datasets are read.

All is read from files that are written for it. One stream is one thread that reads parts of a large
file in random order, as a thread of `dsprep.Reader` reads its part of each group.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dsprep.bench.evidence import Evidence, largest, weakest
from dsprep.bench.machine import describe
from dsprep.bench.reading import Progress
from dsprep.bench.scratch import BUFFER, check_free
from dsprep.bench.storage import worker
from dsprep.bench.storage.worker import FILE_NBYTES, FILES, Done, Job
from dsprep.core.units import show_binary_nbytes
from dsprep.errors import ExecutorError, UsageError
from dsprep.executors import run
from dsprep.planning.storage_figures import ReadSeconds, StorageFigures
from dsprep.reader.defaults import cores_of, threads_by_rule
from dsprep.reader.engines import Unavailable
from dsprep.reader.ranks import RankInfo
from dsprep.storage.trees import remove

T = TypeVar("T")

TOTAL, LEAST = 1 << 30, 128 << 20
"""Bytes that are written by default: of all workers, and of each at least."""

TRANSFERS = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes per read of which sequential and random ones are compared."""

SPREAD = 1 << 20
"""Bytes of the reads whose quantiles are reported; a large file has a multiple of it."""

STREAMS, MOST = 8, 1024
"""Streams of a worker: those that are tried by default, and at most."""

FEWEST, ROUNDS = 4, 3
"""Reads of each stream, at least, where the file is large enough; how often all numbers of streams
are measured, if there is time: others may use the storage."""

SATURATED = 0.25
"""Share of a read's time, with most streams, from which on it shows what all get together."""

LEAD = 0.5
"""Seconds after which workers of an executor begin: so long may a task be on its way."""

WRITING, COMPARING, SPREADING, STREAMING, REST = 0.25, 0.03, 0.08, 0.35, 0.03
"""Shares of the time: of writing, each comparison, the spread, all streams, the other phases."""


@dataclass(frozen=True, kw_only=True)
class StoragePlan:
    """The measurements to make; nothing has been written yet."""

    scratch: Path  # where files are written, and which is removed in the end
    nbytes: int  # of the large file of each worker
    seconds: float  # for all of it, about
    streams: Sequence[int]  # numbers of streams, rising; each is measured
    workers: int  # processes that read at the same time, each a file
    engine: str = "buffered"  # see `dsprep.reader.engines`


def plan_storage(
    folder: Path, size: int | None, streams: Sequence[int], workers: int, **how: Any
) -> StoragePlan:
    """Decide what to measure; nothing is written.

    Parameters
    ----------
    folder
        A directory on the storage.
    size
        Bytes of the large files of all workers together; None: 1 GiB, or 128 MiB for each.
    streams
        Numbers of streams; if there are none, 1, 2, 4, ... up to 8 for each worker.
    workers, how
        As in `StoragePlan`.

    Raises
    ------
    UsageError
        If there is no such directory, or a number makes no sense.
    TargetError
        If there is not enough space.
    """
    if not folder.is_dir():
        raise UsageError("there is no such directory", where=folder)
    counts = sorted({1, *(streams or [1 << k for k in range((workers * STREAMS).bit_length())])})
    nbytes = max(TOTAL // workers, LEAST) if size is None else size // workers
    if counts[-1] > workers * MOST or nbytes < SPREAD:
        expected = f"at most {MOST} streams and at least {SPREAD} bytes for each worker"
        raise UsageError("--streams is too large, or --size too small", expected=expected)
    needed = workers * (nbytes + FILES * FILE_NBYTES)
    check_free(folder, needed, fix="write less with --size, or name another directory")
    scratch = folder.absolute() / f".dsprep-bench-{secrets.token_hex(4)}"
    nbytes -= nbytes % SPREAD
    return StoragePlan(scratch=scratch, nbytes=nbytes, streams=counts, workers=workers, **how)


def measure(plan: StoragePlan, executor: Executor | None, progress: Progress) -> StorageFigures:
    """Write files, measure, and remove the files, also when interrupted.

    Parameters
    ----------
    plan
        What to do.
    executor
        Who does it, if `plan` has several workers; None: this process.
    progress
        Called before each phase.

    Raises
    ------
    DsprepError, OSError
        If files cannot be written or read, or the workers do not begin at the same time.
    """
    try:
        plan.scratch.mkdir()
        return _Measuring(plan, executor, progress).run()
    finally:
        remove(plan.scratch)


def fit(measured: Sequence[tuple[int, float]]) -> tuple[float, float | None]:
    """Return what a stream gets alone, and what all get together where they saturate, else None.

    Parameters
    ----------
    measured
        Pairs of a number of streams P and the bytes per second of all of them.

    Notes
    -----
    Least squares of relative errors in ``1/w = 1/W + (P - 1)/A``, w being what each stream gets:
    linear in 1/W and 1/A. With 1/W - 1/A for 1/W it is S000's ``1/w = 1/W + P/A``, in which W would
    be no bandwidth that can be measured.
    """
    streams = np.array([count for count, _ in measured], float)
    each = np.array([rate for _, rate in measured]) / streams
    columns = np.stack([np.ones_like(each), streams - 1], axis=1)
    (alone, slower), *_ = np.linalg.lstsq(columns * each[:, None], np.ones_like(each), rcond=None)
    part = slower * (streams.max() - 1)  # 0 of one stream: such a fit is the shortest one
    if alone <= 0 or part < SATURATED * (alone + part):
        return float((each**2).sum() / each.sum()), None
    return float(1 / alone), float(1 / slower)


@dataclass
class _Measuring:
    """The phases, in turn."""

    plan: StoragePlan
    executor: Executor | None
    progress: Progress
    nbytes: int = 0  # of each large file, as far as time allowed
    nodes: int = 0  # that were seen
    evidence: list[Evidence] = field(default_factory=list)

    def run(self) -> StorageFigures:
        """Do all, and return the figures."""
        plan, transfers = self.plan, list[tuple[int, float, float]]()
        wrote = self.phase(worker.write, WRITING, plan.workers, plan.workers, nbytes=plan.nbytes)
        self.nbytes = min(wrote) // SPREAD * SPREAD
        for size in TRANSFERS[: np.searchsorted(TRANSFERS, self.nbytes, "right")]:
            times = [self.read(size, COMPARING, random=order)[0].times for order in (False, True)]
            transfers.append((size, float(np.mean(times[0])), float(np.mean(times[1]))))
        spread = self.read(SPREAD, SPREADING)[0].times
        quantiles = ReadSeconds(*np.quantile(spread, (0.5, 0.99, 0.999)).tolist())
        part = self.part(quantiles.p50)
        totals, ratio = self.totals(part)
        alone, together = fit(totals)
        direct = None
        with suppress(Unavailable):
            direct = part * self.read(part, REST, engine="direct")[0].per_second
        opened = self.phase(worker.open_files, REST, plan.workers, plan.streams[-1])
        evidence = weakest(self.evidence)
        assert evidence is not None  # something was read
        problem = evidence.problem.replace("not cold:", "cached:").replace(" (--warm)", "")
        cold = problem or f"cold: {evidence.words}"
        facts = describe(plan.scratch).get("file_system", {})
        return StorageFigures(
            name=" at ".join(filter(None, (facts.get("type"), facts.get("mount_point")))),
            call_seconds=transfers[0][2],
            stream_bytes_per_second=alone,
            total_bytes_per_second=together,
            streams_measured=totals,
            rounds_ratio=ratio,
            seek_seconds=max(0.0, float(np.median([b - a for _, a, b in transfers]))),
            transfers_measured=tuple(transfers),
            read_seconds=quantiles,
            spread_nbytes=SPREAD,
            opens_per_second=sum(one.per_second for one in opened),
            direct=plan.engine == "direct",
            direct_bytes_per_second=direct,
            nodes=self.nodes,
            mount=f"{facts.get('type', '')} {','.join(facts.get('options', ()))}".strip(),
            measured_on=datetime.now(UTC).isoformat(timespec="seconds"),
            obtained=f"bench storage, {plan.engine} reads of {show_binary_nbytes(part)} by each "
            f"stream, spread of {len(spread):,}; workers: {plan.workers}, nodes: {self.nodes}, "
            f"files of {show_binary_nbytes(self.nbytes)} written just before; {cold}",
        )

    def phase(
        self, function: Callable[[Job], T], share: float, workers: int, streams: int, **job: Any
    ) -> list[T]:
        """Have so many workers do the same at the same time, for a share of it all.

        A worker reads what the next one wrote, which its own node need not have in memory.
        """
        plan, seconds = self.plan, self.plan.seconds * share
        self.progress(len(self.evidence), 10 + ROUNDS * len(plan.streams), function.__name__)
        start = time.time() + LEAD if self.executor is not None and workers > 1 else 0.0
        how = {"seconds": seconds, "start": start, "nbytes": self.nbytes, "engine": plan.engine}
        jobs = [
            Job(
                folder=plan.scratch / str((k + (function is not worker.write)) % plan.workers),
                streams=streams // workers + (k < streams % workers),
                **{**how, **job},
            )
            for k in range(workers)
        ]
        if self.executor is None:
            return [function(one) for one in jobs]
        results = [result for _, result in run(self.executor, function, jobs)]
        if max(getattr(one, "late", 0.0) for one in results) > max(LEAD, seconds / 2):
            fix = "ask for no more --workers than there are, and see that their clocks agree"
            raise ExecutorError("the workers did not begin at the same time", fix=fix)
        return results

    def read(self, size: int, share: float, streams: int = 1, **job: Any) -> list[Done]:
        """Read by so many streams, spread over the workers."""
        workers = min(streams, self.plan.workers)
        results = self.phase(worker.read, share, workers, streams, transfer=size, **job)
        device = sum(one.device for one in results)
        needed = size * sum(len(one.times) for one in results)
        self.evidence.append(Evidence(largest([one.resident for one in results]), device, needed))
        self.nodes = max(self.nodes, len({one.node for one in results}))
        return results

    def part(self, seconds: float) -> int:
        """Return the bytes of a stream's reads: of a Reader's thread, unless that takes too long.

        `seconds` is what the reads of the spread take.
        """
        plan, threads = self.plan, threads_by_rule(cores_of(RankInfo(0, 1, 0, 1, "")))
        limit = plan.seconds * STREAMING / len(plan.streams) / FEWEST
        share = self.nbytes * plan.workers // (FEWEST * plan.streams[-1])
        largest_part = min(BUFFER // threads, share, int(SPREAD * limit / seconds))
        return max(SPREAD, largest_part // SPREAD * SPREAD)

    def totals(self, part: int) -> tuple[tuple[tuple[int, float], ...], float | None]:
        """Return the bytes per second of each number of streams: medians of rounds, in turn.

        And the largest ratio between two rounds of one number; None if there was one round.
        """
        rates: dict[int, list[float]] = {count: [] for count in self.plan.streams}
        began, limit = time.monotonic(), self.plan.seconds * STREAMING
        for number in range(1, ROUNDS + 1):
            for count, each in rates.items():
                results = self.read(part, STREAMING / len(rates), count)
                each.append(part * sum(one.per_second for one in results))
            if (time.monotonic() - began) * (1 + 1 / number) > limit:
                break
        ratio = max(max(each) / min(each) for each in rates.values()) if number > 1 else None
        return tuple((count, float(np.median(each))) for count, each in rates.items()), ratio
