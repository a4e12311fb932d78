"""Two tiers of storage: what can be measured with them, the measures, and the model beside them.

The fast tier is a directory, the capacity tier the dataset itself. It can be throttled here, so
that one disk shows how the two work together; everything that is written about it then says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsprep.bench.strategies import MET, THROTTLED, TIERED
from dsprep.bench.task import Conditions, Drawn
from dsprep.cache.folder import Size
from dsprep.core.units import parse_rate, show_binary_nbytes
from dsprep.errors import UsageError
from dsprep.reader.ledger import KEPT
from dsprep.verbs.tiers import drawn as drawn_by_model

PASSES = ("repeats", "mini-epochs")
"""What is swept of passes: only `MET` has them."""

NEEDS_NONE = ("pread-limit", "dummy")
"""Ways that run beside the others, and are not throttled."""


def label(rate: str) -> str:
    """Return the words for a throttled capacity tier.

    >>> label("200MB/s")
    'capacity tier throttled to 200.0 MB/s by the benchmark'
    """
    return f"capacity tier throttled to {show_binary_nbytes(parse_rate(rate))}/s by the benchmark"


def check(names: Sequence[str], settings: Conditions, ranks: int, swept: str) -> None:
    """Raise `UsageError` if strategies cannot be measured with these tiers.

    Parameters
    ----------
    names
        The strategies.
    settings, ranks
        How they run.
    swept
        The parameter that is swept; empty: none.
    """
    tiered = [name for name in names if name in TIERED]
    if tiered and settings.tier is None:
        raise UsageError(f"{tiered[0]} needs a fast tier", fix="give --tier a directory on it")
    if settings.tier is not None and not settings.tier.is_dir():
        raise UsageError("--tier is not a directory", where=settings.tier)
    if MET in names and settings.compute == "none":
        raise UsageError(
            f"{MET} needs a step that takes time: how fast data are consumed decides about stalls",
            fix="give --compute, such as 12ms",
        )
    if swept in PASSES and MET not in names:
        raise UsageError(f"nothing but {MET} has {swept}", fix=f"add --strategy {MET}")
    Size.parse(settings.tier_size)
    passes = settings.mini_epochs * settings.repeats
    if MET in names and passes > KEPT:
        raise UsageError(
            f"{settings.mini_epochs} mini-epochs, {settings.repeats} times: {passes:,} passes",
            expected=f"{KEPT} at most",
        )
    if settings.tier_bandwidth is None:
        return
    parse_rate(settings.tier_bandwidth)
    others = [name for name in names if name not in (*THROTTLED, *NEEDS_NONE)]
    if others:
        raise UsageError(
            f"--tier-bandwidth cannot throttle {others[0]}",
            expected="strategies among " + ", ".join(THROTTLED),
        )
    if ranks > 1:
        raise UsageError(
            f"--tier-bandwidth throttles one process, and there are {ranks} ranks",
            fix="give --ranks 1, or measure a real capacity tier",
        )


def remark(name: str, settings: Conditions) -> str:
    """Return what has to stand with the figures of a strategy; empty: nothing."""
    if settings.tier_bandwidth is None:
        return ""
    return label(settings.tier_bandwidth) if name in THROTTLED else "not throttled"


def measures(drawn: Sequence[Drawn], seconds: float) -> dict[str, float]:
    """Return the measures of an epoch, from what each rank counted."""
    read, cached = sum(d.read for d in drawn), sum(d.cached for d in drawn)
    copied = sum(d.copied for d in drawn)
    return {
        "hit_percent": 100 * cached / max(1, read),
        "drawn_gb_per_second": (read - cached + copied) / max(seconds, 1e-9) / 1e9,
        "copied_bytes": float(copied),
        "stall_seconds": max(d.stalled for d in drawn),
    }


def model(consumed: float, capacity: float, repeats: int) -> dict[str, float]:
    """Return what the model expects: see `dsprep.verbs.tiers`.

    Parameters
    ----------
    consumed
        Bytes per second that the steps take when they never wait.
    capacity
        Bytes per second of the capacity tier.
    repeats
        Passes of each part.
    """
    drawn = drawn_by_model(consumed, capacity, [repeats])
    return {
        "model_gb_per_second": repeats * drawn / 1e9,
        "model_drawn_gb_per_second": drawn / 1e9,
    }
