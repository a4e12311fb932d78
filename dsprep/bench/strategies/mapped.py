"""The groups file mapped into memory: each sample copied out of it, in shuffled order.

The kernel reads the pages at their first touch, with the read-ahead that it does by default; a
mapping that is advised to be read at random faults once per page, and is slower.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from dsprep.bench.strategies.base import Strategy
from dsprep.core.schema import Bytes, Column, Field, Ints, Ragged
from dsprep.errors import FormatError, UnsupportedError
from dsprep.sidecar.sidecar import Sidecar


class Mapped(Strategy):
    """As with `numpy.memmap`, in a file whose sidecar gives the extent of every sample."""

    _sidecar: Sidecar | None = None

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self._maps: list[mmap.mmap] = []
        self._views: list[Bytes] = []  # emptied in place, so that no view outlives its mapping

    def open(self) -> None:
        """Map the files, and see that the samples are stored in them as they are.

        Raises
        ------
        UnsupportedError
            If they do not, since they are compressed, say.
        """
        self._sidecar = Sidecar.open(self.task.path)
        for number, file in enumerate(self._sidecar.content.files):
            path = self._sidecar.dataset / file.path
            layout = self._sidecar.layout(number)
            for f in self.task.schema:
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
                self._maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            self._views.append(np.frombuffer(self._maps[-1], np.uint8))

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples, shuffled."""
        for indices in self.task.batches(number):
            yield {f.name: self._column(f, indices) for f in self.task.schema}

    def _column(self, field: Field, indices: Ints) -> Column:
        """Return a field of some samples, copied one by one."""
        assert self._sidecar is not None  # between open and close
        sample, file, offset, length = self._sidecar.locate(indices, field.name)
        if len(offset) and int(offset.min()) < 0:
            raise FormatError(
                f"samples of field {field} are not stored", where=self._sidecar.dataset
            )
        flat = np.empty(int(length.sum()), np.uint8)
        views, at = self._views, 0
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

    def close(self) -> None:
        """Unmap and close the files."""
        self._views.clear()
        for mapping in self._maps:
            mapping.close()
        self._maps.clear()
        if self._sidecar is not None:
            self._sidecar.close()
        self._sidecar = None
