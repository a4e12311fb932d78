"""Where the samples of a store lie: see `base.Source.extents`.

Samples are rows of an array, or all of them; ragged fields also have laws of their first row and
their number of rows. The bytes that are stored are those of the field's own dtype: stand-ins hold
the same bits, and the order of bytes is part of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dsprep.core.schema import Field, Ints
from dsprep.errors import FormatError
from dsprep.formats.zarr.chunk_locations import Step, stored_grid
from dsprep.formats.zarr.columns import Elements, Parts, Reading, Whole
from dsprep.formats.zarr.encoding import Unlocated
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Column, FileLayout, Grid

VARYING = "only zarr reads elements of varying length"


def find(
    columns: Sequence[tuple[Field, Reading]],
    count: int,
    progress: Callable[[int, int], None] | None,
) -> FileLayout:
    """Return where all samples lie.

    Parameters
    ----------
    columns
        Each field, and the arrays that hold it.
    count
        Samples.
    progress
        See `base.Source.extents`.

    Raises
    ------
    FormatError
        If the store is damaged.
    """
    total = sum(r.arrays[0].meta.files() for _, r in columns)
    done = 0

    def step(files: int) -> None:
        nonlocal done
        done += files
        if progress is not None:
            progress(done, total)

    found: dict[str, Column] = {}
    unlocated: dict[str, str] = {}
    for field, reading in columns:
        upto = done + reading.arrays[0].meta.files()
        try:
            found[field.name] = _column(field, reading, count, step)
        except Unlocated as reason:
            unlocated[field.name] = str(reason)
        step(upto - done)
    return FileLayout(count, columns=found, unlocated=unlocated)


def _column(field: Field, reading: Reading, count: int, step: Step) -> Column:
    if isinstance(reading, Elements):
        raise Unlocated(VARYING)
    if isinstance(reading, Parts):
        return _ragged(field, reading, step)
    array = reading.arrays[0]
    lines = array.meta.shape[0] if isinstance(reading, Whole) and array.meta.shape else 1
    if not count or not field.row_nbytes:
        return Column(None)
    return Column(stored_grid(array, step), lines)


def _ragged(field: Field, reading: Parts, step: Step) -> Column:
    """Return rows of values; `field` may give a type to what the store keeps as bytes."""
    first, count = reading.every()
    grid = stored_grid(reading.arrays[0], step) if reading.nbytes else None
    own = reading.field
    if (field.dtype, field.shape) != (own.dtype, own.shape):
        nbytes = field.row_nbytes
        _check_type(field, count, reading.arrays[0].where)
        if not field.ragged and bool((first == np.arange(len(first)) * nbytes).all()):
            return Column(grid, max(1, nbytes))
        if not field.ragged or (nbytes and (first % nbytes).any()):
            raise Unlocated(f"only zarr reads values of {nbytes} bytes across gaps")
        first, count = first // max(1, nbytes), count // max(1, nbytes)
        grid = grid and _regrouped(grid, nbytes)
    return Column(grid, 1, Explicit(first), Explicit(count))


def _check_type(field: Field, lengths: Ints, where: str) -> None:
    """Raise `FormatError` if the bytes of a sample are no value of the type that was asked for."""
    nbytes = field.row_nbytes
    bad = lengths % nbytes != 0 if field.ragged and nbytes else lengths != nbytes
    if bad.any():
        i = int(bad.argmax())
        raise FormatError(
            f"the bytes do not fit {field}",
            where=f"{where}, sample {i}",
            expected=f"{'a multiple of ' * field.ragged}{nbytes} bytes",
            found=f"{lengths[i]} bytes",
        )


def _regrouped(grid: Grid, nbytes: int) -> Grid:
    """Return an array of bytes as one of elements of `nbytes`, of which it holds whole ones."""
    total, chunk = grid.shape[0], grid.chunk[0]
    if chunk % nbytes:
        raise Unlocated(f"only zarr reads values of {nbytes} bytes across chunks of {chunk}")
    fill = None if grid.fill is None else grid.fill * nbytes
    return replace(
        grid, shape=(total // nbytes,), itemsize=nbytes, chunk=(chunk // nbytes,), fill=fill
    )
