"""The closing words of a report: is loading the bottleneck, and what would help.

Only what was measured is said, and no difference that the spread of repeats does not carry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from dsprep.bench.evidence import (
    ANY,
    DEVICE,
    OVER,
    SERVER_UNKNOWN,
    SERVER_WARM,
    UNKEPT,
    UNKNOWN,
)
from dsprep.bench.report import sweeping
from dsprep.bench.report.comparing import apart, flat
from dsprep.bench.report.model import Report, Row
from dsprep.bench.report.tables import digits, number, show_seconds
from dsprep.bench.strategies import DUMMY, LIMIT, SETS
from dsprep.write.plan import show_nbytes

TODAY = {
    "hdf5": ("h5py", "torch", "tf", "tf-prefetch"),
    "lmdb": ("lmdb-get", "lmdb-cursor"),
    "tfrecord": ("tfrecord",),
    "zarr": ("zarr",),
}
"""How a dataset of a format is read without dsprep; the first that was measured counts."""

NO_PRODUCT = ("group", "group-db", *SETS["lmdbio"])
"""Ways that are there to be measured, so that none of them is advised."""

OURS = ("provenance", "dsprep", LIMIT, DUMMY, *NO_PRODUCT)
"""Ways that nobody reads a dataset by without dsprep."""

BUSY = 90.0
"""Percent of utilisation that MLPerf Storage asks of most workloads."""

PARALLEL = (
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "ceph",
    "panfs",
    "wekafs",
    "pvfs",
    "orangefs",
    "daos",
)
RATE, WAIT = "samples_per_second", "exposed_seconds"

_OVERLAP, _GRANULARITY = "overlap", "larger reads"
TABLE_I = (
    ("tf", "tf-prefetch", _OVERLAP),
    ("tf", "group", _GRANULARITY),
    ("tf-prefetch", "group-db", _GRANULARITY),
    ("group", "group-db", _OVERLAP),
)
"""Pairs of the paper's two by two ways of reading (one sample or many per read, overlapped or not):
the second waits less. TF-Pre against Async I/O is none: it goes either way in the paper too."""

WHY_NOT = {
    "lmdbio-lmm": "LMM relieves many processes that share a mapping, so it needs many ranks",
    "lmdbio-dm": "DM pays with several nodes",
    "lmdbio-coal": "a local disk's read-ahead joins small reads already",
    "lmdbio-stag": "staggering needs storage servers at which readers queue",
}


def required_bandwidth(batch: float, sample_nbytes: float, step_seconds: float) -> float:
    """Return the bytes per second that one rank needs for its steps never to wait: b * S / t.

    Source: CosmoFlow at scale (SC18), whose figures are 62 MB/s for b=1, S=8 MB, t=0.129 s.

    >>> round(required_bandwidth(1, 8e6, 0.129) / 1e6)
    62
    """
    return batch * sample_nbytes / step_seconds if step_seconds > 0 else math.inf


def answer(report: Report) -> tuple[str, ...]:
    """Return the closing words, paragraph by paragraph."""
    if report.sweep is not None:
        parts = [" ".join(sweeping.words(report.sweep)), _limits(report)]
    else:
        parts = [_need(report), _now(report), _table_i(report), _lmdbio(report), _limits(report)]
    return tuple(p for p in parts if p)


# --- what is needed, and what there is -------------------------------------------------------


def _usable(report: Report) -> dict[str, Row]:
    return {r.name: r for r in report.rows if r.measures and not r.problems}


def _steps(report: Report) -> int:
    """Return the steps of an epoch."""
    ranks = max(1, int(number(report.settings, "ranks", 1)))
    batch = max(1, int(number(report.settings, "batch_size", 1)))
    each = -(-int(number(report.dataset, "samples", 1)) // ranks)
    return max(1, -(-each // batch))


def _computes(report: Report) -> bool:
    return any(r.value("compute_seconds") for r in _usable(report).values())


def _rate(nbytes_per_second: float) -> str:
    return f"{show_nbytes(nbytes_per_second)}/s"


def _source(report: Report) -> str:
    limit = next((r for r in report.rows if r.name == LIMIT), None)
    if not report.settings.get("cold"):
        kept = limit is None or UNKEPT not in limit.notes
        return "warm, from the page cache" if kept else "warm, but not in the page cache"
    evidence = "" if limit is None else limit.evidence
    return f"cold: {evidence}" if evidence not in ("", DEVICE) else f"cold, {DEVICE}"


def _need(report: Report) -> str:
    """Return what the steps need, and what the storage gives."""
    rows = _usable(report)
    limit = rows.get(LIMIT)
    alone = number(report.settings, "storage_gb_per_second", 0)
    gives = alone or (None if limit is None else limit.value("gb_per_second"))
    told = "The limit has no figure here, so what the storage gives is not known."
    if gives is not None:
        told = f"Plain reads got {_rate(1e9 * gives)} here ({_source(report)})"
    computing = [v for r in rows.values() if (v := r.value("compute_seconds"))]
    batch = max(1, int(number(report.settings, "batch_size", 1)))
    ranks = max(1, int(number(report.settings, "ranks", 1)))
    nbytes = number(report.dataset, "sample_nbytes", 0)
    if not computing or not nbytes:
        return " ".join(filter(None, [f"{told}." if gives else told, _hidden(report)]))
    step = sorted(computing)[len(computing) // 2] / _steps(report)
    rank = required_bandwidth(batch, nbytes, step)
    every = f", {_rate(ranks * rank)} for all {ranks} ranks" if ranks > 1 else ""
    need = (
        f"A step of {show_seconds(step)} on {batch} samples of {show_nbytes(nbytes)} needs "
        f"{_rate(rank)}{' per rank' if ranks > 1 else ''}{every} (b*S/t)."
    )
    if limit is None or gives is None:
        return f"{need} {told}"
    if not alone and limit.value("compute_seconds"):  # its reads had the steps' time: no rate
        if (limit.value(WAIT) or 0) <= (1 - BUSY / 100) * (limit.value("epoch_seconds") or 0):
            return (
                f"{need} Plain reads beside the same steps kept up with it ({_source(report)}): "
                "the storage gives at least that."
            )
        return (
            f"{need} {told} beside the same steps, which waited for them: "
            "not even plain reads keep up here."
        )
    times = 1e9 * gives / (ranks * rank)
    if times < 1:
        return f"{need} {told}, less than that: not even plain reads keep up here."
    return f"{need} {told}, {digits(times)} times that."


def _hidden(report: Report) -> str:
    """Return how long a step has to be for loading to hide, where steps computed nothing."""
    rows, steps = _usable(report), _steps(report)
    names = [n for n in (_today(report), "dsprep") if n in rows]
    told = []
    for name in dict.fromkeys(names):
        seconds = rows[name].value("epoch_seconds")
        if seconds is not None:
            told.append(f"{show_seconds(seconds / steps)} with {name}")
    if not told:
        return ""
    batch = max(1, int(number(report.settings, "batch_size", 1)))
    return (
        f"Steps computed nothing; loading, if it runs beside them, hides behind steps of "
        f"{batch} samples that take at least {' or '.join(told)}."
    )


# --- the way it is read today, and what would help -------------------------------------------


def _today(report: Report) -> str:
    """Return the way in which the dataset is read without dsprep; empty if none was measured.

    It is the one that the user says; else the slowest of those that were asked for by name; else
    the plainest that was measured.
    """
    rows = _usable(report)
    said = report.settings.get("baseline")
    if said:
        return str(said) if said in rows else ""
    named = [str(n) for n in report.settings.get("named", ()) if n in rows and n not in OURS]
    if named:
        return min(named, key=lambda n: rows[n].value(RATE) or 0)
    ways = TODAY.get(str(report.dataset.get("format")), ())
    return next((n for n in ways if n in rows), "")


def _now(report: Report) -> str:
    """Return whether loading is the bottleneck today, and what helps."""
    today, rows = _today(report), _usable(report)
    if not today:
        said = report.settings.get("baseline")
        ways = (said,) if said else TODAY.get(str(report.dataset.get("format")), ())
        failed = [r.name for r in report.rows if r.name in ways]
        if failed:
            return (
                f"Whether loading is the bottleneck today is open: {failed[0]} has no figures "
                "(the reason is in its row)."
            )
        if not ways:
            return ""
        return f"The way it is read without dsprep was not measured; add --strategy {ways[0]}."
    return f"{_bottleneck(report, rows[today])} {_help(report, rows, today)}"


def _bottleneck(report: Report, row: Row) -> str:
    wait, epoch = row.value(WAIT), row.value("epoch_seconds")
    busy, skew = row.value("utilisation_percent"), row.value("skew_seconds") or 0.0
    if not _computes(report) or busy is None or wait is None or not epoch:
        share, rate = row.value("limit_percent"), row.value(RATE)
        limit = "" if share is None else f", {_percent(share)} of the limit"
        return f"Read as it is today ({row.name}), it gives {digits(rate or 0)} samples/s{limit}."
    told = (
        f"Read as it is today ({row.name}), the accelerator computes {_percent(busy)} of the time "
        f"and waits for data for {show_seconds(wait)} of an epoch of {show_seconds(epoch)}: "
    )
    if busy >= BUSY:
        return f"{told}loading is not the bottleneck."
    if skew > wait:
        return f"{told}loading is not the first problem, waiting for other ranks is."
    if wait < (1 - BUSY / 100) * epoch:
        return f"{told}loading is not what holds it up."
    return f"{told}loading is the bottleneck."


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %"


def _help(report: Report, rows: dict[str, Row], today: str) -> str:
    """Return which measured ways are better than today's, and by how much."""
    base = rows[today]
    ways = []
    grouped = bool(report.dataset.get("grouped"))
    if "dsprep" in rows:
        by_reader = "read by dsprep.Reader"
        ways.append(("dsprep", by_reader if grouped else f"repacked and {by_reader}"))
    if "provenance" in rows:
        ways.append(("provenance", "with its sidecar alone, nothing rewritten"))
    others = [r for n, r in rows.items() if n not in (*OURS, today)]
    top = max(others, key=lambda r: r.value(RATE) or 0, default=None)
    if top is not None and all(_faster(rows[n], top) for n, _ in ways):
        ways.append((top.name, f"read by {top.name} (the fastest here)"))
    gains = sorted(
        ((rows[n], words) for n, words in ways if _helps(base, rows[n])),
        key=lambda g: -(g[0].value(RATE) or 0),
    )
    if not gains:
        same = ", ".join(n for n, _ in ways)
        if not same:
            return "No other way was measured; add --strategy dsprep."
        return f"No gain from {same} above {HELPS - 1:.0%} and the spread."
    told = "; ".join(f"{words}, {_gain(report, base, row)}" for row, words in gains)
    rest = [n for n, _ in ways if n not in {row.name for row, _ in gains}]
    none = f" No gain from {', '.join(rest)} above {HELPS - 1:.0%} and the spread." if rest else ""
    return f"What helps: {told}.{none}{_overlap(rows)}"


