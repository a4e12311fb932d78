"""The page cache: dropping files from it, and looking at what it holds.

How it can be looked at depends on the mount, the kernel and whose files they are: `look` tries it
on a page that has just been read. `Watch` looks at all that shows whether a run was cold.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.bench.counters import fetched
from dsprep.bench.evidence import Seen
from dsprep.bench.received import Received, mount_under, node, received, remote
from dsprep.errors import UsageError
from dsprep.storage.base import Handle
from dsprep.storage.paths import StorePath, open_file
from dsprep.storage.ranges import is_cached, preadv_most, preadv_once
from dsprep.storage.trees import data_files

WINDOW = 4 << 30
"""Bytes that are looked at in one go, which takes a byte of memory per page."""

PROBES = 32
"""Pages of a file that are tried where only single pages can be."""

TRIAL = 1 << 20
"""Bytes that are read to see whether the kernel counts them."""

ALL = 0.9
"""Share of them from which on it does."""

TIMEOUT = 300.0
"""Seconds that dropping a server's cache may take."""

MANY = 1000
"""Files from which on they are not looked at a second time."""

CACHESTAT = 451
"""Number of ``cachestat(2)``, the same on every architecture that came after Alpha."""

Way: TypeAlias = Callable[[Handle, int, int], float | None]
"""Returns the share of a range of a file that is in the page cache, None if it cannot be seen."""


@dataclass(frozen=True)
class Look:
    """How the page cache can be looked at here."""

    way: Way | None  # the first that saw a page that had just been read; None: nothing saw it
    keeps: bool = True  # whether it keeps what is read from here; not with `direct_io` of FUSE

    def held(self, files: Iterable[Path]) -> float | None:
        """Return the share of the bytes of files that the page cache has; None if unseen."""
        if not self.keeps:
            return 0.0
        if self.way is None:
            return None
        cached = total = 0.0
        for path in files:
            file = open_file(path)
            for at in range(0, file.nbytes, WINDOW):
                nbytes = min(WINDOW, file.nbytes - at)
                share = self.way(file, at, nbytes)
                if share is None:
                    return None
                cached, total = cached + share * nbytes, total + nbytes
        return cached / total if total else 0.0


def by_count(file: Handle, offset: int, nbytes: int) -> float | None:
    """Return the share of a range that is in the page cache, by ``cachestat(2)`` of Linux 6.5.

    Notes
    -----
    It maps nothing, and takes time for what is cached only. None where the kernel does not have it,
    and on newer ones of files that one may neither write nor owns. A stacked file system
    (overlayfs) keeps pages with the file below, of which this knows nothing: it reports 0.
    """
    span = (ctypes.c_uint64 * 2)(offset, nbytes)
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, written back, evicted, recently evicted
    call: Any = ctypes.CDLL(None).syscall
    number, fd, flags = (ctypes.c_long(n) for n in (CACHESTAT, file.fd, 0))
    if call(number, fd, ctypes.byref(span), ctypes.byref(counts), flags):
        return None
    first, last = offset // mmap.PAGESIZE, (offset + nbytes - 1) // mmap.PAGESIZE
    return min(1.0, float(counts[0]) / (last - first + 1))


