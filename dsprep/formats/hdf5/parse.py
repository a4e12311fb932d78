"""Parsing an HDF5 file: which of its datasets are fields, and how their samples are counted.

Datasets whose first axes count the samples are found by `dsprep.formats.samples`. Ragged fields are
those of dsprep's own encoding, a group with the attribute ``dsprep_kind`` and the datasets
``values``, ``first`` and ``count``, and what `dsprep.formats.ragged` finds.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Attrs, Field, known_axes
from dsprep.errors import FormatError, SchemaError, UsageError, require
from dsprep.formats import samples
from dsprep.formats.choice import choose_fields
from dsprep.formats.conventions import Stated, state_common, text_of
from dsprep.formats.hdf5.attributes import (
    CAPACITY_ATTRIBUTE,
    KIND_ATTRIBUTE,
    LAYOUT_ATTRIBUTE,
    STATIC_ATTRIBUTE,
    has_attributes,
    marked,
    read_attributes,
)
from dsprep.formats.hdf5.datasets import SEQUENCES, Contents, walk
from dsprep.formats.hdf5.dimensions import NOTHING, bookkeeping, read_dimensions
from dsprep.formats.hdf5.fields import DatasetField, SequenceField
from dsprep.formats.hdf5.guard import hdf5_errors, open_hdf5
from dsprep.formats.index_tables import Route
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import ArrayTree, RaggedField
from dsprep.layout.model import FileLayout
from dsprep.storage.paths import open_file


def open_source(path: Path, options: OpenOptions) -> LocatedSource:
    """Open a file for reading; see `base.Format.open`."""
    disk, opened = open_file(path), list[Any]()

    def close() -> None:
        for file in opened:
            with suppress(OSError, RuntimeError):  # as `close_quietly`
                file.close()
        disk.close()

    with failure_closes(close):
        with hdf5_errors(path, "the HDF5 file cannot be opened"):
            opened.append(open_hdf5(path))
            number = opened[0].id.get_create_plist().get_version()[0]
        parsed = Fields(walk(opened[0], disk, follow=options.follow_external), options).parsed
        parsed = replace(parsed, version=f"HDF5, superblock {number}{parsed.version}")
        return LocatedSource(path, parsed, options, disk.opened, close)


_FEW, _MOST_DIGITS = 64, 18

AnyField: TypeAlias = DatasetField | RaggedField


class Fields:
    """The choice of the fields in the contents of a file.

    Attributes
    ----------
    parsed
        What the file holds; the version is what adds to that of the superblock.

    Raises
    ------
    FormatError
        If nothing can be a field, or the file is damaged.
    SchemaError, UsageError
        If a field that the user named does not fit, or what counts the samples is doubtful.
    """

    def __init__(self, contents: Contents, options: OpenOptions) -> None:
        self._contents, self._path, self._specs = contents, contents.where, options.fields
        self._datasets = contents.datasets
        self._open = partial(DatasetField, contents)
        self._lost: dict[tuple[str, str], list[str]] = {}  # what is left out, and why
        with hdf5_errors(self._path, "the HDF5 file cannot be opened"):
            self._own = LAYOUT_ATTRIBUTE in contents.file.attrs
        self._stated = Stated()  # until its attributes have been read
        self._stated = self._state()
        if options.keys_as is not None:
            raise UsageError("--keys-as applies where each group is a sample", where=self._path)
        with hdf5_errors(self._path, "the fields cannot be found"):
            axis, routes = choose_fields(
                ArrayTree(
                    self._datasets,
                    {
                        path: names if has_attributes(names) and "CLASS" not in names else ()
                        for path, names in contents.groups.items()
                    },
                ),
                self._open,
                options,
                self._path,
                stated=self._stated,
                own=self._own,
                marked=self._marked(),
                refused=contents.left_out,
            )
        fields, notes = (
            dict[str, AnyField](),
            [note for note in axis.notes if not note.endswith(NOTHING)],
        )
        if contents.elsewhere:
            notes.append(f"values are in other files: {samples.listed([*contents.elsewhere])}")
        for name, route in routes.items():
            field = self._field(name, *route, axis.whole_file)
            if field is not None:
                fields[name] = field
        if not self._specs:
            notes += samples.unapplied({n: f.field.attrs for n, f in fields.items()})
            notes += self._losses(fields)
        attrs = {**self._attributes("the file", contents.file)}
        for (kind, reason), paths in self._lost.items():
            notes.append(f"left out {kind}{samples.listed(paths)}: {reason}")
        if not fields:
            problem = "no dataset can be a field"
            raise FormatError(problem, where=self._path, found="; ".join(notes) or None)
        # netCDF-C since 4.4.1 and h5netcdf
        netcdf = attrs.pop("_NCProperties", None) is not None
        self.parsed = Parsed(
            version=" (netCDF-4)" if netcdf else "",
            fields={name: each.field for name, each in fields.items()},
            layout=FileLayout(axis.count),
            lazy=fields,
            attrs=attrs,
            notes=tuple(notes),
            others=axis.others,
        )

    def _state(self) -> Stated:
        """Return what the file states about its datasets; dsprep's own: only non-fields."""
        contents = self._contents
        with hdf5_errors(self._path, "the dimensions cannot be read"):
            axes = read_dimensions(contents, self._read_attributes)
        facts = Stated()
        if self._own:
            names = (marked(contents.file, STATIC_ATTRIBUTE, self._path) or "").split("\0")
            facts.aside |= dict.fromkeys((n for n in names if n), samples.STATIC)
        else:
            tree = ArrayTree(self._datasets, contents.groups)
            state_common(tree, self._read_attributes, facts)
            for path, reason in facts.left_out.items():
                contents.leave_out(path, reason)
            facts.refused = facts.refused or self._one_image()
            facts.axes.update((path, names[0]) for path, names in axes.items() if names[0])
        for path, names in axes.items():
            more = known_axes(path, [name.rpartition("/")[2] for name in names])
            facts.attrs[path] = {**facts.attrs.get(path, {}), **more}
        return facts

    def _one_image(self) -> tuple[str, str] | None:
        """Return why rows of an image are not samples: HDF5 Image and Palette Specification."""
        attributed = self._contents.attributed
        for path in attributed if len(attributed) <= _FEW else ():
            there = path in self._datasets and 2 <= len(self._datasets[path].shape) <= 3
            if there and text_of(self._read_attributes(path).get("CLASS")) == "IMAGE":
                reason = f"{path} is one image, as its attribute CLASS states"
                return reason, "--sample-axis none takes the file as one sample"
        return None

    def _marked(self) -> dict[str, tuple[str | None, int]]:
        """Return the groups in dsprep's own encoding of ragged fields: kind and capacity."""
        contents, groups = self._contents, {}
        for name in (n for n, names in contents.groups.items() if KIND_ATTRIBUTE in names):
            group = contents.open(name)
            capacity = marked(group, CAPACITY_ATTRIBUTE) or "0"
            require(
                capacity.isdecimal() and len(capacity) <= _MOST_DIGITS,
                FormatError,
                f"attribute {CAPACITY_ATTRIBUTE} is not a number of rows",
                where=f"{self._path}, field {name}",
                found=capacity[:40],
            )
            groups[name] = marked(group, KIND_ATTRIBUTE), int(capacity)
        return groups

    def _field(
        self, name: str, path: str, route: Route | None, whole_file: bool
    ) -> AnyField | None:
        stored = self._datasets[path]
        if route is not None:
            own = KIND_ATTRIBUTE in self._contents.groups.get(name, ())  # dsprep's own encoding
            attrs = self._attributes(path, self._contents.open(name if own else path))
            values = self._open(path)
            field = Field(name, values.dtype, (None, *values.field.shape), route.kind, attrs)
            return RaggedField(values, route, field)
        if whole_file and stored.vlen and stored.shape:
            if self._specs:
                raise SchemaError(
                    f"field {path}: {SEQUENCES}", where=self._path, found=stored.shape
                )
            self._lost.setdefault(("", SEQUENCES), []).append(path)
            return None
        attrs = self._attributes(path)
        if stored.vlen:
            field = Field(name, stored.dtype, (None,), stored.kind, attrs)
            made: DatasetField = SequenceField(self._contents, path, field, whole_file)
        else:
            inner = stored.shape if whole_file else stored.shape[1:]
            field = Field(name, stored.dtype, inner, attrs=attrs)
            made = DatasetField(self._contents, path, field, whole_file)
        if not whole_file:
            made.dataset()  # whose filters and other files have to be there
        return made

    def _attributes(self, path: str, item: Any = None) -> Attrs:
        """Return the attributes of a dataset, or of an `item` that has them for it."""
        stated = self._stated.attrs.get(path, {})
        if item is None and path not in self._contents.attributed:
            return dict(stated)
        item = self._contents.open(path) if item is None else item
        attrs: Attrs
        attrs, lost = read_attributes(item, self._contents.heaps.sound)
        own = bookkeeping(attrs)
        attrs = {name: value for name, value in attrs.items() if name not in own}
        lost = [name for name in lost if name not in own]
        if self._contents.scales:
            attrs = {name: _of_netcdf(value) for name, value in attrs.items()}
        if lost:
            self._lost.setdefault(("attributes of ", samples.listed(lost)), []).append(path)
        return {**attrs, **(stated if path in self._datasets else {})}

    def _read_attributes(self, path: str) -> Attrs:
        return read_attributes(self._contents.open(path), self._contents.heaps.sound)[0]

    def _losses(self, fields: dict[str, AnyField]) -> list[str]:
        """Return notes on groups without datasets, and the names of enum members."""
        notes = []
        filled = {
            "/".join(p.split("/")[:k]) for p in self._datasets for k in range(p.count("/") + 1)
        }
        groups = self._contents.groups
        if empty := sorted(groups.keys() - filled - {""}, key=samples.natural_key):
            notes.append(f"{samples.listed(empty)}: groups without datasets")
        if enums := [name for name in self._contents.enums if name in fields]:
            notes.append(f"enum names of {samples.listed(enums)} are not kept")
        return notes


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
