"""What a cache holds: it is listed, compared with its checksums, and removed.

Bytes of a copy are compared with the CRC-32C that they had when they were copied. Where groups are
is in the sidecar of the dataset, so that has to be there, not the data.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.cache.copier import BLOCK
from dsprep.cache.copies import READY, REFUSED, Copy
from dsprep.cache.folder import CacheFolder, CopyInfo
from dsprep.cache.pieces import Pieces, name_of
from dsprep.core.schema import Bytes
from dsprep.errors import DsprepError, UsageError
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.checksums import read_crc32c

Progress = Callable[[int, int], None]
"""Called with groups and bytes that were compared so far."""


# --- what there is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """What a cache holds, and the bytes that are free beside it."""

    root: Path
    copies: tuple[CopyInfo, ...]
    free: int

    @property
    def nbytes(self) -> int:
        """Bytes that the copies take."""
        return sum(c.nbytes for c in self.copies)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        copies = [c.to_json() for c in self.copies]
        return {"root": str(self.root), "copies": copies, "nbytes": self.nbytes, "free": self.free}


def list_copies(root: str | Path) -> Listing:
    """Return what a cache holds.

    Raises
    ------
    UsageError
        If there is no such directory, or no cache of this user in it.
    """
    folder = CacheFolder(root, create=False)
    filesystem = os.statvfs(folder.root)
    free = filesystem.f_bavail * filesystem.f_frsize
    return Listing(folder.root, tuple(folder.infos()), free)


# --- whether it is right ---------------------------------------------------------------------


@dataclass(frozen=True)
class CopyVerdict:
    """Whether a copy holds what was copied.

    Attributes
    ----------
    info
        What was known of it before.
    compared, nbytes
        Pieces, and their bytes.
    bad
        Those that are wrong: file, offset, samples and reason of each.
    problem
        Why it could not be compared; None: it was.
    """

    info: CopyInfo
    compared: int = 0
    nbytes: int = 0
    bad: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def right(self) -> bool:
        """Whether all that it holds is right."""
        return self.problem is None and not self.bad

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "info": self.info.to_json(), "right": self.right}


def verify_copies(
    root: str | Path,
    *,
    workers: int | None = None,
    progress: Progress = lambda done, nbytes: None,
) -> Iterator[CopyVerdict]:
    """Compare each copy of a cache with the checksums that it had when it was made.

    What is wrong is not read any more by Readers that begin a loop from then on: they read it from
    the dataset until `dsprep.stage` copies it again. Copies may be in use meanwhile.

    Parameters
    ----------
    root
        The cache.
    workers
        Threads that read; None: one per core, at most 8.

    Raises
    ------
    UsageError
        If there is no such directory.
    """
    folder, done = CacheFolder(root, create=False), [0, 0]
    threads = workers or min(8, len(os.sched_getaffinity(0)))

    def tick(nbytes: int) -> None:
        done[0] += 1
        done[1] += nbytes
        progress(done[0], done[1])

    for name in folder.names():
        info = folder.info(name)
        try:
            if info.problem is not None:
                raise ValueError(info.problem)
            verdict = _verified(info, threads, tick)
        except (OSError, DsprepError, ValueError, KeyError, TypeError) as error:
            if not info.path.exists():
                continue
            verdict = CopyVerdict(info, problem=str(error))
        yield verdict


def _verified(info: CopyInfo, threads: int, tick: Callable[[int], None]) -> CopyVerdict:
    """Compare one copy; what is wrong is not read any more."""
    with closing(Copy(info.path)) as copy, closing(_opened(copy)) as sidecar:
        pieces = Pieces(sidecar.through(copy.file), copy.edges(), copy.facts.fields)
        ready, bad, total = np.flatnonzero(copy.states() == READY).tolist(), dict[int, str](), 0
        stop, lock = threading.Event(), threading.Lock()

        def work(first: int) -> None:
            nonlocal total
            window = np.empty(BLOCK, np.uint8)
            for i in ready[first::threads]:
                if stop.is_set():
                    return
                nbytes, wrong = _compared(copy, pieces, i, window)
                with lock:
                    total += nbytes
                    bad.update({i: wrong} if wrong else {})
                    tick(nbytes)

        with ThreadPoolExecutor(threads, "dsprep-verify") as pool:
            try:
                for each in as_completed([pool.submit(work, k) for k in range(threads)]):
                    each.result()
            finally:  # after an interrupt, too
                stop.set()
        for i in bad:
            copy.set_state(i, REFUSED)
        return CopyVerdict(info, len(ready), total, tuple(bad[i] for i in sorted(bad)))


def _opened(copy: Copy) -> Sidecar:
    """Open the sidecar of the dataset of a copy."""
    facts = copy.facts
    if not facts.sidecar:
        raise DsprepError(
            f"it is of files of {facts.dataset} that had no sidecar of their own, without which it "
            "cannot be compared",
            fix="write one with dsprep provenance FILES --out F, and read through it: "
            "dsprep.Reader(F, data=FILES)",
        )
    try:
        sidecar = Sidecar.open(facts.sidecar, facts.dataset, check=False)
        key = Pieces(sidecar, copy.edges(), facts.fields).key
    except (OSError, DsprepError) as error:
        raise DsprepError(
            f"the sidecar of its dataset is needed, and cannot be read: {error}"
        ) from error
    if key != facts.key:
        raise DsprepError(
            f"{facts.dataset} has changed since it was copied, so this is not used",
            fix="remove it with dsprep cache purge",
        )
    return sidecar


def _compared(copy: Copy, pieces: Pieces, i: int, window: Bytes) -> tuple[int, str]:
    """Return the bytes of a piece, and what is wrong with it."""
    number, crc, expected, nbytes = int(copy.which[i]), 0, copy.sum(i), 0
    low, high = map(int, pieces.edges[number : number + 2])
    where, reason = str(copy.path), ""
    try:
        piece = pieces[number]
        nbytes = piece.nbytes
        for r in reversed(piece.ranges):
            where = f"{copy.path / name_of(r.number, r.path)}, offset {r.begin:,}"
        for r in piece.ranges:
            crc = read_crc32c(copy.file(r.number, r.path), r.begin, r.end, crc, window)
        if crc != expected:
            reason = f"its CRC-32C is {crc:#010x}, and was {expected:#010x} when it was copied"
    except DsprepError as error:
        reason = error.what
    except OSError as error:
        reason = error.strerror or str(error)
    samples = f"piece {number:,} (samples {low:,} to {high - 1:,})"
    return nbytes, f"{where}: {samples}: {reason}" if reason else ""


# --- what goes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Purged:
    """What was removed of a cache, or would be, and what remains, with the reason."""

    removed: tuple[CopyInfo, ...]
    kept: tuple[tuple[CopyInfo, str], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what is gone."""
        return sum(info.nbytes for info in self.removed)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        removed = [info.to_json() for info in self.removed]
        kept = [{**info.to_json(), "why": reason} for info, reason in self.kept]
        return {"removed": removed, "kept": kept, "nbytes": self.nbytes}


