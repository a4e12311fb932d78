"""The options of a `Reader`, and their checks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import numpy as np

from dsprep.core.arguments import OrderArguments
from dsprep.core.schema import LARGEST, Ints, Schema
from dsprep.errors import UsageError
from dsprep.reader.cached import Cache
from dsprep.reader.data import Paths
from dsprep.reader.each import Collate, check_call
from dsprep.reader.engines import NAMES
from dsprep.reader.mini_epochs import MiniEpochs, Policy
from dsprep.reader.order import REMAINDERS, SHUFFLES, Assignment, Remainder, Shuffle
from dsprep.reader.subset import Subset, kept_samples, read_weights
from dsprep.reader.transforms import Transforms, as_transforms
from dsprep.reader.units import cut_units
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.files import names_of

Repeats: TypeAlias = int | Sequence[int] | Policy
"""Passes of each part of an epoch, as users write them."""


@dataclass(frozen=True, eq=False, repr=False)
class OrderOptions:
    """Parameters of a `Reader` that determine the samples and their order, checked."""

    path: Paths | Sidecar
    batch_size: int
    _: KW_ONLY
    buffer_size: int | str | None = None
    seed: int = 0
    shuffle: Shuffle | bool = "group"
    remainder: Remainder = "ragged"
    fields: Sequence[str] = ()
    buffers_mixed: int | None = None
    mini_epochs: int | MiniEpochs | None = None
    repeats: Repeats = 1
    subset: Any = None
    weights: Any = None
    data: Paths | None = None

    def __new__(cls, *_args: Any, **options: Any) -> Self:
        """Raise `UsageError` for unknown options, before Python raises a `TypeError`."""
        owner = next(each for each in cls.__mro__ if "__init__" in vars(each))
        if "__dataclass_fields__" in vars(owner):  # else a subclass has options of its own
            check_names(options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.path, Sidecar):
            names_of("path", self.path)
        if isinstance(self.fields, str):
            object.__setattr__(self, "fields", (self.fields,))
        if isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", "group" if self.shuffle else "none")
        check_word("remainder", self.remainder, REMAINDERS)
        check_numbers(self, ("batch_size",), ("buffers_mixed",))
        object.__setattr__(self, "seed", at_least("seed", self.seed, 0, 1 << 128))
        object.__setattr__(self, "repeats", checked_repeats(self.repeats))
        check_word("shuffle", cast("str", self.shuffle), SHUFFLES)
        mini = self.mini
        if mini is None and self.repeats != 1:
            raise UsageError("repeats are those of mini-epochs", fix="give mini_epochs, too")
        if mini is None:
            return
        if self.weights is not None:
            raise UsageError(
                "weights draw samples anew in each epoch, and mini-epochs pass the same ones again",
                fix="leave out one of them",
            )
        if mini.pools > 1 and self.shuffle == "global":
            raise UsageError(
                "a global shuffle has no pools: every node reads samples of all groups",
                fix="leave out pools, or shuffle groups",
            )

    @classmethod
    def of(cls, path: Paths, batch_size: int, order: OrderArguments, **more: Any) -> Self:
        """Return options as verbs take them: those of mini-epochs apart, and the sidecar."""
        check_names(order, OrderArguments.__annotations__)
        given: dict[str, Any] = {**order}
        sidecar = given.pop("sidecar", None)
        cut = {name: given.pop(name) for name in ("recompose", "pools") if name in given}
        if given.get("mini_epochs") is not None:
            given["mini_epochs"] = MiniEpochs(given["mini_epochs"], **cut)
        elif cut.get("pools", 1) != 1 or not cut.get("recompose", True):
            raise UsageError(f"{next(iter(cut))} is of mini-epochs", fix="give mini_epochs, too")
        if sidecar is not None:
            path, given["data"] = sidecar, path
        return cls(path, batch_size, **given, **more)

    @cached_property
    def mini(self) -> MiniEpochs | None:
        """The division of epochs into parts; None: there is none."""
        if self.mini_epochs is None:
            return None
        mini, repeats = self.mini_epochs, self.repeats
        if not isinstance(mini, MiniEpochs):
            mini = MiniEpochs(mini)
        parts, pools = at_least("mini_epochs", mini.parts, 1), at_least("pools", mini.pools, 1)
        known = (repeats,) if isinstance(repeats, int) else repeats
        known = known if isinstance(known, tuple) else ()
        return replace(mini, parts=parts, pools=pools, repeats=known)


def chosen_fields(options: OrderOptions, sidecar: Sidecar) -> Schema:
    """Return the fields that are read: those named, or all."""
    return Schema(tuple(sidecar.schema[n] for n in options.fields or sidecar.schema.names))


def subset_samples(given: Any, sidecar: Sidecar) -> Ints | None:
    """Return the samples of a subset as users give it, rising; None: all; `UsageError`: none."""
    subset = Subset.of(given)
    if subset is None:
        return None
    kept = kept_samples(subset, sidecar)
    if not len(kept):
        raise UsageError("the subset has no samples", where=sidecar.dataset)
    return kept


def assign(options: OrderOptions, sidecar: Sidecar, world_size: int) -> Assignment:
    """Return the order of the samples of a dataset, and their assignment to ranks.

    Raises
    ------
    UsageError
        If there are fewer groups than mini-epochs.
    """
    schema = chosen_fields(options, sidecar)
    shuffle = cast("Shuffle", options.shuffle)
    kept = subset_samples(options.subset, sidecar)
    weights = None if options.weights is None else read_weights(options.weights, sidecar, kept)
    units = shuffle, options.buffer_size, options.buffers_mixed
    stored, edges, mixed = cut_units(sidecar, schema, *units, kept)
    groups, mini = int(np.count_nonzero(np.diff(edges))), options.mini
    if mini is not None and mini.parts > max(1, groups):
        raise UsageError(
            f"{mini.parts} mini-epochs are more than the {groups} groups",
            fix="take fewer, or repack with a smaller --buffer-size",
        )
    how = shuffle, options.seed, mixed, options.remainder
    sizes = world_size, options.batch_size
    return Assignment(edges, *how, *sizes, mini, stored, kept, weights)


@dataclass(frozen=True, eq=False, repr=False)
class ReaderOptions(OrderOptions):
    """The parameters of a `Reader`, which are described there, checked."""

    _: KW_ONLY
    rank: int | None = None
    world_size: int | None = None
    epochs: int | None = 1
    on_break: str = "continue"
    buffers: int | None = None
    cache: str | Path | Cache | None = None
    io_threads: int | None = None
    transfer_size: int | None = None
    engine: str = "buffered"
    verify: bool = False
    transform: Transforms = None
    collate: Callable[..., Any] | None = None
    readers_per_node: int | None = None
    stagger: int | None = None
    comm: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collate is not None and as_transforms(self.transform):
            raise UsageError("collate and transform exclude each other", fix="give one of them")
        optional = ("epochs", "io_threads", "transfer_size", "readers_per_node", "stagger")
        check_numbers(self, (), (*optional, "buffers"))
        policy = None if self.cache_options is None else self.cache_options.policy
        if policy == "mini-epoch" and self.mini_epochs is None:
            raise UsageError("there are no mini-epochs to keep", fix="give mini_epochs, too")
        check_word("engine", self.engine, NAMES)
        check_word("on_break", self.on_break, ("continue", "restart"))

    @cached_property
    def transforms(self) -> tuple[Any, ...]:
        """Functions applied to every batch, in order: `transform`, or the caller of `collate`."""
        if self.collate is None:
            return as_transforms(self.transform)
        collate = self.collate if isinstance(self.collate, Collate) else Collate(self.collate)
        check_call("collate", collate.__wrapped__, "samples")
        return (collate,)

    @cached_property
    def cache_options(self) -> Cache | None:
        """Directory, size and policy of the cache; None: there is no cache."""
        cache = Cache(self.cache) if isinstance(self.cache, (str, Path)) else self.cache
        if cache is None or cache.policy is not None:
            return cache
        return replace(cache, policy="epoch" if self.mini_epochs is None else "mini-epoch")


_NO_WORKERS = "threads read, so no workers are needed; io_threads= is how many"
_SAMPLERS = "dsprep.torch.Samples takes the samplers of a DataLoader"
_OF_LOADERS = {
    "drop_last": 'remainder="drop" leaves such samples out, and "pad" repeats some',
    "num_workers": _NO_WORKERS,
    "workers": _NO_WORKERS,
    "persistent_workers": _NO_WORKERS,
    "prefetch_factor": "batches are read ahead without it; buffers= is how many units",
    "sampler": _SAMPLERS,
    "indices": "subset= takes numbers, a mask, a condition, or a part of a split",
    "where": "subset= takes a condition, such as subset='label in (3, 5)'",
    "split": "subset= takes a part of a split, such as subset='train of train=0.9,val=0.1'",
    "batch_sampler": _SAMPLERS,
}
"""Replacements for options that other loaders have."""


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UsageError` for the first option that is none of those known, and name the nearest."""
    names = [*known]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            fix = f"did you mean {near[0]}=?" if near else "options are " + ", ".join(names)
            raise UsageError(f"there is no option {name}", fix=_OF_LOADERS.get(name, fix))