HELPS = 1.1
"""Times the rate from which on another way of reading is worth being advised."""


def _helps(old: Row, new: Row) -> bool:
    return _faster(old, new) and (new.value(RATE) or 0) >= HELPS * (old.value(RATE) or 0)


def _faster(old: Row, new: Row) -> bool:
    a, b = old.measures.get(RATE), new.measures.get(RATE)
    return a is not None and b is not None and apart(a, b) > 0


def _gain(report: Report, old: Row, new: Row) -> str:
    times = (new.value(RATE) or 0) / (old.value(RATE) or math.inf)
    told = f"{digits(times)} times the samples/s"
    a, b = old.value(WAIT), new.value(WAIT)
    if _computes(report) and a is not None and b is not None:
        told += f" (exposed I/O {show_seconds(a)} to {show_seconds(b)})"
    return told


def _overlap(rows: dict[str, Row]) -> str:
    """Return what reading ahead gains by itself."""
    if "group" not in rows or "group-db" not in rows:
        return ""
    single, double = rows["group"].measures.get(WAIT), rows["group-db"].measures.get(WAIT)
    if single is None or double is None or apart(single, double) >= 0:
        return ""
    return (
        f" Double buffering by itself takes exposed I/O from {show_seconds(single.value)} to "
        f"{show_seconds(double.value)}."
    )


