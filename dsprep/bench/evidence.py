"""Evidence that a run was cold: pages cached before it, and bytes that the kernel counted.

Only bytes fetched from a device of this machine are counted for a process: of most network mounts
none are. Whether a server had the data in memory cannot be seen from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLD = 0.9
"""Share of the bytes that comes from a device in a cold run."""

HELD = 0.02
"""Share of the files that the page cache may hold when a cold run begins."""

DEVICE = "from the device"


@dataclass(frozen=True)
class Evidence:
    """Facts about one cold run, of all its processes together."""

    resident: float | None  # share of the files in the page cache before; None: it cannot be seen
    device: int  # bytes that the kernel counted for the processes
    needed: int  # bytes that have to be fetched, 1 at least

    @property
    def share(self) -> float:
        """Bytes that were counted, as a share of those that must be fetched."""
        return self.device / self.needed

    @property
    def problem(self) -> str:
        """The reason why the run was not cold; empty if there is none."""
        if self.resident is None or self.resident <= HELD:
            return ""
        reason = f"not cold: the page cache still held {self.resident:.0%} of the files"
        if self.resident < 1 - HELD:
            return reason
        return f"{reason}; where files live in memory (tmpfs) nothing is cold (--warm)"

    @property
    def words(self) -> str:
        """The evidence, in a few words."""
        if self.share >= COLD:
            return DEVICE
        dropped = "" if self.resident is None else "pages dropped, "
        return f"{dropped}{self.share:.0%} of the bytes {DEVICE}: a network mount, or warm"


def largest(shares: Sequence[float | None]) -> float | None:
    """Return the largest share that processes saw; None if one of them could not see it."""
    known = [s for s in shares if s is not None]
    return max(known, default=None) if len(known) == len(shares) else None


def weakest(evidence: Sequence[Evidence]) -> Evidence | None:
    """Return the weakest evidence of several runs; None if there are no runs."""
    return min(evidence, key=lambda e: e.share, default=None)
