"""Where the samples of one variable are, by steps or by rows.

By *steps*, each step has a sample: the whole array, or the number; of local arrays each block is
one. By *rows*, the first axis counts samples, over all steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dsprep.core.packing import digest
from dsprep.core.schema import Field, Ints
from dsprep.formats.adios.metadata import METADATA, SUBFILE, Blocks, Variable, subfile
from dsprep.layout import model
from dsprep.layout.laws import Affine, Explicit, Law, Runs
from dsprep.layout.model import Column, Grid

REGULAR = (
    "its blocks are not all of one size, and divide other axes than the first: write it from one "
    "process, or so that each writes whole rows (by adios2: read it and write it again)"
)


class NoField(Exception):
    """Why a variable is not a field, a clause."""


@dataclass(frozen=True)
class Found:
    """A variable as a field.

    Attributes
    ----------
    field, column
        As in the layout.
    count
        Samples.
    nbytes
        Of all values.
    owner
        What the samples belong to: fields whose owners are equal go together.
    selection
        Arguments by which adios2's ``FileReader.read`` gives sample 0, besides the name.
    """

    field: Field
    column: Column
    count: int
    nbytes: int
    owner: str
    selection: str


@dataclass(frozen=True)
class Parts:
    """The arrays of a variable one after another: those of each step, or local ones.

    Attributes
    ----------
    owner
        The step of each, or the record: int64, shape ``(n,)``.
    shape
        Of each: int64, shape ``(n, dims)``. They differ in the first axis at most.
    blocks
        What they are made of; ``step`` is the number of the array.
    """

    owner: Ints
    shape: Ints
    blocks: Blocks

    @property
    def inner(self) -> tuple[int, ...]:
        """All axes but the first."""
        return tuple(self.shape[0, 1:].tolist())

    @property
    def rows(self) -> Ints:
        """The first axis of each."""
        return self.shape[:, 0]


def by_steps(variable: Variable) -> Found:
    """Return a variable of which each step, or each local block, is a sample."""
    if variable.kind in ("value", "local value"):
        return _of_values(variable)
    parts = _parts(variable)
    rows, count, owner = parts.rows, len(parts.rows), digest(parts.owner.tobytes())
    grid = _grid(variable, parts)
    nbytes = int(rows.sum()) * math.prod(parts.inner) * variable.itemsize
    assert variable.dtype is not None  # only values are strings
    if (rows != rows[0]).any():
        field = Field(variable.name, variable.dtype, (None, *parts.inner))
        column = Column(grid, 1, Explicit(np.cumsum(rows) - rows), Explicit(rows))
        return Found(field, column, count, nbytes, owner, _step(variable))
    each = int(rows[0])
    field = Field(variable.name, variable.dtype, (each, *parts.inner))
    if grid is not None and each % grid.chunk[0] == 0 and (not grid.plain or each == grid.chunk[0]):
        shape, chunk = (count, each, *parts.inner), (1, *grid.chunk)
        column = Column(replace(grid, shape=shape, chunk=chunk))
    else:
        column = Column(grid, each if grid is not None else 1)
    return Found(field, column, count, nbytes, owner, _step(variable))


def by_rows(variable: Variable) -> Found:
    """Return a variable whose first axis counts samples, over all steps."""
    if variable.dtype is None or not variable.dims:
        raise NoField("no axis")
    parts = _parts(variable)
    count = int(parts.rows.sum())
    field = Field(variable.name, variable.dtype, parts.inner)
    owner = digest(np.append(parts.rows, parts.owner).tobytes())
    column = Column(_grid(variable, parts))
    start, size = [0] * variable.dims, [1, *parts.inner]
    selection = f"start={start}, count={size}"
    return Found(field, column, count, count * field.row_nbytes, owner, selection)


def by_index(variable: Variable, first: Ints, count: Ints, owner: str) -> Found:
    """Return a variable of which each sample has the rows that an index gives it.

    Raises
    ------
    NoField
        If they are not there.
    """
    table = by_rows(variable)
    bad = (first < 0) | (count < 0) | (count > table.count) | (first > table.count - count)
    if bad.any():
        i = int(bad.argmax())
        raise NoField(f"sample {i} has {count[i]} rows from {first[i]} on, of {table.count}")
    field = Field(variable.name, table.field.dtype, (None, *table.field.shape))
    column = Column(table.column.grid, 1, Explicit(first), Explicit(count))
    nbytes = int(count.sum()) * table.field.row_nbytes
    start, size = int(first[0]) if len(first) else 0, int(count[0]) if len(count) else 0
    zeros = [0] * len(table.field.shape)
    selection = f"start={[start, *zeros]}, count={[size, *table.field.shape]}"
    return Found(field, column, len(first), nbytes, owner, selection)


def _step(variable: Variable) -> str:
    """Return the selection of the first step, and of the first block of local arrays."""
    step = "step_selection=[0, 1]"
    return f"block_id=0, {step}" if variable.kind.startswith("local") else step


def _owner(blocks: Blocks) -> Ints:
    """Return the step of each block, or, where a step has several, what they were written with."""
    return blocks.step if (np.diff(blocks.step) > 0).all() else blocks.record


# --- values ----------------------------------------------------------------------------------


def _of_values(variable: Variable) -> Found:
    """Return a number or a string of each step, or of each writer in each step."""
    blocks = variable.blocks
    if variable.kind == "value":  # each writer may have put it
        blocks = blocks[np.append(True, np.diff(blocks.step) != 0)]
    key = digest(_owner(blocks).tobytes())
    count, path = len(blocks), subfile(METADATA)
    if variable.dtype is None:
        assert blocks.nbytes is not None  # of strings
        end = int((blocks.offset + blocks.nbytes).max())
        file_block = model.Blocks(Affine(1, 0), Affine(1, end), path)
        grid = Grid(file_block, (max(1, end),), 1, (max(1, end),))
        column = Column(grid, 1, Explicit(blocks.offset), Explicit(blocks.nbytes))
        total = int(blocks.nbytes.sum())
        string = Field.opaque(variable.name, "str")
        return Found(string, column, count, total, key, _step(variable))
    size = variable.itemsize
    stored = model.Blocks(Explicit(blocks.offset), Affine(count, size), path)
    field = Field(variable.name, variable.dtype)
    column = Column(Grid(stored, (count,), size, (1,)))
    return Found(field, column, count, count * size, key, _step(variable))


# --- arrays ----------------------------------------------------------------------------------


def _parts(variable: Variable) -> Parts:
    """Return the arrays of a variable; `NoField` if they do not go together."""
    blocks = variable.blocks
    if variable.kind == "local":
        blocks = replace(blocks, shape=blocks.count, start=np.zeros_like(blocks.start))
        new = np.arange(len(blocks))
        owner = _owner(blocks)
    else:
        new = np.flatnonzero(np.append(True, np.diff(blocks.step) != 0))
        owner = blocks.step[new]
    number = np.searchsorted(new, np.arange(len(blocks)), "right") - 1
    shape = blocks.shape[new]
    if (blocks.shape != shape[number]).any():
        raise NoField("its blocks disagree about its shape in one step")
    if (shape < 0).any() or (np.multiply.reduce(shape.astype(float), axis=1) > 1 << 60).any():
        raise NoField(f"its shape cannot be: {shape[shape.min(1).argmin()].tolist()}")
    if (shape[:, 1:] != shape[0, 1:]).any():
        raise NoField("its shape changes between steps, and not only along the first axis")
    return Parts(owner, shape, replace(blocks, step=number))


def _grid(variable: Variable, parts: Parts) -> Grid | None:
    """Return the rows of all arrays one after another; None if there are none."""
    blocks = parts.blocks
    if (blocks.count < 0).any() or (blocks.start < 0).any():
        raise NoField("a block of it cannot be")
    blocks = blocks[(blocks.count > 0).all(1)]
    total = int(parts.rows.sum())
    if not total * math.prod(parts.inner):
        return None
    if not len(blocks):
        raise NoField("no block of it was written")
    slabs = (blocks.count[:, 1:] == parts.shape[0, 1:]).all()
    cut = (_slabs if slabs else _boxes)(variable, parts, blocks)
    several = bool((blocks.file != blocks.file[0]).any())
    path = SUBFILE if several else subfile(int(blocks.file[0]))
    stored = model.Blocks(cut.offsets, cut.lengths, path)
    shape, files = (total, *parts.inner), cut.files if several else None
    return Grid(stored, shape, variable.itemsize, cut.chunk, file_numbers=files)


class Cut(NamedTuple):
    """Where the chunks of an array are: their shape, offsets, lengths and subfiles."""

    chunk: tuple[int, ...]
    offsets: Law
    lengths: Law
    files: Law


def _slabs(variable: Variable, parts: Parts, blocks: Blocks) -> Cut:
    """Return the chunks of blocks of whole rows: the largest of which every block has some."""
    blocks = blocks[np.lexsort((blocks.start[:, 0], blocks.step))]
    start, rows = blocks.start[:, 0], blocks.count[:, 0]
    if (start + rows > parts.rows[blocks.step]).any() or blocks.start[:, 1:].any():
        raise NoField("a block of it leaves its array")
    begin = (np.cumsum(parts.rows) - parts.rows)[blocks.step] + start
    end = begin + rows
    if begin[0] or (begin[1:] != end[:-1]).any() or end[-1] != parts.rows.sum():
        raise NoField("its blocks leave out some rows, or have some twice")
    row = math.prod(parts.inner) * variable.itemsize
    per = int(np.gcd.reduce(rows[:-1])) if len(rows) > 1 else int(rows[0])
    chunks = -(-rows // per)
    count, first = int(chunks.sum()), np.cumsum(chunks) - chunks

    def runs(values: Ints, step: int) -> Law:
        """Return numbers that rise by `step` within a block."""
        if len(values) == 1:
            return Affine(count, int(values[0]), step)
        if count == len(values):
            return Explicit(values)
        return Runs(count, first, values, np.full(len(values), step, np.int64))

    lengths: Law = Affine(count, per * row)
    rest = int(rows[-1]) % per * row
    if rest:
        edges = np.array([0, count - 1]), np.array([per * row, rest])
        lengths = Runs(count, *edges, np.zeros(2, np.int64))
    return Cut((per, *parts.inner), runs(blocks.offset, per * row), lengths, runs(blocks.file, 0))


def _boxes(variable: Variable, parts: Parts, blocks: Blocks) -> Cut:
    """Return the chunks of blocks that divide other axes too, all of one size."""
    chunk, shape = blocks.count[0], parts.shape
    regular = (blocks.count == chunk).all() and not (shape % chunk).any()
    if not regular or (blocks.start % chunk).any():
        raise NoField(REGULAR)
    if (blocks.start + chunk > shape[blocks.step]).any():
        raise NoField("a block of it leaves its array")
    lines = parts.rows // chunk[0]
    inner = tuple((shape[0, 1:] // chunk[1:]).tolist())
    position = (blocks.start // chunk).T
    position[0] += (np.cumsum(lines) - lines)[blocks.step]
    count = int(lines.sum()) * math.prod(inner)
    if count != len(blocks):
        raise NoField("its blocks leave out some elements, or have some twice")
    number = np.ravel_multi_index(tuple(position), (int(lines.sum()), *inner))
    order = np.argsort(number, kind="stable")
    if (number[order] != np.arange(count)).any():
        raise NoField("its blocks leave out some elements, or have some twice")
    nbytes = math.prod(chunk.tolist()) * variable.itemsize
    files = Explicit(blocks.file[order])
    return Cut(tuple(chunk.tolist()), Explicit(blocks.offset[order]), Affine(count, nbytes), files)
