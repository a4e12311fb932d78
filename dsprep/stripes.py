"""The stripe size of the storage that a path lies on, and in words where it was learnt.

A file on a parallel file system is cut into stripes, which lie on its storage targets in turn. A
read that begins and ends with a stripe asks no more targets than it must. Lustre tells its stripes
by ``lfs getstripe`` (manual pages ``lfs-getstripe(1)``, ``lfs-setstripe(1)``): a file or directory
has one layout, or is *composite*, with a layout for each of several ranges of bytes, perhaps in
several mirrors. Elsewhere the block size of the file system is all that can be learnt.

Nothing here changes a layout.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsprep.errors import UsageError
from dsprep.plan import parse_nbytes

SMALLEST, LARGEST = 4 << 10, 4 << 30
"""Stripe sizes that are taken, in bytes: a page, and the largest that Lustre has."""

LUSTRE_DEFAULT = 1 << 20
"""Bytes that Lustre means by a stripe size of 0."""

LUSTRE_UNIT = 64 << 10
"""Bytes of which every stripe size of Lustre is a multiple."""

TIMEOUT = 20.0
"""Seconds to wait for ``lfs``."""

CONTIGUOUS = "large contiguous reads are what counts"

_ONE_TARGET = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay", "vfat")
)
_IN_BLOCKS = frozenset(("gpfs",))


@dataclass(frozen=True, kw_only=True)
class Stripe:
    """What groups are aligned to.

    Attributes
    ----------
    nbytes
        Bytes, a power of two, at whose multiples groups should begin.
    source
        Where that was learnt: ``"lfs getstripe /scratch/data"``, ``"as asked"``.
    file_system
        Its type as the kernel names it (``"lustre"``, ``"ext4"``), ``"unknown"`` if it does not.
    targets
        Storage targets over which a file is striped; None if that is unknown.
    matters
        Whether alignment is expected to make reads faster; None if that is unknown.
    advice
        One sentence about it for a person.
    """

    nbytes: int
    source: str
    file_system: str
    targets: int | None
    matters: bool | None
    advice: str


@dataclass(frozen=True)
class Component:
    """One layout of a Lustre file, for the bytes ``start .. end``; `end` None: to the end.

    `count` is the number of targets, -1 for all of them; `flags` as ``lfs`` prints them.
    """

    start: int
    end: int | None
    size: int
    count: int
    pattern: str
    flags: frozenset[str]

    def covered(self, nbytes: int) -> int:
        """Return how many of the first `nbytes` bytes of a file it holds."""
        end = nbytes if self.end is None else min(self.end, nbytes)
        return max(0, end - self.start)


def as_asked(text: str, path: Path) -> Stripe:
    """Return the stripe that the user gave for an output at `path`.

    Raises
    ------
    UsageError
        If it is no power of two between `SMALLEST` and `LARGEST`.
    """
    nbytes = parse_nbytes(text)
    if not SMALLEST <= nbytes <= LARGEST or nbytes & (nbytes - 1):
        raise UsageError(
            f"a stripe of {nbytes} bytes is not possible",
            expected="a power of two from 4KiB to 4GiB",
            fix="give the largest power of two that divides the stripe size of the storage",
        )
    kind = _file_system(_existing(path))
    advice = "alignment is as asked; whether it matters here was not looked up"
    return Stripe(
        nbytes=nbytes,
        source="as asked",
        file_system=kind,
        targets=None,
        matters=None,
        advice=advice,
    )


def detect(path: Path, expected_nbytes: int | None = None) -> Stripe:
    """Return the stripe of the storage on which `path` lies or would lie.

    Parameters
    ----------
    path
        A file, a directory, or an output that does not exist yet: then its directory counts.
    expected_nbytes
        Bytes that the file will have, by which the part of a composite layout is chosen.
    """
    at = _existing(path)
    kind = _file_system(at)
    if kind.startswith("lustre"):
        found = _lustre(at, expected_nbytes, kind)
        if found is not None:
            return found
    return _by_block(at, kind)


TARGETS = ((1 << 30, 1), (10 << 30, 4), (100 << 30, 16))
"""Below how many bytes a file is given how many storage targets; larger ones: all (-1)."""


def hint(stripe: Stripe, file_nbytes: int, directory: str = "DIR") -> str:
    """Return the command that would give new files in `directory` these stripes, never run here.

    A large file that many processes read from one storage target would have the bandwidth of that
    target alone, so it gets the more of them the larger it is. For stripes that Lustre does not
    have, so small are they, it is said what to ask for instead.
    """
    count = next((targets for nbytes, targets in TARGETS if file_nbytes < nbytes), -1)
    nbytes, more = stripe.nbytes, ""
    if nbytes % LUSTRE_UNIT:
        nbytes, more = LUSTRE_DEFAULT, " (on Lustre, with --stripe-size 1MiB)"
    units = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))
    size = next(f"{nbytes // unit}{suffix}" for suffix, unit in units if nbytes % unit == 0)
    return f"lfs setstripe -S {size} -c {count} {shlex.quote(directory)}{more}"


def _existing(path: Path) -> Path:
    """Return the absolute path itself, or its nearest parent that exists."""
    at = path.absolute()
    while not at.exists() and at != at.parent:
        at = at.parent
    return at.resolve()


# --- file systems in general -----------------------------------------------------------------


def mounts() -> list[tuple[str, str]]:
    """Return (mount point, file system type) of all that is mounted, later ones on top."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    words = [line.split(" ") for line in lines]
    return [(_unescape(w[1]), w[2]) for w in words if len(w) > 2]


