"""The stripe size of the storage that a path lies on, and how it was determined.

A file on a parallel file system is cut into stripes, which lie on its storage targets in turn. A
read that begins and ends with a stripe asks no more targets than it must. Lustre tells its stripes
by ``lfs getstripe`` (manual pages ``lfs-getstripe(1)``, ``lfs-setstripe(1)``): a file or directory
has one layout, or is *composite*, with a layout for each of several ranges of bytes, perhaps in
several mirrors, on the metadata target, or with room to extend. Elsewhere the block size of the
file system is all that can be learnt.

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

from dsprep.core.units import parse_nbytes
from dsprep.errors import UsageError
from dsprep.storage.paths import StorePath

SMALLEST, LARGEST = 4 << 10, 4 << 30
"""Stripe sizes that are accepted, in bytes: a page, and the largest that Lustre has."""

LUSTRE_DEFAULT = 1 << 20
"""Bytes that Lustre means by a stripe size of 0."""

LUSTRE_UNIT = 64 << 10
"""Bytes of which every stripe size of Lustre is a multiple."""

RELEASED = "80000001"
"""How ``lfs`` before 2.10 prints the pattern of a file that is in the archive alone."""

TIMEOUT = 20.0
"""Seconds to wait for ``lfs``."""

CONTIGUOUS = "large contiguous reads are what counts"

LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay", "vfat")
)
"""File systems of one machine, with one storage target."""

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


STORE = Stripe(
    nbytes=SMALLEST,
    source="an object store",
    file_system="objects",
    targets=None,
    matters=False,
    advice="a store has no stripes: alignment is not expected to matter",
)
"""Of objects, wherever they are."""


@dataclass(frozen=True)
class Component:
    """One layout of a Lustre file, for the bytes ``start .. end``; `end` None: to the end.

    `count` is the number of stripes that lie side by side, below 0 for as many as there are
    targets, or a multiple of them; `flags` as ``lfs`` prints them; `mirror` the number of the copy;
    `targets` the storage targets of a file's objects, empty where none are listed.
    """

    start: int
    end: int | None
    size: int
    count: int
    pattern: str
    flags: frozenset[str]
    mirror: str = ""
    targets: frozenset[int] = frozenset()

    @property
    def valid(self) -> bool:
        """Whether its bytes are those of the file, as an outdated mirror's are not."""
        return not self.flags & {"stale", "offline", "parity"} and "parity" not in self.pattern

    @property
    def striped(self) -> bool:
        """Whether its bytes lie on storage targets: not on a metadata target, or nowhere yet."""
        return "mdt" not in self.pattern and "extension" not in self.flags and self.count != 0

    @property
    def preferred(self) -> bool:
        """Whether its mirror is the one to read."""
        return bool(self.flags & {"prefer", "prefrd"})

    def covered(self, nbytes: int) -> int:
        """Return how many of the first `nbytes` bytes of a file it holds."""
        end = nbytes if self.end is None else min(self.end, nbytes)
        return max(0, end - self.start)


@dataclass(frozen=True)
class Hint:
    """A command that would give new files a layout, never run here, and why that one."""

    command: str
    why: str


def requested_stripe(text: str, path: Path) -> Stripe:
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
    kind = STORE.file_system if isinstance(path, StorePath) else file_system(_existing(path))
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
    if isinstance(path, StorePath):
        return STORE
    at = _existing(path)
    kind = file_system(at)
    if kind.startswith("lustre"):
        stripe = _lustre(at, expected_nbytes, kind)
        if stripe is not None:
            return stripe
    return _by_block(at, kind)


TARGETS = ((1 << 30, 1), (10 << 30, 4), (100 << 30, 16))
"""Below how many bytes a file is given how many storage targets; larger ones: all (-1)."""

LARGE = TARGETS[0][0]
"""Bytes of a file from which on it never lies on a single target."""

MOST = 128
"""Targets from which on all are asked for (-1)."""

