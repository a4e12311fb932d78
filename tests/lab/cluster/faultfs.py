"""A file system that misbehaves as asked: a directory shown once more through FUSE, with faults.

    python tests/lab/cluster/faultfs.py BACKING MOUNTPOINT --fault short --fault hang=30

It answers the kernel on /dev/fuse itself (protocol 7.31 and newer) and needs no library: per open
file, per attribute and per entry it says what network file systems say. `ready` on stdout means
mounted; then each line on stdin is a command that is answered by one line:

    arm NAME[=VALUE]    inject from now on         disarm [NAME]   stop it, or all
    counts              a JSON object: how often each fault was injected
    unmount             and end; so do SIGTERM, SIGINT and, with --until-eof, the end of stdin

From a shell: `mkfifo ctl; python faultfs.py B M 3<>ctl <&3 &`, then `echo 'arm eio=once' >ctl`.

It mounts by mount(2): as root, or as root of a user namespace (`unshare -Urm`) that may open
/dev/fuse. Where it ends, or is killed, nothing hangs: the kernel answers ENOTCONN from then on.

What a FUSE server cannot do, whatever library it uses (Linux 6.18):

- Refuse private mappings: without the page cache (`no-mmap`) the kernel refuses MAP_SHARED alone.
- Give a short read through the page cache: there it is the end of the file (zeros in a mapping).
  `short` therefore opens files past the cache, which also takes shared mappings away.
- Let a failed readahead be seen: the kernel reads that page again. An EIO that happens once fails
  that second read, too, so that the program sees it exactly once.
- Show that copy_file_range is missing by ENOSYS, EOPNOTSUPP or EXDEV: the kernel then copies
  itself. `no-copy-file-range=EINVAL` is seen.
- Fail an fsync of directories by ENOSYS (success, to the kernel); EINVAL or EIO are seen.
- Refuse RENAME_NOREPLACE alone with anything but what the server says; without flags at all
  (`no-rename2`) the kernel answers EINVAL.
- Keep a program killable that waits for a read that the server has taken (`hang`): as on a hard
  mount, SIGKILL waits too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import itertools
import json
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TRANSFER = 1 << 20
"""Bytes of the largest single read or write of the kernel, as network file systems have them."""


def _errno(default: int) -> Callable[[str], int]:
    return lambda text: getattr(errno, text) if text else default


def _number(default: float) -> Callable[[str], float]:
    return lambda text: float(text) if text else default


def _whole(default: int) -> Callable[[str], int]:
    return lambda text: int(text, 0) if text else default


def _times(text: str) -> str:
    if text not in ("", "once", "always"):
        raise ValueError(f"{text!r}: expected once or always")
    return text or "once"


def _hang(text: str) -> tuple[float, int]:
    seconds, _, least = text.partition(":")
    return float(seconds or 30), int(least or "0", 0)


FAULTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "short": (_number(0.5), "reads return fewer bytes, with this probability; no page cache"),
    "short-write": (_number(0.5), "writes take fewer bytes, with this probability; no page cache"),
    "eio": (_times, "reads fail with EIO: once, always"),
    "estale": (_times, "reads fail with ESTALE, likewise"),
    "hang": (_hang, "the next read (SECONDS:BYTES: of so many at least) takes so many seconds"),
    "slow": (_number(0.02), "each read and each write takes so many seconds"),
    "no-odirect": (_errno(errno.EINVAL), "open refuses O_DIRECT, with this error"),
    "no-mmap": (_whole(1), "no page cache: no shared mappings (ENODEV)"),
    "no-flock": (_errno(errno.ENOSYS), "flock fails, with this error"),
    "local-locks": (_whole(1), "locks are seen by this mount alone (when mounting only)"),
    "no-rename2": (_errno(errno.ENOSYS), "no RENAME_EXCHANGE, no RENAME_NOREPLACE"),
    "no-links": (_errno(errno.EPERM), "no hard links"),
    "coarse": (_number(1.0), "times are whole multiples of so many seconds"),
    "clock": (_number(60.0), "the clock that stamps files is so many seconds ahead"),
    "restamp": (
        _number(0.5),
        "times move by a second, so many seconds after a file was synced or closed",
    ),
    "big-inodes": (_whole(1), "inode numbers above 2**63"),
    "inodes": (_whole(1), "inode numbers follow from this seed: another after each mount, or node"),
    "stale": (_number(3600.0), "the kernel keeps attributes and entries for so many seconds"),
    "blksize": (_whole(4 << 20), "st_blksize"),
    "silly": (lambda text: text or ".fuse_hidden", "a removed file that is open stays, renamed"),
    "unseen": (
        lambda text: text or "unseen*",
        "directories do not show such names",
    ),
    "late-release": (_number(0.05), "that a file was closed is heard so many seconds later"),
    "enospc": (_whole(0), "writes fail with ENOSPC after so many more bytes"),
    "enospc-close": (_errno(errno.ENOSPC), "close fails, with this error, after a write"),
    "eio-fsync": (_errno(errno.EIO), "fsync of files fails, with this error"),
    "no-dir-fsync": (_errno(errno.EINVAL), "fsync of directories fails, with this error"),
    "no-copy-file-range": (_errno(errno.ENOSYS), "no copy_file_range, with this error"),
    "no-fallocate": (_errno(errno.EOPNOTSUPP), "no fallocate, with this error"),
}
PAST_CACHE = ("short", "short-write", "no-mmap")


class Faults:
    """What is armed, and how often each was injected."""

    def __init__(self, words: list[str]) -> None:
        self.counts: dict[str, int] = {}
        self._armed: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._again: tuple[str, int, int, int] | None = None
        self.random = random.Random(7)
        for word in words:
            self.arm(word)

    def arm(self, word: str) -> None:
        name, _, value = word.partition("=")
        if name not in FAULTS:
            raise ValueError(f"{name!r} is not a fault: {', '.join(FAULTS)}")
        with self._lock:
            self._armed[name] = FAULTS[name][0](value)

    def disarm(self, name: str = "") -> None:
        with self._lock:
            for known in [name] if name else list(self._armed):
                self._armed.pop(known, None)
            self._again = None

    def get(self, name: str) -> Any:
        """Value of an armed fault that says how the file system is, or None."""
        return self._armed.get(name)

    def fire(self, name: str) -> Any:
        """Value of an armed fault that happens now, or None; counted."""
        if name not in self._armed:
            return None
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + 1
            return self._armed.get(name)

    def take(self, name: str) -> Any:
        """The same of a fault that happens once."""
        with self._lock:
            if name not in self._armed:
                return None
            self.counts[name] = self.counts.get(name, 0) + 1
            return self._armed.pop(name)

    def refuse(self, name: str) -> None:
        """Raise the error that an armed fault stands for."""
        if code := self.fire(name):
            raise OSError(code, os.strerror(code))

    def chance(self, name: str, size: int) -> int:
        """How many of `size` bytes are transferred."""
        probability = self._armed.get(name)
        if probability is None or size < 2:
            return size
        with self._lock:
            if self.random.random() >= probability:
                return size
            self.counts[name] = self.counts.get(name, 0) + 1
            return self.random.randrange(1, size)

    def read(self, name: str, node: Node, offset: int, size: int, cached: bool) -> None:
        """Raise the error of a read, where its turn has come."""
        with self._lock:
            rule = self._armed.get(name)
            if self._again is not None and self._again[0] == name:  # the kernel's own second try
                inside = self._again[1] == node.id and self._again[2] <= offset < self._again[3]
                if inside and rule is None:
                    self._again = None
                    raise OSError(getattr(errno, name.upper()), "")
            if rule is None:
                return
            self.counts[name] = self.counts.get(name, 0) + 1
            if rule == "once":
                del self._armed[name]
                if cached:
                    self._again = (name, node.id, offset, offset + size)
            raise OSError(getattr(errno, name.upper()), "")

    def write(self, size: int) -> None:
        """Raise ENOSPC where the space is used up."""
        with self._lock:
            left = self._armed.get("enospc")
            if left is None:
                return
            if left < size:
                self.counts["enospc"] = self.counts.get("enospc", 0) + 1
                raise OSError(errno.ENOSPC, "")
            self._armed["enospc"] = left - size


class Node:
    """A file or directory that the kernel knows, held by a descriptor without access."""

    def __init__(self, id: int, fd: int, name: str) -> None:
        self.id, self.fd, self.name = id, fd, name
        self.lookups = 0
        self.opens = 0
        self.hidden: tuple[int, str] | None = None

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"


class Handle:
    """An open file or directory."""

    def __init__(self, node: Node, fd: int = -1, cached: bool = True) -> None:
        self.node, self.fd, self.cached = node, fd, cached
        self.wrote = False
        self.entries: list[tuple[str, int, int]] = []


RELEASE = 18
IN = struct.Struct("<IIQQIIIHH")
OUT = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
LIBC = ctypes.CDLL(None, use_errno=True)
BIG = 1 << 63


def _name(raw: memoryview) -> str:
    """The one name that ends a request."""
    return os.fsdecode(bytes(raw[:-1]))


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class FaultFS:
    """The server: each thread takes a request, does it on the backing directory, answers."""

    def __init__(self, backing: Path, faults: Faults) -> None:
        self.faults = faults
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._nodes: dict[int, Node] = {}
        self._ids: dict[tuple[int, int], int] = {}
        self._handles: dict[int, Handle] = {}
        self._next = itertools.count(2)
        self._hanging: dict[int, threading.Event] = {}
        self._restamped: dict[tuple[int, int], float] = {}
        self.ended = threading.Event()
        self._calls: dict[int, Callable[..., Any]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 9: self.mkdir, 10: self.unlink,
            11: self.rmdir, 12: self.rename, 13: self.link, 14: self.open, 15: self.read,
            16: self.write, 17: self.statfs, RELEASE: self.release, 20: self.fsync,
            25: self.flush, 26: self.init, 27: self.opendir, 28: self.readdir,
            29: self.releasedir, 30: self.fsyncdir, 32: self.setlk, 35: self.create,
            43: self.fallocate, 45: self.rename2, 47: self.copy_file_range,
        }  # fmt: skip
        root = Node(1, os.open(backing, os.O_PATH), "")
        self._nodes[1] = root
        facts = os.fstat(root.fd)
        self._ids[facts.st_dev, facts.st_ino] = 1

    # The kernel's side

    def mount(self, mountpoint: Path) -> None:
        self.device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        words = f"fd={self.device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        words += f",default_permissions,allow_other,max_read={TRANSFER}"
        nosuid_nodev = 2 | 4
        _check(
            LIBC.mount(
                b"faultfs", os.fsencode(mountpoint), b"fuse.faultfs", nosuid_nodev, words.encode()
            )
        )
        self.mountpoint = mountpoint

    def unmount(self) -> None:
        detach = 2
        with contextlib.suppress(OSError):
            _check(LIBC.umount2(os.fsencode(self.mountpoint), detach))
        self.wake()
        self.ended.set()

    def wake(self) -> None:
        """End the reads that hang."""
        for event in list(self._hanging.values()):
            event.set()

    def serve(self) -> None:
        """Answer requests until the file system is unmounted; run by any number of threads."""
        buffer = bytearray(TRANSFER + (64 << 10))
        while True:
            with self._turn:
                try:
                    got = os.readv(self.device, [buffer])
                except OSError as e:
                    if e.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                        continue
                    self.ended.set()  # ENODEV: unmounted
                    return
                request = memoryview(buffer)[:got]
                if IN.unpack_from(request)[1] == RELEASE and not self.faults.get("late-release"):
                    # nobody waits for it, but mostly what comes after it finds the file closed
                    self._answer(request)
                    continue
            self._answer(request)

    def _answer(self, request: memoryview) -> None:
        _, code, unique, id, _, _, _, _, _ = IN.unpack_from(request)
        body = request[IN.size :]
        if code == 2:
            return self._forget(id, struct.unpack_from("<Q", body)[0])
        if code == 42:
            for k in range(struct.unpack_from("<I", body)[0]):
                self._forget(*struct.unpack_from("<QQ", body, 8 + 16 * k))
            return None
        if code == 36:  # an interrupt: what hangs goes on hanging
            return None
        error, data = 0, b""
        try:
            if code not in self._calls:
                raise OSError(errno.ENOSYS, "")
            data = self._calls[code](self._nodes.get(id), body, unique) or b""
        except OSError as e:
            error = -(e.errno or errno.EIO)
        except Exception:  # a mistake here must not look like a hang
            traceback.print_exc()
            error = -errno.EREMOTEIO
        with contextlib.suppress(OSError):  # ENOENT: whoever asked was killed
            os.writev(self.device, [OUT.pack(OUT.size + len(data), error, unique), data])
        return None

    def init(self, node: Node | None, body: memoryview, unique: int) -> bytes:
        _, _, ahead, capable = struct.unpack_from("<4I", body)
        # async reads, files past 4 GiB, large writes, truncation with the open, parallel lookups,
        # data invalidated where times changed, large requests; locks that others see
        flags = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 12 | 1 << 15 | 1 << 18 | 1 << 22
        if self.faults.get("local-locks") is None:
            flags |= 1 << 10
        grain = int((self.faults.get("coarse") or 1e-9) * 1e9)
        return struct.pack(
            "<4I2H2I2H2IH22x",
            7, 31, ahead, flags & capable, 64, 48, TRANSFER, min(grain, 10**9),
            TRANSFER // 4096, 0, 0, 0, 0,
        )  # fmt: skip

    # Nodes and their attributes

    def _inode(self, number: int) -> int:
        seed = self.faults.get("inodes")
        if seed is not None:
            number = random.Random(f"{seed} {number}").getrandbits(63) | 1
        return number | BIG if self.faults.get("big-inodes") else number & (BIG - 1)

    def _attr(self, facts: os.stat_result) -> bytes:
        ahead = int((self.faults.get("clock") or 0) * 1e9)
        grain = int((self.faults.get("coarse") or 1e-9) * 1e9)
        if time.monotonic() > self._restamped.get((facts.st_dev, facts.st_ino), float("inf")):
            ahead += 10**9
        times = [
            divmod((t + ahead) // grain * grain, 10**9)
            for t in (facts.st_atime_ns, facts.st_mtime_ns, facts.st_ctime_ns)
        ]
        return ATTR.pack(
            self._inode(facts.st_ino), facts.st_size, facts.st_blocks, *(t[0] for t in times),
            *(t[1] for t in times), facts.st_mode, facts.st_nlink, facts.st_uid, facts.st_gid,
            facts.st_rdev, self.faults.get("blksize") or facts.st_blksize, 0,
        )  # fmt: skip

    def _restamp(self, handle: Handle) -> None:
        """Have the times of a file that was written move in a moment."""
        seconds = self.faults.fire("restamp") if handle.wrote else None
        if seconds is not None:
            facts = os.fstat(handle.fd)
            due = time.monotonic() + seconds
            self._restamped.setdefault((facts.st_dev, facts.st_ino), due)

    def _valid(self) -> tuple[int, int]:
        seconds, fraction = divmod(self.faults.get("stale") or 0.0, 1)
        return int(seconds), int(fraction * 1e9)

    def _entry(self, parent: Node, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.fd)
        facts = os.fstat(fd)
        with self._lock:
            key = facts.st_dev, facts.st_ino
            id = self._ids.get(key)
            if id is None:
                id = next(self._next)
                self._ids[key] = id
                self._nodes[id] = Node(id, fd, name)
            else:
                os.close(fd)
            node = self._nodes[id]
            node.name = name
            node.lookups += 1
        whole, rest = self._valid()
        return ENTRY.pack(id, 0, whole, whole, rest, rest) + self._attr(facts)

    def _forget(self, id: int, count: int) -> None:
        with self._lock:
            node = self._nodes.get(id)
            if node is None or id == 1:
                return
            node.lookups -= count
            if node.lookups <= 0 and not node.opens:
                facts = os.fstat(node.fd)
                self._ids.pop((facts.st_dev, facts.st_ino), None)
                del self._nodes[id]
                os.close(node.fd)

    def lookup(self, node: Node, body: memoryview, unique: int) -> bytes:
        name = _name(body)
        try:
            return self._entry(node, name)
        except FileNotFoundError:
            whole, rest = self._valid()
            if not whole and not rest:
                raise
            return ENTRY.pack(0, 0, whole, 0, rest, 0) + bytes(ATTR.size)

    def _attr_out(self, node: Node) -> bytes:
        return struct.pack("<QII", *self._valid(), 0) + self._attr(os.fstat(node.fd))

    def getattr(self, node: Node, body: memoryview, unique: int) -> bytes:
        return self._attr_out(node)

    def setattr(self, node: Node, body: memoryview, unique: int) -> bytes:
        (valid, _, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid) = (
            struct.unpack_from("<IIQQQQQQIIIIIII", body)
        )
        if valid & 1:
            Path(node.path).chmod(stat.S_IMODE(mode))
        if valid & 6:
            os.chown(node.path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            handle = self._handles.get(fh) if valid & 64 else None
            if handle is not None:
                os.ftruncate(handle.fd, size)
            else:
                os.truncate(node.path, size)
        if valid & 48:
            ahead = int((self.faults.get("clock") or 0) * 1e9)
            facts, now = os.fstat(node.fd), time.time_ns()
            stamps = []
            for bit, old, seconds, ns in (
                (16, facts.st_atime_ns, atime, atime_ns),
                (32, facts.st_mtime_ns, mtime, mtime_ns),
            ):
                given = now if valid & bit * 8 else seconds * 10**9 + ns - ahead
                stamps.append(given if valid & bit else old)
            if not stat.S_ISLNK(facts.st_mode):
                os.utime(node.path, ns=(stamps[0], stamps[1]))
        return self._attr_out(node)

    def statfs(self, node: Node, body: memoryview, unique: int) -> bytes:
        facts = os.statvfs(node.fd)
        return struct.pack(
            "<5Q4I24x", facts.f_blocks, facts.f_bfree, facts.f_bavail, facts.f_files,
            facts.f_ffree, facts.f_bsize, facts.f_namemax, facts.f_frsize, 0,
        )  # fmt: skip

    # Names

    def mkdir(self, node: Node, body: memoryview, unique: int) -> bytes:
        name = _name(body[8:])
        os.mkdir(name, struct.unpack_from("<I", body)[0], dir_fd=node.fd)
        return self._entry(node, name)

    def _hide(self, parent: Node, name: str) -> bool:
        """Rename a file that is open instead of removing it, as NFS clients and libfuse do."""
        prefix = self.faults.get("silly")
        if not prefix:
            return False
        facts = os.stat(name, dir_fd=parent.fd, follow_symlinks=False)
        node = self._nodes.get(self._ids.get((facts.st_dev, facts.st_ino), 0))
        if node is None or not node.opens or stat.S_ISDIR(facts.st_mode):
            return False
        if node.hidden and node.hidden[1] == name and prefix.startswith(".nfs"):
            raise OSError(errno.EBUSY, "")  # as Linux answers on NFS; libfuse renames it again
        self.faults.fire("silly")
        hidden = f"{prefix}{node.id:08x}{next(self._next):08x}"
        os.rename(name, hidden, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        if node.hidden:
            os.close(node.hidden[0])
        node.hidden = (os.dup(parent.fd), hidden)
        return True

    def unlink(self, node: Node, body: memoryview, unique: int) -> None:
        name = _name(body)
        with self._lock:
            if not self._hide(node, name):
                os.unlink(name, dir_fd=node.fd)

    def rmdir(self, node: Node, body: memoryview, unique: int) -> None:
        os.rmdir(_name(body), dir_fd=node.fd)

    def rename(self, node: Node, body: memoryview, unique: int) -> None:
        self._rename(node, struct.unpack_from("<Q", body)[0], 0, bytes(body[8:]))

    def rename2(self, node: Node, body: memoryview, unique: int) -> None:
        to, flags = struct.unpack_from("<QI", body)
        if flags:
            self.faults.refuse("no-rename2")
        self._rename(node, to, flags, bytes(body[16:]))

    def _rename(self, node: Node, to: int, flags: int, names: bytes) -> None:
        old, new = names.split(b"\0")[:2]
        with self._lock:
            parent = self._nodes[to]
            if not flags:
                with contextlib.suppress(FileNotFoundError):
                    self._hide(parent, os.fsdecode(new))
            _check(LIBC.renameat2(node.fd, old, parent.fd, new, flags))
            for folder, name in ((node, old), (parent, new)):
                with contextlib.suppress(OSError):
                    facts = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                    moved = self._nodes.get(self._ids.get((facts.st_dev, facts.st_ino), 0))
                    if moved is not None:
                        moved.name = os.fsdecode(name)

    def link(self, node: Node, body: memoryview, unique: int) -> bytes:
        self.faults.refuse("no-links")
        old = self._nodes[struct.unpack_from("<Q", body)[0]]
        name = _name(body[8:])
        os.link(old.path, name, dst_dir_fd=node.fd)
        return self._entry(node, name)

    # Open files

    def _opened(self, node: Node, fd: int) -> bytes:
        past_cache, keep_cache = 1, 2
        cached = not any(self.faults.get(name) for name in PAST_CACHE)
        with self._lock:
            fh = next(self._next)
            self._handles[fh] = Handle(node, fd, cached)
            node.opens += 1
        return struct.pack("<QIi", fh, keep_cache if cached else past_cache, 0)

    def open(self, node: Node, body: memoryview, unique: int) -> bytes:
        flags = struct.unpack_from("<I", body)[0]
        if flags & os.O_DIRECT:
            self.faults.refuse("no-odirect")
        flags &= ~(os.O_DIRECT | os.O_NOFOLLOW | os.O_APPEND)
        return self._opened(node, os.open(node.path, flags))

    def create(self, node: Node, body: memoryview, unique: int) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        name = _name(body[16:])
        if flags & os.O_DIRECT:
            self.faults.refuse("no-odirect")
        flags = flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CREAT
        fd = os.open(name, flags, mode, dir_fd=node.fd)
        entry = self._entry(node, name)
        return entry + self._opened(self._nodes[struct.unpack_from("<Q", entry)[0]], fd)

    def read(self, node: Node, body: memoryview, unique: int) -> bytes | memoryview:
        fh, offset, size = struct.unpack_from("<QQI", body)
        handle = self._handles[fh]
        least = (self.faults.get("hang") or (0, 0))[1]
        if size >= least and (hang := self.faults.take("hang")) is not None:
            event = self._hanging[unique] = threading.Event()
            event.wait(hang[0])
            del self._hanging[unique]
        if (seconds := self.faults.fire("slow")) is not None:
            time.sleep(seconds)
        for name in ("eio", "estale"):
            self.faults.read(name, handle.node, offset, size, handle.cached)
        if not handle.cached:
            size = self.faults.chance("short", size)
        buffer = bytearray(size)
        return memoryview(buffer)[: os.preadv(handle.fd, [buffer], offset)]

    def write(self, node: Node, body: memoryview, unique: int) -> bytes:
        fh, offset, size = struct.unpack_from("<QQI", body)
        handle = self._handles[fh]
        handle.wrote = True
        if (seconds := self.faults.fire("slow")) is not None:
            time.sleep(seconds)
        self.faults.write(size)
        if not handle.cached:
            size = self.faults.chance("short-write", size)
        done = os.pwrite(handle.fd, body[40 : 40 + size], offset)
        return struct.pack("<II", done, 0)

    def flush(self, node: Node, body: memoryview, unique: int) -> None:
        handle = self._handles[struct.unpack_from("<Q", body)[0]]
        self._restamp(handle)
        if handle.wrote:
            self.faults.refuse("enospc-close")

    def release(self, node: Node, body: memoryview, unique: int) -> None:
        time.sleep(self.faults.get("late-release") or 0)
        with self._lock:
            handle = self._handles.pop(struct.unpack_from("<Q", body)[0])
            os.close(handle.fd)
            handle.node.opens -= 1
            if not handle.node.opens and handle.node.hidden:
                folder, name = handle.node.hidden
                handle.node.hidden = None
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                os.close(folder)

    def fsync(self, node: Node, body: memoryview, unique: int) -> None:
        handle = self._handles[struct.unpack_from("<Q", body)[0]]
        self.faults.refuse("eio-fsync")
        self._restamp(handle)

    def fallocate(self, node: Node, body: memoryview, unique: int) -> None:
        self.faults.refuse("no-fallocate")
        fh, offset, length, mode = struct.unpack_from("<QQQI", body)
        off = ctypes.c_long
        _check(LIBC.fallocate(self._handles[fh].fd, mode, off(offset), off(length)))

    def copy_file_range(self, node: Node, body: memoryview, unique: int) -> bytes:
        self.faults.refuse("no-copy-file-range")
        source, at, _, target, to, size, _ = struct.unpack_from("<7Q", body)
        into = self._handles[target]
        into.wrote = True
        done = os.copy_file_range(self._handles[source].fd, into.fd, min(size, 1 << 30), at, to)
        return struct.pack("<II", done, 0)

    # Directories

    def opendir(self, node: Node, body: memoryview, unique: int) -> bytes:
        with self._lock:
            fh = next(self._next)
            self._handles[fh] = Handle(node)
        return struct.pack("<QIi", fh, 0, 0)

    def readdir(self, node: Node, body: memoryview, unique: int) -> bytes:
        fh, offset, size = struct.unpack_from("<QQI", body)
        handle = self._handles[fh]
        if not offset:
            number = os.fstat(node.fd).st_ino
            handle.entries = [(".", number, 4), ("..", number, 4)]
            with os.scandir(node.path) as found:
                for entry in found:
                    if fnmatch.fnmatch(entry.name, self.faults.get("unseen") or ""):
                        continue
                    kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
                    handle.entries.append((entry.name, entry.inode(), kind))
        answer = bytearray()
        for k, (name, number, kind) in enumerate(handle.entries[offset:], offset + 1):
            raw = os.fsencode(name)
            record = struct.pack("<QQII", self._inode(number), k, len(raw), kind) + raw
            record += bytes(-len(record) % 8)
            if len(answer) + len(record) > size:
                break
            answer += record
        return bytes(answer)

    def releasedir(self, node: Node, body: memoryview, unique: int) -> None:
        with self._lock:
            del self._handles[struct.unpack_from("<Q", body)[0]]

    def fsyncdir(self, node: Node, body: memoryview, unique: int) -> None:
        self.faults.refuse("no-dir-fsync")

    def setlk(self, node: Node, body: memoryview, unique: int) -> None:
        """Lock all of a file, as flock asks: by the backing file, so for every mount of it."""
        fh, _, _, _, kind = struct.unpack_from("<QQQQI", body)
        self.faults.refuse("no-flock")
        how = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}
        fcntl.flock(self._handles[fh].fd, how.get(kind, fcntl.LOCK_UN) | fcntl.LOCK_NB)


class Mounted:
    """The file system in a process of its own, for a test: mounted while in `with`."""

    def __init__(self, backing: Path, mountpoint: Path, *faults: str) -> None:
        self.backing, self.path, self.faults = backing, mountpoint, faults
        self._words = [sys.executable, "-P", __file__, str(backing), str(mountpoint), "--until-eof"]
        self._words += [w for fault in faults for w in ("--fault", fault)]

    def __enter__(self) -> Mounted:
        self.process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()
        return self

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line or line.startswith("error"):
            raise OSError(f"faultfs: {line or 'it ended'}")
        return line

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._answer()

    def arm(self, *faults: str) -> None:
        for fault in faults:
            self.tell(f"arm {fault}")

    def disarm(self, name: str = "") -> None:
        self.tell(f"disarm {name}")

    def counts(self) -> dict[str, int]:
        return json.loads(self.tell("counts"))

    @contextlib.contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Disarm some of what it was mounted with."""
        for name in names:
            self.disarm(name)
        try:
            yield
        finally:
            self.arm(*(f for f in self.faults if f.partition("=")[0] in names))

    @contextlib.contextmanager
    def armed(self, *faults: str) -> Iterator[None]:
        self.arm(*faults)
        try:
            yield
        finally:
            for fault in faults:
                self.disarm(fault.partition("=")[0])

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def _obey(system: FaultFS, line: str) -> str:
    verb, _, rest = line.strip().partition(" ")
    try:
        if verb == "arm":
            system.faults.arm(rest)
        elif verb == "disarm":
            system.faults.disarm(rest)
            if rest in ("", "hang"):
                system.wake()
        elif verb == "counts":
            return json.dumps(system.faults.counts)
        elif verb == "unmount":
            system.unmount()
        else:
            return f"error: {verb!r} is not a command"
    except (ValueError, AttributeError) as e:
        return f"error: {e}"
    return "ok"


def main() -> None:
    table = "\n".join(f"  {name:20} {text}" for name, (_, text) in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"faults:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("backing", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=VALUE]")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--until-eof", action="store_true", help="end when stdin ends")
    args = parser.parse_args()
    try:
        faults = Faults(args.fault)
    except ValueError as e:
        parser.error(str(e))
    os.umask(0)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    system = FaultFS(args.backing, faults)
    try:
        system.mount(args.mountpoint)
    except OSError as e:
        sys.exit(f"faultfs: {args.mountpoint}: {e}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: system.unmount())
    for _ in range(args.threads):
        threading.Thread(target=system.serve, daemon=True).start()

    def listen() -> None:
        for line in sys.stdin:
            print(_obey(system, line), flush=True)
        if args.until_eof:
            system.unmount()

    print("ready", flush=True)
    threading.Thread(target=listen, daemon=True).start()
    while not system.ended.wait(0.2):  # signals are handled between waits
        pass
    os._exit(0)  # whatever is still open there, or hangs: the kernel answers ENOTCONN


if __name__ == "__main__":
    main()
