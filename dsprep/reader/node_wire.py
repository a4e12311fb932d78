"""What the readers of a node say to each other, over a socket that keeps messages apart.

A message is one byte that tells its kind, and JSON or int64 numbers. Sockets have abstract names
(unix(7)): they are nowhere in the file system, and end with the process. Both sides see to it that
the other one is of the same user.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.packing import digest
from dsprep.core.schema import Ints

VERSION = 1

HELLO, WELCOME, NOT_HERE = b"H", b"W", b"N"
START, ASK, DONE, STOP = b"S", b"A", b"D", b"P"
BATCH, ERROR, BYE = b"B", b"E", b"G"

LARGEST = 64 << 10
"""Bytes of a message."""

MOST_FDS = 200
"""Pieces of memory that one message hands over."""

HEADER = 8
"""Numbers at the beginning of a `BATCH`: loop, number of the batch (`NO_MORE`, `NO_BATCH`),
epoch, step, samples; then how many pieces of memory are new, how many are gone, and of how many
epochs accounts follow."""


NO_MORE = -1
"""In place of a batch: the loop is done."""
NO_BATCH = -2
"""In place of a batch: only news about memory; the batch follows."""


def address(*words: object) -> str:
    """Return the name of a socket of this user."""
    text = "\0".join(map(str, words)).encode("utf-8", "surrogateescape")
    return f"\0dsprep-{os.getuid()}-{digest(text)[:24]}"


def new_socket() -> socket.socket:
    """Return a socket for messages."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def same_user(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user, or of root."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", data)[1] in (os.getuid(), 0)


def with_json(kind: bytes, value: Mapping[str, Any]) -> bytes:
    """Return a message of JSON."""
    return kind + json.dumps(value).encode()


def with_numbers(kind: bytes, *numbers: int | Ints) -> bytes:
    """Return a message of int64 numbers."""
    return kind + b"".join(np.asarray(n, "<i8").tobytes() for n in numbers)


def numbers(message: bytes | bytearray | memoryview) -> list[int]:
    """Return the numbers of a message."""
    found: list[int] = np.frombuffer(message, "<i8", offset=1).tolist()
    return found


def json_of(message: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the JSON object of a message.

    Raises
    ------
    ValueError
        If it is none.
    """
    value = json.loads(bytes(message[1:]))
    if not isinstance(value, dict):
        raise ValueError("no JSON object")  # noqa: TRY004
    return value


def send(
    sock: socket.socket,
    message: bytes,
    fds: Sequence[int] = (),
    ended: Callable[[], bool] = lambda: False,
) -> bool:
    """Send a message, waiting until the other end takes it or `ended`; return whether it went."""
    poll: select.poll | None = None
    while True:
        try:
            if fds:
                socket.send_fds(sock, [message], fds, socket.MSG_DONTWAIT)
            else:
                sock.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if poll is None:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
            poll.poll(20)  # POLLOUT is also told while the other end's queue is full
            if ended():
                return False
        else:
            return True


def receive(
    sock: socket.socket, buffer: bytearray, ended: Callable[[], bool] | None = None
) -> tuple[memoryview, list[int]] | None:
    """Receive a message and the files that came with it; None: the other end is gone, or `ended`.

    The message is valid until the buffer is used again.
    """
    poll: select.poll | None = None
    space = socket.CMSG_SPACE(MOST_FDS * 4)
    flags = socket.MSG_CMSG_CLOEXEC | (0 if ended is None else socket.MSG_DONTWAIT)
    while True:
        try:
            count, found, _, _ = sock.recvmsg_into([buffer], space, flags)
        except BlockingIOError:
            if ended is not None and ended():
                return None
            if poll is None:
                poll = select.poll()
                poll.register(sock, select.POLLIN)
            poll.poll(200)
            continue
        except ConnectionError:
            return None
        fds: list[int] = []
        for level, kind, data in found:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        return (memoryview(buffer)[:count], fds) if count else None
