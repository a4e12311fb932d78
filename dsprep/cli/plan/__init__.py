"""``dsprep plan``: what training needs from storage, computed and not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dsprep.cli.usage import Entry, Group


class PlanCommands(Group):
    """The commands of ``dsprep plan``."""

    available: ClassVar[Mapping[str, Entry]] = {
        "tiers": Entry(
            "dsprep.cli.plan.tiers:tiers",
            "Plan mini-epoch training: parts that fit the fast tier, repeats that hide the slow "
            "one.",
        ),
        "read": Entry(
            "dsprep.cli.plan.read:plan_read",
            "Predict what a job needs from storage, and what it will wait for.",
        ),
        "papers": Entry(
            "dsprep.cli.plan.papers:papers",
            "Compare the model with the figures of the papers: theirs, ours, and the ratio.",
        ),
    }


planning = PlanCommands(
    name="plan",
    help="Work out what training needs from storage.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
