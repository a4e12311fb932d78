"""Communication between processes of a node: messages over sockets, and memory without a name.

A message is a JSON object, and files may come with it. Sockets keep messages apart and have
abstract names (unix(7)): they are nowhere in the file system, and end with the process, as the
memory does (memfd_create(2)). Both sides check that the other one is of the same user. A forked
child closes the sockets of its parent: their end must be that of the parent.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.cache.copies import Descriptor
from dsprep.core.packing import digest
from dsprep.core.schema import Array
from dsprep.reader.memory import in_huge_pages
from dsprep.storage.ranges import truncate

LARGEST = 64 << 10
"""Bytes of a message."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def address(*words: object) -> str:
    """Return the name of a socket of this user."""
    text = "\0".join(map(str, words)).encode("utf-8", "surrogateescape")
    return f"\0dsprep-{os.getuid()}-{digest(text)[:24]}"


def new_socket() -> socket.socket:
    """Return a socket for messages."""
    return own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def own(sock: socket.socket) -> socket.socket:
    """Return a socket that is closed in a forked child."""
    _sockets.add(sock)
    return sock


def _forked() -> None:
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=_forked)


def same_user(sock: socket.socket) -> bool:
    """Return whether the other end is a process of this user, or of root."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", data)[1] in (os.getuid(), 0)


def send(sock: socket.socket, message: Mapping[str, Any], flags: int = 0, fd: int = -1) -> None:
    """Send a message, perhaps with a file."""
    data = json.dumps(message).encode()
    if fd >= 0:
        socket.send_fds(sock, [data], [fd])
    else:
        sock.send(data, flags)


def receive(
    sock: socket.socket, ended: Callable[[], bool] | None = None
) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and the file that came with it; None: the other end is gone, or `ended`.

    Raises
    ------
    ValueError
        If it is not a JSON object.
    """
    if ended is not None:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(200):
            if ended():
                return None
    try:
        data, fds, _, _ = socket.recv_fds(sock, LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not data:
        return None
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    return message, fds


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Return a file in memory, mapped in huge pages where the kernel has some for it."""
    memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    in_huge_pages(memory)
    return memory


class Shared:
    """Makes memory for another process, and gives the number of that in which an array is.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._made: dict[int, tuple[weakref.ref[mmap.mmap], int, int]] = {}  # address, bytes
        self._new: dict[int, Descriptor] = {}  # files of memory that was not handed over yet

    def allocate(self, nbytes: int) -> mmap.mmap:
        """Return memory of `nbytes` bytes; see `dsprep.reader.memory.Allocate`."""
        file = Descriptor(os.memfd_create("dsprep", os.MFD_CLOEXEC))
        truncate(file.fd, nbytes)
        memory = map_shared(file.fd, nbytes)
        start = int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
        with self._lock:
            self._made[self._count] = weakref.ref(memory), start, nbytes
            self._new[self._count] = file
            self._count += 1
        return memory

    def _alive(self) -> list[int]:
        self._made = {i: each for i, each in self._made.items() if each[0]() is not None}
        self._new = {i: file for i, file in self._new.items() if i in self._made}
        return list(self._made)

    def hand_over(self, sock: socket.socket) -> list[int]:
        """Send all memory that the other process does not have; return the numbers of all."""
        with self._lock:
            alive = self._alive()
            for i, file in self._new.items():
                send(sock, {"memory": i, "nbytes": self._made[i][2]}, fd=file.fd)
            self._new = {}
            return alive

    def find(self, arrays: Sequence[Array]) -> list[tuple[int, int] | None]:
        """Return the memory that each array is in and its first byte there, or None."""
        with self._lock:
            made = sorted((self._made[i][1], i, self._made[i][2]) for i in self._alive())
        starts = [start for start, _, _ in made]
        offsets: list[tuple[int, int] | None] = []
        for array in arrays:
            at = int(array.ctypes.data)
            k = bisect_right(starts, at) - 1
            inside = k >= 0 and at + array.nbytes <= starts[k] + made[k][2]
            offsets.append((made[k][1], at - starts[k]) if inside else None)
        return offsets
