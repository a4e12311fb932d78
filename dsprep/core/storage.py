"""Bytes on disk: reads and writes that are whole or fail, durable renames, free space.

Everything here releases the GIL while the kernel works, and handles short reads and writes. No
other module calls ``pread`` or ``preadv`` of the system, save `dsprep.core.pread`, whose list of
addresses Python's calls cannot take; a test checks it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dsprep.core.schema import Array
from dsprep.errors import FormatError, TargetError

Result = TypeVar("Result")

Buffer: TypeAlias = bytes | bytearray | memoryview | Array

IOV_MAX = 1024
"""Buffers per call that Linux takes (``limits.h``)."""

CALL_NBYTES = 512 << 10
"""Bytes per write call. Larger ones often take three to four times as long on Linux 6.18 with
ext4, which then looks for page cache in blocks as large as the call."""


PAUSES = (0.0, 0.001, 0.01, 0.1, 1.0)
"""Seconds to wait before each further try of a call that the kernel answers with EAGAIN."""


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def pread_into(fd: int, out: Array, offset: int, where: object) -> None:
    """Fill the C-contiguous array `out` from ``offset`` on.

    Raises
    ------
    FormatError
        If the file ends first.
    """
    view = as_bytes(out)
    done = got = preadv_once(fd, view, offset)
    while got and done < len(view):
        got = preadv_once(fd, view[done:], offset + done)
        done += got
    if done < len(view):
        raise ends_early(where, offset, len(view), done)


def pread_exact(fd: int, nbytes: int, offset: int, where: object) -> bytes:
    """Return ``nbytes`` bytes from ``offset`` on; for headers, not for payloads.

    Raises
    ------
    FormatError
        If the file ends first.
    """
    data = pread_most(fd, nbytes, offset)
    if len(data) < nbytes:
        raise ends_early(where, offset, nbytes, len(data))
    return data


def let_go(fd: int) -> None:
    """Close a file that was only read.

    A server that went away is told of where it was read; what closing says then changes nothing.
    """
    with suppress(OSError):
        os.close(fd)


def pread_most(fd: int, nbytes: int, offset: int) -> bytes:
    """Return ``nbytes`` bytes from ``offset`` on, fewer only where the file ends first."""
    data = _again(os.pread, fd, nbytes, offset)
    if 0 < len(data) < nbytes:  # the end of the file, or a short read
        parts, done = [data], len(data)
        while done < nbytes and (more := _again(os.pread, fd, nbytes - done, offset + done)):
            parts.append(more)
            done += len(more)
        data = b"".join(parts)
    return data


def preadv_most(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` from ``offset`` on; return its bytes, fewer only where the file ends first."""
    done = 0
    while done < len(view) and (got := preadv_once(fd, view[done:], offset + done)):
        done += got
    return done


def preadv_once(fd: int, view: memoryview, offset: int) -> int:
    """Read from ``offset`` on by one call; return the bytes that came, which may be fewer."""
    return _again(os.preadv, fd, [view], offset)


def is_cached(fd: int, offset: int) -> bool | None:
    """Whether a byte of a file is in the page cache; None where it cannot be asked for so."""
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return None
    try:
        return os.preadv(fd, [bytearray(1)], offset, flag) == 1
    except BlockingIOError:
        return False
    except OSError:
        return None


def _again(call: Callable[..., Result], fd: int, what: Any, offset: int) -> Result:
    """Return what a system call returns; EAGAIN is tried again (EINTR is by Python itself)."""
    pauses = iter(PAUSES)
    while True:
        try:
            return call(fd, what, offset)
        except OSError as error:
            pause = next(pauses, None) if isinstance(error, BlockingIOError) else None
            if pause is None:
                raise named(error, fd, offset) from error
        time.sleep(pause)


def fstat(fd: int, offset: int | None = None) -> os.stat_result:
    """Return the status of an open file; an error names it, and where it is read."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise named(error, fd, offset) from error


def truncate(fd: int, nbytes: int) -> None:
    """Give a file another size; an error names it."""
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise named(error, fd) from error


def named(error: OSError, fd: int, offset: int | None = None) -> OSError:
    """Return an error of a system call on a descriptor with the name of the file in it."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 (it is no real path)
    except OSError:
        return error
    at = "" if offset is None else f" at offset {offset}"
    return OSError(error.errno, f"{error.strerror}{at}", path)


