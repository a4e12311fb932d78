"""An engine that was asked for where it works, and `Buffered` for files with which it does not.

What a mount can do is found out by trying it, once for each file, never by the name of the file
system: some refuse O_DIRECT when a file is opened, others when it is read; some map no files.
"""

from __future__ import annotations

import threading
import warnings
from weakref import WeakSet

from dsprep.core.schema import Ints
from dsprep.reader.engines import Engine, Unavailable
from dsprep.reader.engines.buffered import Buffered
from dsprep.reading.files import File


class EngineWarning(UserWarning):
    """The engine that was asked for does not work here, and ``"buffered"`` reads instead."""


class Fallback:
    """Reads by an engine, or through the page cache where that engine is refused; see `Engine`.

    Parameters
    ----------
    engine
        What was asked for.

    Attributes
    ----------
    why
        What the first refusal was; None without one.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.why: str | None = None
        self._engine, self._buffered = engine, Buffered()
        self._refused: WeakSet[File] = WeakSet()
        self._lock = threading.Lock()

    def prepare(self, file: File) -> None:
        """Find out whether a file can be read so, as far as opening it shows."""
        try:
            self._engine.prepare(file)
        except Unavailable as error:
            self._refuse(file, error)

    def read(self, file: File, start: int, places: Ints) -> tuple[int, int]:
        """Read a range to places; see `Engine.read`."""
        if file not in self._refused:
            try:
                return self._engine.read(file, start, places)
            except Unavailable as error:
                self._refuse(file, error)
        return self._buffered.read(file, start, places)

    def _refuse(self, file: File, error: Unavailable) -> None:
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
            stacklevel=5,
        )
