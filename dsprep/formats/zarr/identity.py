"""What tells that a store was changed, without a look at its chunks: its metadata documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dsprep.core.packing import digest
from dsprep.core.storage import pread_exact
from dsprep.errors import FormatError
from dsprep.formats.zarr.metadata import read_document
from dsprep.formats.zarr.store import DOCUMENTS, MARKERS, Directory, join

MOST_NODES = 4096
"""Arrays and groups whose documents are read; of larger stores the first ones."""

TAIL = 64 << 10
"""Bytes at the end of a ZIP file, where its directory is: names, sizes and CRCs of members."""


def facts(path: Path) -> dict[str, Any]:
    """Return what `base.Format.identity` promises.

    Of a directory, a digest of the names and contents of all documents; of a ZIP file, one of the
    end of its directory.

    Raises
    ------
    FormatError
        If there is no root node, or a document is no JSON object.
    """
    if path.is_dir():
        return {"documents": digest(b"".join(_documents(Directory(path, follow=True))))}
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        tail = min(nbytes, TAIL)
        return {"zip_directory": digest(pread_exact(file.fileno(), tail, nbytes - tail, path))}


def _documents(store: Directory) -> list[bytes]:
    """Return the digest of each document with its name, in the order of a walk by name."""
    found: list[bytes] = []
    todo, nodes = [""], 0
    while todo and nodes < MOST_NODES:
        node = todo.pop()
        nodes += 1
        there = 0
        for name in sorted(DOCUMENTS):
            key = join(node, name)
            data = store.document(key)
            if data is not None:
                there += name in MARKERS
                found.append(f"{key}\0{digest(data)}\n".encode("utf-8", "surrogateescape"))
        if not there and not node:
            raise FormatError("there is no Zarr store", where=store.path)
        if there and _is_group(store, node):
            todo += [join(node, child) for child in reversed(store.children(node))]
    return found


def _is_group(store: Directory, node: str) -> bool:
    document = read_document(store, join(node, "zarr.json"))
    if document is not None:
        return document.get("node_type") == "group"
    return store.has(join(node, ".zgroup")) and not store.has(join(node, ".zarray"))