def ends_early(where: object, offset: int, expected: int, found: int) -> FormatError:
    """Return the error for a file that has fewer bytes from ``offset`` on than expected."""
    return FormatError(
        "the file ends too early",
        where=f"{where}, offset {offset}",
        expected=f"{expected} bytes",
        found=f"{found}",
        fix="the file is truncated or still being written",
    )


def pwrite_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write `buffers` one after another from ``offset`` on; return the bytes written.

    A buffer is `bytes`, a `memoryview` of bytes, or a C-contiguous array of any dtype.
    """
    at = offset
    call: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = as_bytes(buffer) if isinstance(buffer, np.ndarray) else memoryview(buffer)
        rest = len(view)
        while rest:
            take = min(rest, CALL_NBYTES - size)
            call.append(view if take == len(view) else view[len(view) - rest :][:take])
            size, rest = size + take, rest - take
            if size == CALL_NBYTES or len(call) == IOV_MAX:
                _pwrite_call(fd, call, size, at)
                at += size
                call, size = [], 0
    if call:
        _pwrite_call(fd, call, size, at)
    return at + size - offset


def _pwrite_call(fd: int, views: list[memoryview], size: int, offset: int) -> None:
    """Write at most `IOV_MAX` views of `size` bytes together, in one call if the kernel can."""
    while (wrote := _again(os.pwritev, fd, views, offset)) < size:
        if not wrote:
            raise named(OSError(errno.EIO, "nothing can be written"), fd, offset)
        offset, size = offset + wrote, size - wrote  # interrupted, or the disk is nearly full
        while wrote >= len(views[0]):
            wrote -= len(views.pop(0))
        views[0] = views[0][wrote:]


def copy_range(source: int, target: int, nbytes: int, at: int, to: int) -> None:
    """Copy ``nbytes`` from offset ``at`` of one file to offset ``to`` of another, in the kernel."""
    done = 0
    while done < nbytes:
        try:
            moved = os.copy_file_range(source, target, nbytes - done, at + done, to + done)
        except OSError:  # across file systems, or a kernel that cannot
            moved = 0
        if not moved:  # some file systems say so instead
            chunk = pread_most(source, min(nbytes - done, 8 << 20), at + done)
            moved = pwrite_all(target, [chunk], to + done)
        if not moved:
            raise FormatError("a temporary file is shorter than expected", where=f"offset {at}")
        done += moved


PATIENCE = 65.0
"""Seconds for which another node's work may be unseen here: clients of network file systems keep
attributes and missing names for up to a minute."""


def pauses() -> Iterator[float]:
    """Yield the seconds before each further look at what another node has written."""
    left, pause = PATIENCE, 0.02
    while left > 0:
        yield min(pause, left)
        left, pause = left - pause, min(2 * pause, 5.0)


@lru_cache
def boot() -> str:
    """Return a word for this start of this kernel; empty if it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@lru_cache
def node() -> str:
    """Return a word for this node since its start."""
    return f"{os.uname().nodename} {boot()}"


