"""Samples that are written while a program makes them: what asks for them is given its memory.

A job asks for pieces, on several threads; the program fills them, in order, on its own thread. No
sample is kept, and none is copied more than once on its way to the writer.
"""

from __future__ import annotations

import threading
from pathlib import Path

from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Schema, empty_batch, new_array
from dsprep.errors import DsprepError
from dsprep.formats.base import Source
from dsprep.layout.describe import FieldStorage


def abandoned() -> DsprepError:
    """Return the error where the program gives no more samples, as something went wrong there."""
    return DsprepError("the program that gives the samples has stopped")


class GivenSource(Source):
    """Samples that a program gives: they are in no file that stays."""

    version = "samples that a program gave"
    repeatable = False

    def files(self) -> list[Path]:
        """Return nothing."""
        return []

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing, as `files` does."""
        return {}


class FedSource(GivenSource):
    """A known number of samples of fixed shape, each of which is read once and in order.

    Parameters
    ----------
    path
        What they are written to, for messages.
    schema, count
        The fields, none of them ragged, and the number of samples.

    Attributes
    ----------
    abandoned
        Whether `abandon` was called.
    """

    def __init__(self, path: Path, schema: Schema, count: int) -> None:
        self.path, self.schema = path, schema
        self._count = count
        self._requests: dict[int, tuple[dict[str, Array], threading.Event]] = {}
        self._at = self._end = 0  # the samples that are being filled in, half-open
        self._changed = threading.Condition()
        self.abandoned = self._ended = False

    def __len__(self) -> int:
        return self._count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        arrays = {
            f.name: new_array(arena, f"given.{f.name}", (stop - start, *f.inner), f.dtype)
            for f in self.schema
        }
        filled = threading.Event()
        with self._changed:
            self._requests[start] = arrays, filled
            self._changed.notify_all()
            if self.abandoned:
                raise abandoned()
        filled.wait()
        if self.abandoned:
            raise abandoned()
        return dict(arrays)

    def give(self) -> None:
        """Give what has been filled in to the thread that asked for it."""
        with self._changed:
            if self._end > self._at:
                _, filled = self._requests.pop(self._at)
                filled.set()
            self._at = self._end

    def next(self) -> dict[str, Array] | None:
        """Return where the next samples go, when a thread asks for them.

        None if nobody asks any more, since the job has ended.
        """
        self.give()
        with self._changed:
            while self._at not in self._requests:
                if self._ended:
                    return None
                self._changed.wait()
            arrays, _ = self._requests[self._at]
            self._end = self._at + len(next(iter(arrays.values())))
            return arrays

    def abandon(self) -> None:
        """Let every read, now and later, raise `abandoned`."""
        with self._changed:
            self.abandoned = True
            for _, filled in self._requests.values():
                filled.set()

    def end(self) -> None:
        """Let `next` wait no more: nobody will ask."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
