"""``dsprep verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import guarded, note, print_json, progress_bar, say
from dsprep.cli.usage import Command

if TYPE_CHECKING:
    from concurrent.futures import Executor as PoolExecutor

    from dsprep.formats.base import OpenOptions
    from dsprep.verbs.verify import Verdict

EPILOG = """
dsprep verify train.h5 train.zarr

dsprep verify cifar_lmdb cifar.h5 --field-a data:uint8[3,32,32] --values datum

dsprep verify train.h5 train.lmdb --sample 0.01

Exit status: 0 the same, 1 a difference, 2 wrong usage.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("verify", epilog=EPILOG, cls=Command)(
        guarded(opt.distributes(opt.reads_datasets(verify)))
    )


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="A dataset.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    fields_a: Annotated[
        list[str],
        opt.value("SPEC", "As --field, for A alone.", "--field-a", panel=opt.READING),
    ] = [],  # noqa: B006
    fields_b: Annotated[
        list[str],
        opt.value("SPEC", "As --field, for B alone.", "--field-b", panel=opt.READING),
    ] = [],  # noqa: B006
    sample: Annotated[
        float | None,
        opt.value("SHARE", "Compare only this share of the samples, such as 0.01."),
    ] = None,
    seed: Annotated[int, opt.value("N", "Chooses the samples for --sample.")] = 0,
    limit: Annotated[
        int, opt.value("N", "Differing samples to show.", "--limit", "-k", min=0)
    ] = 10,
    workers: opt.Workers = None,
    json: opt.Json = False,
    *,
    reading: OpenOptions,
    executor: PoolExecutor | None,
) -> None:
    """Compare two datasets sample by sample, bit for bit, whatever their formats.

    Options on how to read are for datasets from elsewhere: what dsprep wrote needs none.
    """
    import os

    from dsprep.source.dataset import open_dataset
    from dsprep.verbs.verify import verify as compare

    with (
        open_dataset(a, opt.for_format(a, reading, fields_a), marked=True) as left,
        open_dataset(b, opt.for_format(b, reading, fields_b), marked=True) as right,
    ):
        if not json:
            for source in (left, right):
                for line in source.notes:
                    note(f"{source.path}: {line}")
        payload = left.schema.fixed_nbytes * len(left)
        with progress_bar("verify", len(left), payload, not json) as update:
            verdict = compare(
                left,
                right,
                share=sample,
                seed=seed,
                limit=limit,
                workers=workers or min(8, len(os.sched_getaffinity(0))),
                progress=update,
                executor=executor,
            )
    if json:
        print_json(verdict_json(verdict))
    else:
        report_verdict(verdict)
    if not verdict.same:
        raise typer.Exit(1)


def report_verdict(verdict: Verdict) -> None:
    """Print the verdict for a person."""
    for problem in verdict.problems:
        say(f"different: {problem}")
    for difference in verdict.differences:
        say(f"different: {difference}")
    if verdict.differing:
        say(f"{verdict.differing:,} of {verdict.compared:,} compared samples differ")
    elif verdict.same and verdict.complete:
        say(f"same: all {verdict.compared:,} samples, every bit")
    elif verdict.same:
        say(
            f"no difference in {verdict.compared:,} of {verdict.samples_a:,} samples; "
            "the others were not compared (--sample)"
        )


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for other programs."""
    return {
        "same": verdict.same,
        "complete": verdict.complete,
        "samples": [verdict.samples_a, verdict.samples_b],
        "compared": verdict.compared,
        "differing": verdict.differing,
        "problems": list(verdict.problems),
        "differences": [vars(d) for d in verdict.differences],
    }
