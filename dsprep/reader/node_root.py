"""A reader that reads for other ranks of its node: each has a pipeline here, and memory it shares.

::

    client                                root
    HELLO what it reads ----------------> compared with the Readers of this process
          <------------------------------ WELCOME, or NOT_HERE and why
    START loop, epoch, step ------------> a pipeline, which begins to read
    ASK   loop -------------------------> one more batch is wanted
          <------- BATCH, memory (once) - where it lies
    DONE  batch ------------------------> nothing there refers to it any more: memory is free
    STOP  loop -------------------------> the pipeline ends, its memory stays for the next loop
          <------------------------------ ERROR of the loop
          <------------------------------ BYE: the Reader here is closed

A client that is gone is noticed by the end of its connection; its pipeline ends then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, Bytes, Ragged
from dsprep.errors import UsageError
from dsprep.reader import node_wire as wire
from dsprep.reader.dealing import Dealing, Start
from dsprep.reader.filling import Filler
from dsprep.reader.ledger import Ledger
from dsprep.reader.memory import Pool
from dsprep.reader.node_memory import Shared
from dsprep.reader.order import Stage
from dsprep.reader.pipeline import Leg, Pipeline, Pools, Settings
from dsprep.sidecar.sidecar import Sidecar

BIND_SECONDS = 5.0
"""How long a name may still be that of a process that ends just now."""
GREETING_SECONDS = 10.0
AHEAD = 2
"""Batches on their way to a client, for which it has more blocks than a reader of its own."""
CLOSE_SECONDS = 60.0

TALLIED = ("units", "reads", "nbytes", "io_nanoseconds")


@dataclass(frozen=True)
class Task:
    """What a Reader reads, whichever its rank.

    Attributes
    ----------
    sidecar, names, capacity, verify
        See `Filler`.
    dealing
        The order.
    settings
        How to read.
    """

    sidecar: Sidecar
    names: tuple[str, ...]
    capacity: int
    dealing: Dealing
    settings: Settings
    verify: bool

    def filler(self) -> Filler:
        """Return what plans units."""
        return Filler(self.sidecar, self.names, self.capacity, self.verify)


class Tally(Ledger):
    """What was read since it was told last, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, dict[str, int]] = {}

    def add(self, epoch: int, **more: float) -> None:
        """Add to some numbers of an epoch."""
        more["io_nanoseconds"] = more.get("io_seconds", 0.0) * 1e9
        with self._lock:
            sums = self._sums.setdefault(epoch, dict.fromkeys(TALLIED, 0))
            for name in TALLIED:
                sums[name] += int(more.get(name, 0))

    def fetched(self, epoch: int) -> None:
        """Do nothing: the kernel counts for the process as a whole."""

    def take(self) -> list[list[int]]:
        """Return epoch and `TALLIED` numbers of each epoch, and begin anew."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return [[e, *s.values()] for e, s in sums.items() if any(s.values())]


class Service:
    """A Reader of this process, for clients.

    Parameters
    ----------
    task
        What it reads.
    facts
        What a client must agree with.
    """

    def __init__(self, task: Task, facts: Mapping[str, Any]) -> None:
        self.task, self.facts = task, dict(facts)
        self.closed = False
        self._pid = os.getpid()
        self.server: _Server | None = None

    def publish(self, name: str, seconds: float) -> None:
        """Let clients find it.

        Raises
        ------
        UsageError
            If another process has the name still after some seconds.
        """
        end = time.monotonic() + seconds
        while self.server is None:
            with _lock:
                try:
                    server = _servers.get(name) or _Server(name)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    server.services.append(self)
                    self.server = _servers[name] = server
                    return
            if time.monotonic() >= end:
                raise UsageError(
                    "another process reads for this node already, under the same name",
                    fix="give each job a node_key of its own, and each process of a node another "
                    "local rank",
                )
            time.sleep(0.05)

    def close(self) -> None:
        """Tell all clients that they have to read for themselves now, and end."""
        if self._pid != os.getpid():
            return
        with _lock:
            if self.closed:
                return
            self.closed = True
            server = self.server
            if server is None:
                return
            last = server.remove(self)
            sessions = [s for s in server.sessions if last or s.service is self]
        for session in sessions:
            session.bid_farewell()
        for session in sessions:
            session.join()
        if last:
            server.join()


class _Server:
    """Answers clients of this node under one name, for all Readers of this process."""

    def __init__(self, name: str) -> None:
        self.name, self.services = name, list[Service]()
        self.sessions: list[_Session] = []
        self.sock = wire.new_socket()
        try:
            self.sock.bind(name)
            self.sock.listen(socket.SOMAXCONN)
        except BaseException:
            self.sock.close()
            raise
        self._wake, self._waker = socket.socketpair()
        self.open = [self.sock, self._wake, self._waker]
        self._thread = threading.Thread(target=self._run, name="dsprep-node", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, _close_all, exitpriority=100)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            if any(fd == self._wake.fileno() for fd, _ in poll.poll()):
                break
            try:
                client, _ = self.sock.accept()
            except OSError:  # gone again, or no file is free
                time.sleep(0.01)
                continue
            session = _Session(self, client)
            with _lock:
                self.sessions = [s for s in self.sessions if s.alive()] + [session]
        for sock in self.open:
            sock.close()

    def find(self, asked: Mapping[str, Any]) -> Service | str:
        """Return the Reader that a client asks for, or how the nearest one differs."""
        nearest: list[str] | None = None
        for service in self.services:
            names = [n for n in {**service.facts, **asked} if service.facts.get(n) != asked.get(n)]
            if not names:
                return service
            if nearest is None or len(names) < len(nearest):
                nearest = names
                told = ", ".join(
                    f"{n} {service.facts.get(n)!r}, not {asked.get(n)!r}" for n in names
                )
        return "it has no Reader" if nearest is None else f"its Reader has {told}"

    def remove(self, service: Service) -> bool:
        """Forget a Reader; return whether it was the last, which ends this."""
        self.services.remove(service)
        if self.services:
            return False
        del _servers[self.name]
        self.sock.shutdown(socket.SHUT_RDWR)  # refuses clients from here on
        self._waker.send(b"x")
        return True

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._at_exit.cancel()
        for session in self.sessions:  # that came at the last moment
            session.bid_farewell()
            session.join()


@dataclass
class _Loop:
    """A loop of a client."""

    number: int
    pipeline: Pipeline
    thread: threading.Thread | None = None
    asks: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    closed: bool = False


class _Session:
    """One client."""

    def __init__(self, server: _Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self.service: Service | None = None
        self._held: dict[int, object] = {}
        self._sent = 0
        self._loop: _Loop | None = None
        self._shared = Shared()
        self._pools: Pools | None = None
        self._extra = Pool(1, AHEAD + 3, self._shared.allocate)
        self._thread = threading.Thread(target=self._run, name="dsprep-client", daemon=True)
        _sockets.add(sock)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._greet():
                buffer = bytearray(wire.LARGEST)
                while (found := wire.receive(self._sock, buffer)) is not None:
                    self._handle(found[0])
        except (OSError, ValueError, KeyError, TypeError):  # the client is gone, or is no client
            return
        finally:
            self._end_loop()
            self._held.clear()
            self._pools, self._extra = None, Pool(1, 0)
            self._shared.close()
            self._sock.close()

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def _greet(self) -> bool:
        """Find the Reader that the client asks for."""
        if not wire.same_user(self._sock):
            return False
        self._sock.settimeout(GREETING_SECONDS)
        buffer = bytearray(wire.LARGEST)
        found = wire.receive(self._sock, buffer)
        if found is None or bytes(found[0][:1]) != wire.HELLO:
            return False
        asked = wire.json_of(found[0])
        self._sock.settimeout(None)
        self._rank = int(asked["rank"])
        with _lock:
            service = self._server.find(asked["facts"])
            if isinstance(service, Service):
                self.service = service
        if isinstance(service, str):
            self._send(wire.with_json(wire.NOT_HERE, {"why": service}))
            return False
        return self._send(wire.WELCOME)

    def _send(self, message: bytes, fds: Sequence[int] = (), loop: _Loop | None = None) -> bool:
        return wire.send(self._sock, message, fds, lambda: loop is not None and loop.closed)

    def bid_farewell(self) -> None:
        """Tell the client that it is on its own, and end."""
        end = time.monotonic() + 1.0
        with contextlib.suppress(OSError):
            wire.send(self._sock, wire.BYE, ended=lambda: time.monotonic() > end)
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    # --- loops -------------------------------------------------------------------------------

    def _handle(self, message: memoryview) -> None:
        kind = bytes(message[:1])
        if kind == wire.START:
            self._start(wire.json_of(message))
        elif kind == wire.DONE:
            for number in wire.numbers(message):
                self._held.pop(number, None)
        elif kind in (wire.ASK, wire.STOP):
            loop = self._loop
            if loop is not None and wire.numbers(message) == [loop.number]:
                if kind == wire.ASK:
                    loop.asks.put(True)
                else:
                    self._end_loop()
        else:
            raise ValueError("no such message")

    def _start(self, asked: Mapping[str, Any]) -> None:
        self._end_loop()
        assert self.service is not None
        task = self.service.task
        settings = replace(task.settings, allocate=self._shared.allocate)
        filler = task.filler()
        if self._pools is None:
            pools = self._pools = Pools(filler, settings)
            for pool in (pools.blocks, *pools.values.values()):
                pool.count += AHEAD
        stages = tuple(Stage(*stage) for stage in asked["stages"])
        start = Start(asked["epoch"], stages, asked["steps"], asked["epochs"])
        legs = task.dealing.legs(self._rank, start)
        tally = Tally()
        pipeline = Pipeline(filler, legs, settings, self._pools, tally)
        loop = self._loop = _Loop(int(asked["loop"]), pipeline)
        loop.thread = threading.Thread(
            target=self._deliver, args=(loop, tally), name="dsprep-deliver", daemon=True
        )
        loop.thread.start()

    def _end_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.closed = True
        loop.asks.put(False)
        loop.pipeline.close()
        if loop.thread is not None:
            loop.thread.join(CLOSE_SECONDS)

    def _deliver(self, loop: _Loop, tally: Tally) -> None:
        """Send a batch whenever the client asks for one."""
        pipeline = loop.pipeline
        batches = _all_batches(pipeline)
        try:
            while loop.asks.get() and not loop.closed:
                found = next(batches, None)
                if found is None:
                    pipeline.close()  # waits for what is still to be tallied
                    self._send_batch(loop, wire.NO_MORE, (0, 0, 0), [], tally)
                    return
                leg, step, batch = found
                del found
                self._send_whole(loop, leg.number, step, batch, tally)
                del batch
        except BaseException as error:
            self._send_error(loop, error)

    def _send_error(self, loop: _Loop, error: BaseException) -> None:
        if loop.closed:
            return
        facts = {
            "loop": loop.number,
            "kind": type(error).__name__,
            "text": str(error)[: wire.LARGEST // 16],
            "sample": getattr(error, "sample", -1),
        }
        with contextlib.suppress(OSError):
            self._send(wire.with_json(wire.ERROR, facts), loop=loop)

    def _send_whole(self, loop: _Loop, epoch: int, step: int, batch: Batch, tally: Tally) -> None:
        arrays: list[Array] = []
        count = 0
        for column in batch.values():
            count = len(column)
            parts = (column.values, column.offsets) if isinstance(column, Ragged) else (column,)
            arrays += parts
        lease = self._share(arrays)
        number, self._sent = self._sent, self._sent + 1
        self._held[number] = (arrays, lease)
        try:
            went = self._send_batch(loop, number, (epoch, step, count), arrays, tally)
        except BaseException:
            self._held.pop(number, None)
            raise
        if not went:
            self._held.pop(number, None)

    def _share(self, arrays: list[Array]) -> Bytes | None:
        """Copy arrays that do not lie in shared memory into some, which is returned."""
        places = self._shared.find(arrays)
        private = [i for i, p in enumerate(places) if p is None and arrays[i].nbytes]
        sizes = [-(-arrays[i].nbytes // 64) * 64 for i in private]
        if not private:
            return None
        _, memory = self._extra.take(sum(sizes), lambda: True)
        at = 0
        for i, nbytes in zip(private, sizes, strict=True):
            array = np.ascontiguousarray(arrays[i])
            to = memory[at : at + array.nbytes]
            to[:] = array.reshape(-1).view(np.uint8)
            arrays[i] = to.view(array.dtype).reshape(array.shape)
            at += nbytes
        return memory

    def _send_batch(
        self,
        loop: _Loop,
        number: int,
        what: tuple[int, int, int],
        arrays: list[Array],
        tally: Tally,
    ) -> bool:
        """Send where a batch lies; return whether it went out."""
        places = self._shared.find(arrays)
        body: list[int] = []
        for array, place in zip(arrays, places, strict=True):
            at = place if array.nbytes and place is not None else (-1, 0)
            body += (*at, len(array))
        new, gone = self._shared.changes()
        while len(new) > wire.MOST_FDS:
            some, new = new[: wire.MOST_FDS], new[wire.MOST_FDS :]
            if not self._send_news(loop, wire.NO_BATCH, (0, 0, 0), some, [], [], []):
                self._shared.not_told(gone)
                return False
        return self._send_news(loop, number, what, new, gone, tally.take(), body)

    def _send_news(
        self,
        loop: _Loop,
        number: int,
        what: tuple[int, int, int],
        new: list[tuple[int, int, int]],
        gone: list[int],
        tallied: list[list[int]],
        body: list[int],
    ) -> bool:
        numbers = [loop.number, number, *what, len(new), len(gone), len(tallied)]
        numbers += (n for index, nbytes, _ in new for n in (index, nbytes))
        numbers += gone
        numbers += (n for line in tallied for n in line)
        message = wire.with_numbers(wire.BATCH, np.array(numbers + body, np.int64))
        went = self._send(message, [fd for _, _, fd in new], loop)
        if went:
            for index, _, _ in new:
                self._shared.handed_over(index)
        else:
            self._shared.not_told(gone)
        return went


def _all_batches(pipeline: Pipeline) -> Iterator[tuple[Leg, int, Batch]]:
    while pipeline.leg is not None:
        yield from pipeline.batches()


_lock = threading.RLock()
_servers: dict[str, _Server] = {}
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_all() -> None:
    """Take leave of all clients when this process ends."""
    with _lock:
        services = [s for server in _servers.values() for s in server.services]
    for service in services:
        service.close()


def _forked() -> None:
    """Leave everything to the parent: the end of its sockets must be that of the parent."""
    global _lock
    _lock = threading.RLock()
    for server in _servers.values():
        for sock in server.open:
            sock.close()
    for sock in list(_sockets):
        sock.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forked)
