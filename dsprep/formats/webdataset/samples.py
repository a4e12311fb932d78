"""From the members of an archive to samples: which bytes are which field of which sample.

Source: the WebDataset format, as the package ``webdataset`` reads it: the key of a sample is the
name of a member up to the first dot of its last part, the field is what follows that dot, in small
letters; the members of a sample follow one another.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints
from dsprep.errors import FormatError, SchemaError, UnsupportedError
from dsprep.formats.fields import missing_field
from dsprep.formats.samples import listed
from dsprep.formats.splits import parts_of_many
from dsprep.formats.webdataset.headers import Archive, Members, show
from dsprep.layout.laws import Explicit, Law

MOST = 256
"""Fields of a sample, at most."""

_PARTS = re.compile(rb"(?:((?:[^\0]*/)?[^./\0]+)\.([^/\0]+)|[^\0]*)\0")
_META = re.compile(rb"\0__[^/\0]*__[/\0]")
_OUTSIDE = re.compile(rb"\0/|[\0/]\.\.[/\0]")


Extents: TypeAlias = tuple[Law, Law]
"""Offsets and lengths of a field of every sample."""


def law_of(parts: Sequence[Ints]) -> Law:
    """Return the law of numbers that arrived in parts, at least one."""
    return Explicit(np.concatenate(parts))


class Samples:
    """The samples of an archive, which is gone through once.

    Parameters
    ----------
    archive
        The archive.
    wanted
        The fields that are looked for; empty: all, which every sample has to have.
    keys
        Whether the keys of samples are looked for.
    stop
        How many samples are wanted, if not all; nothing behind them is looked at.

    Attributes
    ----------
    count
        How many there are.
    fields
        Where the fields are, by name, in alphabetical order.
    keys
        Where the keys are, if they are looked for.
    notes
        What was left out.

    Raises
    ------
    FormatError, UnsupportedError
        As by `Archive.members`; if there are no samples, or a name leads out of the archive.
    SchemaError
        If a sample lacks a field, or has one more; if names state several parts of a dataset and
        the keys are not looked for.
    """

    def __init__(
        self, archive: Archive, requested: Iterable[str], keys: bool, stop: int | None = None
    ) -> None:
        self._archive, self._where = archive, archive.file.path
        self._requested = frozenset(requested)
        self._names: list[str] = []
        self._parts_of: list[list[Ints]] = []  # by field: of shape (2, n), offsets and lengths
        self._keys: list[Ints] | None = [] if keys else None
        self.count, self._stop = 0, stop
        self._parts: dict[str, str] = {}
        self._go_through()
        if len(self._parts) > 1 and not keys:
            raise SchemaError(
                "the names of its members state parts of a dataset, which are not read as one",
                where=self._where,
                found="names such as " + listed([*self._parts.values()]),
                fix="write an archive of each part; or read all as one, with the name of each "
                "sample as a field that states its part: --keys-as key",
            )
        self.fields = {
            name: _extents(parts)
            for name, parts in sorted(zip(self._names, self._parts_of, strict=True))
        }
        self.keys = None if self._keys is None else _extents(self._keys)
        self.notes = [
            f"left out {count:,} {kind}: {show(first)}" + (", ..." if count > 1 else "")
            for kind, (count, first) in archive.skipped.items()
        ]

    def _go_through(self) -> None:
        pending, damage = _Batch.empty(), None
        try:
            for members in self._archive.members():
                batch = pending.and_(self._taken_apart(members))
                begin = int(np.flatnonzero(batch.new)[-1]) if batch.keys else 0
                pending = batch.part(begin, len(batch.keys))
                if len(pending.keys) > MOST:
                    raise FormatError(
                        "a sample has impossibly many members",
                        where=f"{self._where}, sample {show(batch.keys[begin])}",
                        expected=f"<= {MOST}",
                    )
                self._take(batch.part(0, begin))
                if self.count == self._stop:
                    return
        except FormatError as error:
            damage = error
        there = {_name(field, self._where) for field in pending.fields}
        if damage is None or (self.count and there.issuperset(self._names)):
            self._take(pending)
        if damage is not None and self.count != self._stop:
            path = shlex.quote(str(self._where))
            line = f"dsprep convert {path} OUT --samples 0:{self.count} takes the samples before it"
            raise damage.with_fix(line if self.count else "")
        if not self.count:
            raise FormatError(
                "the archive holds no samples",
                where=self._where,
                expected="members named KEY.FIELD, such as 000017.jpg",
                fix="if it holds a dataset, unpack it: tar -xf FILE",
            )

    def _taken_apart(self, members: Members) -> _Batch:
        """Return keys and fields of members, without those that are not of samples."""
        joined = b"\0".join((b"", *members.names, b""))
        outside = _OUTSIDE.search(joined)
        if outside is not None:
            name = joined[outside.start() :].strip(b"\0").partition(b"\0")[0]
            raise FormatError(
                "the name of a member leads out of the archive",
                where=self._where,
                found=show(name[:200]),
                fix="write the archive again with relative names: tar -C FOLDER -cf NEW.tar .",
            )
        keys, names = (list(column) for column in zip(*_PARTS.findall(joined, 1), strict=True))
        batch = _Batch(keys, names, members.columns)
        if all(keys) and _META.search(joined) is None:
            return batch
        kept = []
        for i, (key, name) in enumerate(zip(keys, members.names, strict=True)):
            if _META.match(b"\0" + name + b"\0"):
                self._archive.note("members of metadata", name)
            elif not key:
                self._archive.note("members without an extension", name)
            else:
                kept.append(i)
        return _Batch([keys[i] for i in kept], [names[i] for i in kept], batch.columns[:, kept])

    def _take(self, batch: _Batch) -> None:
        """Take in whole samples."""
        if not batch.keys:
            return
        new = batch.new
        starts = np.flatnonzero(new)
        if self._stop is not None and self.count + len(starts) > self._stop:
            if self.count < self._stop:
                self._take(batch.part(0, int(starts[self._stop - self.count])))
            return
        self._parts |= parts_of_many(batch.keys)
        if not self.count:
            stop = int(starts[1]) if len(starts) > 1 else len(new)
            self._begin(batch.part(0, stop))
        n, width = len(starts), len(self._names) + 1
        numbers = {name.encode(): k for k, name in enumerate(self._names)}
        codes = {field: numbers.get(field.lower(), width - 1) for field in set(batch.fields)}
        code = np.fromiter(map(codes.__getitem__, batch.fields), np.int64, len(new))
        target = (np.cumsum(new) - 1) * width + code
        table = np.bincount(target, minlength=n * width).reshape(n, width)
        wrong = (table[:, :-1] != 1).any(axis=1)
        if not self._requested:
            wrong |= table[:, -1] != 0
        if wrong.any():
            i = int(wrong.argmax())
            stop = int(starts[i + 1]) if i + 1 < n else len(new)
            raise self._differs(batch.part(int(starts[i]), stop))
        member = np.empty(n * width, np.int64)
        member[target] = np.arange(len(new))
        for k, parts in enumerate(self._parts_of):
            parts.append(batch.columns[1:, member[k::width]])
        if self._keys is not None:
            keys, named = [batch.keys[i] for i in starts.tolist()], batch.columns[0, starts]
            if int(named.min()) < 0:
                raise UnsupportedError(
                    "the key of a sample is stored in two parts, the directory behind the name",
                    where=f"{self._where}, sample {show(keys[int(named.argmin())])}",
                    fix="leave --keys-as out, or write the archive again in the format posix of "
                    "tar",
                )
            self._keys.append(np.stack([named, np.fromiter(map(len, keys), np.int64, n)]))
        self.count += n

    def _begin(self, sample: _Batch) -> None:
        """Note which fields there are: those of the first sample."""
        names = sorted({_name(field, self._where) for field in sample.fields})
        for name in sorted(self._requested - {*names}):
            where = f"{self._where}, sample {show(sample.keys[0])}"
            raise missing_field(name, names, where)
        self._names = sorted(self._requested) or names
        self._parts_of = [[] for _ in self._names]

    def _differs(self, sample: _Batch) -> SchemaError:
        """Return the error for a sample that does not have the fields that it should."""
        names = sorted(_name(field, self._where) for field in sample.fields)
        other = "lacks a field" if self._requested else "has other fields than those before it"
        twice = [a for a, b in pairwise(names) if a == b and a in self._names]
        return SchemaError(
            f"a sample has a field twice: {twice[0]}" if twice else f"a sample {other}",
            where=f"{self._where}, sample {show(sample.keys[0])}",
            expected=listed(self._names),
            found=listed(names),
            fix="choose the fields that all samples have (--field NAME); or, if its members are "
            "apart, write the archive again in the order of names: mkdir NEW && tar -xf "
            f"{shlex.quote(str(self._where))} -C NEW && tar --sort=name -cf NEW.tar -C NEW .",
        )


class _Batch(NamedTuple):
    """Members in the order of the archive: keys and fields as in their names, and `Members`."""

    keys: list[bytes]
    fields: list[bytes]
    columns: Ints

    @classmethod
    def empty(cls) -> _Batch:
        return cls([], [], np.zeros((3, 0), np.int64))

    @property
    def new(self) -> NDArray[np.bool_]:
        """Tells the members that begin a sample."""
        differ = map(operator.ne, self.keys[1:], self.keys)
        return np.fromiter(chain((True,) if self.keys else (), differ), bool, len(self.keys))

    def part(self, start: int, stop: int) -> _Batch:
        cut = slice(start, stop)
        return _Batch(self.keys[cut], self.fields[cut], self.columns[:, cut])

    def and_(self, other: _Batch) -> _Batch:
        columns = np.hstack([self.columns, other.columns])
        return _Batch(self.keys + other.keys, self.fields + other.fields, columns)


def _extents(parts: Sequence[Ints]) -> Extents:
    return law_of([part[0] for part in parts]), law_of([part[1] for part in parts])


def _name(extension: bytes, where: object) -> str:
    """Return the name of a field."""
    try:
        return extension.lower().decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            "the name of a field is not UTF-8", where=where, found=show(extension[:200])
        ) from error
