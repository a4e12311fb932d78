"""Output that appears whole or not at all, and that an interrupted run can continue.

While ``DIR/NAME`` is being made, everything lies in ``DIR/.NAME.dsprep-partial/``:

``job.json``
    The job: source, options, output. A rerun with another job is refused, not mixed in.
``state.json``
    The position: replaced as a whole after the data up to there are durable.
``shard-N.json``
    The sidecar of a complete shard. A shard that is anything else when a run continues is made
    again.
``dsprep.lock``, and perhaps ``dsprep.lock.owner``
    Held while a process works on it, and which process that is; see `dsprep.storage.locking`.
``data/``
    The output itself, under its final name, renamed to ``DIR/NAME`` when it is complete; after
    that what it replaced, until that is removed.
``old``
    The replaced dataset, where two names cannot be exchanged.
``NAME.dsprep.json``, ``NAME.dsprep.bin``
    Its sidecar, there before the output gets its name: so nobody sees the one without the other.

Only its user can look into the directory. One of another user is not used, nor a symbolic link.
What is to be in a store is made on this machine: see `dsprep.writing.upload`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsprep.core.closing import failure_closes
from dsprep.errors import ChangedError, DsprepError, TargetError
from dsprep.formats.options import option_name
from dsprep.formats.samples import listed
from dsprep.sidecar import spec
from dsprep.sidecar.spec import Content, read_record, write_record
from dsprep.storage import atomic
from dsprep.storage.atomic import made_path, partial_path
from dsprep.storage.durable import sync_directory
from dsprep.storage.locking import Lock
from dsprep.storage.nodes import revalidate
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import HIDDEN, is_gone, remove, soon, tree_nbytes
from dsprep.writing import remote
from dsprep.writing.create_sidecar import NewSidecar

START: Mapping[str, Any] = {"shard": 0, "samples": 0, "writer": None}
"""The content of ``state.json`` before the first sample."""

STATUS = "status of the source"
"""The key of a job that does not count by itself: if only it differs, a run starts over."""

STARTED_OVER_NOTE = "started over, not continued: the source was touched or written to since"

COMMAND = "command"
"""The key of a job that is for people alone: who has begun it."""

RENAMES_NOTE = (
    "replaced by two renames, since this file system cannot exchange two names: between them there "
    "was neither dataset, for a moment"
)

UNSYNCED_NOTE = (
    "this file system syncs no directories: data are synced, names are as durable as its server "
    "keeps them"
)

RESUME_HINT = "run the same command again to continue"

LEFTOVERS_NOTE = (
    "some of what runs left or replaced cannot be removed yet: it is still open in another "
    "process, or the file system does not show all that it has; later remove"
)

_ASIDE = "left-"
"""The prefix of what could not be removed and is in nobody's way."""


