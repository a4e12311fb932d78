"""Repeats that adapt: when a mini-epoch has been passed often enough, by what training reports.

At the end of each pass a score is computed, a linear combination of metrics of which less is
better, and a policy looks at those of this mini-epoch so far. Source: Xu et al., "Data-Aware
Storage Tiering for Deep Learning" (PDSW 2021), section IV; `Patience` is its score-based policy,
`Bollinger` its bands. The paper gives neither the passes to wait for nor the periods and the width
of the bands: they are parameters.

A patent, US-12645931-B2, and its family (Hewlett Packard Enterprise) cover the early end of repeats
by such metrics. Whether to use these policies is for you to decide; nothing else here needs them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsprep.errors import FormatError, UsageError, require

MAX_NBYTES = 64 << 20
"""No file of repeats is larger."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A policy of repeats by a score.

    Attributes
    ----------
    score
        By the name of a metric its weight: the score is the sum of the products, and less is
        better, so an accuracy has a weight below zero.
    least, most
        Passes of each mini-epoch at least and at most.
    """

    score: Mapping[str, float] = field(default_factory=lambda: {"loss": 1.0})
    least: int = 1
    most: int = 64

    def __post_init__(self) -> None:
        expected = 'such as score={"loss": 1.0}'
        require(self.score, UsageError, "the score has no metric", expected=expected)
        words, expected = f"least and most are {self.least} and {self.most}", "1 <= least <= most"
        require(1 <= self.least <= self.most, UsageError, words, expected=expected)

    def enough(self, reports: Sequence[Mapping[str, float]]) -> bool:
        """Return whether a mini-epoch has been passed often enough.

        Parameters
        ----------
        reports
            The metrics of each of its passes so far.

        Raises
        ------
        UsageError
            If a metric of the score is not among them, or not a finite number.
        """
        scores = [self._score(report) for report in reports]
        if not self.least <= len(scores) < self.most:
            return len(scores) >= self.most
        return self._enough(scores)

    def _score(self, report: Mapping[str, float]) -> float:
        lacking = self.score.keys() - report.keys()
        facts = {"expected": ", ".join(self.score), "found": ", ".join(report) or "nothing"}
        words = f"the metric {min(lacking, default=None)} was not reported"
        require(not lacking, UsageError, words, **facts)
        total = math.fsum(weight * report[name] for name, weight in self.score.items())
        if not math.isfinite(total):
            raise UsageError("a metric is not a finite number", found=str(dict(report)))
        return total

    def _enough(self, scores: Sequence[float]) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Patience(Scored):
    """The next mini-epoch begins when the score has not got better for some passes.

    Attributes
    ----------
    passes
        So many.
    """

    passes: int = 3

    def _enough(self, scores: Sequence[float]) -> bool:
        before, last = scores[: -self.passes], scores[-self.passes :]
        return bool(before) and min(last) >= min(before)


@dataclass(frozen=True, kw_only=True)
class Bollinger(Scored):
    """The next mini-epoch begins when the score falls below the lower Bollinger band.

    That is the moving average of the scores before, less `width` times their standard deviation.

    Attributes
    ----------
    periods
        Scores of which the average is taken, at least 2.
    width
        K.
    """

    periods: int = 10
    width: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.periods < 2:
            raise UsageError(f"periods is {self.periods}", expected="at least 2")

    def _enough(self, scores: Sequence[float]) -> bool:
        before = scores[-self.periods - 1 : -1]
        if len(before) < self.periods:
            return False
        return scores[-1] < statistics.fmean(before) - self.width * statistics.pstdev(before)


class Replay(tuple[int, ...]):
    """The repeats of an earlier training, to be repeated: from a file with its last state.

    Parameters
    ----------
    file
        What ``Reader.state_dict`` returned, as JSON.

    Raises
    ------
    FormatError
        If it has no repeats.
    OSError
        If it cannot be read.
    """

    def __new__(cls, file: str | Path) -> Replay:
        """Read the file."""
        path = Path(file)
        if path.stat().st_size > MAX_NBYTES:
            raise FormatError("this is not the state of a Reader: it is too large", where=path)
        try:
            repeats = json.loads(path.read_bytes())["repeats"]
            if not repeats or not all(type(n) is int and n > 0 for n in repeats):
                raise ValueError("they are not numbers of passes")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                "the file has no repeats",
                where=path,
                expected="JSON of Reader.state_dict, of a training with adaptive repeats",
                found=str(error)[:80],
            ) from error
        return super().__new__(cls, repeats)
