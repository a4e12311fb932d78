"""``dsprep bench``: one file per command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dsprep.cli.usage import Entry, Group


class BenchCommands(Group):
    """The commands of ``dsprep bench``."""

    available: ClassVar[Mapping[str, Entry]] = {
        "read": Entry(
            "dsprep.cli.bench.read:read",
            "Measure ways of reading a dataset, and show whether reading is slow.",
        ),
        "compare": Entry(
            "dsprep.cli.bench.compare:compare",
            "Put two reports side by side: what got faster or slower beyond the spread of repeats.",
        ),
        "storage": Entry("dsprep.cli.bench.storage:storage", "Measure what a storage gives."),
    }


group = BenchCommands(
    name="bench",
    help="Measure ways of reading here, and compare reports.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
