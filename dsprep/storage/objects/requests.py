"""Requests for ranges of objects: how many at a time, and what is refused.

One event loop in a thread of this process makes all requests. `Requests.read` takes ranges of any
objects, joins near ones, cuts long ones, and copies each body to its places as it arrives: long
ones in the thread that waits for them, so that many are copied at a time. Every request names the
version of the object that was opened (If-Match), and the version that the answer states is
compared, too: bytes of another version are never delivered.

What is in flight is bounded by bytes, which is what memory and bandwidth know of, and by requests.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import obstore
from obstore import exceptions

from dsprep.core.schema import Ints
from dsprep.errors import ChangedError, UsageError
from dsprep.storage import copying
from dsprep.storage.ranges import ends_early
from dsprep.storage.scatter import RangeError, Runs, stepped

BUDGET_NBYTES = 96 << 20
"""Bytes in flight at most: what 3 GB/s bring in 30 ms. With more, streams share the bandwidth, all
that is asked for comes late and together, and then nothing is under way."""

CEILING = 256
"""Requests in flight at most."""

NEAR = 64 << 10
"""Bytes between two ranges that are read along: fewer than what comes in the time that a request of
its own would take."""

PART_NBYTES = 3 << 20
"""Bytes of a part of a long range: about what a stream brings in the time to the first byte."""

SMALL_NBYTES = 256 << 10
"""Up to so many bytes of a body are copied by the thread of the event loop, without the kernel:
waking the thread that waits would take longer."""

LAST = 0.02
"""Seconds at the end of the program for threads of obstore to let its objects go."""

_FINAL = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
)


counters = {"requests": 0, "nbytes": 0, "other": 0, "sent": 0}
"""The requests of this process to object stores.

