"""Zarr v2 and v3 stores, in a directory or a ZIP file.

Read
    Groups at any depth, shards, every codec that zarr-python knows, strings of varying length.
    A field's name is its path. Ragged fields are groups of ``values``, ``first`` and ``count``
    (`columns.Parts`); dtypes that Zarr does not specify have stand-ins (`carriers`).
Written
    v3 with shards, or v2. Everything dsprep writes opens in zarr-python as it is.

Specifications: https://zarr-specs.readthedocs.io
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from dsprep.core.checksums import Members
from dsprep.core.groups import Grouping, GroupPlan
from dsprep.core.schema import Schema, renamed
from dsprep.core.storage import pread_most
from dsprep.errors import UnsupportedError
from dsprep.formats.base import (
    Format,
    GroupWriter,
    OpenOptions,
    Source,
    State,
    WriteOptions,
    Writer,
    check_options,
)
from dsprep.formats.zarr.attributes import to_json
from dsprep.formats.zarr.grid import ArrayPlan, plan_arrays, show
from dsprep.formats.zarr.store import MARKERS, ZIP_ERRORS, Zip

DOCUMENTS = 2048
"""Bytes allowed for the metadata of an array, for `Zarr.estimate`."""

CODEC_OVERHEAD = 32
"""Bytes by which a chunk that cannot be compressed grows at most, besides 1 % of it."""

MAX_NAME = 255
"""Bytes of the longest file name."""


class Zarr(Format):
    """The format; see `base.Format`."""

    name = "zarr"
    suffixes = (".zarr", ".zarr.zip")
    open_options = frozenset({"fields", "follow_external", "sample_axis"})
    write_options = frozenset({"compress", "chunk", "zarr_format", "zarr_shard"})

    def recognises(self, path: Path) -> bool:
        """See `base.Format.recognises`."""
        try:
            if path.is_dir():
                return any((path / marker).is_file() for marker in MARKERS)
            if not path.is_file():
                return False
            with path.open("rb") as file:
                if pread_most(file.fileno(), 4, 0) not in (b"PK\3\4", b"PK\5\6"):
                    return False
                with zipfile.ZipFile(file) as members:
                    names = members.namelist()
                    return any(name.rpartition("/")[2] in MARKERS for name in names)
        except ZIP_ERRORS:  # `open` says that it is damaged, which helps more than "no format"
            return path.name.lower().endswith(".zip")

    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        """See `base.Format.open`."""
        from dsprep.formats.zarr.source import ZarrSource

        check_options(options, self.open_options, self.name)
        return ZarrSource(path, options)

    def identity(self, path: Path) -> dict[str, Any]:
        """See `base.Format.identity`: a digest of the metadata documents, or of the ZIP's end."""
        from dsprep.formats.zarr.identity import facts

        return facts(path)

    def members(self, path: Path) -> Members | None:
        """See `base.Format.members`: those of a ZIP file."""
        if path.is_dir():
            return None
        with closing(Zip(path)) as store:
            return store.members()

    def plan_fields(self, schema: Schema, options: WriteOptions) -> dict[str, str]:
        """See `base.Format.plan_fields`."""
        check_options(options, self.write_options, self.name)
        check_names(schema)
        plans, _ = plan_arrays(schema, options)
        texts: dict[str, str] = {}
        for plan in plans:
            dtype = plan.field.dtype
            if plan.role == "samples":
                texts[plan.field.name] = show(plan, dtype)
            elif plan.role == "values":
                texts[plan.field.name] = f"group of first, count and values: {show(plan, dtype)}"
        if options.compress is not None:
            texts = {name: f"{text}, {options.compress}" for name, text in texts.items()}
        return texts

    def losses(self, schema: Schema, options: WriteOptions) -> list[str]:
        """See `base.Format.losses`."""
        lost = to_json(schema.attrs, "the dataset")[1]
        for f in schema:
            lost += to_json(f.attrs, f"field {f.name}")[1]
        return lost

    def estimate(self, schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
        """See `base.Format.estimate`."""
        total = DOCUMENTS
        for plan, rows in _with_rows(schema, count, payload, options):
            stored = plan.settled(rows).stored_nbytes(rows)
            if options.compress is not None and stored:
                stored += stored // 100 + CODEC_OVERHEAD * plan.chunks(rows)
            total += stored + DOCUMENTS
        return total

    def scratch(self, schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
        """See `base.Format.scratch`: what is collected to be compressed at the end."""
        if options.compress is None:
            return 0
        planned = _with_rows(schema, count, payload, options)
        return sum(rows * plan.row_nbytes for plan, rows in planned if not plan.whole)

    def unit(self, schema: Schema, options: WriteOptions) -> int:
        """See `base.Format.unit`: with compression, the samples of a shard."""
        return plan_arrays(schema, options)[1]

    def create(
        self,
        path: Path,
        schema: Schema,
        count: int,
        options: WriteOptions,
        state: State | None,
    ) -> Writer:
        """See `base.Format.create`.

        An output whose name has the suffix ``.zip`` is built in the directory of its name and
        ``.parts``, and packed at the end.
        """
        from dsprep.formats.zarr.writer import ZarrWriter

        check_options(options, self.write_options, self.name)
        check_names(schema)
        return ZarrWriter(path, schema, count, options, state)

    def plan_groups(
        self, schema: Schema, options: WriteOptions, grouping: Grouping, zipped: bool = False
    ) -> GroupPlan:
        """See `base.Format.plan_groups`; `zipped`: of a ZIP file."""
        from dsprep.formats.zarr.group_report import report

        check_options(options, self.write_options, self.name)
        check_names(schema)
        return report(schema, options, grouping, zipped)

    def create_groups(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> GroupWriter:
        """See `base.Format.create_groups`: a ZIP file if the name has the suffix ``.zip``."""
        from dsprep.formats.zarr.group_packed import PackedGroups
        from dsprep.formats.zarr.group_placed import PlacedGroups

        check_options(options, self.write_options, self.name)
        check_names(schema)
        kind = PlacedGroups if options.compress is None else PackedGroups
        return kind(path, schema, grouping, options, state)


def _with_rows(
    schema: Schema, count: int, payload: int, options: WriteOptions
) -> Iterator[tuple[ArrayPlan, int]]:
    """Yield the arrays and their rows; all ragged bytes are counted with the first such field."""
    rest = max(0, payload - count * schema.fixed_nbytes)
    for plan in plan_arrays(schema, options)[0]:
        rows = count
        if plan.role == "values":
            rows, rest = -(-rest // max(1, plan.row_nbytes)), 0
        yield plan, rows


def check_names(schema: Schema) -> None:
    """Raise `UnsupportedError` if a field name is no path that Zarr can hold."""
    for f in schema:
        for part in f.name.split("/"):
            reserved = part in ("", ".", "..") or part.startswith(("__", ".z", ".dsprep"))
            if reserved or part == "zarr.json" or "\\" in part or unwritable(part):
                raise UnsupportedError(
                    f"zarr holds no array called {f.name!r}", fix=f"rename it: {renamed(f.name)}"
                )
    names = set(schema.names)
    for f in schema:
        parts = f.name.split("/")
        if names & {"/".join(parts[:i]) for i in range(1, len(parts))}:
            raise UnsupportedError(
                f"field {f.name} would lie inside another field",
                fix=f"rename it: {renamed(f.name)}",
            )


def unwritable(part: str) -> bool:
    """Whether no file can be called `part`."""
    try:
        return len(os.fsencode(part)) > MAX_NAME or len(part.encode("utf-8")) > MAX_NAME
    except UnicodeEncodeError:
        return True
