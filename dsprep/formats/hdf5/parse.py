"""HDF5 files as samples.

Fields that can be located are read at their offsets, as a sidecar's readers read them; everything
else goes through the library, whose lock then serialises the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from dsprep.core.schema import Arena, Batch, Field, Ints, Schema
from dsprep.core.schema import Column as Values
from dsprep.formats.base import Source
from dsprep.formats.fields import retype
from dsprep.formats.hdf5.columns import Indexed
from dsprep.formats.hdf5.fields import Fields
from dsprep.formats.hdf5.guard import hdf5_errors, open_hdf5, superblock
from dsprep.formats.hdf5.locate import filter_name
from dsprep.formats.hdf5.rows import FieldColumn, Rows
from dsprep.formats.located import locate_fields, total_sizes
from dsprep.formats.options import OpenOptions
from dsprep.layout.describe import Chunking, FieldStorage, of_array
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.columns import fetch
from dsprep.storage.paths import open_file


class Hdf5Source(Source):
    """One HDF5 file opened for reading."""

    random_access = True

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self.path = path
        self._disk = open_file(path)
        self._file: Any = None
        try:
            with hdf5_errors(path, "the HDF5 file cannot be opened"):
                self._file = open_hdf5(path)
                stated = superblock(path)
            self.version = f"HDF5, superblock {stated['superblock']}"
            # Nothing behind the end that the file states belongs to it; the library reads none.
            self._disk.nbytes = min(self._disk.nbytes, stated["end_of_file"])
            fields = Fields(self._file, self._disk, options)
        except BaseException:
            self.close()
            raise
        self.others, attrs = fields.others, dict(fields.attrs)
        if attrs.pop("_NCProperties", None) is not None:  # by netCDF-C since 4.4.1, by h5netcdf
            self.version += " (netCDF-4)"
        self._columns, self._count, self.notes = fields.columns, fields.count, tuple(fields.notes)
        self.schema = Schema(tuple(field for _, field in fields.columns.values()), attrs)

    def __len__(self) -> int:
        return self._count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        columns = {
            name: column.begin(start, stop, arena, f"read.{name}")
            for name, (column, _) in self._columns.items()
        }
        # Without an arena each field has memory of its own, which lives as long as that field.
        alone = ({name: pending} for name, pending in columns.items())
        parts = alone if arena is None else [columns]
        batch = {name: c for part in parts for name, c in fetch(part, arena).items()}
        self._disk.check_same()  # the library and what reads heaps do not look
        return {
            name: retype(batch[name], field, self.path, start)
            for name, (_, field) in self._columns.items()
        }

    @override
    def read_field(self, name: str) -> Values:
        column, field = self._columns[name]
        pending = column.begin(0, self._count, None, name)
        values = fetch({name: pending}, None)[name]
        self._disk.check_same()
        return retype(values, field, self.path, 0)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the payload bytes of each sample; None where that takes reading them."""
        parts = (column.sizes(start, stop) for column, _ in self._columns.values())
        return total_sizes(parts, stop - start)

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        # Only tables give them for sure: of strings in a heap the library may drop some bytes.
        column, field = self._columns[name]
        known = isinstance(column, Indexed) and field.row_nbytes
        sizes = column.sizes(start, stop) if known else None
        return None if sizes is None else sizes // field.row_nbytes

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for: decoded chunks."""
        used = {dataset for column, _ in self._columns.values() for dataset in column.datasets}
        return sum(dataset.resident for dataset in used)

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored."""
        with hdf5_errors(self.path, "the layout cannot be read"):
            return {
                name: _storage(column, self._count) for name, (column, _) in self._columns.items()
            }

    @override
    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        def locate(name: str, column: FieldColumn, field: Field) -> Column:
            with hdf5_errors(f"{self.path}, field {name}", "the field cannot be located"):
                return column.locate(field)

        fields = {name: partial(locate, name, *both) for name, both in self._columns.items()}
        return locate_fields(fields, self._count, progress)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError, RuntimeError):  # as `close_quietly`
                self._file.close()
            self._file = None
        self._disk.close()


# --- for a person ----------------------------------------------------------------------------

_SOME = 1024


def _storage(column: FieldColumn, count: int) -> FieldStorage:
    """Return how the field of a column is stored, in a file of `count` samples."""
    column = column.opened()
    form = _chunking(column.dataset, "")
    if not isinstance(column, Rows | Indexed):
        access = "each sample is in a heap, found through a descriptor of its own: slow at random"
        return FieldStorage(storage=form.words("rows"), codecs=form.codecs, access=access)
    ragged = isinstance(column, Indexed)
    rows = column.rows if isinstance(column, Indexed) else column
    grid = None if rows.reader is None else rows.reader.column.grid
    library = "the HDF5 library" if grid is None else ""
    form = replace(form, library=library, plain=grid is not None and grid.plain)
    nbytes: float = rows.row_nbytes
    if ragged:  # of a typical sample: in groups, not all rows belong to one
        sizes = column.sizes(0, min(_SOME, column.count))
        nbytes = 0 if sizes is None or not len(sizes) else float(sizes.mean())
    return of_array(
        form,
        nbytes / form.row_nbytes if form.row_nbytes else rows.lines,
        count,
        ragged=ragged,
        stored_nbytes=int(column.dataset.id.get_storage_size()),
        tables=column.route.names if isinstance(column, Indexed) else (),
    )


def _chunking(dataset: Any, library: str) -> Chunking:
    """Return the form of a dataset, as far as it is known without its chunks."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    layout_class, chunks, stored, labels = plist.get_layout(), None, "", []
    if layout_class == h5d.CHUNKED:
        chunks = tuple(map(int, dataset.chunks))
        for i in range(plist.get_nfilters()):
            code, _, values, name = plist.get_filter(i)
            label = filter_name(code, name)
            labels.append(f"{label}:{values[0]}" if code == 1 and values else label)
    elif layout_class != h5d.CONTIGUOUS or plist.get_external_count():
        stored = {h5d.COMPACT: "compact", h5d.VIRTUAL: "virtual"}.get(layout_class, "external")
    return Chunking(
        shape=tuple(map(int, dataset.shape)),
        itemsize=int(dataset.dtype.itemsize),
        chunk=chunks,
        codecs=tuple(labels),
        library=library,
        stored=stored,
    )
