"""A list of byte ranges for other programs: JSON, one object per line.

::

    {"dsprep_stage": 1, "dataset": "/data/train.h5", "root": "/data", "sidecar": "...",
     "sidecar_digest": "0f3a...", "options": {...}, ..., "lines": 512, "nbytes": 34359738368}
    {"file": "train.h5", "offset": 4096, "length": 67108864, "group": 171}
    ...

The first line is about the whole; then comes a line per range, those first that are needed first.
`file` is relative to `root`. In a dataset without groups, `group` is the number of a range of
samples that is read at a time. Where it is for all nodes, each line also has the number of its
`node`. The digest is BLAKE2b, of 8 bytes.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsprep.cache.pieces import Pieces
from dsprep.core.packing import digest
from dsprep.core.schema import Ints
from dsprep.errors import TargetError

VERSION = 1

BEGIN = b'{"dsprep_stage":'


def write(
    path: Path,
    pieces: Pieces,
    lists: Sequence[tuple[int | None, Ints]],
    header: Mapping[str, Any],
) -> None:
    """Write a manifest; it is there when it is complete, in place of another one.

    Parameters
    ----------
    path
        Where.
    pieces
        Of the dataset.
    lists
        Numbers of nodes, None: it is for one alone, and the pieces that each needs.
    header
        What else the first line has.

    Raises
    ------
    TargetError
        If something else is there.
    """
    with suppress(FileNotFoundError), path.open("rb") as there:
        if there.read(len(BEGIN)) != BEGIN:
            raise TargetError("it exists already, and is not a manifest", where=path)
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}.dsprep-partial")
    try:
        with made.open("x", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in _lines(pieces, lists, header))
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _lines(
    pieces: Pieces, lists: Sequence[tuple[int | None, Ints]], header: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    opened = pieces.sidecar
    dataset, sidecar = (Path(os.path.abspath(p)) for p in (opened.dataset, opened.path))  # noqa: PTH100
    yield {
        "dsprep_stage": VERSION,
        "dataset": str(dataset),
        "root": str(dataset.parent),
        "sidecar": str(sidecar),
        "sidecar_digest": digest(sidecar.read_bytes()),
        **header,
        "lines": sum(len(pieces[g].ranges) for _, groups in lists for g in groups.tolist()),
        "nbytes": sum(pieces[g].nbytes for _, groups in lists for g in groups.tolist()),
    }
    for node, groups in lists:
        for group in groups.tolist():
            for r in pieces[group].ranges:
                inside = dataset.name, opened.content.files[r.number].path, r.path
                file = os.path.normpath("/".join(inside))
                line = {"file": file, "offset": r.begin, "length": r.end - r.begin}
                yield {**({} if node is None else {"node": node}), **line, "group": group}
