"""The kernel's counts for this process and the processes that it started.

``/proc/PID/io`` (proc_pid_io(5)) has the read calls, the bytes that they asked for and the bytes
that really were fetched from a device, page faults on mapped files included; ``stat`` and
``status`` have faults, context switches, processor time and memory. What processes that ended
did is in their parent's counts once it has waited for them; of faults, switches and time,
`getrusage` gives the same.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from dsprep.bench.machine import text_of

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Counters:
    """Counts since the processes began; the difference of two is what happened between."""

    calls: int = 0  # read system calls
    requested: int = 0  # bytes that they returned
    device: int = 0  # bytes fetched from devices
    faults: int = 0  # major page faults
    switches: int = 0  # context switches, voluntary and not
    cpu: float = 0.0  # seconds of processors, user and system

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started and that still run, and theirs."""
    processes = []
    for thread in _threads(pid):
        for child in text_of(Path(f"/proc/{pid}/task/{thread}/children")).split():
            processes += [int(child), *descendants(int(child))]
    return processes


def count() -> Counters:
    """Return the counts of this process and of all that it started.

    What this process reads from object stores counts as read from a device, a request as a call.
    """
    own, ended = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = _io("self")
    for use in (own, ended):
        total += Counters(
            faults=use.ru_majflt,
            switches=use.ru_nvcsw + use.ru_nivcsw,
            cpu=use.ru_utime + use.ru_stime,
        )
    if (module := sys.modules.get("dsprep.storage.objects.requests")) is not None:
        requested = module.counters
        total += Counters(
            calls=requested["requests"], requested=requested["nbytes"], device=requested["nbytes"]
        )
    for pid in descendants(os.getpid()):
        total += _io(str(pid)) + _used(pid)
    return total


def fetched() -> int:
    """Return the bytes that were fetched for this process alone."""
    return _io("self").device


def peak_rss() -> int:
    """Return the bytes of memory that this process and those it runs held at their peaks."""
    pids = ["self", *map(str, descendants(os.getpid()))]
    return sum(_status(pid, "VmHWM") * 1024 for pid in pids)


def _io(pid: str) -> Counters:
    known = dict(
        line.split(": ") for line in text_of(Path(f"/proc/{pid}/io")).splitlines() if ": " in line
    )
    return Counters(
        calls=int(known.get("syscr", 0)),
        requested=int(known.get("rchar", 0)),
        device=int(known.get("read_bytes", 0)),
    )


def _used(pid: int) -> Counters:
    """Return faults, switches and time of another process, its own ended children included."""
    words = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if len(words) < 15:  # it has just ended
        return Counters()
    faults, ended, *times = (int(words[i]) for i in (9, 10, 11, 12, 13, 14))
    switches = 0
    for thread in _threads(pid):
        path = f"{pid}/task/{thread}"
        switches += _status(path, "voluntary_ctxt_switches")
        switches += _status(path, "nonvoluntary_ctxt_switches")
    return Counters(faults=faults + ended, switches=switches, cpu=sum(times) / _TICKS)


def _threads(pid: int) -> list[str]:
    try:
        return [p.name for p in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _status(pid: str, name: str) -> int:
    for line in text_of(Path(f"/proc/{pid}/status")).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    return 0
