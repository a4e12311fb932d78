"""``dsprep demo``: the main job on small data that it makes itself."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from dsprep.cli.command import command
from dsprep.cli.report import print_json, say

if TYPE_CHECKING:
    from dsprep.bench.report.model import BenchReport
    from dsprep.formats.base import Source
    from dsprep.formats.options import OpenOptions
    from dsprep.writing.job import Report

Step: TypeAlias = dict[str, Any]
"""One line of the result: a conversion and its proof."""


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

STEP, BATCH = "1ms", 64
"""Duration of a training step, and its samples."""

WAYS = {"h5py": "h5py, sample by sample  ", "dsprep": "dsprep.Reader, in groups"}
"""The ways of reading that are compared."""

SAMPLES: int | None = None
"""Samples of the datasets that are converted; as many as `synth` makes by default."""

DATASETS = (
    ("cosmic-tagger", "ragged detector hits in HDF5"),
    ("neuron-inverter", "waveforms and labels in HDF5"),
    ("caffe-cifar", "images in an LMDB of Caffe messages"),
)


FIELDS = {MEASURED: ["train_frames", "train_phys_par", "train_unitStar_par", "train_unit_par"]}
"""The fields of datasets that have those of several parts."""


@command
def demo(keep: Path | None = None, json: bool = False) -> None:
    """Convert small datasets to all four formats, repack them, and prove that no bit changes.

    Then training on one of them is compared with samples that h5py reads one by one.

    Takes less than a minute and, unless --keep is given, leaves nothing behind.

    Parameters
    ----------
    keep : DIR
        Leave the data in this new directory.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep demo
    dsprep demo --keep demo-data
    """
    if keep is not None:
        keep.mkdir(parents=True)
        _run(keep, json)
        return
    with tempfile.TemporaryDirectory(prefix="dsprep-demo-") as scratch:
        _run(Path(scratch), json)


def _run(directory: Path, json: bool) -> None:

    steps = []
    for name, words in DATASETS:
        made = list(_around(name, directory))
        steps += made
        if not json:
            _show_round(words, made)
    same = all(step["same"] for step in steps)
    read = _read(directory)
    right = same and not any(row.problems for row in read.rows)
    if json:
        print_json({"same": same, "steps": steps, "read": read.to_json()})
    else:
        _show_reading(read)
        say("Next: dsprep inspect DATA, dsprep repack DATA OUT, dsprep --help")
    if not right:
        raise typer.Exit(1)


def _show_round(words: str, steps: Sequence[Step]) -> None:
    """Print what a dataset was converted to, and whether it is as it was."""
    from dsprep.core.units import show_nbytes

    first = steps[0]
    different = [step["target"] for step in steps if not step["same"]]
    size = f"{first['samples']:,} samples, {show_nbytes(first['payload'])}"
    say(
        f"{first['dataset']}: {size}, {words}",
        f"  {' > '.join([first['source'], *(step['target'] for step in steps)])}: "
        + (f"DIFFERENT: {', '.join(different)}" if different else "the same bit for bit"),
    )


def _show_reading(report: BenchReport) -> None:
    """Print how busy steps are with samples read one by one, and with those of groups."""
    from dsprep.bench.report.tables import digits, show_percent

    say("", f"Training by steps of {STEP} on {BATCH} samples of {MEASURED}, in the page cache:")
    rates = []
    for name, words in WAYS.items():
        row = next(row for row in report.rows if row.name == name)
        if row.problems:
            say(f"  {words}  {row.problems[0]}")
            continue
        rates.append(row.median("samples_per_second") or 0.0)
        times = f", {digits(rates[-1] / rates[0])} times" if len(rates) > 1 else ""
        busy = show_percent(row.median("utilisation_percent") or 0.0)
        say(f"  {words}  computing {busy} %, {rates[-1]:,.0f} samples/s{times}")
    say("Compare your own: dsprep bench read DATA --compute YOUR_STEP --batch-size N", "")


def _read(directory: Path) -> BenchReport:
    """Measure a few ways of reading one of the datasets."""
    from dsprep.bench.reading import bench_read, plan_read
    from dsprep.bench.task import Settings
    from dsprep.synth import synth

    data = synth(MEASURED, directory / "reading", samples=READ).path
    settings = Settings(
        cold=False, epochs=3, batch_size=BATCH, compute=STEP, buffer_size=READ_GROUPS
    )
    work = plan_read([data], tuple(WAYS), settings, reading=_reading(MEASURED))
    return bench_read(work, "dsprep demo")


def _reading(name: str) -> OpenOptions:
    """Return options of reading one of the synthetic datasets."""
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
            before = last.suffix.lstrip(".") or "original"
            steps.append(_step(name, before, suffix.lstrip("."), report, same))
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
    return _step(name, "h5", "groups", report, same)


def _step(name: str, source: str, target: str, report: Report, same: bool) -> Step:
    kept = ("samples", "payload", "bytes_out", "seconds")
    facts = {"dataset": name, "source": source, "target": target}
    return {**facts, **{key: getattr(report, key) for key in kept}, "same": same}
