"""Repacking: one rewrite after which a single read fetches a whole group of samples.

Decides how large groups are, what they are aligned to, in which order samples come and in which
file they go; `dsprep.writing.run` writes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from dsprep import formats
from dsprep.core.arguments import RepackArguments
from dsprep.core.groups import Grouping, even
from dsprep.core.memory import allowed_memory, total_memory
from dsprep.core.schema import Array, Batch, Ints, Ragged
from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Source, WritableFormat
from dsprep.formats.options import WriteOptions, check_options
from dsprep.reader.options import at_least
from dsprep.reader.subset import Subset
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.alike import LENGTH, sorted_by
from dsprep.source.dataset import open_dataset
from dsprep.source.derived import DerivedSource
from dsprep.source.from_sidecar import SidecarSource
from dsprep.source.static import with_static
from dsprep.storage.atomic import partial_path
from dsprep.storage.paths import StorePath, as_path
from dsprep.verbs import break_even
from dsprep.verbs.break_even import BreakEven
from dsprep.verbs.convert import merge_open_options, parse_arguments, resolve_target
from dsprep.writing.buffers import (
    BufferSize,
    choose_groups,
    edges_by_bytes,
    group_warnings,
    parse_buffer,
    parse_shard_size,
    shrink_groups,
)
from dsprep.writing.job import Job, Report, RunOptions, count_workers, make_job
from dsprep.writing.plan import pieces, split_suffix
from dsprep.writing.run import run_jobs
from dsprep.writing.shuffle import ShuffledSource
from dsprep.writing.split import assign, group_labels, parse_split
from dsprep.writing.stripes import Stripe, detect_stripe, requested_stripe

STEP = 1 << 18
"""Samples whose sizes are summed in one slice."""

TRAINING = ("", "train")
"""The outputs that are trained on: the whole dataset, or this split of it."""

MAX_PADDING, MAX_PADDING_NBYTES = 0.5, 64 << 20
"""The share of an output, and the bytes, of padding from which on it is refused."""

EXAMINED_NBYTES = 4 << 20
"""Bytes of a run of samples that are read to see whether they are sorted, at most."""


@dataclass(frozen=True, kw_only=True)
class RepackPlan:
    """All that a repack will do; nothing has been written.

    Attributes
    ----------
    source
        The dataset as it is.
    stripe
        The unit to which groups are aligned, and its source.
    parts
        The outputs.
    warnings
        Warnings about these groups, one sentence each.
    """

    source: Source
    stripe: Stripe
    parts: tuple[Job, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RepackReport:
    """The result of a repack.

    Attributes
    ----------
    parts
        Each output and its report.
    break_even
        After how many epochs the rewrite pays off; None if it was not measured.
    unmeasured
        Why it was not, though it was to be.
    """

    plan: RepackPlan
    parts: tuple[tuple[Job, Report], ...]
    break_even: BreakEven | None = None
    unmeasured: str = ""


@dataclass(frozen=True, kw_only=True)
class RepackOptions:
    """The outputs of a repack; see `repack`.

    Attributes
    ----------
    buffer_size
        Samples (``"128"``) or bytes (``"256MiB"``) of a group, or ``"auto"``.
    stripe_size
        Groups begin at multiples of this size; detected if None.
    to
        The format; None: by the suffix of the target, else `formats.DEFAULT`.
    write
        Options of the format.
    shuffle
        The seed of a global shuffle; None keeps the order.
    split, group_by, subset, duplicate
        The choice of samples for each output, and the copies of each.
    shard_size
        The samples, or the bytes of values, of a file, if there are several.
    ranks, epochs
        Processes that will read, and how often: for warnings, and for the size of stripes.
    """

    buffer_size: str = "auto"
    stripe_size: str | None = None
    to: str | None = None
    write: WriteOptions = field(default_factory=WriteOptions)
    shuffle: int | None = None
    split: str | None = None
    group_by: str | None = None
    subset: Any = None
    duplicate: int = 1
    shard_size: str | int | None = None
    ranks: int | None = None
    epochs: int | None = None


def parse_options(given: Mapping[str, Any]) -> tuple[RepackOptions, RunOptions]:
    """Return the options of the output and of the run, from the arguments of `repack`."""
    stripe, known = given.get("stripe_size"), RepackArguments.__annotations__
    numbers = {"shuffle": 0, "duplicate": 1, "ranks": 1, "epochs": 1}
    own: dict[str, Any] = {
        n: at_least(n, given[n], low) for n, low in numbers.items() if given.get(n) is not None
    }
    options = RepackOptions(
        **parse_arguments(given, known),
        **own,
        buffer_size=str(given.get("buffer_size", "auto")),
        stripe_size=f"{stripe}B" if isinstance(stripe, int) else stripe,
        split=given.get("split"),
        group_by=given.get("group_by"),
        subset=given.get("subset"),
    )
    return options, RunOptions.among(given)


def plan_repack(
    source: Source,
    target: Path,
    options: RepackOptions | None = None,
    run: RunOptions | None = None,
) -> RepackPlan:
    """Decide everything about a repack; nothing is written.

    Parameters
    ----------
    source
        The dataset, opened.
    target
        The file or directory to make.
    options, run
        Options of the outputs and of the run.

    Returns
    -------
    RepackPlan
        For `run_repack`.

    Raises
    ------
    DsprepError
        If the target's format cannot keep groups together, or options contradict each other.
    """
    options, run = options or RepackOptions(), run or RunOptions()
    target = resolve_target(target)
    format = formats.of_target(target, options.to)
    if format is None and target.suffix:
        raise formats.unnamed(target)
    format = format or formats.writable(formats.DEFAULT)
    _check(options, format)
    if not source.schema.fields:
        raise FormatError("the dataset has no fields", where=source.path)
    size, known = parse_buffer(options.buffer_size), all_rows(source)
    outputs = list(_outputs(source, target, format, options, run))
    if options.stripe_size:
        stripe = requested_stripe(options.stripe_size, target)
    else:
        longest = max(len(each) for each, _, _ in outputs)
        stripe = detect_stripe(target, _file_nbytes(source, known, longest, options))
    parts, warning_lines = [], []
    for samples, where, recipe in outputs:
        part = _plan_part(samples, where, (source, known), format, options, size, stripe)
        parts.append(replace(part, recipe=recipe))
        count_workers(part, run.workers, run.memory)
        warning_lines += _warnings(parts[-1], options)
    return RepackPlan(
        source=source, stripe=stripe, parts=tuple(parts), warnings=tuple(warning_lines)
    )


def _check(options: RepackOptions, format: WritableFormat) -> None:
    """Raise `UsageError` if options contradict each other or the format."""
    if options.write.compress is not None and "compress" not in format.write_options:
        raise UsageError(
            f"{format.name} is written without compression",
            fix="leave --compress out, or write hdf5, zarr or tfrecord",
        )
    check_options(options.write, format.write_options, format.name)
    if options.write.chunk is not None:
        raise UsageError("a group is a chunk: --chunk does not apply to repack")
    if options.group_by is not None and options.split is None:
        raise UsageError("--group-by keeps samples of one split together: it needs --split")


def _outputs(
    source: Source, target: Path, format: WritableFormat, options: RepackOptions, run: RunOptions
) -> Iterator[tuple[Source, Path, Mapping[str, Any]]]:
    """Yield samples, target and recipe of each output; only the training set is changed."""
    subset, kept, chosen_by = Subset.of(options.subset), None, options.subset
    if subset is not None:
        kept = subset.samples(len(source), lambda _: source)
        chosen_by = options.subset if isinstance(options.subset, str) else subset.recipe
        if not len(kept):
            raise UsageError("the subset has no samples", where=source.path)
    choices: dict[str, Ints | None] = {"": kept}
    if options.split is not None:
        labels = None
        if options.group_by is not None:
            labels = group_labels(source, source.schema[options.group_by])
        parts = assign(len(source), parse_split(options.split), options.shuffle or 0, labels)
        choices = {n: i if kept is None else np.intersect1d(i, kept) for n, i in parts.items()}
    requested = {"split": options.split, "group_by": options.group_by, "subset": chosen_by}
    words = " ".join(map(str, (*requested.values(), options.duplicate)))
    stem, ending = split_suffix(target, format)
    for name, chosen in choices.items():
        where = target.with_name(f"{stem}-{name}{ending}") if name else target
        part: Source = source if chosen is None else DerivedSource(source, chosen)
        trains = name in TRAINING
        seed = options.shuffle if trains else None
        duplicate = options.duplicate if trains and options.duplicate > 1 else None
        if duplicate is not None:
            part = DerivedSource(part, times=duplicate)
        if seed is not None:
            part = ShuffledSource(
                part,
                seed,
                max(1 << 20, allowed_memory(run.memory) // 2),
                partial_path(where) / "shuffle",
                workers=run.workers or 2,
                identity=words,
            )
        recipe = {**requested, "part": name or None, "shuffle": seed, "duplicate": duplicate}
        if options.split is not None:
            recipe["split_seed"] = options.shuffle or 0
        yield part, where, {k: value for k, value in recipe.items() if value is not None}


def _warnings(part: Job, options: RepackOptions) -> list[str]:
    """Return warnings about the groups of one output."""
    lines = group_warnings(
        len(part.source),
        part.groups,
        max(plan.group_nbytes for plan in part.plans),
        memory=total_memory(),
        ranks=options.ranks,
        epochs=options.epochs if part.split in TRAINING else None,
    )
    if (
        options.buffer_size == "auto"
        and part.padding >= MAX_PADDING_NBYTES
        and part.padding > MAX_PADDING * part.estimate
    ):
        raise UsageError(
            "groups are far smaller than stripes: most of the output is padding",
            found=show_nbytes(part.padding),
            fix="give a larger --buffer-size, or --stripe-size none",
        )
    return [f"{part.split}: {text}" if part.split else text for text in lines]


def order_warnings(plan: RepackPlan) -> list[str]:
    """Return warnings that samples are sorted by a field, so that a group has few values of it."""
    parts = [p for p in plan.parts if p.split in TRAINING and "shuffle" not in p.recipe]
    return [line for part in parts for line in _sorted(part.source, part.groups)]


def _sorted(source: Source, groups: int) -> list[str]:
    """Return the warning that one output is sorted by a field, if it is."""
    lineage = source.sidecar.content.lineage if isinstance(source, SidecarSource) else {}
    if lineage.get("shuffle") is not None:
        return []
    sizes = source.sizes(0, min(LENGTH, len(source)))
    each = source.schema.fixed_nbytes if sizes is None or not len(sizes) else int(sizes.max())
    length = min(LENGTH, EXAMINED_NBYTES // max(1, each))
    if groups < 2 or length < 8 or any(x.reads is None for x in source.storage().values()):
        return []  # too large to look at, or each look would read the whole file
    kept: dict[int, Batch] = {}

    def read(name: str, start: int, stop: int) -> Array:
        if start not in kept:
            kept[start] = source.read(start, stop)
        return kept[start][name]  # type: ignore[return-value]

    name = sorted_by(source.schema, len(source), read, length)
    if not name:
        return []
    text = (
        f"samples are sorted by {name}, so a group, and a batch of it, has few values of it: "
        "--shuffle SEED mixes them for good, buffers_mixed=K of dsprep.Reader K groups at a time"
    )
    return [text]


def _file_nbytes(
    source: Source, known: dict[str, Ints], samples: int, options: RepackOptions
) -> int:
    """Return the bytes of the largest file of an output of `samples` samples, about."""
    each = source.schema.fixed_nbytes
    ragged = sum(int(n.sum()) * source.schema[f].row_nbytes for f, n in known.items())
    mean = each + ragged / max(1, len(source))
    per_file, nbytes = parse_shard_size(options.shard_size)
    return round(min(mean * min(samples, per_file or samples), nbytes or math.inf))


def inodes(job: Job) -> int:
    """Return the files and directories of an output and its sidecar, about."""
    return sum(plan.files for plan in job.plans) + job.sharded + 1


def all_rows(source: Source) -> dict[str, Ints]:
    """Return the rows of each ragged field in each sample: int64, shape ``(samples,)``, by name.

    They come from a sidecar or the source; else all samples are read for them, once.
    """
    names = [f.name for f in source.schema if f.ragged]
    known = {name: source.rows(name, 0, len(source)) for name in names}
    if all(rows is not None for rows in known.values()):
        return {name: rows for name, rows in known.items() if rows is not None}
    parts: dict[str, list[Ints]] = {name: [np.zeros(0, np.int64)] for name in names}
    for start, stop in pieces(source) if names else ():
        batch = source.read(start, stop)
        for name in names:
            column = batch[name]
            assert isinstance(column, Ragged)  # the schema says so
            parts[name].append(column.lengths.copy())
    return {name: np.concatenate(p) for name, p in parts.items()}


def _plan_part(
    source: Source,
    target: Path,
    whole: tuple[Source, dict[str, Ints]],
    format: WritableFormat,
    options: RepackOptions,
    size: BufferSize,
    stripe: Stripe,
) -> Job:
    """Return the job of one output: some samples of `whole`, a dataset and its rows."""
    write, is_sharded = options.write, options.shard_size is not None
    (schema, lost), count = with_static(source.schema, whole[0], format), len(source)
    rows, each = whole[1], source.schema.fixed_nbytes
    sizes: int | Ints = each
    if rows:
        numbers, base = np.arange(count, dtype=np.int64), source
        while isinstance(base, DerivedSource) and base is not whole[0]:
            numbers, base = base.numbers(numbers), base.base
        rows = {name: values[numbers] for name, values in rows.items()}
        sizes = each + sum(n * source.schema[name].row_nbytes for name, n in rows.items())
    payload = each * count if isinstance(sizes, int) else int(sizes.sum())
    largest = sizes if isinstance(sizes, int) else int(sizes.max(initial=0))
    chosen = choose_groups(count, sizes, size, stripe, total_memory(), options.ranks or 1)
    if size[1] is not None and rows and not format.uneven_groups:
        chosen = shrink_groups(chosen, size[1], schema, rows)
    if isinstance(sizes, int) or chosen.limit_nbytes is None or not format.uneven_groups:
        edges = even(count, chosen.samples).edges
    else:
        slices = (sizes[at : at + STEP] for at in range(0, count, STEP))
        edges = edges_by_bytes(slices, chosen.limit_nbytes)
    per_file, nbytes = parse_shard_size(options.shard_size)
    if nbytes is not None:
        per_file = max(1, nbytes // max(1, payload // max(1, count)))
    cuts = _whole_groups(edges, per_file or count or 1).tolist()
    sums = {n: np.add.reduceat(r, edges[:-1]) if count else r for n, r in rows.items()}
    groupings = []
    for low, high in itertools.pairwise(cuts):
        some = {field: r[low:high] for field, r in sums.items()}
        groupings.append(Grouping(edges[low : high + 1] - edges[low], stripe.nbytes, some))
    job = make_job(
        target,
        format,
        schema,
        write,
        groupings,
        payload=payload,
        sharded=is_sharded,
        source=source,
        casts={},
        losses=(*format.check(schema, write), *lost),
        largest=largest,
        group_size=chosen,
    )
    if write.compress is not None or schema.ragged:  # a group is one block
        largest = max(largest, *(plan.group_nbytes for plan in job.plans))
    return replace(job, largest=largest)


def _whole_groups(edges: Ints, per_shard: int) -> Ints:
    """Return the first group of each shard, which holds as many groups as fit, one at least."""
    cuts, last = [0], len(edges) - 1
    while cuts[-1] < last:
        limit = int(edges[cuts[-1]]) + per_shard
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(edges, limit, "right")) - 1))
    if len(cuts) == 1:
        cuts.append(last)
    return np.minimum(np.array(cuts, np.int64), last)


def run_repack(
    plan: RepackPlan,
    run: RunOptions | None = None,
    *,
    measure: bool = True,
    progress: Callable[[Job, int, int], None] | None = None,
) -> RepackReport:
    """Write the outputs of a plan.

    Parameters
    ----------
    plan, run
        The outputs, and options of the run.
    measure
        Whether to measure after how many epochs the rewrite pays off.
    progress
        Called with (part, samples, payload bytes) done so far.

    Returns
    -------
    RepackReport
        As of `repack`.

    Raises
    ------
    DsprepError, OSError
        If a target exists or is busy, space or memory do not suffice, or data are damaged.
    """
    done = run_jobs(plan.parts, run or RunOptions(), progress)
    report = RepackReport(plan=plan, parts=tuple(zip(plan.parts, done, strict=True)))
    if any(isinstance(path, StorePath) for path in plan.source.files()):
        measure = False  # there is no page cache, from which samples would be dropped before
    if not measure or not any(part.samples for part in plan.parts):
        return report
    try:  # the outputs are there, whatever becomes of this
        break_even = _break_even(report)
    except Exception as error:
        return replace(report, unmeasured=str(error) or type(error).__name__)
    return replace(report, break_even=break_even)


def _break_even(report: RepackReport) -> BreakEven | None:
    """Return when the rewrite pays off; None where the sidecar gives no offsets."""
    source, beside = report.plan.source, report.parts[0][1].sidecar
    if not spec.read(beside).layouts:
        return None
    seconds = sum(done.seconds for _, done in report.parts)
    with Sidecar.open(beside) as target:
        return break_even.measure(source, source.files(), target, seconds)


def repack(
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    *,
    fields: Sequence[str] = (),
    measure: bool = False,
    **options: Unpack[RepackArguments],
) -> RepackReport:
    """Rewrite a dataset so that one read fetches a whole group of samples, all fields together.

    Parameters
    ----------
    source
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    target
        The file or directory to make, also a URL; of HDF5 if neither its suffix nor `to` says
        otherwise.
    fields
        The fields wanted, as in `convert`.
    measure
        Whether to measure after how many epochs the rewrite pays off.
    **options
        Options of the outputs, `dsprep.core.arguments.RepackArguments`; of the run, `workers`,
        `memory`, `overwrite`, `restart`, `durable`, `executor`; and `open_options`,
        `write_options`, as in `convert`. Sizes may be text.

    Returns
    -------
    RepackReport
        `plan`; `parts`, a pair of part and report for each output; and `break_even`, after how many
        epochs the rewrite pays off, None unless `measure` is True and it can be measured
        (`unmeasured` says why it cannot).

    Raises
    ------
    DsprepError, OSError
        If anything is wrong; nothing half-written is left under the name `target`.
    """
    output, run = parse_options(options)
    reading = merge_open_options(options.get("open_options"), fields, run.memory)
    with open_dataset(source, reading, marked=True) as opened:
        return run_repack(plan_repack(opened, as_path(target), output, run), run, measure=measure)
