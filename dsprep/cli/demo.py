"""``dsprep demo``: the main job on small data that it makes itself."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import print_json, say

if TYPE_CHECKING:
    from dsprep.bench.report.model import BenchReport
    from dsprep.formats.base import Source
    from dsprep.formats.options import OpenOptions

EPILOG = """
dsprep demo

dsprep demo --keep demo-data
"""


@dataclass(frozen=True)
class Step:
    """One line of the result: a conversion and its proof."""

    dataset: str
    source: str
    target: str
    samples: int
    payload: int
    bytes_out: int
    seconds: float
    same: bool


ROUND = (".lmdb", ".tfrecord", ".zarr", ".h5")
"""The formats, in the order in which the demo goes around them; it ends in HDF5."""

GROUP = 16
"""Samples per group of the repacked datasets."""

MEASURED = "neuron-inverter"
"""The dataset with which ways of reading are compared."""

READ = 4000
"""Its samples then."""

READ_GROUPS = "4MiB"
"""The size of its groups then: some tens of them, so that one is read while another one is used."""

SAMPLES: int | None = None
"""Samples of the datasets that are converted; as many as `synth` makes by default."""

DATASETS = (
    ("cosmic-tagger", "ragged detector hits, HDF5"),
    ("neuron-inverter", "fixed waveforms and labels, HDF5"),
    ("caffe-cifar", "images in an LMDB of Caffe messages"),
)


FIELDS = {MEASURED: ["train_frames", "train_phys_par", "train_unitStar_par", "train_unit_par"]}
"""The fields of datasets that have those of several parts."""


@opt.command(EPILOG)
def demo(
    keep: Path | None = opt.value("DIR", "Leave the data in this new directory."),
    json: opt.Json = False,
) -> None:
    """Convert small datasets to all four formats, repack them, and prove that no bit changes.

    Then some ways of reading one of them are measured.

    Takes less than a minute and, unless --keep is given, leaves nothing behind.
    """
    if keep is not None:
        keep.mkdir(parents=True)
        _run(keep, json)
        return
    with tempfile.TemporaryDirectory(prefix="dsprep-demo-") as scratch:
        _run(Path(scratch), json)


def _run(directory: Path, json: bool) -> None:
    from dsprep.core.units import show_nbytes

    steps = []
    if not json:
        say(f"{'dataset':<17}{'from':<10}{'to':<10}{'samples':>8}{'values':>10}  result")
    for name, _ in DATASETS:
        for step in _around(name, directory):
            steps.append(step)
            if not json:
                proof = "the same bit for bit" if step.same else "DIFFERENT"
                say(
                    f"{step.dataset:<17}{step.source:<10}{step.target:<10}{step.samples:>8,}"
                    f"{show_nbytes(step.payload):>10}  {proof}, "
                    f"{show_nbytes(step.payload / max(step.seconds, 1e-9))}/s"
                )
    same = all(step.same for step in steps)
    if not json and same:
        say(
            "",
            f"{len(steps)} conversions, each compared with the first dataset: nothing changed. "
            "The last of each is",
            f"repacked: one read fetches {GROUP} samples, at offsets that its sidecar gives.",
            "",
        )
    read = _read(directory)
    right = same and not any(row.problems for row in read.rows)
    if json:
        content = {"same": same, "steps": [vars(s) for s in steps], "read": read.to_json()}
        print_json(content)
    else:
        from dataclasses import replace

        from dsprep.cli.bench.output import show

        say(
            f"Reading {read.dataset['samples']:,} samples of {MEASURED} from the page cache, "
            "against plain preadv:",
            "",
        )
        show(replace(read, answer=()))
        say(
            "Next: dsprep inspect DATA, dsprep provenance DATA, dsprep repack DATA OUT, "
            "dsprep bench read DATA,",
            "dsprep --help",
        )
    if not right:
        raise typer.Exit(1)


def _read(directory: Path) -> BenchReport:
    """Measure a few ways of reading one of the datasets."""
    from dsprep.bench.reading import Settings, bench_read, plan_read
    from dsprep.synth import synth

    data = synth(MEASURED, directory / "reading", samples=READ).path
    settings = Settings(cold=False, repeat=3, buffer_size=READ_GROUPS)
    ways = ("h5py", "group-db", "dsprep")
    work = plan_read([data], ways, settings, reading=_reading(MEASURED))
    return bench_read(work, "dsprep demo")


def _reading(name: str) -> OpenOptions:
    """Return how one of the synthetic datasets is read."""
    from dsprep.core.schema import FieldSpec
    from dsprep.formats.options import OpenOptions

    fields = tuple(map(FieldSpec.parse, FIELDS.get(name, ())))
    return OpenOptions(fields=fields, values="datum" if name == "caffe-cifar" else "opaque")


def _around(name: str, directory: Path) -> list[Step]:
    """Convert one synthetic dataset from format to format; compare each with the original."""
    from dataclasses import replace

    from dsprep.source.dataset import open_dataset
    from dsprep.synth import synth
    from dsprep.verbs.convert import convert
    from dsprep.verbs.verify import verify

    reading = _reading(name)
    first = synth(name, directory / name, samples=SAMPLES).path
    steps = []
    last, options = first, reading
    with open_dataset(first, reading) as original:
        for suffix in ROUND:
            target = directory / f"{name}{suffix}"
            report = convert(last, target, open_options=options, durable=False)
            with open_dataset(target) as result:
                same = verify(original, result).same
            steps.append(
                Step(
                    name,
                    last.suffix.lstrip(".") or "original",
                    suffix.lstrip("."),
                    report.samples,
                    report.payload,
                    report.bytes_out,
                    report.seconds,
                    same,
                )
            )
            last, options = target, replace(reading, values="opaque")
        steps.append(_repacked(name, last, directory, original))
    return steps


def _repacked(name: str, last: Path, directory: Path, original: Source) -> Step:
    """Repack the last dataset into groups that one read fetches; compare it with the original."""
    from dsprep.source.dataset import open_dataset
    from dsprep.verbs.repack import repack
    from dsprep.verbs.verify import verify

    target = directory / f"{name}-grouped.h5"
    made = repack(last, target, buffer_size=GROUP, durable=False)
    ((_, report),) = made.parts
    with open_dataset(target, through="strict") as result:  # by its sidecar alone
        same = verify(original, result).same
    return Step(
        name, "h5", "groups", report.samples, report.payload, report.bytes_out, report.seconds, same
    )
