"""The groups file mapped into memory: each sample copied out of it, in shuffled order.

The kernel reads the pages at their first touch, with the read-ahead that it does by default; a
mapping that is advised to be read at random faults once per page, and is slower.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from dsprep.bench.strategies.base import Way
from dsprep.bench.task import Task
from dsprep.core.schema import Bytes, Column, Field, Ints, Ragged
from dsprep.errors import FormatError, UnsupportedError
from dsprep.sidecar.sidecar import Sidecar


def open_mapped(task: Task, resources: ExitStack) -> Way:
    """Map the files, as with `numpy.memmap`; their sidecar gives the extent of every sample.

    Raises
    ------
    UnsupportedError
        If the samples are not stored in them as they are, since they are compressed, say.
    """
    sidecar = resources.enter_context(Sidecar.open(task.path))
    views: list[Bytes] = []
    for number, file in enumerate(sidecar.content.files):
        path, layout = sidecar.dataset / file.path, sidecar.layout(number)
        for f in task.schema:
            column = layout.columns.get(f.name)
            if (
                not path.is_file()
                or column is None
                or not (column.grid is None or column.grid.plain)
                or (f.ragged and not f.row_nbytes)
            ):
                raise UnsupportedError(
                    f"the bytes of field {f} are not stored in the file as they are", where=path
                )
        with path.open("rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        views.append(np.frombuffer(mapping, np.uint8))
    resources.callback(views.clear)  # unmapped with the last reference

    def read(field: Field, indices: Ints) -> Column:
        """Return a field of some samples, copied one by one."""
        sample, file, offset, length = sidecar.locate(indices, field.name)
        if len(offset) and int(offset.min()) < 0:
            raise FormatError(f"samples of field {field} are not stored", where=sidecar.dataset)
        flat = np.empty(int(length.sum()), np.uint8)
        at = 0
        for k, start, nbytes in zip(file.tolist(), offset.tolist(), length.tolist(), strict=True):
            flat[at : at + nbytes] = views[k][start : start + nbytes]
            at += nbytes
        if not field.ragged:
            if not flat.size:
                return np.empty((len(indices), *field.inner), field.dtype)
            return flat.view(field.dtype).reshape(len(indices), *field.inner)
        rows = np.zeros(len(indices), np.int64)
        np.add.at(rows, sample, length // field.row_nbytes)
        values = flat.view(field.dtype).reshape(-1, *field.inner)
        return Ragged.from_lengths(values, rows, field.kind)

    def epoch(number: int) -> Iterator[Any]:
        for indices in task.batches(number):
            yield {f.name: read(f, indices) for f in task.schema}

    return Way(epoch)
