"""Exports: the places that a sidecar tells, in files that other readers understand.

============ ====================================================================================
``kerchunk`` references by which fsspec and zarr open the dataset as a virtual Zarr group
``dali-idx`` NVIDIA DALI's index of a TFRecord file
``off-idx``  offsets and sizes as DLIO keeps them, for its workloads of Megatron
============ ====================================================================================

Only the sidecar is read, the data are not touched. A file appears under its name when it is
complete, and none is overwritten unless that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from dsprep.errors import UsageError
from dsprep.sidecar.export.files import Output, write_all
from dsprep.sidecar.sidecar import Sidecar

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "kerchunk": "references by which fsspec and zarr open the dataset as a virtual Zarr group",
        "dali-idx": "NVIDIA DALI's index, one file for each TFRecord file",
        "off-idx": "offsets and sizes of samples as DLIO keeps them, for its workloads of Megatron",
    }
)
"""Name to what it is; a kind is one module and one line."""


def export(
    sidecar: Sidecar,
    kind: str,
    out: Path | None = None,
    *,
    overwrite: bool = False,
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
        A directory for the files; or, if it is no directory and the kind has one file, that file.
        None: beside the dataset, or beside each of its files.
    overwrite
        Whether files that are there are replaced.
    notes
        Gets a clause for everything that was left out.

    Returns
    -------
    The files.

    Raises
    ------
    UsageError
        If there is no such kind, or the dataset cannot be told in it; the message names the field.
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
    outputs: Sequence[Output] = module.outputs(sidecar, notes if notes is not None else [])
    return write_all(outputs, sidecar.dataset.parent, out, overwrite)
