"""Two measures, or two reports, side by side: what differs by more than repeats do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsprep.bench.report.model import MEASURES, BenchReport, Measure, Row
from dsprep.errors import UsageError, require

ONCE = 0.10
"""Share by which two values must differ that were measured once, whose spread nobody knows."""

LEAST = 0.03
"""Share by which any two values must differ: few repeats show less of the spread than there is."""


def apart(old: Measure, new: Measure, smallest: float = LEAST) -> int:
    """Return 1 if `new` is larger than `old` beyond both spreads, -1 if smaller, 0 if neither.

    Parameters
    ----------
    smallest
        Share of `old` by which they must differ at any rate.
    """
    if old.least == old.most and new.least == new.most:
        smallest = max(smallest, ONCE)
    if not all(map(math.isfinite, (old.value, new.value))):
        return 0
    if abs(new.value - old.value) <= smallest * abs(old.value):
        return 0
    if new.least > old.most:
        return 1
    return -1 if new.most < old.least else 0


@dataclass(frozen=True)
class Pair:
    """A strategy in both reports."""

    name: str  # the strategy
    value: str  # of what is swept; empty without a sweep
    old: Measure | None  # None where the row has none
    new: Measure | None
    # `better`, `worse`, `same`; `more`, `less` where neither is better; `failed` if only the new
    # one has no figure; `mended` if only the old one has none; `none` if both have none
    verdict: str
    problem: str = ""  # why there is no figure

    @property
    def ratio(self) -> float | None:
        """New by old; None where there is none."""
        if self.old is None or self.new is None or not self.old.value:
            return None
        return self.new.value / self.old.value


@dataclass(frozen=True)
class Comparison:
    """Two reports, side by side."""

    measure: str  # what is compared, of `MEASURES`
    pairs: tuple[Pair, ...]  # strategies of both, in the order of the new one
    only_old: tuple[str, ...]  # strategies of one report only
    only_new: tuple[str, ...]
    # what else differs, as (fact, old, new): it makes the comparison doubtful
    differences: tuple[tuple[str, str, str], ...]

    def worse(self, share: float) -> list[Pair]:
        """Return what got worse by more than `share`, and beyond the spread, or failed."""
        better = MEASURES[self.measure].better
        bad = []
        for pair in self.pairs:
            lost = pair.verdict == "worse"
            if lost and pair.old is not None and pair.new is not None:
                change = better * (pair.old.value - pair.new.value)
                lost = change > share * abs(pair.old.value)
            if lost or pair.verdict == "failed":
                bad.append(pair)
        return bad

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        pairs = [{**asdict(pair), "ratio": pair.ratio} for pair in self.pairs]
        unit = {"dsprep_bench_compare": 1, "unit": MEASURES[self.measure].unit}
        facts = {name: value for name, value in vars(self).items() if name != "pairs"}
        return {**unit, **facts, "strategies": pairs}


def compare(old: BenchReport, new: BenchReport, measure: str = "samples_per_second") -> Comparison:
    """Return two reports side by side."""
    taken, expected = old.taken | new.taken, f"one of {', '.join(MEASURES)}"
    require(measure in MEASURES, UsageError, f"{measure!r} is not a measure", expected=expected)
    expected = f"one of {', '.join(m for m in MEASURES if m in taken)}"
    words = f"no strategy has the measure {measure}"
    require(measure in taken, UsageError, words, expected=expected)
    before, after = _rows(old), _rows(new)
    return Comparison(
        measure,
        tuple(_pair(k, before[k], row, measure) for k, row in after.items() if k in before),
        tuple(" ".join(filter(None, k)) for k in before if k not in after),
        tuple(" ".join(filter(None, k)) for k in after if k not in before),
        tuple(differences(old, new)),
    )


def _rows(report: BenchReport) -> dict[tuple[str, str], Row]:
    """Return the rows by strategy and value of what is swept."""
    return {(r.name, f"{report.swept}={r.value}" if r.value else ""): r for r in report.rows}


def _pair(key: tuple[str, str], old: Row, new: Row, measure: str) -> Pair:
    before = None if old.problems else old.measures.get(measure)
    after = None if new.problems else new.measures.get(measure)
    if before is None or after is None:
        verdict = "failed" if before is not None else "none" if after is None else "mended"
        problem = "; ".join((old if after is not None else new).problems)
        return Pair(*key, before, after, verdict, problem or "not measured")
    better, change = MEASURES[measure].better, apart(before, after)
    words = ("better", "worse") if better else ("more", "less")
    return Pair(*key, before, after, words[change * (better or 1) < 0] if change else "same")


def flat(facts: Mapping[str, Any], prefix: str = "", depth: int = 4) -> dict[str, str]:
    """Return facts by name as text; those of a fact that has some itself as ``fact.name``."""
    values: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth:
            values.update(flat(value, f"{name}.", depth - 1))
        elif isinstance(value, list | tuple) and not any(isinstance(v, Mapping) for v in value):
            values[name] = ", ".join(map(str, value))
        else:
            values[name] = str(value)
    return values


def differences(old: BenchReport, new: BenchReport) -> list[tuple[str, str, str]]:
    """Return the facts of machine, dataset, settings and command in which two reports differ."""
    lines = []
    for part in ("machine", "dataset", "settings"):
        before, after = flat(getattr(old, part)), flat(getattr(new, part))
        for name in dict.fromkeys([*before, *after]):
            if "free" in name:  # changes by the minute
                continue
            values = before.get(name, "not stated"), after.get(name, "not stated")
            if values[0] != values[1]:
                lines.append((f"{part} {name}", *values))
    if old.command != new.command:
        lines.append(("command", old.command, new.command))
    return lines
