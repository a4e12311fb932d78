"""One process at a time in a directory, whatever its file system makes of locks.

``flock`` excludes others where the file system passes it on to all nodes. Elsewhere it is refused,
or excludes the processes of this node alone, and nothing says which. So whoever holds the lock
also leaves a record beside it, made by an exclusive create: the host, the process, and a count
that a thread raises every `BEAT` seconds. It is removed with the lock, so that only what was
killed leaves one. Who finds a record decides:

- of this node: by whether that process lives;
- of another one: by whether the count changes within `QUIET` seconds of the own clock. No two
  clocks are compared.

A record that is taken over is replaced by one rename of a file that only one process can have made,
since its name follows from the record. One of another node is looked at again after `SETTLE`
seconds. A holder that slept meanwhile finds that out by `Lock.check`, before it records or
publishes anything.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Self

from dsprep.errors import TargetError
from dsprep.storage.directory import Directory
from dsprep.storage.durable import close
from dsprep.storage.nodes import boot
from dsprep.storage.ranges import pread_most, pwrite_all

BEAT = 5.0
"""Seconds after which a holder raises its count."""

QUIET = 15.0
"""Seconds for which the record of another node is watched before it counts as left behind."""

SETTLE = 1.0
"""Seconds after which a record that was taken over is looked at again."""

LATE = (0.1, 0.4, 1.5, 3.0)
"""Seconds before each further try to lock what a process of this node, now gone, had locked."""

OWNER = ".owner"
"""How the name of the record ends, after that of the lock."""

_NBYTES = 512
"""Bytes of a record, always: a client may have kept an old size of the file."""

_GONE = ("Z", "X")
"""States in which a process has ended, though nobody has asked for its status."""

_locked_paths = set[str]()
"""Tokens of the locks that this process holds."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock: a process, and the node, kernel start and pid space in which it counts.

    `start` is when it began, in ticks of that kernel; `token` is of no other lock; `count` is how
    often it was raised.
    """

    host: str
    boot: str
    space: str
    pid: int
    start: int
    token: str
    count: int = 0

    @classmethod
    def this(cls) -> Self:
        """Return a new one for this process."""
        pid = os.getpid()
        token = secrets.token_hex(8)
        return cls(os.uname().nodename, boot(), _space(), pid, _start(pid) or 0, token)

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return what `dump` wrote, None if it is something else, as when it is half written."""
        with suppress(ValueError, TypeError, AttributeError):
            record = cls(**json.loads(data))
            if type(record.pid) is int and type(record.start) is int:
                return record
        return None

    def dump(self) -> bytes:
        """Return it as a line of `_NBYTES` bytes."""
        return json.dumps(asdict(self)).encode().ljust(_NBYTES - 1) + b"\n"

    def lives(self) -> bool | None:
        """Whether its process is still there; None if that cannot be seen from here."""
        if not self.boot or (self.boot, self.space) != (boot(), _space()):
            return None
        if self.pid == os.getpid():
            return self.token in _locked_paths
        start = _start(self.pid)
        if start is None:
            try:
                os.kill(self.pid, 0)  # it may be there and hidden
            except ProcessLookupError:
                return False
            except PermissionError:
                return None
            return None
        return start == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _space() -> str:
    """Return in which space the numbers of processes count."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it is not a path)
    except OSError:
        return ""


def _start(pid: int) -> int | None:
    """Return when a process began; None if it is not there, -1 if it has ended."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return -1 if facts[0] in _GONE else int(facts[19])


class Lock:
    """A lock that this process holds; `notes` say whose record was taken over, if there was one."""

    def __init__(self, record: Path, fd: int, owner: Owner, notes: tuple[str, ...]) -> None:
        self.notes = notes
        self._record, self._fd, self._owner, self._pid = record, fd, owner, os.getpid()
        self._token = owner.token.encode()  # the rest of a record may be just being written
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dsprep-lock", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> Owner:
        """Who holds it."""
        return self._owner

    def _beat(self) -> None:
        """Raise the count until the lock is released or lost."""
        while not self._done.wait(BEAT):
            self._owner = replace(self._owner, count=self._owner.count + 1)
            try:
                with _opened(self._record, os.O_RDWR) as file:  # closing it tells the server
                    if self._token not in pread_most(file.fileno(), _NBYTES, 0):
                        return
                    pwrite_all(file.fileno(), [self._owner.dump()], 0)
            except OSError:  # a file server that is away: `check` will say so
                continue

    def check(self) -> None:
        """Raise `TargetError` if another process has taken the lock over meanwhile."""
        data = _read(self._record)
        if data is not None and self._token in data:
            return
        other = Owner.parse(data or b"")
        raise TargetError(
            f"{other or 'another process'} has taken this work over, since this process gave no "
            f"sign of life for {QUIET:.0f} s",
            where=self._record.parent,
            fix="let that one end; if it does not, repeat the command",
        )

    def release(self) -> None:
        """Give the lock back; a second time, or in a forked child, nothing is done.

        Raises
        ------
        OSError
            If the record cannot be removed: others wait until this process has ended.
        """
        if self._done.is_set() or self._pid != os.getpid():
            return
        self._done.set()
        self._thread.join(1)
        _locked_paths.discard(self._owner.token)
        try:
            data = _read(self._record)
            if data is not None and self._token in data:
                self._record.unlink(missing_ok=True)
        finally:
            if self._fd >= 0:
                os.close(self._fd)


