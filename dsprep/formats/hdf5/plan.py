"""The storage of each field: decided from the schema and the options, before any I/O.

In groups every dataset is cut into chunks of one group, and the chunks of a group are back to
back. Fixed fields and the tables of ragged ones come first, the largest first; the values of ragged
fields last, since their chunks are as large as the largest group needs: what a group does not use
of the last one is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Field, Ints, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.fields import check_paths
from dsprep.formats.hdf5.dtypes import Carrier, carrier_of
from dsprep.formats.hdf5.guard import import_plugins
from dsprep.formats.options import check_options

if TYPE_CHECKING:
    from dsprep.formats.options import Compression, WriteOptions

CHUNK_NBYTES = 1 << 20
"""Large enough for a codec to find repetitions, small enough for HDF5's chunk cache."""

_EAGER_NBYTES = 64 << 10
_MOST_CHUNK_NBYTES = (1 << 32) - 1  # HDF5 keeps the size of a chunk in 32 bits
_MOST_AXES = 32
_DEFAULT_LEVEL = {"gzip": 4, "zstd": 3}
_INDEX_NBYTES = 8

Role: TypeAlias = Literal["rows", "first", "count", "values"]


@dataclass(frozen=True)
class FieldPlan:
    """The storage of one field.

    Chunks have `chunk` samples, or rows of a ragged field; 0 is contiguous. They are made `late`,
    when all samples are there, of ragged fields, and of fields that are too small beside the others
    to fill a chunk with each piece.
    """

    field: Field
    carrier: Carrier
    chunk: int = 0
    codec: str | None = None
    level: int = 0
    late: bool = False

    @property
    def shuffle(self) -> bool:
        """True if the bytes of equal weight are brought together before compressing."""
        return self.codec is not None and self.carrier.stored.itemsize > 1

    @property
    def eager(self) -> bool:
        """True if the chunks are encoded with each piece."""
        return self.codec is not None and not self.late

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the dataset with so many samples or rows."""
        return (rows, *self.field.inner, *self.carrier.axis)

    def chunk_rows(self, rows: int) -> int:
        """Return the rows per chunk of a dataset with this many rows; 0 is contiguous."""
        return min(self.chunk, rows) if self.field.row_nbytes else 0

    def __str__(self) -> str:
        """Return it for a person, who may not know yet how many samples there will be."""
        unit = "rows" if self.field.ragged else "samples"
        storage = f"chunks of up to {self.chunk:,} {unit}," if self.chunk else "contiguous"
        text = f"{storage} {self.carrier}"
        if self.codec:
            text += f", {'shuffle, ' if self.shuffle else ''}{self.codec}:{self.level}"
        return f"group of values, first, count: {text}" if self.field.ragged else text


def plan(schema: Schema, options: WriteOptions, count: int | None) -> list[FieldPlan]:
    """Return the plan of each field of `count` samples, None if the number is not known yet.

    Raises
    ------
    UnsupportedError
        If HDF5 cannot hold a field, its name, or the codec.
    UsageError
        If the chunk is not positive.
    """
    if options.chunk is not None and options.chunk < 1:
        raise UsageError(f"a chunk of {options.chunk} samples", expected="1 or more")
    check_paths(schema, "HDF5")
    codec, level = _codec(options.compress)
    # Chunks are encoded as the pieces come, so the fields share one number of samples.
    shared = options.chunk or max(1, CHUNK_NBYTES // max(1, schema.fixed_nbytes))
    plans = []
    for field in schema:
        carrier = carrier_of(field.dtype)
        if len(field.shape) + 1 + len(carrier.axis) > _MOST_AXES:
            raise UnsupportedError(
                f"field {field.name} has too many axes for HDF5",
                expected=f"at most {_MOST_AXES - 1 - len(carrier.axis)}",
                found=len(field.shape),
            )
        chunk, late = 0, False
        if field.ragged:
            chunk, late = (_own_chunk(field), True) if codec else (0, False)
        elif options.chunk is not None or codec:
            late = options.chunk is None and shared * field.row_nbytes < _EAGER_NBYTES
            chunk = _own_chunk(field) if late else shared
            chunk = chunk if count is None else min(chunk, count)
        _check_chunk(field, chunk, "use fewer samples per chunk, or none and no compression")
        if not chunk or not field.row_nbytes:
            plans.append(FieldPlan(field, carrier))
        else:
            plans.append(FieldPlan(field, carrier, chunk, codec, level, late))
    return plans


def _check_chunk(field: Field, rows: int, fix: str, group: int = 0) -> None:
    """Raise `UnsupportedError` if a chunk of so many rows is too large for HDF5."""
    if rows * field.row_nbytes > _MOST_CHUNK_NBYTES:
        subject = f"a group of {group} samples is" if group else f"a chunk of {rows} samples is"
        raise UnsupportedError(
            f"field {field.name}: {subject} too large for HDF5",
            expected="chunks of less than 4 GiB",
            found=f"{rows * field.row_nbytes} bytes",
            fix=fix,
        )


def _own_chunk(field: Field) -> int:
    return max(1, CHUNK_NBYTES // max(1, field.row_nbytes))


def _codec(compress: Compression | None) -> tuple[str | None, int]:
    if compress is None:
        return None, 0
    if compress.codec not in _DEFAULT_LEVEL:
        raise UnsupportedError(
            f"HDF5 files are not written with {compress.codec}",
            expected="gzip, zstd or none",
            fix="use gzip, which every reader knows",
        )
    if compress.codec == "zstd" and not import_plugins():
        raise UnsupportedError(
            "HDF5 needs hdf5plugin for zstd",
            fix="pip install 'dsprep[hdf5plugin]', or use gzip, which every reader knows",
        )
    level = _DEFAULT_LEVEL[compress.codec] if compress.level is None else compress.level
    return compress.codec, level


def estimate(file: Hdf5Plan, payload: int) -> tuple[int, int]:
    """Return the bytes of a file, at most where it is compressed, and those of its padding."""
    count, grouping = file.count, file.grouping
    if file.grouped:
        before, groups = file.metadata + 4096 + grouping.align, grouping.count
        stride = file.group_nbytes + grouping.align - 1 if file.codec else file.stride
        between = max(0, groups - 1) * (stride - file.group_nbytes)
        unused = 0 if file.codec else sum(p.unused for p in file.parts)
        nbytes = before + groups * file.group_nbytes + between
        return nbytes, before - file.metadata + between + unused
    total = 4096 + payload + 8192 * len(file.plans)  # headers, and the alignment of large datasets
    for p in file.plans:
        if p.field.ragged:
            total += 16 * count
        elif p.chunk:
            chunks = -(-count // p.chunk)
            total += 24 * chunks + (chunks * p.chunk - count) * p.field.row_nbytes
    if file.codec:
        total += payload // 1000 + 64 * (payload // CHUNK_NBYTES + 1)  # what does not shrink
    return total, 0


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AllocatedDataset:
    """A dataset that is allocated before the first sample comes.

    Attributes
    ----------
    plan, role
        The field that it belongs to, and what it is of that field: all ``rows`` of a fixed one.
    chunk
        Rows per chunk; 0 is contiguous.
    used
        int64, shape ``(groups,)``: the rows that each group has; all rows if there are no groups,
        -1 if they are not known yet.
    """

    plan: FieldPlan
    role: Role
    chunk: int
    row_nbytes: int
    used: Ints

    @property
    def rows(self) -> int:
        """Rows of the dataset; the chunks of values have one size, whatever groups use of them."""
        padded = self.role == "values" and self.chunk and len(self.used) > 1
        return self.chunk * len(self.used) if padded else int(self.used.sum())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dataset."""
        return (self.rows,) if self.role in ("first", "count") else self.plan.shape(self.rows)

    @property
    def path(self) -> str:
        """The path of the dataset in the file."""
        name = self.plan.field.name
        return name if self.role == "rows" else f"{name}/{self.role}"

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk, decoded."""
        return self.chunk * self.row_nbytes

    @property
    def unused(self) -> int:
        """Bytes of all chunks that belong to no sample."""
        return (self.chunk * len(self.used) - int(self.used.sum())) * self.row_nbytes


@dataclass(frozen=True, eq=False)
class Hdf5Plan:
    """All that is decided about a file before it is made.

    Attributes
    ----------
    grouping, grouped
        The groups, and whether there are any, the chunks of each back to back; without, all samples
        are one.
    plans
        Plans of the fields, in the schema's order.
    parts
        The datasets with bytes; in the order in which they are in a group.
    totals
        Rows of the values of each ragged field, by name, as far as they are known.
    unit
        `Writer.unit`.
    """

    schema: Schema
    grouping: Grouping
    plans: Sequence[FieldPlan]
    parts: Sequence[AllocatedDataset]
    totals: dict[str, int]
    unit: int = 1

    @property
    def grouped(self) -> bool:
        """True if there are groups."""
        return not self.grouping.plain

    @property
    def count(self) -> int:
        """Samples of the file."""
        return self.grouping.total

    @property
    def codec(self) -> str | None:
        """The codec of the chunks, whose sizes vary then."""
        return next((p.codec for p in self.plans if p.codec), None)

    @cached_property
    def spooled(self) -> bool:
        """True if sizes are known only when all samples are there."""
        return bool(self.codec) or self.schema.ragged != bool(self.totals)

    def encoded(self, part: AllocatedDataset) -> bool:
        """Return whether the chunks of a dataset are encoded with each piece."""
        return self.spooled and (self.grouped or (part.role == "rows" and part.plan.eager))

    def with_totals(self, totals: dict[str, int]) -> Hdf5Plan:
        """Return the plan of a file without groups whose ragged fields have so many rows."""
        return replace(self, parts=_parts(self.plans, self.count, totals), totals=totals)

    @property
    def group_nbytes(self) -> int:
        """Bytes of a group's chunks, decoded."""
        return sum(p.nbytes for p in self.parts)

    @property
    def stride(self) -> int:
        """Bytes from one group to the next, where nothing is compressed."""
        return round_up(self.group_nbytes, self.grouping.align)

    @property
    def metadata(self) -> int:
        """Bytes that surely hold all of the file's metadata, the chunks' indexes included.

        An entry of an index (a fixed array, HDF5 File Format Specification VII.C) has an address
        and, with filters, a size and a mask; each 1024 entries have a checksum. One index more is
        that of the gaps.
        """
        groups = self.grouping.count
        entry = 24 if self.codec else 8
        index = entry * groups + 4 * (groups // 1024 + 1) + groups // 8192 + 512
        attrs = sum(
            256 + 2 * np.asarray(value).nbytes
            for item in (self.schema, *self.schema, *(s.field for s in self.schema.static))
            for value in item.attrs.values()
        )
        objects = (8 << 10) * (len(self.plans) + len(self.schema.static))
        return (64 << 10) + objects + index * (len(self.parts) + 1) + attrs


def lay_out(schema: Schema, options: WriteOptions, grouping: Grouping) -> Hdf5Plan:
    """Return the plan of a file of these samples."""
    if grouping.plain:
        plans = plan(schema, options, grouping.total)
        totals = {name: int(number.sum()) for name, number in grouping.rows.items()}
        if any(not p.field.row_nbytes for p in plans if p.field.ragged):
            totals = {}  # the rows are there, but nothing says how many
        unit = max((p.chunk for p in plan(schema, options, None) if p.eager), default=1)
        parts = _parts(plans, grouping.total, totals)
        return Hdf5Plan(schema, grouping, plans, parts, totals, unit)
    check_options(options, frozenset({"compress"}), "hdf5 in groups")
    if not grouping.even:
        raise UnsupportedError(
            "HDF5 cuts every field into chunks of equally many samples",
            expected="groups of equally many samples, but for the last",
            found=f"groups of {int(np.diff(grouping.edges).min())} to {grouping.samples}",
            fix="give --buffer-size in samples, or write another format",
        )
    sizes, plans, parts, totals = np.diff(grouping.edges), [], [], {}
    for p in plan(schema, replace(options, chunk=1), None):
        field, used = p.field, grouping.rows[p.field.name] if p.field.ragged else sizes
        capacity = int(used.max(initial=0)) if field.ragged else grouping.samples
        limit = grouping.samples * _MOST_CHUNK_NBYTES // max(1, capacity * field.row_nbytes)
        fix = f"use groups of at most {limit} samples" if limit else "write TFRecord or Zarr"
        _check_chunk(field, capacity, fix, grouping.samples)
        p = replace(p, chunk=capacity, late=False)
        plans.append(p)
        if field.ragged:
            totals[field.name] = grouping.count * capacity
        parts += _datasets(p, used, capacity, sizes, grouping.samples)
    parts.sort(key=lambda d: (d.role == "values", d.unused if d.role == "values" else -d.nbytes))
    return Hdf5Plan(schema, grouping, plans, parts, totals)


def _parts(
    plans: Sequence[FieldPlan], count: int, totals: Mapping[str, int]
) -> list[AllocatedDataset]:
    """Return the datasets of a file without groups."""
    parts: list[AllocatedDataset] = []
    for p in plans:
        rows = totals.get(p.field.name, -1) if p.field.ragged else count
        parts += _datasets(p, np.array([rows]), p.chunk_rows(rows), np.array([count]), 0)
    return parts


def _datasets(
    p: FieldPlan, used: Ints, chunk: int, sizes: Ints, table_chunk: int
) -> list[AllocatedDataset]:
    """Return the datasets of a field that have bytes, those of tables with a row per sample."""
    role: Role = "values" if p.field.ragged else "rows"
    made = [AllocatedDataset(p, role, chunk, p.field.row_nbytes, used)]
    if p.field.ragged:
        tables: tuple[Role, Role] = ("first", "count")
        made += [AllocatedDataset(p, t, table_chunk, _INDEX_NBYTES, sizes) for t in tables]
    return [part for part in made if part.row_nbytes and part.used.any()]
