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

GIVEN = "samples that a program gave"
"""What is told of them where a source has a version and files."""


class Abandoned(DsprepError):
    """The program gives no more samples, as something went wrong there."""

    def __init__(self) -> None:
        super().__init__("the program that gives the samples has stopped")


class _Request:
    """Memory for samples that a thread waits for."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays, self.filled = arrays, threading.Event()


class FedSource(Source):
    """A known number of samples of fixed shape, each of which is read once and in order.

    Parameters
    ----------
    path
        What they are written to, for messages.
    schema, count
        The fields, none of them ragged, and the number of samples.
    """

    repeatable = False

    def __init__(self, path: Path, schema: Schema, count: int) -> None:
        self.path, self.schema, self.version = path, schema, GIVEN
        self._count = count
        self._requests: dict[int, _Request] = {}
        self._changed = threading.Condition()
        self._abandoned = self._ended = False

    def __len__(self) -> int:
        return self._count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        request = _Request(
            {
                f.name: new_array(arena, f"given.{f.name}", (stop - start, *f.inner), f.dtype)
                for f in self.schema
            }
        )
        with self._changed:
            self._requests[start] = request
            self._changed.notify_all()
            if self._abandoned:
                raise Abandoned
        request.filled.wait()
        if self._abandoned:
            raise Abandoned
        return dict(request.arrays)

    def next(self, start: int) -> dict[str, Array] | None:
        """Return where the samples from `start` on go, when a thread asks for them.

        None if nobody asks any more, since the job has ended.
        """
        with self._changed:
            while start not in self._requests:
                if self._ended:
                    return None
                self._changed.wait()
            return self._requests[start].arrays

    def filled(self, start: int) -> None:
        """Give what is at the memory of `next` to the thread that asked."""
        with self._changed:
            request = self._requests.pop(start)
        request.filled.set()

    def abandon(self) -> None:
        """Let every read, now and later, raise `Abandoned`."""
        with self._changed:
            self._abandoned = True
            for request in self._requests.values():
                request.filled.set()

    def end(self) -> None:
        """Let `next` wait no more: nobody will ask."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def abandoned(self) -> bool:
        """Whether `abandon` was called."""
        return self._abandoned

    def files(self) -> list[Path]:
        """Return nothing: the samples are in no file."""
        return []

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing, as `files` does."""
        return {}
