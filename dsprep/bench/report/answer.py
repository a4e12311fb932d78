"""The closing words of a report: is loading the bottleneck, and what would help.

Only what was measured is said, and no difference that the spread of repeats does not carry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
from dsprep.bench.report import sweeping, tiering
from dsprep.bench.report.comparing import apart, flat
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import digits, number, show_percent, show_seconds
from dsprep.bench.strategies import DUMMY, IN_PLACE, LIMIT, PLAINLY, SETS, TIERED, TODAY, find
from dsprep.core.units import show_nbytes

NO_PRODUCT = ("group", "group-db", *SETS["lmdbio"])
"""Strategies that only serve as measures: none of them is advised."""

OURS = ("provenance", "dsprep", LIMIT, DUMMY, *TIERED, *NO_PRODUCT)
"""Strategies by which nobody reads a dataset without dsprep."""

BUSY = 90.0
"""Percent of utilisation that MLPerf Storage asks of most workloads."""

HELPS = 1.1
"""Times the rate from which on another way of reading is worth being advised."""

PARALLEL = (
    *("lustre", "gpfs", "beegfs", "glusterfs", "ceph", "panfs", "wekafs", "pvfs", "orangefs"),
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
the second waits less. TF-Pre against Async I/O is not one: it goes either way in the paper too."""

