"""The folder for what a benchmark writes: where it is, who uses it, what is on the disk."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsprep.core.locking import take
from dsprep.core.marks import Mark
from dsprep.core.storage import free_nbytes, sync_directory
from dsprep.errors import TargetError, UsageError
from dsprep.write.plan import show_nbytes


def folder_for(data: Sequence[str | Path], dataset: Path, folder: Path | None) -> tuple[Path, bool]:
    """Return where to write, which need not exist, and whether it is a temporary place.

    Raises
    ------
    UsageError
        If one cannot write there, or it is a part of the dataset.
    """
    if folder is None:
        beside = dataset.parent
        for name in map(Path, data):
            if name.is_dir() and name.resolve() in (beside.resolve(), *beside.resolve().parents):
                beside = name.resolve().parent
        if not os.access(beside, os.W_OK | os.X_OK):
            raise UsageError(
                "the folder of the dataset cannot be written to",
                where=beside,
                fix="name a folder on the same file system with --scratch",
            )
        return beside / f".dsprep-bench-{secrets.token_hex(4)}", True
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError("this is not a folder", where=folder, fix="name another with --scratch")
    if not os.access(existing(folder), os.W_OK | os.X_OK):
        raise UsageError(
            "the folder cannot be written to", where=folder, fix="name another with --scratch"
        )
    for name in map(Path, data):
        if name.is_dir() and name.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise UsageError(
                f"the folder is a part of the dataset {name}",
                where=folder,
                fix="name one outside with --scratch",
            )
    return folder, False


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_free(folder: Path, needed: int) -> None:
    """Raise `TargetError` if there are fewer than `needed` bytes free where `folder` is."""
    free = free_nbytes(folder)
    if needed > free:
        raise TargetError(
            "there is not enough space",
            where=folder,
            expected=show_nbytes(needed),
            found=f"{show_nbytes(free)} free",
            fix="name another folder with --scratch, or take fewer samples with --limit",
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from writing to `folder` meanwhile.

    Raises
    ------
    TargetError
        If someone does.
    """
    try:
        held = take(folder / ".lock")
    except BlockingIOError as error:
        raise TargetError(
            "another dsprep bench writes there",
            where=folder,
            found=f"the folder is {error.strerror}",
            fix="wait for it to end",
        ) from error
    try:
        yield
    finally:
        held.release()


def identity(files: Sequence[Path]) -> str:
    """Return what changes when the data do, on any node: names, sizes, times, sampled blocks."""
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        mark = Mark.of(file)
        line = f"{file}\0{mark.lasting}\0{mark.exact[1:]}\0{mark.sampled}\n"
        state.update(line.encode("utf-8", "surrogateescape"))
    return state.hexdigest()


def sync_tree(root: Path) -> None:
    """Bring all files and names under `root` to the disk."""
    for directory, _, names in os.walk(root):
        for name in names:
            fd = os.open(Path(directory, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(directory))
