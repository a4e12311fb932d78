"""What is a finding, and what came out of how many trials."""

from __future__ import annotations

import hashlib
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support import raw

from dsprep.core.schema import Batch, Ragged

# --- what came out ---------------------------------------------------------------------------


@dataclass
class Tally:
    """Outcomes, counted by class; and what should not have come out, each with its trial."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)

    def judge(self, number: int, kind: str, what: str) -> bool:
        """Count what came out; "!" in front makes it a finding, " | " parts it from details."""
        what, _, detail = what.partition(" | ")
        if what.startswith("!"):
            self.counts[kind, f"FINDING {what[1:]}"] += 1
            self.findings.append((number, f"{kind}: {what[1:]}", detail))
        else:
            self.counts[kind, what] += 1
        return what.startswith("!")

    def merge(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.findings += other.findings

    def show(self, most: int = 10) -> Iterator[str]:
        """Say what came out, and `most` of the findings of each sort."""
        kinds: dict[str, list[str]] = {}
        for (kind, outcome), count in sorted(self.counts.items()):
            kinds.setdefault(kind, []).append(f"{outcome} {count:,}")
        for kind, outcomes in kinds.items():
            yield f"{kind:<24} {', '.join(outcomes)}"
        shown: Counter[str] = Counter()
        for number, what, detail in sorted(self.findings):
            shown[what] += 1
            if shown[what] <= most:
                yield f"\nFINDING trial {number}: {what}\n{detail}".rstrip()


# --- values ----------------------------------------------------------------------------------

Values = dict[str, tuple[str, str]]
"""Of each field its type, and a digest of its bits."""


def values(batch: Batch) -> Values:
    """Return what tells batches apart: any bit, length, type or name."""
    found: Values = {}
    for name, column in batch.items():
        ragged = isinstance(column, Ragged)
        array = np.asarray(column.values if ragged else column)
        bits = raw(array) + (np.asarray(column.lengths).tobytes() if ragged else b"")
        shape = [None if ragged else len(array), *array.shape[1:]]
        kind = f"{column.kind if ragged else 'fixed'} {array.dtype.str} {shape}"
        found[name] = kind, hashlib.blake2b(bits, digest_size=8).hexdigest()
    return found


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let this process, and those that it forks, have so many bytes of addresses more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
