"""What a cache holds: it is listed, and removed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsprep.cache.folder import CacheFolder, CopyInfo
from dsprep.errors import UsageError

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
