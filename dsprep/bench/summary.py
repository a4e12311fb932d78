"""From the measures of processes to a row: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dsprep.bench.evidence import COLD, Evidence, largest, weakest
from dsprep.bench.report.model import Measure, Row
from dsprep.bench.strategies import DUMMY, LIMIT, MET, find
from dsprep.bench.sums import Sums
from dsprep.bench.task import Drawn, Epoch, Failure, Result, Task


def row(task: Task, runs: Sequence[list[Result] | Failure], expected: Sums) -> Row:
    """Return the row of a strategy.

    Parameters
    ----------
    task
        What it was to do.
    runs
        Repeat by repeat: the results of its ranks, or why there are none.
    expected
        What the dataset adds up to.
    """
    name, done, problems = task.strategy, list[list[Result]](), list[str]()
    for run in runs:
        if isinstance(run, Failure):
            problems.append(f"failed: {run.reason}")
        else:
            done.append(run)
            problems += _problems(task, run, expected)
    if problems or not done:
        return Row(name, find(name).words, problems=tuple(dict.fromkeys(problems)))
    epochs = [each for run in done for each in zip(*(r.epochs for r in run), strict=True)]
    values: dict[str, list[float]] = {}
    for ranks in epochs:
        for key, value in _measures(task, ranks, expected).items():
            values.setdefault(key, []).append(value)
    values["peak_rss_bytes"] = [max(r.peak_rss for r in run) for run in done]
    measures = {key: spread(taken) for key, taken in values.items()}
    known = weakest([_evidence(task, ranks, expected) for ranks in epochs])
    return Row(
        name,
        find(name).words,
        measures,
        notes=_notes(task, measures, epochs, expected),
        runs=len(epochs),
        evidence=known.words if task.cold and known is not None and name != DUMMY else "",
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
    shares = []
    for one in rows:
        if key in one.measures and one.name != DUMMY:
            m = one.measures[key]
            share = Measure(*(100 * v / limit for v in (m.value, m.least, m.most)))
            one = replace(one, measures={**one.measures, "limit_percent": share})
        shares.append(one)
    return tuple(shares)


def _least(task: Task, expected: Sums) -> int:
    """Return the bytes to fetch for all values, but for the format's own; fewer if compressed."""
    return max(1, min(expected.nbytes, task.stored_nbytes or expected.nbytes))


def _times(task: Task) -> int:
    """Return how often every sample comes in an epoch."""
    return task.repeats if task.strategy == MET else 1


def _measures(task: Task, ranks: Sequence[Epoch], expected: Sums) -> dict[str, float]:
    """Return the measures of one epoch over all ranks."""
    seconds = max(1e-9, *(e.seconds for e in ranks))
    waits = np.concatenate([e.waits[:-1] or (0.0,) for e in ranks])
    measures = {
        "epoch_seconds": seconds,
        "exposed_seconds": max(e.exposed for e in ranks),
        "first_batch_seconds": max(e.waits[0] for e in ranks),
        "exposed_after_first_seconds": max(e.exposed - e.waits[0] for e in ranks),
        "wait_p50_seconds": float(np.percentile(waits, 50)),
        "wait_p99_seconds": float(np.percentile(waits, 99)),
        "samples_per_second": sum(e.samples for e in ranks) / seconds,
        "gb_per_second": expected.nbytes * _times(task) / seconds / 1e9,
        "read_calls": float(sum(e.counters.calls for e in ranks)),
        "asked_bytes": float(sum(e.counters.requested for e in ranks)),
        "major_faults": float(sum(e.counters.faults for e in ranks)),
        "context_switches": float(sum(e.counters.switches for e in ranks)),
        "cpu_seconds": sum(e.counters.cpu for e in ranks),
        "device_bytes": float(sum(e.counters.device for e in ranks)),
    }
    if task.step_seconds:
        measures["compute_seconds"] = float(np.mean([e.computing for e in ranks]))
        measures["utilisation_percent"] = 100 * measures["compute_seconds"] / seconds
    if drawn := [e.drawn for e in ranks if e.drawn is not None]:
        measures |= _tiers(drawn, seconds)
    if len(ranks) > 1:
        measures["skew_seconds"] = float(np.mean([e.skew for e in ranks]))
    return measures


def _tiers(drawn: Sequence[Drawn], seconds: float) -> dict[str, float]:
    """Return the measures of two tiers in an epoch, from what each rank counted."""
    read, cached = sum(d.read for d in drawn), sum(d.cached for d in drawn)
    copied = sum(d.copied for d in drawn)
    return {
        "hit_percent": 100 * cached / max(1, read),
        "drawn_gb_per_second": (read - cached + copied) / seconds / 1e9,
        "copied_bytes": float(copied),
        "stall_seconds": max(d.stalled for d in drawn),
    }


def _problems(task: Task, run: Sequence[Result], expected: Sums) -> list[str]:
    """Return why the numbers of a run mean nothing."""
    problems, entry = [], find(task.strategy)
    samples, total = _times(task) * expected.samples, _times(task) * expected.full % 2**64
    for ranks in zip(*(r.epochs for r in run), strict=True):
        came = sum(e.samples for e in ranks)
        if not entry.counted and came:
            continue  # a note says how many came
        if came != samples or any(e.excess for e in ranks):
            problems.append(f"wrong samples: {came:,} of {samples:,} in an epoch")
        if task.cold and task.strategy != DUMMY:
            problems += filter(None, [_evidence(task, ranks, expected).problem])
    full = [r.full for r in run if r.full is not None]
    if full and (sum(full) % 2**64, sum(r.checked for r in run)) != (total, samples):
        problems.append("wrong samples: the checksum of all that was delivered differs")
    return list(dict.fromkeys(problems))


def _evidence(task: Task, ranks: Sequence[Epoch], expected: Sums) -> Evidence:
    """Return what shows whether an epoch was cold."""
    device = sum(e.counters.device for e in ranks)
    return Evidence(largest([e.resident for e in ranks]), device, _least(task, expected))


def _notes(
    task: Task, measures: dict[str, Measure], epochs: Sequence[Sequence[Epoch]], expected: Sums
) -> tuple[str, ...]:
    notes = []
    came = min(sum(e.samples for e in ranks) for ranks in epochs)
    if not find(task.strategy).counted and came != expected.samples:
        notes.append(f"{came:,} of {expected.samples:,} samples came")
    share = measures["device_bytes"].value / _least(task, expected)
    is_warm = not task.cold and task.storage is None and task.strategy != DUMMY
    if is_warm and share > 1 - COLD and task.drop:  # none: in an object store
        notes.append(f"{share:.0%} of the bytes came from a device, not from the page cache")
    return tuple(notes)
