"""What the metadata of a BP dataset say: its variables, and the byte range of each of their blocks.

BP5 and BP4 keep this in ``md.idx`` and ``md.0`` in different ways; `bp5` and `bp4` make the same
of both. Nothing here loops over steps: what steps have in common is looked at once, and the numbers
in which they differ are taken from all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Attrs, Bytes, DType, Ints
from dsprep.errors import FormatError
from dsprep.storage.base import Handle

Kind: TypeAlias = Literal["array", "local", "joined", "value", "local value"]

HEADER = 64
"""Bytes with which ``md.idx`` begins."""

METADATA = -1
"""The number that stands for ``md.0``, where the subfiles are ``data.0``, ``data.1``, ..."""

MOST_DIMS = 31
JOINED, LOCAL = -2, -3
"""Sizes of an axis that stand for something else: the axis along which blocks are joined; a value
of each writer."""

MOST_ATTRIBUTE = 1 << 16
"""Bytes of an attribute that is kept."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of a variable in arrays of shape ``(n,)`` or ``(n, dims)``, int64.

    Attributes
    ----------
    record
        Where they come in the dataset: the number of what one writer wrote in one step.
    step
        Of the dataset, from 0 on.
    shape, start, count
        Of the whole array in that step; of the block: its first element and its size.
    file, offset
        The subfile, or `METADATA`, and the first byte.
    nbytes
        Of strings; None: `count` says it.
    """

    record: Ints
    step: Ints
    shape: Ints
    start: Ints
    count: Ints
    file: Ints
    offset: Ints
    nbytes: Ints | None = None

    def __getitem__(self, chosen: Any) -> Blocks:
        """Return some of them."""
        arrays = {name: a[chosen] for name, a in vars(self).items() if a is not None}
        return Blocks(**arrays)

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Variable:
    """A variable in all steps.

    Attributes
    ----------
    name
        As the file calls it.
    dtype
        Of an element; None: a string.
    kind
        ``"array"``: each step has one array, of which each block is a part. ``"joined"``: the same,
        of blocks that follow one another. ``"local"``: blocks that have nothing to do with each
        other. ``"value"``, ``"local value"``: one number or string for each step, or writer.
    blocks
        In the order of steps, writers, and how they were written.
    problem
        Why it cannot be a field, a clause; empty if it can.
    """

    name: str
    dtype: DType | None
    kind: Kind
    blocks: Blocks
    problem: str = ""

    @property
    def dims(self) -> int:
        """How many axes it has."""
        return int(self.blocks.count.shape[1])

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 1 of a string."""
        return 1 if self.dtype is None else self.dtype.itemsize

    @property
    def sizes(self) -> Ints:
        """Bytes of each block, int64, shape ``(n,)``; 0 where they are more than any file has."""
        if self.blocks.nbytes is not None:
            return self.blocks.nbytes
        about = np.multiply.reduce(self.blocks.count.astype(float), axis=1) * self.itemsize
        exact: Ints = np.multiply.reduce(self.blocks.count, axis=1) * self.itemsize
        return np.where(about < 1 << 60, exact, -1)


@dataclass(frozen=True)
class Metadata:
    """What the metadata of a dataset say.

    Attributes
    ----------
    version
        Of the format, for a person.
    steps
        How many there are.
    variables
        By name, in the order in which they come.
    attrs
        By the names that the file gives them: of a variable, its name, a slash and another name.
    notes
        What was left out, one clause each.
    """

    version: str
    steps: int
    variables: Mapping[str, Variable]
    attrs: Attrs = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Header:
    """How ``md.idx`` begins: the version of BP, and whether a program writes to it."""

    version: int
    minor: int
    active: bool
    column_major: bool
    flat: bool

    @classmethod
    def parse(cls, data: bytes, where: object) -> Header:
        """Return what the first `HEADER` bytes say.

        Raises
        ------
        FormatError
            If this is no version that is read, or of the other byte order.
        """
        if len(data) < HEADER or not data.startswith(b"ADIOS-BP v"):
            raise FormatError(
                "this is not the index of a BP dataset", where=where, found=repr(data[:16])
            )
        endian, version, minor, active, major = data[36:41]
        if version == 4:
            minor, active, major = 0, minor, ord("n")
        if version not in (4, 5) or (version == 5 and minor != 2):
            raise FormatError(
                "this version of BP is not read",
                where=where,
                expected="4 or 5.2",
                found=f"{version}.{minor}",
                fix="rewrite it with adios2_reorganize of the ADIOS2 release that wrote it",
            )
        if endian:
            raise FormatError(
                "the data are big-endian",
                where=where,
                fix="rewrite them with adios2_reorganize on a machine that is little-endian",
            )
        return cls(version, minor, active == 1, major != ord("n"), version == 5 and data[41] != 0)


def column_major(where: object) -> FormatError:
    """Return the error for data that Fortran, or another column-major language, wrote."""
    return FormatError(
        "the arrays are column-major, as Fortran writes them",
        where=where,
        expected="row-major",
        fix="write them again from a row-major program, such as one in Python with adios2",
    )


def plural(count: int, word: str) -> str:
    """Return a number and what it counts."""
    return f"{count:,} {word}{'s' if count != 1 else ''}"


