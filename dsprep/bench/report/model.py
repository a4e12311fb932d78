"""The values of every output: measures, rows, reports, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsprep.errors import FormatError, require

VERSION = 2
"""The version of the JSON form of a report."""

LARGEST = 64 << 20
"""Bytes of a report at most."""


@dataclass(frozen=True)
class Kind:
    """The meaning of a measure, and its column in tables."""

    unit: str  # in which it is given; "1" for counts
    words: str  # what it says
    better: int = 0  # -1 if less is better, 1 if more is, 0 if neither
    heading: str = ""  # of its column; empty: it has none
    rank: int = 0  # how soon the column goes if there is no room: the largest first
    spread: bool = False  # whether the spread is shown even where there is little room


MEASURES: dict[str, Kind] = {
    "exposed_seconds": Kind(
        "s", "that the consumer waited for data in an epoch", -1, "exposed I/O", 2
    ),
    "exposed_after_first_seconds": Kind("s", "waited after the first group", -1, "after first", 12),
    "first_batch_seconds": Kind("s", "before the first batch", -1, "first batch", 7),
    "wait_p50_seconds": Kind("s", "waited for a batch, median", -1, "wait p50", 8),
    "wait_p99_seconds": Kind("s", "waited for a batch, 99th percentile", -1, "wait p99", 5),
    "samples_per_second": Kind(
        "samples/s", "delivered by all ranks", 1, "samples/s", 0, spread=True
    ),
    "gb_per_second": Kind("GB/s", "of samples, delivered by all ranks (1e9 bytes)", 1, "GB/s", 4),
    "drawn_gb_per_second": Kind("GB/s", "drawn from the capacity tier", -1, "drawn GB/s", 1),
    "hit_percent": Kind("%", "of the bytes read came from the fast tier", 1, "hits %", 1),
    "copied_bytes": Kind("B", "copied to the fast tier in an epoch", 0, "copied", 4),
    "stall_seconds": Kind(
        "s", "waited for what is copied, partly hidden by what was read ahead", -1, "stalls", 4
    ),
    "limit_percent": Kind("%", "of the rate of the limit", 1, "% limit", 1),
    "utilisation_percent": Kind("%", "accelerator utilisation: compute / total", 1, "AU %", 3),
    "compute_seconds": Kind("s", "of the steps' own work"),
    "skew_seconds": Kind("s", "waited for other ranks at the end of steps", -1, "skew", 6),
    "read_calls": Kind("1", "read system calls in an epoch", -1, "reads", 11),
    "asked_bytes": Kind("B", "asked for by read calls in an epoch", 0, "asked", 15),
    "device_bytes": Kind("B", "that came from the device in an epoch", 0, "device", 9),
    "major_faults": Kind("1", "page faults that had to read, in an epoch", -1, "faults", 16),
    "context_switches": Kind("1", "voluntary and other, in an epoch", -1, "switches", 17),
    "peak_rss_bytes": Kind(
        "B", "of memory, all processes of the slowest rank at its peak", -1, "RSS", 10
    ),
    "cpu_seconds": Kind("s", "of processors, user and system, in an epoch", -1, "CPU", 13),
    "epoch_seconds": Kind("s", "one epoch, the slowest rank's", -1, "epoch", 14),
}
"""Every measure there is, in the order of the columns of tables."""


@dataclass(frozen=True)
class Measure:
    """The median over repeats, and the spread."""

    value: float
    least: float
    most: float

    def to_json(self, name: str) -> dict[str, Any]:
        """Return it with its unit."""
        return {**asdict(self), "unit": MEASURES[name].unit}


@dataclass(frozen=True)
class Row:
    """A strategy, and what it cost."""

    name: str
    words: str = ""  # what it does
    # by the names of `MEASURES`; empty where there is a problem
    measures: Mapping[str, Measure] = field(default_factory=dict)
    # why there are no numbers: wrong samples, warm pages in a cold run, a failure
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # remarks that do not touch the numbers
    runs: int = 0  # epochs that were measured, over all repeats
    evidence: str = ""  # of cold runs: what shows that they were, in a few words
    value: str = ""  # of what is swept, as the user wrote it

    def median(self, name: str) -> float | None:
        """Return the median of a measure, None if it was not taken."""
        measure = self.measures.get(name)
        return None if measure is None else measure.value

    @property
    def failure(self) -> str:
        """The reason why it has no numbers; empty if it has."""
        if self.problems or not self.measures:
            return "; ".join(self.problems) or "not measured"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        return {**vars(self), "measures": {k: m.to_json(k) for k, m in self.measures.items()}}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Row:
        """Return the row that `to_json` wrote."""
        known = {str(k): m for k, m in json["measures"].items() if k in MEASURES}
        ends = ("value", "least", "most")
        return cls(
            **{key: str(json[key]) for key in ("name", "words", "evidence", "value")},
            problems=tuple(map(str, json["problems"])),
            notes=tuple(map(str, json["notes"])),
            measures={k: Measure(*(float(m[e]) for e in ends)) for k, m in known.items()},
            runs=int(json["runs"]),
        )


@dataclass(frozen=True)
class BenchReport:
    """All that a benchmark found."""

    command: str  # the exact command line
    when: str  # ISO 8601, UTC
    machine: Mapping[str, Any]  # facts by name, as the next two
    dataset: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]  # the strategies, the limit first, for each value that is swept
    swept: str = ""  # the option that was varied, without dashes: `buffer-size`
    # by strategy: the value from which on more of it gains next to nothing
    knees: Mapping[str, str] = field(default_factory=dict)
    answer: tuple[str, ...] = ()  # the closing words, paragraph by paragraph

    @property
    def taken(self) -> set[str]:
        """The measures that some row has."""
        return {name for row in self.rows for name in row.measures}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        rows = {"strategies": [r.to_json() for r in self.rows]}
        facts = {name: value for name, value in vars(self).items() if name != "rows"}
        return {"dsprep_bench": VERSION, "kind": "read", **facts, **rows}

    @classmethod
    def from_json(cls, json: Any, where: object = None) -> BenchReport:
        """Return the report that `to_json` wrote.

        Raises
        ------
        FormatError
            If it is not one, or is of another version.
        """
        version = json.get("dsprep_bench", VERSION) if isinstance(json, dict) else VERSION
        facts = {"where": where, "expected": VERSION, "found": str(version)[:40]}
        fix = "use the dsprep that wrote it, or measure again"
        words = "the report is of another version"
        require(version == VERSION, FormatError, words, **facts, fix=fix)
        try:
            if json["kind"] != "read":
                raise ValueError(f"there is no kind {json['kind']!r}")
            known: dict[str, Any] = {k: dict(json[k]) for k in ("machine", "dataset", "settings")}
            known |= {key: str(json[key]) for key in ("command", "when", "swept")}
            return cls(
                **known,
                rows=tuple(map(Row.from_json, json["strategies"])),
                knees={str(k): str(v) for k, v in json["knees"].items()},
                answer=tuple(map(str, json["answer"])),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise _not_a_report(where) from error


def load(path: Path) -> BenchReport:
    """Return the report that a file holds.

    Raises
    ------
    FormatError
        If it does not hold one.
    """
    with path.open("rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise _not_a_report(path, ": too large")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _not_a_report(path) from error
    return BenchReport.from_json(content, path)


def _not_a_report(where: object, reason: str = "") -> FormatError:
    return FormatError(
        f"this is not a report of dsprep bench{reason}",
        where=where,
        fix="write one with dsprep bench read ... --json FILE",
    )
