"""Exports: the extents that a sidecar gives, in files that other readers understand.

============ ====================================================================================
``kerchunk`` references by which fsspec and zarr open the dataset as a virtual Zarr group
``dali-idx`` NVIDIA DALI's index of a TFRecord file
============ ====================================================================================

Only the sidecar is read, the data are not touched. A file gets its name when it is complete, and
none is overwritten.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from dsprep.core.schema import Ints
from dsprep.errors import TargetError, UsageError, layout_mismatch
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.durable import sync, sync_directory

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "kerchunk": "references by which fsspec and zarr open the dataset as a virtual Zarr group",
        "dali-idx": "NVIDIA DALI's index, one file for each TFRecord file",
    }
)
"""Name to what it is; a kind is one module and one line."""


SLICE = 1 << 16
"""Samples whose extents are kept in memory at a time."""


Outputs: TypeAlias = dict[str, Callable[[], Iterator[bytes]]]
"""Files to write: the path relative to the dataset's directory, and what yields the bytes."""


def export(
    sidecar: Sidecar,
    kind: str,
    out: Path | None = None,
    notes: list[str] | None = None,
) -> list[Path]:
    """Write what `kind` of reader needs to find the samples.

    Parameters
    ----------
    sidecar
        The dataset.
    kind
        One of `KINDS`.
    out
        A directory for the files; or, if it is not one and the kind has one file, that file. None:
        beside the dataset, or beside each of its files.
    notes
        Gets a clause for everything that was left out.

    Returns
    -------
    The files.

    Raises
    ------
    UsageError
        If there is no such kind, or it cannot express the dataset; the message names the field.
    TargetError
        If a file is there already.
    FormatError
        If the sidecar does not fit the data, or is damaged.
    """
    if kind not in KINDS:
        raise UsageError(
            "there is no such export", expected="one of " + ", ".join(KINDS), found=kind
        )
    module = import_module(f"dsprep.sidecar.export.{kind.replace('-', '_')}")
    outputs: Outputs = module.outputs(sidecar, notes if notes is not None else [])
    return _write_all(outputs, sidecar.dataset.parent, out)


def _write_all(outputs: Outputs, beside: Path, out: Path | None) -> list[Path]:
    """Write the files, each under a temporary name first: all of them or none; see `export`."""
    if out is None:
        paths = [beside / name for name in outputs]
    elif out.is_dir():
        paths = [out / name for name in outputs]
    elif len(outputs) == 1:
        paths = [out]
    else:
        raise UsageError(
            f"the export has {len(outputs)} files", found=out, fix="name a directory that exists"
        )
    _refuse_existing(paths)
    temporary = [p.with_name(f".{p.name}.{secrets.token_hex(4)}.tmp") for p in paths]
    try:
        for path, content in zip(temporary, outputs.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.writelines(content())
                file.flush()
                sync(file.fileno())
        _refuse_existing(paths)
        for a, b in zip(temporary, paths, strict=True):
            a.replace(b)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    for directory in {p.parent for p in paths}:
        sync_directory(directory)
    return paths


def _refuse_existing(paths: Sequence[Path]) -> None:
    """Raise `TargetError` if a file exists: there is no way to know what wrote it."""
    for path in paths:
        if path.is_dir() or os.path.lexists(path):
            raise TargetError(
                "a file of this name is there already, and is not replaced",
                where=path,
                fix="remove it if it is an earlier export, or choose another name with --out",
            )


def check_inside(offsets: Ints, lengths: Ints, path: Path, context: str, before: int = 0) -> None:
    """Raise `FormatError` if byte ranges, and `before` bytes in front of each, leave a file."""
    size = path.stat().st_size
    bad = (offsets < before) | (lengths < 0) | (offsets + lengths > size)
    if bad.any():
        i = int(bad.argmax())
        facts = f"within {size} bytes", f"{lengths[i]} bytes at {offsets[i]}"
        raise layout_mismatch(
            "gives an extent that is not in the file", f"{path}, {context}", *facts
        )
