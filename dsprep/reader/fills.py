"""A unit on its way into memory: what has to be read, and the blocks that it goes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from dsprep.core.schema import Arena, Bytes, Field, Ints, Ragged
from dsprep.reader.memory import Block
from dsprep.reading.files import File


@dataclass(frozen=True)
class Area:
    """Where a fixed field lies in a block.

    Attributes
    ----------
    field
        The field.
    at
        Its first byte.
    nbytes
        Bytes of one sample.
    """

    field: Field
    at: int
    nbytes: int

    def values(self, block: Bytes, begin: int, end: int) -> Bytes:
        """Return the samples ``begin .. end`` of a block as bytes, shape ``(n, nbytes)``."""
        low = self.at + begin * self.nbytes
        return block[low : low + (end - begin) * self.nbytes].reshape(end - begin, self.nbytes)


@dataclass(frozen=True)
class Slice:
    """Samples of a unit that lie in one block.

    Attributes
    ----------
    block, memory
        The block, and the lease of it.
    begin
        The place of the first of them in the block.
    low, high
        Which samples of the unit, in the order of delivery.
    ragged
        Ragged fields of the unit, once it is there.
    """

    block: Block
    memory: Bytes
    begin: int
    low: int
    high: int
    ragged: Mapping[str, Ragged]

    def cut(self, count: int) -> tuple[Slice, Slice | None]:
        """Return the first `count` samples, and the others if there are more."""
        at = self.low + count
        if at >= self.high:
            return self, None
        return replace(self, high=at), replace(self, begin=self.begin + count, low=at)


@dataclass(frozen=True)
class Part:
    """What one thread reads: a range of a file, or fields that are decoded.

    Attributes
    ----------
    file
        The file; None where `decode` does the reading.
    start, places
        As in `Engine.read`.
    decode
        Reads fields with the memory of the thread; returns the bytes asked for.
    """

    file: File | None
    start: int
    places: Ints
    decode: Callable[[Arena], int] | None = None

    @property
    def stop(self) -> int:
        """The byte of the file behind the last one that is read."""
        return self.start + int(self.places[:, 1].sum()) if len(self.places) else self.start


@dataclass
class Fill:
    """A unit on its way into memory.

    Attributes
    ----------
    samples
        As they lie in the files, int64.
    slices
        The blocks that they go to, in the order of delivery.
    parts
        What has to be read.
    ragged
        Ragged fields in the order of delivery, once all is done.
    files
        That are read.
    done
        Not empty once all is there, or `error` is. Not an event: an interrupt within its `wait`,
        which is written in Python, may become a RuntimeError.
    """

    samples: Ints
    slots: Ints
    slices: Sequence[Slice]
    parts: list[Part] = field(default_factory=list)
    ragged: dict[str, Ragged] = field(default_factory=dict)
    files: set[File] = field(default_factory=set)
    done: SimpleQueue[None] = field(default_factory=SimpleQueue)
    error: BaseException | None = None
    missing: int = 0
    _staged: dict[str, Bytes] = field(default_factory=dict)
    _pieces: dict[str, list[tuple[Ints, Ragged]]] = field(default_factory=dict)

    def take(self) -> Sequence[Slice]:
        """Return the slices, and hold their memory no longer."""
        slices, self.slices = self.slices, ()
        return slices
