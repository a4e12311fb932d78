"""The fields of an HDF5 file: what of it the user wants, and how each is read.

Datasets whose first axes count the samples are found by `dsprep.formats.samples`, ragged fields by
index tables and groups that are samples by `dsprep.formats.hdf5.structure`. Tables between the
samples and the values are ragged fields too; their column of first rows is made to count from 0 in
each sample, so that it points into the sample's own values. The first table is not a field: it
gives only where samples begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dsprep.core.schema import Attrs, FieldSpec
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats import samples
from dsprep.formats.base import OpenOptions, missing_field, wanted
from dsprep.formats.hdf5 import structure
from dsprep.formats.hdf5.attributes import (
    KIND_ATTRIBUTE,
    LAYOUT_ATTRIBUTE,
    has_attributes,
    read_attributes,
)
from dsprep.formats.hdf5.columns import FieldColumn, Fixed, Indexed, PerGroup, Sequences
from dsprep.formats.hdf5.datasets import Elsewhere, walk
from dsprep.formats.hdf5.dtypes import has_enum
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.heaps import Descriptors, Heaps
from dsprep.formats.hdf5.rows import IndexTable, Route, Rows
from dsprep.reading.files import File


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

    Raises
    ------
    FormatError
        If nothing can be a field, or the file is damaged.
    SchemaError, UsageError
        If a field that the user named does not fit, or what counts the samples is doubtful.
    """

    def __init__(self, file: Any, disk: File, options: OpenOptions) -> None:
        self._disk, self._path, self._specs = disk, disk.path, options.fields
        self._mode = options.sample_axis
        self._rows: dict[str, Rows] = {}
        self.notes: list[str] = []
        with library(self._path, "the HDF5 file cannot be opened"):
            plist = file.id.get_create_plist()
            self._heaps = Heaps(disk, plist.get_userblock(), plist.get_sizes())
            self._sound = Descriptors(self._heaps).sound
            self._own = LAYOUT_ATTRIBUTE in file.attrs
        elsewhere = Elsewhere(self._path, options.follow_external)
        self._contents = walk(file, self._path, elsewhere)
        self._datasets = self._contents.datasets
        self._arrays = {p: (what.shape, what.nbytes) for p, (_, what) in self._datasets.items()}
        left_out = [f"{p}: {reason}" for p, reason in self._contents.left_out.items()]
        if elsewhere.read:
            self.notes.append(f"values are in other files: {samples.listed([*elsewhere.read])}")
        if not self._datasets:
            raise FormatError(
                "the file holds no datasets that can be fields",
                where=self._path,
                found=samples.listed(left_out) or "no datasets",
            )
        groups = self._sample_groups()
        if groups is not None:
            self.count, columns = len(groups.groups), self._group_columns(groups)
        else:
            self.count, columns = self._array_columns()
        specs = [replace(s, path=_spelled(s), index=()) if s.index else s for s in self._specs]
        chosen = wanted(tuple(specs), {name: column.field for name, column in columns.items()})
        if not chosen:
            raise self._nothing()
        self.columns = {field.name: (columns[path], field) for path, field in chosen}
        self.notes += [] if specs else [f"left out {each}" for each in left_out]
        self._note_losses()
        self.attrs = self._attributes("the file", file)

    # --- datasets whose first axes count the samples ---

    def _array_columns(self) -> tuple[int, dict[str, FieldColumn]]:
        """Return the number of samples and the columns by name, in the file's order."""
        with library(self._path, "the fields cannot be found"):
            routes = self._routes()
        arrays: dict[str, tuple[tuple[int, ...], int]] = {}
        for name, (path, route) in routes.items():
            shape, nbytes = self._arrays[path]
            if route is not None:
                arrays[name] = (route.tables[0].rows,), nbytes
            elif len(shape) > 1 and self._datasets[path][1].vlen:
                self._leave_out(path)  # no axis of samples counts these sequences
            else:
                arrays[name] = shape, nbytes
        for spec in self._specs:
            if not spec.index and spec.path not in arrays:
                self._check_there(spec.path)
        if not arrays:
            raise self._nothing()
        mode = "none" if self._mode == "groups" else self._mode
        if mode == "auto" and (self._own or any(route for _, route in routes.values())):
            mode = "first"
        elif mode == "auto" and frozenset(self._datasets) in samples.WHOLE_FILE:
            mode = "none"
            self.notes.append(samples.ONE_SAMPLE)
        axis = samples.choose(arrays, mode, self._path)
        for name, (shape, _) in arrays.items() if self._specs else ():
            if name not in axis.names:
                raise SchemaError(
                    f"field {name} has another number of samples than {axis.names[0]}",
                    where=self._path,
                    expected=axis.count,
                    found=shape[0] if shape else "no axis",
                    fix="leave one of them out, or take the file as one sample with "
                    "--sample-axis none",
                )
        self.notes += axis.notes
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
        ragged = structure.RaggedRows()
        if self._mode != "none":
            ragged = structure.discover(self._contents, self._open, self._path, own=self._own)
        if not self._specs:
            self.notes += ragged.notes
            skip = ragged.used | ragged.left_out | {path for path, _ in ragged.routes.values()}
            return {**ragged.routes, **{p: (p, None) for p in self._datasets if p not in skip}}
        asked = [spec.path for spec in self._specs if not spec.index]
        routes: dict[str, tuple[str, Route | None]] = {
            path: ragged.routes[path] for path in asked if path in ragged.routes
        }
        for spec in self._specs:
            if spec.index:
                self._check_there(spec.path)
                if self._datasets[spec.path][1].vlen:
                    raise UsageError(
                        f"{spec.path} holds sequences of variable length, not rows",
                        where=self._path,
                        fix="name it without an index table",
                    )
                tables = tuple(map(self._table, spec.index))
                routes[_spelled(spec)] = spec.path, Route(tables, spec.index)
        for path in asked:
            if path in self._datasets:
                routes.setdefault(path, (path, None))
        return routes

    def _table(self, entry: str) -> IndexTable:
        """Return the index table that the user named."""
        parts = [p.strip().strip("/") for p in entry.split(",")]
        for part in parts:
            self._check_there(part)
        few = len(parts) <= 2
        table = structure.table_of(parts, self._contents, self._open) if few else None
        if table is None:
            raise UsageError(
                f"{entry} is not an index table",
                where=self._path,
                expected="a table with members such as first and count, one of (first, count) "
                "rows, or FIRST,COUNT",
            )
        return table

    def _column(self, name: str, path: str, route: Route | None, whole: bool) -> FieldColumn | None:
        dataset, what = self._datasets[path]
        if route is not None:
            group = self._contents.groups.get(name)  # dsprep's own encoding
            attrs = self._attributes(path, dataset if group is None else group)
            return Indexed(self._open(path), route, name, attrs)
        if what.vlen and len(what.shape) != (0 if whole else 1):
            self._leave_out(path)
            return None
        attrs = self._attributes(path, dataset)
        if what.vlen:
            return self._sequences(path, attrs, whole)
        rows = self._new_rows(path, whole=True) if whole else self._open(path)
        return Fixed(rows, name, attrs)

    def _open(self, path: str) -> Rows:
        """Return the rows of a dataset, which fields and tables share."""
        if path not in self._rows:
            self._rows[path] = self._new_rows(path)
        return self._rows[path]

    def _new_rows(self, path: str, *, whole: bool = False) -> Rows:
        dataset, what = self._datasets[path]
        return Rows(dataset, what, self._disk, f"{self._path}, field {path}", whole=whole)

    def _sequences(self, path: str, attrs: Attrs, whole: bool) -> Sequences:
        dataset, what = self._datasets[path]
        where = f"{self._path}, field {path}"
        return Sequences(dataset, what, self._disk, self._heaps, where, attrs, whole=whole)

    def _attributes(self, path: str, item: Any) -> Attrs:
        attrs, lost = read_attributes(item, self._sound)
        if lost:
            self.notes.append(f"left out attributes of {path}: {samples.listed(lost)}")
        return attrs

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
            shape = self._datasets[path][1].shape
            raise SchemaError(f"field {path}: {reason}", where=self._path, found=shape)
        self.notes.append(f"left out {path}: {reason}")

    def _nothing(self) -> FormatError:
        found = "; ".join(self.notes) or None
        return FormatError("no dataset can be a field", where=self._path, found=found)

    def _note_losses(self) -> None:
        """Note the group attributes and the names of enum members around the chosen fields."""
        enums, around = [], set[str]()
        with library(self._path, "the fields cannot be described"):
            for name, (column, _) in self.columns.items():
                if has_enum(column.dataset.dtype):
                    enums.append(name)
                parts = str(column.dataset.name).strip("/").split("/")
                around.update("/".join(parts[:k]) for k in range(1, len(parts)))
            groups = [
                path
                for path, group in self._contents.groups.items()
                if path
                and (path in around or not self._specs)
                and KIND_ATTRIBUTE not in group.attrs  # those are the field's attributes
                and has_attributes(group)
            ]
        if groups:
            several = "group" if len(groups) == 1 else "groups"
            self.notes.append(f"attributes of {several} {samples.listed(groups)} are not kept")
        if enums:
            self.notes.append(f"enum names of {samples.listed(enums)} are not kept")

    # --- a group per sample ---

    def _sample_groups(self) -> structure.Samples | None:
        """Return the groups that are samples, if there are such and nobody can doubt it."""
        mode, specs = self._mode, self._specs
        if mode not in ("auto", "groups") or self._own or any(s.index for s in specs):
            return None
        if mode == "auto" and any(s.path in self._datasets for s in specs):
            return None
        found = structure.sample_groups(self._contents)
        if specs:
            spelled = mode == "groups" or any("/*/" in f"/{s.path}" for s in specs)
            fits = [d.samples for d in found if spelled or not d.reason]
            fits = [f for f in fits if f is not None and f.has(specs)]
            if len(fits) == 1:
                return fits[0]
            if mode == "auto":
                return None
        elif len(found) == 1:
            only = found[0].samples
            if mode == "groups" and only is not None:
                return only
            if mode == "auto" and not found[0].reason:
                self.notes.append(f"each group is a sample: {only}")
                return only
        elif mode == "auto" and not found:
            return None
        raise self._doubtful(found)

    def _doubtful(self, found: Sequence[structure.Judged]) -> SchemaError:
        """Return the error for groups that may be samples, with what each reading gives."""
        if not found:
            return SchemaError(
                "no groups side by side hold the same datasets",
                where=self._path,
                fix="leave out --sample-axis groups",
            )
        ways = []
        reason = "several groups hold such groups"
        for each in found:
            reason = each.reason or reason
            if each.samples is not None:
                name = each.samples.field(next(iter(each.samples.members)))
                field = f" --field NAME={name}" if len(found) > 1 else ""
                ways.append(f"--sample-axis groups{field}: {each.samples}")
        first = samples.choose(self._arrays, "first")
        names = samples.listed(list(first.names))
        ways.append(f"--sample-axis first: {first.count} samples with the fields {names}")
        ways.append("--field takes what is named")
        return SchemaError(
            f"groups that are alike may be samples, or not: {reason}",
            where=self._path,
            fix="say what they are: " + "; ".join(ways),
        )

    def _group_columns(self, found: structure.Samples) -> dict[str, FieldColumn]:
        """Return the columns of a file with a group per sample."""
        columns: dict[str, FieldColumn] = {}
        asked = [s.path for s in self._specs]
        others, more = dict(self._datasets), 0
        for member, shapes in found.members.items():
            paths = [f"{group}/{member}" for group in found.groups]
            for path in paths:
                del others[path]
            more += sum(has_attributes(self._datasets[p][0]) for p in paths[1:])
            dataset, what = self._datasets[paths[0]]
            if what.vlen and what.shape:
                self._leave_out(paths[0])
                continue

            def part(i: int, paths: list[str] = paths) -> FieldColumn:
                if self._datasets[paths[i]][1].vlen:
                    return self._sequences(paths[i], {}, True)
                return Fixed(self._new_rows(paths[i], whole=True), paths[i], {})

            attrs = self._attributes(paths[0], dataset)
            name = found.field(member) if found.field(member) in asked else member
            columns[name] = PerGroup(part, shapes, what, name, attrs)
        if not asked:
            if more:
                self.notes.append(
                    "attributes of the first sample's datasets are kept, not the others'"
                )
            if self._mode == "auto":
                kept = self._datasets.keys() - others
                samples.check_share(self._arrays, kept, str(found), self._path)
            if others:
                named = samples.listed([*others])
                self.notes.append(f"left out {named}: not in the samples' groups")
        return columns


def _spelled(spec: FieldSpec) -> str:
    """Return a field with its index tables as ``--field`` spells them."""
    return "@".join((spec.path, *spec.index))
