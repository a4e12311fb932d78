"""LMDB: read page by page without liblmdb, written in its compact form.

`pages` knows the file format, `records` and `source` read it, `tree` and `writer` write it;
`values` and `datum` say what a value means, `keys` how samples are called, `families` what other
keys say. None
of them maps the file, takes a lock or needs the ``lmdb`` package, so a damaged file cannot crash
the process and any number of threads read at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from dsprep.core.groups import Grouping
from dsprep.core.schema import Schema
from dsprep.core.storage import pread_most
from dsprep.errors import UsageError
from dsprep.formats.base import (
    Facts,
    Format,
    OpenOptions,
    Settled,
    Source,
    State,
    WriteOptions,
    WritePlan,
    Writer,
)
from dsprep.formats.lmdb.families import KEY, VALUE
from dsprep.formats.lmdb.meta import looks_like, read_meta

DATA = "data.mdb"
"""The file in the directory of an environment."""


def data_file(path: Path) -> Path:
    """Return the file of the environment at `path`, which is that file or its directory."""
    return path / DATA if path.is_dir() else path


class Lmdb(Format):
    """LMDB 0.9 environments: a directory with ``data.mdb``, or a single file."""

    name: ClassVar[str] = "lmdb"
    suffixes: ClassVar[tuple[str, ...]] = (".lmdb", ".mdb")
    open_options: ClassVar[frozenset[str]] = frozenset(
        {"fields", "order", "values", "database", "skip_keys", "keys_as"}
    )
    write_options: ClassVar[frozenset[str]] = frozenset({"key_format", "group_values"})
    infers: ClassVar[bool] = True
    keeps_types: ClassVar[bool] = False
    uneven_groups: ClassVar[bool] = True

    def recognises(self, path: Path) -> bool:
        """Whether the file begins with a meta page of any LMDB."""
        if not data_file(path).is_file():
            return False
        with data_file(path).open("rb") as file:
            return looks_like(pread_most(file.fileno(), 32, 0))

    def settle(
        self, schemas: Sequence[Schema], options: OpenOptions, hint: Schema | None
    ) -> Settled | None:
        """Return options by which all files have the keys if one has; see `Format.settle`."""
        schema = schemas[0]
        for other in schemas[1:]:
            more, less = (schema, other) if len(schema) > len(other) else (other, schema)
            own = tuple(f for f in more if f.name != KEY)
            if less.fields not in (more.fields, own):
                return None
            schema = more
        whole = {VALUE, "data"} & set(schema.names) and KEY in schema.names
        if whole and not options.fields and schema[KEY].kind == "bytes":
            options = replace(options, keys_as=options.keys_as or KEY)
        return Settled(schema, options, hint)

    def open(
        self, path: Path, options: OpenOptions, hint: Schema | None, *, survey: bool = False
    ) -> Source:
        """Open an environment; every leaf page is read once and checked."""
        from dsprep.formats.lmdb.group_source import grouped
        from dsprep.formats.lmdb.records import Records
        from dsprep.formats.lmdb.source import LmdbSource

        records = Records(path, data_file(path), options, survey)
        try:
            return grouped(records, options, hint) or LmdbSource(records, options, hint)
        except BaseException:
            records.close()
            raise

    def identity(self, path: Path) -> Facts:
        """Return the newest transaction, the root of its tree and the last page in use."""
        fd = os.open(data_file(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            meta = read_meta(fd, path)
        finally:
            os.close(fd)
        return Facts(
            {"transaction": meta.transaction, "root": meta.main.root, "last_page": meta.last_page}
        )

    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        samples: int | Grouping = 0,
        payload: int = 0,
        name: str = "",
    ) -> WritePlan:
        """Return where each field lies in a value; names and types are kept by the sidecar."""
        from dsprep.formats.lmdb import plan

        stored, lost = plan.stored(schema, options), []
        if [f.kind for f in schema] != ["bytes"]:
            lost.append("LMDB keeps no field names and types: only the sidecar has them")
        if schema.attrs or any(f.attrs for f in schema):
            lost.append("LMDB keeps no attributes: only the sidecar has them")
        if isinstance(samples, Grouping):
            groups = plan.groups(schema, options, samples)
            nbytes = groups.nbytes
        else:
            groups, nbytes = None, plan.estimate(schema, samples, payload, options)
        return WritePlan(stored=stored, notes=tuple(lost), nbytes=nbytes, files=2, groups=groups)

    def create(
        self,
        path: Path,
        schema: Schema,
        samples: int | Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> Writer:
        """Start or continue an environment: a single file if `path` ends in ``.mdb``."""
        from dsprep.formats.lmdb.writer import LmdbWriter

        if options.group_values and not isinstance(samples, Grouping):
            raise UsageError("one value per group needs groups", fix="dsprep repack writes them")
        file = path
        if path.suffix.lower() != ".mdb":
            path.mkdir(exist_ok=True)
            file = path / DATA
        return LmdbWriter(file, "" if file == path else DATA, schema, samples, options, state)
