"""Datasets with the record structures of real ones, at any size: `synth`, `names`, `describe`.

Each dataset is written with the library that its real writer uses (h5py, py-lmdb) and never with
dsprep's own writers, so that it is an independent test input. A module of this package is one
family of datasets; its docstring is the specification of the files it writes.

- The same name, samples, scale and seed give the same bytes, on one machine with one version of
  the libraries; another seed gives other values.
- A sample is the same however many others are made.
- Memory is bounded by a few samples (or a block of 1,024 small ones), whatever the dataset's size.
- The output appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from dsprep.core.schema import LARGEST
from dsprep.errors import TargetError, UsageError, require
from dsprep.sidecar.spec import NAMES
from dsprep.source.files import check_replaceable
from dsprep.storage.atomic import put
from dsprep.storage.durable import sync, sync_directory
from dsprep.storage.trees import remove
from dsprep.synth import caffe, cosmic, cosmoflow, deepcam, ffn, neuron, nova, oc20  # noqa: F401
from dsprep.synth.job import RECIPES, Progress, Recipe, SynthJob

__all__ = ["Synthesised", "describe", "names", "synth"]


@dataclass(frozen=True)
class Synthesised:
    """A dataset that was made.

    Attributes
    ----------
    path
        The file or directory.
    files
        How many files it has.
    samples
        How many samples, over all its parts (training, validation, ...).
    nbytes
        Bytes of all files.
    open_hint
        The command line that shows it, with the options that its fields need.
    """

    path: Path
    files: int
    samples: int
    nbytes: int
    open_hint: str


def names() -> tuple[str, ...]:
    """Return the names of the datasets that can be made."""
    return tuple(RECIPES)


def describe(name: str) -> str:
    """Return one line on the dataset called `name`.

    Raises
    ------
    UsageError
        If there is none of that name.
    """
    return _recipe(name).about


def synth(
    name: str,
    out: Path,
    *,
    samples: int | None = None,
    scale: float | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Synthesised:
    """Make the dataset called `name` at `out`.

    Parameters
    ----------
    name
        One of `names`.
    out
        The file or directory to create; the dataset decides which. Missing parents are created.
    samples
        How many samples, at least 1. The default makes about 1 to 20 MB.
    scale
        The factor on the samples' edge lengths, in (0, 1]; 1 is the real size.
    seed
        At least 0.
    overwrite
        Replace what is at `out`. A directory that holds anything but datasets is never replaced.
    progress
        Called with ``(samples done, samples)`` meanwhile.

    Raises
    ------
    UsageError
        If the name, samples, scale or seed cannot be.
    TargetError
        If `out` exists and may not be replaced, or cannot be written.
    """
    recipe = _recipe(name)
    job = SynthJob(
        path=out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial"),
        samples=recipe.samples if samples is None else samples,
        scale=recipe.scale if scale is None else scale,
        seed=seed,
        progress=progress or (lambda done, total: None),
    )
    _check(job, out)
    _check_target(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        inside, *options = recipe.write(job) or ("",)
        files = _files(job.path)
        for path in files:
            with path.open("rb") as file:
                sync(file.fileno())
        nbytes = sum(path.stat().st_size for path in files)
        _check_target(out, overwrite)  # it may have appeared since
        _publish(job.path, out)
    finally:
        remove(job.path)
    command = ["dsprep", "inspect", str(out / inside), *options]
    return Synthesised(out, len(files), job.samples, nbytes, shlex.join(command))


def _recipe(name: str) -> Recipe:
    expected = "one of " + ", ".join(RECIPES)
    require(name in RECIPES, UsageError, f"there is no dataset {name!r}", expected=expected)
    return RECIPES[name]


def _check(job: SynthJob, out: Path) -> None:
    """Raise `UsageError` unless the job can be done."""
    require(out.name, UsageError, f"{str(out)!r} is not a name for an output")
    words, expected = f"cannot make {job.samples} samples", f"1 to {LARGEST}"
    require(1 <= job.samples <= LARGEST, UsageError, words, expected=expected)
    words, expected = f"scale {job.scale} is not possible", "above 0, at most 1"
    require(0 < job.scale <= 1, UsageError, words, expected=expected)
    words, expected = f"seed {job.seed} is not possible", "at least 0"
    require(job.seed >= 0, UsageError, words, expected=expected)


def _check_target(out: Path, overwrite: bool) -> None:
    """Raise `TargetError` if something is at `out` that may not be replaced."""
    if os.path.lexists(out):
        fix = "choose another name, or overwrite it with --overwrite"
        require(overwrite, TargetError, "the output exists already", where=out, fix=fix)
        check_replaceable(out)


def _files(path: Path) -> list[Path]:
    """Return all files at or below `path`, in order."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if not p.is_dir() or p.is_symlink())
    return [path]


def _publish(made: Path, out: Path) -> None:
    """Give `made` the name `out`; what was there, and its sidecar, are removed."""
    old = made.with_suffix(".old")
    put(made, out, old)
    for suffix in NAMES:  # they describe the old data
        remove(out.with_name(out.name + suffix))
    sync_directory(out.parent)
    remove(old)