# --- the orderings of the papers -------------------------------------------------------------


def _table_i(report: Report) -> str:
    names = SETS["async-io"]
    if not all(any(r.name == n for r in report.rows) for n in names):
        return ""
    return _orderings(
        report,
        "The table of the asynchronous I/O paper (tf: TF, tf-prefetch: TF-Pre, group: Async I/O, "
        "group-db: Async I/O DB)",
        TABLE_I,
        {"tf-prefetch": "the disk of one machine has no network or busy servers to hide"},
    )


def _lmdbio(report: Report) -> str:
    present = [n for n in SETS["lmdbio"] if any(r.name == n for r in report.rows)]
    if len(present) < 3:
        return ""
    pairs = [(a, b, "") for a, b in pairwise(present)]
    return _orderings(report, "The steps of LMDBIO", pairs, WHY_NOT)


def _orderings(
    report: Report, what: str, pairs: Sequence[tuple[str, str, str]], why: dict[str, str]
) -> str:
    """Return which pairs wait less here as they do in the paper, and which do not."""
    rows = _usable(report)
    shown, others, reasons = [], [], []
    for old, new, by in pairs:
        if old not in rows or new not in rows:
            others.append(f"{old} to {new} has no figures")
            continue
        a, b = rows[old].measures.get(WAIT), rows[new].measures.get(WAIT)
        if a is None or b is None:
            continue
        way = apart(a, b)
        seconds = f"{show_seconds(a.value)} to {show_seconds(b.value)}"
        if way < 0:
            cause = f", by {by}" if by else ""
            shown.append(f"{old} to {new} ({seconds}{cause})")
            continue
        word = "is not a difference beyond the spread" if way == 0 else "goes the other way"
        others.append(f"{old} to {new} {word} ({seconds})")
        if new in why and not _parallel(report):
            reasons.append(why[new])
    told = f"{what}, as exposed I/O: shown here, {'; '.join(shown)}." if shown else ""
    if not shown:
        told = f"{what}: no ordering shows here in exposed I/O."
    if others:
        told += f" Not shown: {'; '.join(others)}."
    if reasons:
        told += f" A single machine cannot show all: {'; '.join(dict.fromkeys(reasons))}."
    return told