def take(path: Path) -> Lock:
    """Take the lock `path`, a file that is made if it is not there.

    This takes no time where it was released, or left by a process of this node that is gone, and
    at most `QUIET` + `SETTLE` seconds where another node left it.

    Raises
    ------
    BlockingIOError
        If another process has it; the message names it.
    OSError
        If files cannot be made there.
    """
    record = path.with_name(path.name + OWNER)
    fd = Directory.open(path.parent, os.O_PATH).open_file(path.name, os.O_RDWR | os.O_CREAT)
    try:
        try:
            _flock(fd, record)
        except BlockingIOError:
            raise _busy(Owner.parse(_read(record) or b""), path) from None
        except OSError:  # a file system without locks: the record decides
            os.close(fd)
            fd = -1
        own = Owner.this()
        _locked_paths.add(own.token)  # before another thread can see its record
        try:
            notes = _claim(record, own)
        except BaseException:
            _locked_paths.discard(own.token)
            raise
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return Lock(record, fd, own, notes)


def _flock(fd: int, record: Path) -> None:
    """Lock an open file; of a holder that has ended, a server may take some time to see that.

    Raises
    ------
    BlockingIOError
        If someone else who lives, or may live, has locked it.
    """
    for pause in LATE:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = Owner.parse(_read(record) or b"")
            if owner is None or owner.lives() is not False:
                raise
            time.sleep(pause)
        else:
            return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _claim(record: Path, own: Owner) -> tuple[str, ...]:
    """Leave the own record; return a note if another one was there.

    Raises
    ------
    BlockingIOError
        If the one that is there is of someone who lives.
    """
    deadline = time.monotonic() + QUIET + SETTLE
    while True:
        if _create(record, own):
            return ()
        holder = _read(record)
        other = Owner.parse(holder or b"")
        lives = None if other is None else other.lives()
        if holder is not None and (lives is False or (lives is None and _is_quiet(record, holder))):
            break
        if lives or _read(record) is not None or time.monotonic() > deadline:
            raise _busy(other, record)
    # Of those that find it stale, one takes its place: the one whose file has the name of it.
    claim = record.with_name(f"{record.name}.{_word(holder)}")
    notes = _claim(claim, own)
    try:
        if _word(_read(record)) != _word(holder):
            raise _busy(Owner.parse(_read(record) or b""), record)
        claim.replace(record)
    except BaseException:
        claim.unlink(missing_ok=True)
        raise
    if lives is None:
        time.sleep(SETTLE)  # a client that keeps old records may have taken it over, too
        now = Owner.parse(_read(record) or b"")
        if now is None or now.token != own.token:
            raise _busy(now, record)
        who = other or "a process that left no name"
        notes += (f"taken over from {who}, which gave no sign of life for {QUIET:.0f} s",)
    return notes


def _word(record: bytes | None) -> str:
    """Return a word for whose record this is."""
    owner = Owner.parse(record or b"")
    return hashlib.sha256(record or b"").hexdigest()[:16] if owner is None else owner.token


def _is_quiet(record: Path, before: bytes) -> bool:
    """Whether a record stays as it is for `QUIET` seconds."""
    end = time.monotonic() + QUIET
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(0.5, left))
        if _read(record) != before:
            return False
    return True


def _create(path: Path, owner: Owner) -> bool:
    """Make a record; return False if there is one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        try:
            pwrite_all(fd, [owner.dump()], 0)
        finally:
            close(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def _opened(record: Path, flags: int) -> FileIO:
    fd = Directory.open(record.parent, os.O_PATH).open_file(record.name, flags)
    return FileIO(fd, "r+" if flags == os.O_RDWR else "r")


def _read(path: Path) -> bytes | None:
    """Return a record as it is on the server, as far as one can ask for that; None: none."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return pread_most(file.fileno(), _NBYTES, 0)
    except FileNotFoundError:
        return None


def _busy(owner: Owner | None, path: Path) -> BlockingIOError:
    who = "another process" if owner is None else str(owner)
    return BlockingIOError(errno.EAGAIN, f"in use by {who}", str(path))
