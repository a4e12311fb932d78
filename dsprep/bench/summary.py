"""From the measures of processes to a row: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsprep.bench import tiering
from dsprep.bench.evidence import COLD, Evidence, largest, weakest
from dsprep.bench.report.model import Measure, Row
from dsprep.bench.strategies import ABSENT, DUMMY, LIMIT, find
from dsprep.bench.sums import Sums
from dsprep.bench.task import Epoch, Failure, Result


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """What is known of all runs of a strategy."""

    expected: Sums  # what the dataset adds up to
    payload: int  # bytes of its values
    cold: bool  # whether every epoch was to begin without anything in the page cache
    computes: bool  # whether steps do work
    checked: bool = True  # whether all that was delivered was compared
    # bytes of the files that the strategy reads, fewer where they are compressed; None: as many
    stored: int | None = None
    times: int = 1  # that every sample comes in an epoch
    capacity: float | None = None  # bytes per second of the capacity tier, if it is throttled
    remark: str = ""  # on how tiers of storage were made

    @property
    def least(self) -> int:
        """Bytes that have to be fetched in order to read all values, but for the format's own."""
        return max(1, self.payload if not self.stored else min(self.payload, self.stored))


def row(name: str, runs: Sequence[list[Result] | Failure], facts: StrategyFacts) -> Row:
    """Return the row of a strategy.

    Parameters
    ----------
    name
        Which one.
    runs
        Repeat by repeat: the results of its ranks, or why there are none.
    facts
        About the runs.
    """
    words = find(name).words
    problems: list[str] = []
    done: list[list[Result]] = []
    for run in runs:
        if isinstance(run, Failure):
            absent = run.reason.startswith(ABSENT)
            problems.append(run.reason if absent else f"failed: {run.reason}")
        else:
            done.append(run)
            problems += _problems(name, run, facts)
    if problems or not done:
        return Row(name, words, problems=tuple(dict.fromkeys(problems)))
    epochs = [each for run in done for each in zip(*(r.epochs for r in run), strict=True)]
    evidence = [_evidence(ranks, facts) for ranks in epochs]
    taken: dict[str, list[float]] = {}
    for ranks in epochs:
        for key, value in _measures(ranks, facts).items():
            taken.setdefault(key, []).append(value)
    taken["peak_rss_bytes"] = [max(r.peak_rss for r in run) for run in done]
    measures = {key: spread(values) for key, values in taken.items()}
    known = weakest([e for e in evidence if e is not None]) if name != DUMMY else None
    return Row(
        name,
        words,
        measures,
        notes=_notes(name, measures, epochs, facts),
        runs=len(epochs),
        evidence="" if known is None else known.words,
    )


def spread(values: Sequence[float]) -> Measure:
    """Return the median of values, and the least and the most of them."""
    return Measure(float(np.median(values)), float(min(values)), float(max(values)))


def against_limit(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with their share of the rate of the limit, if that is known."""
    key = "samples_per_second"
    limit = next((r.median(key) for r in rows if r.name == LIMIT), None)
    if not limit:
        return tuple(rows)
    notes = []
    for one in rows:
        if key in one.measures and one.name != DUMMY:
            m = one.measures[key]
            share = Measure(*(100 * v / limit for v in (m.value, m.least, m.most)))
            one = replace(one, measures={**one.measures, "limit_percent": share})
        notes.append(one)
    return tuple(notes)


def _measures(ranks: Sequence[Epoch], facts: StrategyFacts) -> dict[str, float]:
    """Return the measures of one epoch over all ranks."""
    seconds = max(e.seconds for e in ranks)
    waits = np.concatenate([e.waits[:-1] or (0.0,) for e in ranks])
    measures = {
        "epoch_seconds": seconds,
        "exposed_seconds": max(e.exposed for e in ranks),
        "first_batch_seconds": max(e.waits[0] for e in ranks),
        "exposed_after_first_seconds": max(e.exposed - e.waits[0] for e in ranks),
        "wait_p50_seconds": float(np.percentile(waits, 50)),
        "wait_p99_seconds": float(np.percentile(waits, 99)),
        "samples_per_second": sum(e.samples for e in ranks) / max(seconds, 1e-9),
        "gb_per_second": facts.payload * facts.times / max(seconds, 1e-9) / 1e9,
        "read_calls": float(sum(e.counters.calls for e in ranks)),
        "asked_bytes": float(sum(e.counters.asked for e in ranks)),
        "major_faults": float(sum(e.counters.faults for e in ranks)),
        "context_switches": float(sum(e.counters.switches for e in ranks)),
        "cpu_seconds": sum(e.counters.cpu for e in ranks),
        "device_bytes": float(sum(e.counters.device for e in ranks)),
    }
    if facts.computes:
        computing = float(np.mean([e.computing for e in ranks]))
        measures["compute_seconds"] = computing
        measures["utilisation_percent"] = 100 * computing / max(seconds, 1e-9)
    drawn = [e.drawn for e in ranks if e.drawn is not None]
    if drawn:
        measures |= tiering.measures(drawn, seconds)
    if facts.capacity is not None and facts.computes:
        consumed = facts.payload * facts.times / measures["compute_seconds"]
        measures |= tiering.model(consumed, facts.capacity, facts.times)
    if len(ranks) > 1:
        measures["skew_seconds"] = float(np.mean([e.skew for e in ranks]))
    return measures


def _problems(name: str, run: Sequence[Result], facts: StrategyFacts) -> list[str]:
    """Return why the numbers of a run mean nothing."""
    problems = []
    expected, times, entry = facts.expected, facts.times, find(name)
    for ranks in zip(*(r.epochs for r in run), strict=True):
        samples = sum(e.samples for e in ranks)
        requested = times * expected.samples
        if not entry.counted and samples:
            continue  # a note says how many came
        if samples != requested or any(e.excess for e in ranks):
            problems.append(f"wrong samples: {samples:,} of {requested:,} in an epoch")
        if facts.cold and name != DUMMY:
            evidence = _evidence(ranks, facts)
            problems += [evidence.problem] if evidence is not None and evidence.problem else []
    full = [r.full for r in run if r.full is not None]
    checked = sum(full) % 2**64, sum(r.checked for r in run)
    if full and checked != (times * expected.full % 2**64, times * expected.samples):
        problems.append("wrong samples: the checksum of all that was delivered differs")
    return list(dict.fromkeys(problems))


def _evidence(ranks: Sequence[Epoch], facts: StrategyFacts) -> Evidence | None:
    """Return what shows whether an epoch was cold; None if it was not meant to be."""
    if not facts.cold:
        return None
    device = sum(e.counters.device for e in ranks)
    return Evidence(largest([e.held for e in ranks]), device, facts.least)


def _notes(
    name: str, measures: dict[str, Measure], epochs: Sequence[Sequence[Epoch]], facts: StrategyFacts
) -> tuple[str, ...]:
    notes = [facts.remark] if facts.remark else []
    entry = find(name)
    came = min(sum(e.samples for e in ranks) for ranks in epochs)
    if not entry.counted and came != facts.expected.samples:
        notes.append(f"{came:,} of {facts.expected.samples:,} samples came")
    device = measures["device_bytes"].value / facts.least if not facts.cold else 0.0
    if device > 1 - COLD and name != DUMMY and facts.stored != 0:  # 0: in an object store
        notes.append(f"{device:.0%} of the bytes came from a device, not from the page cache")
    if not facts.checked and entry.delivers:
        notes.append("what it delivered was not compared in full (--no-check)")
    return tuple(notes)