def decoded(name: bytes) -> str:
    """Return a name; `FormatError` if it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise FormatError("a name in the metadata is not UTF-8", found=repr(name)[:80]) from error


class Numbers:
    """The bytes of a metadata file, of which numbers are taken at many offsets together.

    Raises `FormatError` wherever an offset is not in the file.
    """

    def __init__(self, file: Handle) -> None:
        self.where = file.path
        self.nbytes = file.nbytes
        self._buffer = bytearray(-(-file.nbytes // 8) * 8)
        self.bytes: Bytes = np.frombuffer(self._buffer, np.uint8)[: file.nbytes]
        file.read_checked(self.bytes, 0, "the metadata")
        self._words = np.frombuffer(self._buffer, np.int64)

    def u64(self, offsets: Ints) -> Ints:
        """Return the 64-bit numbers at `offsets`, of any shape; those beyond int64 are negative."""
        return self._at(offsets, 8).view(np.int64).reshape(offsets.shape)

    def u32(self, offsets: Ints) -> Ints:
        """Return the 32-bit numbers at `offsets`, of any shape."""
        return self._at(offsets, 4).view(np.uint32).reshape(offsets.shape).astype(np.int64)

    def one(self, offset: int, nbytes: int = 8) -> int:
        """Return a number of so many bytes, without a sign."""
        self.check(offset, nbytes)
        return int.from_bytes(self._buffer[offset : offset + nbytes], "little")

    def text(self, offset: int, nbytes: int) -> bytes:
        """Return some bytes."""
        self.check(offset, nbytes)
        return bytes(self._buffer[offset : offset + nbytes])

    def find_zero(self, start: int, stop: int) -> int:
        """Return the offset of the first byte that is 0, from `start` to `stop`; -1: none is."""
        return self._buffer.find(0, start, stop) if start >= 0 else -1

    def check(self, offset: int, nbytes: int) -> None:
        """Raise `FormatError` unless these bytes are there."""
        if not (0 <= nbytes <= self.nbytes and 0 <= offset <= self.nbytes - nbytes):
            raise self.damaged("gives an offset that is not in it", self.nbytes, offset)

    def damaged(self, what: str, expected: object = None, found: object = None) -> FormatError:
        """Return the error for a file that is truncated or damaged."""
        return FormatError(
            f"{self.where.name} is truncated or damaged: it {what}",
            where=self.where,
            expected=expected,
            found=found,
        )

    def _at(self, offsets: Ints, nbytes: int) -> Array:
        flat = offsets.reshape(-1)
        if len(flat):
            low, high = int(flat.min()), int(flat.max())
            self.check(low if low < 0 else high, nbytes)
        if nbytes == 8 and not (flat & 7).any():
            words: Array = self._words[flat >> 3]
            return words
        out = np.empty((len(flat), nbytes), np.uint8)
        for k in range(nbytes):
            out[:, k] = self.bytes[flat + k]
        return out


def joined(parts: list[Variable]) -> Variable:
    """Return one variable of what was found of it in several places, in the order of records."""
    first = parts[0]
    problem = next((p.problem for p in parts if p.problem), "")
    if any((p.dtype, p.kind, p.dims) != (first.dtype, first.kind, first.dims) for p in parts):
        return replace(first, problem="its type or its number of axes changes between steps")
    if len(parts) == 1:
        blocks = first.blocks
    else:
        names = [name for name, array in vars(first.blocks).items() if array is not None]
        every = {name: [getattr(p.blocks, name) for p in parts] for name in names}
        blocks = Blocks(**{name: np.concatenate(arrays) for name, arrays in every.items()})
        blocks = blocks[np.argsort(blocks.record, kind="stable")]
    return _placed(replace(first, blocks=blocks, problem=problem))


def _placed(variable: Variable) -> Variable:
    """Return a joined variable with the offsets that its blocks have in the whole array."""
    blocks = variable.blocks
    if variable.kind != "joined" or variable.problem or not len(blocks):
        return variable
    axis = np.flatnonzero((blocks.shape == JOINED).any(0))
    if len(axis) != 1 or not (blocks.shape[:, axis[0]] == JOINED).all():
        return replace(variable, problem="its blocks are joined along no axis, or along several")
    along = blocks.count[:, axis[0]]
    new = np.append(True, np.diff(blocks.step) != 0)
    if float(np.abs(along.astype(float)).sum()) > 1 << 60:
        return replace(variable, problem="it is impossibly large")
    end = np.cumsum(along)
    group = np.cumsum(new) - 1
    before = (end - along)[new]
    last = np.append(np.flatnonzero(new)[1:], len(new)) - 1
    start, shape = np.zeros_like(blocks.start), blocks.shape.copy()
    start[:, axis[0]] = end - along - before[group]
    shape[:, axis[0]] = (end[last] - before)[group]
    return replace(variable, kind="array", blocks=replace(blocks, start=start, shape=shape))


SUBFILE = "data.{0}"
"""The names of the files of data."""


def subfile(number: int) -> str:
    """Return the name of a file of a dataset."""
    return "md.0" if number == METADATA else SUBFILE.format(number)


def operator(variable: Variable, file: Handle) -> str:
    """Return the problem of a variable of BP5 that went through an operator, with its name."""
    head, offset = np.zeros(1, np.uint8), int(variable.blocks.offset[0])
    if 0 <= offset < file.nbytes:
        file.read_checked(head, offset, f"variable {variable.name}")
        return f"{OPERATOR} {OPERATORS.get(int(head[0]), '')}".strip()
    return OPERATOR


OPERATOR = "operator"
"""The problem of a variable that went through one; its name follows where it is known."""

OPERATORS = {
    0: "blosc",
    1: "bzip2",
    2: "libpressio",
    3: "mgard",
    4: "png",
    5: "sirius",
    6: "sz",
    7: "zfp",
    8: "mgardplus",
}
"""The first byte of a block of BP5 that went through an operator."""
