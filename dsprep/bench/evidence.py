"""Whether what was read was cold, and the evidence for it: pure.

Pages that lay in the page cache before show that a run was warm. Where the kernel counts what a
process fetches, as from a device of this machine, the bytes have to be there too. Elsewhere, on
most network mounts, it counts nothing: then the run has its figures, with words for what was seen.
Whether a server had the data in memory is not seen from here at all, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsprep.bench.received import Received

COLD = 0.9
"""Share of the bytes that has to be fetched in a cold run."""

HELD = 0.02
"""Share of the files that the page cache may hold when a cold run begins."""

DEVICE, UNKNOWN = "from the device", "coldness unknown"
SERVER = "server cache"
SERVER_UNKNOWN, SERVER_WARM = f"{SERVER} unknown", f"{SERVER} warm"
UNKEPT = "nothing of this mount stays in the page cache, so warm reads ask the server, too"
OVER, ANY = "of the bytes over ", "over any interface"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one process saw of one cold run."""

    held: float | None = None  # share of the files in the page cache before; None: unseen
    keeps: bool = True  # whether the page cache keeps anything that is read from the mount
    counts: bool | None = None  # whether the kernel counts what processes fetch; None: unknown
    remote: bool = False  # whether the mount is named after another machine
    opening: int = 0  # bytes that were counted while the files were opened
    opened: float | None = None  # share of the files in the page cache then; None: not looked at
    received: Received = field(default_factory=Received)  # what the node received meanwhile
    node: str = ""  # processes with the same one see the same of it


@dataclass(frozen=True, kw_only=True)
class Evidence(Seen):
    """What is known about one cold run: what all its processes saw together, and more."""

    device: int  # bytes that the kernel counted for the processes
    least: int  # bytes that have to be fetched, 1 at least
    server: str = SERVER_UNKNOWN  # what was done about the server's cache, in words

    @classmethod
    def of(cls, looks: Sequence[Seen], device: int, least: int, server: str) -> Evidence:
        """Return what the processes of a run saw together.

        What a node received is that of one of its processes, and not of each.
        """
        cached = [s.held for s in looks]
        opened = [s.opened for s in looks if s.opened is not None]
        answers = [s.counts for s in looks if s.counts is not None]
        nodes: dict[str, list[Received]] = {}
        for each in looks:
            nodes.setdefault(each.node, []).append(each.received)
        mounts = [_largest(r.mount for r in of) for of in nodes.values()]
        interfaces = {
            n: sum(max(r.interfaces.get(n, 0) for r in of) for of in nodes.values())
            for n in sorted({n for s in looks for n in s.received.interfaces})
        }
        mount = None if None in mounts else sum(m for m in mounts if m is not None)
        return cls(
            held=None
            if None in cached
            else max((h for h in cached if h is not None), default=None),
            keeps=any(s.keeps for s in looks),
            counts=answers[0] if answers else None,
            remote=any(s.remote for s in looks),
            opening=sum(s.opening for s in looks),
            opened=max(opened, default=None),
            received=Received(mount, interfaces),
            device=device,
            least=least,
            server=server,
        )

    @property
    def network(self) -> int | None:
        """Bytes that came over the network; None if no counter can have them."""
        if self.received.mount is not None or not self._interface:
            return self.received.mount
        came = self.received.interfaces[self._interface]
        return came if self.remote or came >= COLD * self.least else None

    @property
    def problem(self) -> str:
        """Why the run was not cold; empty if nothing shows that it was warm."""
        if self.held is not None and self.held > HELD:
            reason = f"not cold: the page cache still held {self.held:.0%} of the files"
            if self.held < 1 - HELD:
                return reason
            return f"{reason}; where files live in memory (tmpfs) nothing is cold (--warm)"
        fetched, before = self.device / self.least, self.opening / self.least
        few = "before the clock started; they are too few to be read cold (--warm)"
        if self.counts:
            if fetched >= COLD:
                return ""
            if fetched + before >= COLD:
                share = max(0.0, 1 - fetched)
                return f"not cold: opening the files brought in {share:.0%} of the bytes {few}"
            where = "the server" if self.remote else "a device"
            return f"not cold: {fetched:.0%} of the bytes came from {where}"
        if self.opened is not None and self.opened > 1 - COLD:
            return f"not cold: opening the files brought in {self.opened:.0%} of them {few}"
        if self.held is None and self.counts is None and 0 < fetched < COLD:
            return f"not cold: {fetched:.0%} of the bytes came from a device"
        mount = self.received.mount
        if self.held is None and mount is not None and mount < COLD * self.least:
            return f"not cold: {mount / self.least:.0%} of the bytes came from the server"
        return ""

    @property
    def words(self) -> str:
        """The evidence, in a few words."""
        if self._fetched and not self.remote:
            bare = self.server == SERVER_UNKNOWN
            return DEVICE if bare else f"{DEVICE}, {self.server}"
        known = []
        if self.held is not None and not self._fetched:
            known.append("pages dropped" if self.keeps else "no client cache")
        known += self._bytes()
        if known:
            return ", ".join([*known, self.server])
        return UNKNOWN if self.server == SERVER_UNKNOWN else f"{UNKNOWN}, {self.server}"

    @property
    def _fetched(self) -> bool:
        """Whether the kernel counted enough for the processes, as far as it counts here."""
        return self.counts is not False and self.device >= COLD * self.least

    def _bytes(self) -> list[str]:
        """Return how many bytes came from where, if anything counted them."""
        if self._fetched:
            return [f"{self.device / self.least:.2f}x of the bytes from the server"]
        if self.received.mount is not None:
            return [f"{self.received.mount / self.least:.2f}x of the bytes from the server"]
        if self.counts is None and self.device:
            return [f"{self.device / self.least:.2f}x of the bytes from a device"]
        if not self._interface:
            return []
        share = self.received.interfaces[self._interface] / self.least
        if share >= COLD:
            return [f"{share:.2f}x {OVER}{self._interface}"]
        return [f"at most {share:.2f}x of them {ANY}"] if self.remote else []

    @property
    def _interface(self) -> str:
        """The interface that received most: this machine's own (lo) only if it alone had enough."""
        interfaces = self.received.interfaces
        order = sorted(interfaces, key=lambda n: (n == "lo", -interfaces[n]))
        enough = (n for n in order if interfaces[n] >= COLD * self.least)
        return next(enough, max(order, key=lambda n: interfaces[n], default=""))

    @property
    def share(self) -> float:
        """Bytes that were seen to arrive, as a share of those that must."""
        return (self.device if self._fetched else self.network or 0) / self.least


def weakest(evidence: Sequence[Evidence]) -> Evidence | None:
    """Return the weakest evidence of several runs; None if there are no runs."""
    unseen = [e for e in evidence if e.held is None]
    return min(unseen or evidence, key=lambda e: e.share, default=None)


def server_words(warm: bool, evict: str | None) -> str:
    """Return what was done about the server's cache."""
    if evict is not None:
        return f"{SERVER} dropped by {evict}"
    return SERVER_WARM if warm else SERVER_UNKNOWN


def _largest(values: Any) -> int | None:
    known = list(values)
    return None if None in known or not known else max(known)