def file_system(device: int) -> str:
    """Return the type of the file system of a device number; empty if it is not told."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    words = [line.split() for line in lines]
    return next((w[w.index("-") + 1] for w in words if w[2:3] == [number] and "-" in w), "")


def wait_for(path: Path, by: str, nbytes: int | None = None) -> None:
    """Wait until a file or directory that another process has completed is seen here.

    Parameters
    ----------
    by
        The `node` of that process; nothing is looked at if it is this one.
    nbytes
        Its bytes; of a directory those of its data files.

    Raises
    ------
    TargetError
        If it is not seen after `PATIENCE`.
    """
    if by == node():
        return
    found: int | None = None
    for pause in (0.0, *pauses()):
        time.sleep(pause)
        revalidate(path)
        found = None
        with suppress(FileNotFoundError):
            found = path.stat().st_size if nbytes is None else tree_nbytes(path)
        if found is not None and nbytes in (None, found):
            return
    raise TargetError(
        f"another node has completed it, and it is not seen from here after {PATIENCE:.0f} s",
        where=path,
        expected=None if nbytes is None else f"{nbytes:,} bytes",
        found="nothing there" if found is None else f"{found:,} bytes",
        fix="take a file system that all nodes share; if this is one, have its client keep "
        "attributes for a shorter time: actimeo=1 or noac for NFS, attr_timeout=1 for FUSE",
    )


def revalidate(path: Path) -> None:
    """Have the client of a network file system ask its server for a file or directory.

    Opening does that, and for names that it takes for missing, opening the directory.
    """
    for each in (path.parent, path):
        with suppress(OSError):
            fd = os.open(each, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.fstat(fd)
            finally:
                os.close(fd)


def _fallocate() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "fallocate64", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


_allocate = _fallocate()
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def preallocate(fd: int, offset: int, nbytes: int) -> None:
    """Reserve space of a file for writes to come, perhaps behind its end, which does not move.

    They are faster for it, and the file is less fragmented. Where the file system cannot do it, or
    has not that much, nothing is reserved: the writes will say if there is no space. Truncating the
    file, also to the size that it has, releases what was not written.
    """
    if _allocate is not None:
        _allocate(fd, _KEEP_SIZE, offset, nbytes)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give back the space of a range of a file, of disk and page cache; it reads as zeros then.

    The file keeps its size. Where the file system cannot do it, the space stays taken.
    """
    if _allocate is not None and nbytes:
        _allocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


def sync(fd: int, *, data: bool = False) -> None:
    """Make a file durable, or only its `data`; an error names it."""
    try:
        (os.fdatasync if data else os.fsync)(fd)
    except OSError as error:
        raise named(error, fd) from error


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_start_sync = _sync_file_range()
_WAIT_BEFORE, _SYNC_FILE_RANGE_WRITE = 1, 2


