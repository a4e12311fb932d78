"""LMDB: read page by page without liblmdb, written in its compact form.

`pages` knows the file format, `parse` and `source` read it, `tree` and `write` write it;
`values` and `datum` say what a value means, `keys` how samples are called, `families` what other
keys say. None of them maps the file, takes a lock or needs the ``lmdb`` package, so a damaged file
cannot crash the process and any number of threads read at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from dsprep.core.closing import failure_closes
from dsprep.core.groups import EMPTY, Grouping
from dsprep.core.schema import Ints, Schema
from dsprep.formats.base import (
    FilePlan,
    Source,
    State,
    WritableFormat,
    Writer,
)
from dsprep.formats.lmdb.families import KEY
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.lmdb.pages import HEADER, NODE, looks_like, read_meta
from dsprep.formats.lmdb.tree import NODE_MAX, PSIZE, ROOM, Tree, node_sizes
from dsprep.formats.lmdb.values import Values
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.storage.paths import Candidate, open_file

DATA = "data.mdb"
"""The file in the directory of an environment."""


def data_file(path: Path) -> Path:
    """Return the file of the environment at `path`, which is that file or its directory."""
    return path / DATA if path.is_dir() else path


class Lmdb(WritableFormat):
    """LMDB 0.9 environments: a directory with ``data.mdb``, or a single file."""

    name: ClassVar[str] = "lmdb"
    suffixes: ClassVar[tuple[str, ...]] = (".lmdb", ".mdb")
    open_options: ClassVar[frozenset[str]] = frozenset(
        {"fields", "order", "values", "database", "skip_keys", "keys_as"}
    )
    write_options: ClassVar[frozenset[str]] = frozenset({"key_format"})
    key: ClassVar[str | None] = KEY
    keeps_types: ClassVar[bool] = False
    uneven_groups: ClassVar[bool] = True

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether the file begins with a meta page of any LMDB."""
        if candidate.is_directory:
            candidate = Candidate(candidate.path / DATA)
        return looks_like(candidate.head)

    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        """Open an environment; every leaf page is read once and checked."""
        from dsprep.formats.lmdb.parse import Records
        from dsprep.formats.lmdb.source import open_records

        records = Records(path, data_file(path), options)
        with failure_closes(records.close):
            return open_records(records, options, hint)

    def facts(self, path: Path) -> Mapping[str, Any]:
        """Return the newest transaction, the root of its tree and the last page in use."""
        with closing(open_file(data_file(path))) as file:
            meta = read_meta(file)
        root = meta.main.root
        return {"transaction": meta.transaction, "root": root, "last_page": meta.last_page}

    @override
    def check(self, schema: Schema, options: WriteOptions) -> tuple[str, ...]:
        _stored(schema, options)
        lost = []
        if [f.kind for f in schema] != ["bytes"]:
            lost.append("LMDB keeps no field names and types: only the sidecar has them")
        if schema.attrs or any(f.attrs for f in schema):
            lost.append("LMDB keeps no attributes: only the sidecar has them")
        return tuple(lost)

    def plan(
        self,
        schema: Schema,
        options: WriteOptions,
        grouping: Grouping = EMPTY,
        payload: int = 0,
        name: str = "",
    ) -> FilePlan:
        """Return the place of each field in a value; groups are contiguous, where LMDB puts them.

        The sidecar keeps names and types.
        """
        values, counts = Values(schema), np.diff(grouping.edges)
        ragged = [f for f in schema if f.ragged]
        rows = [grouping.rows.get(f.name, 0) * np.int64(f.row_nbytes) for f in ragged]
        payloads: Ints = counts * schema.fixed_nbytes + sum(rows)
        total = payload if grouping.plain else int(payloads.sum())
        padding = PSIZE // 2 if ragged else -(HEADER + values.head) % PSIZE
        large = total + values.table * grouping.total > NODE_MAX * grouping.total
        largest = _estimate(
            schema, int(counts.max(initial=0)), int(payloads.max(initial=0)), options
        )
        return FilePlan(
            create=partial(_create, schema, options, grouping),
            stored=_stored(schema, options),
            nbytes=_estimate(schema, grouping.total, total, options),
            files=2,
            padding=padding * grouping.total * large,
            # The tree may begin or end elsewhere. Groups can be longer where values inside leaves
            # and on overflow pages are mixed.
            group_nbytes=largest + PSIZE,
            aligned=grouping.align == 1,
        )


def _create(
    schema: Schema, options: WriteOptions, grouping: Grouping, path: Path, state: State | None
) -> Writer:
    """Start or continue an environment: a single file if `path` ends in ``.mdb``."""
    from dsprep.formats.lmdb.write import LmdbWriter

    file = path
    if path.suffix.lower() != ".mdb":
        path.mkdir(exist_ok=True)
        file = path / DATA
    return LmdbWriter(file, "" if file == path else DATA, schema, grouping, options, state)


# --- how much space an output takes, and how its groups are laid out, without I/O ---


def _stored(schema: Schema, options: WriteOptions) -> dict[str, str]:
    """Return the range of each field in a sample's value."""
    plan_keys(options.key_format, 1)
    stored = {}
    for name, part in Values(schema).parts().items():
        where = "behind the lengths that it begins with"
        if part.at is not None:
            end = "" if part.nbytes is None else f" to {part.at + part.nbytes}"
            where = f"from byte {part.at}{end}"
        stored[name] = f"in the value {where}"
    return {f.name: stored[f.name] for f in schema}


def _estimate(schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
    """Return the bytes of the file: exact for fixed fields, an upper bound otherwise."""
    key = plan_keys(options.key_format, count).nbytes
    values = Values(schema)
    if not count:
        return 2 * PSIZE
    if schema.ragged:
        # A value inside leaves costs at most twice its bytes, as a leaf may stay half empty;
        # one on overflow pages wastes less than a page and a header, and is not small.
        total = payload + values.table * count
        large = min(count, total // (NODE_MAX - NODE - key + 1) + 1)
        leaves = 2 * count * (NODE + key + 12) // ROOM + 2
        tree = 2 * leaves // Tree(key).fanout + 2
        slack = max(total if large < count else 0, large * (PSIZE + HEADER))
        return (2 + leaves + tree) * PSIZE + total + slack
    nodes, runs = node_sizes(key, np.array([values.head]))
    level = leaves = -(-count // (ROOM // (int(nodes[0]) + 2)))
    branches, each = 0, Tree(key).fanout - 1
    while level > 1:
        level = (level - 2) // each + 1
        branches += level
    return (2 + leaves + branches + int(runs[0]) * count) * PSIZE
