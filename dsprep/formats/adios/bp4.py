"""The metadata of BP4: in ``md.0`` each step lists its variables, and the blocks of each of them.

An entry of a variable is its name and type and, for each block, *characteristics*: its size, its
place in the whole array, the subfile, and the offset there, in clear. Steps whose entries differ in
nothing but numbers are taken together: one of them is read item by item, and the others are
compared with it.

Specification: ``source/utils/bp4dbg`` of https://github.com/ornladios/ADIOS2
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.formats.adios.metadata import (
    HEADER,
    JOINED,
    LOCAL,
    METADATA,
    MOST_ATTRIBUTE,
    MOST_DIMS,
    OPERATOR,
    Blocks,
    Header,
    Kind,
    Metadata,
    Numbers,
    Variable,
    column_major,
    decoded,
    joined,
    plural,
)

DTYPES = {
    0: "<i1",
    1: "<i2",
    2: "<i4",
    4: "<i8",
    50: "<u1",
    51: "<u2",
    52: "<u4",
    54: "<u8",
    5: "<f4",
    6: "<f8",
    10: "<c8",
    11: "<c16",
    55: "<i1",
}
"""Of the numbers that BP4 gives to types; 7 is long double."""

STRING, STRINGS = 9, 12

ROW = 64
"""Bytes of a step in ``md.idx``."""

TEMPLATES = 64
"""Steps of equal length that are compared with each other; the rest are read one by one."""

COMPARED = 16 << 20
"""Bytes of steps that are compared at once."""

VALUE, LEAST, MOST, OFFSET, DIMS, _, PAYLOAD, FILE, TIME, _, _, TRANSFORM, MINMAX = range(13)
"""Kinds of characteristics; the others are of older versions."""


@dataclass
class Block:
    """Where the characteristics of a block are: offsets of their first bytes.

    ``value`` is that of a number or a string, whose length is ``length``; -1: there is none.
    ``operator`` names what the block went through.
    """

    axes: int = 0
    dims: int = -1
    payload: int = -1
    file: int = -1
    value: int = -1
    length: int = 0
    operator: str = ""


@dataclass
class Entry:
    """What a step says of a variable or an attribute, and where."""

    name: str
    code: int
    blocks: list[Block] = field(default_factory=list)


def parse(index: Numbers, numbers: Numbers) -> Metadata:
    """Return what ``md.idx`` and ``md.0`` say.

    Raises
    ------
    FormatError
        If they are damaged, or of a kind that is not read.
    """
    header = Header.parse(index.text(0, HEADER), index.where)
    steps, rest = divmod(index.nbytes - HEADER, ROW)
    notes: tuple[str, ...] = ()
    if rest and not header.active:
        raise index.damaged("ends within a step", found=f"{rest} bytes more")
    if rest:
        notes = (f"left out the end of {index.where.name}: it is being written",)
    rows = index.u64(HEADER + ROW * np.arange(steps)[:, None] + 8 * np.arange(8))
    group, first, attributes, end = (rows[:, k] for k in (2, 3, 4, 5))
    bad = (group < 0) | (group > first) | (first > attributes) | (attributes > end)
    bad |= (end > numbers.nbytes) | (attributes - first < 12) | (end - attributes < 12)
    if bad.any() or float((end - group).astype(float).sum()) > numbers.nbytes:
        raise index.damaged("gives a step an offset that is not in md.0", numbers.nbytes)
    if steps and _is_column_major(numbers, int(group[0])):
        raise column_major(index.where)
    words = f"ADIOS2 BP4, {plural(steps, 'step')}"
    attrs = _attributes(numbers, attributes, end)
    return Metadata(words, steps, _variables(numbers, first, attributes), attrs, notes)


def _is_column_major(numbers: Numbers, at: int) -> bool:
    """Return what the first process of a step says of its language."""
    return numbers.one(at + 16 + 4 + numbers.one(at + 18, 2), 1) == ord("y")


# --- variables -------------------------------------------------------------------------------


def _variables(numbers: Numbers, first: Ints, stop: Ints) -> dict[str, Variable]:
    """Return the variables of steps, whose entries are from `first` to `stop` in ``md.0``."""
    parts: dict[str, list[Variable]] = defaultdict(list)
    lengths = stop - first
    for length in np.unique(lengths).tolist():
        left = np.flatnonzero(lengths == length)
        for number in range(len(left)):
            if not len(left):
                break
            at = int(first[left[0]])
            entries, loose = read_entries(numbers, at, length)
            same = np.zeros(len(left), bool)
            same[0] = True
            if number < TEMPLATES:
                same = _alike(numbers, first[left], length, loose)
            for entry in entries:
                for variable in _taken(entry, numbers, left[same], first[left[same]] - at):
                    parts[variable.name].append(variable)
            left = left[~same]
    return {name: joined(same) for name, same in parts.items()}


def _alike(numbers: Numbers, first: Ints, length: int, loose: Any) -> Any:
    """Return which steps have the bytes of the first one, save where they are `loose`."""
    at, same = int(first[0]), np.zeros(len(first), bool)
    fixed = np.flatnonzero(~loose)
    template = numbers.bytes[at + fixed]
    step = max(1, COMPARED // max(1, 8 * length))
    for k in range(0, len(first), step):
        compared = numbers.bytes[first[k : k + step, None] + fixed]
        same[k : k + step] = (compared == template).all(1)
    return same


def read_entries(
    numbers: Numbers, at: int, length: int, attributes: bool = False
) -> tuple[list[Entry], Any]:
    """Return the variables or the attributes of one step.

    Returns
    -------
    The entries, and which of the bytes are numbers that may differ between steps: bool, shape
    ``(length,)``.
    """
    loose = np.zeros(length, bool)
    reader = Reader(numbers, at, at + length, loose, attributes)
    count, rest = reader.take(4), reader.take(8)
    entries = [reader.entry() for _ in range(min(count, length))]
    if rest != length - 12 or reader.at != at + length:
        raise numbers.damaged(f"has a list of a wrong length at offset {at}", length - 12, rest)
    return entries, loose


class Reader:
    """Reads a part of ``md.0`` item by item, and says which bytes are no more than numbers."""

    def __init__(self, numbers: Numbers, at: int, stop: int, loose: Any, attributes: bool) -> None:
        self._numbers, self.at, self._first, self._stop = numbers, at, at, stop
        self._loose, self._attributes = loose, attributes

    def take(self, nbytes: int, *, loose: bool = False) -> int:
        """Return a number of at most 8 bytes, and go behind it."""
        at = self.skip(nbytes, loose=loose)
        return self._numbers.one(at, nbytes)

    def skip(self, nbytes: int, *, loose: bool = False) -> int:
        """Go behind some bytes, and return where they begin."""
        at = self.at
        if not 0 <= nbytes <= self._stop - at:
            raise self._numbers.damaged(f"ends within an entry at offset {at}")
        if loose:
            self._loose[at - self._first : at - self._first + nbytes] = True
        self.at += nbytes
        return at

    def word(self, nbytes: int = 2) -> str:
        """Return a string that begins with its length."""
        length = self.take(nbytes)
        return decoded(self._numbers.text(self.skip(length), length))

    def entry(self) -> Entry:
        """Return a variable or an attribute."""
        length = self.take(4)
        stop = self.at + length
        if stop > self._stop:
            raise self._numbers.damaged(f"ends within an entry at offset {self.at}")
        self.take(4)
        self.word()
        name = self.word()
        self.word() if self._attributes else self.take(2)
        entry = Entry(name, self.take(1))
        self.take(8)
        while self.at < stop:
            entry.blocks.append(self.block(entry.code))
        if self.at != stop:
            raise self._numbers.damaged(f"has an entry of a wrong length before offset {self.at}")
        return entry

    def block(self, code: int) -> Block:
        """Return where the characteristics of a block are."""
        block = Block()
        count, length = self.take(1), self.take(4)
        stop = self.at + length
        for _ in range(count):
            tag = self.take(1)
            if tag == DIMS:
                block.axes = self.take(1)
                if self.take(2) != 24 * block.axes:
                    raise self._numbers.damaged(f"gives a block wrong axes before offset {self.at}")
                block.dims = self.skip(24 * block.axes, loose=True)
            elif tag == PAYLOAD:
                block.payload = self.skip(8, loose=True)
            elif tag == FILE:
                block.file = self.skip(4, loose=True)
            elif tag in (VALUE, LEAST, MOST):
                self._value(block, code, keep=tag == VALUE)
            elif tag in (OFFSET, TIME):
                self.skip(8 if tag == OFFSET else 4, loose=True)
            elif tag == MINMAX:
                self._minmax(code, block.axes)
            elif tag == TRANSFORM:
                block.operator = self.word(1) or "an unknown one"
                break
            else:
                raise self._numbers.damaged(f"has an unknown item before offset {self.at}")
        if self.at > stop or (self.at != stop and not block.operator):
            raise self._numbers.damaged(f"has a block of a wrong length before offset {stop}")
        self.skip(stop - self.at)
        return block

    def _value(self, block: Block, code: int, *, keep: bool) -> None:
        values = self._elements(block) if self._attributes else 1
        if code == STRINGS and self._attributes:
            at = self.at
            for _ in range(values):
                self.word()
        elif code == STRING:
            length = self.take(2)
            at = self.skip(length, loose=True)
        else:
            at = self.skip(values * np.dtype(DTYPES.get(code, "V16")).itemsize, loose=True)
        if keep:
            block.value, block.length = at, self.at - at

    def _elements(self, block: Block) -> int:
        """Return how many values an attribute has."""
        sizes = (self._numbers.one(block.dims + 24 * k) for k in range(block.axes))
        return math.prod(sizes)

    def _minmax(self, code: int, axes: int) -> None:
        size = np.dtype(DTYPES.get(code, "V16")).itemsize
        parts = self.take(2)
        self.skip(2 * size, loose=True)
        if parts > 1:
            self.skip(9 + 2 * axes)
            self.skip(2 * parts * size, loose=True)


def _taken(entry: Entry, numbers: Numbers, rows: Ints, by: Ints) -> list[Variable]:
    """Return the variable of an entry in all steps that are alike.

    `rows` are the numbers of these steps, `by` how much further each is than the one that was
    read.
    """
    blocks = entry.blocks
    if not blocks:
        return []
    dtype = None if entry.code == STRING else np.dtype(DTYPES.get(entry.code, "u1"))
    problem = next((b.operator for b in blocks if b.operator), "")
    if problem:
        problem = f"{OPERATOR} {problem}"
    axes = blocks[0].axes
    if any(b.axes != axes or b.file < 0 for b in blocks) or axes > MOST_DIMS:
        problem = problem or "its number of axes changes between blocks"
    if entry.code not in DTYPES and dtype is not None:
        problem = f"its type is not supported (number {entry.code})"

    def at(name: str) -> Ints:
        positions = np.array([getattr(b, name) for b in blocks], np.int64)
        return np.where(positions < 0, -1, positions + by[:, None]).reshape(-1)

    step = np.repeat(rows, len(blocks))
    if problem:
        return [_empty(entry.name, dtype, step[:1], problem)]
    dims = numbers.u64(at("dims")[:, None] + 8 * np.arange(3 * axes))
    dims = dims.reshape(len(step), axes, 3)
    count, shape, start = (dims[:, :, k] for k in range(3))
    kind = _kind(blocks, shape)
    if kind in ("value", "local value"):
        if any(b.value < 0 for b in blocks):
            return [_empty(entry.name, dtype, step[:1], "a value of it is not in the metadata")]
        none, file = np.zeros((len(step), 0), np.int64), np.full(len(step), METADATA, np.int64)
        nbytes = np.tile(np.array([b.length for b in blocks], np.int64), len(rows))
        lengths = nbytes if dtype is None else None
        extents = Blocks(step, step, none, none, none, file, at("value"), lengths)
    elif any(b.payload < 0 for b in blocks):
        return [_empty(entry.name, dtype, step[:1], "a block of it has no offset")]
    else:
        file = numbers.u32(at("file"))
        extents = Blocks(step, step, shape, start, count, file, numbers.u64(at("payload")))
    return [Variable(entry.name, dtype, kind, extents)]


def _empty(name: str, dtype: Any, step: Ints, problem: str) -> Variable:
    none, empty = step[:0], np.zeros((0, 0), np.int64)
    return Variable(
        name, dtype, "array", Blocks(none, none, empty, empty, empty, none, none), problem
    )


def _kind(blocks: list[Block], shape: Ints) -> Kind:
    if not blocks[0].axes:
        return "value"
    if (shape == LOCAL).any():
        return "local value"
    if (shape == JOINED).any():
        return "joined"
    return "array" if shape.any() else "local"


# --- attributes ------------------------------------------------------------------------------


def _attributes(numbers: Numbers, first: Ints, stop: Ints) -> dict[str, Any]:
    """Return the attributes, the last of each name; large ones and unknown types are left out."""
    attributes: dict[str, Any] = {}
    for k in np.flatnonzero(stop - first > 12).tolist():
        for entry in read_entries(numbers, int(first[k]), int(stop[k] - first[k]), True)[0]:
            for block in entry.blocks:
                kept = _content(numbers, entry.code, block)
                if kept is not None:
                    attributes[entry.name] = kept
    return attributes


def _content(numbers: Numbers, code: int, block: Block) -> Any:
    """Return the value of an attribute; None if it is too large, or of no known type."""
    if block.value < 0 or block.length > MOST_ATTRIBUTE or block.operator:
        return None
    text = numbers.text(block.value, block.length)
    if code == STRING:
        return text.decode("utf-8", "replace")
    if code == STRINGS:
        content = []
        while text:
            length = int.from_bytes(text[:2], "little")
            content.append(text[2 : 2 + length].decode("utf-8", "replace"))
            text = text[2 + length :]
        return content
    values = np.frombuffer(text, DTYPES[code])
    return values if len(values) != 1 else values[0]
