"""Names that change hands at once: a complete output takes the name of what it replaces.

Where the kernel and the file system can exchange two names (``RENAME_EXCHANGE``), or one file
replaces another, there is no moment without one of both. Elsewhere a directory takes two renames;
what was there is put back when the second one fails, or by `restore` after a kill between them.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dsprep.errors import TargetError
from dsprep.storage.directory import Directory
from dsprep.storage.locking import OWNER, Lock, take
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import HIDDEN, SIDECARS, WORKING

LOCK = "dsprep.lock"
"""The lock of a working directory, and what shows that it is one: see `working`."""

KEPT = (LOCK, f"{LOCK}{OWNER}")
"""Files of a working directory that stay when what is in it is discarded."""

PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each look at a name that is just being given to another dataset."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, errno.EXDEV)


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` is made: beside it, or for a store on this machine."""
    if isinstance(target, StorePath):
        word = hashlib.blake2b(str(target).encode(), digest_size=6).hexdigest()
        return scratch(target) / f".{target.name}-{word}{WORKING}"
    return target.with_name(f".{target.name}{WORKING}")


def scratch(target: Path) -> Path:
    """Return where files that making `target` takes lie: its directory, ``TMPDIR`` for a store."""
    if isinstance(target, StorePath):
        return Path(tempfile.gettempdir()) / f"dsprep-{os.geteuid()}"
    return target.parent


def make_scratch(target: Path) -> Path:
    """Return `scratch`, made if it is this user's own and not there.

    Raises
    ------
    TargetError
        If others can write to it.
    """
    directory = scratch(target)
    if isinstance(target, StorePath):
        with suppress(FileExistsError):
            directory.mkdir(0o700)
        opened = Directory.open(directory, os.O_NOFOLLOW)
        if not opened.is_trusted(opened.status):
            raise TargetError(
                "others may write to this directory, or have made it",
                where=directory,
                fix="set TMPDIR to another directory",
            )
    return directory


def marker_path(target: Path) -> Path:
    """Return the object that is there while a store is written to; see `dsprep.writing.remote`."""
    return target.with_name(f".{target.name}{WORKING}") / f"job{SIDECARS[0]}"


def written_as(names: Sequence[Path]) -> Iterator[Path]:
    """Yield what files in stores may be parts of that is written as a whole: a file, or above."""
    stored = [path for path in names if isinstance(path, StorePath)]
    yield from {path.parent for path in stored}
    yield from (path for path in stored if len(stored) == 1 or path.is_dir())


def refuse_partial(paths: Iterable[Path]) -> None:
    """Raise `TargetError` if what is at one of some paths in stores is not there as a whole.

    To be asked of datasets without a sidecar: where there is one, the dataset is complete.
    """
    for path in dict.fromkeys(paths):
        if isinstance(path, StorePath) and len(path.parts) > 2 and marker_path(path).exists():
            raise TargetError(
                "it is not complete: it is being written, or the run that wrote it was killed",
                where=path,
                fix="wait, or repeat the command that was killed",
            )


