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
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dsprep.errors import TargetError
from dsprep.storage.durable import sync, sync_directory
from dsprep.storage.libc import c_function
from dsprep.storage.locking import OWNER, Lock
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import SIDECARS, WORKING

LOCK = "dsprep.lock"
"""The lock of a working directory."""

KEPT = (LOCK, f"{LOCK}{OWNER}")
"""Files of a working directory that stay when what is in it is discarded."""

PATIENCE = 4.0
"""Seconds for which a run is waited for that is just giving a name to another dataset."""

_INT, _TEXT = ctypes.c_int, ctypes.c_char_p
_renameat2 = c_function("renameat2", _INT, _INT, _TEXT, _INT, _TEXT, ctypes.c_uint)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, errno.EXDEV)


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` is made: beside it, or for a store on this machine."""
    if isinstance(target, StorePath):
        word = hashlib.blake2b(str(target).encode(), digest_size=6).hexdigest()
        return scratch_directory(target) / f".{target.name}-{word}{WORKING}"
    return target.with_name(f".{target.name}{WORKING}")


def scratch_directory(target: Path) -> Path:
    """Return the directory of working files for `target`: its own, or ``TMPDIR`` for a store."""
    if isinstance(target, StorePath):
        return Path(tempfile.gettempdir()) / f"dsprep-{os.geteuid()}"
    return target.parent


def make_scratch(target: Path) -> Path:
    """Return `scratch`, for a store made if it is not there; `TargetError` as of `make_own`."""
    directory = scratch_directory(target)
    if isinstance(target, StorePath):
        make_own(directory)
    return directory


def make_own(path: Path) -> None:
    """Make a directory into which only this user can look, if it is not there; see `is_own`."""
    with suppress(FileExistsError):
        path.mkdir(0o700)
    is_own(path)


def is_own(path: Path) -> bool:
    """Return whether there is a directory of this user, whom file systems may number otherwise.

    Raises
    ------
    TargetError
        If something else has its name: what is in it is not dsprep's to use or remove.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    user, is_private = os.geteuid(), not status.st_mode & 0o077
    if stat.S_ISDIR(status.st_mode) and (
        status.st_uid == user or (user and is_private and os.access(path, os.W_OK | os.X_OK))
    ):
        return True
    raise TargetError(
        "what has the name of a directory for dsprep to work in is not one of this user",
        where=path,
        found=f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
        fix="move it away, or choose another target or TMPDIR",
    )


def marker_path(target: Path) -> Path:
    """Return the object that is there while a store is written to; see `dsprep.writing.remote`."""
    return target.with_name(f".{target.name}{WORKING}") / f"job{SIDECARS[0]}"


def written_as(names: Sequence[Path]) -> Iterator[Path]:
    """Yield paths in stores that may be one output: the files, and their directories."""
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


def made_path(target: Path) -> Path:
    """Return the path at which `target` is written; after an exchange, the replaced dataset."""
    return partial_path(target) / "data" / target.name


def old_path(target: Path) -> Path:
    """Return the path of the replaced dataset where two names cannot be exchanged."""
    return partial_path(target) / "old"


def put(made: Path, target: Path, aside: Path) -> bool:
    """Give `made` the name `target`; what was there becomes `made` or `aside`, or is gone.

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
    if exchange(made, target):
        return True
    target.rename(aside)
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
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def restore(target: Path) -> None:
    """Put back what was at `target` if a run was killed between two renames that replace it.

    A run that is between them right now is waited for, up to `PATIENCE`.

    Raises
    ------
    TargetError
        If that has not ended by then, or the old dataset cannot be put back.
    """
    if isinstance(target, StorePath):
        return  # stores replace a file at once
    old = old_path(target)
    if os.path.lexists(target) or not os.path.lexists(old) or not is_own(old.parent):
        return
    try:
        lock = Lock(old.parent / LOCK, seconds=PATIENCE)
        try:
            if os.path.lexists(old) and not os.path.lexists(target):
                old.rename(target)
        finally:
            lock.release()
    except OSError as error:
        if not os.path.lexists(target) and os.path.lexists(old):
            raise TargetError(
                f"it is being replaced, or a run was killed that did: {error.strerror}",
                where=target,
                fix=f"try again, repeat the command that was killed, or rename {old} to {target}",
            ) from error


def write_file(path: Path, content: bytes, durable: bool, replace: bool = True) -> None:
    """Replace a file at once; of several that do so at the same time, the last one wins.

    Without `replace` the first one wins, and the others raise `FileExistsError`.
    """
    if isinstance(path, StorePath):
        path.store.put(path.key, content, overwrite=replace)
        return
    if path.exists() and not path.is_file():  # such as /dev/null
        raise TargetError("it exists, and is not a file", where=path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            if durable:
                sync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            path.hardlink_to(temporary)
            temporary.unlink()
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if durable:
        sync_directory(path.parent)
