"""HDF5: datasets at any depth whose first axes count the samples.

Read: contiguous, chunked, compact, filtered, external and virtual datasets; variable-length
types; ragged data by index tables; whole files as one sample. Written: one dataset per fixed
field; for a ragged field, ``bytes`` or ``str`` called NAME a group NAME with

======================  =====================================================================
``values``              the samples' rows, back to back; ``uint8`` for `bytes` and `str`
``first``, ``count``    int64, one per sample: its rows are ``first <= r < first + count``
``dsprep_kind``         an attribute: ``array``, ``bytes`` or ``str``
======================  =====================================================================

Dtypes that HDF5 lacks are stored bit by bit, see `dsprep.formats.hdf5.dtypes`. The root attribute
``dsprep_layout`` says that all this holds for a file, so that reading it guesses nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from dsprep.core.groups import EMPTY, Grouping
from dsprep.formats.base import FilePlan, WritableFormat
from dsprep.formats.hdf5.guard import signature
from dsprep.formats.options import OpenOptions, WriteOptions, check_options
from dsprep.storage.paths import Candidate

if TYPE_CHECKING:
    from dsprep.core.schema import Schema
    from dsprep.formats.base import Source


class Hdf5(WritableFormat):
    """The HDF5 format."""

    name = "hdf5"
    suffixes = (".h5", ".hdf5", ".hdf", ".he5")
    open_options = frozenset({"fields", "follow_external", "keys_as", "sample_axis"})
    write_options = frozenset({"compress", "chunk"})

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether the signature stands at 0, or behind a user block at 512, 1024, ..."""
        return candidate.is_file and signature(candidate.file) is not None

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        # HDF5 keeps all types itself, `hint` is not needed.
        from dsprep.formats.hdf5.parse import open_source

        check_options(options, self.open_options, self.name)
        return open_source(path, options)

    @override
    def check(self, schema: Schema, options: WriteOptions) -> tuple[str, ...]:
        from dsprep.formats.hdf5.create import check
        from dsprep.formats.hdf5.plan import plan

        check_options(options, self.write_options, self.name)
        return tuple(check(schema, plan(schema, options, None)))

    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        grouping: Grouping = EMPTY,
        payload: int = 0,
        name: str = "",
    ) -> FilePlan:
        """Return the plan of a file; the spool holds all values of unknown size."""
        from dsprep.formats.hdf5.plan import estimate, lay_out
        from dsprep.formats.hdf5.write import Hdf5Writer

        check_options(options, self.write_options, self.name)
        file = lay_out(schema, options, grouping)
        nbytes, padding = estimate(file, payload)
        return FilePlan(
            create=partial(Hdf5Writer, file),
            stored={p.field.name: str(p) for p in file.plans},
            nbytes=nbytes,
            scratch_nbytes=payload if file.spooled else 0,
            unit=file.unit,
            padding=padding,
            group_nbytes=file.group_nbytes if file.grouped else 0,
        )
