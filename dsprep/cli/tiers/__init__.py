"""``dsprep plan`` and ``dsprep cache``: fast tiers of storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dsprep.cli.usage import Entry, Group


class PlanCommands(Group):
    """The commands of ``dsprep plan``."""

    available: ClassVar[Mapping[str, Entry]] = {
        "tiers": Entry(
            "dsprep.cli.tiers.plan:tiers",
            "Plan mini-epoch training: parts that fit the fast tier, repeats that hide the slow "
            "one.",
        ),
        "read": Entry(
            "dsprep.cli.tiers.plan_read:plan_read",
            "Predict what a job needs from storage, and what it will wait for.",
        ),
        "papers": Entry(
            "dsprep.cli.tiers.plan_read:papers",
            "Compare the model with the figures of the papers: theirs, ours, and the ratio.",
        ),
    }


class CacheCommands(Group):
    """The commands of ``dsprep cache``."""

    available: ClassVar[Mapping[str, Entry]] = {
        "list": Entry(
            "dsprep.cli.tiers.cache:list_",
            "List the copies of a cache: what of which dataset, its size, who uses it.",
        ),
        "verify": Entry(
            "dsprep.cli.tiers.cache:verify",
            "Compare all copies of a cache with the checksums that they had when they were made.",
        ),
        "purge": Entry(
            "dsprep.cli.tiers.cache:purge",
            "Remove copies from a cache that are not in use; nothing but copies is removed.",
        ),
    }


planning = PlanCommands(
    name="plan",
    help="Work out what training needs from storage.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
caching = CacheCommands(
    name="cache",
    help="List, check, remove copies on a fast tier.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
