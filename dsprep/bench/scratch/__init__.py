"""The dataset in the forms that strategies need: in place where it has one, else written once.

`plan` decides, looking at files only; `prepare` writes. Each form is in a directory of its own,
which gets its name when all in it is on the disk: what was interrupted is never taken for whole.
The name states what it was made from and how, so that it is used again until that changes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from dsprep.bench.scratch.folder import check_free, locked, sync_tree
from dsprep.bench.scratch.planning import MADE, Item, Plan, chosen, complete, plan, told_of
from dsprep.bench.strategies import find
from dsprep.core.marks import Mark, sample
from dsprep.core.storage import remove, sync_directory, tree_nbytes
from dsprep.errors import DsprepError, UnsupportedError
from dsprep.formats.base import Source
from dsprep.sidecar.spec import write_json
from dsprep.source.dataset import open_dataset
from dsprep.verbs.convert import ConvertOptions, plan_job
from dsprep.verbs.repack import RepackOptions, plan_repack, run_repack
from dsprep.write.create_sidecar import Made, dataset_of
from dsprep.write.job import RunOptions
from dsprep.write.run import run_job

__all__ = ["Forms", "Plan", "Prepared", "opened", "plan", "prepare"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (container, samples, payload bytes) done so far."""


@dataclass(frozen=True)
class Prepared:
    """A container ready to be read."""

    path: Path  # it; of a dataset whose sidecar is in the scratch folder, that sidecar
    nbytes: int  # bytes on disk
    in_place: bool  # whether these are the user's own data
    data: Path | None = None  # the dataset, where `path` is a sidecar that is not beside it


class Forms(dict[str, Prepared]):
    """Containers by name; asking for one that cannot be had says why."""

    def __init__(self, impossible: Mapping[str, str]) -> None:
        super().__init__()
        self.impossible = impossible

    def __missing__(self, name: str) -> Prepared:
        why = self.impossible.get(name, "it was not prepared")
        raise UnsupportedError(f"the dataset cannot be read as {name}: {why}")


def prepare(plan: Plan, progress: Progress | None = None) -> Forms:
    """Write what a plan says; return every container that can be read, by name.

    Raises
    ------
    TargetError
        If there is not enough space, or another process writes to the folder.
    DsprepError, OSError
        If the data are damaged, or a container cannot be written; no part of it is left.
    """
    if plan.writes:
        _write(plan, progress)
    nbytes = sum(map(tree_nbytes, plan.files))
    dataset = dataset_of(plan.files)
    found = Forms(plan.impossible)
    found.update({name: Prepared(dataset, nbytes, True) for name in plan.in_place})
    for name, item in plan.items.items():
        if name == "source":
            found[name] = Prepared(item.path, nbytes, True, dataset)
        else:
            found[name] = Prepared(item.path, tree_nbytes(item.path), False)
    for name, other in plan.same.items():
        if other in found:
            found[name] = found[other]
    return found


@contextmanager
def opened(plans: Sequence[Plan]) -> Iterator[Callable[[Plan], Forms]]:
    """Yield `prepare`, and in the end remove what is temporary, also when interrupted."""
    try:
        yield prepare
    finally:
        for plan in plans:
            if plan.temporary:
                remove(plan.folder)


def _write(plan: Plan, progress: Progress | None) -> None:
    check_free(plan.folder, plan.needed)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with locked(plan.folder), open_dataset(list(plan.data), plan.reading) as source:
        _remove_outdated(plan)
        for name in plan.writes:
            if not complete(plan.items[name]):  # else it was for an earlier plan
                _make(plan, plan.items[name], source, progress)


def _remove_outdated(plan: Plan) -> None:
    """Remove what was prepared from the same files before they changed: it is never used again."""
    now = next(iter(plan.items.values())).told
    for marker in plan.folder.glob(f"*/{MADE}"):
        then = told_of(marker.parent).get("from") or {}
        if then.get("data") == now["data"] and then.get("identity") != now["identity"]:
            remove(marker.parent)


def _make(plan: Plan, item: Item, source: Source, progress: Progress | None) -> None:
    """Write one container beside its place, and rename it when it is on the disk."""
    partial = item.directory.with_name(f"{item.directory.name}.partial")
    remove(partial)
    partial.mkdir()
    try:
        _fill(plan, item, source, partial / item.file, progress)
        made = partial / item.file
        sync_tree(partial)  # which settles the times of what was written
        mark, files = Mark.with_files(made)
        mark = replace(mark, sampled=sample(files))
        write_json({"from": dict(item.told), "mark": mark.to_json()}, partial / MADE)
        remove(item.directory)
        partial.rename(item.directory)
        sync_directory(plan.folder)
    except BaseException:
        remove(partial)
        raise


def _fill(plan: Plan, item: Item, source: Source, target: Path, progress: Progress | None) -> None:
    if item.made is not None:
        Made(item.made.content, item.made.companion, item.made.dataset, target).save()
        return

    def update(samples: int, nbytes: int) -> None:
        if progress is not None:
            progress(item.name, samples, nbytes)

    if item.name.startswith("own:"):
        _fill_own(item, chosen(source, plan.samples), target)
        return
    quick = RunOptions(durable=False)
    if item.name == "groups":
        how = RepackOptions(buffer_size=plan.group_text, to=item.format)
        planned = plan_repack(chosen(source, plan.samples), target, how)
        run_repack(planned, quick, measure=False, progress=lambda part, n, size: update(n, size))
        return
    form = ConvertOptions(to=item.format, write=item.options, samples=f"0:{plan.samples}")
    run_job(plan_job(source, target, form), source, quick, update)


def _fill_own(item: Item, source: Source, target: Path) -> None:
    """Let a strategy write its own form; whatever its project raises becomes one line."""
    strategy = item.name.removeprefix("own:")
    write: Callable[[Source, Path], None] = getattr(find(strategy).load(), "write")  # noqa: B009
    try:
        write(source, target)
    except (DsprepError, OSError, MemoryError):
        raise
    except Exception as error:
        raise DsprepError(
            f"{strategy} could not write its form of the dataset: {type(error).__name__}: {error}",
            fix="leave this strategy out",
        ) from error
    if not target.exists():
        raise OSError(errno.ENOENT, f"{strategy} wrote nothing", str(target))
