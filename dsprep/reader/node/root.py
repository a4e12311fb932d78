"""A reader that reads for other ranks of its node: each has a pipeline here, and memory it shares.

::

    client                                   root
    its rank, where its loop begins -------> a pipeline, which begins to read
          <--------------------------------- welcome
    which batches are no more -------------> their memory is free
          <------------- memory (each once), the batch: where it is in memory, what was read
          <--------------------------------- the error that ended the loop, or that it is over
          <--------------------------------- bye: the Reader here is closed

A loop that ends is noticed by the end of its connection; its pipeline ends then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from multiprocessing.util import Finalize

import numpy as np

from dsprep.core.schema import Array, Batch, Bytes, Ragged
from dsprep.errors import DsprepError, UsageError, describe
from dsprep.reader.ledger import Ledger
from dsprep.reader.memory import Pool
from dsprep.reader.mini_epochs import Pass
from dsprep.reader.node import wire
from dsprep.reader.order import EpochSegment, ResumePoint, Start
from dsprep.reader.pipeline import Pipeline, Pools, ReadTask, Steps

BIND_SECONDS = 5.0
"""How long a name may still be that of a process that ends just now."""
GREETING_SECONDS = 10.0
AHEAD = 3
"""Batches on their way to a client, for which it has more blocks than a reader of its own."""
CLOSE_SECONDS = 60.0

READ = (
    *("units", "reads", "nbytes", "io_seconds", "cache_nbytes", "cache_units", "stall_seconds"),
)
"""Statistics of what is read here that belong to the client."""


class Service:
    """A Reader of this process, for clients that have the same Reader."""

    def __init__(self, task: ReadTask) -> None:
        self.task = task
        self._pid, self._closed = os.getpid(), False
        self._server: _Server | None = None

    def publish(self, name: str, seconds: float) -> None:
        """Let clients find it; `UsageError` if another process has the name after some seconds."""
        end = time.monotonic() + seconds
        while True:
            with _lock:
                try:
                    self._server = _servers[name] = _servers.get(name) or _Server(name)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    self._server.services.append(self)
                    return
            if time.monotonic() >= end:
                raise UsageError(
                    "another process reads for this node already, under the same name",
                    fix="give each process of a node a LOCAL_RANK, and each job a MASTER_PORT, of "
                    "its own",
                )
            time.sleep(0.05)

    def close(self) -> None:
        """Have all clients read for themselves from now on, and end."""
        if self._pid != os.getpid():
            return
        with _lock:
            server, closed = self._server, self._closed
            self._closed = True
            if server is None or closed:
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
    """Answers clients of this node under one name, for equal Readers of this process."""

    def __init__(self, name: str) -> None:
        self.name, self.services = name, list[Service]()
        self.sessions: list[_Session] = []
        self._sock, self._ended = wire.new_socket(), False
        try:
            self._sock.bind(name)
            self._sock.listen(socket.SOMAXCONN)
        except BaseException:
            self._sock.close()
            raise
        self._thread = threading.Thread(target=self._run, name="dsprep-node", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, _close_all, exitpriority=100)

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:  # gone again, or no file is free, or this ends
                if self._ended:
                    break
                time.sleep(0.01)
                continue
            session = _Session(self, wire.own(client))
            with _lock:
                self.sessions = [s for s in self.sessions if s.alive()] + [session]
        self._sock.close()

    def remove(self, service: Service) -> bool:
        """Forget a Reader; return whether it was the last, which ends this."""
        self.services.remove(service)
        if self.services:
            return False
        del _servers[self.name]
        self._ended = True
        self._sock.shutdown(socket.SHUT_RDWR)  # refuses clients from here on, and ends `accept`
        return True

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._at_exit.cancel()
        for session in self.sessions:  # that came at the last moment
            session.bid_farewell()
            session.join()


class _Session:
    """One loop of a client: a thread that answers it."""

    def __init__(self, server: _Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self.service: Service | None = None
        self._steps: Steps | None = None
        self._thread = threading.Thread(target=self._run, name="dsprep-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
            while wire.receive(self._sock) is not None:
                continue  # or the client would not get the last message
        except (OSError, ValueError, KeyError, TypeError):  # the client is gone, or is not a client
            return
        finally:
            self._sock.close()

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def bid_farewell(self) -> None:
        """Have the client read for itself, and end."""
        with contextlib.suppress(OSError):
            wire.send(self._sock, {"bye": True}, flags=socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        steps = self._steps
        if steps is not None:  # for which the thread may wait
            steps.close()

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        """Read what the client asks for."""
        if not wire.same_user(self._sock):
            return
        self._sock.settimeout(GREETING_SECONDS)
        received = wire.receive(self._sock)
        self._sock.settimeout(None)
        with _lock:
            if received is None or not self._server.services:  # gone, or it ends just now
                return
            self.service = self._server.services[-1]
        task, start = self.service.task, received[0]["start"]
        stages = tuple(ResumePoint(**each) for each in start["stages"])
        own = {"stages": stages, "which": start["which"] and Pass(**start["which"])}
        legs = task.order.legs(int(received[0]["rank"]), Start(**{**start, **own}))
        wire.send(self._sock, {"welcome": True})
        shared, ledger = wire.Shared(), Ledger()
        settings = replace(task.settings, allocate=shared.allocate)
        pools = Pools(task.filler, settings, AHEAD)
        steps = Steps(Pipeline(task.filler, legs, settings, pools, ledger), legs, ledger)
        self._steps = steps
        try:
            self._answer(steps, ledger, shared)
        finally:
            steps.close()
            self._steps = None

    def _answer(self, steps: Steps, ledger: Ledger, shared: wire.Shared) -> None:
        """Send batch after batch, that there is no other, or why one cannot be read."""

        def every() -> Iterator[tuple[EpochSegment, int, Batch]]:
            while steps.leg is not None:
                yield from steps.batches()

        batches, extra = every(), Pool(1, AHEAD + 3, shared.allocate)
        lent: dict[int, object] = {}  # by the number of a batch, what it is in
        for number in count():
            if (received := wire.receive(self._sock)) is None:
                return
            for done in received[0]["done"]:
                lent.pop(done, None)
            try:
                next_batch = next(batches, None)
            except BaseException as error:
                text = str(error) if isinstance(error, DsprepError) else describe(error)
                facts = {"error": text[: wire.LARGEST // 16]}
                wire.send(self._sock, {**facts, "sample": getattr(error, "sample", -1)})
                return
            if next_batch is None:
                steps.close()  # waits for what is still to be counted
                wire.send(self._sock, {"read": _read(ledger)})
                return
            leg, step, batch = next_batch
            parts = [
                (c.values, c.offsets) if isinstance(c, Ragged) else (c,) for c in batch.values()
            ]
            arrays: list[Array] = [array for part in parts for array in part]
            offsets, lease = _placed(arrays, shared, extra)
            if any(memory >= 0 for memory, _ in offsets):
                lent[number] = (arrays, lease)
            where = [(*offset, len(array)) for array, offset in zip(arrays, offsets, strict=True)]
            message = {"batch": number, "epoch": leg.number, "step": step, "where": where}
            alive = shared.hand_over(self._sock)
            wire.send(self._sock, {**message, "alive": alive, "read": _read(ledger)})
            del next_batch, batch, parts, arrays, lease


def _read(ledger: Ledger) -> list[tuple[int, dict[str, float]]]:
    """Return what was read since the last call, by epoch."""
    return [(s.epoch, {name: getattr(s, name) for name in READ}) for s in ledger.take()]


def _placed(
    arrays: list[Array], shared: wire.Shared, extra: Pool
) -> tuple[list[tuple[int, int]], Bytes | None]:
    """Return where arrays are in shared memory, into which those that are not are copied.

    That is the number of the memory and the first byte in it of each array, (-1, 0) if it is
    empty; and what copies are in.
    """
    offsets = shared.find(arrays)
    private = [i for i, p in enumerate(offsets) if p is None and arrays[i].nbytes]
    memory, at = None, 0
    if private:
        sizes = [-(-arrays[i].nbytes // 64) * 64 for i in private]
        _, memory = extra.take(sum(sizes), lambda: True)
        for i, nbytes in zip(private, sizes, strict=True):
            array = np.ascontiguousarray(arrays[i])
            to = memory[at : at + array.nbytes]
            to[:] = array.reshape(-1).view(np.uint8)
            arrays[i] = to.view(array.dtype).reshape(array.shape)
            at += nbytes
        offsets = shared.find(arrays)
    known = zip(arrays, offsets, strict=True)
    return [p if array.nbytes and p is not None else (-1, 0) for array, p in known], memory


_lock = threading.RLock()
_servers: dict[str, _Server] = {}


def _close_all() -> None:
    """End the connections to all clients when this process ends."""
    with _lock:
        services = [s for server in _servers.values() for s in server.services]
    for service in services:
        service.close()


def _forked() -> None:
    """Leave everything to the parent."""
    global _lock
    _lock = threading.RLock()
    _servers.clear()


os.register_at_fork(after_in_child=_forked)
