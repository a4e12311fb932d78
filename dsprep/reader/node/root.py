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
"""Seconds for which a name may still belong to a process that is ending."""
GREETING_SECONDS = 10.0
AHEAD = 3
"""Batches on their way to a client, for which it has more blocks than a reader of its own."""
CLOSE_SECONDS = 60.0

READ = (
    *("units", "reads", "nbytes", "io_seconds", "cache_nbytes", "cache_units", "stall_seconds"),
)
"""Statistics of what is read here that belong to the client."""


class Service:
    """A Reader of this process, for clients of this node that have the same Reader.

    Where an equal one of this process has the name, it takes its place. `UsageError` if another
    process has it.
    """

    def __init__(self, task: ReadTask, name: str) -> None:
        self.task, self._name, self._pid, self._ended = task, name, os.getpid(), False
        self.sessions: list[_Session] = []
        if (other := _services.get(name)) is not None:
            other.close()
        self._sock = _bound(name)
        _services[name] = self
        self._thread = threading.Thread(target=self._run, name="dsprep-node", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=100)

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:  # gone again, or no file is free, or this ends
                if self._ended:
                    break
                time.sleep(0.01)
                continue
            session = _Session(self.task, wire.own(client))
            self.sessions = [s for s in self.sessions if s.thread.is_alive()] + [session]
        self._sock.close()

    def close(self) -> None:
        """Have all clients read for themselves from now on, and end."""
        if self._pid != os.getpid() or self._ended:
            return
        self._ended = True
        if _services.get(self._name) is self:
            del _services[self._name]
        self._at_exit.cancel()
        self._sock.shutdown(socket.SHUT_RDWR)  # refuses clients from here on, and ends `accept`
        threads = [self._thread]
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        for session in self.sessions:
            session.bid_farewell()
            threads.append(session.thread)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)


def _bound(name: str) -> socket.socket:
    """Return a socket of this name; `UsageError` if another process has it after some seconds."""
    end = time.monotonic() + BIND_SECONDS
    while True:
        sock = wire.new_socket()
        try:
            sock.bind(name)
            sock.listen(socket.SOMAXCONN)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return sock
        if time.monotonic() >= end:
            raise UsageError(
                "another process reads for this node already, under the same name",
                fix="give each process of a node a LOCAL_RANK, and each job a MASTER_PORT, of "
                "its own",
            )
        time.sleep(0.05)


class _Session:
    """One loop of a client: a thread that answers it."""

    def __init__(self, task: ReadTask, sock: socket.socket) -> None:
        self._task, self._sock = task, sock
        self._steps: Steps | None = None
        self.thread = threading.Thread(target=self._run, name="dsprep-client", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._serve()
            while wire.receive(self._sock) is not None:
                continue  # or the client would not get the last message
        except (OSError, ValueError, KeyError, TypeError):  # the client is gone, or is not a client
            return
        finally:
            self._sock.close()

    def bid_farewell(self) -> None:
        """Have the client read for itself, and end."""
        with contextlib.suppress(OSError):
            wire.send(self._sock, {"bye": True}, flags=socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        steps = self._steps
        if steps is not None:  # for which the thread may wait
            steps.close()

    def _serve(self) -> None:
        """Read what the client asks for."""
        if not wire.same_user(self._sock):
            return
        self._sock.settimeout(GREETING_SECONDS)
        received = wire.receive(self._sock)
        self._sock.settimeout(None)
        if received is None:
            return
        task, start = self._task, received[0]["start"]
        stages = tuple(ResumePoint(**each) for each in start["stages"])
        own = {"stages": stages, "mini_pass": start["mini_pass"] and Pass(**start["mini_pass"])}
        segments = task.order.segments(int(received[0]["rank"]), Start(**{**start, **own}))
        wire.send(self._sock, {"welcome": True})
        shared, ledger = wire.Shared(), Ledger()
        settings = replace(task.settings, allocate=shared.allocate)
        pools = Pools(task.planner, settings, AHEAD)
        steps = Steps(Pipeline(task.planner, segments, settings, pools, ledger), segments, ledger)
        self._steps = steps
        try:
            self._answer(steps, ledger, shared)
        finally:
            steps.close()
            self._steps = None

    def _answer(self, steps: Steps, ledger: Ledger, shared: wire.Shared) -> None:
        """Send batch after batch, that there is no other, or why one cannot be read."""

        def every() -> Iterator[tuple[EpochSegment, int, Batch]]:
            while steps.segment is not None:
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
            segment, step, batch = next_batch
            parts = [
                (c.values, c.offsets) if isinstance(c, Ragged) else (c,) for c in batch.values()
            ]
            arrays: list[Array] = [array for part in parts for array in part]
            offsets, lease = _placed(arrays, shared, extra)
            if any(memory >= 0 for memory, _ in offsets):
                lent[number] = (arrays, lease)
            where = [(*offset, len(array)) for array, offset in zip(arrays, offsets, strict=True)]
            message = {"batch": number, "epoch": segment.number, "step": step, "where": where}
            alive = shared.hand_over(self._sock)
            wire.send(self._sock, {**message, "alive": alive, "read": _read(ledger)})
            del next_batch, batch, parts, arrays, lease


def _read(ledger: Ledger) -> list[tuple[int, dict[str, float]]]:
    """Return statistics of reads since the last call, by epoch."""
    return [(s.epoch, {name: getattr(s, name) for name in READ}) for s in ledger.take()]


def _placed(
    arrays: list[Array], shared: wire.Shared, extra: Pool
) -> tuple[list[tuple[int, int]], Bytes | None]:
    """Return memory number and first byte of each array ((-1, 0): empty), and memory of copies."""
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


_services: dict[str, Service] = {}
os.register_at_fork(after_in_child=_services.clear)  # they are the parent's
