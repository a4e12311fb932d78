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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.cache.copier import BLOCK
from dsprep.cache.copies import READY, REFUSED, Copy, remove_unfinished
from dsprep.cache.folder import CacheFolder, CopyInfo
from dsprep.cache.pieces import Pieces, name_of
from dsprep.core.schema import Bytes, Ints
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


def list_copies(root: str | Path, *, shared: bool = False) -> Listing:
    """Return what a cache holds: that of this user, or one that is `shared`.

    Raises
    ------
    UsageError
        If there is no such directory, or no cache of this user in it.
    """
    folder = CacheFolder(root, shared=shared, create=False)
    filesystem = os.statvfs(folder.root.fd)
    return Listing(
        folder.root.path, tuple(folder.infos()), filesystem.f_bavail * filesystem.f_frsize
    )


# --- whether it is right ---------------------------------------------------------------------


@dataclass(frozen=True)
class BadPiece:
    """Bytes of a copy that are not those that were copied.

    Attributes
    ----------
    piece
        Its number in the dataset: of a group, or of a range of samples.
    samples
        The first sample, and the one after the last.
    file, offset, nbytes
        The file of the copy, where it begins there, and its bytes in all.
    why
        What is wrong, a clause.
    """

    piece: int
    samples: tuple[int, int]
    file: str
    offset: int
    nbytes: int
    why: str

    def __str__(self) -> str:
        low, high = self.samples
        samples = f"sample {low:,}" if high - low == 1 else f"samples {low:,} to {high - 1:,}"
        return f"{self.file}, offset {self.offset:,}: piece {self.piece:,} ({samples}): {self.why}"


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
        Those that are wrong.
    left
        How many were wrong, now or before, and are read from the dataset.
    problem
        Why it could not be compared; None: it was.
    """

    info: CopyInfo
    compared: int = 0
    nbytes: int = 0
    bad: tuple[BadPiece, ...] = ()
    left: int = 0
    problem: str | None = None

    @property
    def right(self) -> bool:
        """Whether all that it holds now is right."""
        return self.problem is None and not self.left

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "info": self.info.to_json(), "right": self.right}


def verify_copies(
    root: str | Path,
    *,
    shared: bool = False,
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
    shared
        Whether it is that of all who may write to the directory.
    workers
        Threads that read; None: one per core, at most 8.

    Raises
    ------
    UsageError
        If there is no such directory.
    """
    folder, done = CacheFolder(root, shared=shared, create=False), [0, 0]
    threads = workers or min(8, len(os.sched_getaffinity(0)))
    lock = threading.Lock()

    def tick(nbytes: int) -> None:
        with lock:
            done[0] += 1
            done[1] += nbytes
            progress(done[0], done[1])

    for name in folder.names():
        info = folder.info(name)
        if info.problem is not None:
            yield CopyVerdict(info, problem=info.problem)
            continue
        try:
            yield _Verifying(info, folder, threads, tick).run()
        except FileNotFoundError as error:
            if folder.root.has(name):
                yield CopyVerdict(info, problem=str(error))
        except (OSError, DsprepError, ValueError, KeyError, TypeError) as error:
            yield CopyVerdict(info, problem=str(error))