def purge(
    root: str | Path,
    *,
    dataset: str | Path | None = None,
    unused_since: float | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> Purged:
    """Remove copies that are not in use; nothing that is not a copy is touched.

    Of several conditions all have to hold.

    Parameters
    ----------
    root
        The cache.
    dataset
        Copies of this dataset.
    unused_since
        Copies that have not been used for so many seconds.
    everything
        All copies.
    dry_run
        Only say what would be removed.

    Raises
    ------
    UsageError
        If there is no condition, or no such directory.
    """
    if everything == (dataset is not None or unused_since is not None):
        raise UsageError(
            "which copies are to be removed is not clear",
            expected="--all alone, or --dataset, --unused-since or both",
        )
    folder, now = CacheFolder(root, create=False), time.time()
    removed, kept = list[CopyInfo](), list[tuple[CopyInfo, str]]()
    for info in folder.infos():
        fits = unused_since is None or info.used <= now - unused_since
        if not fits or not (dataset is None or _is_of(info, Path(dataset))):
            continue
        if refusal := folder.remove(info.path.name, dry_run=dry_run):
            kept.append((info, refusal))
        else:
            removed.append(info)
    if everything and not dry_run:
        with folder.locked():
            folder.remove_unfinished()
    return Purged(tuple(removed), tuple(kept))


def _is_of(info: CopyInfo, dataset: Path) -> bool:
    """Whether a copy is one of a dataset, however its path is written."""
    if not info.dataset:
        return False
    known = Path(info.dataset)
    return known == dataset.absolute() or known.resolve() == dataset.resolve()