WHY_NOT = {
    "tf-prefetch": "the disk of one machine has no network or busy servers to hide",
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


def answer(report: BenchReport) -> tuple[str, ...]:
    """Return the closing words, paragraph by paragraph."""
    findings = _Findings(report)
    if report.sweep is not None:
        parts = [" ".join(sweeping.words(report.sweep))]
    elif report.settings.get("tier_bandwidth"):  # what is measured is not this storage
        parts = []
    else:
        parts = [_need(findings), _now(findings), _table_i(findings), _lmdbio(findings)]
    parts += [tiering.words(report), _requests(findings), _limits(findings)]
    return tuple(p for p in parts if p)


@dataclass(frozen=True)
class _Findings:
    """What the paragraphs need of a report."""

    report: BenchReport

    @cached_property
    def rows(self) -> dict[str, Row]:
        """The rows with figures, by strategy."""
        return {r.name: r for r in self.report.rows if not r.failure}

    @cached_property
    def limit(self) -> Row | None:
        """The row of the limit, with figures or without."""
        return next((r for r in self.report.rows if r.name == LIMIT), None)

    @cached_property
    def ranks(self) -> int:
        return max(1, int(number(self.report.settings, "ranks", 1)))

    @cached_property
    def batch(self) -> int:
        return max(1, int(number(self.report.settings, "batch_size", 1)))

    @cached_property
    def steps(self) -> int:
        """Steps of an epoch."""
        each = -(-int(number(self.report.dataset, "samples", 1)) // self.ranks)
        return max(1, -(-each // self.batch))

    @cached_property
    def computing(self) -> list[float]:
        """Seconds of the steps' own work in an epoch, of the rows that have them."""
        return sorted(v for r in self.rows.values() if (v := r.value("compute_seconds")))

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """The strategies that may be how the dataset is read today, likelier ones first."""
        if baseline := self.report.settings.get("baseline"):
            return (str(baseline),)
        plain = TODAY.get(str(self.report.dataset.get("format")), ())
        known = any(map(self.is_in_place, plain))
        return (*plain, IN_PLACE) if known else (IN_PLACE, *plain)

    def is_in_place(self, name: str) -> bool:
        """Return whether a strategy read the dataset as it is, and no copy in another form."""
        forms = self.report.dataset.get("in_place")
        return forms is None or find(name).container in forms

    @cached_property
    def today(self) -> str:
        """The way in which the dataset is read without dsprep; empty if none was measured.

        It is the one that the user gives; else the slowest of those that were asked for by name;
        else the plainest that was measured.
        """
        rows, settings = self.rows, self.report.settings
        named = [str(n) for n in settings.get("named", ()) if n in rows and n not in OURS]
        if named and not settings.get("baseline"):
            return min(named, key=lambda n: rows[n].value(RATE) or 0)
        return next((n for n in self.ways if n in rows), "")

    @cached_property
    def parallel(self) -> str:
        """The type of the parallel file system that was measured; empty if it was not one."""
        facts = flat(self.report.machine)
        kind = facts.get("file_system.type", facts.get("file_system", "")).lower()
        return next((known for known in PARALLEL if known in kind), "")


# --- what is needed, and what there is -------------------------------------------------------


def _source(findings: _Findings) -> str:
    limit = findings.limit
    if not findings.report.settings.get("cold"):
        kept = limit is None or UNKEPT not in limit.notes
        return "warm, from the page cache" if kept else "warm, but not in the page cache"
    evidence = "" if limit is None else limit.evidence
    return f"cold: {evidence}" if evidence not in ("", DEVICE) else f"cold, {DEVICE}"


def _need(findings: _Findings) -> str:
    """Return what the steps need, and what the storage gives."""
    limit, ranks, source = findings.rows.get(LIMIT), findings.ranks, _source(findings)
    alone = number(findings.report.settings, "storage_gb_per_second", 0)
    gives = alone or (None if limit is None else limit.value("gb_per_second"))
    reads = "The limit has no figure here, so what the storage gives is not known."
    if gives is not None:
        reads = f"Plain reads got {show_nbytes(1e9 * gives)}/s here ({source})"
    nbytes = number(findings.report.dataset, "sample_nbytes", 0)
    if not findings.computing or not nbytes:
        return " ".join(filter(None, [f"{reads}." if gives else reads, _hidden(findings)]))
    step = findings.computing[len(findings.computing) // 2] / findings.steps
    rate = required_bandwidth(findings.batch, nbytes, step)
    every = f" per rank, {show_nbytes(ranks * rate)}/s for all {ranks} ranks" if ranks > 1 else ""
    need = (
        f"A step of {show_seconds(step)} on {findings.batch} samples of {show_nbytes(nbytes)} "
        f"needs {show_nbytes(rate)}/s{every} (b*S/t)."
    )
    if limit is None or gives is None:
        return f"{need} {reads}"
    if not alone and limit.value("compute_seconds"):  # its reads had the steps' time: no rate
        if (limit.value(WAIT) or 0) <= (1 - BUSY / 100) * (limit.value("epoch_seconds") or 0):
            return (
                f"{need} Plain reads beside the same steps kept up with it ({source}): "
                "the storage gives at least that."
            )
        return (
            f"{need} {reads} beside the same steps, which waited for them: "
            "not even plain reads keep up here."
        )
    times = 1e9 * gives / (ranks * rate)
    if times < 1:
        return f"{need} {reads}, less than that: not even plain reads keep up here."
    return f"{need} {reads}, {digits(times)} times that."


def _hidden(findings: _Findings) -> str:
    """Return how long a step has to be for loading to hide, where steps computed nothing."""
    seconds = {
        name: value
        for name in (findings.today, "dsprep")
        if name in findings.rows
        and (value := findings.rows[name].value("epoch_seconds")) is not None
    }
    if not seconds:
        return ""
    steps = [f"{show_seconds(s / findings.steps)} with {name}" for name, s in seconds.items()]
    return (
        f"Steps computed nothing; loading, if it runs beside them, hides behind steps of "
        f"{findings.batch} samples that take at least {' or '.join(steps)}."
    )


# --- the way it is read today, and what would help -------------------------------------------


def _now(findings: _Findings) -> str:
    """Return whether loading is the bottleneck today, and what helps."""
    if findings.today:
        return f"{_bottleneck(findings, findings.rows[findings.today])} {_help(findings)}"
    failed = [r.name for r in findings.report.rows if r.name in findings.ways]
    if failed:
        return (
            f"Whether loading is the bottleneck today is open: {failed[0]} has no figures "
            "(the reason is in its row)."
        )
    if not findings.ways:
        return ""
    return f"The way it is read without dsprep was not measured; add --strategy {findings.ways[0]}."


def _bottleneck(findings: _Findings, row: Row) -> str:
    wait, epoch = row.value(WAIT), row.value("epoch_seconds")
    busy, skew = row.value("utilisation_percent"), row.value("skew_seconds") or 0.0
    if not findings.computing or busy is None or wait is None or not epoch:
        share, rate = row.value("limit_percent"), row.value(RATE)
        limit = "" if share is None else f", {show_percent(share)} % of the limit"
        return f"{_as_read(findings, row)}, it gives {digits(rate or 0)} samples/s{limit}."
    verdict = "loading is the bottleneck."
    if busy >= BUSY:
        verdict = "loading is not the bottleneck."
    elif skew > wait:
        verdict = "loading is not the first problem, waiting for other ranks is."
    elif wait < (1 - BUSY / 100) * epoch:
        verdict = "loading is not what holds it up."
    return (
        f"{_as_read(findings, row)}, the accelerator computes {show_percent(busy)} % of "
        f"the time and waits for data for {show_seconds(wait)} of an epoch of "
        f"{show_seconds(epoch)}: {verdict}"
    )


def _as_read(findings: _Findings, row: Row) -> str:
    if findings.is_in_place(row.name):
        format = str(findings.report.dataset.get("format"))
        how = f": {PLAINLY.get(format, 'sample by sample')}" if row.name == IN_PLACE else ""
        return f"Read as it is today ({row.name}{how})"
    return f"Read by {row.name}, after a conversion to {find(row.name).container}"


def _help(findings: _Findings) -> str:
    """Return which measured ways are better than today's, and by how much."""
    rows, base = findings.rows, findings.rows[findings.today]
    repacked = "" if findings.report.dataset.get("grouped") else "repacked and "
    known = {
        "dsprep": f"{repacked}read by dsprep.Reader",
        "provenance": "with its sidecar alone, nothing rewritten",
    }
    if not findings.is_in_place("provenance"):
        del known["provenance"]
    ways = {name: words for name, words in known.items() if name in rows}
    mine = [n for n in rows if ":" in n]  # what one has already
    others = [r for n, r in rows.items() if n not in (*OURS, IN_PLACE, findings.today, *mine)]
    top = max(others, key=lambda r: r.value(RATE) or 0, default=None)
    if top is not None and all(_is_faster(rows[n], top) for n in ways):
        ways[top.name] = f"read by {top.name} (the fastest here)"
    if not ways:
        return "No other way was measured; add --strategy dsprep."
    threshold = HELPS * (base.value(RATE) or 0)
    gains = [
        n for n in ways if _is_faster(base, rows[n]) and (rows[n].value(RATE) or 0) >= threshold
    ]
    gains.sort(key=lambda n: -(rows[n].value(RATE) or 0))
    rest = ", ".join(n for n in ways if n not in gains)
    none = f"No gain from {rest} above {HELPS - 1:.0%} and the spread." if rest else ""
    if not gains:
        return none
    helps = "; ".join(f"{ways[n]}, {_gain(findings, base, rows[n])}" for n in gains)
    return " ".join(filter(None, [f"What helps: {helps}.", none, _overlap(rows)]))


def _is_faster(old: Row, new: Row) -> bool:
    a, b = old.measures.get(RATE), new.measures.get(RATE)
    return a is not None and b is not None and apart(a, b) > 0


def _gain(findings: _Findings, old: Row, new: Row) -> str:
    times = digits((new.value(RATE) or 0) / (old.value(RATE) or math.inf))
    a, b = old.value(WAIT), new.value(WAIT)
    exposed = ""
    if findings.computing and a is not None and b is not None:
        exposed = f" (exposed I/O {show_seconds(a)} to {show_seconds(b)})"
    return f"{times} times the samples/s{exposed}"


def _overlap(rows: dict[str, Row]) -> str:
    """Return what reading ahead gains by itself."""
    single, double = (
        rows[n].measures.get(WAIT) if n in rows else None for n in ("group", "group-db")
    )
    if single is None or double is None or apart(single, double) >= 0:
        return ""
    return (
        f"Double buffering by itself takes exposed I/O from {show_seconds(single.value)} to "
        f"{show_seconds(double.value)}."
    )


# --- the orderings of the papers -------------------------------------------------------------


def _table_i(findings: _Findings) -> str:
    if not {r.name for r in findings.report.rows}.issuperset(SETS["async-io"]):
        return ""
    subject = (
        "The table of the asynchronous I/O paper (tf: TF, tf-prefetch: TF-Pre, group: Async I/O, "
        "group-db: Async I/O DB)"
    )
    return _orderings(findings, subject, TABLE_I)


def _lmdbio(findings: _Findings) -> str:
    present = [n for n in SETS["lmdbio"] if any(r.name == n for r in findings.report.rows)]
    if len(present) < 3:
        return ""
    return _orderings(findings, "The steps of LMDBIO", [(a, b, "") for a, b in pairwise(present)])


def _orderings(findings: _Findings, subject: str, pairs: Sequence[tuple[str, str, str]]) -> str:
    """Return which pairs wait less here as they do in the paper, and which do not."""
    rows = findings.rows
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
        if new in WHY_NOT and not findings.parallel:
            reasons.append(WHY_NOT[new])
    words = [f"{subject}: no ordering shows here in exposed I/O."]
    if shown:
        words = [f"{subject}, as exposed I/O: shown here, {'; '.join(shown)}."]
    if others:
        words.append(f"Not shown: {'; '.join(others)}.")
    if reasons:
        words.append(f"A single machine cannot show all: {'; '.join(dict.fromkeys(reasons))}.")
    return " ".join(words)


def _requests(findings: _Findings) -> str:
    """Return what an epoch asks an object store for: what is paid by the request."""
    if not findings.report.dataset.get("stored"):
        return ""
    asked = [
        f"{name} {r.value('read_calls'):,.0f} ({show_nbytes(r.value('asked_bytes') or 0)})"
        for name, r in findings.rows.items()
        if r.value("read_calls")
    ]
    return f"Requests of an epoch to the store: {', '.join(asked)}."


# --- what the figures do not show ------------------------------------------------------------


def _limits(findings: _Findings) -> str:
    """Return what the figures do not show."""
    report, kind = findings.report, findings.parallel
    where = f"one client of {kind}, with what else ran on it" if kind else "no parallel file system"
    words = [f"All this is one machine and {where}"]
    kept = not any(UNKEPT in r.notes for r in report.all_rows)
    if not report.settings.get("cold") and kept:
        words.append("the data came from the page cache, so the storage itself was not measured")
    if number(report.settings, "repeat", 2) < 2 and number(report.settings, "epochs", 2) < 2:
        words.append("each was measured once, so only differences over 10 % are reported")
    words += _unseen(report)
    bad = list(dict.fromkeys(r.name for r in report.all_rows if r.problems))
    if bad:
        were, rows = ("was", "its row") if len(bad) == 1 else ("were", "their rows")
        words.append(f"{', '.join(bad)} {were} not measured: see {rows}")
    return "; ".join(words) + "."


def _unseen(report: BenchReport) -> list[str]:
    """Return what the evidence of cold runs leaves open."""
    evidence = [r.evidence for r in report.all_rows if r.evidence]
    meanings = {
        SERVER_UNKNOWN: "whether the server had the data in memory is unknown, so its disks may "
        "have had no part in this (--evict-server CMD drops its cache, --warm-server fills it)",
        SERVER_WARM: "the server had read all data before, so its disks count only for what its "
        "memory cannot keep",
        OVER: "what an interface counts includes all other traffic of the node",
        ANY: "no interface counted the bytes, so they came from a cache of this node or over a "
        "network that is not counted",
        UNKNOWN: "whether the page cache had the data cannot be seen here",
    }
    return [meaning for word, meaning in meanings.items() if any(word in e for e in evidence)]
