"""``dsprep bench convert``, ``dsprep bench repack`` and ``dsprep bench provenance``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from dsprep.cli import options as opt
from dsprep.cli.bench.options import (
    HOW,
    Csv,
    EvictServer,
    Html,
    Json,
    Repeat,
    WarmServer,
    command_line,
)
from dsprep.cli.report import fail, guarded, run_bar
from dsprep.cli.usage import Command

if TYPE_CHECKING:
    from dsprep.bench.model import Report
    from dsprep.formats.base import OpenOptions

STATUS = "Exit status: 0 all was measured, 1 some row has no numbers, or bad data, 2 wrong usage."

CONVERT = f"""
dsprep bench convert train.h5

dsprep bench convert train.h5 --to lmdb --to tfrecord --cold --json new.json

dsprep bench convert 'shards/*.tfrecord' --to zarr --sync --scratch /fast

{STATUS}
"""

REPACK = f"""
dsprep bench repack train.h5 --to hdf5

dsprep bench repack train.h5 --to tfrecord -b 64MiB --shuffle 7 --html r.html

{STATUS}
"""

PROVENANCE = f"""
dsprep bench provenance train.lmdb

dsprep bench provenance train.tfrecord --cold --json provenance.json

{STATUS}
"""


class Formats(StrEnum):
    """Choices of ``--to``."""

    hdf5 = "hdf5"
    lmdb = "lmdb"
    tfrecord = "tfrecord"
    zarr = "zarr"


Data: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="The dataset.", show_default=False)
]
To: TypeAlias = Annotated[
    list[Formats],
    typer.Option(
        "--to", metavar="FORMAT", help="A format to write. Repeat for more; all if left out."
    ),
]
Cold: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--cold/--warm",
        help="Drop the data from the page cache before each run, and check that they are gone; "
        "or have all of them in it.",
        rich_help_panel=HOW,
    ),
]
Sync: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--sync/--no-sync",
        help="Take the time when all is on the disk, of the copy too; or when all is written.",
        rich_help_panel=HOW,
    ),
]
Scratch: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write in this folder; beside the dataset if left out. All is removed again.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("convert", epilog=CONVERT, cls=Command)(guarded(opt.reads_datasets(convert)))
    app.command("repack", epilog=REPACK, cls=Command)(guarded(opt.reads_datasets(repack)))
    app.command("provenance", epilog=PROVENANCE, cls=Command)(
        guarded(opt.reads_datasets(provenance))
    )


def convert(
    data: Data,
    to: To = [],  # noqa: B006 (typer copies it)
    cold: Cold = False,
    warm_server: WarmServer = False,
    evict_server: EvictServer = None,
    repeat: Repeat = 3,
    sync: Sync = False,
    scratch: Scratch = None,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    *,
    reading: OpenOptions,
) -> None:
    """Compare dsprep convert with cp of the same files.

    Each conversion and each copy is a process of its own. They take turns, and what is written is
    removed after each.
    """
    from dsprep.bench.copying import Settings, bench_convert
    from dsprep.cli.bench.output import check_targets

    check_targets(json=json, html=html, csv=csv)
    settings = Settings(
        repeat=repeat,
        cold=cold,
        sync=sync,
        warm_server=warm_server,
        evict_server=evict_server,
        to=_targets(to),
    )
    with run_bar() as update:
        report = bench_convert(
            data,
            settings,
            reading=reading,
            folder=scratch,
            command=command_line(),
            progress=update,
        )
    _finish(report, json, html, csv)


def repack(
    data: Data,
    to: To = [],  # noqa: B006 (typer copies it)
    buffer_size: Annotated[
        str,
        typer.Option(
            "--buffer-size",
            "-b",
            metavar="SIZE",
            help="What one read fetches: samples (128), bytes (256MiB) or auto.",
        ),
    ] = "auto",
    shuffle: Annotated[
        str,
        typer.Option(
            metavar="SEED", help="Shuffle all samples with this seed; none keeps their order."
        ),
    ] = "none",
    cold: Cold = False,
    warm_server: WarmServer = False,
    evict_server: EvictServer = None,
    repeat: Repeat = 3,
    sync: Sync = False,
    scratch: Scratch = None,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    *,
    reading: OpenOptions,
) -> None:
    """Compare dsprep repack with cp of the same files; see dsprep bench convert."""
    from dsprep.bench.copying import Settings, bench_repack
    from dsprep.cli.bench.output import check_targets
    from dsprep.write.buffers import parse_buffer

    check_targets(json=json, html=html, csv=csv)
    parse_buffer(buffer_size)
    if shuffle != "none" and not shuffle.isdecimal():
        fail(f"--shuffle {shuffle!r} is not understood (expected a number, or none)", 2)
    settings = Settings(
        repeat=repeat,
        cold=cold,
        sync=sync,
        warm_server=warm_server,
        evict_server=evict_server,
        buffer_size=buffer_size,
        shuffle=shuffle,
        to=_targets(to),
    )
    with run_bar() as update:
        report = bench_repack(
            data,
            settings,
            reading=reading,
            folder=scratch,
            command=command_line(),
            progress=update,
        )
    _finish(report, json, html, csv)


def provenance(
    data: Data,
    cold: Cold = False,
    warm_server: WarmServer = False,
    evict_server: EvictServer = None,
    repeat: Repeat = 3,
    scratch: Scratch = None,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    *,
    reading: OpenOptions,
) -> None:
    """Compare dsprep provenance with reading all data, and with walking their index.

    Then tell how fast places are computed from the sidecar, which is not left beside the data.
    """
    from dsprep.bench.copying import Settings, bench_provenance
    from dsprep.cli.bench.output import check_targets

    check_targets(json=json, html=html, csv=csv)
    with run_bar() as update:
        report = bench_provenance(
            data,
            Settings(repeat=repeat, cold=cold, warm_server=warm_server, evict_server=evict_server),
            reading=reading,
            folder=scratch,
            command=command_line(),
            progress=update,
        )
    _finish(report, json, html, csv)


def _targets(to: list[Formats]) -> tuple[str, ...]:
    return tuple(f.value for f in to or Formats)


def _finish(report: Report, json: Path | None, html: Path | None, csv: Path | None) -> None:
    from dsprep.cli.bench.output import emit

    emit(report, json=json, html=html, csv=csv)
    if any(row.problems for row in report.rows):
        raise typer.Exit(1)
