"""The options of a `Reader`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from dsprep.cache.copier import Throttle
from dsprep.cache.folder import Size
from dsprep.core.schema import Batch, Ints
from dsprep.core.units import parse_rate
from dsprep.errors import UsageError
from dsprep.reader.cached import POLICIES, CacheOptions, CachePolicy
from dsprep.reader.engines import NAMES
from dsprep.reader.memory import Allocate, anonymous
from dsprep.reader.mini_epochs import MiniEpochs, Policy, Schedule
from dsprep.reader.order import SHUFFLES, Remainder, Shuffle

Repeats: TypeAlias = int | Sequence[int] | Callable[[int], int] | Policy
"""How often each part of an epoch is passed, as users write it."""


@dataclass(frozen=True, eq=False, repr=False)
class ReaderOptions:
    """The parameters of a `Reader`, which are described there, checked."""

    path: str | Path
    batch_size: int
    _: KW_ONLY
    buffer_size: int | str | None = None
    seed: int = 0
    rank: int | None = None
    world_size: int | None = None
    epochs: int | None = 1
    shuffle: Shuffle = "group"
    drop_last: bool = False
    pad: bool = False
    fields: Sequence[str] = ()
    buffers: int | None = None
    buffers_mixed: int | None = None
    mini_epochs: int | None = None
    repeats: Repeats = 1
    recompose: bool = True
    pools: int = 1
    cache: str | Path | None = None
    cache_size: int | str | None = None
    cache_policy: str | None = None
    cache_bandwidth: int | str | None = None
    cache_shared: bool = False
    io_threads: int | None = None
    transfer_size: int | None = None
    engine: str = "buffered"
    verify: bool = False
    transform: Callable[[Batch], Any] | None = None
    transform_threads: int = 1
    readers_per_node: int | None = None
    stagger: int | None = None
    comm: Any = None
    node_key: str | None = None
    data: str | Path | None = None
    check_order: bool = True
    follow_external: bool = False
    allocate: Allocate = anonymous

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)):
            raise UsageError(f"path is {self.path!r}", expected="one dataset, or its sidecar")
        if isinstance(self.fields, str):
            raise UsageError(f"fields is {self.fields!r}", expected="a sequence of names")
        if self.transform is not None and not callable(self.transform):
            raise UsageError(f"transform is {self.transform!r}", expected="a function of a batch")
        if self.drop_last and self.pad:
            raise UsageError("drop_last and pad exclude each other", fix="give one of them")
        needed = ("seed", "batch_size", "transform_threads", "pools")
        optional = ("epochs", "io_threads", "transfer_size", "readers_per_node", "stagger")
        for name in (*needed, *optional, "buffers", "buffers_mixed", "mini_epochs"):
            value = getattr(self, name)
            if value is not None or name in needed:
                object.__setattr__(self, name, at_least(name, value, int(name != "seed")))
        object.__setattr__(self, "repeats", checked_repeats(self.repeats))
        if self.mini_epochs is None and self.repeats != 1:
            raise UsageError("repeats are those of mini-epochs", fix="give mini_epochs, too")
        self._check_cache()
        for name, known in (("shuffle", SHUFFLES), ("engine", NAMES)):
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name} is {value!r}", expected="one of " + ", ".join(known))

    def _check_cache(self) -> None:
        """Raise `UsageError` if the options of a cache make no sense."""
        check_pools(self.pools, self.mini_epochs, self.shuffle)
        for name in ("cache_size", "cache_policy", "cache_bandwidth", "cache_shared"):
            if self.cache is None and getattr(self, name) not in (None, False):
                raise UsageError(f"{name} is that of a cache", fix="give cache= a directory")
        if self.cache_policy not in (None, *POLICIES):
            expected = "one of " + ", ".join(POLICIES)
            raise UsageError(f"cache_policy is {self.cache_policy!r}", expected=expected)
        if self.cache_policy == "mini-epoch" and self.mini_epochs is None:
            raise UsageError("there are no mini-epochs to keep", fix="give mini_epochs, too")
        self.cache_options(1)

    def cache_options(self, threads: int) -> CacheOptions | None:
        """Return where copies are, and what they may take; None: there is no cache."""
        if self.cache is None:
            return None
        policy: CachePolicy = "epoch" if self.mini_epochs is None else "mini-epoch"
        if self.cache_policy is not None:
            policy = "epoch" if self.cache_policy == "epoch" else "mini-epoch"
        rate = self.cache_bandwidth
        bandwidth = parse_rate(f"{rate}B/s" if isinstance(rate, int) else rate) if rate else None
        size = Size.parse(self.cache_size)
        return CacheOptions(
            Path(self.cache), size, policy, Throttle(bandwidth), threads, self.cache_shared
        )

    @property
    def remainder(self) -> Remainder:
        """What happens to samples that do not fill a batch on every rank."""
        return "drop" if self.drop_last else "pad" if self.pad else "ragged"


def at_least(name: str, value: Any, minimum: int) -> int:
    """Return an option as a number; `UsageError` unless it is a whole one from `minimum` on."""
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not number or value < minimum:
        raise UsageError(f"{name} is {value!r}", expected=f"a whole number, at least {minimum}")
    return int(value)


def check_pools(pools: int, mini_epochs: int | None, shuffle: str) -> None:
    """Raise `UsageError` if there is nothing that could be divided among several pools."""
    if pools > 1 and mini_epochs is None:
        raise UsageError("pools are those of mini-epochs", fix="give mini_epochs, too")
    if pools > 1 and shuffle == "global":
        raise UsageError(
            "a global shuffle has no pools: every node reads samples of all groups",
            fix="leave out pools, or shuffle groups",
        )


def checked_repeats(given: Any) -> int | tuple[int, ...] | Callable[[int], int] | Policy:
    """Return repeats whose numbers are possible; raise `UsageError` for others."""
    if hasattr(given, "enough") or callable(given):
        return given  # type: ignore[no-any-return]
    if isinstance(given, Sequence) and given and not isinstance(given, str):
        return tuple(at_least("repeats", n, 1) for n in given)
    return at_least("repeats", given, 1)


def cut_epochs(
    parts: int, repeats: Repeats, recompose: bool, edges: Ints, pools: int = 1
) -> MiniEpochs:
    """Return how epochs are cut into parts, of what was checked.

    Raises
    ------
    UsageError
        If there are fewer groups than parts, or a function gives other repeats than numbers.
    """
    if parts > max(1, len(edges) - 1):
        raise UsageError(
            f"{parts} mini-epochs are more than the {len(edges) - 1} groups",
            fix="take fewer, or repack with a smaller --buffer-size",
        )
    known: tuple[int, ...] | Schedule = ()
    if isinstance(repeats, int):
        known = (repeats,)
    elif isinstance(repeats, tuple):
        known = repeats
    elif not hasattr(repeats, "enough"):
        function = cast("Callable[[int], int]", repeats)

        def checked(part: int) -> int:
            try:
                result = function(part)
            except Exception as error:
                raise UsageError(
                    f"repeats({part}) failed: {type(error).__name__}: {error}",
                    expected="a function of the number of a part, such as lambda part: 4 + part",
                ) from error
            return at_least(f"repeats({part})", result, 1)

        known = Schedule(checked)
    return MiniEpochs(parts, known, recompose, pools)
