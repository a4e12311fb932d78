"""Names that change hands at once: a complete output takes the name of what it replaces.

Where the kernel and the file system can exchange two names (``RENAME_EXCHANGE``), or one file
replaces another, there is no moment without one of both. Elsewhere a directory takes two renames;
what was there is put back when the second one fails, or by `restore` after a kill between them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dsprep.errors import TargetError
from dsprep.storage import WORKING

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def partial_path(target: Path) -> Path:
    """Return the directory in which `target` is made."""
    return target.with_name(f".{target.name}{WORKING}")


def made_path(target: Path) -> Path:
    """Return where `target` lies while it is made; after an exchange, what it replaced."""
    return partial_path(target) / "data" / target.name


def old_path(target: Path) -> Path:
    """Return where what was at `target` lies if the two names could not be exchanged."""
    return partial_path(target) / "old"


def lock(root: Path) -> int | None:
    """Lock the working directory `root`; return the file descriptor, None without locks there.

    Raises
    ------
    BlockingIOError
        If another process has it.
    """
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:  # a file system without locks: the user alone prevents two at once
        os.close(fd)
        return None
    return fd


def unlock(held: int | None) -> None:
    """Release what `lock` returned."""
    if held is not None:
        os.close(held)


def put(made: Path, target: Path, aside: Path) -> None:
    """Give `made` the name `target`; what was there becomes `made` or `aside`, or is gone.

    Raises
    ------
    OSError
        If a name cannot be changed; `target` is still what it was, or is `made`.
    """
    if not os.path.lexists(target) or not (_is_directory(made) or _is_directory(target)):
        made.replace(target)
        return
    if exchange(made, target):
        return
    target.rename(aside)
    try:
        made.rename(target)
    except BaseException:
        aside.rename(target)
        raise


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names at once; return False where the system cannot.

    Raises
    ------
    OSError
        If it can, and fails.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def restore(target: Path) -> None:
    """Put back what was at `target` if a run was killed between two renames that replace it.

    Raises
    ------
    TargetError
        If it is there, and this process may not rename it.
    """
    old = old_path(target)
    if os.path.lexists(target) or not os.path.lexists(old) or not made_path(target).exists():
        return
    try:
        held = lock(old.parent)
    except BlockingIOError:
        return  # it is being replaced right now
    except OSError:
        held = None
    try:
        if not os.path.lexists(target):
            with suppress(FileNotFoundError):  # another process did the same
                old.rename(target)
    except OSError as error:
        raise TargetError(
            "a run was killed while it replaced this dataset, and the old one cannot be put back: "
            f"{error.strerror}",
            where=target,
            fix=f"repeat the command that was killed, or rename {old} to {target}",
        ) from error
    finally:
        unlock(held)
