"""The temporary folder in which forms of a dataset are prepared."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsprep.core.units import show_nbytes
from dsprep.errors import TargetError, UsageError
from dsprep.formats.base import Source
from dsprep.storage.mounts import existing
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import free_nbytes


@dataclass(frozen=True, kw_only=True)
class Item:
    """A form of the dataset that will be prepared."""

    name: str  # of the form
    path: Path  # the file or directory with the samples, or the sidecar
    estimate: int  # its bytes, about
    write: Callable[[Source, Path], None] = field(
        compare=False
    )  # given the samples that are taken, and the target
    data: Path | None = None  # the dataset, where the form is a sidecar of it

    def make(self, source: Source) -> None:
        """Write it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write(source, self.path)
        if not self.path.exists():
            raise OSError(errno.ENOENT, f"{self.name} wrote nothing", str(self.path))


def folder_for(data: Sequence[str | Path], dataset: Path, within: Path | None) -> Path:
    """Return the temporary folder to write to, which does not exist yet.

    It is in `within`; None: beside the dataset.
    """
    parts = [Path(name).resolve() for name in data if Path(name).is_dir()]
    folder = Path.cwd() if isinstance(dataset, StorePath) else dataset.parent
    while within is None and any(p in (folder.resolve(), *folder.resolve().parents) for p in parts):
        folder = folder.parent
    folder = folder if within is None else within.absolute()
    problem = ""
    if folder.exists() and not folder.is_dir():
        problem = "this is not a folder"
    elif not os.access(existing(folder), os.W_OK | os.X_OK):
        problem = "the folder cannot be written to"
    elif any(p in (folder.resolve(), *folder.resolve().parents) for p in parts):
        problem = "the folder is a part of the dataset"
    if problem:
        fix = "name a folder on the same file system with --scratch"
        raise UsageError(problem, where=folder, fix=fix)
    return folder / f".dsprep-bench-{secrets.token_hex(4)}"


LESS = "name another folder with --scratch, or take fewer samples with --limit"


def check_free(folder: Path, needed: int, fix: str = LESS) -> None:
    """Raise `TargetError` if there are fewer than `needed` bytes free where `folder` is."""
    free = free_nbytes(folder)
    if needed > free:
        raise TargetError(
            "there is not enough space",
            where=folder,
            expected=show_nbytes(needed),
            found=f"{show_nbytes(free)} free",
            fix=fix,
        )
