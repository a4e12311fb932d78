"""``dsprep bench``: one file per command."""

from __future__ import annotations

from dsprep.cli import command
from dsprep.cli.command import Entry

group = command.group(
    "bench",
    "Measure ways of reading here, and compare reports.",
    {
        "read": Entry(
            "dsprep.cli.bench.read:read",
            "Measure ways of reading a dataset, and show whether reading is slow.",
        ),
        "compare": Entry(
            "dsprep.cli.bench.compare:compare",
            "Put two reports side by side: what got faster or slower beyond the spread of repeats.",
        ),
        "storage": Entry("dsprep.cli.bench.storage:storage", "Measure what a storage gives."),
    },
)
