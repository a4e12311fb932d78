"""HDF5: datasets at any depth whose first axes count the samples.

Read: contiguous, chunked, compact, filtered, external and virtual datasets; variable-length
types; ragged data by index tables; whole files as one sample. Written: one dataset per fixed
field; for a ragged field, ``bytes`` or ``str`` called NAME a group NAME with

======================  =====================================================================
``values``              the samples' rows, one after another; ``uint8`` for `bytes` and `str`
``first``, ``count``    int64, one per sample: its rows are ``first <= r < first + count``
``dsprep_kind``         an attribute: ``array``, ``bytes`` or ``str``
======================  =====================================================================

Dtypes that HDF5 lacks are stored bit by bit, see `dsprep.formats.hdf5.dtypes`. The root attribute
``dsprep_layout`` says that all this holds for a file, so that reading it guesses nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsprep.formats.base import (
    Format,
    GroupWriter,
    OpenOptions,
    State,
    WriteOptions,
    Writer,
    check_options,
)
from dsprep.formats.hdf5.superblock import read_superblock, signature

if TYPE_CHECKING:
    from dsprep.core.groups import Grouping, GroupPlan
    from dsprep.core.schema import Schema
    from dsprep.formats.base import Source


class Hdf5(Format):
    """The HDF5 format."""

    name = "hdf5"
    suffixes = (".h5", ".hdf5", ".hdf", ".he5")
    open_options = frozenset({"fields", "follow_external", "sample_axis"})
    write_options = frozenset({"compress", "chunk"})

    def recognises(self, path: Path) -> bool:
        """Whether the signature stands at 0, 512, 1024, 2048, ...: before it is a user block."""
        if not path.is_file():
            return False
        fd = os.open(path, os.O_RDONLY)
        try:
            return signature(fd) is not None
        finally:
            os.close(fd)

    def identity(self, path: Path) -> dict[str, Any]:
        """Return what the superblock tells; see `Format.identity`."""
        found = read_superblock(path)
        return {"end_of_file": found.end_of_file, "superblock": found.version}

    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        """Open `path`; see `Format.open`. HDF5 keeps all types itself, `hint` is not needed."""
        from dsprep.formats.hdf5.source import Hdf5Source

        check_options(options, self.open_options, self.name)
        return Hdf5Source(path, options)

    def plan_fields(self, schema: Schema, options: WriteOptions) -> dict[str, str]:
        """Return how each field will be stored."""
        from dsprep.formats.hdf5.create import check
        from dsprep.formats.hdf5.plan import plan

        check_options(options, self.write_options, self.name)
        plans = plan(schema, options, None)
        check(schema, plans)
        return {p.field.name: str(p) for p in plans}

    def losses(self, schema: Schema, options: WriteOptions) -> list[str]:
        """Return the attributes that h5py cannot store."""
        from dsprep.formats.hdf5.create import lost_attributes

        return lost_attributes(schema)

    def estimate(self, schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
        """Return the expected bytes of the file."""
        from dsprep.formats.hdf5.plan import estimate

        return estimate(schema, count, payload, options)

    def scratch(self, schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
        """Return the bytes of the spool: all values, where their places are not known at once."""
        return payload if schema.ragged or options.compress is not None else 0

    def unit(self, schema: Schema, options: WriteOptions) -> int:
        """Return how many samples stay together in a piece."""
        from dsprep.formats.hdf5.plan import unit

        return unit(schema, options)

    def create(
        self,
        path: Path,
        schema: Schema,
        count: int,
        options: WriteOptions,
        state: State | None,
    ) -> Writer:
        """Start or continue a file: in place, or by way of ``PATH.spool`` if sizes are unknown."""
        from dsprep.formats.hdf5.plan import plan
        from dsprep.formats.hdf5.spool import SpoolWriter
        from dsprep.formats.hdf5.writer import PlacedWriter

        check_options(options, self.write_options, self.name)
        plans = plan(schema, options, count)
        if schema.ragged or options.compress is not None:
            unit = self.unit(schema, options)
            return SpoolWriter(path, schema, plans, count, unit, state)
        return PlacedWriter(path, schema, plans, count, state)

    def plan_groups(
        self, schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool = False
    ) -> GroupPlan:
        """Return how groups will lie; see `Format.plan_groups`."""
        from dsprep.formats.hdf5.group_plan import lay_out, plan_of

        return plan_of(lay_out(schema, options, grouping))

    def create_groups(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> GroupWriter:
        """Start or continue a file in groups; compressed ones go by way of ``PATH.spool``."""
        from dsprep.formats.hdf5.group_plan import lay_out
        from dsprep.formats.hdf5.group_spool import PackedGroups
        from dsprep.formats.hdf5.group_writer import PlacedGroups

        file = lay_out(schema, options, grouping)
        writer = PackedGroups if file.compressed else PlacedGroups
        return writer(path, file, state)
