"""``dsprep bench storage``: what a storage gives, in figures that predict how datasets are read.

All is read from files that are written for it. One stream is one thread that reads parts of a large
file in random order, as a thread of `dsprep.Reader` reads its part of each group.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.bench import caches
from dsprep.bench.evidence import Evidence, server_words, weakest
from dsprep.bench.machine import describe
from dsprep.bench.scratch.folder import check_free
from dsprep.bench.scratch.planning import BUFFER
from dsprep.bench.storage import worker
from dsprep.bench.storage.worker import FILE_NBYTES, FILES, Done, Job
from dsprep.core.units import show_binary_nbytes, show_nbytes
from dsprep.errors import ExecutorError, UsageError
from dsprep.executors import run
from dsprep.planning.storage_figures import ReadSeconds, StorageFigures
from dsprep.reader.defaults import cores_of, threads_by_rule
from dsprep.reader.engines import Unavailable
from dsprep.reader.ranks import RankInfo
from dsprep.storage.trees import remove

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with phases done, of how many, and the words for what is being done."""

TOTAL, LEAST = 1 << 30, 128 << 20
"""Bytes that are written by default: of all workers, and of each at least."""

TRANSFERS = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes per read of which sequential and random ones are compared."""

SPREAD = 1 << 20
"""Bytes of the reads whose quantiles are reported."""

READS = 2048
"""Reads of one size that are timed, at most."""

STREAMS, MOST = 8, 1024
"""Streams of a worker: those that are tried by default, and at most."""

SATURATED = 0.25
"""Share of a read's time, with most streams, from which on it shows what all get together."""

FEWEST = 4
"""Reads of each stream, at least, where the file is large enough."""

ROUNDS = 3
"""How often all numbers of streams are measured, if there is time: others may use the storage."""

LEAD = 0.5
"""Seconds after which workers of an executor begin: so long may a task be on its way."""

WRITING, COMPARING, SPREADING, STREAMING, REST = 0.25, 0.03, 0.08, 0.35, 0.03
"""Shares of the time: of writing, each comparison, the spread, all streams, the other phases."""


