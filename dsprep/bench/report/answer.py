"""The closing words of a report: what is needed, whether loading is the bottleneck, what helps.

Only what was measured is said, and no difference that the spread of repeats does not carry.
"""

from __future__ import annotations

import math

from dsprep.bench.evidence import DEVICE
from dsprep.bench.report import sweeping
from dsprep.bench.report.comparing import apart
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import digits, show_percent, show_seconds
from dsprep.bench.strategies import DUMMY, IN_PLACE, LIMIT, SETS, TIERED, TODAY, find
from dsprep.bench.task import Settings
from dsprep.core.units import show_nbytes
from dsprep.planning.published import parse_storage

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
    if report.swept:
        return tuple(filter(None, [sweeping.words(report)]))
    rows = {r.name: r for r in report.rows if not r.failure}
    today = way_of_today(report, rows)
    parts = [_need(report, rows), _bottleneck(report, rows, today), _help(rows, today)]
    return tuple(filter(None, parts))


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
        return min(named, key=lambda n: rows[n].median(RATE) or 0)
    ways = sorted(
        (*TODAY.get(str(report.dataset.get("format")), ()), IN_PLACE),
        key=lambda n: not _is_in_place(report, n),
    )
    return next((n for n in ways if n in rows), "")


def _is_in_place(report: BenchReport, name: str) -> bool:
    """Return whether a strategy read the dataset as it is, and no copy in another form."""
    forms = report.dataset.get("in_place")
    return forms is None or find(name).container in forms


def _need(report: BenchReport, rows: dict[str, Row]) -> str:
    """Return what the steps need, and what the storage gives."""
    limit = rows.get(LIMIT)
    source = "warm, from the page cache"
    if (storage := report.settings.get("storage")) is not None:
        words = parse_storage(str(storage)).words
        source = f"delayed by --storage {storage}, {words}: not figures of a storage here"
    elif report.settings.get("cold"):
        source = f"cold, {(limit.evidence if limit else '') or DEVICE}"
    alone = report.settings.get("storage_gb_per_second", 0.0)
    gives = 1e9 * (alone or (limit.median("gb_per_second") if limit else None) or 0.0)
    reads = f"Plain reads got {show_nbytes(gives)}/s here ({source})" if gives else ""
    nbytes = report.dataset.get("sample_nbytes", 0)
    ranks, batch = (report.settings.get(k, 1) for k in ("ranks", "batch_size"))
    seconds = Settings(compute=str(report.settings.get("compute", "none"))).step_seconds
    if not seconds or not nbytes:
        return reads and f"{reads}."
    rate = ranks * required_bandwidth(batch, nbytes, seconds)
    need = (
        f"A step of {show_seconds(seconds)} on {batch} samples of {show_nbytes(nbytes)} needs "
        f"{show_nbytes(rate)}/s{f' for all {ranks} ranks' * (ranks > 1)} (b*S/t)."
    )
    times = f", {digits(gives / rate)} times that" if alone else ""
    return f"{need} {reads}{times}." if reads else need


def _bottleneck(report: BenchReport, rows: dict[str, Row], today: str) -> str:
    """Return whether loading is the bottleneck today."""
    if not today:
        return "The way it is read without dsprep has no figures; --baseline NAME measures one."
    row = rows[today]
    how = f"Read by {today}, after a conversion to {find(today).container}"
    if _is_in_place(report, today):
        how = f"Read as it is today ({today})"
    busy, wait = row.median("utilisation_percent"), row.median(WAIT)
    epoch, skew = row.median("epoch_seconds"), row.median("skew_seconds") or 0.0
    if busy is None or wait is None or not epoch:
        return f"{how}, it gives {digits(row.median(RATE) or 0)} samples/s."
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
    faster.sort(key=lambda n: -(rows[n].median(RATE) or 0))
    if not faster:
        return f"No gain beyond the spread from {', '.join(ways)}."
    gains = [
        f"{n} {digits((rows[n].median(RATE) or 0) / (base.median(RATE) or math.inf))} times"
        for n in faster[:3]
    ]
    return f"More samples/s: {', '.join(gains)}."