def working(target: Path) -> Directory | None:
    """Return the working directory of `target`, open; None if there is none.

    Raises
    ------
    TargetError
        If something else has its name, or it is somebody else's: what is in it is not dsprep's, or
        not this user's, to use or remove.
    """
    root = partial_path(target)
    try:
        parent = Directory.open(root.parent, os.O_PATH)
        status = parent.stat(root.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    problem = contents = None
    if stat.S_ISLNK(status.st_mode):
        problem = "it is a symbolic link, which is not followed"
    elif not stat.S_ISDIR(status.st_mode):
        problem = "it is not a directory"
    elif not parent.is_own(status):
        problem, contents = "it is another user's", f"user {status.st_uid}"
    else:
        opened = parent.directory(root.name)
        names = [name for name in opened.names() if not name.startswith(HIDDEN)]
        if os.path.samestat(opened.status, status) and (not names or _is_plain(opened, LOCK)):
            return opened
        problem = f"no plain file {LOCK} in it shows that dsprep made it"
        contents = ", ".join(names[:5])
    raise TargetError(
        f"what has the name of the working directory is not one of this user: {problem}",
        where=root,
        found=contents,
        fix="move it away, or choose another target",
    )


def _is_plain(directory: Directory, name: str) -> bool:
    return directory.has(name) and stat.S_ISREG(directory.stat(name).st_mode)


def made_path(target: Path) -> Path:
    """Return where `target` lies while it is made; after an exchange, what it replaced."""
    return partial_path(target) / "data" / target.name


def old_path(target: Path) -> Path:
    """Return where what was at `target` lies if the two names could not be exchanged."""
    return partial_path(target) / "old"


def lock(root: Path) -> Lock:
    """Lock the working directory `root`; see `locking.take`."""
    return take(root / LOCK)


def put(made: Path, target: Path, aside: Path, exchanging: bool = True) -> bool:
    """Give `made` the name `target`; what was there becomes `made` or `aside`, or is gone.

    Parameters
    ----------
    exchanging
        Whether two names may be exchanged, after which inodes and times alone tell what is where.

    Returns
    -------
    Whether there was no moment without either of them.

    Raises
    ------
    FileExistsError
        If the server has `target`, which this client does not see.
    OSError
        If a name cannot be changed; `target` is still what it was, or is `made`.
    """
    if not os.path.lexists(target):
        if not _rename(made, target, _RENAME_NOREPLACE):
            made.replace(target)
        return True
    if not (_is_directory(made) or _is_directory(target)):
        made.replace(target)
        return True
    if exchanging and exchange(made, target):
        return True
    try:
        target.rename(aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise TargetError(
            "its file system cannot rename this directory, as overlays cannot that have it from "
            "below; it is still what it was",
            where=target,
            fix="remove it and repeat the command, or choose another target",
        ) from error
    try:
        made.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    return False


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names at once; return False where the system cannot.

    Raises
    ------
    OSError
        If it can, and fails.
    """
    return _rename(a, b, _RENAME_EXCHANGE)


def _rename(a: Path, b: Path, flags: int) -> bool:
    """Rename `a` to `b` by ``renameat2``; return False where the system cannot do what is asked."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def restore(target: Path) -> None:
    """Put back what was at `target` if a run was killed between two renames that replace it.

    A run that is between them right now is given a few seconds.

    Raises
    ------
    TargetError
        If it is there, and this process may not rename it, or that run has not ended by then; or
        it is not this user's, see `working`.
    """
    if isinstance(target, StorePath):
        return  # stores replace a file at once
    old, busy = old_path(target), ""
    for pause in PAUSES:
        time.sleep(pause)
        if os.path.lexists(target) or not os.path.lexists(old) or not made_path(target).exists():
            return
        if not pause:
            continue  # between two renames of a run there is just a moment
        try:
            working(target)
        except TargetError as error:
            raise TargetError(
                f"it is not there, and what a killed run has left is not used: {error.what}",
                where=target,
                found=old.parent,
                fix="have the user who made it repeat the command that was killed",
            ) from error
        try:
            lock_descriptor = lock(old.parent)
        except BlockingIOError as error:
            busy = str(error.strerror)
            continue
        except OSError:
            lock_descriptor = None
        try:
            _put_back(old, target)
        finally:
            if lock_descriptor is not None:
                with suppress(OSError):  # it was put back, or why not is on its way
                    lock_descriptor.release()
        return
    raise TargetError(
        "it is being replaced right now",
        where=target,
        found=f"its working directory is {busy}",
        fix="try again in a moment",
    )


def _put_back(old: Path, target: Path) -> None:
    if os.path.lexists(target):
        return
    try:
        with suppress(FileNotFoundError):  # another process did the same
            old.rename(target)
    except OSError as error:
        raise TargetError(
            "a run was killed while it replaced this dataset, and the old one cannot be put back: "
            f"{error.strerror}",
            where=target,
            fix=f"repeat the command that was killed, or rename {old} to {target}",
        ) from error
