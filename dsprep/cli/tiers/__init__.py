"""``dsprep plan`` and ``dsprep cache``: fast tiers of storage."""

from __future__ import annotations

import typer

from dsprep.cli.options import register
from dsprep.cli.tiers import cache, plan
from dsprep.cli.usage import Group


def _group() -> typer.Typer:
    return typer.Typer(
        cls=Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app, caching = _group(), _group()


@app.callback()
def planning() -> None:
    """Compute what a way of training takes of a machine, before it is run."""


@caching.callback()
def keeping() -> None:
    """List, check and remove what Readers keep on a fast tier: Reader(cache=DIR)."""


register(app, plan.tiers, plan.EPILOG)
register(caching, cache.list_, cache.LIST)
register(caching, cache.verify, cache.VERIFY)
register(caching, cache.purge, cache.PURGE)
