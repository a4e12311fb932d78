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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, Bytes, Field, Ragged, Schema
from dsprep.errors import DsprepError, ReadError, UsageError
from dsprep.reader.ledger import Ledger
from dsprep.reader.node import wire
from dsprep.reader.order import EpochSegment, Start
from dsprep.reader.pipeline import Pipeline, closed_within, forked

WAIT_SECONDS = 60.0
"""How long a rank waits for the one that reads for it to begin."""

Local = Callable[[Callable[[], Iterator[EpochSegment]]], Pipeline]
"""Makes a pipeline of this process."""


class Client:
    """The connection of a Reader to the process that reads for it.

    Parameters
    ----------
    name
        Of the socket.
    root, rank
        The local rank that reads, and this rank in the job, for messages.
    schema
        The fields of a batch.
    """

    def __init__(self, name: str, root: int, rank: int, schema: Schema) -> None:
        self._name, self._root, self._rank, self._schema = name, root, rank, schema
        self.link: _Link | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def begin(
        self, start: Start, legs: Callable[[], Iterator[EpochSegment]], ledger: Ledger, local: Local
    ) -> Remote | Pipeline:
        """Begin a loop: what `start` and `legs` say, in two ways.

        `local` makes the pipeline that continues if the other Reader is closed in between. Raises
        `ReadError` if nothing answers.
        """
        link = self.link
        if link is not None and link.left:
            return local(legs)
        if link is None or link.lost or link.pid != os.getpid():
            link = self._connect()
        if not link.begin(start):
            if not link.left:
                raise self.lost()
            return local(legs)
        return Remote(self, link, legs, ledger, local)

    def _connect(self) -> _Link:
        self.close()
        end = time.monotonic() + WAIT_SECONDS
        while True:
            sock = wire.new_socket()
            if self._is_welcome(sock, end):
                self.link = link = _Link(sock, self._schema)
                self._finalizer = weakref.finalize(self, link.close)
                return link
            sock.close()
            if time.monotonic() >= end:
                raise ReadError(
                    f"local rank {self._root} of this node does not read for rank {self._rank}: "
                    "no process with the same Reader answers",
                    -1,
                    fix=f"make the same Reader (dataset, order, seed, batch_size, fields) on local "
                    f"rank {self._root} and keep it open, or leave out readers_per_node",
                )
            time.sleep(0.02)

    def _is_welcome(self, sock: socket.socket, end: float) -> bool:
        """Connect to the other process; return whether it reads for this one."""
        try:
            sock.settimeout(max(1.0, end - time.monotonic()))
            sock.connect(self._name)
            if not wire.same_user(sock):
                raise UsageError("a process of another user answers for the reader of the node")
            wire.send(sock, {"rank": self._rank})
            welcome = wire.receive(sock) is not None
            sock.settimeout(None)
        except OSError as error:
            if isinstance(error, DsprepError):
                raise
            return False
        return welcome

    def lost(self) -> ReadError:
        """Return the error for a process that ended."""
        return ReadError(
            f"local rank {self._root} of this node, which reads for rank {self._rank}, ended or "
            "was killed",
            -1,
            fix="look at what it printed",
        )

    def close(self) -> None:
        """End the connection; batches stay valid."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = self.link = None


class _Link:
    """A connection, and the memory that came over it; `loop` numbers its loops.

    It is `lost` when nobody is there any more, and `left` if that was announced.
    """

    def __init__(self, sock: socket.socket, schema: Schema) -> None:
        self._sock, self._schema, self.pid = sock, schema, os.getpid()
        self._memories: dict[int, mmap.mmap] = {}
        # An array of each memory that a batch is in stands for it; its end goes into the queue,
        # by no callback written in Python, in which an interrupt could arrive.
        self._ended: SimpleQueue[weakref.ref[Bytes]] = SimpleQueue()
        self._lent: dict[int, tuple[int, weakref.ref[Bytes]]] = {}  # by the id of the reference
        self._left: dict[int, int] = {}  # references to each batch
        self._done: list[int] = []
        self.loop = -1
        self.lost = self.left = False

    def begin(self, start: Start) -> bool:
        """Ask for a loop; return whether somebody is there."""
        self.loop += 1
        if self.ask("start", start=asdict(start)):
            return True
        while self.next(lambda: False) is not None:
            continue  # a last word may have come
        return False

    def ask(self, kind: str, **more: Any) -> bool:
        """Send a message, and which batches are unused now; return whether somebody is there."""
        try:
            while True:
                number, _ = self._lent.pop(id(self._ended.get_nowait()))
                self._left[number] -= 1
                if not self._left[number]:
                    del self._left[number]
                    self._done.append(number)
        except Empty:
            done = [self._done.pop() for _ in range(len(self._done))]
        try:
            wire.send(self._sock, {"ask": kind, "loop": self.loop, "done": done, **more})
        except OSError:
            return False
        return True

    def next(self, ended: Callable[[], bool]) -> dict[str, Any] | None:
        """Receive the next answer in this loop; None: nobody is there, or it `ended`.

        Raises the error that ended the loop over there.
        """
        while not self.lost:
            try:
                received = wire.receive(self._sock, ended)
            except OSError:
                received = None
            if received is None:
                self.lost = not ended()
                return None
            message, fds = received
            if "memory" in message:
                if not fds:
                    raise ReadError("the memory of a batch did not come: too many open files", -1)
                try:
                    memory = wire.map_shared(fds[0], message["nbytes"])
                    self._memories[message["memory"]] = memory
                finally:
                    os.close(fds[0])
            elif "bye" in message:
                self.left = self.lost = True
            elif message["loop"] != self.loop:
                self._done += [message["batch"]] if "batch" in message else []
            elif "error" in message:
                raise ReadError(message["error"], message["sample"])
            else:
                return message
        return None

    def batch(self, message: Mapping[str, Any]) -> Batch:
        """Return the arrays of a batch."""
        for index in self._memories.keys() - set(message["alive"]):
            del self._memories[index]  # what refers to it keeps it
        roots: dict[int, Bytes] = {}

        def array(f: Field, dtype: Any, where: Sequence[int], inner: tuple[int, ...]) -> Array:
            index, at, count = where
            if index < 0:
                return np.empty((count, *inner), dtype)
            if index not in roots:
                roots[index] = np.frombuffer(self._memories[index], np.uint8)
            size = count * int(np.prod(inner, dtype=np.int64)) * dtype.itemsize
            values: Array = roots[index][at : at + size].view(dtype).reshape(count, *inner)
            return values

        out: Batch = {}
        where = iter(message["where"])
        for f in self._schema:
            values = array(f, f.dtype, next(where), f.inner)
            if f.ragged:
                offsets = array(f, np.dtype(np.int64), next(where), ())
                out[f.name] = Ragged(values, offsets, f.kind)
            else:
                out[f.name] = values
        number = message["batch"]
        self._left[number] = len(roots)
        for root in roots.values():
            lent = weakref.ref(root, self._ended.put)
            self._lent[id(lent)] = number, lent
        if not roots:
            del self._left[number]
            self._done.append(number)
        return out

    def close(self) -> None:
        """Close it."""
        self._sock.close()
        self._memories.clear()


class Remote:
    """The batches of a loop that another process reads: a `BatchSource` of the pipeline."""

    def __init__(
        self,
        client: Client,
        link: _Link,
        legs: Callable[[], Iterator[EpochSegment]],
        ledger: Ledger,
        local: Local,
    ) -> None:
        self._client, self._link, self._number = client, link, link.loop
        self._legs, self._ledger, self._make_local = legs, ledger, local
        self._local: Pipeline | None = None
        self._requested = self._taken = 0
        self.closed = False

    def take(self, leg: EpochSegment, step: int, count: int) -> Batch:
        """Return the batch of the next step."""
        if self._local is None:
            message = self._next()
            if message is not None:
                if (message.get("epoch"), message.get("step")) != (leg.number, step):
                    raise ReadError("the reader of this node delivers another step", -1)
                self._taken += 1
                return self._link.batch(message)

            def rest() -> Iterator[EpochSegment]:
                for each in self._legs():
                    if each.number >= leg.number:
                        yield replace(each, first=step) if each.number == leg.number else each

            self._local = self._make_local(rest)
        return self._local.take(leg, step, count)

    def end(self, leg: EpochSegment, last: bool) -> None:
        """Note that an epoch is over; after the last one, wait for the last statistics."""
        if self._local is not None:
            self._local.end(leg, last)
        elif last:
            self._next()

    def _next(self) -> dict[str, Any] | None:
        """Return the next answer; None: the other Reader was closed."""
        link = self._link
        if link.pid != os.getpid():
            raise forked()
        while not self.closed and self._requested < self._taken + 2:  # one ahead
            self._requested += 1
            if not link.ask("batch"):
                break  # what was sent before is still to be received
        message = None if self.closed else link.next(lambda: self.closed)
        if self.closed:
            raise closed_within()
        if message is None and not link.left:
            raise self._client.lost()
        for epoch, more in (message or {"read": ()})["read"]:
            self._ledger.add(epoch, **more)
        return message

    def close(self) -> None:
        """Stop reading; batches that were handed out stay valid."""
        if self.closed or self._link.pid != os.getpid():
            return
        self.closed = True
        if self._local is not None:
            self._local.close()
        elif not self._link.lost and self._link.loop == self._number:
            self._link.ask("stop")
