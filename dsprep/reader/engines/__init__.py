"""Ways of getting bytes from a file into memory; one file each.

`buffered`
    ``preadv`` through the page cache, every sample straight to its place.
"""

from __future__ import annotations

from typing import Protocol

from dsprep.reading.files import File
from dsprep.schema import Ints


class Engine(Protocol):
    """Reads a range of a file to many places.

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
        """
