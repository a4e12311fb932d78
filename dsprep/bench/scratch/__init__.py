"""The dataset in the forms that strategies need: in place where it has one, else written once.

`plan` decides, looking at files only; `prepare` writes to a temporary folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsprep.bench.scratch.folder import check_free
from dsprep.bench.scratch.planning import Preparation, plan
from dsprep.core.schema import Ints
from dsprep.source.dataset import open_dataset
from dsprep.writing.create_sidecar import dataset_of

__all__ = ["Preparation", "Prepared", "plan", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A form that is ready to be read."""

    path: Path  # the file or directory with the samples, or a sidecar
    data: Path | None = None  # the dataset, where `path` is a sidecar that is not beside it
    numbers: Ints | None = None  # the samples that are taken, where it has more


def prepare(plan: Preparation) -> dict[str, Prepared]:
    """Write what a plan says; return every form that can be read, by name.

    Raises
    ------
    TargetError
        If there is not enough space.
    DsprepError, OSError
        If the data are damaged, or a form cannot be written; no part of it is left.
    """
    if plan.writes:
        check_free(plan.folder, plan.needed)
        with open_dataset(list(plan.data), plan.reading) as source:
            for item in plan.writes.values():
                if not item.path.exists():  # written for another plan
                    item.make(plan.chosen(source))
    dataset = dataset_of(plan.files)
    forms = {name: Prepared(dataset, numbers=plan.numbers) for name in plan.in_place}
    for name, item in plan.items.items():
        numbers = None if item.data is None else plan.numbers
        forms[name] = Prepared(item.path, item.data, numbers)
    return forms
