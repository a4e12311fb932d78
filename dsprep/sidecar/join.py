"""Files that have sidecars of their own, as one dataset: what these state, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsprep.core.schema import differences
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.sidecar import spec
from dsprep.sidecar.entries import FileEntry
from dsprep.sidecar.sidecar import Sidecar
from dsprep.sidecar.spec import Content


def join(
    files: Sequence[Path], dataset: Path, look: Callable[[Path], Path | None]
) -> tuple[Content, bytes] | None:
    """Return what the sidecars of some files state of them together, and their companion.

    Parameters
    ----------
    files
        Absolute paths, in the order of their samples. The sidecar of each is its own, or that of
        the directory that it is in.
    dataset
        The directory that has them all.
    look
        Returns the sidecar of a file or directory, if it has one: always the same answer, though
        others may be writing it.

    Returns
    -------
    (Content, bytes) or None
        None: no file has a sidecar.

    Raises
    ------
    UsageError
        If some files have none, or they were made with different options on how to read.
    SchemaError, FormatError
        If the fields or formats of files differ, or a sidecar is damaged.
    """
    parts: dict[Path, tuple[Content, dict[Path, FileEntry], int, int]] = {}
    layouts, entries = list[Mapping[str, Any]](), list[FileEntry]()
    companion, lacking = bytearray(), list[Path]()
    for file in files:
        above, where = spec.find_path([file], look=look) or (file, None)
        if where is not None and where not in parts:
            content = spec.read(where)
            known = {above / entry.path: entry for entry in content.files}
            parts[where] = content, known, len(layouts), len(companion)
            layouts += [_moved(layout, len(companion)) for layout in content.layouts]
            companion += Sidecar(content, above, where).companion() or b""
        if where is None or file not in parts[where][1]:
            lacking.append(file)
            continue
        _, known, first, at = parts[where]
        entry = known[file]
        number, crcs = first + entry.layout, _moved(entry.crc32c, at)
        path = os.path.relpath(file, dataset)
        entries.append(replace(entry, path=path, layout=number, crc32c=crcs))
    if not entries:
        return None
    if lacking:
        raise UsageError(
            f"it has no sidecar, and {len(entries):,} of the other files have one",
            where=lacking[0],
            fix=f"write it with dsprep provenance {lacking[0]}",
        )
    _check_alike({where: content for where, (content, *_) in parts.items()})
    both = {"nbytes": len(companion), "blake2b": ""} if companion else None
    model = next(iter(parts.values()))[0]
    return (
        Content(
            model.format,
            model.schema,
            tuple(entries),
            layouts=tuple(layouts),
            reading=model.reading,
            companion=both,
        ),
        bytes(companion),
    )


def _moved(json: Any, by: int) -> Any:
    """Return JSON whose tables in the companion are `by` bytes further."""
    if isinstance(json, list):
        return [_moved(each, by) for each in json]
    if not isinstance(json, Mapping):
        return json
    if {"at", "nbytes", "blake2b"} <= json.keys():
        return {**json, "at": json["at"] + by}
    return {key: _moved(each, by) for key, each in json.items()}


def _check_alike(contents: Mapping[Path, Content]) -> None:
    """Raise an error unless files that have these sidecars can be one dataset."""
    (first, model), *others = contents.items()
    for where, content in others:
        if content.format != model.format:
            found = content.format
            raise FormatError("formats differ", where=where, expected=model.format, found=found)
        if lines := differences(model.schema, content.schema, (first, where)):
            raise SchemaError(f"files disagree about their fields: {lines[0]}")
        if content.reading != model.reading or content.reading.get("file_field"):
            raise UsageError(
                "the sidecars were made with options on how to read that differ, or number files",
                where=where,
                fix="write one of all with dsprep provenance FILE FILE ...",
            )
