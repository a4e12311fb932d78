"""Options that the benchmarks share."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

HOW = "How to measure"
OUTPUT = "What to write"

Repeat: TypeAlias = Annotated[
    int,
    typer.Option(
        "--repeat", "-r", metavar="N", min=1, help="Runs of each, in turn.", rich_help_panel=HOW
    ),
]
WarmServer: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--warm-server",
        help="Read all once before; drop this node's pages only.",
        rich_help_panel=HOW,
    ),
]
EvictServer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="CMD",
        help="Run before each cold run, to drop the server's cache.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
Json: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write all figures as JSON; - for stdout.",
        allow_dash=True,
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Html: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page for a browser.", rich_help_panel=OUTPUT),
]
Csv: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the table as CSV.", rich_help_panel=OUTPUT),
]


def command_line() -> str:
    """Return the command as it was typed, for the report."""
    return shlex.join(["dsprep", *sys.argv[1:]])
