"""Output that appears whole or not at all, and that an interrupted run can continue.

While ``DIR/NAME`` is being made, everything lies in ``DIR/.NAME.dsprep-partial/``:

``job.json``
    What is being made from what; a rerun with another job is refused, not mixed in.
``state.json``
    How far it has come: replaced as a whole after the data up to there are durable.
``lock``
    Held while a process works on it.
``data/``
    The output itself, under its final name, renamed to ``DIR/NAME`` when it is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsprep.errors import FormatError, TargetError
from dsprep.sidecar import sidecar_path, write_json
from dsprep.storage import remove, sync_directory

_DIGEST = re.compile("[0-9a-f]{64}")


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` is made."""
    return target.with_name(f".{target.name}.dsprep-partial")


class Staging:
    """The directory in which `target` is made, locked for this process.

    Parameters
    ----------
    target
        The path of the output.
    job
        What is being made, as JSON: equal jobs give equal bytes.
    overwrite
        Whether an existing `target` may be replaced when the new one is complete.
    restart
        Whether to discard what an interrupted run left, whatever its job.
    durable
        Whether to wait for the disk before anything is renamed or recorded.

    Raises
    ------
    TargetError
        If `target` exists, another process is making it, or a run with another job was
        interrupted.
    """

    def __init__(
        self,
        target: Path,
        job: Mapping[str, Any],
        *,
        overwrite: bool = False,
        restart: bool = False,
        durable: bool = True,
    ) -> None:
        self.target, self.durable, self._overwrite = target, durable, overwrite
        self.root = partial_path(target)
        self.data = self.root / "data"
        if restart or not self._published():
            check_target(target, overwrite)
        self._lock: int | None = None
        self.root.mkdir(exist_ok=True)
        try:
            self._take_lock()
            self.state = self._continue(job, restart)
        except BaseException:
            self.close()
            raise

    def _published(self) -> bool:
        """Whether an earlier run was killed between renaming its output and its last words."""
        state = self._load("state.json") or {}
        made = self.data / self.target.name
        return bool(state.get("complete")) and self.target.exists() and not made.exists()

    def _take_lock(self) -> None:
        self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TargetError(
                "another process is making it", where=self.target, fix="wait for it to end"
            ) from error
        except OSError:  # a file system without locks: the user alone prevents two at once
            pass

    def _continue(self, job: Mapping[str, Any], restart: bool) -> dict[str, Any] | None:
        """Return the state that an interrupted run of the same job left, or None."""
        recorded, state = self._load("job.json", restart), self._load("state.json", restart)
        if recorded is not None and state is not None:
            differing = sorted(
                k for k in {*recorded, *job} if recorded.get(k) != _plain(job.get(k))
            )
            if differing:
                first = differing[0]
                before, now = _told(recorded.get(first)), _told(_plain(job.get(first)))
                raise TargetError(
                    "an interrupted run was making it from something else: "
                    f"{', '.join(differing)} {'differs' if len(differing) == 1 else 'differ'}",
                    where=self.target,
                    expected=_short(before) if before != now else None,
                    found=_short(now) if before != now else None,
                    fix="repeat the command of that run, with its options and on unchanged data, "
                    "to continue it; or add --restart to discard what it left and begin anew",
                )
            return state
        old = self.root / "old"
        if old.exists() and not self.target.exists():  # killed while replacing it
            old.rename(self.target)
            check_target(self.target, self._overwrite)
        for path in self.root.iterdir():
            if path.name != "lock":
                remove(path)
        self.data.mkdir()
        write_json(job, self.root / "job.json", durable=self.durable)
        return None

    def _load(self, name: str, ignore: bool = False) -> dict[str, Any] | None:
        if ignore:
            return None
        try:
            content = json.loads((self.root / name).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise FormatError(
                "the record of an interrupted run is damaged",
                where=self.root / name,
                fix="add --restart to begin anew",
            ) from error
        return content if isinstance(content, dict) else None

    def save(self, state: Mapping[str, Any]) -> None:
        """Record how far the work has come; the caller has made the data durable."""
        write_json(state, self.root / "state.json", durable=self.durable)

    def publish(self) -> None:
        """Rename the complete output to its final name, in place of an old one if allowed."""
        if self._published():
            return
        check_target(self.target, self._overwrite)
        made = self.data / self.target.name
        if self.durable:
            sync_directory(self.data)
            if made.is_dir():
                sync_directory(made)
        old = self.root / "old"
        remove(old)
        sidecar_path(self.target).unlink(missing_ok=True)
        if self.target.exists() and (self.target.is_dir() or made.is_dir()):
            self.target.rename(old)
        made.replace(self.target)
        if self.durable:
            sync_directory(self.target.parent)

    def discard(self) -> None:
        """Remove the working directory; the record that all is complete goes last."""
        for path in self.root.iterdir():
            if path.name != "state.json":
                remove(path)
        remove(self.root)

    def close(self) -> None:
        """Release the lock; the working directory stays for the next run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (self.root / "state.json").exists():
            self.discard()  # there is nothing to continue
        self.close()


def check_target(target: Path, overwrite: bool) -> None:
    """Raise `TargetError` if `target` exists and may not be replaced, or has no directory."""
    if not target.parent.is_dir():
        raise TargetError("there is no such directory", where=target.parent, fix="create it first")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise TargetError("it exists already", where=target, fix="add --overwrite to replace it")
    if not (target.is_file() or target.is_dir() or target.is_symlink()):
        raise TargetError("it is neither a file nor a directory", where=target)


def _plain(value: Any) -> Any:
    """Return `value` as it comes back from JSON."""
    return json.loads(json.dumps(value))


def _told(value: Any) -> Any:
    """Return what of a JSON value tells something to a person: not its digests."""
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if _told(v) is not None}
    if isinstance(value, list):
        return [v for v in value if _told(v) is not None]
    return None if isinstance(value, str) and _DIGEST.fullmatch(value) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 120 else text[:117] + "..."
