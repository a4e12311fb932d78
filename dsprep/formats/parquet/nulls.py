"""Columns with nulls, which no field can hold: refused, or left out and counted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsprep.core.schema import Field, Schema
from dsprep.errors import DsprepError, FormatError, UnsupportedError
from dsprep.formats.base import CommonSchema
from dsprep.formats.options import OpenOptions
from dsprep.formats.samples import listed

SHOWN = 12
"""Columns that an error names."""


PARTITION = "partition"
"""The attribute of a field that is a part of the file's path."""


@dataclass(frozen=True, eq=False)
class NullableField(Field):
    """A field of a file whose column has nulls there; equal to the field that it is without them.

    Attributes
    ----------
    nulls
        Rows that have some.
    only
        Whether all rows have, so that the type says nothing.
    where
        The file, and the first of its row groups that has some.
    """

    nulls: int = 0
    only: bool = False
    where: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and _plain(self) == _plain(other)

    def __hash__(self) -> int:
        return hash(_plain(self))


def _plain(f: Field) -> Field:
    return Field(f.name, f.dtype, f.shape, f.kind, f.attrs) if isinstance(f, NullableField) else f


def with_nulls(f: Field, nulls: int, rows: int, where: str) -> Field:
    """Return the field of a column that has so many nulls in so many rows."""
    if not nulls:
        return f
    only = nulls == rows
    return NullableField(f.name, f.dtype, f.shape, f.kind, f.attrs, nulls, only, where)


def together(f: Field, g: Field) -> Field | None:
    """Return the field that two parts have; None if they are not of one type.

    What paths give is an integer if it is in both.
    """
    both = [x for x in (f, g) if isinstance(x, NullableField)]
    typed = [x for x in (f, g) if not (isinstance(x, NullableField) and x.only)]
    if len(typed) == 2 and f != g:
        if PARTITION not in f.attrs or PARTITION not in g.attrs:
            return None
        typed = [x for x in typed if x.kind == "str"]
    of = _plain((typed or [f])[0])
    if not both:
        return of
    nulls = sum(x.nulls for x in both)
    return NullableField(
        *(of.name, of.dtype, of.shape, of.kind, of.attrs), nulls, not typed, both[0].where
    )


def decide(schema: Schema, options: OpenOptions) -> CommonSchema:
    """Return how the files are read of which `schema` has the columns with nulls.

    Raises
    ------
    FormatError
        If there are nulls, and no option says what is to be done about them.
    UnsupportedError
        If all columns are left out.
    """
    nullable = [f for f in schema if isinstance(f, NullableField)]
    if not nullable:
        return CommonSchema(schema, options, schema)
    requested = bool(options.fields)
    only = [f for f in nullable if f.only and (options.nulls == "drop-columns" or not requested)]
    some = [f for f in nullable if f not in only]
    if some and (options.nulls == "refuse" or any(f.only for f in some)):
        raise refusal(some, schema)
    dropped = [*only, *some] if options.nulls == "drop-columns" else only
    notes = [f"left out {f.name}: it has only nulls" for f in only]
    if options.nulls == "drop-columns":
        notes += [f"left out {f.name}: it has nulls, in {f.nulls:,} rows" for f in some]
    elif some:
        notes.append(f"left out the rows with nulls in {_counts(some)}")
    kept = Schema(tuple(_plain(f) for f in schema if f not in dropped), schema.attrs)
    if not kept.fields:
        raise _nothing_left(some, nullable)
    names = {f.name for f in dropped}
    fields = tuple(s for s in options.fields if s.path not in names)
    recount = bool(some) and options.nulls == "drop-rows"
    return CommonSchema(kept, replace(options, fields=fields), kept, tuple(notes), recount)


def _nothing_left(some: Sequence[NullableField], nullable: Sequence[NullableField]) -> DsprepError:
    return UnsupportedError(
        "no column is a field: all have nulls",
        where=nullable[0].where,
        found=_counts(nullable),
        fix="--nulls drop-rows keeps the rows without nulls" if some else None,
    )


def refusal(nullable: Sequence[NullableField], schema: Schema) -> FormatError:
    """Return the error for columns with nulls, which names what helps."""
    names = {f.name for f in nullable}
    others = [f.name for f in schema if f.name not in names and not isinstance(f, NullableField)]
    ways = ["--nulls drop-rows leaves these rows out", "--nulls drop-columns these columns"]
    if all(f.only for f in nullable):
        ways = ways[1:]
    if 0 < len(others) <= SHOWN:
        ways.append("or name the others: " + " ".join(f"--field {shlex.quote(n)}" for n in others))
    return FormatError(
        "there are nulls, which are no values",
        where=f"{nullable[0].where}, column {nullable[0].name}",
        expected="a value in each row",
        found=f"nulls in {_counts(nullable)}",
        fix=", ".join(ways),
    )


def _counts(nullable: Sequence[NullableField]) -> str:
    return listed([f"{f.name} ({f.nulls:,})" for f in nullable], SHOWN)
