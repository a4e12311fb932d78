"""``dsprep inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsprep.cli.command import command, open_source
from dsprep.cli.report import (
    Verbosity,
    current_verbosity,
    note,
    print_json,
    print_rows,
    progress_bar,
    say,
)
from dsprep.errors import AmbiguousError, UsageError
from dsprep.formats.options import OpenOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsprep.formats.base import Source
    from dsprep.reader.stats import FieldStats
    from dsprep.verbs.inspect import FieldFacts, Inspection


@command
def inspect(
    paths: tuple[str, ...],
    /,
    reading: OpenOptions,
    head: int = 0,
    stats: bool = False,
    subset: str | None = None,
    workers: int | None = None,
    sidecar: Path | None = None,
    memory: str | None = None,
    json: bool = False,
) -> None:
    """Show what a dataset holds, how it is stored, and what reading it will cost.

    Parameters
    ----------
    paths : DATA...
        Files, directories, quoted globs or @list.txt, read as one dataset.
    head : K
        Show the first K samples.
    stats
        Read all values once: range, mean, NaNs, classes; kept.
    subset : WHICH
        Only 'y > 0', FILE.npy, or 'val of train=.9,val=.1'; for --stats.
    workers
        Threads that read for --stats, one per core and at most 8 by default.
    sidecar
        The sidecar, if not beside the data.
    memory : SIZE
        Memory for what is read and decoded; a quarter of what is free by default.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep inspect train.h5 --head 3
    dsprep inspect 'shards/*.tfrecord' --field x:int16[128,128,128,4] --field y
    dsprep inspect train.h5 --stats --subset 'train of train=.9,val=.1'
    """
    from dsprep.verbs.inspect import first_samples
    from dsprep.verbs.inspect import inspect as look

    if subset is not None and not stats:
        raise UsageError("--subset is that of the statistics", fix="add --stats")
    try:
        some = None if stats else head
        source = open_source(paths, reading, not json, sidecar, marked=stats, inspected=some)
    except AmbiguousError as error:
        _print_readings(error, json)
        return
    with source:
        inspection = look(source, reading.memory)
        statistics = _stats(source, subset, workers, reading.memory, not json) if stats else {}
        if json:
            content = inspection.to_json()
            content["head"] = [
                _plain(sample) for sample in first_samples(source, head, reading.memory)
            ]
            if stats:
                content["stats"] = {name: each.to_json() for name, each in statistics.items()}
            print_json(content)
            return
        _print(inspection, statistics)
        for i, sample in enumerate(first_samples(source, head, reading.memory)):
            say("", f"sample {i}")
            print_rows([(f"  {name}", text) for name, text in _plain(sample).items()])


def _print_readings(error: AmbiguousError, json: bool) -> None:
    """Print each way in which a dataset can be read, since nothing says which."""
    if json:
        print_json({"path": str(error.where), "readings": dict(error.readings)})
        return
    rows = [("dataset", str(error.where))]
    for option, gives in error.readings:
        rows.append(("samples" if len(rows) == 1 else "or", f"{gives}: {option}"))
    print_rows(rows)
    note(f"{error.what}: say which reading is meant by its option, or {error.fix}")


def _stats(
    source: Source, subset: str | None, workers: int | None, memory: int | None, show: bool
) -> Mapping[str, FieldStats]:
    from dsprep.reader.stats import stats

    payload = source.schema.fixed_nbytes * len(source)
    with progress_bar("statistics", len(source), payload, show) as update:
        return stats(source, None, subset, workers=workers, memory=memory, progress=update)


def _print(inspection: Inspection, stats: Mapping[str, FieldStats]) -> None:
    from dsprep.core.units import show_nbytes

    files, stored, looked = inspection.files, inspection.stored_files, inspection.looked_into
    within = f" in {files:,} director{'y' if files == 1 else 'ies'}" * (stored != files)
    about = "" if looked == files else "about "
    share = f", of which {looked:,} were looked into" if about else ""
    rows = [
        ("dataset", inspection.path),
        ("format", inspection.version),
        ("files", f"{stored:,}{within}{share}"),
        ("samples", f"{about}{inspection.samples:,}"),
        ("values", f"{about}{show_nbytes(inspection.payload)}"),
        ("on disk", f"{about}{show_nbytes(inspection.stored_nbytes)}"),
    ]
    if inspection.groups is not None:
        count, largest = inspection.groups
        each = inspection.payload / max(1, inspection.samples) * min(largest, inspection.samples)
        text = f"{count:,} of {largest:,} samples, about {show_nbytes(each)} each"
        rows.append(("groups", f"{text}, by dsprep repack"))
    if (requests := inspection.epoch_requests) is not None:
        text = f"about {requests:,} GET requests, {show_nbytes(inspection.stored_nbytes)}"
        rows.append(("an epoch", text))
    rows += [(f"attribute {k}", _short(v)) for k, v in inspection.attrs.items()]
    print_rows(rows)
    for facts in inspection.fields:
        say("", str(facts.field))
        rows = _facts(facts)
        if facts.field.name in stats:
            rows += _rows(stats[facts.field.name])
        print_rows([(f"  {name}", text) for name, text in rows])
    for line in inspection.notes:
        note(line)


def _facts(facts: FieldFacts) -> list[tuple[str, str]]:
    from dsprep.core.units import show_nbytes

    lengths, stored = facts.lengths, facts.storage
    about = "" if lengths is None or lengths.exact else "about "
    rows = [("values", f"{about}{show_nbytes(facts.nbytes)}")]
    if lengths is not None:
        basis = "" if lengths.exact else f" (of {lengths.samples} samples looked at)"
        rows.append(
            (
                "length",
                f"{lengths.shortest:,} to {lengths.longest:,}, mean {lengths.mean:,.1f}{basis}",
            )
        )
    if stored is not None:
        nbytes = "" if stored.stored_nbytes is None else f", {show_nbytes(stored.stored_nbytes)}"
        codecs = f", {' + '.join(stored.codecs)}" if stored.codecs else ""
        rows.append(("stored", f"{stored.storage}{codecs}{nbytes}"))
        rows.append(("access", stored.access))
    rows += [(f"@{k}", _short(v)) for k, v in facts.field.attrs.items()]
    return rows


def _rows(stats: FieldStats) -> list[tuple[str, str]]:
    """Return the statistics of a field in lines."""
    rows = [("samples", f"{stats.samples:,}, {stats.count:,} values")]
    if stats.mean is not None:
        units = {} if stats.field is None else stats.field.attrs
        unit = f" {units['units']}" if isinstance(units.get("units"), str) else ""
        rows.append(("range", f"{stats.min:,} to {stats.max:,}{unit}"))
        rows.append(("mean", f"{stats.mean:,.6g}{unit}, standard deviation {stats.std:,.6g}"))
    if stats.missing:
        share = 100 * stats.missing / stats.count
        rows.append(("missing", f"{stats.missing:,} ({share:.3g} %), left out"))
    if stats.nans or stats.infinities:
        rows.append(("left out", f"{stats.nans:,} NaNs, {stats.infinities:,} infinities"))
    if stats.lengths is not None:
        shortest, mean, longest = stats.lengths
        rows.append(("lengths", f"{shortest:,} to {longest:,}, mean {mean:,.1f}"))
    if stats.classes:
        some = [f"{name} {n:,}" for name, n in [*stats.classes.items()][:10]]
        more = ", ..." if len(stats.classes) > len(some) else ""
        rows.append(("classes", f"{len(stats.classes):,}: " + ", ".join(some) + more))
    return rows


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return (
        text if len(text) <= 100 or current_verbosity() >= Verbosity.verbose else f"{text[:97]}..."
    )


def _plain(sample: dict[str, object]) -> dict[str, str]:
    from dsprep.verbs.inspect import preview

    return {name: preview(value) for name, value in sample.items()}
