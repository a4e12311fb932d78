"""The folder in which forms are prepared: where it is, who writes there, what is complete in it.

Each form has a directory of its own, which gets its name when all of it is on the disk: what was
interrupted is never taken for complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsprep.bench.machine import existing
from dsprep.core.units import show_nbytes
from dsprep.errors import TargetError, UsageError
from dsprep.formats.base import Source
from dsprep.sidecar.spec import write_json
from dsprep.storage.durable import sync_directory
from dsprep.storage.locking import take
from dsprep.storage.marks import Mark, sample
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import free_nbytes, remove

MADE = "made.json"
"""In the directory of a complete form: what it was made from."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A form of the dataset that will be prepared, or already is."""

    directory: Path
    file: str
    estimate: int  # its bytes, about
    made_from: Mapping[str, Any]  # what identifies it: form, data, samples, settings, version
    write: Callable[[Source, Path], None] = field(
        compare=False
    )  # given the samples that are taken, and the target
    data: Path | None = None  # the dataset, where the form is a sidecar of it

    @property
    def name(self) -> str:
        """The name of the form."""
        return str(self.made_from["container"])

    @property
    def path(self) -> Path:
        """The file or directory with the samples, or the sidecar."""
        return self.directory / self.file

    def is_complete(self) -> bool:
        """Return whether it is there from before, as it was made."""
        record = _record(self.directory)
        try:
            if record.get("from") != dict(self.made_from) or not self.path.exists():
                return False
            then = Mark.from_json(record["mark"], self.path)
            return then.is_same(Mark.with_files(self.path)[0])
        except (OSError, KeyError, TypeError, ValueError):
            return False

    def make(self, source: Source) -> None:
        """Write it beside its directory, which is renamed to when all is on the disk."""
        partial = self.directory.with_name(f"{self.directory.name}.partial")
        remove(partial)
        partial.mkdir()
        try:
            made = partial / self.file
            self.write(source, made)
            if not made.exists():
                raise OSError(errno.ENOENT, f"{self.name} wrote nothing", str(made))
            _sync_tree(partial)  # which settles the times of what was written
            mark, files = Mark.with_files(made)
            mark = replace(mark, sampled=sample(files))
            write_json({"from": dict(self.made_from), "mark": mark.to_json()}, partial / MADE)
            remove(self.directory)
            partial.rename(self.directory)
            sync_directory(self.directory.parent)
        except BaseException:
            remove(partial)
            raise


def _record(directory: Path) -> dict[str, Any]:
    """Return what a directory says that its form was made from; empty: it is not complete."""
    try:
        record = json.loads((directory / MADE).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def remove_outdated(folder: Path, now: Mapping[str, Any]) -> None:
    """Remove what was prepared from the same files before they changed: it is never used again."""
    for marker in folder.glob(f"*/{MADE}"):
        then = _record(marker.parent).get("from") or {}
        if then.get("data") == now["data"] and then.get("identity") != now["identity"]:
            remove(marker.parent)


def folder_for(data: Sequence[str | Path], dataset: Path, folder: Path | None) -> tuple[Path, bool]:
    """Return where to write, which need not exist, and whether it is a temporary folder."""
    parts = [Path(name).resolve() for name in data if Path(name).is_dir()]

    def holding(path: Path) -> Path | None:
        """Return the part of the dataset that a path is in."""
        return next((p for p in parts if p in (path.resolve(), *path.resolve().parents)), None)

    if folder is None:
        beside = Path.cwd() if isinstance(dataset, StorePath) else dataset.parent
        while (part := holding(beside)) is not None:
            beside = part.parent
        if not os.access(beside, os.W_OK | os.X_OK):
            raise UsageError(
                "the folder of the dataset cannot be written to",
                where=beside,
                fix="name a folder on the same file system with --scratch",
            )
        return beside / f".dsprep-bench-{secrets.token_hex(4)}", True
    folder = folder.absolute()
    problem, fix = "", "name another with --scratch"
    if folder.exists() and not folder.is_dir():
        problem = "this is not a folder"
    elif not os.access(existing(folder), os.W_OK | os.X_OK):
        problem = "the folder cannot be written to"
    elif (part := holding(folder)) is not None:
        problem, fix = (
            f"the folder is a part of the dataset {part}",
            "name one outside with --scratch",
        )
    if problem:
        raise UsageError(problem, where=folder, fix=fix)
    return folder, False


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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from writing to `folder` inside the block."""
    try:
        lock = take(folder / ".lock")
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
        lock.release()


def identity(files: Sequence[Path]) -> str:
    """Return what changes when the data do, on any node: names, sizes, times, sampled blocks."""
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        mark = Mark.of(file)
        line = f"{file}\0{mark.lasting}\0{mark.exact[1:]}\0{mark.sampled}\n"
        state.update(line.encode("utf-8", "surrogateescape"))
    return state.hexdigest()


def _sync_tree(root: Path) -> None:
    """Bring all files and names under `root` to the disk."""
    for directory, _, names in os.walk(root):
        for name in names:
            fd = os.open(Path(directory, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(directory))
