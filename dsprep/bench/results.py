"""What one process of a benchmark measured, as it travels back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsprep.bench.counters import Counters
from dsprep.bench.evidence import Seen


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One measured epoch of one rank.

    Attributes
    ----------
    samples
        Delivered.
    seconds
        From the first step to behind the last one, without the time that checking took.
    waits
        Seconds that the consumer waited for the batch of each step, and for the end.
    computing
        Seconds of the steps' own work.
    skew
        Seconds that this rank waited for others at the end of steps.
    counters
        What the kernel counted.
    light
        The light sum of what was delivered; None where nothing is.
    excess
        Whether there were more batches than steps.
    seen
        What shows whether the epoch was cold, or could be warm; None if nobody looked.
    """

    samples: int
    seconds: float
    waits: tuple[float, ...]
    computing: float
    skew: float
    counters: Counters
    light: int | None
    excess: bool = False
    seen: Seen | None = None

    @property
    def exposed(self) -> float:
        """Seconds that the consumer waited for data."""
        return sum(self.waits)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank did in one run of a strategy.

    Attributes
    ----------
    epochs
        Those that were measured.
    peak_rss
        Bytes of memory of its processes at their peaks.
    full
        The full sum over one more epoch; None if there was none.
    checked
        Samples of that epoch.
    """

    epochs: tuple[Epoch, ...]
    peak_rss: int
    full: int | None = None
    checked: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Result:
        """Return the result that `to_json` wrote."""
        return cls(**{**json, "epochs": tuple(map(_epoch, json["epochs"]))})


def _epoch(json: Mapping[str, Any]) -> Epoch:
    seen = None if json["seen"] is None else Seen.from_json(json["seen"])
    told = {"waits": tuple(json["waits"]), "counters": Counters(**json["counters"]), "seen": seen}
    return Epoch(**{**json, **told})
