"""HDF5 files as samples.

Fields that can be located are read at their offsets, as a sidecar's readers read them; everything
else goes through the library, whose lock then serialises the threads.

Values that need index tables to be found (`dsprep.formats.hdf5.structure`) are ragged fields. The
tables between the samples and the values are ragged fields too; their column of first rows is
made to count from 0 in each sample, so that it points into the sample's own values. The first
table is not a field: it says only where samples begin.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Batch, Field, FieldSpec, Schema
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats import samples
from dsprep.formats.base import Layout, OpenOptions, Source, missing_field, retype, wanted
from dsprep.formats.hdf5 import describe, structure
from dsprep.formats.hdf5.attributes import (
    KIND_ATTRIBUTE,
    LAYOUT_ATTRIBUTE,
    Descriptors,
    has_attributes,
    read_attributes,
)
from dsprep.formats.hdf5.columns import FieldColumn, Fixed, Indexed, PerGroup, Sequences
from dsprep.formats.hdf5.datasets import Elsewhere, walk
from dsprep.formats.hdf5.dtypes import has_enum
from dsprep.formats.hdf5.grids import Unlocated
from dsprep.formats.hdf5.guard import library, open_file
from dsprep.formats.hdf5.rows import Rows, Table
from dsprep.formats.hdf5.sequences import Heaps, Lengths
from dsprep.formats.hdf5.structure import Ragged, Route, discover, table_of
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.columns import fetch
from dsprep.reading.files import File


class Hdf5Source(Source):
    """One HDF5 file opened for reading."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self.path = path
        self._options = options
        self._disk = File(path)
        self._file: Any = None
        try:
            with library(path, "the HDF5 file cannot be opened"):
                self._file = open_file(path)
                plist = self._file.id.get_create_plist()
                superblock = plist.get_version()[0]
                base, widths = plist.get_userblock(), plist.get_sizes()
                fd, nbytes = self._disk.fd, self._disk.nbytes
                self._heaps = Heaps(fd, nbytes, base, widths, path)
                self._descriptors = Descriptors(fd, nbytes, base, widths, self._heaps)
                self._own = LAYOUT_ATTRIBUTE in self._file.attrs
            self.version = f"HDF5, superblock {superblock}"
            self._open_fields()
        except BaseException:
            self.close()
            raise

    # --- finding the fields ---

    def _open_fields(self) -> None:
        self._rows: dict[str, Rows] = {}
        self._notes: list[str] = []
        elsewhere = Elsewhere(self.path, self._options.follow_external)
        self._contents = walk(self._file, self.path, elsewhere)
        if elsewhere.read:
            self._notes.append(f"values are in other files: {samples.listed([*elsewhere.read])}")
        if not self._contents.datasets:
            why = [f"{p}: {reason}" for p, reason in self._contents.left_out.items()]
            raise FormatError(
                "the file holds no datasets that can be fields",
                where=self.path,
                found=samples.listed(why) if why else "no datasets",
            )
        specs = self._options.fields
        grouped = self._per_group()
        ragged = Ragged()
        with library(self.path, "the fields cannot be found"):
            if self._options.sample_axis != "none" and grouped is None:
                ragged = discover(self._contents, self._open_rows, self.path, own=self._own)
            available = self._ragged_columns(ragged)
            explicit = self._explicit_columns(specs)
        skip = ragged.used | ragged.left_out | {path for path, _ in ragged.routes.values()}
        plain = [p for p in self._contents.datasets if p not in skip]
        if specs:
            plain = [s.path for s in specs if not s.index and s.path in self._contents.datasets]
            plain = [p for p in dict.fromkeys(plain) if p not in available]
            asked = [s.path for s in specs if not s.index and s.path in available]
            available = {path: available[path] for path in asked}
        self._notes += ragged.notes if not specs else []
        if grouped is not None:
            columns, explicit = self._group_columns(grouped), {}
        else:
            columns = self._choose_axis(available | explicit, plain)
        self._choose_fields(columns, explicit)
        if not specs:
            self._notes += [f"left out {p}: {why}" for p, why in self._contents.left_out.items()]
        self._note_losses()
        attrs, lost = read_attributes(self._file, self._descriptors.sound)
        if lost:
            self._notes.append(f"left out attributes of the file: {samples.listed(lost)}")
        self.schema = Schema(self.schema.fields, attrs)
        self.notes = tuple(self._notes)

    def _per_group(self) -> structure.Samples | None:
        """Return the groups that are samples, if there are such.

        Raises
        ------
        SchemaError
            If that is doubtful, and the user does not say.
        """
        mode, specs = self._options.sample_axis, self._options.fields
        if mode not in ("auto", "groups") or self._own or any(s.index for s in specs):
            return None
        if mode == "auto" and any(s.path in self._contents.datasets for s in specs):
            return None
        found = structure.sample_groups(self._contents)
        sure = [f for f in found if isinstance(f, structure.Samples)]
        asked = [f if isinstance(f, structure.Samples) else f.samples for f in found]
        if specs:
            spelled = mode == "groups" or any("/*/" in f"/{s.path}" for s in specs)
            fits = [f for f in (asked if spelled else sure) if f is not None and f.has(specs)]
            if len(fits) == 1:
                return fits[0]
            if mode == "auto":
                return None
        elif len(found) == 1:
            if mode == "groups" and asked[0] is not None:
                return asked[0]
            if mode == "auto" and sure:
                self._notes.append(f"each group is a sample: {sure[0]}")
                return sure[0]
        elif mode == "auto" and not found:
            return None
        raise self._doubtful(found)

    def _doubtful(self, found: list[structure.Samples | structure.Doubt]) -> SchemaError:
        """Return the error for groups that may be samples, with what each reading gives."""
        if not found:
            return SchemaError(
                "no groups side by side hold the same datasets",
                where=self.path,
                fix="leave out --sample-axis groups",
            )
        ways = []
        reason = "several groups hold such groups"
        several = len(found) > 1
        for each in found:
            if isinstance(each, structure.Doubt):
                reason = each.reason
            groups = each if isinstance(each, structure.Samples) else each.samples
            if groups is not None:
                name = groups.field(next(iter(groups.members)))
                field = f" --field NAME={name}" if several else ""
                ways.append(f"--sample-axis groups{field}: {groups}")
        arrays = {p: (w.shape, w.nbytes) for p, (_, w) in self._contents.datasets.items()}
        first = samples.choose(arrays, "first")
        names = samples.listed(list(first.names))
        ways.append(f"--sample-axis first: {first.count} samples with the fields {names}")
        ways.append("--field takes what is named")
        return SchemaError(
            f"groups that are alike may be samples, or not: {reason}",
            where=self.path,
            fix="say what they are: " + "; ".join(ways),
        )

    def _group_columns(self, found: structure.Samples) -> dict[str, FieldColumn]:
        """Return the columns of a file with a group per sample; see `_choose_axis`."""
        self._count = len(found.groups)
        datasets = self._contents.datasets
        columns: dict[str, FieldColumn] = {}
        asked = [s.path for s in self._options.fields]
        others, nbytes, more = set(datasets), 0, 0
        for member, shapes in found.members.items():
            paths = [f"{group}/{member}" for group in found.groups]
            others.difference_update(paths)
            nbytes += sum(datasets[p][1].nbytes for p in paths)
            more += sum(has_attributes(datasets[p][0]) for p in paths[1:])

            def part(i: int, paths: list[str] = paths) -> Fixed | Sequences:
                dataset, what = datasets[paths[i]]
                where = f"{self.path}, field {paths[i]}"
                if what.vlen:
                    lengths = Lengths(dataset, self._disk, where, self._heaps)
                    return Sequences(lengths, what, {}, whole=True)
                return Fixed(Rows(dataset, what, self._disk, where, whole=True), {})

            if datasets[paths[0]][1].vlen and shapes.shape[1]:
                self._leave_out(paths[0])
                continue
            attrs = self._attributes(paths[0])
            column = PerGroup(part, shapes, datasets[paths[0]][1], attrs)
            columns[found.field(member) if found.field(member) in asked else member] = column
        if more and not asked:
            self._notes.append(
                "attributes of the first sample's datasets are kept, not the others'"
            )
        if self._options.sample_axis == "auto" and not asked:
            arrays = {p: (what.shape, what.nbytes) for p, (_, what) in datasets.items()}
            samples.check_share(arrays, datasets.keys() - others, str(found), self.path)
        if others and not asked:
            ordered = [p for p in datasets if p in others]
            self._notes.append(f"left out {samples.listed(ordered)}: not in the samples' groups")
        return columns

    def _note_losses(self) -> None:
        """Note the group attributes and the names of enum members around the chosen fields."""
        enums, around = [], set[str]()
        with library(self.path, "the fields cannot be described"):
            for name, (column, _) in self._columns.items():
                dataset = column.dataset
                if has_enum(dataset.dtype):
                    enums.append(name)
                parts = str(dataset.name).strip("/").split("/")
                around.update("/".join(parts[:k]) for k in range(1, len(parts)))
            groups = [
                path
                for path, group in self._contents.groups.items()
                if path
                and (path in around or not self._options.fields)
                and KIND_ATTRIBUTE not in group.attrs  # those are the field's attributes
                and has_attributes(group)
            ]
        if groups:
            several = "group" if len(groups) == 1 else "groups"
            self._notes.append(f"attributes of {several} {samples.listed(groups)} are not kept")
        if enums:
            self._notes.append(f"enum names of {samples.listed(enums)} are not kept")

    def _open_rows(self, path: str, *, whole: bool = False) -> Rows:
        key = f"{path}\0" if whole else path
        if key not in self._rows:
            dataset, what = self._contents.datasets[path]
            where = f"{self.path}, field {path}"
            self._rows[key] = Rows(dataset, what, self._disk, where, whole=whole)
        return self._rows[key]

    def _attributes(self, path: str, group: str | None = None) -> dict[str, Any]:
        item = self._contents.datasets[path][0] if group is None else self._contents.groups[group]
        attrs, lost = read_attributes(item, self._descriptors.sound)
        if lost:
            self._notes.append(f"left out attributes of {path}: {samples.listed(lost)}")
        return attrs

    def _ragged_columns(self, ragged: Ragged) -> dict[str, FieldColumn]:
        columns: dict[str, FieldColumn] = {}
        for name, (path, way) in ragged.routes.items():
            group = None if name == path else name
            attrs = self._attributes(path, group)
            columns[name] = Indexed(self._open_rows(path), way, attrs)
        return columns

    def _explicit_columns(self, specs: tuple[FieldSpec, ...]) -> dict[str, FieldColumn]:
        """Return the columns of fields that were given with their index tables.

        Their names here are those of the dataset and the tables, since one dataset may be asked
        for in several ways.
        """
        columns: dict[str, FieldColumn] = {}
        for spec in specs:
            if spec.index:
                self._check_there(spec.path)
                tables = tuple(self._explicit_table(entry) for entry in spec.index)
                way = Route(tables, spec.index)
                attrs = self._attributes(spec.path)
                column = Indexed(self._open_rows(spec.path), way, attrs)
                columns[_spelled(spec)] = column
        return columns

    def _check_there(self, path: str) -> None:
        if path in self._contents.left_out:
            raise SchemaError(
                f"{path} cannot be a field: {self._contents.left_out[path]}", where=self.path
            )
        if path not in self._contents.datasets:
            raise missing_field(path, self._contents.datasets, self.path)

    def _explicit_table(self, entry: str) -> Table:
        parts = [p.strip().strip("/") for p in entry.split(",")]
        for part in parts:
            self._check_there(part)
        table = table_of(parts, self._contents, self._open_rows) if len(parts) <= 2 else None
        if table is None:
            raise UsageError(
                f"{entry} is not an index table",
                where=self.path,
                expected="a table with members such as first and count, one of (first, count) "
                "rows, or FIRST,COUNT",
            )
        return table

    def _choose_axis(
        self, indexed: dict[str, FieldColumn], plain: list[str]
    ) -> dict[str, FieldColumn]:
        """Return the columns by name, in the file's order, all with the same number of samples."""
        arrays: dict[str, tuple[tuple[int, ...], int]] = {}
        for name, column in indexed.items():
            if isinstance(column, Indexed):
                arrays[name] = ((column.count,), column.rows.count * column.rows.row_nbytes)
        for path in self._readable(plain):
            what = self._contents.datasets[path][1]
            arrays[path] = (what.shape, what.nbytes)
        specs = self._options.fields
        for spec in specs:
            if not spec.index and spec.path not in arrays:
                self._check_there(spec.path)
        mode = self._options.sample_axis
        if mode == "auto" and (indexed or self._own):
            mode = "first"
        elif mode == "auto" and frozenset(self._contents.datasets) in samples.WHOLE_FILE:
            mode = "none"
            self._notes.append(samples.ONE_SAMPLE)
        if not arrays:
            raise FormatError(
                "no dataset can be a field", where=self.path, found="; ".join(self._notes) or None
            )
        axis = samples.choose(arrays, "none" if mode == "groups" else mode, self.path)
        self._check_agreement(arrays, axis)
        self._count = axis.count
        self._notes += axis.notes
        chosen: dict[str, FieldColumn] = {}
        for name in axis.names:
            found = indexed.get(name) or self._plain_column(name, axis.whole_file)
            if found is not None:
                chosen[name] = found
        order = {path: i for i, path in enumerate(self._contents.datasets)}
        return dict(sorted(chosen.items(), key=lambda item: order[_dataset_path(item)]))

    def _check_agreement(
        self, arrays: dict[str, tuple[tuple[int, ...], int]], axis: samples.SampleAxis
    ) -> None:
        """Raise `SchemaError` if a field that the user named has another number of samples."""
        if not self._options.fields:
            return
        for name, (shape, _) in arrays.items():
            if name not in axis.names:
                raise SchemaError(
                    f"field {name} has another number of samples than {axis.names[0]}",
                    where=self.path,
                    expected=axis.count,
                    found=shape[0] if shape else "no axis",
                    fix="leave one of them out, or take the file as one sample with "
                    "--sample-axis none",
                )

    def _readable(self, plain: list[str]) -> list[str]:
        """Return the datasets without those whose sequences no axis of samples can count."""
        found = []
        for path in plain:
            what = self._contents.datasets[path][1]
            if what.vlen and len(what.shape) > 1:
                self._leave_out(path)
            else:
                found.append(path)
        return found

    def _leave_out(self, path: str) -> None:
        """Note that a dataset of sequences cannot be a field, or raise if it was asked for."""
        reason = "sequences of variable length are read only from one axis of samples"
        if self._options.fields:
            shape = self._contents.datasets[path][1].shape
            raise SchemaError(f"field {path}: {reason}", where=self.path, found=shape)
        self._notes.append(f"left out {path}: {reason}")

    def _plain_column(self, path: str, whole: bool) -> FieldColumn | None:
        dataset, what = self._contents.datasets[path]
        if not what.vlen:
            return Fixed(self._open_rows(path, whole=whole), self._attributes(path))
        if len(what.shape) != (0 if whole else 1):
            self._leave_out(path)
            return None
        where = f"{self.path}, field {path}"
        lengths = Lengths(dataset, self._disk, where, self._heaps)
        return Sequences(lengths, what, self._attributes(path), whole)

    def _choose_fields(
        self, columns: dict[str, FieldColumn], explicit: dict[str, FieldColumn]
    ) -> None:
        available = {name: column.field(name) for name, column in columns.items()}
        specs = tuple(
            replace(s, path=_spelled(s), index=()) if _spelled(s) in explicit else s
            for s in self._options.fields
        )
        chosen = wanted(specs, available)
        if not chosen:
            raise FormatError(
                "no dataset can be a field", where=self.path, found="; ".join(self._notes) or None
            )
        self._columns: dict[str, tuple[FieldColumn, Field]] = {
            field.name: (columns[path], field) for path, field in chosen
        }
        self.schema = Schema(tuple(field for _, field in chosen))

    # --- the contract ---

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        columns = {
            name: column.begin(start, stop, arena, f"read.{name}")
            for name, (column, _) in self._columns.items()
        }
        # Without an arena each field has memory of its own, which lives as long as that field.
        alone = ({name: wanted} for name, wanted in columns.items())
        parts = alone if arena is None else [columns]
        found = {name: c for part in parts for name, c in fetch(part, arena).items()}
        return {
            name: retype(found[name], field, self.path, start)
            for name, (_, field) in self._columns.items()
        }

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the payload bytes of each sample; None where that takes reading them."""
        total = np.zeros(stop - start, np.int64)
        for column, _ in self._columns.values():
            sizes = column.sizes(start, stop)
            if sizes is None:
                return None
            total += sizes
        return total

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for: decoded chunks."""
        used: set[Rows | Lengths] = set()
        for column, _ in self._columns.values():
            used.update(column.datasets())
        return sum(dataset.resident for dataset in used)

    def layouts(self) -> dict[str, Layout]:
        """Return how each field is stored."""
        with library(self.path, "the layout cannot be read"):
            return {
                name: describe.layout(column, self._count)
                for name, (column, _) in self._columns.items()
            }

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every sample is; see `Source.extents`."""
        total, done = sum(column.steps for column, _ in self._columns.values()), 0

        def step(steps: int) -> None:
            nonlocal done
            if progress is not None and steps:
                done = min(total, done + steps)
                progress(done, total)

        found: dict[str, Column] = {}
        unlocated: dict[str, str] = {}
        for name, (column, field) in self._columns.items():
            where = f"{self.path}, field {name}"
            try:
                with library(where, "the field cannot be located"):
                    found[name] = column.locate(field, where, step)
            except Unlocated as reason:
                unlocated[name] = str(reason)
        step(total - done)  # chunks that are not stored, or known already, were not stepped over
        return FileLayout(self._count, columns=found, unlocated=unlocated)

    def loading_code(self) -> str:
        """Return a program that loads sample 0 with h5py."""
        with library(self.path, "the layout cannot be read"):
            return describe.program(self.path, self._columns)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError, RuntimeError):  # as `let_go`
                self._file.close()
            self._file = None
        self._disk.close()


def _spelled(spec: FieldSpec) -> str:
    """Return a field with its index tables as ``--field`` spells them."""
    return "@".join((spec.path, *spec.index))


def _dataset_path(item: tuple[str, FieldColumn]) -> str:
    """Return the path of the dataset with a column's values."""
    _, column = item
    return str(column.dataset.name).strip("/")