class Staging:
    """The directory in which `target` is made, locked for this process.

    Parameters
    ----------
    target
        The path of the output.
    job
        The job as JSON: equal jobs give equal bytes.
    overwrite
        Whether an existing `target` may be replaced when the new one is complete.
    restart
        Whether to discard what an interrupted run left, whatever its job.
    durable
        Whether to wait for the disk before anything is renamed or recorded.
    resumable
        Whether a later run can continue. Otherwise a failed run leaves nothing, and partial output
        of a killed run of the same source is discarded.
    refuse
        Called with the job of an interrupted run before that is continued.

    Attributes
    ----------
    resume_hint
        Instruction to continue, for a user who interrupts the run.
    state
        Position of an interrupted run of the same job; None: start from the beginning.
    is_published
        Whether the output has its name.
    uploaded
        Sidecar and companion of shards that are complete elsewhere, by number.
    notes
        Remarks for the report: why it starts over, how the old output was replaced and removed.

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
        resumable: bool = True,
        refuse: Callable[[Mapping[str, Any]], None] = lambda job: None,
    ) -> None:
        self.target, self.durable, self._overwrite = target, durable, overwrite
        self._resumable, self._refuse, self.resume_hint = resumable, refuse, RESUME_HINT
        self.root, self.made = partial_path(target), made_path(target)
        self.data = self.made.parent
        if atomic.is_own(self.root):
            _check_contents(self.root)
        atomic.restore(target)
        if restart or not published(target):
            try:
                check_target(target, overwrite)
            except TargetError:  # it may be complete, and its run was killed after its record went
                if self.root.is_dir() and {p.name for p in self.root.iterdir()} <= {*atomic.KEPT}:
                    discard(target)
                raise
        self._lock: Lock | None = None
        self._is_discarded = False
        self.notes: tuple[str, ...] = ()
        self.uploaded: dict[int, tuple[Content, bytes]] = {}
        self._made: dict[int, tuple[Content, bytes]] = {}
        with failure_closes(self.close):
            self._take_lock(restart)
            self.is_published = published(target)
            if self.is_published:
                self._put_sidecar()
            self.state = self._continue(job, restart)

    def _take_lock(self, restart: bool) -> None:
        for last in (False, True):
            atomic.make_own(self.root)
            if restart:
                self.root.joinpath(atomic.KEPT[1]).unlink(missing_ok=True)
            try:
                self._lock = Lock(self.root / atomic.LOCK, signed=True)
            except FileNotFoundError:  # another process has just ended, and removed it
                if last:
                    raise
            except BlockingIOError as error:
                raise TargetError(
                    "another process is making it",
                    where=self.target,
                    found=f"its working directory is {error.strerror}",
                    fix=f"wait for it to end; if it is gone, remove {error.filename} to continue, "
                    "or add --restart to start over",
                ) from error
            else:
                return

    def _continue(self, job: Mapping[str, Any], restart: bool) -> dict[str, Any] | None:
        """Return the state that an interrupted run of the same job left, or None."""
        recorded, state = self._load("job.json", restart), self._load("state.json", restart)
        if not self._resumable and recorded is not None and recorded.get("source") == job["source"]:
            check_target(self.target, self._overwrite)
            state = None
        if recorded is not None and state is not None:
            self._refuse(recorded)
            before, now = _facts(recorded), _facts(json.loads(json.dumps(job)))  # as it comes back
            differing = {k for k in {*before, *now} if before.get(k) != now.get(k)}
            if others := sorted(differing - {STATUS}):
                raise TargetError(
                    "an interrupted run of other data or with other options left partial output "
                    f"(other: {', '.join(others)})",
                    where=self.target,
                    found=recorded.get(COMMAND),
                    fix="repeat the command of that run, with its options and on unchanged data, "
                    "to continue it; or add --restart to discard what it left and start over",
                )
            if differing:
                check_target(self.target, self._overwrite)
                self.notes += (STARTED_OVER_NOTE,)
            else:
                known = state.get("identity") if self.made.exists() else None
                # What lies here may be what the complete output has replaced.
                if self.is_published or known is None or _identity(self.made)[0] == known[0]:
                    return state
        self._begin(job)
        return None

    def _begin(self, job: Mapping[str, Any]) -> None:
        """Discard what is left of other runs, and record the job."""
        self.is_published = False
        self._empty()
        write_record(job, self.root / "job.json", durable=self.durable)

    def reset(self, *kept: str) -> None:
        """Discard partial output, all but `kept` files of the working directory."""
        self._empty("job.json", "state.json", *kept)
        self.save(START)
        self.state = dict(START)

    def _empty(self, *kept: str) -> None:
        for path in list(self.root.iterdir()):
            stays = path.name in (*kept, *atomic.KEPT) or path.name.startswith(HIDDEN)
            if not (stays or remove(path) or path.name.startswith(_ASIDE)):
                path.rename(self.root / f"{_ASIDE}{secrets.token_hex(4)}")
        self.data.mkdir()

    def _load(self, name: str, ignore: bool = False) -> dict[str, Any] | None:
        return None if ignore else read_record(self.root / name) or None

    def save(self, state: Mapping[str, Any]) -> None:
        """Record the position; the caller has made the data durable."""
        if self.is_published or not (self._resumable or state.get("complete")):
            return  # all was recorded before, or nothing is continued
        if state.get("complete"):
            state = {**state, "identity": _identity(self.made)}
        write_record(state, self.root / "state.json", durable=self.durable)

    def record_path(self, number: int) -> Path:
        """Return the path of the record of a shard: its sidecar."""
        return self.root / f"shard-{number}.json"

    def record(self, number: int) -> tuple[Content, bytes]:
        """Return the recorded sidecar of a complete shard, and its companion."""
        path, known = self.record_path(number), self.uploaded.get(number, self._made.get(number))
        return known or spec.from_record(read_record(path), path)

    def complete(self, number: int, path: Path, made: NewSidecar | None = None) -> None:
        """Note that the shard at `path` is complete and recorded."""
        if made is not None:
            self._made[number] = made.content, made.companion

    def publish(self, content: Content, companion: bytes) -> None:
        """Give the complete output its name, in place of an old one if allowed; and its sidecar."""
        spec.write(content, spec.staged_path(self.target), companion, durable=self.durable)
        check_target(self.target, self._overwrite)
        if self.durable:
            sync_directory(self.data)
            if self.made.is_dir():
                sync_directory(self.made)
        try:
            if not atomic.put(self.made, self.target, atomic.old_path(self.target)):
                self.notes += (RENAMES_NOTE,)
        except FileExistsError as error:
            raise TargetError(
                "another node has made it meanwhile, which this one does not see yet",
                where=self.target,
                fix="look at it after a minute; to replace it, repeat the command with --overwrite",
            ) from error
        self.is_published = True
        if self.durable and not sync_directory(self.target.parent):
            self.notes += (UNSYNCED_NOTE,)
        self._put_sidecar(bool(companion))

    def _put_sidecar(self, has_companion: bool | None = None) -> None:
        """Put the sidecar beside the output that has its name; None: that says what it has."""
        staged, path = spec.staged_path(self.target), spec.sidecar_path(self.target)
        if not staged.exists():
            return
        made, old = (p.with_name(spec.companion_name(p)) for p in (staged, path))
        if has_companion is None:
            has_companion = spec.read(staged).has_companion
        if has_companion and made.exists():
            made.replace(old)
        staged.replace(path)
        if not has_companion:
            old.unlink(missing_ok=True)
        if self.durable:
            sync_directory(path.parent)

    def discard(self) -> None:
        """Remove the working directory, with the lock in it."""
        assert self._lock is not None
        is_removed = _clear(self.root, self._lock)
        self.close()
        self._is_discarded = True
        if not is_removed:
            self.notes += (f"{LEFTOVERS_NOTE} {self.root}",)

    def close(self) -> None:
        """Release the lock; the working directory stays for the next run."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._is_discarded:
            self.close()
            return
        with suppress(OSError):  # the error that is under way says more
            useless = isinstance(error, ChangedError) or not self._resumable
            if (useless and not published(self.target)) or not (self.root / "state.json").exists():
                self.discard()  # there is nothing to continue
            elif isinstance(error, KeyboardInterrupt):
                error.add_note(self.resume_hint)
            elif isinstance(error, OSError) and not isinstance(error, DsprepError):
                error.add_note(f"when that is over, {self.resume_hint}")
        with suppress(OSError):
            self.close()


