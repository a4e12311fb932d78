"""A reader that reads for other ranks of its node: each has a pipeline here, and memory it shares.

::

    client                                   root
    its rank ------------------------------>
          <--------------------------------- welcome
    ask start: loop, epoch, step ----------> a pipeline, which begins to read
    ask batch: which are no more ----------> their memory is free
          <------------- memory (each once), the batch: where it is in memory, what was read
    ask stop ------------------------------> the pipeline ends, its memory stays for the next loop
          <--------------------------------- the error that ended the loop
          <--------------------------------- bye: the Reader here is closed

A client that is gone is noticed by the end of its connection; its pipeline ends then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

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
    """One client: a thread that answers it."""

    def __init__(self, server: _Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self.service: Service | None = None
        self._rank = self._loop = -1
        self._lent: dict[int, object] = {}  # by the number of a batch, what it is in
        self._sent = 0
        self._ledger = Ledger()
        self._steps: Steps | None = None
        self._batches: Iterator[tuple[EpochSegment, int, Batch]] = iter(())
        self._shared = wire.Shared()
        self._pools: Pools | None = None
        self._extra = Pool(1, AHEAD + 3, self._shared.allocate)
        self._thread = threading.Thread(target=self._run, name="dsprep-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._greet():
                while (received := wire.receive(self._sock)) is not None:
                    self._answer(received[0])
        except (OSError, ValueError, KeyError, TypeError):  # the client is gone, or is not a client
            return
        finally:
            self._end_loop()
            self._lent.clear()
            self._pools, self._extra = None, Pool(1, 0)
            self._shared.close()
            self._sock.close()

    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def _greet(self) -> bool:
        """Learn the rank of the client; return whether there is a Reader for it."""
        if not wire.same_user(self._sock):
            return False
        self._sock.settimeout(GREETING_SECONDS)
        received = wire.receive(self._sock)
        if received is None:
            return False
        self._sock.settimeout(None)
        self._rank = int(received[0]["rank"])
        with _lock:
            if not self._server.services:  # it ends just now
                return False
            self.service = self._server.services[-1]
        wire.send(self._sock, {"welcome": True})
        return True

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

    # --- loops -------------------------------------------------------------------------------

    def _answer(self, request: Mapping[str, Any]) -> None:
        for number in request["done"]:
            self._lent.pop(number, None)
        if request["ask"] == "start":
            self._start(request["loop"], request["start"])
        elif request["loop"] == self._loop and self._steps is not None:
            if request["ask"] == "batch":
                self._deliver(self._steps)
            else:
                self._end_loop()

    def _start(self, loop: int, start: Mapping[str, Any]) -> None:
        self._end_loop()
        assert self.service is not None
        task = self.service.task
        settings = replace(task.settings, allocate=self._shared.allocate)
        if self._pools is None:
            self._pools = Pools(task.filler, settings, AHEAD)
        stages = tuple(ResumePoint(**each) for each in start["stages"])
        own = {"stages": stages, "which": start["which"] and Pass(**start["which"])}
        legs = task.order.legs(self._rank, Start(**{**start, **own}))
        self._loop, self._ledger = loop, Ledger()
        pipeline = Pipeline(task.filler, legs, settings, self._pools, self._ledger)
        self._steps = Steps(pipeline, legs, self._ledger)
        self._batches = _all_batches(self._steps)

    def _end_loop(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps, self._batches = None, iter(())

    def _deliver(self, steps: Steps) -> None:
        """Send the next batch, that there is none, or why it cannot be read."""
        try:
            next_batch = next(self._batches, None)
        except BaseException as error:
            self._end_loop()
            text = str(error) if isinstance(error, DsprepError) else describe(error)
            facts = {"error": text[: wire.LARGEST // 16], "sample": getattr(error, "sample", -1)}
            wire.send(self._sock, {"loop": self._loop, **facts})
            return
        if next_batch is None:
            self._end_loop()  # waits for what is still to be counted
            wire.send(self._sock, {"loop": self._loop, "read": self._read()})
            return
        leg, step, batch = next_batch
        arrays: list[Array] = []
        for column in batch.values():
            arrays += (column.values, column.offsets) if isinstance(column, Ragged) else (column,)
        offsets, lease = self._placed(arrays)
        number, self._sent = self._sent, self._sent + 1
        self._lent[number] = (arrays, lease)
        where = [(*offset, len(array)) for array, offset in zip(arrays, offsets, strict=True)]
        alive = self._shared.hand_over(self._sock)
        facts = {"batch": number, "epoch": leg.number, "step": step, "where": where}
        message = {"loop": self._loop, **facts, "alive": alive, "read": self._read()}
        wire.send(self._sock, message)

    def _read(self) -> list[tuple[int, dict[str, float]]]:
        """Return what was read since the last call, by epoch."""
        stats = self._ledger.take()
        return [(each.epoch, {name: getattr(each, name) for name in READ}) for each in stats]

    def _placed(self, arrays: list[Array]) -> tuple[list[tuple[int, int]], Bytes | None]:
        """Return where arrays are in shared memory, into which those that are not are copied.

        That is the number of the memory and the first byte in it of each array, (-1, 0) if it is
        empty; and what copies are in.
        """
        offsets = self._shared.find(arrays)
        private = [i for i, p in enumerate(offsets) if p is None and arrays[i].nbytes]
        memory, at = None, 0
        if private:
            sizes = [-(-arrays[i].nbytes // 64) * 64 for i in private]
            _, memory = self._extra.take(sum(sizes), lambda: True)
            for i, nbytes in zip(private, sizes, strict=True):
                array = np.ascontiguousarray(arrays[i])
                to = memory[at : at + array.nbytes]
                to[:] = array.reshape(-1).view(np.uint8)
                arrays[i] = to.view(array.dtype).reshape(array.shape)
                at += nbytes
            offsets = self._shared.find(arrays)
        known = zip(arrays, offsets, strict=True)
        return [p if array.nbytes and p is not None else (-1, 0) for array, p in known], memory


def _all_batches(steps: Steps) -> Iterator[tuple[EpochSegment, int, Batch]]:
    while steps.leg is not None:
        yield from steps.batches()


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
