"""``preadv`` through the page cache: the kernel puts every sample where it is delivered."""

from __future__ import annotations

from dsprep.core.pread import fill
from dsprep.core.schema import Ints
from dsprep.reading.files import File


class Buffered:
    """Reads through the page cache; see `Engine`."""

    name = "buffered"

    def read(self, file: File, start: int, places: Ints) -> tuple[int, int]:
        """Read a range to places; see `Engine.read`."""
        return fill(file.fd, start, places, file.path)

    def prepare(self, file: File) -> None:
        """Do nothing: every file that is open can be read so."""
