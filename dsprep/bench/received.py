"""What a node received over its network, as far as that is counted: per mount, or in all.

- NFS counts per mount, in ``/proc/self/mountstats``, the bytes that were read from the server.
- Lustre's clients count per target (``osc``, and ``mdc`` for data on metadata targets) the bytes of
  bulk reads. (``llite`` counts what programs asked for, from the page cache too: no evidence.)
- Network interfaces count all that they receive: of a read, and of everything else meanwhile.

None of it is of a single process.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsprep.bench.machine import Mount, mount_of, text_of, unescaped

ROOT = Path("/")
"""The directory that holds ``proc`` and ``sys``."""

TIMEOUT = 20.0
"""Seconds to wait for ``lctl``."""

WORD = 4
"""Bytes of which an InfiniBand port counts."""


@dataclass(frozen=True)
class Received:
    """Bytes, counted since some time; the difference of two is what came meanwhile."""

    mount: int | None = None  # for the mount; None where nothing counts that
    # by interface, whatever they were for
    interfaces: Mapping[str, int] = field(default_factory=dict)

    def __sub__(self, other: Received) -> Received:
        mount = None
        if self.mount is not None and other.mount is not None:
            mount = max(0, self.mount - other.mount)
        both = self.interfaces.keys() & other.interfaces.keys()
        each = {n: max(0, self.interfaces[n] - other.interfaces[n]) for n in sorted(both)}
        return Received(mount, each)


def mount_under(path: Path) -> Mount | None:
    """Return the mount that holds a path, None if that is unknown."""
    try:
        return mount_of(path.resolve())
    except OSError:
        return None


def remote(mount: Mount | None) -> bool:
    """Whether what is mounted has the name of another machine: ``host:/path``, ``//host/share``."""
    if mount is None:
        return False
    return mount.source.startswith("//") or ":" in mount.source.partition("/")[0]


def received(mount: Mount | None, root: Path = ROOT) -> Received:
    """Return what was received until now, for a mount and in all."""
    nbytes = None
    if mount is not None and mount.kind.startswith("nfs"):
        nbytes = nfs(text_of(root / "proc/self/mountstats"), mount.point)
    elif mount is not None and mount.kind.startswith("lustre"):
        nbytes = _lustre(mount.source, root)
    return Received(nbytes, {**interfaces(text_of(root / "proc/net/dev")), **_infiniband(root)})


def node(root: Path = ROOT) -> str:
    """Return what processes that see the same counts have in common."""
    try:
        network = str((root / "proc/self/ns/net").readlink())
    except OSError:
        network = ""
    return f"{text_of(root / 'proc/sys/kernel/random/boot_id').strip()} {network}"


# --- what is counted where -------------------------------------------------------------------


def nfs(text: str, point: str) -> int | None:
    """Return the bytes that the server sent for the mount at `point`: the fifth of ``bytes:``."""
    there = False
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["device"] and words[2:4] == ["mounted", "on"] and len(words) > 4:
            there = unescaped(words[4]) == point
        elif there and words[:1] == ["bytes:"] and len(words) > 5 and words[5].isdecimal():
            return int(words[5])
    return None


def lustre(texts: Iterable[str]) -> int | None:
    """Return the bytes that targets sent, of their ``stats``; None if there are none."""
    nbytes = None
    for text in texts:
        nbytes = nbytes or 0
        for line in text.splitlines():
            words = line.split()  # name, count, "samples", unit, least, most, sum, squares
            if words[:1] == ["read_bytes"] and len(words) > 6 and words[6].isdecimal():
                nbytes += int(words[6])
    return nbytes


def _lustre(source: str, root: Path) -> int | None:
    name = source.rpartition(":/")[2].partition("/")[0]
    if not re.fullmatch(r"[\w.-]+", name):
        return None
    for folder in (root / "sys/kernel/debug/lustre", root / "proc/fs/lustre"):
        files = [
            p for kind in ("osc", "mdc") for p in sorted(folder.glob(f"{kind}/{name}-*/stats"))
        ]
        texts = [text for p in files if (text := text_of(p))]
        if texts:
            return lustre(texts)
    text = _lctl([f"{kind}.{name}-*.stats" for kind in ("osc", "mdc")])
    return lustre([text]) if text else None


def _lctl(names: list[str]) -> str:
    """Return what ``lctl`` prints of parameters: some may be read that way only."""
    program = shutil.which("lctl")
    if program is None:
        return ""
    command = [program, "get_param", "-n", *names]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def interfaces(text: str) -> dict[str, int]:
    """Return the bytes that each interface received, of ``/proc/net/dev``."""
    counters = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and words[0].isdecimal():
            counters[name.strip()] = int(words[0])
    return counters


def _infiniband(root: Path) -> dict[str, int]:
    """Return the bytes that came to each port, by RDMA too, which no network device counts."""
    counters = {}
    for path in sorted(root.glob("sys/class/infiniband/*/ports/*/counters/port_rcv_data")):
        text = text_of(path).strip()
        if text.isdecimal():
            counters[f"{path.parts[-5]} port {path.parts[-3]}"] = WORD * int(text)
    return counters
