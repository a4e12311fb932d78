"""``dsprep cache``, and ``dsprep stage``: fast tiers of storage."""

from __future__ import annotations

from dsprep.cli import command
from dsprep.cli.command import Entry

caching = command.group(
    "cache",
    "List and remove copies on a fast tier.",
    {
        "list": Entry(
            "dsprep.cli.tiers.cache:list_",
            "List the copies of a cache: what of which dataset, its size, who uses it.",
        ),
        "purge": Entry(
            "dsprep.cli.tiers.cache:purge",
            "Remove copies from a cache that are not in use; nothing but copies is removed.",
        ),
    },
)