@dataclass(frozen=True, kw_only=True)
class StoragePlan:
    """What will be measured; nothing has been written yet."""

    folder: Path
    scratch: Path  # where files are written, and which is removed in the end
    nbytes: int  # of the large file of each worker
    seconds: float  # for all of it
    streams: tuple[int, ...]  # numbers of streams, rising; each is measured
    workers: int = 1
    engine: str = "buffered"
    evict_server: str | None = None  # the command that drops the server's cache before each phase

    @property
    def needed(self) -> int:
        """Bytes that will be written, at most."""
        return self.workers * (self.nbytes + FILES * FILE_NBYTES)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures, and what is said about them."""

    figures: StorageFigures
    evidence: Evidence | None
    reads: int  # of which the spread was measured
    refused: str = ""  # why O_DIRECT does not work here

    @property
    def meaning(self) -> str:
        """What the figures mean for training, in a sentence."""
        figures = self.figures
        small, _, seconds = figures.transfers_measured[min(1, len(figures.transfers_measured) - 1)]
        scattered, alone = small / max(seconds, 1e-9), figures.streams_measured[0][1]
        words = (
            f"samples of {show_binary_nbytes(small)} read one at a time come at "
            f"{show_nbytes(scattered)}/s, groups at {show_nbytes(alone)}/s, "
            f"{alone / scattered:.3g} times that; "
        )
        total = figures.total_bytes_per_second
        if total is None:
            return words + "more readers than were tried may get still more"
        enough = max(1, round(total / figures.stream_bytes_per_second))
        readers = "a second thread brings" if enough == 1 else f"more than {enough} threads bring"
        return words + f"{readers} hardly more"

    @property
    def doubts(self) -> list[str]:
        """What a reader of the figures has to know."""
        if self.evidence is None or not self.evidence.problem:
            return []
        return [f"the figures are not those of cold reads: {_cached(self.evidence)}"]


def plan_storage(
    folder: Path,
    *,
    size: int | None = None,
    seconds: float = 45.0,
    streams: Sequence[int] = (),
    workers: int = 1,
    engine: str = "buffered",
    evict_server: str | None = None,
) -> StoragePlan:
    """Decide what to measure; nothing is written.

    Parameters
    ----------
    folder
        A directory on the storage.
    size
        Bytes of the large files of all workers together.
    seconds
        How long it may take, about.
    streams
        Numbers of streams; by default 1, 2, 4, ... up to 8 for each worker.
    workers
        Processes that read at the same time, each a file of its own.
    engine
        ``"buffered"`` or ``"direct"``; see `dsprep.reader.engines`.
    evict_server
        A command of the shell that drops the server's cache.

    Raises
    ------
    UsageError
        If the folder cannot be used, or a number makes no sense.
    TargetError
        If there is not enough space.
    """
    if not folder.is_dir():
        raise UsageError(
            "there is no such directory", where=folder, fix="name one on the storage to measure"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("the directory cannot be written to", where=folder, fix="name another one")
    most = workers * STREAMS
    counts = sorted({1, *(streams or (*(1 << k for k in range(most.bit_length())), most))})
    if counts[0] < 1 or counts[-1] > workers * MOST:
        raise UsageError(
            f"--streams {counts[0] if counts[0] < 1 else counts[-1]} makes no sense",
            expected=f"from 1 to {workers * MOST:,}",
        )
    nbytes = max(TOTAL // workers, LEAST) if size is None else size // workers
    if nbytes < SPREAD:
        raise UsageError(
            "--size is too small", expected=f"at least {show_binary_nbytes(workers * SPREAD)}"
        )
    plan = StoragePlan(
        folder=folder,
        scratch=folder.absolute() / f".dsprep-bench-{secrets.token_hex(4)}",
        nbytes=nbytes // SPREAD * SPREAD,
        seconds=seconds,
        streams=tuple(counts),
        workers=workers,
        engine=engine,
        evict_server=evict_server,
    )
    check_free(folder, plan.needed, fix="write less with --size, or name another directory")
    return plan


def measure_storage(
    plan: StoragePlan,
    executor: Executor | None = None,
    progress: Progress = lambda done, total, words: None,
) -> Measured:
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
    caches.drop_server(plan.evict_server)  # it fails before anything is written
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
    streams = np.array([p for p, _ in measured], float)
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
    done: int = 0  # phases
    evidence: list[Evidence] = field(default_factory=list)

    def run(self) -> Measured:
        """Do all, and return the figures."""
        plan, seconds, each = self.plan, self.plan.seconds, self.plan.seconds * COMPARING
        wrote = self._phase("writing", worker.write, seconds * WRITING, nbytes=plan.nbytes)
        self.nbytes = min(one.amount for one in wrote) // SPREAD * SPREAD
        compared = tuple(
            (size, self._mean(size, False, each), self._mean(size, True, each))
            for size in TRANSFERS
            if size <= self.nbytes
        )
        spread = self._read("spread", SPREAD, seconds * SPREADING, reads=None).times
        part = self._part(float(np.median(spread)), seconds * STREAMING / len(plan.streams))
        totals = self._totals(part, seconds * STREAMING)
        alone, together = fit(totals)
        direct, refused = self._direct(part, seconds * REST)
        opened = self._phase(
            "opening files", worker.open_files, seconds * REST, streams=plan.streams[-1]
        )
        evidence = weakest(self.evidence)
        nodes = len({one.node for one in wrote})
        figures = StorageFigures(
            call_seconds=compared[0][2],
            stream_bytes_per_second=alone,
            total_bytes_per_second=together,
            streams_measured=totals,
            seek_seconds=max(0.0, float(np.median([b - a for _, a, b in compared]))),
            read_seconds=ReadSeconds(*np.quantile(spread, (0.5, 0.99, 0.999)).tolist()),
            spread_nbytes=SPREAD,
            transfers_measured=compared,
            opens_per_second=sum(one.per_second for one in opened),
            direct=plan.engine == "direct",
            direct_bytes_per_second=direct,
            nodes=nodes,
            measured_on=datetime.now(UTC).isoformat(timespec="seconds"),
            obtained=self._obtained(nodes, part, evidence),
            **_mount(plan.folder),
        )
        return Measured(figures=figures, evidence=evidence, reads=len(spread), refused=refused)

    def _phase(
        self,
        words: str,
        function: Callable[[Job], Done],
        seconds: float,
        workers: int | None = None,
        streams: int = 1,  # of all of them
        **job: Any,
    ) -> list[Done]:
        """Have so many workers, by default all, do the same at the same time.

        A worker reads what the next one wrote, which its own node need not have in memory.
        """
        plan = self.plan
        self.progress(self.done, 4 + 2 * len(TRANSFERS) + ROUNDS * len(plan.streams), words)
        self.done += 1
        count = workers or plan.workers
        start = time.time() + LEAD if self.executor is not None and count > 1 else 0.0
        jobs = [
            Job(
                folder=plan.scratch / str((k + (function is not worker.write)) % plan.workers),
                seconds=seconds,
                streams=streams // count + (k < streams % count),
                start=start,
                tries=k == 0,
                **{"nbytes": self.nbytes, "engine": plan.engine, **job},
            )
            for k in range(count)
        ]
        if self.executor is None:
            return [function(one) for one in jobs]
        results = [result for _, result in run(self.executor, function, jobs)]
        if max(one.late for one in results) > max(LEAD, seconds / 2):
            raise ExecutorError(
                "the workers did not begin at the same time",
                found=f"one was {max(one.late for one in results):.1f} s late",
                fix="ask for no more --workers than there are, and see that their clocks agree",
            )
        return results

    def _read(self, words: str, size: int, seconds: float, **job: Any) -> Done:
        """Have one worker read its file."""
        caches.drop_server(self.plan.evict_server)
        return self._phase(words, worker.read, seconds, 1, transfer=size, **job)[0]

    def _mean(self, size: int, random: bool, seconds: float) -> float:
        words = f"{'random' if random else 'sequential'} reads of {show_binary_nbytes(size)}"
        return float(np.mean(self._read(words, size, seconds, random=random, reads=READS).times))

    def _part(self, seconds: float, limit: float) -> int:
        """Return the bytes of a stream's reads: of a Reader's thread, unless that takes too long.

        `seconds` is what the reads of the spread take.
        """
        threads = threads_by_rule(cores_of(RankInfo(0, 1, 0, 1, "")))
        share = self.nbytes * self.plan.workers // (FEWEST * self.plan.streams[-1])
        most = min(BUFFER // threads, share, int(SPREAD * limit / FEWEST / seconds))
        return max(SPREAD, most // SPREAD * SPREAD)

    def _totals(self, part: int, limit: float) -> tuple[tuple[int, float], ...]:
        """Return the bytes per second of each number of streams: medians of rounds, in turn."""
        counts, began, took = self.plan.streams, time.monotonic(), 0.0
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(ROUNDS):
            if took * (number + 1) > limit * max(number, 1):
                break
            for count in counts:
                rates[count].append(self._streams(count, part, limit / len(counts)))
            took = time.monotonic() - began
        return tuple((count, float(np.median(each))) for count, each in rates.items())

    def _streams(self, count: int, part: int, seconds: float) -> float:
        """Return the bytes per second of so many streams, spread over the workers."""
        caches.drop_server(self.plan.evict_server)
        workers = min(count, self.plan.workers)
        results = self._phase(
            f"{count} streams", worker.read, seconds, workers, streams=count, transfer=part
        )
        self.evidence.append(
            Evidence.of(
                [one.seen for one in results if one.seen is not None],
                device=sum(one.device for one in results),
                least=sum(one.amount for one in results),
                server=server_words(False, self.plan.evict_server),
            )
        )
        return part * sum(one.per_second for one in results)

    def _direct(self, part: int, seconds: float) -> tuple[float | None, str]:
        """Return the bytes per second of a stream of direct reads, or why there are none."""
        try:
            done = self._read("O_DIRECT", part, seconds, engine="direct")
        except Unavailable as error:
            return None, error.what
        return part * done.per_second, ""

    def _obtained(self, nodes: int, part: int, evidence: Evidence | None) -> str:
        """Return how the figures were obtained, in a line."""
        plan = self.plan
        words = "" if evidence is None else _cached(evidence) or f"cold ({evidence.words})"
        return (
            f"dsprep bench storage: {plan.engine} reads of {show_binary_nbytes(part)} a stream, "
            f"{plan.workers} worker{'s' * (plan.workers > 1)} on {nodes} node{'s' * (nodes > 1)}, "
            f"{show_binary_nbytes(self.nbytes)} each, written just before; {words}"
        )


def _cached(evidence: Evidence) -> str:
    """Return why reads were not cold, in words of this command; empty if they were."""
    return evidence.problem.replace("not cold:", "cached:").replace(" (--warm)", "")


def _mount(folder: Path) -> dict[str, str]:
    """Return the file system's type and options, and a name for people."""
    facts = describe(folder).get("file_system", {})
    kind, options = facts.get("type", ""), ",".join(facts.get("options", ()))
    point = f" at {facts['mount_point']}" if "mount_point" in facts else ""
    return {"name": f"{kind}{point}", "mount": f"{kind} ({options})" if options else kind}
