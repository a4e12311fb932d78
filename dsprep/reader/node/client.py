"""A rank whose samples another process of its node reads: it maps the memory that these are in.

Batches are views of that memory. When nothing refers to a batch any more, the reading process
learns it with the next question, and fills its memory again.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from dsprep.cache.copies import Descriptor
from dsprep.core.schema import Array, Batch, Bytes, DType, Ragged, Schema
from dsprep.errors import DsprepError, ReadError, UsageError
from dsprep.reader.ledger import Ledger
from dsprep.reader.node import wire
from dsprep.reader.order import EpochSegment, Segments, Start
from dsprep.reader.pipeline import Pipeline, closed_error, forked_error

WAIT_SECONDS = 60.0
"""Seconds that a rank waits for its reading process to begin."""

Local = Callable[[Segments], Pipeline]
"""Makes a pipeline of this process."""


class Client:
    """The loops of a Reader that another process reads.

    Parameters
    ----------
    name
        Of the socket.
    root, rank
        The local rank that reads, and this rank in the job.
    schema
        The fields of a batch.
    """

    def __init__(self, name: str, root: int, rank: int, schema: Schema) -> None:
        self._name, self._root, self._rank, self.schema = name, root, rank, schema
        self._is_served = False

    def begin(
        self,
        start: Start,
        segments: Segments,
        ledger: Ledger,
        local: Local,
    ) -> Remote | Pipeline:
        """Begin a loop: what `start` and `segments` say, in two ways.

        `local` makes the pipeline that continues if the other Reader is closed, and that reads all
        if it was closed before. Raises `ReadError` if nothing answers from the beginning.
        """
        end = time.monotonic() + WAIT_SECONDS
        while True:
            sock = wire.new_socket()
            if self._is_welcome(sock, start, end):
                self._is_served = True
                return Remote(self, sock, segments, ledger, local)
            sock.close()
            if self._is_served:
                return local(segments)
            if time.monotonic() >= end:
                raise ReadError(
                    f"local rank {self._root} of this node does not read for rank {self._rank}: "
                    "no process with the same Reader answers",
                    -1,
                    fix="make the same Reader (dataset, order, seed, batch_size, fields) on local "
                    f"rank {self._root} and keep it open, or leave out readers_per_node",
                )
            time.sleep(0.02)

    def _is_welcome(self, sock: socket.socket, start: Start, end: float) -> bool:
        """Connect to the other process; return whether it reads for this one."""
        try:
            sock.settimeout(max(1.0, end - time.monotonic()))
            sock.connect(self._name)
            if not wire.same_user(sock):
                raise UsageError("a process of another user answers for the reader of the node")
            wire.send(sock, {"rank": self._rank, "start": asdict(start)})
            welcome = wire.receive(sock)
            sock.settimeout(None)
        except OSError as error:
            if isinstance(error, DsprepError):
                raise
            return False
        return welcome is not None and "welcome" in welcome[0]

    def lost(self) -> ReadError:
        """Return the error for a process that ended."""
        return ReadError(
            f"local rank {self._root} of this node, which reads for rank {self._rank}, ended or "
            "was killed",
            -1,
            fix="look at what it printed",
        )


class Remote:
    """The batches of a loop that another process reads: a `BatchSource` of the pipeline."""

    def __init__(
        self,
        client: Client,
        sock: socket.socket,
        segments: Segments,
        ledger: Ledger,
        local: Local,
    ) -> None:
        self._client, self._sock, self._pid = client, sock, os.getpid()
        self._segments, self._ledger, self._make_local = segments, ledger, local
        self._local: Pipeline | None = None
        self._requested = self._taken = 0
        self.closed = False
        self.memories: dict[int, mmap.mmap] = {}
        # An array of each memory that a batch is in stands for it; its end goes into the queue,
        # by no callback written in Python, in which an interrupt could arrive.
        self._ended: SimpleQueue[weakref.ref[Bytes]] = SimpleQueue()
        self._lent: dict[int, tuple[int, weakref.ref[Bytes]]] = {}  # by the id of the reference
        self._left: dict[int, int] = {}  # references to each batch

    def take(self, segment: EpochSegment, step: int, count: int) -> Batch:
        """Return the batch of the next step."""
        if self._local is None:
            message = self._next()
            if message is not None:
                if (message.get("epoch"), message.get("step")) != (segment.number, step):
                    raise ReadError("the reader of this node delivers another step", -1)
                self._taken += 1
                return self._batch(message)

            def rest() -> Iterator[EpochSegment]:
                for each in self._segments():
                    if each.number >= segment.number:
                        yield replace(each, first=step) if each.number == segment.number else each

            self._local = self._make_local(rest)
        return self._local.take(segment, step, count)

    def end(self, segment: EpochSegment, last: bool) -> None:
        """Note that an epoch is over; after the last one, wait for the last statistics."""
        if self._local is not None:
            self._local.end(segment, last)
        elif last:
            self._next()

    def _next(self) -> dict[str, Any] | None:
        """Return the next answer; None: the other Reader was closed."""
        if self._pid != os.getpid():
            raise forked_error()
        try:
            while not self.closed and self._requested < self._taken + 2:  # one ahead
                self._requested += 1
                wire.send(self._sock, {"done": self._done()})
        except OSError:
            pass  # what was sent before is still to be received
        message = self._received()
        if self.closed:
            raise closed_error()
        if message is None:
            raise self._client.lost()
        if "bye" in message:
            return None
        if "error" in message:
            raise ReadError(message["error"], message["sample"])
        for epoch, more in message["read"]:
            self._ledger.add(epoch, **more)
        return message

    def _received(self) -> dict[str, Any] | None:
        """Receive the next answer, and memory before it; None: nobody is there, or it is closed."""
        while not self.closed:
            try:
                received = wire.receive(self._sock, lambda: self.closed)
            except OSError:
                return None
            if received is None:
                return None
            message, fds = received
            if "memory" not in message:
                return message
            if not fds:
                raise ReadError("the memory of a batch did not come: too many open files", -1)
            file = Descriptor(fds[0])
            self.memories[message["memory"]] = wire.map_shared(file.fd, message["nbytes"])
        return None

    def _done(self) -> list[int]:
        """Return which batches are unused now."""
        done = []
        try:
            while True:
                number, _ = self._lent.pop(id(self._ended.get_nowait()))
                self._left[number] -= 1
                if not self._left[number]:
                    del self._left[number]
                    done.append(number)
        except Empty:
            return done

    def _batch(self, message: Mapping[str, Any]) -> Batch:
        """Return the arrays of a batch."""
        for index in self.memories.keys() - set(message["alive"]):
            del self.memories[index]  # what refers to it keeps it
        roots: dict[int, Bytes] = {}
        where = iter(message["where"])

        def array(dtype: DType, inner: tuple[int, ...]) -> Array:
            index, at, count = next(where)
            if index < 0:
                return np.empty((count, *inner), dtype)
            if index not in roots:
                roots[index] = np.frombuffer(self.memories[index], np.uint8)
            size = count * int(np.prod(inner, dtype=np.int64)) * dtype.itemsize
            values: Array = roots[index][at : at + size].view(dtype).reshape(count, *inner)
            return values

        out: Batch = {}
        for f in self._client.schema:
            values = array(f.dtype, f.inner)
            out[f.name] = (
                Ragged(values, array(np.dtype(np.int64), ()), f.kind) if f.ragged else values
            )
        if roots:
            self._left[message["batch"]] = len(roots)
        for root in roots.values():
            lent = weakref.ref(root, self._ended.put)
            self._lent[id(lent)] = message["batch"], lent
        return out

    def close(self) -> None:
        """Stop reading; batches that were handed out stay valid."""
        if self.closed or self._pid != os.getpid():
            return
        self.closed = True
        if self._local is not None:
            self._local.close()
        self._sock.close()
        self.memories.clear()
