"""A BP dataset as samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dsprep.core.schema import Ints, Ragged
from dsprep.errors import FormatError
from dsprep.formats.adios import bp4, bp5
from dsprep.formats.adios.columns import Found
from dsprep.formats.adios.fields import Chosen, choose, with_attributes
from dsprep.formats.adios.metadata import (
    HEADER,
    OPERATOR,
    Header,
    Metadata,
    Numbers,
    Variable,
    operator,
    subfile,
)
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.layout.model import FileLayout
from dsprep.reading.columns import ColumnReader, read_columns
from dsprep.reading.files import Files
from dsprep.storage.base import Handle
from dsprep.storage.local import DirectoryGuard


class AdiosSource(LocatedSource):
    """A BP dataset opened for reading; see `base.Source`."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self._files = Files(DirectoryGuard(path, options.follow_external))
        self._root = path
        try:
            metadata = self._checked(self._metadata())
            self._chosen = choose(metadata, options, path, self._integers)
            super().__init__(path, _parsed(metadata, self._chosen), options, self._open)
        except BaseException:
            self._files.close()
            raise

    def _open(self, path: str) -> Handle:
        """Return a file of the dataset; what is not a regular file is not opened."""
        file = self._root / path
        if not file.is_file():
            raise FormatError(
                "a file of the dataset is missing",
                where=file,
                fix="copy the whole directory, with all files in it",
            )
        return self._files.get(0, path, lambda _: self._root)

    def _metadata(self) -> Metadata:
        index = Numbers(self._open("md.idx"))
        header = Header.parse(index.text(0, min(HEADER, index.nbytes)), index.where)
        names = ("mmd.0", "md.0") if header.version == 5 else ("md.0",)
        others = [Numbers(self._open(name)) for name in names]
        metadata = bp5.parse(index, *others) if header.version == 5 else bp4.parse(index, *others)
        if header.active:
            note = "a program is writing to it, or was stopped: the steps that are there are read"
            metadata = replace(metadata, notes=(note, *metadata.notes))
        return metadata

    def _checked(self, metadata: Metadata) -> Metadata:
        """Return the metadata with the names of operators.

        Raises
        ------
        FormatError
            Unless all blocks are in the files.
        """
        variables = {}
        for name, variable in metadata.variables.items():
            variables[name] = variable
            if variable.problem == OPERATOR and len(variable.blocks):
                file = self._open(subfile(int(variable.blocks.file[0])))
                variables[name] = replace(variable, problem=operator(variable, file))
            elif not variable.problem:
                self._check(variable)
        return replace(metadata, variables=variables)

    def _check(self, variable: Variable) -> None:
        offset, nbytes = variable.blocks.offset, variable.sizes
        for number in np.unique(variable.blocks.file[nbytes != 0]).tolist():
            here = variable.blocks.file == number
            file, subject = self._open(subfile(number)), f"variable {variable.name}"
            file.check_extents(offset[here], nbytes[here], subject)
            total = float(nbytes[here].astype(float).sum())
            if total > file.nbytes:
                raise FormatError(
                    f"blocks of {subject} overlap",
                    where=file.path,
                    expected=f"at most {file.nbytes} bytes",
                    found=f"{total:.0f}",
                )

    def _integers(self, located: Found) -> Ints:
        """Return all values of an index."""
        reader = ColumnReader(located.column, located.field, self._open)
        values = read_columns({located.field.name: reader}, np.arange(located.count), None)
        column = values[located.field.name]
        assert not isinstance(column, Ragged)  # its shape is fixed
        return column.astype(np.int64)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _parsed(metadata: Metadata, chosen: Chosen) -> Parsed:
    fields = {name: found.field for name, found in chosen.found.items()}
    columns = {name: found.column for name, found in chosen.found.items()}
    fields, attrs = with_attributes(metadata, fields)
    layout = FileLayout(chosen.count, columns=columns)
    return Parsed(
        version=metadata.version, fields=fields, layout=layout, attrs=attrs, notes=chosen.notes
    )
