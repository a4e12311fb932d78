"""Ways of getting bytes from a file into memory; one file each.

`buffered`
    ``preadv`` through the page cache, every sample straight to its place.
`direct`
    Past the page cache (``O_DIRECT``), by way of memory of the thread.
`mapped`
    From a mapping of the file, to compare with.
`copying`
    From memory to many places, by one call.
"""

from __future__ import annotations

from typing import Protocol

from dsprep.errors import UsageError
from dsprep.reading.files import File
from dsprep.schema import Ints

NAMES = ("auto", "buffered", "direct", "mapped")
"""What ``engine=`` takes."""


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
            As `dsprep.scatter.runs` returns them: int64, shape ``(m, 2)``, addresses and bytes.

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
        UsageError
            If the engine does not work on this file system or machine.
        """


def make(name: str, otherwise: bool = False) -> Engine:
    """Return an engine.

    Parameters
    ----------
    name
        One of `NAMES`. ``"auto"`` is `buffered`, which works everywhere; what is best is found by
        `dsprep.reader.measuring.choose`.
    otherwise
        Whether files that cannot be read directly are read by `buffered` and are no error, as
        where nobody asked for ``"direct"`` but a measurement of other files on the mount.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    if name in ("auto", "buffered"):
        from dsprep.reader.engines.buffered import Buffered

        return Buffered()
    if name == "direct":
        from dsprep.reader.engines.buffered import Buffered
        from dsprep.reader.engines.direct import Direct

        return Direct(Buffered() if otherwise else None)
    if name == "mapped":
        from dsprep.reader.engines.mapped import Mapped

        return Mapped()
    raise UsageError(f"engine is {name!r}", expected="one of " + ", ".join(NAMES))
