"""``dsprep verify``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import typer

from dsprep.cli.command import command
from dsprep.cli.report import note, print_json, progress_bar, say
from dsprep.formats.options import OpenOptions

if TYPE_CHECKING:
    from dsprep.verbs.verify import Verdict


@command
def verify(
    a: str,
    b: str,
    /,
    reading: OpenOptions,
    fields_a: tuple[str, ...] = (),
    fields_b: tuple[str, ...] = (),
    sample: float | None = None,
    seed: int = 0,
    limit: int = 10,
    workers: int | None = None,
    memory: str | None = None,
    executor: Executor | None = None,
    json: bool = False,
) -> None:
    """Compare two datasets sample by sample, bit for bit, whatever their formats.

    If dsprep repack made B of A, its --shuffle, --split, --subset and --duplicate are known.

    Options on how to read are for datasets that dsprep did not write; its own need none.

    Parameters
    ----------
    a : A
        A dataset.
    b : B
        Another one.
    fields_a : SPEC
        As --field, for A alone.
    fields_b : SPEC
        As --field, for B alone.
    sample : SHARE
        Compare only this share of the samples, such as 0.01.
    seed
        The choice of the samples for --sample.
    limit
        Differing samples to show.
    workers
        Threads, one per core and at most 8 by default; or processes of --executor.
    memory : SIZE
        Memory for samples; a quarter of what is free by default.
    executor : KIND
        threads, processes, mpi or dask, as of dsprep convert.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep verify train.h5 train.zarr
    dsprep verify cifar_lmdb cifar.h5 --field-a data:uint8[3,32,32] --values datum
    dsprep verify train.h5 train.lmdb --sample 0.01

    Notes
    -----
    Exit status: 0 the same, 1 a difference, 2 wrong usage.
    """
    from dsprep.source.dataset import open_dataset
    from dsprep.verbs.verify import match_order
    from dsprep.verbs.verify import verify as compare

    with (
        open_dataset(a, _known(a, reading, fields_a), marked=True) as first,
        open_dataset(b, _known(b, reading, fields_b), marked=True) as second,
    ):
        if not json:
            for source in (first, second):
                for line in source.notes:
                    note(f"{source.path}: {line}")
        left, right, options = match_order(first, second)
        if options and not json:
            note(f"{b} was made of {a} by {options}: its samples are compared with these")
        payload = left.schema.fixed_nbytes * len(left)
        with progress_bar("verify", len(left), payload, not json) as update:
            verdict = compare(
                left,
                right,
                share=sample,
                seed=seed,
                limit=limit,
                workers=workers or min(8, len(os.sched_getaffinity(0))),
                memory=reading.memory,
                progress=update,
                executor=executor,
            )
    if json:
        print_json(verdict_json(verdict))
    else:
        report_verdict(verdict)
    if not verdict.same:
        raise typer.Exit(1)


def _known(path: str, options: OpenOptions, fields: Sequence[str]) -> OpenOptions:
    """Return `options`, as far as they apply to the dataset `path`, with `fields` added."""
    # Left out are those that its format does not know, and all if dsprep wrote it.
    from contextlib import suppress
    from dataclasses import fields as attributes
    from dataclasses import replace

    from dsprep.core.schema import FieldSpec
    from dsprep.errors import FormatError
    from dsprep.formats.options import COMMON_OPTIONS, OpenOptions
    from dsprep.sidecar import spec
    from dsprep.source.files import find_files

    specs = (*options.fields, *map(FieldSpec.parse, fields))
    files = find_files([path])[0]
    number, memory = options.file_field, options.memory
    with suppress(FormatError):
        if (sidecar := spec.find([f for f, _ in files])) is not None:
            if number is None or number not in sidecar[0].schema.names:
                return OpenOptions(fields=specs, file_field=number, memory=memory)
            specs = (*specs, FieldSpec(number, number)) if specs else ()
            return OpenOptions(fields=specs, memory=memory)
    known = files[0][1].open_options | COMMON_OPTIONS
    default = OpenOptions()
    known |= {"file_field", "join"} if len(files) > 1 else {"file_field"}
    foreign = {f.name: getattr(default, f.name) for f in attributes(default) if f.name not in known}
    return replace(options, **foreign, fields=specs)


def report_verdict(verdict: Verdict) -> None:
    """Print the verdict for a person."""
    for problem in verdict.problems:
        say(f"different: {problem}")
    for difference in verdict.differences:
        say(f"different: {difference}")
    if verdict.differing:
        say(f"{verdict.differing:,} of {verdict.compared:,} compared samples differ")
    elif verdict.same and verdict.complete:
        say(f"same: all {verdict.compared:,} samples, bit for bit")
    elif verdict.same:
        say(
            f"no difference in {verdict.compared:,} of {verdict.samples_a:,} samples; "
            "the others were not compared (--sample)"
        )


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for other programs."""
    counts = {"samples": [verdict.samples_a, verdict.samples_b], **vars(verdict)}
    del counts["samples_a"], counts["samples_b"]
    differences = [vars(difference) for difference in verdict.differences]
    return {
        "same": verdict.same,
        "complete": verdict.complete,
        **counts,
        "differences": differences,
    }
