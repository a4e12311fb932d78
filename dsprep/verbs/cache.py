"""Copies of a cache are chosen and removed."""

from __future__ import annotations

import time
from pathlib import Path

from dsprep.cache.folder import CacheFolder, CopyInfo
from dsprep.errors import UsageError


def purge(
    root: str | Path,
    *,
    dataset: str | Path | None = None,
    unused_since: float | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> tuple[list[CopyInfo], list[tuple[CopyInfo, str]]]:
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

    Returns
    -------
    Those that are gone, or would be; and those that stay, with the reason.

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
    return removed, kept


def _is_of(info: CopyInfo, dataset: Path) -> bool:
    """Return whether a copy is one of a dataset, however its path is written."""
    if not info.dataset:
        return False
    known = Path(info.dataset)
    return known == dataset.absolute() or known.resolve() == dataset.resolve()
