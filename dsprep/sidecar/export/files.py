"""Files of an export: all of them complete under their names, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsprep.core.schema import Ints
from dsprep.core.storage import sync, sync_directory
from dsprep.errors import FormatError, TargetError, UsageError

SLICE = 1 << 16
"""Samples whose places are held in memory at a time."""


@dataclass(frozen=True)
class Output:
    """A file to write.

    Attributes
    ----------
    name
        Its path, relative to the directory that holds the dataset.
    content
        Yields its bytes.
    """

    name: str
    content: Callable[[], Iterator[bytes]]


def write_all(
    outputs: Sequence[Output], beside: Path, out: Path | None, overwrite: bool
) -> list[Path]:
    """Write the files, each under a temporary name first, and return their paths.

    Parameters
    ----------
    beside
        Where names are relative to.
    out
        See `dsprep.sidecar.export.export`.

    Raises
    ------
    UsageError
        If `out` is one file and there are several.
    TargetError
        If one is there and must not be overwritten.
    """
    if out is None:
        paths = [beside / o.name for o in outputs]
    elif out.is_dir():
        paths = [out / o.name for o in outputs]
    elif len(outputs) == 1:
        paths = [out]
    else:
        raise UsageError(
            f"the export has {len(outputs)} files", found=out, fix="name a directory that exists"
        )
    _refuse_existing(paths, out is not None, overwrite)
    temporary = [p.with_name(f".{p.name}.tmp") for p in paths]
    try:
        for path, output in zip(temporary, outputs, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, output)
        _refuse_existing(paths, out is not None, overwrite)
        for a, b in zip(temporary, paths, strict=True):
            a.replace(b)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    for directory in {p.parent for p in paths}:
        sync_directory(directory)
    return paths


def _refuse_existing(paths: Sequence[Path], chosen: bool, overwrite: bool) -> None:
    """Raise `TargetError` if a file is there, of which nobody knows whose it is."""
    for path in paths:
        if path.is_dir() or (os.path.lexists(path) and not overwrite):
            ours = "" if chosen else ", or remove this one if it is an earlier export"
            raise TargetError(
                "a file of this name is there already, and is not replaced",
                where=path,
                fix=f"choose another name with --out{ours}",
            )


def _write(path: Path, output: Output) -> None:
    with path.open("wb") as file:
        for data in output.content():
            file.write(data)
        file.flush()
        sync(file.fileno())


def check_inside(offsets: Ints, lengths: Ints, path: Path, what: str, before: int = 0) -> None:
    """Raise `FormatError` if the byte ranges are not all within the file `path`.

    Parameters
    ----------
    offsets, lengths
        int64, of equal shape.
    what
        The field, for the message.
    before
        Bytes that have to stand before each of them.
    """
    if not len(offsets):
        return
    if int(offsets.min()) < before or int(lengths.min()) < 0:
        raise FormatError("the sidecar tells a place before the file", where=f"{path}, {what}")
    end, size = int((offsets + lengths).max()), path.stat().st_size
    if end > size:
        raise FormatError(
            "the sidecar tells a place behind the end of the file",
            where=f"{path}, {what}",
            expected=f"at most {size}",
            found=end,
            fix="write the sidecar again with dsprep provenance",
        )
