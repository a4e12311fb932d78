"""``dsprep synth``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dsprep.cli import options as opt
from dsprep.cli.report import count_bar, fail, print_done, print_json, print_rows

EPILOG = """
dsprep synth --list

dsprep synth cosmic-tagger events.h5 --samples 100

dsprep synth cosmoflow-tfrecord cosmo --samples 64 --scale 0.25
"""


@opt.command(EPILOG)
def synth(
    name: Annotated[
        str | None,
        opt.argument(
            "NAME",
            "Which dataset; see --list.",
            autocompletion=opt.completing("dsprep.synth:names"),
        ),
    ] = None,
    out: Annotated[Path | None, opt.argument("OUT", "The file or directory to make.")] = None,
    samples: int | None = opt.value("N", "How many samples."),
    scale: float | None = opt.value("X", "Factor on edge lengths, above 0; 1 is the real size."),
    seed: int = opt.value("N", "Other seeds give other values.", default=0),
    overwrite: bool = opt.switch("Replace OUT.", "--overwrite"),
    show: bool = opt.switch("List the datasets that can be made.", "--list"),
    json: opt.Json = False,
) -> None:
    """Make a dataset with the record structure of a real one, at any size."""
    from dsprep.core.units import show_nbytes
    from dsprep.synth import describe, names
    from dsprep.synth import synth as make

    if show:
        if json:
            print_json({n: describe(n) for n in names()})
        else:
            print_rows([(n, describe(n)) for n in names()])
        return
    if name is None or out is None:
        fail("a name and an output are needed: dsprep synth NAME OUT (see --list)", 2)
    with count_bar("synth", not json) as update:
        made = make(
            name,
            out,
            samples=samples,
            scale=scale,
            seed=seed,
            overwrite=overwrite,
            progress=update,
        )
    if json:
        print_json(vars(made))
        return
    print_done(
        [
            ("wrote", f"{made.path} ({made.files:,} file{'s' * (made.files != 1)})"),
            ("samples", f"{made.samples:,}"),
            ("size", show_nbytes(made.nbytes)),
            ("look", made.open_hint),
        ]
    )
