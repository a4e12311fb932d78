"""Samples along another axis than the first, or in groups side by side.

A file is opened as one sample, whose arrays hold samples in another way. These have no offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Field, FieldSpec, Ragged
from dsprep.core.schema import Column as Values
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.base import Format, Source
from dsprep.formats.fields import missing_field
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.located import LazyField, LocatedSource, Parsed, Unlocated
from dsprep.formats.options import OpenOptions, not_enough
from dsprep.formats.samples import Beside, Sized, ambiguous, groups_named, listed
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column, FileLayout


class TurnedField(LazyField):
    """A field of a file that is one sample, `base`, whose samples have no offsets in there."""

    access = ""

    def locate(self) -> Column:
        """Raise `Unlocated`."""
        raise Unlocated("its samples have no offsets")

    def storage(self) -> FieldStorage:
        """Return how it is stored."""
        return FieldStorage(storage="no range of bytes per sample", access=self.access)


@dataclass
class AlongAxis(TurnedField):
    """An array whose samples are along an axis; it is read into memory once."""

    base: Source
    name: str
    axis: int
    limit: int

    access = "the file is read once"

    @cached_property
    def _values(self) -> Array:
        needed = self.base.schema.fixed_nbytes
        if needed > self.limit:
            raise not_enough(
                "the file is read whole, as its samples have no offsets",
                needed,
                self.limit,
                where=self.base.path,
                fix=f"raise --memory, or {WAY_OUT}",
            )
        return np.moveaxis(np.asarray(self.base.read_field(self.name)[0]), self.axis, 0)

    def read(self, start: int, stop: int) -> Values:
        """Return samples ``start <= i < stop``."""
        return self._values[start:stop]

    def resident_nbytes(self) -> int:
        """Return the bytes of the array."""
        return self.base.schema[self.name].row_nbytes


@dataclass
class OfGroups(TurnedField):
    """The arrays of this name of all groups, a sample each; or, without `base`, their `names`."""

    base: Source | None
    field: Field
    names: list[str]

    access = "an array per sample"

    def read(self, start: int, stop: int) -> Values:
        """Return samples ``start <= i < stop``."""
        base, names = self.base, self.names[start:stop]
        values: list[Any] = [*names] if base is None else [base.read_field(n)[0] for n in names]
        if self.field.ragged:
            return Ragged.pack(values, self.field)
        column = np.empty((len(values), *self.field.inner), self.field.dtype)
        for i, each in enumerate(values):
            column[i] = each
        return column


def is_turned(options: OpenOptions) -> bool:
    """Whether `open_turned` gives what the options ask for."""
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
    whole = replace(options, sample_axis="none")
    base = open_base(whole if numbered else replace(whole, fields=(), keys_as=None))
    try:
        if numbered:
            parsed, specs = _along_axis(base, options), ()
        else:
            parsed, specs = _of_groups(base, options, keyed="keys_as" in format.open_options)
        return LocatedSource(
            base.path, parsed, replace(options, fields=specs), lambda _: _no_file(), base.close
        )
    except BaseException:
        base.close()
        raise


def _no_file() -> Any:
    raise AssertionError("no field is located")


def _along_axis(base: Source, options: OpenOptions) -> Parsed:
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
    lazy = {name: AlongAxis(base, name, axis, options.limit) for name in fields}
    return _parsed(base, next(iter(counts)), fields, lazy, notes)


def _of_groups(
    base: Source, options: OpenOptions, *, keyed: bool
) -> tuple[Parsed, tuple[FieldSpec, ...]]:
    """Return the fields whose samples are in groups, those of these names, and what is asked for.

    `keyed`: what the groups are called may be a field.
    """
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
    lazy = dict[str, LazyField]()
    for member, names in members.items():
        kinds = [base.schema[name] for name in names]
        if len({(f.dtype, f.kind, len(f.shape), f.shape[1:]) for f in kinds}) > 1:
            alike = listed(sorted({str(f) for f in kinds}), 2)
            what = member or groups.pattern
            differing[member] = f"{what} differs in more than its first axis: {alike}"
            continue
        name, shape = member or "values", kinds[0].shape
        if len({f.shape for f in kinds}) > 1:
            shape = (None, *shape[1:])
        fields[name] = replace(kinds[0], name=name, shape=shape)
        lazy[name] = OfGroups(base, fields[name], names)
    spelled = {m: f"{groups.pattern}/{m}".rstrip("/") for m in members}
    named = {s.path for s in options.fields}
    asked = [text for m, text in differing.items() if {m, spelled[m]} & named]
    if not fields or asked:
        raise SchemaError("; ".join(asked or differing.values()), where=base.path, fix=WAY_OUT)
    if not options.fields:
        notes += [f"left out {text}" for text in differing.values()]
    if options.keys_as in fields:
        problem = f"--keys-as {options.keys_as}: there is a field of this name"
        raise UsageError(problem, where=base.path)
    if options.keys_as is not None:
        fields[options.keys_as] = Field.opaque(options.keys_as, "str")
        lazy[options.keys_as] = OfGroups(None, fields[options.keys_as], keys)
    paths = {path: m or "values" for m, path in spelled.items()}
    specs = tuple(replace(s, path=paths.get(s.path, s.path)) for s in options.fields)
    return _parsed(base, len(keys), fields, lazy, notes), specs


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
    lazy: dict[str, Any],
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
