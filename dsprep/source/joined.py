"""Several datasets with the fields of the same samples, read as one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from dsprep.core.schema import OTHERS, Arena, Batch, FieldSpec, Ints, Schema, with_others
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.base import Opening, Source
from dsprep.formats.fields import missing_field
from dsprep.formats.located import total_sizes
from dsprep.layout.describe import FieldStorage
from dsprep.source.derived import open_some
from dsprep.storage.identity import Identities

KEY = "__key__"
"""The field that keys become where they are compared."""

AT_ONCE = 1 << 14
"""Keys that are read at a time."""


def open_joined(openings: Sequence[Opening], names: Sequence[str]) -> JoinedSource:
    """Open datasets that are joined, with the fields of these names."""
    with ExitStack() as opened:
        source = JoinedSource([opened.enter_context(opening()) for opening in openings], names)
        opened.pop_all()
    return source


class JoinedSource(Source):
    """Datasets whose samples of the same number are one sample, with the fields of all.

    Parameters
    ----------
    parts
        The datasets, which are closed with this source.
    names
        Their fields, in the order that they are to have.
    """

    def __init__(self, parts: Sequence[Source], names: Sequence[str]) -> None:
        self.parts, self.path = list(parts), parts[0].path
        attrs = {name: value for p in reversed(parts) for name, value in p.schema.attrs.items()}
        fields = {f.name: f for p in parts for f in p.schema}
        self.schema = Schema(tuple(fields[name] for name in names), attrs)
        self.version = ", ".join(dict.fromkeys(p.version for p in parts))
        self.notes = tuple(f"{p.path.name}: {note}" for p in parts for note in p.notes)
        self.random_access = all(p.random_access for p in parts)
        self.repeatable = all(p.repeatable for p in parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        batch: Batch = {}
        for k, part in enumerate(self.parts):
            own = None if arena is None else arena.part(f"joined.{k}")
            batch |= part.read(start, stop, own)
        return {name: batch[name] for name in self.schema.names}

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        return total_sizes((part.sizes(start, stop) for part in self.parts), stop - start)

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        part = next(part for part in self.parts if name in part.schema.names)
        return part.rows(name, start, stop)

    def files(self) -> list[Path]:
        """Return the files of all."""
        return [path for part in self.parts for path in part.files()]

    @override
    def identities(self) -> Identities:
        return tuple(known for part in self.parts for known in part.identities())

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        openings = [part.part(start, stop) for part in self.parts]
        some = [partial(open_some, o, (start - at, stop - at)) for o, at in openings]
        return partial(open_joined, some, self.schema.names), start

    @override
    def check_types(self) -> None:
        for part in self.parts:
            part.check_types()

    @override
    def resident_nbytes(self) -> int:
        return sum(part.resident_nbytes() for part in self.parts)

    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of each field."""
        storage_of = {name: s for part in self.parts for name, s in part.storage().items()}
        return {name: storage_of[name] for name in self.schema.names}

    def close(self) -> None:
        """Close all."""
        for part in self.parts:
            part.close()


def assign_fields(
    specs: Sequence[FieldSpec], parts: Sequence[Source]
) -> tuple[list[tuple[FieldSpec, ...]], list[str]]:
    """Return the requested fields of each dataset, all if none is named, and the order of all.

    A name that several have is that of the file, where it has no other field, or is appended to it.

    Raises
    ------
    SchemaError
        If names are the same even so, or there is no such field.
    """
    every = Counter(name for part in parts for name in part.schema.names)
    owner: dict[str, tuple[int, str]] = {}
    for k, part in enumerate(parts):
        stem = part.path.name.partition(".")[0]
        for name in part.schema.names:
            long = stem if len(part.schema) == 1 else f"{stem}_{name}"
            new = name if every[name] == 1 else long
            if new in owner:
                raise SchemaError(
                    f"the datasets that are to be joined have the field {new} more than once",
                    found=f"{parts[owner[new][0]].path}, {part.path}",
                    fix="give the files different names, or join converted datasets with renamed "
                    "fields: dsprep convert FILE OUT --field NEW=OLD",
                )
            owner[new] = k, name
    assigned: list[list[FieldSpec]] = [[] for _ in parts]
    requested = with_others(specs or (FieldSpec(OTHERS, OTHERS),), owner)
    for spec in requested:
        if spec.path not in owner:
            raise missing_field(spec.path, owner, parts[0].path)
        k, old = owner[spec.path]
        assigned[k].append(replace(spec, path=old))
    return [tuple(own) for own in assigned], [spec.name for spec in requested]


def check_lengths(parts: Sequence[Source]) -> None:
    """Raise `SchemaError` unless all datasets have as many samples."""
    first = parts[0]
    for part in parts[1:]:
        if len(part) != len(first):
            raise SchemaError(
                "the datasets that are to be joined differ in their number of samples",
                where=part.path,
                expected=f"{len(first)} as {first.path}",
                found=len(part),
                fix="leave it out, or name those that belong together",
            )


def check_keys(sources: Sequence[Source]) -> None:
    """Raise `SchemaError` at the first sample that datasets call differently.

    Parameters
    ----------
    sources
        The keys of the samples of each, as its only field.
    """
    for i, keys in enumerate(zip(*map(_keys, sources), strict=False)):
        for source, key in zip(sources, keys, strict=True):
            if key[0] != keys[0][0]:
                raise SchemaError(
                    "the datasets that are to be joined have other keys for the same sample",
                    where=f"{source.path}, sample {i}",
                    expected=f"{keys[0][1]} as {sources[0].path}",
                    found=key[1],
                    fix="leave out what the others lack, and give all the same order; if samples "
                    "belong together whatever they are called, join what has no keys: "
                    "dsprep convert FILE OUT.h5",
                )


def _keys(source: Source) -> Iterator[tuple[str, str]]:
    """Yield keys: up to the first dot behind the folder; whole."""
    (name,) = source.schema.names
    for start in range(0, len(source), AT_ONCE):
        for key in source.read(start, min(start + AT_ONCE, len(source)))[name]:
            text = os.fsdecode(key) if isinstance(key, bytes) else str(key)
            above, slash, last = text.rpartition("/")
            yield above + slash + (last.partition(".")[0] or last), text


def refuse_join(joined: bool, verb: str) -> None:
    """Raise `UsageError` where datasets cannot be joined."""
    if joined:
        raise UsageError(
            f"{verb} does not apply to joined datasets: each has a sidecar of its own",
            fix="make one dataset of them: dsprep repack SRC... DST --join, or leave out --join",
        )
