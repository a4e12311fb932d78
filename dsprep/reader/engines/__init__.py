"""Ways of getting bytes from a file into memory; one file each.

`buffered`
    ``preadv`` through the page cache, every sample straight to its place.
`direct`
    Past the page cache (``O_DIRECT``), by way of memory of the thread.
`mapped`
    From a mapping of the file, to compare with.
`fallback`
    One of the others where it works, and `buffered` elsewhere.
`copying`
    From memory to many places, by one call.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from dsprep.core.schema import Ints
from dsprep.errors import UsageError
from dsprep.reading.files import File

NAMES = ("buffered", "direct", "mapped")
"""What ``engine=`` takes."""


class Unavailable(UsageError):
    """An engine does not work with a file, or on this machine; `buffered` does."""


class Engine(Protocol):
    """Reads a range of a file to many places; from several threads at once.

    Attributes
    ----------
    name
        What it is called in ``engine=``.
    """

    name: str

    def read(self, file: File, start: int, places: Ints) -> tuple[int, int]:
        """Read the file from byte `start` on into places, which that fills.

        Parameters
        ----------
        start, places
            As `dsprep.core.pread.runs` returns them: int64, shape ``(m, 2)``, addresses and bytes.

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

    def prepare(self, file: File) -> None:
        """Make ready to read a file, which no byte is read for.

        Raises
        ------
        Unavailable
            If the file system or machine refuses what the engine needs, as far as this shows.
        OSError
            If that fails otherwise.
        """


def make(name: str) -> Engine:
    """Return an engine; all but `buffered` raise `Unavailable` where they do not work.

    Parameters
    ----------
    name
        One of `NAMES`.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    if name not in NAMES:
        raise UsageError(f"engine is {name!r}", expected="one of " + ", ".join(NAMES))
    engine: Engine = getattr(import_module(f"{__name__}.{name}"), name.capitalize())()
    return engine