def _unescape(text: str) -> str:
    """Return a path of ``/proc/mounts``, in which blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _file_system(at: Path) -> str:
    """Return the type of the file system that holds the absolute path `at`."""
    best, kind = -1, "unknown"
    for point, name in mounts():
        inside = point == "/" or str(at) == point or str(at).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), name
    return kind


def _by_block(at: Path, kind: str) -> Stripe:
    """Return what the block size tells."""
    blocks = {"st_blksize": at.stat().st_blksize, "statvfs f_bsize": os.statvfs(at).f_bsize}
    name = max(blocks, key=lambda n: blocks[n])
    nbytes, source = _aligned(blocks[name]), f"{name} of {at} ({kind})"
    if kind in _ONE_TARGET:
        targets, matters = 1, False
        advice = f"{kind} is one storage target: alignment is not expected to matter, {CONTIGUOUS}"
    elif kind in _IN_BLOCKS:
        targets, matters = None, True
        advice = f"{kind} spreads files over its targets in blocks, to which groups are aligned"
    else:
        targets, matters = None, None
        advice = (
            f"how {'this file system' if kind == 'unknown' else kind} stripes files is unknown: "
            f"alignment is not expected to matter, {CONTIGUOUS}; --stripe-size sets it"
        )
    return Stripe(
        nbytes=nbytes,
        source=source,
        file_system=kind,
        targets=targets,
        matters=matters,
        advice=advice,
    )


def _aligned(nbytes: int) -> int:
    """Return the largest power of two that divides `nbytes`, within what is possible."""
    return min(LARGEST, max(SMALLEST, nbytes & -nbytes))


# --- Lustre ----------------------------------------------------------------------------------


def _lustre(at: Path, expected_nbytes: int | None, kind: str) -> Stripe | None:
    """Return the stripe that ``lfs`` tells, or None if it tells nothing."""
    is_directory = at.is_dir()
    text = _lfs(["getstripe", *(["-d"] if is_directory else []), str(at)])
    if expected_nbytes is None and not is_directory:
        expected_nbytes = at.stat().st_size or None
    components = parse_layout(text.replace(f"{at}\n", "", 1))
    chosen = choose(components, expected_nbytes)
    if chosen is None:
        return None
    stripe = chosen.size or LUSTRE_DEFAULT
    nbytes = _aligned(stripe)
    source = f"lfs getstripe {at}"
    if len(components) > 1:
        end = "the end" if chosen.end is None else f"{chosen.end}"
        which = components.index(chosen) + 1
        source += f", component {which} of {len(components)} (bytes {chosen.start} to {end})"
    targets = chosen.count if chosen.count > 0 else None
    if targets == 1:
        matters = False
        advice = (
            "files lie on one storage target each: "
            f"alignment is not expected to matter, {CONTIGUOUS}"
        )
    else:
        matters = True
        spread = "all" if targets is None else f"{targets}"
        advice = f"files are striped over {spread} storage targets: aligned groups ask fewer"
    if nbytes != stripe:
        advice += f" (stripes of {stripe} bytes are no power of two; {nbytes} divides them)"
    return Stripe(
        nbytes=nbytes,
        source=source,
        file_system=kind,
        targets=targets,
        matters=matters,
        advice=advice,
    )


def _lfs(arguments: Sequence[str]) -> str:
    """Return what ``lfs`` prints, or nothing if it is not there, fails or hangs."""
    program = shutil.which("lfs")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


_PAIR = re.compile(
    r"(?:^|\s)(?:lmm_)?(lcme_id|lcme_flags|lcme_extent\.e_start|lcme_extent\.e_end"
    r"|stripe_count|stripe_size|pattern):[ \t]*(\S+)"
)


def parse_layout(text: str) -> list[Component]:
    """Return the layouts that ``lfs getstripe`` printed for one file or directory.

    Understood are files (``lmm_stripe_size: 1048576``), defaults of directories (``stripe_count:
    1 stripe_size: ...`` in one line), composite layouts of both, and ``--yaml``. A composite
    layout begins each part with ``lcme_id``. What is incomplete or no number is left out.
    """
    parts: list[dict[str, str]] = [{}]
    for key, value in _PAIR.findall(text):
        if key == "lcme_id":
            parts.append({})
        parts[-1].setdefault(key, value)
    found = []
    for part in parts:
        try:
            start, end = part.get("lcme_extent.e_start", "0"), part.get("lcme_extent.e_end", "EOF")
            component = Component(
                int(start),
                None if end == "EOF" else int(end),
                int(part["stripe_size"]),
                int(part["stripe_count"]),
                part.get("pattern", "raid0"),
                frozenset(part.get("lcme_flags", "0").split(",")),
            )
        except (KeyError, ValueError):
            continue
        if component.size >= 0:
            found.append(component)
    return found


def choose(components: Sequence[Component], expected_nbytes: int | None) -> Component | None:
    """Return the component that holds the data, or None if there is none.

    That is the one with most of the expected bytes; without an expectation the last that holds
    data, and where none does, as for a directory, the last of all. Outdated mirrors, room for
    extension and what lies on the metadata server do not count.
    """
    usable = [
        c
        for c in components
        if not c.flags & {"stale", "extension"} and "mdt" not in c.pattern and c.count != 0
    ]
    if not usable:
        return None
    if expected_nbytes:
        best = max(usable, key=lambda c: c.covered(expected_nbytes))
        return best if best.covered(expected_nbytes) else usable[0]
    return ([c for c in usable if "init" in c.flags] or usable)[-1]
