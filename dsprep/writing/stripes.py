"""The stripe size of the storage that a path lies on, and how it was determined.

A file on a parallel file system is cut into stripes, which lie on its storage targets in turn. A
read that begins and ends with a stripe asks no more targets than it must. Lustre tells its stripes
by ``lfs getstripe`` (manual pages ``lfs-getstripe(1)``, ``lfs-setstripe(1)``): a file or directory
has one layout, or is *composite*, with a layout for each of several ranges of bytes. Elsewhere the
block size of the file system is all that can be learnt.

Nothing here changes a layout.
"""

from __future__ import annotations

import math
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
from dsprep.storage.mounts import existing, mount_of
from dsprep.storage.paths import StorePath

SMALLEST, LARGEST = 4 << 10, 4 << 30
"""Stripe sizes that are accepted, in bytes: a page, and the largest that Lustre has."""

LUSTRE_DEFAULT = 1 << 20
"""Bytes that Lustre means by a stripe size of 0."""

LUSTRE_UNIT = 64 << 10
"""Bytes of which every stripe size of Lustre is a multiple."""

TIMEOUT = 20.0
"""Seconds to wait for ``lfs``."""


@dataclass(frozen=True, kw_only=True)
class Stripe:
    """The unit of storage to which groups are aligned.

    Attributes
    ----------
    nbytes
        Bytes, a power of two, at whose multiples groups should begin.
    source
        Its source: ``"lfs getstripe /scratch/data"``, ``"as asked"``.
    file_system
        Its type as the kernel names it (``"lustre"``, ``"ext4"``), ``"unknown"`` if it does not.
    """

    nbytes: int
    source: str
    file_system: str


def requested_stripe(text: str, path: Path) -> Stripe:
    """Return the stripe that the user gave for an output at `path`.

    Raises
    ------
    UsageError
        If it is not a power of two between `SMALLEST` and `LARGEST`.
    """
    nbytes = parse_nbytes(text)
    if not SMALLEST <= nbytes <= LARGEST or nbytes & (nbytes - 1):
        raise UsageError(
            f"a stripe of {nbytes} bytes is not possible",
            expected="a power of two from 4KiB to 4GiB",
            fix="give the largest power of two that divides the stripe size of the storage",
        )
    return Stripe(nbytes=nbytes, source="as asked", file_system=detect_stripe(path).file_system)


def detect_stripe(path: Path, expected_nbytes: int | None = None) -> Stripe:
    """Return the stripe of the storage on which `path` lies or would lie.

    Parameters
    ----------
    path
        A file, a directory, or an output that does not exist yet: then its directory counts.
    expected_nbytes
        Bytes that the file will have, by which the part of a composite layout is chosen.
    """
    if isinstance(path, StorePath):
        return Stripe(nbytes=SMALLEST, source="an object store", file_system="objects")
    at = existing(path).resolve()
    kind = file_system(at)
    stripe = _lustre(at, expected_nbytes, kind) if kind.startswith("lustre") else None
    return stripe or _by_block(at, kind)


TARGETS_BY_SIZE = ((1 << 30, 1), (10 << 30, 4), (100 << 30, 16))
"""Below how many bytes a file is given how many storage targets; larger ones: all (-1)."""

MANY_TARGETS = 128
"""Targets from which on all are asked for (-1)."""


