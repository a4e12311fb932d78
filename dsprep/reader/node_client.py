"""A rank whose samples another process of its node reads: it maps the memory that these lie in.

Batches are views of that memory. When nothing refers to a batch any more, the reading process is
told, and fills its memory anew.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsprep import errors
from dsprep.core.schema import Array, Batch, Bytes, Field, Ragged, Schema
from dsprep.errors import DsprepError, ReadError, UsageError
from dsprep.reader import node_wire as wire
from dsprep.reader.dealing import Start
from dsprep.reader.ledger import Ledger
from dsprep.reader.node_memory import in_huge_pages
from dsprep.reader.pipeline import Leg, Pipeline

WAIT_SECONDS = 60.0
"""How long a rank waits for the one that reads for it to begin."""

Local = Callable[[Callable[[], Iterator[Leg]]], Pipeline]
"""Makes a pipeline of this process."""


class Client:
    """The connection of a Reader to the process that reads for it.

    Parameters
    ----------
    name
        Of the socket.
    root
        The local rank that reads, for messages.
    rank
        This rank, in the job.
    facts
        What both Readers must agree on.
    schema
        The fields of a batch.
    """

    def __init__(
        self, name: str, root: int, rank: int, facts: Mapping[str, Any], schema: Schema
    ) -> None:
        self._name, self.root, self._facts, self.schema = name, root, dict(facts), schema
        self._rank = rank
        self._link: _Link | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._alone = False

    def loop(
        self, start: Start, legs: Callable[[], Iterator[Leg]], ledger: Ledger, local: Local
    ) -> Loop | Pipeline:
        """Begin a loop.

        Parameters
        ----------
        start, legs
            What it runs through, in two ways.
        local
            Makes the pipeline that goes on if the other Reader is closed in between.

        Raises
        ------
        ReadError
            If nothing answers.
        """
        if self._alone:
            return local(legs)
        link = self._link
        if link is None or link.pid != os.getpid() or link.lost:
            link = self._connect()
        number = link.begin(start)
        if number is None:
            if link.left:
                self._alone = True
                return local(legs)
            raise self.gone()
        return Loop(self, link, number, legs, ledger, local)

    def _connect(self) -> _Link:
        self.close()
        end = time.monotonic() + WAIT_SECONDS
        hello = wire.with_json(
            wire.HELLO, {"version": wire.VERSION, "rank": self._rank, "facts": self._facts}
        )
        why = "no process answers"
        while True:
            sock = wire.new_socket()
            try:
                sock.settimeout(max(1.0, end - time.monotonic()))
                sock.connect(self._name)
                if not wire.same_user(sock):
                    raise UsageError("a process of another user answers for the reader of the node")
                sock.send(hello)
                found = wire.receive(sock, bytearray(wire.LARGEST))
                kind = b"" if found is None else bytes(found[0][:1])
                if kind == wire.WELCOME:
                    sock.settimeout(None)
                    link = self._link = _Link(sock)
                    self._finalizer = weakref.finalize(self, link.close)
                    return link
                if found is not None and kind == wire.NOT_HERE:
                    why = str(wire.json_of(found[0])["why"])
            except OSError as error:
                if isinstance(error, DsprepError):
                    sock.close()
                    raise
            except BaseException:
                sock.close()
                raise
            sock.close()
            if time.monotonic() >= end:
                raise ReadError(
                    f"local rank {self.root} of this node does not read for rank {self._rank}: "
                    f"{why}",
                    -1,
                    fix=f"make the same Reader on local rank {self.root} and keep it open, give "
                    "the ranks of a node the same node_key, or leave out readers_per_node",
                )
            time.sleep(0.02)

    def gone(self) -> ReadError:
        """Return the error for a process that ended."""
        return ReadError(
            f"local rank {self.root} of this node, which reads for rank {self._rank}, ended or was "
            "killed",
            -1,
            fix="look at what it printed",
        )

    def stay_alone(self) -> None:
        """Read in this process from now on."""
        self._alone = True

    def close(self) -> None:
        """End the connection; batches stay valid."""
        self._link = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


@dataclass(frozen=True)
class _Told:
    """A batch, or that there are no more."""

    number: int
    epoch: int
    step: int
    count: int
    places: list[int]


class _Link:
    """A connection, and the memory that came over it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.pid = sock, os.getpid()
        self._memories: dict[int, mmap.mmap] = {}
        self._buffer = bytearray(wire.LARGEST)
        self._returns = _Returns(sock)
        self._loop = -1
        self.left = self.lost = False
        self.tallied: list[list[int]] = []
        _sockets.add(sock)

    def begin(self, start: Start) -> int | None:
        """Ask for a loop; return its number, or None if there is nobody any more."""
        self._loop += 1
        stages = [[s.world_size, s.batch_size, s.steps] for s in start.stages]
        facts = {
            "loop": self._loop,
            "epoch": start.epoch,
            "stages": stages,
            "steps": start.steps + start.done,
            "epochs": start.epochs,
        }
        while self._pending() and self.next(lambda: not self._pending()) is not None:
            continue
        if not self.lost and self.say(wire.with_json(wire.START, facts)):
            return self._loop
        while not self.lost:  # a last word may have come
            self.next(lambda: False)
        return None

    def _pending(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not self.lost and bool(poll.poll(0))

    def say(self, message: bytes) -> bool:
        """Send a message; return whether somebody is there."""
        try:
            self._returns.flush()
            return wire.send(self._sock, message)
        except OSError:
            return False

    def next(self, ended: Callable[[], bool]) -> _Told | None:
        """Receive what comes next for the present loop; None: nobody is there, or it `ended`.

        Raises
        ------
        DsprepError
            That ended the loop over there.
        """
        while True:
            try:
                found = wire.receive(self._sock, self._buffer, ended)
            except OSError:
                found = None
            if found is None:
                self.lost = self.lost or not ended()
                return None
            message, fds = found
            kind = bytes(message[:1])
            if kind == wire.BATCH:
                told = self._told(wire.numbers(message), fds)
                if told is not None:
                    return told
            elif kind == wire.ERROR:
                facts = wire.json_of(message)
                if facts["loop"] == self._loop:
                    raise _error(facts)
            elif kind == wire.BYE:
                self.left = self.lost = True
                return None

    def _told(self, numbers: list[int], fds: list[int]) -> _Told | None:
        loop, number, epoch, step, count, new, gone, tallies = numbers[: wire.HEADER]
        at = wire.HEADER
        for fd in fds:
            index, nbytes = numbers[at : at + 2]
            try:
                self._memories[index] = memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
            finally:
                os.close(fd)
            in_huge_pages(memory, nbytes)
            at += 2
        assert len(fds) == new
        for index in numbers[at : at + gone]:
            self._memories.pop(index, None)  # what refers to it keeps it
        at += gone
        self.tallied += [numbers[at + 5 * i : at + 5 * i + 5] for i in range(tallies)]
        at += 5 * tallies
        if number == wire.NO_BATCH:
            return None
        if loop != self._loop:
            if number >= 0:
                self._returns.done(number)
            self.tallied.clear()
            return None
        return _Told(number, epoch, step, count, numbers[at:])

    def batch(self, told: _Told, schema: Schema) -> Batch:
        """Return the arrays of a batch."""
        roots: dict[int, Bytes] = {}

        def array(f: Field, dtype: Any, place: list[int], inner: tuple[int, ...]) -> Array:
            index, at, count = place
            shape = (count, *inner)
            if index < 0:
                return np.empty(shape, dtype)
            root = roots.get(index)
            if root is None:
                root = roots[index] = np.frombuffer(self._memories[index], np.uint8)
            size = count * int(np.prod(inner, dtype=np.int64)) * dtype.itemsize
            found: Array = root[at : at + size].view(dtype).reshape(shape)
            return found

        out: Batch = {}
        places = [told.places[i : i + 3] for i in range(0, len(told.places), 3)]
        for f in schema:
            first = array(f, f.dtype, places.pop(0), f.inner)
            if f.ragged:
                offsets = array(f, np.dtype(np.int64), places.pop(0), ())
                out[f.name] = Ragged(first, offsets, f.kind)
            else:
                out[f.name] = first
        self._returns.lend(told.number, list(roots.values()))
        return out

    def close(self) -> None:
        """Close it."""
        self._returns.close()
        self._memories.clear()


class _Returns:
    """Tells the reading process which batches are no more; whichever thread frees them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lent: dict[int, list[weakref.ref[Bytes]]] = {}
        self._late: deque[int] = deque()

    def lend(self, number: int, roots: list[Bytes]) -> None:
        """Note that a batch refers to some arrays."""
        left = [None] * len(roots)

        def freed(_: object) -> None:
            left.pop()
            if not left:
                self._lent.pop(number, None)
                self.done(number)

        if roots:
            self._lent[number] = [weakref.ref(root, freed) for root in roots]
        else:
            self.done(number)

    def done(self, number: int) -> None:
        """Give the memory of a batch back; never waits."""
        try:
            self._sock.send(wire.with_numbers(wire.DONE, number), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._late.append(number)
        except OSError:
            return

    def flush(self) -> None:
        """Give back what could not be given back without waiting."""
        while self._late:
            wire.send(self._sock, wire.with_numbers(wire.DONE, self._late.popleft()))

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class Loop:
    """Some epochs of the batches of a rank, which another process reads.

    Attributes
    ----------
    closed
        Whether it was closed.
    """

    def __init__(
        self,
        client: Client,
        link: _Link,
        number: int,
        legs: Callable[[], Iterator[Leg]],
        ledger: Ledger,
        local: Local,
    ) -> None:
        self._client, self._link, self._number = client, link, number
        self._legs, self._ledger, self._make_local = legs, ledger, local
        self._coming = legs()
        self._leg = next(self._coming, None)
        self._local: Pipeline | None = None
        self._asked = self._taken = 0
        self.closed = False

    @property
    def leg(self) -> Leg | None:
        """What comes next; see `Pipeline`."""
        return self._leg if self._local is None else self._local.leg

    def batches(self) -> Iterator[tuple[Leg, int, Batch]]:
        """Yield every batch of one epoch; see `Pipeline.batches`."""
        if self._local is not None:
            yield from self._local.batches()
            return
        leg = self._leg
        if leg is None:
            return
        for step in range(leg.first, leg.stop):
            began = time.perf_counter()
            told = self._take()
            if told is None:
                yield from self._go_on_alone(leg.number, step)
                return
            if (told.epoch, told.step) != (leg.number, step):
                raise ReadError("the reader of this node delivers another step", -1)
            batch = self._link.batch(told, self._client.schema)
            waited = time.perf_counter() - began
            self._ledger.add(
                leg.number,
                exposed_seconds=waited,
                first_seconds=waited if step == leg.first else 0.0,
                samples=told.count,
                batches=1,
            )
            self._taken += 1
            if step + 1 == leg.stop:
                self._leg = next(self._coming, None)
            yield leg, step, batch
            del batch
        if leg.first == leg.stop:
            self._leg = next(self._coming, None)
        if self._leg is None:
            self._take()  # that there are no more, and the last accounts

    def _take(self) -> _Told | None:
        """Return the next batch; None: the other Reader was closed."""
        link = self._link
        if link.pid != os.getpid():
            raise UsageError(
                "this loop is of the process that was forked", fix="begin a loop of the Reader anew"
            )
        if self.closed:
            raise UsageError("the reader was closed within the loop", fix="end the loop first")
        while self._asked < self._taken + 2:  # one ahead
            self._asked += 1
            if not link.say(wire.with_numbers(wire.ASK, self._number)):
                break  # what was said before is still to be received
        told = link.next(lambda: self.closed)
        for epoch, units, reads, nbytes, nanoseconds in link.tallied:
            self._ledger.add(
                epoch, units=units, reads=reads, nbytes=nbytes, io_seconds=nanoseconds / 1e9
            )
        link.tallied.clear()
        if self.closed:
            raise UsageError("the reader was closed within the loop", fix="end the loop first")
        if told is None and not link.left:
            raise self._client.gone()
        return told

    def _go_on_alone(self, epoch: int, step: int) -> Iterator[tuple[Leg, int, Batch]]:
        def rest() -> Iterator[Leg]:
            for leg in self._legs():
                if leg.number == epoch:
                    yield replace(leg, first=step)
                elif leg.number > epoch:
                    yield leg

        self._client.stay_alone()
        self._local = self._make_local(rest)
        yield from self._local.batches()

    def close(self) -> None:
        """Stop reading; batches that were handed out stay valid."""
        if self.closed or self._link.pid != os.getpid():
            return
        self.closed = True
        if self._local is not None:
            self._local.close()
        elif not self._link.lost:
            self._link.say(wire.with_numbers(wire.STOP, self._number))


def _error(facts: Mapping[str, Any]) -> DsprepError:
    """Return an error of the other process."""
    kind = getattr(errors, str(facts["kind"]), None)
    text = str(facts["text"])
    if not (isinstance(kind, type) and issubclass(kind, DsprepError)) or kind is ReadError:
        if kind is not ReadError:
            text = f"the reader of this node failed: {facts['kind']}: {text}"
        return ReadError(text, int(facts["sample"]))
    return kind(text)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forked() -> None:
    """Close the connections of the parent: what is freed here is not free there."""
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=_forked)
