"""The speed of a storage in a few numbers: measured by ``bench storage``, published, or by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UsageError

VERSION = 1
"""The version of the JSON form."""

HEADER = {"dsprep_bench": VERSION, "kind": "storage"}
"""The first keys of the JSON."""

LARGEST = 1 << 20
"""Bytes of a storage report at most."""

RANGE = 1e-12, 1e18
"""Numbers other than 0 that a storage may have: what is computed of them stays finite."""

COPYING = 8
"""Threads that copy on each node, as those of `stage`."""

REQUIRED = ("call_seconds", "stream_bytes_per_second")
ABOVE_0 = ("stream_bytes_per_second", "total_bytes_per_second", "direct_bytes_per_second")
NUMBERS = (*ABOVE_0, "call_seconds", "seek_seconds", "spread_nbytes", "opens_per_second", "nodes",
           "rounds_ratio")  # fmt: skip
TEXTS = ("name", "mount", "measured_on", "obtained")
"""Fields by what they hold."""

NORMAL_P99 = 2.3263478740408408
"""The 99th percentile of a standard normal distribution."""


class ReadSeconds(NamedTuple):
    """Quantiles of the seconds that one read takes."""

    p50: float
    p99: float
    p999: float


@dataclass(frozen=True, kw_only=True)
class StorageFigures:
    """The speed of a storage. None, 0 nodes and empty texts: not measured.

    Attributes
    ----------
    name
        Of the storage, for people.
    call_seconds
        Latency of one small read at a random offset, cold: the mean; may be 0.
    stream_bytes_per_second
        Of one stream of one process: W.
    total_bytes_per_second
        Of all processes together, however many: A. None also where reading did not saturate.
    streams_measured
        Pairs of a number of streams and the bytes per second of all of them.
    rounds_ratio
        Between the fastest and the slowest of several rounds that measured the same, at most.
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
    rounds_ratio: float | None = None
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
        numbers = [(name, getattr(self, name)) for name in NUMBERS]
        numbers = [
            (name, v) for name, v in numbers if v is not None or name in (*REQUIRED, "nodes")
        ]
        numbers += [("streams_measured", v) for pair in self.streams_measured for v in pair]
        numbers += [("transfers_measured", v) for three in self.transfers_measured for v in three]
        numbers += [("read_seconds", v) for v in self.read_seconds or ()]
        for name, value in numbers:
            may_be_0 = name in ("call_seconds", "seek_seconds", "transfers_measured", "nodes")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UsageError(f"{name} is {value!r}", expected="a number")
            if not (RANGE[0] <= value <= RANGE[1] or (may_be_0 and value == 0)):
                expected = f"{'0 or ' * may_be_0}{RANGE[0]:g} to {RANGE[1]:g}"
                raise UsageError(f"{name} is {value!r:.40}", expected=expected)
        read = self.read_seconds
        if (read is None) != (self.spread_nbytes is None):
            raise UsageError("read_seconds and spread_nbytes belong together")
        if read is not None and not read.p50 <= read.p99 <= min(read.p999, 1e9 * read.p50):
            raise UsageError("read_seconds do not rise", expected="p50 <= p99 <= p999, 1e9 p50")

    @property
    def sigma(self) -> float:
        """Of the logarithm of the time of a read, as p50 and p99 give it; 0: not measured."""
        read = self.read_seconds
        return 0.0 if read is None else math.log(read.p99 / read.p50) / NORMAL_P99

    def alone(self, nbytes: float) -> float:
        """Return the seconds of a read at a random offset while nobody else reads, the mean.

        Up to the largest transfer that was measured they are interpolated.
        """
        transfers = np.array(sorted(self.transfers_measured) or [(0, 0, self.call_seconds)])
        sizes, seconds = transfers[:, 0], np.maximum.accumulate(transfers[:, 2])
        beyond = max(0.0, nbytes - sizes[-1]) / self.stream_bytes_per_second
        return float(np.interp(nbytes, sizes, seconds) + beyond)

    def bytes_per_second(self, streams: float) -> float:
        """Return what each of P streams gets: w of 1/w = 1/W + (P - 1)/A.

        Between measured numbers of streams 1/w is interpolated; each one beyond them adds 1/A.
        """
        total = self.total_bytes_per_second
        each = 0.0 if total is None else 1 / total
        alone = [(1, 1 / self.stream_bytes_per_second)]
        points = sorted((n, n / rate) for n, rate in self.streams_measured) or alone
        counts = [n for n, _ in points]
        slowness = np.maximum.accumulate([seconds for _, seconds in points])
        beyond = max(0.0, streams - counts[-1]) * each
        return float(1 / (np.interp(streams, counts, slowness) + beyond))

    def copy_rate(self, nodes: int) -> float:
        """Return the bytes per second that nodes copy together, each by `COPYING` streams."""
        streams = nodes * COPYING
        return streams * self.bytes_per_second(streams)

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
            raise _refused("this is not of dsprep bench storage", where)
        given = {k: v for k, v in content.items() if k not in HEADER}
        known = [f.name for f in fields(cls)]
        wrong = [f"there is no field {k[:40]!r}" for k in given if k not in known]
        wrong += [f"the field {k} is missing" for k in REQUIRED if k not in given]
        wrong += [f"{k} is not a text" for k in TEXTS if not isinstance(given.get(k, ""), str)]
        if wrong:
            raise _refused(wrong[0], where)
        try:
            if (read := given.get("read_seconds")) is not None:
                given["read_seconds"] = ReadSeconds(**read)
            pairs, triples = (given.get(k, ()) for k in ("streams_measured", "transfers_measured"))
            given["streams_measured"] = tuple((streams, rate) for streams, rate in pairs)
            given["transfers_measured"] = tuple((n, one, other) for n, one, other in triples)
            return cls(**given)
        except UsageError as error:
            raise _refused(str(error), where) from error
        except (TypeError, ValueError) as error:
            raise _refused("measured figures are not understood", where) from error

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


def _refused(problem: str, where: object) -> FormatError:
    again = "measure again with dsprep bench storage DIR --out FILE"
    return FormatError(problem, where=where, fix=again)
