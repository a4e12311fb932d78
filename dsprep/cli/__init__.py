"""The command line: one file per command, each of which parses, makes one library call, prints.

Only this package prints. A command is imported when it runs: `--version` and the first page of
help load none.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Annotated

import typer

from dsprep import __version__
from dsprep.cli.command import Entry, Group
from dsprep.cli.report import say

COMMANDS: Mapping[str, Entry] = {
    "inspect": Entry(
        "dsprep.cli.inspect:inspect",
        "Show what a dataset holds, how it is stored, and what reading it will cost.",
    ),
    "convert": Entry(
        "dsprep.cli.convert:convert", "Convert a dataset between HDF5, LMDB, TFRecord and Zarr."
    ),
    "repack": Entry(
        "dsprep.cli.repack:repack",
        "Rewrite a dataset so that one read fetches a whole group of samples.",
    ),
    "verify": Entry(
        "dsprep.cli.verify:verify",
        "Compare two datasets sample by sample, bit for bit, whatever their formats.",
    ),
    "provenance": Entry(
        "dsprep.cli.provenance:provenance",
        "Write a small sidecar from which the location of every sample is computed, or use it.",
    ),
    "audit": Entry(
        "dsprep.cli.audit:audit",
        "Prove that every sample comes once: compute what each rank delivers in each epoch.",
    ),
    "stage": Entry(
        "dsprep.cli.tiers.stage:stage",
        "Copy what a node will read in some epochs to its own storage, before the job.",
    ),
    "synth": Entry(
        "dsprep.cli.synth:synth",
        "Make a dataset with the record structure of a real one, at any size.",
    ),
    "demo": Entry(
        "dsprep.cli.demo:demo",
        "Convert small datasets to all four formats, repack them, and prove that no bit changes.",
    ),
    "bench": Entry("dsprep.cli.bench:group", "Measure ways of reading here, and compare reports."),
    "plan": Entry(
        "dsprep.cli.plan:plan", "Predict what a job needs from storage, and what it waits for."
    ),
    "cache": Entry("dsprep.cli.tiers:caching", "List and remove copies on a fast tier."),
}


class Commands(Group):
    """All commands of dsprep."""

    available = COMMANDS


app = typer.Typer(
    name="dsprep",
    cls=Commands,
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


def main() -> None:
    """Run the command line; the entry point of the ``dsprep`` program."""
    if sys.flags.optimize > 1:
        sys.exit(
            "dsprep: error: commands are made of docstrings, which Python strips here; run it "
            "without -OO, or with PYTHONOPTIMIZE=1"
        )
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file of data gets the number
        os.set_inheritable(null, True)
    sys.stdout = sys.stdout or os.fdopen(null, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(null, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):  # file names may be any bytes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.simplefilter("ignore")  # libraries' remarks to programmers; dsprep's are its notes
    if sys.argv[1:2] != ["bench"]:  # which runs loaders of the user's own
        # When numpy is imported, OpenBLAS starts a thread per core, which takes 0.1 s of them.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code: object = None
    try:
        try:
            app()
        except SystemExit as ended:
            code = ended.code
            sys.stdout.flush()
            raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is not written yet
        if isinstance(error, BrokenPipeError):  # the reader of the output, such as `head`, has gone
            sys.exit(141)
        sys.exit(code or f"dsprep: error: standard output: {error.strerror}")  # type: ignore[arg-type]
