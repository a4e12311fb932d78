"""The closing words of a report: what is needed, whether loading is the bottleneck, what helps.

Only what was measured is said, and no difference that the spread of repeats does not carry.
"""

from __future__ import annotations

import math

from dsprep.bench.evidence import DEVICE
from dsprep.bench.report import sweeping, tiering
from dsprep.bench.report.comparing import apart
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import digits, number, show_percent, show_seconds
from dsprep.bench.strategies import DUMMY, IN_PLACE, LIMIT, PLAINLY, SETS, TIERED, TODAY, find
from dsprep.bench.task import parse_compute
from dsprep.core.units import show_nbytes

MEASURES = (LIMIT, DUMMY, "group", "group-db", *SETS["lmdbio"])
"""Strategies that only serve as measures: none of them is advised."""

OURS = ("provenance", "dsprep", *TIERED, *MEASURES)
"""Strategies by which nobody reads a dataset without dsprep."""

BUSY = 90.0
"""Percent of utilisation that MLPerf Storage asks of most workloads."""

RATE, WAIT = "samples_per_second", "exposed_seconds"


def required_bandwidth(batch: float, sample_nbytes: float, step_seconds: float) -> float:
    """Return the bytes per second that one rank needs for its steps never to wait: b * S / t.

    Source: CosmoFlow at scale (SC18), whose figures are 62 MB/s for b=1, S=8 MB, t=0.129 s.

    >>> round(required_bandwidth(1, 8e6, 0.129) / 1e6)
    62
    """
    return batch * sample_nbytes / step_seconds if step_seconds > 0 else math.inf


def answer(report: BenchReport) -> tuple[str, ...]:
    """Return the closing words, paragraph by paragraph."""
    rows = {r.name: r for r in report.rows if not r.failure}
    if report.sweep is not None:
        parts = [" ".join(sweeping.words(report.sweep))]
    elif report.settings.get("tier_bandwidth"):  # what is measured is not this storage
        parts = []
    else:
        today = way_of_today(report, rows)
        parts = [_need(report, rows), _bottleneck(report, rows, today), _help(rows, today)]
    return tuple(p for p in (*parts, tiering.words(report), _requests(report, rows)) if p)


def way_of_today(report: BenchReport, rows: dict[str, Row]) -> str:
    """Return the strategy by which the dataset is read without dsprep; empty if none was measured.

    It is the one that the user gives; else the slowest of those that were asked for by name; else
    the plainest that was measured.
    """
    settings = report.settings
    if baseline := settings.get("baseline"):
        return str(baseline) if baseline in rows else ""
    named = [str(n) for n in settings.get("named", ()) if n in rows and n not in OURS]
    if named:
        return min(named, key=lambda n: rows[n].value(RATE) or 0)
    plain = TODAY.get(str(report.dataset.get("format")), ())
    here = any(_is_in_place(report, n) for n in plain)
    ways = (*plain, IN_PLACE) if here else (IN_PLACE, *plain)
    return next((n for n in ways if n in rows), "")


def _is_in_place(report: BenchReport, name: str) -> bool:
    """Return whether a strategy read the dataset as it is, and no copy in another form."""
    forms = report.dataset.get("in_place")
    return forms is None or find(name).container in forms


def _need(report: BenchReport, rows: dict[str, Row]) -> str:
    """Return what the steps need, and what the storage gives."""
    limit = rows.get(LIMIT)
    source = "warm, from the page cache"
    if report.settings.get("cold"):
        source = f"cold, {(limit.evidence if limit else '') or DEVICE}"
    alone = number(report.settings, "storage_gb_per_second", 0)
    gives = alone or (None if limit is None else limit.value("gb_per_second"))
    reads = f"Plain reads got {show_nbytes(1e9 * gives)}/s here ({source})." if gives else ""
    times = sorted(t for r in rows.values() if (t := r.value("compute_seconds")))
    nbytes = number(report.dataset, "sample_nbytes", 0)
    if not times or not nbytes:
        return reads
    ranks = max(1, int(number(report.settings, "ranks", 1)))
    batch = max(1, int(number(report.settings, "batch_size", 1)))
    share = -(-int(number(report.dataset, "samples", 1)) // ranks)
    took = times[len(times) // 2] / max(1, -(-share // batch))
    kind, seconds = parse_compute(str(report.settings.get("compute", "none")))
    step = seconds if kind == "wait" else took
    words = show_seconds(step)
    words += f" (here {show_seconds(took)}: the machine is busy)" if took > 1.1 * step else ""
    rate = required_bandwidth(batch, nbytes, step)
    every = f" per rank, {show_nbytes(ranks * rate)}/s for all {ranks} ranks" if ranks > 1 else ""
    need = (
        f"A step of {words} on {batch} samples of {show_nbytes(nbytes)} needs "
        f"{show_nbytes(rate)}/s{every} (b*S/t)."
    )
    if not gives:
        return need
    times_needed = f"{reads[:-1]}, {digits(1e9 * gives / (ranks * rate))} times that."
    return f"{need} {times_needed if alone else reads}"


def _bottleneck(report: BenchReport, rows: dict[str, Row], today: str) -> str:
    """Return whether loading is the bottleneck today."""
    if not today:
        return "The way it is read without dsprep has no figures; --baseline NAME measures one."
    row = rows[today]
    how = f"Read by {today}, after a conversion to {find(today).container}"
    if _is_in_place(report, today):
        plainly = PLAINLY.get(str(report.dataset.get("format")), "sample by sample")
        how = f"Read as it is today ({today}{f': {plainly}' if today == IN_PLACE else ''})"
    busy, wait = row.value("utilisation_percent"), row.value(WAIT)
    epoch, skew = row.value("epoch_seconds"), row.value("skew_seconds") or 0.0
    if busy is None or wait is None or not epoch:
        share = row.value("limit_percent")
        limit = "" if share is None else f", {show_percent(share)} % of the limit"
        return f"{how}, it gives {digits(row.value(RATE) or 0)} samples/s{limit}."
    verdict = "loading is the bottleneck"
    if busy >= BUSY:
        verdict = "loading is not the bottleneck"
    elif skew > wait or wait < (1 - BUSY / 100) * epoch:
        verdict = "loading is not what holds it up"
    return (
        f"{how}, the accelerator computes {show_percent(busy)} % of the time and waits for data "
        f"for {show_seconds(wait)} of an epoch of {show_seconds(epoch)}: {verdict}."
    )


def _help(rows: dict[str, Row], today: str) -> str:
    """Return which measured ways are faster than today's, beyond the spread."""
    base = rows.get(today)
    ways = [n for n in rows if n not in (today, *MEASURES)]
    if base is None or not ways:
        return ""
    faster = [n for n in ways if apart(base.measures[RATE], rows[n].measures[RATE]) > 0]
    faster.sort(key=lambda n: -(rows[n].value(RATE) or 0))
    if not faster:
        return f"No gain beyond the spread from {', '.join(ways)}."
    gains = [
        f"{n} {digits((rows[n].value(RATE) or 0) / (base.value(RATE) or math.inf))} times"
        for n in faster[:3]
    ]
    return f"More samples/s: {', '.join(gains)}."


def _requests(report: BenchReport, rows: dict[str, Row]) -> str:
    """Return what an epoch asks an object store for: what is paid by the request."""
    if not report.dataset.get("stored"):
        return ""
    asked = [
        f"{name} {r.value('read_calls'):,.0f} ({show_nbytes(r.value('asked_bytes') or 0)})"
        for name, r in rows.items()
        if r.value("read_calls")
    ]
    return f"Requests of an epoch to the store: {', '.join(asked)}."
