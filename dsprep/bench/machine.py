"""The machine and the storage of the data: what a reader of figures has to know.

All of it comes from ``/proc``, ``/sys`` and the installed packages' metadata; nothing is imported
or run for it, but ``lfs`` on Lustre. What cannot be learnt is left out. There are no names of
hosts or users in it and no paths of data, so that a report can be published.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsprep.core.memory import total_memory
from dsprep.storage.mounts import existing, mount_of
from dsprep.storage.ring import way
from dsprep.writing import stripes

OPTIONS = re.compile(
    r"(ro|sync|dirsync|noatime|relatime|strictatime|lazytime|dax|discard|nobarrier|flock|localflock"
    r"|ssd|nolock|hard|soft|direct_io|kernel_cache|writeback_cache|nodelalloc|nodiratime"
    r"|(barrier|commit|data|stripe|compress|compress-force|cache|rsize|wsize|vers|proto|nconnect"
    r"|actimeo|ac(reg|dir)(min|max)|sunit|swidth|allocsize|max_read|size|huge|volatile"
    r"|redirect_dir|metacopy)=[\w:.,%+-]+)"
)
"""Mount options that change how fast data come, or where they come from."""


def describe(path: Path) -> dict[str, Any]:
    """Return facts about this machine and the storage of `path`, as JSON; unknown ones left out.

    Parameters
    ----------
    path
        The data, or where they would be.
    """
    at = existing(path).resolve()
    known: dict[str, Callable[[], Any]] = {
        "cpu": _cpu,
        "cores_usable": lambda: len(os.sched_getaffinity(0)),
        "cores": os.cpu_count,
        "memory_bytes": total_memory,
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": lambda: f"{platform.python_implementation()} {platform.python_version()}",
        "packages": _packages,
        "scattered_reads": way,
        "file_system": lambda: _file_system(at),
        "stripe": lambda: {"bytes": stripes.detect_stripe(at).nbytes},
    }
    facts = {}
    for name, find in known.items():
        try:
            facts[name] = find()
        except (OSError, ValueError, KeyError, IndexError, AttributeError, UnicodeError):
            continue  # the system does not have it, or has it otherwise
    return {name: fact for name, fact in facts.items() if fact not in (None, "", {}, [])}


def text_of(path: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- the machine -----------------------------------------------------------------------------


def _cpu() -> str:
    facts: dict[str, str] = {}
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    part = f"{platform.machine()}, implementer {facts.get('CPU implementer')}"
    return facts.get("model name") or f"{part} part {facts['CPU part']}"


def _packages() -> dict[str, str]:
    from dsprep.bench.strategies.packages import PACKAGES

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


# --- the storage -----------------------------------------------------------------------------


def _file_system(at: Path) -> dict[str, Any]:
    mount = mount_of(at)
    if mount is None:
        return {}
    facts: dict[str, Any] = {"type": mount.kind}
    names = Path(mount.point).parts  # which may be those of a person, or of the data
    if len(names) <= 2 and not {"home", "users"} & {name.lower() for name in names}:
        facts["mount_point"] = mount.point
    facts["options"] = [o for o in mount.options if OPTIONS.fullmatch(o)]
    ahead = text_of(Path("/sys/class/bdi") / mount.device / "read_ahead_kb").strip()
    return {**facts, "read_ahead_kb": int(ahead)} if ahead.isdecimal() else facts
