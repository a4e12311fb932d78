"""Files with one group per sample: which groups those are, and which datasets make a field.

A sample is a group; its fields are the datasets in it, by their paths in the group. Groups side by
side are taken for samples where all have the same datasets, and their names differ in a number
alone or they are many. Where the same structure may as well mean something else, the user is asked
(`Doubt`). What is decided here follows from names, shapes and types; no values are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import FieldSpec
from dsprep.formats.hdf5.datasets import Contents, Held
from dsprep.formats.samples import listed, natural_key

_NUMBER = re.compile(r"\d+")
_MANY = 10
"""So many groups that are alike are samples, whatever their names and shapes."""

_ODD = 0.1
"""Groups that differ from the others, as a share; where there are more, they are no samples."""


@dataclass(frozen=True)
class Samples:
    """Groups that are samples.

    Attributes
    ----------
    parent
        The group that they lie in; ``""`` is the root.
    groups
        Their paths, in natural order.
    members
        Path in the group to the shapes that it has in all groups, int64 of ``(samples, axes)``.
    """

    parent: str
    groups: tuple[str, ...]
    members: dict[str, NDArray[np.int64]]

    def field(self, member: str) -> str:
        """Return how ``--field`` spells a field of these groups, and of no others."""
        return f"{self.parent}/*/{member}".lstrip("/")

    def has(self, specs: Iterable[FieldSpec]) -> bool:
        """Whether fields that the user named are all fields of these groups."""
        known = {*self.members, *map(self.field, self.members)}
        return all(spec.path in known for spec in specs)

    def __str__(self) -> str:
        first, last = self.groups[0], self.groups[-1]
        fields = listed(list(self.members))
        return f"{len(self.groups)} samples, {first} to {last}, with the fields {fields}"


@dataclass(frozen=True)
class Doubt:
    """Why groups may or may not be samples; `samples` if they are when the user says so."""

    reason: str
    samples: Samples | None = None


def find(contents: Contents) -> list[Samples | Doubt]:
    """Return the groups of a file that are or may be samples, only those next to the root."""
    inside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in contents.datasets:
        parts = path.split("/")
        for k in range(len(parts) - 1):
            inside["/".join(parts[:k])]["/".join(parts[: k + 1])].add("/".join(parts[k + 1 :]))
    by_depth: dict[int, list[str]] = defaultdict(list)
    for parent in inside:
        by_depth[len(parent.split("/")) if parent else 0].append(parent)
    for depth in sorted(by_depth):
        judged = (_judge(parent, inside[parent], contents) for parent in by_depth[depth])
        found = [j for j in judged if j is not None]
        if found:
            return found
    return []


def _judge(
    parent: str, children: dict[str, set[str]], contents: Contents
) -> Samples | Doubt | None:
    """Do what `find` does for the groups directly in one group."""
    family = _family(children)
    if len(family) < 2:
        return None
    kinds = Counter(frozenset(children[g]) for g in family)
    members = kinds.most_common(1)[0][0]
    groups = [g for g in family if children[g] == members]
    odd = [g for g in family if children[g] != members]
    if len(groups) < 2 or len(odd) > max(1, _ODD * len(family)):
        return None
    order = {path: i for i, path in enumerate(contents.datasets)}
    shapes: dict[str, NDArray[np.int64]] = {}
    reason = None
    for member in sorted(members, key=lambda m: order[f"{groups[0]}/{m}"]):
        held = [contents.datasets[f"{g}/{member}"][1] for g in groups]
        differing = next((k for k, h in enumerate(held) if not _fits(h, held[0])), None)
        if differing is None:
            shapes[member] = np.array([h.shape for h in held], np.int64).reshape(len(held), -1)
        elif reason is None:
            reason = (
                f"{member} is {_show(held[0])} in {groups[0]} and {_show(held[differing])} in "
                f"{groups[differing]}, and samples of a field may differ in their first axis only"
            )
    if reason is None and odd:
        reason = f"{odd[0]} differs from the others in {listed(sorted(members ^ children[odd[0]]))}"
    if reason is not None and _one_axis(
        contents, (f"{g}/{m}" for g in family for m in children[g])
    ):
        return None  # fields of their own, with as many samples
    samples = Samples(parent, tuple(groups), shapes) if shapes else None
    if (
        reason is None
        and len(groups) < _MANY
        and all(_one_axis(contents, (f"{g}/{m}" for m in members)) for g in groups)
    ):
        reason = "in each of them, the first axis may count samples as well"
    return samples if reason is None else Doubt(reason, samples)


def _family(children: Iterable[str]) -> list[str]:
    """Return the groups that may be samples by their names, in natural order."""
    names = {path: path.rpartition("/")[2] for path in children}
    patterns = Counter(_NUMBER.sub("#", n) for n in names.values() if _NUMBER.search(n))
    found = list(names)
    if patterns and patterns.most_common(1)[0][1] >= 2:
        pattern = patterns.most_common(1)[0][0]
        found = [p for p, n in names.items() if _NUMBER.sub("#", n) == pattern]
    elif len(found) < _MANY:
        return []
    return sorted(found, key=natural_key)


def _one_axis(contents: Contents, paths: Iterable[str]) -> bool:
    """Whether datasets all have a first axis, and of the same length."""
    lengths = {contents.datasets[path][1].shape[:1] for path in paths}
    return len(lengths) == 1 and () not in lengths


def _fits(one: Held, other: Held) -> bool:
    """Whether two datasets can be samples of one field."""
    return (one.carrier, one.kind, one.vlen, len(one.shape), one.shape[1:]) == (
        other.carrier,
        other.kind,
        other.vlen,
        len(other.shape),
        other.shape[1:],
    )


def _show(held: Held) -> str:
    text = "sequences of " if held.vlen else ""
    return f"{text}{held.carrier}[{','.join(map(str, held.shape))}]"
