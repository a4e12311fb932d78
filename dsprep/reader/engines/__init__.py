"""Ways of getting bytes from a file into memory; one file each, but for the default.

`Engine`
    ``preadv`` through the page cache: the kernel puts every sample where it is delivered.
`direct`
    Past the page cache (``O_DIRECT``), through memory of the thread.
`Fallback`
    Another one where it works, and `Engine` elsewhere.
"""

from __future__ import annotations

import threading
import warnings
from importlib import import_module
from weakref import WeakSet

from typing_extensions import override

from dsprep.errors import UsageError
from dsprep.storage.base import Handle
from dsprep.storage.scatter import Runs

NAMES = ("buffered", "direct")
"""Values of ``engine=``."""


class Unavailable(UsageError):
    """An engine does not work with a file, or on this machine; ``"buffered"`` does."""


class Engine:
    """Reads ranges of a file to places, from several threads at once: through the page cache.

    Its `name` is what it is called in ``engine=``; `why` is the first refusal where another one was
    asked for, None without one.
    """

    name = "buffered"
    why: str | None = None

    def prepare(self, file: Handle) -> None:
        """Make ready to read a file, which no byte is read for.

        Raises
        ------
        Unavailable
            If the file system or machine refuses what the engine needs, as far as this shows.
        OSError
            If that fails otherwise.
        """

    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        """Read ranges of a file to their places, which that fills.

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
        return file.read_runs(runs)


class EngineWarning(UserWarning):
    """The engine that was asked for does not work here, and ``"buffered"`` reads instead."""


class Fallback(Engine):
    """Reads by an engine, or through the page cache where that engine is refused.

    What a mount can do is found out by trying it, once for each file, never by the name of the file
    system: some refuse O_DIRECT when a file is opened, others when it is read.
    """

    def __init__(self, engine: Engine) -> None:
        self.name, self._engine = engine.name, engine
        self._refused: WeakSet[Handle] = WeakSet()
        self._lock = threading.Lock()

    @override
    def prepare(self, file: Handle) -> None:
        try:
            self._engine.prepare(file)
        except Unavailable as error:
            self._refuse(file, error)

    @override
    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        if file not in self._refused:
            try:
                return self._engine.read_runs(file, runs)
            except Unavailable as error:
                self._refuse(file, error)
        return super().read_runs(file, runs)

    def _refuse(self, file: Handle, error: Unavailable) -> None:
        """Read a file through the page cache from now on, and say so, once."""
        with self._lock:
            self._refused.add(file)
            if self.why is not None:
                return
            self.why = f'engine="{self.name}" was asked for: {error.what}'
        warnings.warn(
            f'{error.where}: {error.what}, so engine="buffered" reads instead of '
            f'engine="{self.name}"',
            EngineWarning,
            stacklevel=8,
        )


def make(name: str) -> Engine:
    """Return the engine of one of the `NAMES`; all but the first may raise `Unavailable`."""
    if name not in NAMES:
        raise UsageError(f"engine is {name!r}", expected="one of " + ", ".join(NAMES))
    if name == "buffered":
        return Engine()
    engine: Engine = getattr(import_module(f"{__name__}.{name}"), name.capitalize())()
    return engine
