"""Zarr v2 and v3 stores, in a directory or a ZIP file.

Read
    Groups at any depth, shards, every codec that zarr-python knows, strings of varying length.
    A field's name is its path. Ragged fields are groups of ``values``, ``first`` and ``count``
    (`fields.RaggedField`); dtypes that Zarr does not specify have stand-ins (`attributes`).
Written
    v3 with shards, or v2. Everything dsprep writes opens in zarr-python as it is.

Specifications: https://zarr-specs.readthedocs.io
"""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path

from typing_extensions import override

from dsprep.core.groups import EMPTY, Grouping
from dsprep.core.schema import Schema
from dsprep.formats.base import FilePlan, Source, WritableFormat
from dsprep.formats.fields import check_paths
from dsprep.formats.options import OpenOptions, WriteOptions, check_options
from dsprep.formats.zarr.attributes import to_json
from dsprep.formats.zarr.grid import Grid
from dsprep.formats.zarr.store import MARKERS
from dsprep.formats.zip_members import ZIP_ERRORS
from dsprep.storage.base import stream
from dsprep.storage.paths import Candidate

RESERVED = ("__", ".z", ".dsprep")
MAX_NAME = 255
"""Bytes of the longest file name."""


class Zarr(WritableFormat):
    """The format; see `base.Format`."""

    name = "zarr"
    suffixes = (".zarr", ".zarr.zip")
    archive = ".zip"
    open_options = frozenset({"fields", "follow_external", "sample_axis"})
    write_options = frozenset({"compress", "chunk", "zarr_format", "zarr_shard"})

    @override
    def recognises(self, candidate: Candidate) -> bool:
        path = candidate.path
        if candidate.is_directory:
            return any((path / marker).is_file() for marker in MARKERS)
        if not candidate.head.startswith((b"PK\3\4", b"PK\5\6")):
            return False
        try:
            with zipfile.ZipFile(stream(candidate.file)) as members:
                return any(name.rpartition("/")[2] in MARKERS for name in members.namelist())
        except ZIP_ERRORS:  # `open` says that it is damaged, which helps more than "no format"
            return path.name.lower().endswith(".zip")

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        from dsprep.formats.zarr.parse import open_zarr

        check_options(options, self.open_options, self.name)
        return open_zarr(path, options)

    @override
    def check(self, schema: Schema, options: WriteOptions) -> tuple[str, ...]:
        self.plan(schema, options)
        lost = to_json(schema.attrs, "the dataset")[1]
        for f in schema:
            lost += to_json(f.attrs, f"field {f.name}")[1]
        return tuple(lost)

    @override
    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        grouping: Grouping = EMPTY,
        payload: int = 0,
        name: str = "",
    ) -> FilePlan:
        """Return one output; compressed fields are collected until the end.

        An output whose name has the suffix ``.zip`` is a ZIP file: built in the directory of its
        name and ``.parts`` and packed at the end, or, in groups, written as such.
        """
        from dsprep.formats.zarr.write import ZarrWriter

        check_options(options, self.write_options, self.name)
        check_names(schema)
        zipped = name.endswith(self.archive)
        grid = Grid(schema, options, grouping, zipped)
        return grid.file_plan(
            partial(ZarrWriter, grid), payload - grouping.total * schema.fixed_nbytes
        )


def check_names(schema: Schema) -> None:
    """Raise `UnsupportedError` if a field name is not a path that Zarr can hold."""
    check_paths(
        schema,
        "zarr",
        lambda part: (
            part == "zarr.json"
            or part.startswith(RESERVED)
            or "\\" in part
            or len(part.encode()) > MAX_NAME
        ),
    )
