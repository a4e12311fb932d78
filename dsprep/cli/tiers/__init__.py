"""``dsprep plan``: one file per command."""

from __future__ import annotations

import typer

from dsprep.cli.options import register
from dsprep.cli.tiers import plan
from dsprep.cli.usage import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def planning() -> None:
    """Compute what a way of training takes of a machine, before it is run."""


register(app, plan.tiers, plan.EPILOG)