def _check_contents(root: Path) -> None:
    """Raise `TargetError` if a working directory has what no run left: it would be removed."""
    names = [path.name for path in root.iterdir()]
    foreign = [n for n in names if n not in atomic.KEPT and not n.startswith((*HIDDEN, _ASIDE))]
    if foreign and atomic.LOCK not in names:
        raise TargetError(
            "what has the name of the directory in which it would be made is not dsprep's",
            where=root,
            found=listed(sorted(foreign)),
            fix="move it away, or choose another target",
        )


def published(target: Path) -> bool:
    """Return whether a run has given its complete output the name `target`, and left its record."""
    if isinstance(target, StorePath):
        return remote.published(target)
    with suppress(OSError, DsprepError):
        root = partial_path(target)
        state = read_record(root / "state.json") if atomic.is_own(root) else {}
        known = state.get("identity")  # only then is the target looked at: that may be a large tree
        return known is not None and known == _identity(target)
    return False


def _identity(path: Path) -> list[int]:
    """Return inode and bytes of an output, which a rename keeps."""
    return [path.lstat().st_ino, tree_nbytes(path)]


def discard(target: Path) -> None:
    """Remove the working directory of `target`, which this process has not locked."""
    if isinstance(target, StorePath):
        remote.discard(target)
    root = partial_path(target)
    if atomic.is_own(root):
        with suppress(BlockingIOError):
            _clear(root, Lock(root / atomic.LOCK))


def _clear(root: Path, lock: Lock) -> bool:
    """Remove a working directory, the lock last; return whether it is gone or reused."""
    names = ("state.json", *atomic.KEPT)
    removed = [remove(path) for path in list(root.iterdir()) if path.name not in names]
    removed.append(remove(root / "state.json"))
    if all(removed):  # else it shows that the rest is dsprep's
        remove(root / atomic.LOCK)
    lock.release()  # what is removed while it is open stays, where clients give it another name
    return all(removed) and (soon(lambda: is_gone(root.rmdir)) or (root / atomic.LOCK).exists())


def check_target(target: Path, overwrite: bool) -> None:
    """Raise `TargetError` if `target` exists and may not be replaced, or has no directory."""
    if isinstance(target, StorePath):
        remote.check_target(target, overwrite)
        return
    revalidate(target)  # a client may not have seen what another node has made
    if not target.parent.is_dir():
        raise TargetError("there is no such directory", where=target.parent, fix="create it first")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise TargetError("it exists already", where=target, fix="add --overwrite to replace it")
    if not (target.is_file() or target.is_dir() or target.is_symlink()):
        raise TargetError("it is neither a file nor a directory", where=target)


def _facts(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a job that must be equal to continue it, option by option."""
    facts = {k: v for k, v in job.items() if k not in (COMMAND, "options", "recipe")}
    for name in ("options", "recipe"):
        facts |= {option_name(k): v for k, v in (job.get(name) or {}).items()}
    return facts
