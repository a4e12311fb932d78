"""What a storage gives, in a few numbers: measured by ``bench storage``, published, or by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UsageError, near

VERSION = 1
"""Of the JSON form."""

HEADER = {"dsprep_bench": VERSION, "kind": "storage"}
"""What the JSON begins with."""

LARGEST = 1 << 20
"""Bytes of such a file at most."""


class ReadSeconds(NamedTuple):
    """Quantiles of the seconds that one read takes."""

    p50: float
    p99: float
    p999: float


@dataclass(frozen=True, kw_only=True)
class StorageFigures:
    """What a storage gives. None, 0 nodes and empty texts: not measured.

    Attributes
    ----------
    name
        Of the storage, for people.
    call_seconds
        Latency of one small read, cold; may be 0.
    stream_bytes_per_second
        Of one stream of one process: W.
    total_bytes_per_second
        Of all processes together: A. With P streams each gets w: 1/w = 1/W + (P - 1)/A. None: it
        was not measured, or reading did not saturate.
    streams_measured
        Pairs of a number of streams and the bytes per second of all of them.
    seek_seconds
        What a random read takes beyond a sequential one.
    transfers_measured
        Triples of bytes per read and the seconds of one, sequential and random.
    read_seconds, spread_nbytes
        Quantiles of one read of so many bytes.
    opens_per_second
        Files opened per second, of all processes.
    direct
        Whether the page cache was bypassed (O_DIRECT).
    direct_bytes_per_second
        Of one stream with O_DIRECT; None where that is refused.
    nodes
        From how many nodes it was measured.
    mount
        Type and options of the file system.
    measured_on, obtained
        The date, and how: what was read, what shows that it was cold, or which paper says so.

    Raises
    ------
    UsageError
        If a number is not possible; it names the field.
    """

    name: str = ""
    call_seconds: float
    stream_bytes_per_second: float
    total_bytes_per_second: float | None = None
    streams_measured: tuple[tuple[int, float], ...] = ()
    seek_seconds: float | None = None
    transfers_measured: tuple[tuple[int, float, float], ...] = ()
    read_seconds: ReadSeconds | None = None
    spread_nbytes: int | None = None
    opens_per_second: float | None = None
    direct: bool | None = None
    direct_bytes_per_second: float | None = None
    nodes: int = 0
    mount: str = ""
    measured_on: str = ""
    obtained: str = ""

    def __post_init__(self) -> None:
        _number("call_seconds", self.call_seconds)
        _number("stream_bytes_per_second", self.stream_bytes_per_second, above=True)
        for name in ("total_bytes_per_second", "opens_per_second", "direct_bytes_per_second"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), above=True)
        if self.seek_seconds is not None:
            _number("seek_seconds", self.seek_seconds)
        for streams, rate in self.streams_measured:
            _number("streams_measured", streams, above=True, whole=True)
            _number("streams_measured", rate, above=True)
        for seconds in chain(*self.transfers_measured):
            _number("transfers_measured", seconds)
        if (self.read_seconds is None) != (self.spread_nbytes is None):
            raise UsageError("read_seconds and spread_nbytes belong together")
        if self.read_seconds is not None:
            for value in (*self.read_seconds, self.spread_nbytes):
                _number("read_seconds", value, above=True)
            if list(self.read_seconds) != sorted(self.read_seconds):
                raise UsageError("read_seconds do not rise", expected="p50 <= p99 <= p999")
            _number("spread_nbytes", self.spread_nbytes, above=True, whole=True)
        _number("nodes", self.nodes, whole=True)

    def bytes_per_second(self, streams: int) -> float:
        """Return what each of so many streams gets: w of 1/w = 1/W + (P - 1)/A."""
        slower = 0.0 if self.total_bytes_per_second is None else 1 / self.total_bytes_per_second
        return 1 / (1 / self.stream_bytes_per_second + (streams - 1) * slower)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        read = None if self.read_seconds is None else self.read_seconds._asdict()
        return {**HEADER, **asdict(self), "read_seconds": read}

    @classmethod
    def from_json(cls, content: Any, where: object = None) -> StorageFigures:
        """Return the figures that `to_json` wrote.

        Raises
        ------
        FormatError
            If keys are missing or unknown, or a number is not possible; it names file and field.
        """
        if not isinstance(content, dict) or {k: content.get(k) for k in HEADER} != HEADER:
            raise _refused("this is not of dsprep bench storage", where, expected=HEADER)
        given = {k: v for k, v in content.items() if k not in HEADER}
        known = [f.name for f in fields(cls)]
        for name in given.keys() - set(known):
            raise _refused(f"there is no field {name[:40]!r}", where, fix=near(name, known))
        for name in ("call_seconds", "stream_bytes_per_second"):
            if name not in given:
                raise _refused(f"the field {name} is missing", where)
        for name in ("name", "mount", "measured_on", "obtained"):
            if not isinstance(given.get(name, ""), str):
                raise _refused(f"{name} is {given[name]!r}", where, expected="a text")
        if not isinstance(given.get("direct"), bool | None):
            raise _refused(f"direct is {given['direct']!r}", where, expected="true or false")
        try:
            if (read := given.get("read_seconds")) is not None:
                given["read_seconds"] = ReadSeconds(**read)
            pairs = given.get("streams_measured", ())
            given["streams_measured"] = tuple((streams, rate) for streams, rate in pairs)
            triples = given.get("transfers_measured", ())
            given["transfers_measured"] = tuple((n, one, other) for n, one, other in triples)
        except (TypeError, ValueError) as error:
            raise _refused(f"measured figures: {error}", where) from error
        try:
            return cls(**given)
        except UsageError as error:
            raise _refused(str(error), where) from error

    @classmethod
    def load(cls, path: Path) -> StorageFigures:
        """Return the figures of a file; see `from_json`."""
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        try:
            content = json.loads(raw) if len(raw) <= LARGEST else None
        except (ValueError, RecursionError) as error:
            raise _refused("this is not JSON", path) from error
        return cls.from_json(content, path)

    @property
    def words(self) -> str:
        """The figures in a line."""
        total = self.total_bytes_per_second
        together = "not measured" if total is None else f"{show_nbytes(total)}/s"
        return (
            f"{self.call_seconds * 1e3:.3g} ms a call, {show_nbytes(self.stream_bytes_per_second)}"
            f"/s a stream, {together} in all"
        )


def _number(name: str, value: Any, *, above: bool = False, whole: bool = False) -> None:
    """Check a number: finite, at least 0 or above it."""
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}", expected="a whole number" if whole else "a number")
    if value < 0 or (above and not value):
        raise UsageError(f"{name} is {value!r}", expected="more than 0" if above else "0 or more")


def _refused(
    problem: str, where: object, *, expected: object = None, fix: str | None = None
) -> FormatError:
    again = fix or "measure with dsprep bench storage DIR --out FILE"
    return FormatError(problem, where=where, expected=expected, fix=again)
