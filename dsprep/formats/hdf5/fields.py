"""The fields of an HDF5 file: what of it the user wants, and how each is read.

Datasets whose first axes count the samples are found by `dsprep.formats.samples`, ragged fields by
index tables by `dsprep.formats.hdf5.structure`. Tables between the
samples and the values are ragged fields too; their column of first rows is made to count from 0 in
each sample, so that it points into the sample's own values. The first table is not a field: it
gives only where samples begin.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dsprep.core.schema import Attrs, Field, known_axes
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats import samples
from dsprep.formats.conventions import Stated
from dsprep.formats.fields import missing_field, wanted
from dsprep.formats.hdf5 import structure
from dsprep.formats.hdf5.attributes import (
    KIND_ATTRIBUTE,
    LAYOUT_ATTRIBUTE,
    STATIC_ATTRIBUTE,
    has_attributes,
    marked,
    read_attributes,
)
from dsprep.formats.hdf5.columns import Indexed, OnDemand, Sequences
from dsprep.formats.hdf5.conventions import stated
from dsprep.formats.hdf5.datasets import walk
from dsprep.formats.hdf5.dimensions import NOTHING, bookkeeping, read_dimensions
from dsprep.formats.hdf5.guard import hdf5_errors
from dsprep.formats.hdf5.heaps import Heaps
from dsprep.formats.hdf5.rows import FieldColumn, Rows
from dsprep.formats.index_tables import Route
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import RaggedRows, indexed, route_of, table_paths
from dsprep.formats.splits import check_arrays
from dsprep.storage.base import Handle


class Fields:
    """The fields of an `h5py.File`, which is open for plain reads as `disk` too.

    Attributes
    ----------
    columns
        By the name that the user gave, or else the file: how a field is read, and what it is.
    count
        The number of samples.
    notes
        What was assumed and left out, one clause each.
    attrs
        The attributes of the file.
    others
        As of a `Source`.

    Raises
    ------
    FormatError
        If nothing can be a field, or the file is damaged.
    SchemaError, UsageError
        If a field that the user named does not fit, or what counts the samples is doubtful.
    """

    others: tuple[str, ...] = ()

    def __init__(self, file: Any, disk: Handle, options: OpenOptions) -> None:
        self._disk, self._path, self._specs = disk, disk.path, options.fields
        self._mode = options.sample_axis
        self._rows: dict[str, Rows] = {}
        self.notes: list[str] = []
        self._lost: dict[tuple[str, str], list[str]] = {}  # what is left out, and why
        with hdf5_errors(self._path, "the HDF5 file cannot be opened"):
            self._heaps = Heaps(disk, file)
            self._own = LAYOUT_ATTRIBUTE in file.attrs
        self._contents = walk(file, self._path, follow=options.follow_external)
        self._stated = Stated()  # until its attributes have been read
        self._stated = self._state(file)
        self._datasets = self._contents.datasets
        self._arrays = {
            p: samples.Sized(held.shape, held.nbytes, self._stated.axes.get(p, ""), held.dtype)
            for p, held in self._datasets.items()
            if options.fields or p not in self._stated.aside
        }
        left_out = {p: f"{p}: {reason}" for p, reason in self._contents.left_out.items()}
        if elsewhere := [*self._contents.elsewhere]:
            self.notes.append(f"values are in other files: {samples.listed(elsewhere)}")
        if not self._datasets:
            raise FormatError(
                "the file holds no datasets that can be fields",
                where=self._path,
                found=samples.listed([*left_out.values()]) or "no datasets",
            )
        if options.keys_as is not None:
            raise UsageError("--keys-as applies where each group is a sample", where=self._path)
        self._refuse_what_is_stated()
        self.count, columns = self._array_columns()
        specs = [replace(s, path=s.spelled, index=()) if s.index else s for s in self._specs]
        chosen = wanted(tuple(specs), {name: column.field for name, column in columns.items()})
        if not chosen:
            raise self._nothing()
        self.columns = {field.name: (columns[path], field) for path, field in chosen}
        if not specs:
            lost = (each for each in left_out.values() if not each.endswith(NOTHING))
            self.notes += [f"left out {each}" for each in lost]
            self.notes += samples.unapplied({n: f.attrs for n, (_, f) in self.columns.items()})
            self._note_losses()
        self.attrs = self._attributes("the file", file)
        self._note_lost()

    def _state(self, file: Any) -> Stated:
        """Return what the file states about its datasets; dsprep's own: only what is no field."""
        with hdf5_errors(self._path, "the dimensions cannot be read"):
            axes = read_dimensions(self._contents, self._read_attributes)
        facts = Stated()
        if self._own:
            names = (marked(file, STATIC_ATTRIBUTE, self._path) or "").split("\0")
            facts.aside |= dict.fromkeys((n for n in names if n), samples.STATIC)
        else:
            facts = stated(self._contents, self._read_attributes)
            facts.axes.update((path, names[0]) for path, names in axes.items() if names[0])
        for path, names in axes.items():
            more = known_axes(path, [name.rpartition("/")[2] for name in names])
            facts.attrs[path] = {**facts.attrs.get(path, {}), **more}
        return facts

    # --- datasets whose first axes count the samples ---

    def _array_columns(self) -> tuple[int, dict[str, FieldColumn]]:
        """Return the number of samples and the columns by name, in the file's order."""
        with hdf5_errors(self._path, "the fields cannot be found"):
            routes = self._routes()
        arrays: dict[str, samples.Sized] = {}
        for name, (path, route) in routes.items():
            array = self._arrays[path]
            if route is not None:
                arrays[name] = array._replace(shape=(route.tables[0].rows,))
            elif len(array.shape) > 1 and self._datasets[path].vlen:
                self._leave_out(path)  # no axis of samples counts these sequences
            else:
                arrays[name] = array
        for spec in self._specs:
            if not spec.index and spec.path not in arrays:
                self._check_there(spec.path)
        if not arrays:
            raise self._nothing()
        mode = "first" if self._mode == "auto" and self._own else self._mode
        if not self._specs and mode == "auto":
            check_arrays(arrays, self._path)
        axis = samples.choose(
            arrays,
            mode,
            self._path,
            named=bool(self._specs),
            grouped=self._stated.grouped,
            more=partial(indexed, self._contents, self._open),
        )
        self.notes += axis.notes
        self.others = axis.others or tuple(self._stated.aside if self._own else ())
        order = {path: i for i, path in enumerate(self._datasets)}
        columns = {}
        for name in sorted(axis.names, key=lambda n: order[routes[n][0]]):
            column = self._column(name, *routes[name], axis.whole_file)
            if column is not None:
                columns[name] = column
        return axis.count, columns

    def _routes(self) -> dict[str, tuple[str, Route | None]]:
        """Return the path of each field's dataset, and how its rows are found if it is ragged.

        One that the user gave with index tables is called as ``--field`` spells it.
        """
        ragged = RaggedRows()
        if self._mode != "none":
            ragged = structure.discover(self._contents, self._open, self._path, own=self._own)
        if not self._specs:
            self.notes += ragged.notes
            aside = self._stated.aside
            self.notes += self._stated.notes()
            skip = ragged.used | ragged.left_out | {path for path, _ in ragged.routes.values()}
            skip |= aside.keys()
            kept_routes = {n: route for n, route in ragged.routes.items() if route[0] not in aside}
            return {**kept_routes, **{p: (p, None) for p in self._datasets if p not in skip}}
        requested = [spec.path for spec in self._specs if not spec.index]
        routes: dict[str, tuple[str, Route | None]] = {
            path: ragged.routes[path] for path in requested if path in ragged.routes
        }
        for spec in self._specs:
            if spec.index:
                for path in (spec.path, *(p for e in spec.index for p in table_paths(e))):
                    self._check_there(path)
                route = route_of(spec, self._contents, self._open, self._path)
                routes[spec.spelled] = spec.path, route
        for path in requested:
            if path in self._datasets:
                routes.setdefault(path, (path, None))
        return routes

    def _column(
        self, name: str, path: str, route: Route | None, whole_file: bool
    ) -> FieldColumn | None:
        stored_type = self._datasets[path]
        if route is not None:
            own = KIND_ATTRIBUTE in self._contents.groups.get(name, ())  # dsprep's own encoding
            attrs = self._attributes(path, self._contents.open(name if own else path))
            return Indexed(self._open(path), route, name, attrs)
        if stored_type.vlen and len(stored_type.shape) != (0 if whole_file else 1):
            self._leave_out(path)
            return None
        attrs = self._attributes(path)
        if whole_file:
            field = Field(name, stored_type.dtype, stored_type.shape, attrs=attrs)
            if stored_type.vlen:
                field = Field(name, stored_type.dtype, (None,), stored_type.kind, attrs)
            return OnDemand(partial(self._whole, path), field)
        if stored_type.vlen:
            return self._sequences(path, attrs, False)
        rows = self._new_rows(path)
        rows.field = replace(rows.field, name=name, attrs=attrs)
        return rows

    def _open(self, path: str) -> Rows:
        """Return the rows of a dataset, which fields and tables share."""
        if path not in self._rows:
            self._rows[path] = self._new_rows(path)
        return self._rows[path]

    def _new_rows(self, path: str, *, whole: bool = False) -> Rows:
        where = f"{self._path}, field {path}"
        return Rows(self._contents.open(path), self._datasets[path], self._disk, where, whole)

    def _sequences(self, path: str, attrs: Attrs, whole: bool) -> Sequences:
        dataset, where = self._contents.open(path), f"{self._path}, field {path}"
        stored_type = self._datasets[path]
        return Sequences(dataset, stored_type, self._disk, self._heaps, where, attrs, whole)

    def _whole(self, path: str) -> FieldColumn:
        """Return a dataset as the only sample."""
        if self._datasets[path].vlen:
            return self._sequences(path, {}, True)
        return self._new_rows(path, whole=True)

    def _attributes(self, path: str, item: Any = None) -> Attrs:
        """Return the attributes of a dataset, or of an `item` that has them for it."""
        if item is None and path not in self._contents.attributed:
            return dict(self._stated.attrs.get(path, {}))
        item = self._contents.open(path) if item is None else item
        attrs, lost = read_attributes(item, self._heaps.sound)
        own = bookkeeping(attrs)
        attrs = {name: value for name, value in attrs.items() if name not in own}
        lost = [name for name in lost if name not in own]
        if self._contents.scales:
            attrs = {name: _of_netcdf(value) for name, value in attrs.items()}
        if lost:
            self._lost.setdefault(("attributes of ", samples.listed(lost)), []).append(path)
        attrs |= self._stated.attrs.get(path, {}) if path in self._datasets else {}
        return attrs

    def _read_attributes(self, path: str) -> Attrs:
        return read_attributes(self._contents.open(path), self._heaps.sound)[0]

    # --- what does not fit ---

    def _check_there(self, path: str) -> None:
        if path in self._contents.left_out:
            raise SchemaError(
                f"{path} cannot be a field: {self._contents.left_out[path]}", where=self._path
            )
        if path not in self._datasets:
            raise missing_field(path, self._datasets, self._path)

    def _leave_out(self, path: str) -> None:
        """Note that a dataset of sequences cannot be a field, or raise if it was asked for."""
        reason = "sequences of variable length are read only from one axis of samples"
        if self._specs:
            shape = self._datasets[path].shape
            raise SchemaError(f"field {path}: {reason}", where=self._path, found=shape)
        self._lost.setdefault(("", reason), []).append(path)

    def _note_lost(self) -> None:
        for (what, reason), paths in self._lost.items():
            self.notes.append(f"left out {what}{samples.listed(paths)}: {reason}")

    def _nothing(self) -> FormatError:
        self._note_lost()
        notes = "; ".join(self.notes) or None
        return FormatError("no dataset can be a field", where=self._path, found=notes)

    def _note_losses(self) -> None:
        """Note the attributes of groups, and the names of enum members."""
        import h5py

        filled = {
            "/".join(p.split("/")[:k]) for p in self._datasets for k in range(p.count("/") + 1)
        }
        if empty := sorted(self._contents.groups.keys() - filled - {""}, key=samples.natural_key):
            self.notes.append(f"{samples.listed(empty)}: groups without datasets")
        owners = [
            path
            for path, names in self._contents.groups.items()
            if path and KIND_ATTRIBUTE not in names and "CLASS" not in names
            if has_attributes(names)
        ]
        if owners:
            self.notes.append(f"attributes of {samples.listed(owners)} are not kept")
        datasets = {n: c.dataset for n, (c, _) in self.columns.items() if c.dataset is not None}
        enums = [n for n, d in datasets.items() if h5py.check_enum_dtype(d.dtype)]
        if enums:
            self.notes.append(f"enum names of {samples.listed(enums)} are not kept")

    def _refuse_what_is_stated(self) -> None:
        if self._stated.refused and self._mode == "auto" and not self._specs and not self._own:
            reason, fix = self._stated.refused
            raise SchemaError(reason, where=self._path, fix=f"{fix}, or name fields: --field NAME")


def _of_netcdf(value: Any) -> Any:
    """Return an attribute as netCDF means it: characters are text, and one value is a scalar."""
    if isinstance(value, np.ndarray) and value.shape == (1,):
        value = value[0].item() if value.dtype.kind == "U" else value[0]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
