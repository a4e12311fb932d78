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
from dsprep.cli.audit import register as audit
from dsprep.cli.bench import register as bench
from dsprep.cli.convert import register as convert
from dsprep.cli.demo import register as demo
from dsprep.cli.inspect import register as inspect
from dsprep.cli.provenance import register as provenance
from dsprep.cli.repack import register as repack
from dsprep.cli.report import say
from dsprep.cli.synth import register as synth
from dsprep.cli.usage import Group
from dsprep.cli.verify import register as verify

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


for register in (inspect, convert, repack, verify, provenance, audit, bench, synth, demo):
    register(app)


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
