"""Checks and warnings of a `Reader` before it reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from dsprep.core.schema import Schema
from dsprep.errors import UsageError
from dsprep.reader.cached import CacheWarning
from dsprep.reader.options import ReaderOptions
from dsprep.reader.order import Assignment
from dsprep.reader.ranks import RankInfo
from dsprep.sidecar.proofs import WORDS
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.alike import OrderWarning, sorting_field

_looked_at: set[Path] = set()  # sidecars of which it is known whether their samples are sorted


class UnverifiedWarning(UserWarning):
    """Some fields have no checksum, though verifying was asked for."""


def check_steps(order: Assignment) -> None:
    """Raise `UsageError` if no rank would have a batch."""
    n, parts = int(order.edges[-1]), 1 if order.mini is None else order.mini.parts
    if order.remainder == "drop" and n and n // parts // order.world_size < order.batch_size:
        cut = f" in {parts} mini-epochs" if parts > 1 else ""
        raise UsageError(
            f"drop leaves nothing: {n} samples{cut} are fewer than a batch of {order.batch_size} "
            f"for each of {order.world_size} ranks",
            fix="take smaller batches or fewer ranks, or pad",
        )


def find_sums(opened: Sidecar, schema: Schema) -> dict[str, str | None]:
    """Return the checksums of each field, by name; raise `UsageError` if there are none."""
    numbers = [i for i, entry in enumerate(opened.content.files) if entry.samples]
    described = opened.proofs.describe(numbers, schema.names)
    lacking = opened.proofs.lacking(described, opened.dataset)
    if lacking:
        warnings.warn(lacking, UnverifiedWarning, stacklevel=4)
    return described


def is_cacheable(verified: Mapping[str, str | None]) -> bool:
    """Return whether a copy can be verified as requested; warn if not."""
    kinds = {WORDS["member"], WORDS["block"]} & set(verified.values())
    if kinds:
        warnings.warn(
            f"the cache is not used: verify=True compares with the {min(kinds)}, "
            "of which a copy has parts; leave out verify, or repack the dataset",
            CacheWarning,
            stacklevel=5,
        )
    return not kinds


def warn_of_order(
    options: ReaderOptions, order: Assignment, rank_info: RankInfo, opened: Sidecar
) -> None:
    """Warn, once for each dataset, if samples are sorted by a field and groups not mixed."""
    several = options.buffers_mixed is None and options.shuffle == "group"
    if not several or options.cache is not None or rank_info.rank:
        return
    if order.groups <= order.mixed or opened.path in _looked_at:
        return
    _looked_at.add(opened.path)
    if name := sorting_field(opened):
        warnings.warn(
            f"{opened.dataset}: samples are sorted by {name}, and only those that are read "
            "together are shuffled, so a batch sees few values of it; repack with --shuffle "
            "SEED, or give buffers_mixed=K (K groups shuffled together) or shuffle='global'",
            OrderWarning,
            stacklevel=4,
        )
