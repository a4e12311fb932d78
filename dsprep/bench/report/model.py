"""What every output is made of: measures, rows, sweeps, reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsprep.errors import FormatError

VERSION = 1
"""Of the JSON form of a report."""


@dataclass(frozen=True)
class Unit:
    """What a measure is."""

    unit: str  # in which it is told; `"1"` for counts
    words: str  # what it says
    better: int = 0  # `-1` if less is better, `1` if more is, 0 if neither


MEASURES: dict[str, Unit] = {
    "epoch_seconds": Unit("s", "one epoch, the slowest rank's", -1),
    "exposed_seconds": Unit("s", "that the consumer waited for data in an epoch", -1),
    "first_batch_seconds": Unit("s", "before the first batch", -1),
    "exposed_after_first_seconds": Unit("s", "waited after the first group", -1),
    "wait_p50_seconds": Unit("s", "waited for a batch, median", -1),
    "wait_p99_seconds": Unit("s", "waited for a batch, 99th percentile", -1),
    "compute_seconds": Unit("s", "of the steps' own work"),
    "skew_seconds": Unit("s", "waited for other ranks at the end of steps", -1),
    "utilisation_percent": Unit("%", "accelerator utilisation: compute / total", 1),
    "samples_per_second": Unit("samples/s", "delivered by all ranks", 1),
    "gb_per_second": Unit("GB/s", "of samples, delivered by all ranks (1e9 bytes)", 1),
    "limit_percent": Unit("%", "of the rate of the limit", 1),
    "read_calls": Unit("1", "read system calls in an epoch", -1),
    "asked_bytes": Unit("B", "asked for by read calls in an epoch"),
    "device_bytes": Unit("B", "that came from the device in an epoch"),
    "network_bytes": Unit("B", "that the mount or an interface received in an epoch"),
    "major_faults": Unit("1", "page faults that had to read, in an epoch", -1),
    "context_switches": Unit("1", "voluntary and other, in an epoch", -1),
    "cpu_seconds": Unit("s", "of processors, user and system, in an epoch", -1),
    "peak_rss_bytes": Unit("B", "of memory, all processes of the slowest rank at its peak", -1),
}
"""Every measure there is, in the order in which they are reported."""


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


@dataclass(frozen=True)
class Row:
    """A strategy, and what it cost."""

    # name, words: which one; what it does
    name: str
    words: str = ""
    # by the names of `MEASURES`; empty where there is a problem
    measures: Mapping[str, Measure] = field(default_factory=dict)
    # why there are no numbers: wrong samples, warm pages in a cold run, a failure
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # remarks that do not touch the numbers
    runs: int = 0  # epochs that were measured, over all repeats
    evidence: str = ""  # of cold runs: what shows that they were, in a few words

    def value(self, name: str) -> float | None:
        """Return the median of a measure, None if it was not taken."""
        found = self.measures.get(name)
        return None if found is None else found.value

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
        measures = {
            str(k): Measure(float(m["value"]), float(m["least"]), float(m["most"]))
            for k, m in json["measures"].items()
            if k in MEASURES
        }
        return cls(
            str(json["name"]),
            str(json.get("description", "")),
            measures,
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


@dataclass(frozen=True)
class Report:
    """All that a benchmark found."""

    command: str  # the exact command line
    when: str  # ISO 8601, UTC
    # machine, dataset, settings: facts, by name
    machine: Mapping[str, Any]
    dataset: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]  # the strategies; the limit first. Empty where `sweep` has them.
    sweep: Sweep | None = None  # if one was asked for
    answer: tuple[str, ...] = ()  # the closing words, paragraph by paragraph

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows, those of a sweep included."""
        swept = self.sweep.points if self.sweep is not None else ()
        return (*self.rows, *(r for p in swept for r in p.rows))

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
        if self.sweep is not None:
            json["sweep"] = {
                "parameter": self.sweep.parameter,
                "points": [
                    {"value": p.value, "strategies": [r.to_json() for r in p.rows]}
                    for p in self.sweep.points
                ],
                "knees": dict(self.sweep.knees),
            }
        return json

    @classmethod
    def from_json(cls, json: Any, where: object = None) -> Report:
        """Return the report that `to_json` wrote.

        Raises
        ------
        FormatError
            If it is none, or of a later version.
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
            sweep = None
            if "sweep" in json:
                told = json["sweep"]
                points = tuple(
                    Point(str(p["value"]), tuple(map(Row.from_json, p["strategies"])))
                    for p in told["points"]
                )
                knees = {str(k): str(v) for k, v in told.get("knees", {}).items()}
                sweep = Sweep(str(told["parameter"]), points, knees)
            return cls(
                str(json["command"]),
                str(json["when"]),
                dict(json["machine"]),
                dict(json["dataset"]),
                dict(json["settings"]),
                tuple(map(Row.from_json, json["strategies"])),
                sweep,
                tuple(map(str, json["answer"])),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise FormatError(
                "this is not a report of dsprep bench", where=where, fix="write one with --json"
            ) from error
