"""The command line: one file per command, each of which parses, makes one library call, prints.

Only this package prints. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated

import typer

from dsprep import __version__
from dsprep.cli import (
    audit,
    bench,
    convert,
    demo,
    inspect,
    provenance,
    repack,
    synth,
    tiers,
    verify,
)
from dsprep.cli.options import register
from dsprep.cli.report import say
from dsprep.cli.tiers import stage
from dsprep.cli.usage import Group

app = typer.Typer(
    name="dsprep",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Each command has its own examples: dsprep convert --help",
)


def _version(value: bool) -> None:
    if value:
        say(f"dsprep {__version__}")
        raise typer.Exit


@app.callback()
def dsprep(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Prepare datasets for deep learning: HDF5, LMDB, TFRecord and Zarr."""


register(app, inspect.inspect, inspect.EPILOG)
register(app, convert.convert, convert.EPILOG)
register(app, repack.repack, repack.EPILOG)
register(app, verify.verify, verify.EPILOG)
register(app, provenance.provenance, provenance.EPILOG, provenance.Command)
register(app, audit.audit, audit.EPILOG)
app.add_typer(bench.app, name="bench", help="Measure ways of reading here, and compare reports.")
register(app, stage.stage, stage.EPILOG)
app.add_typer(tiers.app, name="plan", help="Compute what training takes of a machine.")
app.add_typer(tiers.caching, name="cache", help="List, check, remove copies on a fast tier.")
register(app, synth.synth, synth.EPILOG)
register(app, demo.demo, demo.EPILOG)


def main() -> None:
    """Run the command line; the entry point of the ``dsprep`` program."""
    for stream in (sys.stdout, sys.stderr):  # file names may be any bytes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.simplefilter("ignore")  # libraries' remarks to programmers; dsprep's are its notes
    try:
        app()
    except BrokenPipeError:  # the reader of the output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
