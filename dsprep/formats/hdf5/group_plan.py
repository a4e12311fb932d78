"""Groups in an HDF5 file: which datasets share a group's byte range, and in which order.

Every dataset is cut into chunks of one group, and the chunks of a group lie one behind another.
Fixed fields and the tables of ragged ones come first, the largest first; the values of ragged
fields last, since their chunks are as large as the largest group needs: what a group does not use
of the last one is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from dsprep.core.groups import Grouping, GroupPlan, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.base import check_options
from dsprep.formats.hdf5.plan import FieldPlan, plan

if TYPE_CHECKING:
    from dsprep.formats.base import WriteOptions

_MOST_CHUNK_NBYTES = (1 << 32) - 1
_INDEX_NBYTES = 8

Role: TypeAlias = Literal["rows", "first", "count", "values"]


@dataclass(frozen=True, eq=False)
class Part:
    """A dataset of which every group has one chunk.

    Attributes
    ----------
    plan
        The field that it belongs to, or that it is.
    role
        ``rows`` of a fixed field; or ``first``, ``count`` or ``values`` of a ragged one.
    chunk
        Rows per chunk.
    row_nbytes
        Bytes of a row.
    used
        int64, shape ``(groups,)``: the rows that each group has.
    """

    plan: FieldPlan
    role: Role
    chunk: int
    row_nbytes: int
    used: Ints

    @property
    def path(self) -> str:
        """Where the dataset is in the file."""
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
class GroupedFile:
    """All that is decided about a file before it is made.

    Attributes
    ----------
    schema, grouping
        What it holds, and its groups.
    plans
        How each field is stored, in the schema's order.
    parts
        The datasets with bytes, in the order in which they lie in a group.
    totals
        Rows of the values of each ragged field, by name.
    """

    schema: Schema
    grouping: Grouping
    plans: Sequence[FieldPlan]
    parts: Sequence[Part]
    totals: dict[str, int]

    @property
    def count(self) -> int:
        """Samples of the file."""
        return int(self.grouping.edges[-1])

    @property
    def compressed(self) -> bool:
        """Whether chunks are encoded, so that their sizes vary."""
        return any(p.codec for p in self.plans)

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
        entry = 24 if self.compressed else 8
        index = entry * groups + 4 * (groups // 1024 + 1) + groups // 8192 + 512
        attrs = sum(
            256 + 2 * np.asarray(value).nbytes
            for item in (self.schema, *self.schema)
            for value in item.attrs.values()
        )
        return (64 << 10) + (8 << 10) * len(self.plans) + index * (len(self.parts) + 1) + attrs


def lay_out(schema: Schema, options: WriteOptions, grouping: Grouping) -> GroupedFile:
    """Return how a file of these groups will be.

    Raises
    ------
    UnsupportedError
        If HDF5 cannot hold a field, or cannot cut it into these groups.
    """
    check_options(options, frozenset({"compress"}), "hdf5 in groups")
    if not grouping.even:
        raise UnsupportedError(
            "HDF5 cuts every field into chunks of equally many samples",
            expected="groups of equally many samples, but for the last",
            found=f"groups of {int(np.diff(grouping.edges).min())} to {grouping.samples}",
            fix="give --buffer-size in samples, or write another format",
        )
    groups, samples = grouping.count, np.diff(grouping.edges)
    plans: list[FieldPlan] = []
    head: list[Part] = []
    tail: list[Part] = []
    totals: dict[str, int] = {}
    for p in plan(schema, replace(options, chunk=1), None):
        field, nbytes = p.field, p.field.row_nbytes
        used = grouping.rows[field.name] if field.ragged else samples
        capacity = int(used.max(initial=0)) if field.ragged else grouping.samples
        _check_chunk(p, capacity, grouping)
        p = replace(p, chunk=capacity, late=False)
        plans.append(p)
        if field.ragged:
            totals[field.name] = groups * capacity
            head.append(Part(p, "first", grouping.samples, _INDEX_NBYTES, samples))
            head.append(Part(p, "count", grouping.samples, _INDEX_NBYTES, samples))
        if capacity * nbytes and groups:
            part = Part(p, "values" if field.ragged else "rows", capacity, nbytes, used)
            (tail if field.ragged else head).append(part)
    head = [part for part in head if part.nbytes]
    head.sort(key=lambda part: -part.nbytes)
    tail.sort(key=lambda part: part.unused)
    return GroupedFile(schema, grouping, plans, [*head, *tail], totals)


def _check_chunk(p: FieldPlan, rows: int, grouping: Grouping) -> None:
    """Raise `UnsupportedError` if a group's chunk of a field is too large for HDF5."""
    nbytes = rows * p.field.row_nbytes
    if nbytes <= _MOST_CHUNK_NBYTES:
        return
    most = grouping.samples * _MOST_CHUNK_NBYTES // nbytes
    raise UnsupportedError(
        f"field {p.field.name}: a group of {grouping.samples} samples is too large for HDF5",
        expected="chunks of less than 4 GiB",
        found=f"{nbytes} bytes",
        fix=f"use groups of at most {most} samples" if most else "write TFRecord or Zarr",
    )


def plan_of(file: GroupedFile) -> GroupPlan:
    """Return how the groups will lie, for a person and for the space check."""
    grouping = file.grouping
    groups, align, nbytes = grouping.count, grouping.align, file.group_nbytes
    before = file.metadata + 4096 + align
    stride = nbytes + align - 1 if file.compressed else file.stride
    between = max(0, groups - 1) * (stride - nbytes)
    unused = 0 if file.compressed else sum(p.unused for p in file.parts)
    order = ", ".join(p.path for p in file.parts)
    how = f"a group is one chunk of each dataset, one behind another: {order}"
    if file.compressed:
        codec = next(str(p.codec) for p in file.plans if p.codec)
        how += f"; {codec} makes groups of different sizes"
    elif groups > 1:
        how += f"; groups begin every {stride:,} bytes"
    return GroupPlan(
        nbytes=before + groups * nbytes + between,
        padding=before - file.metadata + between + unused,
        group_nbytes=nbytes,
        aligned=True,
        reads=1,
        how=how,
    )
