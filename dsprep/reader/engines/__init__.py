"""Ways of getting bytes from a file into memory; one file each, but for the default.

`Buffered`
    ``preadv`` through the page cache: the kernel puts every sample where it is delivered.
`direct`
    Past the page cache (``O_DIRECT``), through memory of the thread.
`mapped`
    From a mapping of the file, to compare with.
`Fallback`
    One of the others where it works, and `Buffered` elsewhere.
"""

from __future__ import annotations

import threading
import warnings
from importlib import import_module
from typing import Protocol
from weakref import WeakSet

from dsprep.core.schema import Ints
from dsprep.errors import UsageError
from dsprep.storage.base import Handle
from dsprep.storage.ring import way
from dsprep.storage.scatter import Runs

NAMES = ("buffered", "direct", "mapped")
"""What ``engine=`` takes."""


class Unavailable(UsageError):
    """An engine does not work with a file, or on this machine; `buffered` does."""


class Engine(Protocol):
    """Reads a range of a file to many places; from several threads at once.

    Its `name` is what it is called in ``engine=``.
    """

    name: str

    def read(self, file: Handle, start: int, iovecs: Ints) -> tuple[int, int]:
        """Read the file from byte `start` on into places, which that fills.

        Parameters
        ----------
        start, iovecs
            As `dsprep.storage.scatter.runs` returns them: int64, shape ``(m, 2)``, addresses
            and bytes.

        Returns
        -------
        calls, nbytes
            Read calls made, and the bytes that they asked for.

        Raises
        ------
        FormatError
            If the file ends too early.
        OSError
            If it cannot be read.
        Unavailable
            If the engine does not work on this file system or machine.
        """

    @property
    def scattered(self) -> str:
        """How `read_runs` reads, for `dsprep.reader.ledger.EpochStats`."""

    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        """Read many ranges of a file to their places; returns and raises as `read` does."""

    def prepare(self, file: Handle) -> None:
        """Make ready to read a file, which no byte is read for.

        Raises
        ------
        Unavailable
            If the file system or machine refuses what the engine needs, as far as this shows.
        OSError
            If that fails otherwise.
        """


class Buffered:
    """Reads through the page cache; see `Engine`."""

    name = "buffered"

    def read(self, file: Handle, start: int, iovecs: Ints) -> tuple[int, int]:
        """Read a range to places; see `Engine.read`."""
        return file.read_range(start, iovecs)

    @property
    def scattered(self) -> str:
        """``"io_uring"`` or ``"preadv"``; see `Engine.scattered`."""
        return way()

    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        """Read ranges to their places; see `Engine.read_runs`."""
        return file.read_runs(runs)

    def prepare(self, file: Handle) -> None:
        """Do nothing: every file that is open can be read so."""


class EngineWarning(UserWarning):
    """The engine that was asked for does not work here, and ``"buffered"`` reads instead."""


class Fallback:
    """Reads by an engine, or through the page cache where that engine is refused; see `Engine`.

    What a mount can do is found out by trying it, once for each file, never by the name of the file
    system: some refuse O_DIRECT when a file is opened, others when it is read; some map no files.
    `why` is the first refusal, None without one.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.why: str | None = None
        self._engine, self._buffered = engine, Buffered()
        self._refused: WeakSet[Handle] = WeakSet()
        self._lock = threading.Lock()

    def prepare(self, file: Handle) -> None:
        """Find out whether a file can be read so, as far as opening it shows."""
        try:
            self._engine.prepare(file)
        except Unavailable as error:
            self._refuse(file, error)

    def read(self, file: Handle, start: int, iovecs: Ints) -> tuple[int, int]:
        """Read a range to places; see `Engine.read`."""
        if file not in self._refused:
            try:
                return self._engine.read(file, start, iovecs)
            except Unavailable as error:
                self._refuse(file, error)
        return self._buffered.read(file, start, iovecs)

    @property
    def scattered(self) -> str:
        """What the engine says; see `Engine.scattered`."""
        return self._engine.scattered if self.why is None else self._buffered.scattered

    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        """Read ranges to their places; see `Engine.read_runs`."""
        if file not in self._refused:
            try:
                return self._engine.read_runs(file, runs)
            except Unavailable as error:
                self._refuse(file, error)
        return self._buffered.read_runs(file, runs)

    def _refuse(self, file: Handle, error: Unavailable) -> None:
        """Read a file by `Buffered` from now on, and say so, once."""
        with self._lock:
            self._refused.add(file)
            if self.why is not None:
                return
            self.why = f'engine="{self.name}" was asked for: {error.what}'
        warnings.warn(
            f'{error.where}: {error.what}, so engine="buffered" reads instead of '
            f'engine="{self.name}"',
            EngineWarning,
            stacklevel=7,
        )


def make(name: str) -> Engine:
    """Return the engine of one of the `NAMES`; all but `Buffered` may raise `Unavailable`."""
    if name == "buffered":
        return Buffered()
    if name not in NAMES:
        raise UsageError(f"engine is {name!r}", expected="one of " + ", ".join(NAMES))
    engine: Engine = getattr(import_module(f"{__name__}.{name}"), name.capitalize())()
    return engine