def suggest_stripes(
    stripe: Stripe,
    outputs: Sequence[Sequence[int]],
    directory: str = "DIR",
    *,
    group_nbytes: int = 0,
    ranks: int | None = None,
) -> str:
    """Return the command that would give new files stripes that fit their readers, and the reason.

    A target has a fixed bandwidth, which all share that read from it at once. So files that are as
    many as the ranks lie on one target each, and one that many ranks share lies on as many as read
    it at once, never on one if it is large. Where that is not known size decides.

    Parameters
    ----------
    stripe
        The unit to which groups are aligned.
    outputs
        Bytes of the files of each output; ranks read one output at a time.
    directory
        Directory of the files.
    group_nbytes
        Bytes that a rank reads at a time; 0 if unknown.
    ranks
        Processes that will read; None if unknown.
    """
    size, more = stripe.nbytes, ""
    if size % LUSTRE_UNIT:
        size, more = LUSTRE_DEFAULT, " (on Lustre, with --stripe-size 1MiB)"
    files = max(outputs, key=max)
    nbytes = max(files)
    count = next((targets for limit, targets in TARGETS_BY_SIZE if nbytes < limit), -1)
    reason = "by size; --ranks gives how many will read at once"
    if ranks is not None:
        readers, least = -(-ranks // len(files)), 4 if nbytes >= TARGETS_BY_SIZE[0][0] else 1
        if len(files) > 1 and readers == 1:
            count = 1
        else:
            groups = -(-nbytes // group_nbytes) if group_nbytes else readers
            count = min(max(least, min(readers, groups)), max(1, -(-nbytes // size)))
            count = count if count < MANY_TARGETS else -1
        verb = "rank reads" if readers == 1 else "ranks read"
        reason = f"{readers:,} {verb} {'each' if len(files) > 1 else 'the'} file at once"
    suffix, unit = next(u for u in (("G", 30), ("M", 20), ("K", 10)) if not size % (1 << u[1]))
    command = f"lfs setstripe -S {size >> unit}{suffix} -c {count} {shlex.quote(directory)}{more}"
    return f"{command}: {reason}; files that exist keep their layout"


# --- file systems in general -----------------------------------------------------------------


def file_system(at: Path) -> str:
    """Return the type of the file system that holds the absolute path `at`, or ``"unknown"``."""
    mount = mount_of(at)
    return "unknown" if mount is None else mount.kind


def _by_block(at: Path, kind: str) -> Stripe:
    blocks = {"st_blksize": at.stat().st_blksize, "statvfs f_bsize": os.statvfs(at).f_bsize}
    name = max(blocks, key=lambda n: blocks[n])
    source = f"{name} of {at} ({kind})"
    return Stripe(nbytes=_aligned(blocks[name]), source=source, file_system=kind)


def _aligned(nbytes: int) -> int:
    """Return the largest power of two that divides `nbytes`, within what is possible."""
    return min(LARGEST, max(SMALLEST, nbytes & -nbytes))


# --- Lustre ----------------------------------------------------------------------------------


_LAYOUT = re.compile(
    r"(?:lcme_extent\.e_end:\s*(\d{1,20}|EOF)\s+)?(?<!\w)(?:lmm_)?stripe_count:\s*(-?\d{1,9})\s+"
    r"(?:lmm_)?stripe_size:\s*(\d{1,18})(?!\w)"
)
"""A layout, of a file or the default of a directory: where it ends if there are several, the number
of stripes side by side, below 0 for as many as there are targets, and their bytes."""


def _lustre(at: Path, expected_nbytes: int | None, kind: str) -> Stripe | None:
    """Return the stripe of the last expected byte as ``lfs`` reports it; None without stripes."""
    is_directory = at.is_dir()
    text = _lfs(["getstripe", *(["-d"] if is_directory else []), str(at)])
    if expected_nbytes is None and not is_directory:
        expected_nbytes = at.stat().st_size
    layouts = [
        (math.inf if end in ("", "EOF") else int(end), int(size))
        for end, count, size in _LAYOUT.findall(text.replace(f"{at}\n", "", 1))
        if int(count)
    ]
    if not layouts:
        return None
    fitting = [layout for layout in layouts if layout[0] >= (expected_nbytes or math.inf)]
    _, size = (fitting or layouts[-1:])[0]
    nbytes = _aligned(size or LUSTRE_DEFAULT)
    return Stripe(nbytes=nbytes, source=f"lfs getstripe {at}", file_system=kind)


def _lfs(arguments: Sequence[str]) -> str:
    """Return the output of ``lfs``; empty if it is missing, fails or hangs."""
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