def by_map(file: Handle, offset: int, nbytes: int) -> float | None:
    """Return the share of a range that is in the page cache; None where the kernel keeps it secret.

    Notes
    -----
    ``mincore(2)`` says of a file that one may neither write nor owns that all of it is there.
    """
    if hidden(file):
        return None
    low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(file.fd, offset + nbytes - low, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # a file system that maps nothing; a range beyond the end
        return None
    data = np.frombuffer(memory, np.uint8)
    pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
    mincore: Any = ctypes.CDLL(None).mincore
    pointer = ctypes.c_void_p
    if mincore(pointer(data.ctypes.data), ctypes.c_size_t(len(data)), pointer(pages.ctypes.data)):
        return None
    return float((pages & 1).mean())


def hidden(file: Handle) -> bool:
    """Whether a file is one that this user can neither write nor owns."""
    owner = os.fstat(file.fd).st_uid
    return os.geteuid() not in (0, owner) and not os.access(file.path, os.W_OK)


def by_trying(file: Handle, offset: int, nbytes: int) -> float | None:
    """Return the share of some pages of a range that can be read without waiting."""
    _advise(file, 0, 0, os.POSIX_FADV_RANDOM)  # or trying a page reads what follows
    shares = []
    for i in range(PROBES):
        at = offset + nbytes * i // PROBES
        share = is_cached(file.fd, at)
        if share is None:
            return None
        shares.append(share)
        if not share:  # trying may have begun to read it
            _advise(file, at, 1, os.POSIX_FADV_DONTNEED)
    return float(np.mean(shares))


_METHODS: tuple[Way, ...] = (by_count, by_map, by_trying)
"""From the cheapest on."""


def look(files: Sequence[Path]) -> Look:
    """Return how the page cache can be looked at where files are, by trying it on a page."""
    file = _largest(files)
    if file is None:
        return Look(None)
    at = file.nbytes // 2
    file.pread(1, at)
    shares = [way(file, at, 1) for way in _METHODS]
    method = next((w for w, share in zip(_METHODS, shares, strict=True) if share), None)
    if method is not None:
        return Look(method)
    # That none is seen proves that there is none if ``mincore`` says so, or if the file cannot even
    # be mapped: else a file below it may have the page.
    none = shares[1] is not None or (shares[0] is not None and not hidden(file))
    return Look(None, keeps=not none)


def counts(files: Sequence[Path], look: Look) -> bool | None:
    """Return whether the kernel counts for a process what it fetches from where files are.

    It does if reading some bytes that are not in the page cache adds to ``read_bytes`` of
    ``/proc/PID/io``, and reading them again does not. None if that cannot be seen.
    """
    file = _largest(files)
    if file is None:
        return None
    _advise(file, 0, 0, os.POSIX_FADV_RANDOM)
    _advise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    nbytes = min(TRIAL, file.nbytes)
    buffer = memoryview(bytearray(nbytes))
    answers = set()
    for part in (4, 2, 6, 1, 7):
        at = (file.nbytes - nbytes) * part // 8
        share = 0.0 if not look.keeps else look.way and look.way(file, at, nbytes)
        if share is not None and share > 1 - ALL:
            continue
        before = fetched()
        preadv_most(file.fd, buffer, at)
        once = fetched() - before
        if once >= ALL * nbytes:
            preadv_most(file.fd, buffer, at)
            return not look.keeps or fetched() - before - once < ALL * nbytes
        answers.add(False if share is not None and not once else None)
    return False if answers == {False} else None


def _advise(file: Handle, offset: int, nbytes: int, advice: int) -> None:
    with suppress(OSError):
        os.posix_fadvise(file.fd, offset, nbytes, advice)


def _largest(files: Sequence[Path]) -> Handle | None:
    path = max(files, key=lambda p: p.stat().st_size, default=None)
    file = None if path is None else open_file(path)
    return file if file is not None and file.nbytes else None


def files_of(path: Path) -> list[Path]:
    """Return the files with the data of a dataset, in order; none of a store: no page has them."""
    if isinstance(path, StorePath):
        return []
    return sorted(p for p in data_files(path) if p.is_file())


def drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache, as ``posix_fadvise(2)`` can without being root.

    What is not yet on the disk is written first. Pages that a process has mapped stay, and all
    where a file system cannot do it: whether it worked is for `Look.held` to say.
    """
    for file in map(open_file, files):
        with suppress(OSError):
            os.fdatasync(file.fd)
        _advise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def fill(files: Iterable[Path]) -> None:
    """Read files once, so that the page cache holds them."""
    buffer = memoryview(bytearray(8 << 20))
    for file in map(open_file, files):
        offset = 0
        while got := preadv_once(file.fd, buffer, offset):
            offset += got


# --- around one run --------------------------------------------------------------------------


def drop_server(command: str | None) -> None:
    """Run the command of the shell that drops the server's cache, if there is one."""
    if command is None:
        return
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # what it starts asks no terminal, and can be ended with it
    )
    with process:
        try:
            errors = process.communicate(timeout=TIMEOUT)[1].decode(errors="replace")
            lines = [f"exit status {process.returncode}", *errors.strip().splitlines()[-1:]]
        except subprocess.TimeoutExpired:
            lines = [f"nothing after {TIMEOUT:g} s"]
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise UsageError(
            f"the command of --evict-server failed: {command}",
            found=": ".join(lines)[:300],
            fix="try it by itself; it has to end with status 0, and cannot ask for a password",
        )


class Watch:
    """Looks at the page cache and at what counts bytes, for some files of one mount.

    With `tries` it is tried what the kernel counts, which reads some of them; one process suffices.
    """

    def __init__(self, files: Sequence[Path], tries: bool = True) -> None:
        self.files = tuple(files)
        self._mount = mount_under(self.files[0]) if self.files else None
        self._look = look(self.files)
        self._evidence = Seen(
            keeps=self._look.keeps,
            counts=counts(self.files, self._look) if tries else None,
            remote=remote(self._mount),
            node=node(),
        )

    def held(self) -> float | None:
        """Return the share of the files that the page cache has; None if it cannot be seen."""
        return self._look.held(self.files)

    def before(self) -> Seen:
        """Return what is seen when the files have just been dropped."""
        return replace(self._evidence, held=self.held())

    def opened(self, evidence: Seen, nbytes: int) -> Seen:
        """Return what is seen when they were opened, for which `nbytes` were counted.

        They are looked at where nothing is counted.
        """
        again = not evidence.counts and len(self.files) <= MANY
        return replace(evidence, opening=nbytes, opened=self.held() if again else None)

    def received(self) -> Received:
        """Return what this node received until now."""
        return received(self._mount)
