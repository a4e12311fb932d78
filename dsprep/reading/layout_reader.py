"""Samples of one file through its layout: the one reader of every format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsprep.core.schema import Arena, Batch, Ints, Schema
from dsprep.errors import UsageError
from dsprep.layout.model import FileLayout
from dsprep.reading.columns import ColumnReader, read_columns
from dsprep.reading.each import read_each
from dsprep.reading.records import Decoders, RecordReader, Verify
from dsprep.reading.single import Single
from dsprep.storage.base import Handle


def check_located(layout: FileLayout, names: Sequence[str], where: object, fix: str) -> None:
    """Raise `UsageError` for the first field that only the format's library can read."""
    for name in names:
        if name in layout.unlocated:
            reason = layout.unlocated[name]
            problem = f"field {name} can be read only by the format's own library: {reason}"
            raise UsageError(problem, where=where, fix=fix)


class LayoutReader:
    """Reads samples of one file, or of one directory that is a dataset, by ``preadv``.

    Safe to use from several threads.

    Parameters
    ----------
    layout
        Offsets of the samples, and their storage.
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
        open_file: Callable[[str], Handle],
        where: object,
        decoders: Decoders | None = None,
        label: Callable[[int], str] | None = None,
    ) -> None:
        self._layout, self._open_file, self._where = layout, open_file, where
        self._schema = schema
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
        fix = "leave it out, or open the dataset with dsprep.open"
        check_located(self._layout, names, self._where, fix)
        out: Batch = {}
        given = self._layout.given
        own = self._layout.files
        inside = [n for n in names if n not in self.columns and n not in given and n not in own]
        if inside and self.records is not None:
            file = self._open_file(self.records.records.blocks.path)
            out = self.records.read(file, samples, inside, verify, arena, first)
        for name in (n for n in names if n in own):
            out[name] = read_each(own[name], self._schema[name], samples, self._open_file, arena)
        out |= {n: given[n].at(samples, self._schema[n]) for n in names if n in given}
        chosen = {name: self.columns[name] for name in names if name in self.columns}
        if chosen:
            out |= read_columns(chosen, samples, arena)
        return {name: out[name] for name in names}

    def single(self, names: tuple[str, ...]) -> Single | None:
        """Return a reader of single samples that costs little more than the system calls.

        None where they take more.
        """
        recipe = None if self.records is None else self.records.recipe
        fields = [self._schema[name] for name in names]
        try:
            return Single(self._layout, fields, self._open_file, recipe)
        except LookupError:
            return None

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for: decoded chunks."""
        return sum(c.resident_nbytes() for c in self.columns.values())