DIFFERS = 16
"""How many times the smallest file the largest has to be for a progressive layout."""


def hint(
    stripe: Stripe,
    outputs: Sequence[Sequence[int]],
    directory: str = "DIR",
    *,
    group_nbytes: int = 0,
    ranks: int | None = None,
) -> Hint:
    """Return the command that would give new files in `directory` stripes that fit their readers.

    A target has a fixed bandwidth, which all share that read from it at once. So files that are as
    many as the ranks lie on one target each, and one that many ranks share lies on as many as read
    it at once. Where that is not known size decides: the larger a file the more targets.

    Parameters
    ----------
    stripe
        To what groups are aligned.
    outputs
        Bytes of the files of each output; ranks read one output at a time.
    group_nbytes
        What a rank reads at a time; 0 if unknown.
    ranks
        Processes that will read; None if unknown.
    """
    size, more = stripe.nbytes, ""
    if size % LUSTRE_UNIT:
        size, more = LUSTRE_DEFAULT, " (on Lustre, with --stripe-size 1MiB)"
    largest = max(outputs, key=max)
    largest_nbytes, smallest_nbytes = max(largest), min(map(max, outputs))
    readers = None if ranks is None else -(-ranks // len(largest))
    if len(largest) > 1 and readers == 1:
        count = 1
        whose = f"{ranks:,} rank{'s' * (ranks != 1)}"
        reason = f"{len(largest):,} files for {whose} keep enough targets busy with one each"
    elif readers is None:
        count = next((targets for nbytes, targets in TARGETS if largest_nbytes < nbytes), -1)
        reason = "by size; --ranks gives how many will read at once"
    else:
        count = _shared(largest_nbytes, size, group_nbytes, readers)
        verb = "rank reads" if readers == 1 else "ranks read"
        file = "the file" if len(largest) == 1 else "each file"
        reason = f"{readers:,} {verb} {file} at once, {_spread(count)}"
    where = f"{shlex.quote(directory)}{more}"
    ends = [
        (end, few)
        for end, few in TARGETS
        if size <= end < largest_nbytes and (few < count or count < 0)
    ]
    parts = []
    if largest_nbytes >= DIFFERS * smallest_nbytes:
        parts = [f"-E {_unit(end)} -S {_unit(size)} -c {few}" for end, few in ends]
    if parts:
        reason += "; the outputs differ much in size, so small ones are on few"
        parts.append("-E -1")
    command = " ".join(["lfs setstripe", *parts, f"-S {_unit(size)} -c {count} {where}"])
    return Hint(command, f"{reason}; files that exist keep their layout")


def _shared(nbytes: int, size: int, group_nbytes: int, readers: int) -> int:
    """Return the targets for a file that so many ranks read at once, -1 for all."""
    groups = -(-nbytes // group_nbytes) if group_nbytes else readers
    targets = TARGETS[1][1] if nbytes >= LARGE else 1
    count = min(max(targets, min(readers, groups)), max(1, -(-nbytes // size)))
    return count if count < MOST else -1


def _spread(count: int) -> str:
    if count == 1:
        return "by one group or stripe, which is on one target"
    return f"from {'all' if count < 0 else count} targets, not from the bandwidth of one"


def _unit(nbytes: int) -> str:
    """Return a size as ``lfs`` takes it."""
    units = (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))
    return next(f"{nbytes // unit}{suffix}" for suffix, unit in units if nbytes % unit == 0)


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


def file_system(at: Path) -> str:
    """Return the type of the file system that holds the absolute path `at`, or ``"unknown"``."""
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
    if kind in LOCAL:
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
    """Return the stripe that ``lfs`` reports, or None if it reports none."""
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
        number = components.index(chosen) + 1
        source += f", component {number} of {len(components)} (bytes {chosen.start} to {end})"
    targets = len(chosen.targets) or (chosen.count if chosen.count > 0 else None)
    several = "overstriped" in chosen.pattern
    if several and not chosen.targets:
        targets = None
    if targets == 1:
        matters = False
        advice = (
            f"each file is on one storage target: alignment is not expected to matter, {CONTIGUOUS}"
        )
    else:
        matters = True
        spread = "all" if targets is None else f"{targets}"
        advice = f"files are striped over {spread} storage targets: aligned groups ask fewer"
        if several:
            advice += ", on which they have several stripes each"
    if nbytes != stripe:
        advice += f" (stripes of {stripe} bytes are not a power of two; {nbytes} divides them)"
    if "released" in chosen.pattern or chosen.pattern == RELEASED:
        advice += "; the file is in the archive alone, and the first read brings it back"
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
    r"(?:^|\s)(?:lmm_)?(lcme_id|lcme_mirror_id|lcme_flags|lcme_extent\.e_start|lcme_extent\.e_end"
    r"|stripe_count|stripe_size|pattern|l_ost_idx):[ \t]*([^\s,]+(?:,[^\s,]+)*)"
)
_OBJECT = re.compile(r"^\s+(\d+)\s+\d+\s+0x[0-9a-f]+\s", re.MULTILINE)
"""A line of the table under ``obdidx``: the target, and the object there."""


def parse_layout(text: str) -> list[Component]:
    """Return the layouts that ``lfs getstripe`` printed for one file or directory.

    Understood are files (``lmm_stripe_size: 1048576``), defaults of directories (``stripe_count:
    1 stripe_size: ...`` in one line), composite layouts of both, and ``--yaml``. A composite
    layout begins each part with ``lcme_id``. What is incomplete or no number is left out, as are
    parts without stripes: room for extension, and what is not Lustre's (``foreign``).
    """
    parts: list[dict[str, str]] = [{}]
    targets: list[set[int]] = [set(map(int, _OBJECT.findall(text)))]
    for key, value in _PAIR.findall(text):
        if key == "lcme_id":
            parts.append({})
            targets.append(set())
        if key == "l_ost_idx" and value.isdecimal():
            targets[-1].add(int(value))
        parts[-1].setdefault(key, value)
    components = []
    for part, objects in zip(parts, targets, strict=True):
        try:
            start, end = part.get("lcme_extent.e_start", "0"), part.get("lcme_extent.e_end", "EOF")
            component = Component(
                int(start),
                None if end == "EOF" else int(end),
                int(part["stripe_size"]),
                int(part["stripe_count"]),
                part.get("pattern", "raid0"),
                frozenset(part.get("lcme_flags", "0").split(",")),
                part.get("lcme_mirror_id", ""),
                frozenset(objects),
            )
        except (KeyError, ValueError):
            continue
        if component.size >= 0:
            components.append(component)
    return components


def choose(components: Sequence[Component], expected_nbytes: int | None) -> Component | None:
    """Return the component that holds the data, or None if there is none.

    Of several mirrors one that is complete is read, and a preferred one first. In it that is the
    component with most of the expected bytes; without an expectation the last that holds data, and
    where none does, as for a directory, the last of all. Outdated mirrors, room for extension and
    what lies on the metadata server do not count.
    """
    mirrors: dict[str, list[Component]] = {}
    for c in components:
        mirrors.setdefault(c.mirror, []).append(c)

    def better(of: list[Component]) -> tuple[bool, bool]:
        valid = [c for c in of if c.valid]
        nbytes = expected_nbytes or 0
        return sum(c.covered(nbytes) for c in valid) >= nbytes, any(c.preferred for c in valid)

    usable = {m: [c for c in of if c.valid and c.striped] for m, of in mirrors.items()}
    name = max((m for m in mirrors if usable[m]), key=lambda m: better(mirrors[m]), default=None)
    if name is None:
        return None
    of = usable[name]
    if expected_nbytes:
        best = max(of, key=lambda c: c.covered(expected_nbytes))
        return best if best.covered(expected_nbytes) else of[0]
    return ([c for c in of if "init" in c.flags] or of)[-1]
