"""Samples along another axis than the first, or in groups side by side.

A file is opened as one sample, whose arrays hold samples in another way. These have no offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TypeAlias

import numpy as np

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Array, Field, FieldSpec, Ragged
from dsprep.core.schema import Column as Values
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.base import Format, Source
from dsprep.formats.fields import missing_field
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.located import LazyField, LocatedSource, Parsed, Unlocated
from dsprep.formats.options import OpenOptions, memory_error
from dsprep.formats.samples import Beside, Sized, ambiguous, groups_named, listed
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column, FileLayout
from dsprep.storage.paths import open_file

Turned: TypeAlias = tuple[Parsed, tuple[FieldSpec, ...]]
"""The content of a file, and the requested fields of it; none: all."""


@dataclass
class TurnedField(LazyField):
    """A field whose samples have no offsets in the file.

    Attributes
    ----------
    rows
        Returns samples of a half-open range.
    access
        The way in which they are read, for a person.
    nbytes
        Bytes that this holds.
    """

    rows: Callable[[int, int], Values]
    access: str
    nbytes: int = 0

    def locate(self) -> Column:
        """Raise `Unlocated`."""
        raise Unlocated("its samples have no offsets")

    def storage(self) -> FieldStorage:
        """Return how it is stored."""
        return FieldStorage(storage="no range of bytes per sample", access=self.access)

    def read(self, start: int, stop: int) -> Values:
        """Return samples ``start <= i < stop``."""
        return self.rows(start, stop)

    def resident_nbytes(self) -> int:
        """Return the bytes that it holds."""
        return self.nbytes


def is_turned(options: OpenOptions) -> bool:
    """Return whether `open_turned` opens files with these options."""
    groups = options.sample_axis == "groups" or (
        options.sample_axis == "auto" and any("*" in s.path for s in options.fields)
    )
    plain = options.sample_axis in ("auto", "first", "none", "groups")
    return not plain or groups


def open_turned(
    open_base: Callable[[OpenOptions], Source], options: OpenOptions, format: Format
) -> LocatedSource:
    """Return the file that `open_base` opens with options, as one sample, turned.

    Raises
    ------
    SchemaError
        If fields have no such axis, of one length, or groups are not alike.
    """
    numbered = options.sample_axis not in ("auto", "groups")
    alone = replace(options, sample_axis="none")
    base = open_base(alone if numbered else replace(alone, fields=(), keys_as=None))
    with failure_closes(base.close):
        keyed = "keys_as" in format.open_options
        parsed, specs = _along_axis(base, options) if numbered else _of_groups(base, options, keyed)
        return LocatedSource(
            base.path, parsed, replace(options, fields=specs), open_file, base.close
        )


def _along_axis(base: Source, options: OpenOptions) -> Turned:
    """Return the fields without the axis that counts the samples."""
    axis, notes = int(options.sample_axis.replace("last", "-1")), [*base.notes]
    fields, counts = dict[str, Field](), dict[int, str]()
    for f in base.schema:
        if not f.shape and len(base.schema) > 1:
            notes.append(f"left out {f.name}: no axis")
            continue
        if f.ragged or not -len(f.shape) <= axis < len(f.shape):
            raise SchemaError(
                f"{f.name} has no axis {axis}", where=base.path, found=f, fix="leave it out"
            )
        shape = list(f.shape)
        counts[int(shape.pop(axis) or 0)] = f.name
        fields[f.name] = replace(f, shape=tuple(shape))
    if len(counts) > 1:
        raise SchemaError(
            "fields differ in the number of their samples",
            where=base.path,
            found=", ".join(f"{name}: {n}" for n, name in counts.items()),
            fix="name those that go together: --field NAME",
        )
    lock, kept = Lock(), dict[str, Array]()

    def rows(name: str, start: int, stop: int) -> Array:
        with lock:
            if name not in kept:
                _check_memory(base, options.memory_limit)
                kept[name] = np.moveaxis(np.asarray(base.read_field(name)[0]), axis, 0)
        return kept[name][start:stop]

    lazy = {
        name: TurnedField(
            partial(rows, name), "the file is read once", base.schema[name].row_nbytes
        )
        for name in fields
    }
    return _parsed(base, next(iter(counts)), fields, lazy, notes), ()


def _check_memory(base: Source, limit: int) -> None:
    if (needed := base.schema.fixed_nbytes) > limit:
        raise memory_error(
            "the file is read whole, as its samples have no offsets",
            needed,
            limit,
            where=base.path,
            fix=f"raise --memory, or {WAY_OUT}",
        )


def _of_groups(base: Source, options: OpenOptions, keyed: bool) -> Turned:
    """Return fields of samples in groups, those named, and specs; `keyed`: keys may be a field."""
    groups, notes = _groups(base, options), [*base.notes]
    members = {m: [f"{g}/{m}".rstrip("/") for g in groups.groups] for m in groups.members}
    if groups.odd and not options.fields:
        notes.append(f"{groups.odd} holds other arrays, too")
    common = len(groups.pattern.partition("*")[0].rpartition("/")[0])
    keys = [group[common:].strip("/") for group in groups.groups]
    counting = len({re.sub("[0-9]+", "#", key) for key in keys}) == 1
    if keyed and options.keys_as is None and not counting:
        kept = "are left out (--keys-as key keeps them)"
        notes.append(f"names such as {keys[0]} do more than count, and {kept}")
    others = {*base.schema.names}.difference(*members.values())
    if others and not options.fields:
        notes.append(f"left out {listed(sorted(others))}: not in the samples' groups")

    fields, differing = dict[str, Field](), dict[str, str]()
    lazy = dict[str, TurnedField]()
    for member, names in members.items():
        kinds = [base.schema[name] for name in names]
        if len({(f.dtype, f.kind, len(f.shape), f.shape[1:]) for f in kinds}) > 1:
            alike = listed(sorted({str(f) for f in kinds}), 2)
            called = member or groups.pattern
            differing[member] = f"{called} differs in more than its first axis: {alike}"
            continue
        name, shape = member or "values", kinds[0].shape
        if len({f.shape for f in kinds}) > 1:
            shape = (None, *shape[1:])
        fields[name] = replace(kinds[0], name=name, shape=shape)
        lazy[name] = TurnedField(
            partial(_members, base, fields[name], names), "an array per sample"
        )
    spelled = {m: f"{groups.pattern}/{m}".rstrip("/") for m in members}
    named = {s.path for s in options.fields}
    requested = [text for m, text in differing.items() if {m, spelled[m]} & named]
    if not fields or requested:
        raise SchemaError("; ".join(requested or differing.values()), where=base.path, fix=WAY_OUT)
    if not options.fields:
        notes += [f"left out {text}" for text in differing.values()]
    if options.keys_as in fields:
        problem = f"--keys-as {options.keys_as}: there is a field of this name"
        raise UsageError(problem, where=base.path)
    if options.keys_as is not None:
        fields[options.keys_as] = Field.opaque(options.keys_as, "str")
        lazy[options.keys_as] = TurnedField(
            lambda start, stop: Ragged.pack(keys[start:stop], fields[str(options.keys_as)]),
            "no read",
        )
    paths = {path: m or "values" for m, path in spelled.items()}
    specs = tuple(replace(s, path=paths.get(s.path, s.path)) for s in options.fields)
    return _parsed(base, len(keys), fields, lazy, notes), specs


def _members(base: Source, field: Field, names: list[str], start: int, stop: int) -> Values:
    """Return arrays of these names as samples of a field."""
    values = [base.read_field(name)[0] for name in names[start:stop]]
    if field.ragged:
        return Ragged.pack(values, field)
    column = np.empty((len(values), *field.inner), field.dtype)
    for i, each in enumerate(values):
        column[i] = each
    return column


def _groups(base: Source, options: OpenOptions) -> Beside:
    """Return the groups that have the samples."""
    beside = groups_named(base.schema.names, options.fields)
    if not beside:
        raise SchemaError("there are no groups side by side", where=base.path, fix=WAY_OUT)
    if len(beside) > 1:
        arrays = {f.name: Sized(tuple(n or 0 for n in f.shape), 0) for f in base.schema}
        raise ambiguous("which groups are samples", arrays, base.path, groups_only=True)
    if not beside[0].groups:
        raise missing_field(beside[0].pattern, base.schema.names, base.path)
    return beside[0]


def _parsed(
    base: Source,
    count: int,
    fields: dict[str, Field],
    lazy: Mapping[str, LazyField],
    notes: list[str],
) -> Parsed:
    return Parsed(
        version=base.version,
        fields=fields,
        layout=FileLayout(count),
        lazy=lazy,
        attrs=base.schema.attrs,
        notes=tuple(notes),
    )