class _Verifying:
    """Compares one copy.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError, DsprepError
        If it cannot be.
    """

    def __init__(
        self, info: CopyInfo, folder: CacheFolder, threads: int, tick: Callable[[int], None]
    ) -> None:
        self._info, self._folder, self._threads, self._tick = info, folder, threads, tick
        self._stop = threading.Event()
        self._copy = Copy(folder.root, info.path.name)
        self._edges, self._facts = self._copy.edges(), self._copy.facts
        if not self._facts.sidecar:
            raise DsprepError(
                f"it is of files of {self._facts.dataset} that had no sidecar of their own, "
                "without which it cannot be compared",
                fix="write one with dsprep provenance FILES --out F, and read through it: "
                "dsprep.Reader(F, data=FILES)",
            )
        try:
            self._sidecar = Sidecar.open(self._facts.sidecar, self._facts.dataset, check=False)
            key = Pieces(self._sidecar, self._edges, self._facts.fields).key
        except (OSError, DsprepError) as error:
            raise DsprepError(
                f"the sidecar of its dataset is needed, and cannot be read: {error}"
            ) from error
        if key != self._facts.key:
            raise DsprepError(
                f"{self._facts.dataset} has changed since it was copied, so this is not used",
                fix="remove it with dsprep cache purge",
            )

    def run(self) -> CopyVerdict:
        """Return what is found; what is wrong is not read any more."""
        try:
            ready = np.flatnonzero(self._copy.states() == READY)
            nbytes, bad = self._compare(self._copy, ready)
            for i in bad:
                self._copy.set_state(i, REFUSED)
            left = int((self._copy.states() == REFUSED).sum())
            bad_pieces = tuple(bad[i] for i in sorted(bad))
            return CopyVerdict(self._info, len(ready), nbytes, bad_pieces, left)
        finally:
            self._stop.set()
            self._copy.close()
            self._sidecar.close()

    def _compare(self, copy: Copy, slots: Ints) -> tuple[int, dict[int, BadPiece]]:
        """Compare pieces by their slots; return bytes, and the pieces that are wrong."""
        pieces = Pieces(self._sidecar.through(copy.file), self._edges, self._facts.fields)
        todo, lock = iter(slots.tolist()), threading.Lock()
        sizes, bad = list[int](), dict[int, BadPiece]()

        def work() -> None:
            window = np.empty(BLOCK, np.uint8)
            while not self._stop.is_set():
                with lock:
                    i = next(todo, None)
                if i is None:
                    return
                nbytes, wrong = self._look(copy, pieces, i, window)
                if wrong is not None and copy.states()[i] == READY:
                    nbytes, wrong = self._look(copy, pieces, i, window)  # it was copied again
                    if wrong is not None:
                        bad[i] = wrong
                sizes.append(nbytes)
                self._tick(nbytes)

        with ThreadPoolExecutor(self._threads, "dsprep-verify") as pool:
            works = [pool.submit(work) for _ in range(self._threads)]
            try:
                for each in as_completed(works):
                    each.result()
            except BaseException:  # an interrupt, too
                self._stop.set()
                raise
        return sum(sizes), bad

    def _look(
        self, copy: Copy, pieces: Pieces, i: int, window: Bytes
    ) -> tuple[int, BadPiece | None]:
        """Return the bytes of a piece, and what is wrong with it."""
        number, crc, expected, reason = int(copy.which[i]), 0, copy.sum(i), ""
        nbytes, file, offset = 0, "", 0
        try:
            piece = pieces[number]
            nbytes, first = piece.nbytes, piece.ranges[0] if piece.ranges else None
            if first is not None:
                file, offset = name_of(first.number, first.path), first.begin
            for r in piece.ranges:
                opened = copy.file(r.number, r.path)
                crc = read_crc32c(opened, r.begin, r.end, crc, window)
        except DsprepError as error:
            reason = error.what
        except OSError as error:
            reason = error.strerror or str(error)
        if not reason and crc == expected:
            return nbytes, None
        reason = (
            reason or f"its CRC-32C is {crc:#010x}, and was {expected:#010x} when it was copied"
        )
        low, high = (int(self._edges[number + k]) for k in (0, 1))
        where = str(copy.path / file)
        return nbytes, BadPiece(number, (low, high), where, offset, nbytes, reason)


# --- what goes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Purged:
    """What was removed of a cache.

    Attributes
    ----------
    removed
        Copies that are gone, or would be.
    kept
        Those that remain, each with the reason: it is in use, or it is not a copy.
    leftovers
        Directories that ended jobs were removing, or making.
    nbytes
        Bytes of what is gone.
    """

    removed: tuple[CopyInfo, ...]
    kept: tuple[tuple[CopyInfo, str], ...]
    leftovers: int
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        removed = [info.to_json() for info in self.removed]
        kept = [{**info.to_json(), "why": reason} for info, reason in self.kept]
        counts = {"leftovers": self.leftovers, "nbytes": self.nbytes}
        return {"removed": removed, "kept": kept, **counts}


def purge(
    root: str | Path,
    *,
    shared: bool = False,
    dataset: str | Path | None = None,
    unused_since: float | None = None,
    incomplete: bool = False,
    everything: bool = False,
    dry_run: bool = False,
) -> Purged:
    """Remove copies that are not in use; nothing that is not a copy is touched.

    Of several conditions all have to hold.

    Parameters
    ----------
    root
        The cache.
    shared
        Whether it is that of all who may write to the directory.
    dataset
        Copies of this dataset.
    unused_since
        Copies that have not been used for so many seconds.
    incomplete
        Copies that lack something for which there was room, or are worthless.
    everything
        All copies.
    dry_run
        Only say what would be removed.

    Raises
    ------
    UsageError
        If there is no condition, or no such directory.
    """
    conditions = dataset is not None, unused_since is not None, incomplete
    if everything == any(conditions):
        raise UsageError(
            "which copies are to be removed is not clear",
            expected="--all alone, or some of --dataset, --unused-since and --incomplete",
        )
    folder, now = CacheFolder(root, shared=shared, create=False), time.time()
    chosen = []
    for info in folder.infos():
        fits = unused_since is None or info.used <= now - unused_since
        fits = fits and (dataset is None or _is_of(info, Path(dataset)))
        if fits and not (incomplete and info.complete):
            chosen.append(info)
    removed, kept = list[CopyInfo](), list[tuple[CopyInfo, str]]()
    for info in chosen:
        if refusal := folder.remove(info.path.name, dry_run=dry_run):
            kept.append((info, refusal))
        else:
            removed.append(info)
    leftovers, freed = 0, sum(info.nbytes for info in removed)
    if everything or conditions == (False, False, True):
        with folder.locked():
            for name in folder.unfinished():
                nbytes = folder.resident(name)
                if dry_run or remove_unfinished(folder.root, name):
                    leftovers, freed = leftovers + 1, freed + nbytes
    return Purged(tuple(removed), tuple(kept), leftovers, freed)


def _is_of(info: CopyInfo, dataset: Path) -> bool:
    """Whether a copy is one of a dataset, however its path is written."""
    if not info.dataset:
        return False
    known = Path(info.dataset)
    return known == dataset.absolute() or known.resolve() == dataset.resolve()
