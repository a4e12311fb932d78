"""``dsprep bench``: one file per command."""

from __future__ import annotations

import typer

from dsprep.cli.bench import compare, read
from dsprep.cli.options import register
from dsprep.cli.usage import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
register(app, read.read, read.EPILOG, chosen=read.Chosen)
register(app, compare.compare, compare.EPILOG)
