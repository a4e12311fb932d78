"""Ways of getting bytes from a file into memory; one file each, but for the default.

`Engine`
    ``preadv`` through the page cache: the kernel puts every sample where it is delivered.
`direct`
    Past the page cache (``O_DIRECT``), through memory of the thread.
"""

from __future__ import annotations

from importlib import import_module

from dsprep.errors import UsageError
from dsprep.storage.base import Handle
from dsprep.storage.scatter import Runs

NAMES = ("buffered", "direct")
"""Values of ``engine=``."""


class Unavailable(UsageError):
    """An engine does not work with a file, or on this machine; ``"buffered"`` does."""


class Engine:
    """Reads ranges of a file to places, from several threads at once: through the page cache.

    Its `name` is what it is called in ``engine=``.
    """

    name = "buffered"

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


def make(name: str) -> Engine:
    """Return the engine of one of the `NAMES`; all but the first may raise `Unavailable`."""
    if name not in NAMES:
        raise UsageError(f"engine is {name!r}", expected="one of " + ", ".join(NAMES))
    if name == "buffered":
        return Engine()
    engine: Engine = getattr(import_module(f"{__name__}.{name}"), name.capitalize())()
    return engine
