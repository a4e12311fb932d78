"""``dsprep synth``."""

from __future__ import annotations

from pathlib import Path

from dsprep.cli.command import command
from dsprep.cli.report import count_bar, fail, print_done, print_json, print_rows


@command
def synth(
    name: str | None = None,
    out: Path | None = None,
    /,
    samples: int | None = None,
    scale: float | None = None,
    seed: int = 0,
    overwrite: bool = False,
    listed: bool = False,
    json: bool = False,
) -> None:
    """Make a dataset with the record structure of a real one, at any size.

    Parameters
    ----------
    name : NAME
        The dataset to imitate; see --list.
    out : OUT
        The file or directory to make.
    samples
        Number of samples.
    scale
        Factor on edge lengths, above 0; 1 is the real size.
    seed
        Other seeds give other values.
    overwrite
        Replace OUT.
    listed
        List the datasets that can be made.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep synth --list
    dsprep synth cosmic-tagger events.h5 --samples 100
    dsprep synth cosmoflow-tfrecord cosmo --samples 64 --scale 0.25
    """
    from dsprep.core.units import show_nbytes
    from dsprep.synth import describe, names
    from dsprep.synth import synth as make

    if listed:
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
