"""The values of every output: measures, rows, sweeps, reports, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsprep.errors import FormatError

VERSION = 1
"""Of the JSON form of a report."""

LARGEST = 64 << 20
"""Bytes of a report at most."""


@dataclass(frozen=True)
class Kind:
    """What a measure is, and how tables show it."""

    unit: str  # in which it is given; "1" for counts
    words: str  # what it says
    better: int = 0  # -1 if less is better, 1 if more is, 0 if neither
    heading: str = ""  # of its column; empty: it has none
    rank: int = 0  # how soon the column goes if there is no room: the largest first
    spread: bool = False  # whether the spread is shown even where there is little room


MEASURES: dict[str, Kind] = {
    "epoch_seconds": Kind("s", "one epoch, the slowest rank's", -1, "epoch", 14),
    "exposed_seconds": Kind(
        "s", "that the consumer waited for data in an epoch", -1, "exposed I/O", 2
    ),
    "first_batch_seconds": Kind("s", "before the first batch", -1, "first batch", 7),
    "exposed_after_first_seconds": Kind("s", "waited after the first group", -1, "after first", 12),
    "wait_p50_seconds": Kind("s", "waited for a batch, median", -1, "wait p50", 8),
    "wait_p99_seconds": Kind("s", "waited for a batch, 99th percentile", -1, "wait p99", 5),
    "compute_seconds": Kind("s", "of the steps' own work"),
    "skew_seconds": Kind("s", "waited for other ranks at the end of steps", -1, "skew", 6),
    "utilisation_percent": Kind("%", "accelerator utilisation: compute / total", 1, "AU %", 3),
    "samples_per_second": Kind(
        "samples/s", "delivered by all ranks", 1, "samples/s", 0, spread=True
    ),
    "gb_per_second": Kind("GB/s", "of samples, delivered by all ranks (1e9 bytes)", 1, "GB/s", 4),
    "limit_percent": Kind("%", "of the rate of the limit", 1, "% limit", 1),
    "read_calls": Kind("1", "read system calls in an epoch", -1, "reads", 11),
    "asked_bytes": Kind("B", "asked for by read calls in an epoch", 0, "asked", 15),
    "device_bytes": Kind("B", "that came from the device in an epoch", 0, "device", 9),
    "major_faults": Kind("1", "page faults that had to read, in an epoch", -1, "faults", 16),
    "context_switches": Kind("1", "voluntary and other, in an epoch", -1, "switches", 17),
    "cpu_seconds": Kind("s", "of processors, user and system, in an epoch", -1, "CPU", 13),
    "model_gb_per_second": Kind(
        "GB/s", "that the model of mini-epochs expects: min(r, rf*B2)", 0, "model", 1
    ),
    "drawn_gb_per_second": Kind("GB/s", "drawn from the capacity tier", -1, "drawn GB/s", 1),
    "model_drawn_gb_per_second": Kind(
        "GB/s", "drawn by the model of mini-epochs: min(r/rf, B2)", 0, "model drawn", 1
    ),
    "hit_percent": Kind("%", "of the bytes read came from the fast tier", 1, "hits %", 1),
    "copied_bytes": Kind("B", "copied to the fast tier in an epoch", 0, "copied", 4),
    "stall_seconds": Kind(
        "s", "waited for what is copied, partly hidden by what was read ahead", -1, "stalls", 4
    ),
    "peak_rss_bytes": Kind(
        "B", "of memory, all processes of the slowest rank at its peak", -1, "RSS", 10
    ),
}
"""Every measure there is, in the order of CSV files."""

COLUMNS = (
    *("exposed_seconds", "exposed_after_first_seconds", "first_batch_seconds"),
    *("wait_p50_seconds", "wait_p99_seconds", "samples_per_second", "gb_per_second"),
    *("model_gb_per_second", "drawn_gb_per_second", "model_drawn_gb_per_second", "hit_percent"),
    *("copied_bytes", "stall_seconds"),
    *("limit_percent", "utilisation_percent", "skew_seconds", "read_calls", "asked_bytes"),
    *("device_bytes", "major_faults", "context_switches", "peak_rss_bytes"),
    *("cpu_seconds", "epoch_seconds"),
)
"""The measures that tables have, in their order there."""


@dataclass(frozen=True)
class Measure:
    """The median over repeats, and the spread."""

    value: float
    least: float
    most: float

    def to_json(self, name: str) -> dict[str, Any]:
        """Return it with its unit."""
        unit = MEASURES[name].unit
        return {"value": self.value, "unit": unit, "least": self.least, "most": self.most}


ENDS = ("value", "least", "most")


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

    def value(self, name: str) -> float | None:
        """Return the median of a measure, None if it was not taken."""
        measure = self.measures.get(name)
        return None if measure is None else measure.value

    @property
    def failure(self) -> str:
        """Why it has no numbers; empty if it has."""
        if self.problems or not self.measures:
            return "; ".join(self.problems) or "not measured"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        return {
            "name": self.name,
            "description": self.words,
            "runs": self.runs,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "evidence": self.evidence,
            "measures": {k: m.to_json(k) for k, m in self.measures.items()},
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Row:
        """Return the row that `to_json` wrote."""
        known = {str(k): m for k, m in json["measures"].items() if k in MEASURES}
        return cls(
            str(json["name"]),
            str(json.get("description", "")),
            {k: Measure(*(float(m[e]) for e in ENDS)) for k, m in known.items()},
            tuple(map(str, json["problems"])),
            tuple(map(str, json.get("notes", ()))),
            int(json.get("runs", 0)),
            str(json.get("evidence", "")),
        )


@dataclass(frozen=True)
class Point:
    """A value of what is swept, as the user wrote it, and the rows it gave."""

    value: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Sweep:
    """A setting that was varied."""

    parameter: str  # the option's name without dashes: `buffer-size`
    points: tuple[Point, ...]  # in the order given
    # by strategy: the value from which on more of it gains next to nothing
    knees: Mapping[str, str] = field(default_factory=dict)

    def rows_of(self, strategy: str) -> dict[str, Row]:
        """Return the rows of a strategy by value, those without figures too."""
        return {p.value: r for p in self.points for r in p.rows if r.name == strategy}

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names of all strategies, each once."""
        return tuple(dict.fromkeys(r.name for p in self.points for r in p.rows))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        points = [
            {"value": p.value, "strategies": [r.to_json() for r in p.rows]} for p in self.points
        ]
        return {"parameter": self.parameter, "points": points, "knees": dict(self.knees)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Sweep:
        """Return the sweep that `to_json` wrote."""
        points = (
            Point(str(p["value"]), tuple(map(Row.from_json, p["strategies"])))
            for p in json["points"]
        )
        knees = {str(k): str(v) for k, v in json.get("knees", {}).items()}
        return cls(str(json["parameter"]), tuple(points), knees)


@dataclass(frozen=True)
class BenchReport:
    """All that a benchmark found."""

    command: str  # the exact command line
    when: str  # ISO 8601, UTC
    machine: Mapping[str, Any]  # facts by name, as the next two
    dataset: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]  # the strategies, the limit first; empty where `sweep` has them
    sweep: Sweep | None = None  # if one was asked for
    answer: tuple[str, ...] = ()  # the closing words, paragraph by paragraph

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows, those of a sweep included."""
        swept = self.sweep.points if self.sweep is not None else ()
        return (*self.rows, *(r for p in swept for r in p.rows))

    @property
    def taken(self) -> set[str]:
        """The measures that some row has."""
        return {name for row in self.all_rows for name in row.measures}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        json: dict[str, Any] = {
            "dsprep_bench": VERSION,
            "kind": "read",
            "command": self.command,
            "when": self.when,
            "machine": dict(self.machine),
            "dataset": dict(self.dataset),
            "settings": dict(self.settings),
            "strategies": [r.to_json() for r in self.rows],
            "answer": list(self.answer),
        }
        return json if self.sweep is None else {**json, "sweep": self.sweep.to_json()}

    @classmethod
    def from_json(cls, json: Any, where: object = None) -> BenchReport:
        """Return the report that `to_json` wrote.

        Raises
        ------
        FormatError
            If it is not one, or is of a later version.
        """
        version = json.get("dsprep_bench", VERSION) if isinstance(json, dict) else VERSION
        if version != VERSION:
            raise FormatError(
                "the report is of another version",
                where=where,
                expected=VERSION,
                found=str(version)[:40],
                fix="use the dsprep that wrote it, or a newer one",
            )
        try:
            if json["kind"] != "read":
                raise ValueError(f"there is no kind {json['kind']!r}")
            return cls(
                str(json["command"]),
                str(json["when"]),
                dict(json["machine"]),
                dict(json["dataset"]),
                dict(json["settings"]),
                tuple(map(Row.from_json, json["strategies"])),
                Sweep.from_json(json["sweep"]) if "sweep" in json else None,
                tuple(map(str, json["answer"])),
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
