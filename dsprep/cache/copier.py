"""Filling copies: one process of a node at a time, from the tier that has the whole dataset."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from dsprep.cache.copies import ASKED, LEFT_OUT, OPEN, PLANNED, READY, REFUSED, Copy, Descriptor
from dsprep.cache.folder import CacheFolder
from dsprep.cache.pieces import PAGE, Pieces, Range, name_of
from dsprep.core.schema import Bytes
from dsprep.storage.checksums import pwrite_crc32c
from dsprep.storage.ranges import fstat, named, truncate

BLOCK = 4 << 20
"""Bytes that are copied at a time."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Throttle:
    """Lets so many bytes per second through; from any number of threads. None: all.

    What comes waits until all before it has had its time, not for its own: time that is then spent
    on it, up to that, is not lost.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free = rate, 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until so many bytes may pass, or until `stop` says so."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._free, now)
            self._free = begin + nbytes / self._rate
        while (pause := begin - time.monotonic()) > 0 and not stop():
            time.sleep(min(pause, 0.1))


class Copier:
    """Copies pieces; safe to use from several threads.

    Parameters
    ----------
    pieces
        Of the dataset.
    folder
        Where copies are.
    threads
        That copy.
    throttle
        Bytes per second of all of them.
    drawn
        Called with bytes that were read of the dataset.
    refused
        Called with a sentence for a piece that was not right.
    """

    def __init__(
        self,
        pieces: Pieces,
        folder: CacheFolder,
        threads: int,
        throttle: Throttle,
        drawn: Callable[[int], None] = lambda nbytes: None,
        refused: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.pieces, self._folder = pieces, folder
        self._threads, self._throttle = threads, throttle
        self._drawn, self._refused = drawn, refused

    def fill(
        self, copy: Copy, stop: Callable[[], bool], ask: Callable[[], None] = lambda: None
    ) -> bool:
        """Reserve space for what was asked for, and copy it, what is wanted sooner first.

        Parameters
        ----------
        copy
            A copy of the pieces, below the folder.
        stop
            Whether to end early; asked between pieces and blocks.
        ask
            Called first, when no other process fills it, not even one of another node.

        Returns
        -------
        bool
            False if another process fills it, or this ended early.

        Raises
        ------
        OSError, DsprepError
            If the dataset cannot be read, or the copy not be written.
        """
        lock = copy.fill_lock()
        if lock is None:
            return False
        try:
            copy.refresh()
            ask()
            while not (copy.is_filled or stop()):
                copy.not_synced()
                self._plan(copy)
                self._copy_planned(copy, stop)
            if not (stop() or copy.is_synced):
                copy.sync()
            return not stop()
        finally:
            lock.release()

    def _plan(self, copy: Copy) -> None:
        """Reserve space for the pieces that were asked for, as far as there is room."""
        todo = np.flatnonzero(copy.states() == ASKED)
        todo = todo[np.argsort(copy.turns()[todo], kind="stable")]
        if len(todo):
            with self._folder.locked():
                self._reserve(copy, todo.tolist())

    def _reserve(self, copy: Copy, todo: list[int]) -> None:
        pieces = [(i, self.pieces[int(copy.numbers[i])]) for i in todo]
        total = sum(piece.taken for _, piece in pieces)
        # For the names of files; and of mini-epochs, for the next one to begin.
        spare = PAGE + (copy.facts.nbytes if copy.facts.part else PAGE)
        room = self._folder.make_room(total + spare, copy.name) - spare
        writer = _Writer(copy, self.pieces)
        full = False
        for i, piece in pieces:
            room -= piece.taken
            full = full or room < 0
            try:
                for r in piece.ranges if not full else ():
                    writer.reserve(r)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                full = True
            copy.set_state(i, LEFT_OUT if full else PLANNED)

    def _copy_planned(self, copy: Copy, stop: Callable[[], bool]) -> None:
        """Copy until nothing is planned any more, or something else was asked for."""
        writer, lock = _Writer(copy, self.pieces), threading.Lock()
        active, failed = set[int](), list[BaseException]()

        def ended() -> bool:
            return bool(failed) or stop()

        def take() -> int | None:
            with lock:
                left = list(active)  # before: what is ready then may be active no more
                states = copy.states()
                coming = states == PLANNED
                coming[left] = False
                todo = np.flatnonzero(coming)
                if ended() or bool((states == ASKED).any()) or not len(todo):
                    return None
                i = int(todo[np.argmin(copy.turns()[todo])])
                active.add(i)
                return i

        def work() -> None:
            buffer = np.empty(BLOCK, np.uint8)
            try:
                while (i := take()) is not None:
                    self.copy_piece(copy, writer, i, buffer, ended)
                    active.discard(i)
            except BaseException as error:
                failed.append(error)

        works = [
            threading.Thread(target=work, name=f"dsprep-copy-{i}", daemon=True)
            for i in range(self._threads)
        ]
        for each in works:
            each.start()
        for each in works:
            each.join()
        if failed:
            raise failed[0]

    def copy_piece(
        self, copy: Copy, writer: _Writer, i: int, buffer: Bytes, stop: Callable[[], bool]
    ) -> None:
        """Copy the piece at a place in the tables, and compare it with its checksum."""
        piece, crc = self.pieces[int(copy.numbers[i])], 0
        for k, r in enumerate(piece.ranges):
            file = self.pieces.sidecar.open_file(r.number, r.path)
            to = writer.file(r)
            for at in range(r.begin, r.end, BLOCK):
                if stop():
                    return
                part = buffer[: min(BLOCK, r.end - at)]
                self._throttle.take(len(part), stop)
                file.pread_into(part, at)
                file.check_same(at)  # before it is written: ranges may overlap
                self._drawn(len(part))
                crc = pwrite_crc32c(to.fd, [part], at, crc)
            if k == 0 and piece.crc32c is not None and crc != piece.crc32c:
                copy.set_state(i, REFUSED)
                self._refused(
                    f"{file.path}: bytes {r.begin:,} to {r.end:,} are not kept in the cache, as "
                    f"their CRC-32C is {crc:#010x}, not {piece.crc32c:#010x}: the file was changed "
                    "or is damaged"
                )
                return
        copy.set_state(i, READY)


class _Writer:
    """The files of a copy, open for writing, each of the size that the dataset's has."""

    def __init__(self, copy: Copy, pieces: Pieces) -> None:
        self._copy, self._pieces, self._known = copy, pieces, copy.files()
        self._open: dict[tuple[int, str], Descriptor] = {}
        self._lock = threading.Lock()

    def file(self, r: Range) -> Descriptor:
        """Return the file of a range."""
        key = r.number, r.path
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                if len(self._open) >= OPEN:
                    self._open.clear()  # who writes to one keeps it open
                opened = self._open[key] = self._made(*key)
            return opened

    def reserve(self, r: Range) -> None:
        """Reserve the space of a range."""
        out = self.file(r)
        try:
            os.posix_fallocate(out.fd, r.begin, r.end - r.begin)
        except OSError as error:
            raise named(error, out.fd, r.begin) from error

    def _made(self, number: int, path: str) -> Descriptor:
        name, nbytes = name_of(number, path), self._pieces.sidecar.open_file(number, path).nbytes
        new = name not in self._known
        out = Descriptor(self._copy.open(name, os.O_RDWR | (os.O_CREAT if new else 0)))
        size = fstat(out.fd).st_size
        if not new and size != nbytes:
            raise OSError(errno.EIO, "its end was cut off", str(self._copy.path / name))
        if new:
            truncate(out.fd, nbytes)
            self._copy.add_file(name, nbytes)
            self._known[name] = nbytes
        return out
