"""The line between a process of a benchmark and the one that started it.

A message is one byte that tells its kind, four bytes of length, and so many bytes. Ranks meet at
a gate: each says that it is there, and waits for the answer, which all get when the last one came.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

GATE, RESULT, ERROR = b".", b"R", b"E"

_HEAD = struct.Struct("<cI")


def pack(kind: bytes, content: Any = None) -> bytes:
    """Return a message."""
    data = b"" if content is None else json.dumps(content).encode()
    return _HEAD.pack(kind, len(data)) + data


def unpack(data: bytearray) -> tuple[bytes, Any] | None:
    """Take the first message off `data`; None if it is not there as a whole."""
    if len(data) < _HEAD.size:
        return None
    kind, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if len(data) < end:
        return None
    content = json.loads(bytes(data[_HEAD.size : end])) if size else None
    del data[:end]
    return kind, content


class Gate:
    """The end of the line in a process that measures.

    Parameters
    ----------
    line
        The socket.
    ranks
        How many processes meet; one alone never waits.
    """

    def __init__(self, line: socket.socket, ranks: int) -> None:
        self._line, self._alone = line, ranks == 1

    def wait(self) -> None:
        """Wait until every rank is here.

        Raises
        ------
        ConnectionError
            If the process that started this one has gone.
        """
        if self._alone:
            return
        self._line.sendall(pack(GATE))
        if not self._line.recv(1):
            raise ConnectionError("the benchmark has ended")

    def tell(self, kind: bytes, content: Any) -> None:
        """Send the last word."""
        self._line.sendall(pack(kind, content))
