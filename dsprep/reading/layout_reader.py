"""Samples of one file through its layout: the one reader of every format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dsprep.core.pread import NEAR
from dsprep.core.schema import Arena, Batch, Bytes, Field, Ints, Ragged, Schema
from dsprep.errors import UsageError
from dsprep.layout.model import FileLayout
from dsprep.reading.columns import ColumnReader, read_columns
from dsprep.reading.files import File
from dsprep.reading.read_plan import strided
from dsprep.reading.records import Decoders, RecordReader, Verify


class LayoutReader:
    """Reads samples of one file, or of one directory that is a dataset, by ``preadv``.

    Safe to use from several threads.

    Parameters
    ----------
    layout
        Where the samples lie and how they are stored.
    schema
        The fields of the layout, by the names that they have there.
    open_file
        Returns a file by the path that the layout gives it: ``""`` or relative to the directory.
    where
        The file or directory, for messages.
    decoders
        Gives the frame and the recipe of records; None: there are no records.
    label
        Gives the name of a sample in records, for messages; None: the file and the number.

    Attributes
    ----------
    records, columns
        The readers of the fields that are stored in records, and of those that are arrays.
    """

    def __init__(
        self,
        layout: FileLayout,
        schema: Schema,
        open_file: Callable[[str], File],
        where: object,
        decoders: Decoders | None = None,
        label: Callable[[int], str] | None = None,
    ) -> None:
        self._layout, self._open_file, self._where = layout, open_file, where
        self.records: RecordReader | None = None
        if layout.records is not None:
            assert decoders is not None  # see the parameter
            self.records = RecordReader(layout.records, schema, decoders, label)
        self.columns = {
            name: ColumnReader(column, schema[name], open_file)
            for name, column in layout.columns.items()
        }

    def read(
        self,
        samples: Ints,
        names: Sequence[str],
        verify: Verify = None,
        arena: Arena | None = None,
        first: int = 0,
    ) -> Batch:
        """Return fields of samples, in the order asked for.

        Parameters
        ----------
        samples
            Numbers in this file, int64, shape ``(n,)``, in any order.
        names
            The fields.
        verify
            ``"header"`` or ``"full"``: compare records with what frames them; see `Sidecar.read`.
        arena
            Memory to use; see `Source.read`.
        first
            The number that messages give to sample 0.

        Raises
        ------
        FormatError
            If the file does not fit the layout, or is damaged.
        UsageError
            If only the format's library can read a field.
        """
        unlocated = self._layout.unlocated
        lost = [n for n in names if n in unlocated]
        if lost:
            raise UsageError(
                f"field {lost[0]} can be read only by the format's own library: "
                f"{unlocated[lost[0]]}",
                where=self._where,
                fix="leave it out, or open the dataset with dsprep.open",
            )
        out: Batch = {}
        inside = [n for n in names if n not in self.columns]
        if inside and self.records is not None:
            file = self._open_file(self.records.records.blocks.path)
            out = self.records.read(file, samples, inside, verify, arena, first)
        chosen = {name: self.columns[name] for name in names if name in self.columns}
        if chosen:
            out |= read_columns(chosen, samples, arena)
        return {name: out[name] for name in names}

    def read_one(self, sample: int, fields: Sequence[Field]) -> Batch | None:
        """Return fields of one sample at little more than the cost of the system call.

        None where they have to be looked for, decoded, or are not as the layout says.
        """
        found = strided(self._layout, fields, sample, 1)
        if not found:
            return None
        path, begin = found[0].path, min(each.offset for each in found)
        end = max(each.offset + each.nbytes for each in found)
        data, wanted = None, sum(each.nbytes for each in found)
        if end - begin <= wanted + NEAR and all(each.path == path for each in found):
            data = self._bytes(path, begin, end - begin)
        out: Batch = {}
        for field, each in zip(fields, found, strict=True):
            if data is None:
                part = self._bytes(each.path, each.offset, each.nbytes)
            else:
                part = data[each.offset - begin : each.offset - begin + each.nbytes]
            values = part.view(field.dtype)
            if field.ragged:
                rows = values.reshape(-1, *field.inner) if field.inner else values
                edges = np.array([0, each.nbytes // max(1, field.row_nbytes)])
                out[field.name] = Ragged(rows, edges, field.kind)
            else:
                out[field.name] = values.reshape(1, *field.inner)
        return out

    def _bytes(self, path: str, offset: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        self._open_file(path).read_checked(data, offset, "a sample")
        return data

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for: decoded chunks."""
        return sum(c.resident_nbytes() for c in self.columns.values())
