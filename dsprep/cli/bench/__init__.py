"""``dsprep bench``: one file per command."""

from __future__ import annotations

import typer

from dsprep.cli.bench.compare import register as compare
from dsprep.cli.bench.read import register as read
from dsprep.cli.usage import Group


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    bench = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for each in (read, compare):
        each(bench)
    app.add_typer(bench, name="bench", help="Measure ways of reading here, and compare reports.")