# --- what the figures do not show ------------------------------------------------------------


def _parallel(report: Report) -> str:
    """Return the type of the parallel file system that was measured; empty if it was none."""
    facts = flat(report.machine)
    told = facts.get("file_system.type", facts.get("file_system", "")).lower()
    return next((kind for kind in PARALLEL if kind in told), "")


def _limits(report: Report) -> str:
    """Return what the figures do not show."""
    kind = _parallel(report)
    where = f"one client of {kind}, with what else ran on it" if kind else "no parallel file system"
    told = [f"All this is one machine and {where}"]
    kept = not any(UNKEPT in r.notes for r in report.all_rows)
    if not report.settings.get("cold") and kept:
        told.append("the data came from the page cache, so the storage itself was not measured")
    if number(report.settings, "repeat", 2) < 2 and number(report.settings, "epochs", 2) < 2:
        told.append("each was measured once, so only differences over 10 % are told")
    told += _unseen(report)
    bad = list(dict.fromkeys(r.name for r in report.all_rows if r.problems))
    if bad:
        have = "has" if len(bad) == 1 else "have"
        told.append(f"{', '.join(bad)} {have} no figures (each row says why)")
    return "; ".join(told) + "."


def _unseen(report: Report) -> list[str]:
    """Return what the evidence of cold runs leaves open."""
    evidence = [r.evidence for r in report.all_rows if r.evidence]
    words = {
        SERVER_UNKNOWN: "whether the server had the data in memory is unknown, so its disks may "
        "have had no part in this (--evict-server CMD drops its cache, --warm-server fills it)",
        SERVER_WARM: "the server had read all data before, so its disks count only for what its "
        "memory cannot keep",
        OVER: "what an interface counts includes all other traffic of the node",
        ANY: "no interface counted the bytes, so they came from a cache of this node or over a "
        "network that is not counted",
        UNKNOWN: "whether the page cache had the data cannot be seen here",
    }
    return [told for word, told in words.items() if any(word in e for e in evidence)]