def at_least(name: str, value: Any, minimum: int, maximum: int = LARGEST) -> int:
    """Return an option as a number; `UsageError` unless it is a whole one in these bounds."""
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum:
        limit = f", at most {maximum}" * (number and value > maximum)
        raise UsageError(
            f"{name} is {value!r}", expected=f"a whole number, at least {minimum}{limit}"
        )
    return int(value)


def check_numbers(options: Any, needed: Sequence[str], optional: Sequence[str]) -> None:
    """Make options numbers, of which the optional ones may be None; see `at_least`."""
    for name in (*needed, *optional):
        value = getattr(options, name)
        if value is not None or name in needed:
            object.__setattr__(options, name, at_least(name, value, 1))


def check_word(name: str, word: str, known: Sequence[str]) -> None:
    """Raise `UsageError` if an option is none of the known words."""
    if word not in known:
        raise UsageError(f"{name} is {word!r}", expected="one of " + ", ".join(known))


def checked_repeats(given: Any) -> int | tuple[int, ...] | Policy:
    """Return repeats whose numbers are possible; raise `UsageError` for others."""
    if hasattr(given, "enough"):
        return given  # type: ignore[no-any-return]
    if isinstance(given, Sequence) and given and not isinstance(given, str):
        return tuple(at_least("repeats", n, 1) for n in given)
    return at_least("repeats", given, 1)