Requests for ranges that were answered, and bytes that came; requests for what objects are (HEAD,
LIST) and to write them; bytes that were written.
"""


@dataclass(frozen=True)
class Version:
    """One version of an object, and where it is.

    Attributes
    ----------
    store, key
        The store, as obstore has it, and the name of the object in it.
    name
        How users call it.
    nbytes
        Its size.
    etag
        Its ETag, which changes with its content; empty where the server has none.
    modified
        When it was last written, in ns since 1970, which takes the place of an ETag.
    """

    store: Any
    key: str
    name: str
    nbytes: int
    etag: str
    modified: int = 0

    @property
    def condition(self) -> dict[str, str]:
        """The condition of a request that is answered of this version alone."""
        # A weak ETag never matches (RFC 9110, section 13.1.1).
        return {} if not self.etag or self.etag.startswith("W/") else {"if_match": self.etag}

    def check(self, meta: Any) -> None:
        """Raise `ChangedError` if an answer states another version."""
        etag = etag_of(meta)
        same = etag == self.etag if self.etag else modified_ns(meta) == self.modified
        if not same or meta["size"] != self.nbytes:
            raise self.changed(f"{etag or modified_ns(meta)}, {meta['size']:,} bytes")

    def changed(self, found: str) -> ChangedError:
        """Return the error for an object that was written again, or removed."""
        return ChangedError(
            "the object changed since it was opened",
            where=self.name,
            expected=f"{self.etag or self.modified}, {self.nbytes:,} bytes",
            found=found,
            fix="open it again; a sidecar is written again with dsprep provenance",
        )


def etag_of(meta: Any) -> str:
    """Return the ETag of an object, quoted also where a store leaves the quotes out; "" if none."""
    etag: str = meta["e_tag"] or ""
    return etag if not etag or etag.endswith('"') else f'"{etag}"'


def modified_ns(meta: Any) -> int:
    """Return when an object was last written, in ns; as exact as the store keeps it."""
    milliseconds: int = round(meta["last_modified"].timestamp() * 1000)
    return milliseconds * 10**6


Part: TypeAlias = tuple[Version, int, int, Callable[[Any], None]]
"""One request: of which object, a half-open range of it, and what takes the body."""

_Bodies: TypeAlias = "SimpleQueue[tuple[Callable[[Any], None], Any] | None]"
"""Bodies for the thread that waits for a read, and None at its end."""


class Requests:
    """The requests of this process: an event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.under_way = self._nbytes = 0  # requests, and their bytes
        self._waiting = deque[tuple[int, asyncio.Future[None]]]()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="dsprep-objects"
        )
        self._thread.start()

    def close(self) -> None:
        """Give up what is under way, and end its thread."""

        async def give_up() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(give_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def read(self, parts: Sequence[Part]) -> None:
        """Read ranges; each body is given to its part, in this thread or the event loop's.

        It may be interrupted.

        Raises
        ------
        ChangedError
            If an object is no longer the version that was opened.
        OSError
            If a range cannot be read, however often obstore tries it.
        """
        if not parts:
            return
        bodies: _Bodies = SimpleQueue()
        ended: Future[None] = Future()
        tasks = []

        def finish(task: asyncio.Task[None]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            ended.set_result(None) if error is None else ended.set_exception(error)
            bodies.put(None)

        def begin() -> None:
            tasks.append(self._loop.create_task(self._read(parts, bodies)))
            tasks[0].add_done_callback(finish)

        self._loop.call_soon_threadsafe(begin)
        try:
            while (arrived := bodies.get()) is not None:
                place, body = arrived
                place(body)
            ended.result()
        except BaseException:
            if not ended.done():  # nothing may be copied to memory that the caller gives up
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                with suppress(asyncio.CancelledError):
                    ended.exception()
            raise

    def fetch(self, version: Version, start: int, stop: int) -> bytes:
        """Return a range of an object, in parts if it is long; raises as `read`."""
        bodies: dict[int, Any] = {}
        count = max(1, round((stop - start) / PART_NBYTES))
        cuts = [start + (stop - start) * k // count for k in range(count + 1)]
        self.read([(version, a, b, partial(bodies.__setitem__, a)) for a, b in pairwise(cuts)])
        return b"".join(bodies[at] for at in cuts[:-1])

    async def _read(self, parts: Sequence[Part], bodies: _Bodies) -> None:
        async def make(part: Part) -> None:
            version, start, stop, place = part
            body = await self._one(version, start, stop)
            place(body) if stop - start <= SMALL_NBYTES else bodies.put((place, body))

        tasks = [self._loop.create_task(make(part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self) -> None:
        """Let requests begin that there is room for, those first that wait longest."""
        while self._waiting:
            nbytes, turn = self._waiting[0]
            is_full = self.under_way >= CEILING or self._nbytes + nbytes > BUDGET_NBYTES
            if self.under_way and is_full:
                return
            self._waiting.popleft()
            if not turn.done():
                self.under_way, self._nbytes = self.under_way + 1, self._nbytes + nbytes
                turn.set_result(None)

    async def _one(self, version: Version, start: int, stop: int) -> Any:
        """Return the body of one range."""
        nbytes, turn = stop - start, self._loop.create_future()
        self._waiting.append((nbytes, turn))
        self._admit()
        try:
            await turn
            return await _get(version, start, stop)
        except exceptions.PreconditionError as error:
            raise version.changed("another version") from error
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            raise version.changed("nothing there") from error
        except _FINAL as error:
            raise refused(version.name, error) from error
        except (exceptions.BaseError, TimeoutError, OSError) as error:
            text = f"cannot be read at offset {start}: {brief(error)}"
            raise RangeError(errno.EIO, text, version.name).at(start) from error
        finally:
            if turn.done() and not turn.cancelled():
                self.under_way, self._nbytes = self.under_way - 1, self._nbytes - nbytes
                self._admit()


async def _get(version: Version, start: int, stop: int) -> Any:
    options: Any = {"range": (start, stop), **version.condition}
    answer = await obstore.get_async(version.store, version.key, options=options)
    version.check(answer.meta)
    body = await answer.bytes_async()
    if len(body) != stop - start:
        raise OSError(errno.EIO, f"{len(body)} bytes came of {stop - start}")
    counters["requests"] += 1
    counters["nbytes"] += len(body)
    return body


def brief(error: BaseException) -> str:
    """Return the first line of an error of a request, without the address that it went to."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; instead, for a public "
    "bucket, AWS_SKIP_SIGNATURE=true; as well, where requesters pay, AWS_REQUEST_PAYER=true",
    "gs": "GOOGLE_SERVICE_ACCOUNT, a path; instead, for a public bucket, "
    "GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY; instead of the key, for a "
    "public container, AZURE_SKIP_SIGNATURE=true",
}
"""Variables of the environment by which a store knows who asks."""


def refused(name: str, error: BaseException) -> OSError:
    """Return the error for a request that the store refuses, whatever it is tried."""
    text, (scheme, _, key) = str(error), name.partition("://")
    number, advice = errno.EIO, f"; set {CREDENTIALS[scheme]}" if scheme in CREDENTIALS else ""
    if isinstance(error, FileNotFoundError) or "status code: 404" in text:
        bucket = f"{scheme}://{key.partition('/')[0]}"
        return FileNotFoundError(errno.ENOENT, "there is no such bucket or container", bucket)
    if advice and "://169.254.169.254" in text:  # asked for the credentials of a machine's role
        return OSError(errno.EACCES, f"there are no credentials{advice}", name)
    if "error sending request" in text:
        words = "the server cannot be reached: is AWS_ENDPOINT_URL right?"
        return OSError(errno.EHOSTUNREACH, words, name)
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return OSError(errno.EACCES, f"{os.strerror(errno.EACCES)}: {brief(error)}{advice}", name)
    if isinstance(error, exceptions.NotSupportedError):
        number = errno.EOPNOTSUPP
    return OSError(number, f"{os.strerror(number)}: {brief(error)}", name)


# --- one for each process ----------------------------------------------------------------------

_lock = threading.Lock()
_made: Requests | None = None
_user = 0  # the process that makes them; another one was forked from it
_is_ending = False


def check_process() -> None:
    """Raise `UsageError` in a child of a process that made requests.

    The runtime of obstore does not survive a fork: a request there would never end.
    """
    global _user
    _user = _user or os.getpid()
    if _user != os.getpid():
        raise UsageError(
            "this process was forked from one that read from an object store, which cannot be "
            "done again here",
            fix="start workers by multiprocessing's forkserver or spawn (a DataLoader: "
            "multiprocessing_context='forkserver'), or leave them out: Batches reads by threads",
        )


def requests() -> Requests:
    """Return the requests of this process; raises as `check_process`."""
    global _made
    check_process()
    with _lock:
        if _is_ending:
            raise UsageError("this program is ending: nothing is read from object stores any more")
        if _made is None:
            _made = Requests()
        return _made


def close() -> None:
    """End the thread that makes requests, and what is under way; the next one begins another."""
    global _made
    with _lock:
        ended, _made = _made, None
    if ended is not None:
        ended.close()


@atexit.register
def _end() -> None:
    """End the requests before the interpreter."""
    # A thread of obstore that is about to hand over a result when the interpreter ends aborts the
    # process: with all requests given up, those threads are let go on for a moment.
    global _is_ending
    _is_ending, is_used = True, _made is not None
    if is_used and _user == os.getpid():
        close()
        time.sleep(LAST)


# --- ranges to parts ---------------------------------------------------------------------------


def parts_of(version: Version, ranges: Runs, part_nbytes: int = PART_NBYTES) -> list[Part]:
    """Return the requests for ranges: near ones together, long ones in parts.

    Raises
    ------
    FormatError
        If a range is not within the object.
    """
    starts, sizes = ranges.starts, ranges.sizes
    stops = starts + sizes
    outside = (stops > version.nbytes) & (sizes > 0)
    if outside.any():
        i = int(outside.argmax())
        available = max(0, version.nbytes - int(starts[i]))
        raise ends_early(version.name, int(starts[i]), int(sizes[i]), available)
    pieces = [
        piece
        for (start, iovecs), size in zip(ranges, sizes.tolist(), strict=True)
        for piece in stepped(start, iovecs, part_nbytes if size > part_nbytes else None)
        if size
    ]
    parts, inside, begin, end = list[Part](), list[tuple[int, Ints]](), 0, 0
    for at, iovecs in sorted(pieces, key=itemgetter(0)):
        stop = at + int(iovecs[:, 1].sum())
        if inside and (at - end > NEAR or max(end, stop) - begin > part_nbytes):
            parts.append((version, begin, end, partial(_put, begin, inside)))
            inside = []
        begin, end = (begin, max(end, stop)) if inside else (at, stop)
        inside.append((at, iovecs))
    if inside:
        parts.append((version, begin, end, partial(_put, begin, inside)))
    return parts


def _put(start: int, members: list[tuple[int, Ints]], body: Any) -> None:
    """Copy ranges out of a body, which begins at `start` of the object, to their places."""
    address = np.frombuffer(body, np.uint8).ctypes.data - start
    few = len(body) <= SMALL_NBYTES
    for at, iovecs in members:
        if few and len(iovecs) <= len(members) + 4:
            copying.move(address + at, iovecs)  # shorter than letting other threads run meanwhile
        else:
            copying.copy(address + at, iovecs)