def start_sync(fd: int) -> None:
    """Have the kernel begin to write a file to the disk, so that a later `sync` waits for little.

    Nothing is durable by that. Errors are left to `sync`, which reports them in any case; systems
    that cannot do it write in their own time.
    """
    if _start_sync is not None:
        _start_sync(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def write_error(fd: int) -> None:
    """Raise `OSError` if some of a file, written at any time, could not be brought to the disk.

    Nothing is waited for: of a byte beyond its end, none is on its way.
    """
    if _start_sync is not None and _start_sync(fd, 1 << 62, 1, _WAIT_BEFORE) < 0:
        number = ctypes.get_errno()
        if number not in NEVER:
            raise named(OSError(number, os.strerror(number)), fd)


def close(*fds: int) -> None:
    """Close files that were written to, all of them; an error names the first that it is of.

    Servers with quotas may report only now that there is no space. Descriptors are closed then,
    too, and must not be closed again.
    """
    failed: OSError | None = None
    for fd in fds:
        path = None
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 (it is no real path)
        try:
            os.close(fd)
        except OSError as error:
            failed = failed or OSError(error.errno, error.strerror, path)
    if failed is not None:
        raise failed


NEVER = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
"""What a file system answers that does not have a call, whatever it is asked to do by it."""


def sync_directory(path: Path) -> bool:
    """Make the names in the directory `path` durable; return False where that cannot be asked for.

    Some network file systems, and some over FUSE, sync no directories: there names are as durable
    as the server keeps them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NEVER:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return False
    finally:
        os.close(fd)
    return True


HIDDEN = (".nfs", ".fuse_hidden")
"""How names begin under which clients of NFS and FUSE keep removed files that are still open."""


def remove(path: Path) -> bool:
    """Remove a file or a whole directory, if it is there.

    Returns
    -------
    Whether it is gone: files that are open may stay as `HIDDEN`, and then the directories they
    are in; so do directories in which this client does not see all that its server has.
    """
    if not path.is_dir() or path.is_symlink():
        return _unlinked(path)
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return soon(lambda: _remove_around(path))
    return True


SOON = 1.0
"""Seconds that `soon` waits."""


def soon(gone: Callable[[], bool]) -> bool:
    """Whether what cannot be removed yet is gone; waits a moment for files of this process.

    Clients over FUSE may tell their server that a file was closed when `close` has long returned.
    """
    until = time.monotonic() + SOON
    while not gone():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _remove_around(path: Path) -> bool:
    """Remove a directory, except for what is `HIDDEN` in it; return whether it is gone."""
    for each in list(path.iterdir()):
        if each.is_dir() and not each.is_symlink():
            _remove_around(each)
        else:
            _unlinked(each)
    if any(name.startswith(HIDDEN) for _, _, names in os.walk(path) for name in names):
        return False
    try:
        path.rmdir()
    except OSError as error:  # of a node that was lost a server may have what no client sees
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _unlinked(path: Path) -> bool:
    """Unlink a file, if it is there; return False if it is `HIDDEN` and still open."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.EBUSY or not path.name.startswith(HIDDEN):
            raise
        return False
    return True


SIDECARS = (".dsprep.json", ".dsprep.bin")
"""How the names end of files that are beside datasets, and no part of them."""

WORKING = ".dsprep-partial"
"""How the names end of directories in which datasets are made."""


class Inside:
    """The directory in which a dataset lies, out of which no symbolic link may lead.

    Parameters
    ----------
    dataset
        The file or directory, itself perhaps a link: it is the user who named it.
    follow
        Whether links may lead anywhere.
    """

    def __init__(self, dataset: Path, follow: bool) -> None:
        named, real = dataset.absolute().parent, Path(os.path.realpath(dataset)).parent
        self._roots = () if follow else tuple({os.path.realpath(named), str(real)})

    def check(self, fd: int, where: object) -> None:
        """Raise `FormatError` if an open file is outside."""
        if self._roots:
            self._check(os.readlink(f"/proc/self/fd/{fd}"), where)  # noqa: PTH115 (it is quick)

    def check_tree(self, path: Path) -> None:
        """Raise `FormatError` if a link at or below `path` leads outside."""
        todo = [path] if self._roots else []
        while todo:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        self._check(os.path.realpath(entry.path), entry.path)
                    elif entry.is_dir():
                        todo.append(Path(entry.path))

    def _check(self, real: str, where: object) -> None:
        if not any(real.startswith(f"{root.rstrip('/')}/") for root in self._roots):
            raise FormatError(
                "a symbolic link leads out of the directory of the dataset",
                where=where,
                expected=f"a file in {self._roots[0]}",
                found=real,
                fix="if it may be read, add --follow-external (follow_external=True)",
            )


def data_files(path: Path) -> Iterator[Path]:
    """Yield the files that hold the data of `path`: itself, or all under a directory.

    Not among them are LMDB's lock file, which readers create and change, what is beside datasets
    that are parts of the directory, and removed files that are still open (`HIDDEN`).
    """
    if not path.is_dir():
        yield path
        return
    for entry in data_entries(path):
        yield Path(entry.path)


def data_entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of `data_files` under a directory, in the order of their paths.

    The entries of one directory are in memory at a time. Directories below that are gone, or may
    not be read, count as empty; any other error is raised.
    """
    waiting = [_entries(directory)]
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        entry = waiting[-1].pop()
        name = entry.name
        if not _is_directory(entry):
            if name != "lock.mdb" and not name.endswith(SIDECARS) and not name.startswith(HIDDEN):
                yield entry
        elif not name.endswith(WORKING) and not entry.is_symlink():
            below: list[os.DirEntry[str]] = []
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                below = _entries(entry.path)
            waiting.append(below)


def _entries(directory: str | Path) -> list[os.DirEntry[str]]:
    """Return what is in a directory, the last name first."""
    with os.scandir(directory) as found:
        return sorted(found, key=attrgetter("name"), reverse=True)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def tree_nbytes(path: Path) -> int:
    """Return the bytes of a file, or of all data files under a directory."""
    return sum(p.stat().st_size for p in data_files(path))


def free_nbytes(path: Path) -> int:
    """Return the bytes that this user can still write to the file system of `path`."""
    at = path.absolute()
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def total_memory() -> int:
    """Return the bytes of memory of this machine, which stay the same between runs."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


LEAST_MEMORY = 256 << 20
"""Bytes that may be taken where nothing is said, however little is free."""


def allowed_memory(memory: int | None) -> int:
    """Return the bytes that may be taken: those that somebody chose, else a quarter of the free."""
    return max(LEAST_MEMORY, free_memory() // 4) if memory is None else memory


def free_memory() -> int:
    """Return the bytes of memory that can be taken without swapping, within the cgroup's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
