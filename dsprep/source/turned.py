"""Samples along another axis than the first, or in groups side by side."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Batch, Column, Field, Ragged
from dsprep.errors import SchemaError, UnsupportedError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.fields import missing_field, wanted
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.options import OpenOptions, not_enough
from dsprep.formats.samples import Sized, ambiguous, groups_named, listed
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import FileLayout


class TurnedSource(Source):
    """A file that was opened as one sample, whose arrays hold samples in another way.

    Nothing gives these offsets. The file is read into memory once, but for groups of a file that
    reads one field at a time.

    Parameters
    ----------
    base
        The file, which is closed with this source.
    options
        Which axis counts the samples, or that groups do; the fields.

    Raises
    ------
    SchemaError
        If fields have no such axis, of one length, or groups are not alike.
    """

    def __init__(self, base: Source, options: OpenOptions) -> None:
        self.base, self._limit = base, options.limit
        self.path, self.version, self._lock = base.path, base.version, threading.Lock()
        self._batch: dict[str, Column] = {}
        self._notes = [*base.notes]
        numbered = options.sample_axis not in ("auto", "groups")
        self._keys_as, self._alone = options.keys_as, type(base).read_field is not Source.read_field
        self._members = {} if numbered else self._groups(options)
        axis = options.sample_axis.replace("last", "-1")
        self._axis = int(axis) if numbered else 0
        self.schema = base.schema.replace(*(self._turned() if numbered else self._beside(options)))
        self.notes = tuple(self._notes)

    def _turned(self) -> list[Field]:
        """Return the fields without the axis that counts the samples."""
        fields, counts, k = [], dict[int, str](), self._axis
        for f in self.base.schema:
            if not f.shape and len(self.base.schema) > 1:
                self._notes.append(f"left out {f.name}: no axis")
                continue
            if f.ragged or not -len(f.shape) <= k < len(f.shape):
                raise SchemaError(
                    f"{f.name} has no axis {k}", where=self.path, found=f, fix="leave it out"
                )
            shape = list(f.shape)
            counts[int(shape.pop(k) or 0)] = f.name
            fields.append(replace(f, shape=tuple(shape)))
        if len(counts) > 1:
            raise SchemaError(
                "fields differ in the number of their samples",
                where=self.path,
                found=", ".join(f"{name}: {n}" for n, name in counts.items()),
                fix="name those that go together: --field NAME",
            )
        self._count = next(iter(counts))
        return fields

    def _groups(self, options: OpenOptions) -> dict[str, list[str]]:
        """Return the fields of the file that have the samples, by the names of their members."""
        beside = groups_named(self.base.schema.names, options.fields)
        if not beside:
            raise SchemaError("there are no groups side by side", where=self.path, fix=WAY_OUT)
        if len(beside) > 1:
            arrays = {f.name: Sized(tuple(n or 0 for n in f.shape), 0) for f in self.base.schema}
            raise ambiguous("which groups are samples", arrays, self.path, groups_only=True)
        only = beside[0]
        if not only.groups:
            raise missing_field(only.pattern, self.base.schema.names, self.path)
        self._count, self._pattern = len(only.groups), only.pattern
        if only.odd and not options.fields:
            self._notes.append(f"{only.odd} holds other arrays, too")
        common = len(only.pattern.partition("*")[0].rpartition("/")[0])
        self._keys = [group[common:].strip("/") for group in only.groups]
        counting = len({re.sub("[0-9]+", "#", key) for key in self._keys}) == 1
        if self._alone and self._keys_as is None and not counting:
            kept = "are left out (--keys-as key keeps them)"
            self._notes.append(f"names such as {self._keys[0]} do more than count, and {kept}")
        members = {m: [f"{g}/{m}".rstrip("/") for g in only.groups] for m in only.members}
        others = {*self.base.schema.names}.difference(*members.values())
        if others and not options.fields:
            self._notes.append(f"left out {listed(sorted(others))}: not in the samples' groups")
        return members

    def _beside(self, options: OpenOptions) -> list[Field]:
        """Return the fields whose samples are in groups, and keep how they are called."""
        fields, differing = dict[str, Field](), dict[str, str]()
        for member, names in self._members.items():
            kinds = [self.base.schema[name] for name in names]
            first = kinds[0]
            alike = {(f.dtype, f.kind, len(f.shape), f.shape[1:]) for f in kinds}
            if len(alike) > 1:
                kinds_listed = listed(sorted({str(f) for f in kinds}), 2)
                what = member or self._pattern
                differing[member] = f"{what} differs in more than its first axis: {kinds_listed}"
                continue
            shape = first.shape
            if len({f.shape for f in kinds}) > 1:
                shape = (None, *shape[1:])
            name = member or "values"
            fields[name] = replace(first, name=name, shape=shape)
        spelled = {m: f"{self._pattern}/{m}".rstrip("/") for m in self._members}
        paths = {path: m or "values" for m, path in spelled.items()}
        specs = tuple(replace(s, path=paths.get(s.path, s.path)) for s in options.fields)
        named = {s.path for s in options.fields}
        asked = [text for m, text in differing.items() if {m, spelled[m]} & named]
        if not fields or asked:
            raise SchemaError("; ".join(asked or differing.values()), where=self.path, fix=WAY_OUT)
        if not specs:
            self._notes += [f"left out {text}" for text in differing.values()]
        members = {m or "values": names for m, names in self._members.items()}
        if self._keys_as in fields:
            problem = f"--keys-as {self._keys_as}: there is a field of this name"
            raise UsageError(problem, where=self.path)
        if self._keys_as is not None:
            fields[self._keys_as] = Field.opaque(self._keys_as, "str")
            members[self._keys_as] = self._keys
        chosen = wanted(specs, fields)
        self._key_fields = {field.name for path, field in chosen if path == self._keys_as}
        self._members = {field.name: members[path] for path, field in chosen}
        return [field for _, field in chosen]

    def __len__(self) -> int:
        return self._count

    def _columns(self) -> dict[str, Column]:
        """Return all samples of each field, read when they are first needed."""
        with self._lock:
            if self._batch:
                return self._batch
            needed = self.base.schema.fixed_nbytes
            if needed > self._limit:
                raise not_enough(
                    "the file is read whole, as its samples have no offsets",
                    needed,
                    self._limit,
                    where=self.path,
                    fix=f"raise --memory, or {WAY_OUT}",
                )
            batch = self.base.read(0, 1)
            for f in self.schema:
                if not self._members:
                    self._batch[f.name] = np.moveaxis(np.asarray(batch[f.name][0]), self._axis, 0)
                    continue
                self._batch[f.name] = self._packed(f, slice(None), lambda name: batch[name][0])
            return self._batch

    def _packed(self, f: Field, part: slice, value: Callable[[str], Any]) -> Column:
        """Return some samples of a field, each of which is that of a field of the file."""
        names = self._members[f.name][part]
        values = names if f.name in self._key_fields else [*map(value, names)]
        if f.ragged:
            return Ragged.pack(values, f)
        column = np.empty((len(values), *f.inner), f.dtype)
        for i, each in enumerate(values):
            column[i] = each
        return column

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if self._alone and self._members:
            part, value = slice(start, stop), lambda name: self.base.read_field(name)[0]
            return {f.name: self._packed(f, part, value) for f in self.schema}
        return {name: column[start:stop] for name, column in self._columns().items()}

    @override
    def resident_nbytes(self) -> int:
        return 0 if self._alone and self._members else self.base.schema.fixed_nbytes

    @override
    def storage(self) -> dict[str, FieldStorage]:
        access = "an array per sample" if self._alone and self._members else "the file is read once"
        form = FieldStorage(storage="no range of bytes per sample", access=access)
        return dict.fromkeys(self.schema.names, form)

    @override
    def extents(self, progress: Any = None) -> FileLayout:
        raise UnsupportedError(
            "its samples have no offsets", where=self.path, fix="copy them: dsprep convert"
        )

    @override
    def close(self) -> None:
        self.base.close()


def is_turned(options: OpenOptions) -> bool:
    """Whether a `TurnedSource` has what the options ask for."""
    groups = options.sample_axis == "groups" or (
        options.sample_axis == "auto" and any("*" in s.path for s in options.fields)
    )
    plain = options.sample_axis in ("auto", "first", "none", "groups")
    return not plain or groups


def open_turned(open_base: Any, options: OpenOptions) -> Source:
    """Return the file that `open_base` opens with options, as one sample, turned."""
    numbered = options.sample_axis not in ("auto", "groups")
    whole = replace(options, sample_axis="none")
    base = open_base(whole if numbered else replace(whole, fields=(), keys_as=None))
    try:
        return TurnedSource(base, options)
    except BaseException:
        base.close()
        raise
