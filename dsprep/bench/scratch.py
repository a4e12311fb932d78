"""The dataset in the forms that strategies need: in place where it has one, else written once.

`plan` decides, looking at files only; `prepare` writes to a temporary folder.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dsprep import formats
from dsprep.bench.strategies import forms
from dsprep.core.groups import plain
from dsprep.core.schema import Ints, Schema
from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, TargetError, UnsupportedError, UsageError, require
from dsprep.formats.base import Source
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.sidecar.spec import SUFFIX
from dsprep.source.dataset import open_dataset
from dsprep.source.derived import DerivedSource, probe_nbytes
from dsprep.source.files import find_files
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.mounts import existing
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import free_nbytes
from dsprep.verbs.convert import plan_job
from dsprep.verbs.provenance import provenance
from dsprep.verbs.repack import RepackOptions, plan_repack, run_repack
from dsprep.writing.buffers import parse_buffer
from dsprep.writing.create_sidecar import dataset_of
from dsprep.writing.job import RunOptions
from dsprep.writing.run import run_job

BUFFER = 64 << 20
"""Bytes of a group that are aimed at where nothing is asked for."""

GROUPS = 8
"""Groups that there are to be at least, so that a small dataset has some to shuffle."""

SLACK = 1.1
"""Groups may be this much larger than what is asked for: fields and padding between samples."""

QUICK = RunOptions(durable=False)
"""Options with which forms are written; they are synced when they are complete."""

LESS = "name another folder with --scratch, or take fewer samples with --limit"


@dataclass(frozen=True, kw_only=True)
class Form:
    """The dataset as a strategy reads it."""

    path: Path  # the file or directory with the samples, or a sidecar
    data: Path | None = None  # the dataset, where `path` is a sidecar that is not beside it
    numbers: Ints | None = None  # the samples that are taken, where it has more
    estimate: int = 0  # bytes that are written for it, about
    # Given the samples that are taken, and the target. None: it is there.
    write: Callable[[Source, Path], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The forms that will be prepared; nothing has been written yet."""

    data: tuple[str | Path, ...]  # the dataset, as it was named
    reading: OpenOptions  # how it is read
    files: tuple[Path, ...]
    source: str  # its format
    schema: Schema
    folder: Path  # where forms are written, and which is removed in the end
    samples: int  # that are taken
    of: int  # samples of the dataset
    numbers: Ints | None  # those that are taken; None: all
    payload: int  # bytes of the values of those taken
    grouped: int | None  # bytes of its first group, where the dataset was repacked
    buffer_nbytes: int  # bytes of a group
    group_text: str  # its size as `dsprep.repack` takes it
    forms: Mapping[str, Form] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)  # forms that cannot be had, and why
    notes: tuple[str, ...] = ()  # remarks, one clause each

    @property
    def in_place(self) -> tuple[str, ...]:
        """The forms that the data themselves have."""
        return tuple(name for name, form in self.forms.items() if form.write is None)

    @property
    def not_copied(self) -> tuple[str, ...]:
        """The forms in which the data are read where they are, sidecars elsewhere included."""
        forms = self.forms.items()
        return tuple(n for n, form in forms if form.write is None or form.data is not None)

    @property
    def is_stored(self) -> bool:
        """True if groups are read from an object store, and not from a copy of them here."""
        return isinstance(self.files[0], StorePath) and "groups" in self.not_copied

    @property
    def needed(self) -> int:
        """Bytes that will be written."""
        return sum(form.estimate for form in self.forms.values())

    def chosen(self, source: Source) -> Source:
        """Return the source of the samples that are taken."""
        return source if self.numbers is None else DerivedSource(source, self.numbers)


def plan(
    data: Sequence[str | Path],
    reading: OpenOptions,
    containers: Sequence[str],
    *,
    folder: Path | None = None,
    into: Path | None = None,
    limit: int | None = None,
    max_samples: int | None = None,
    buffer_size: str | int | None = None,
) -> Preparation:
    """Decide what has to be written so that every form can be read.

    Parameters
    ----------
    data, reading
        The dataset, and how to read it.
    containers
        ``files``, ``source``, ``groups``, names of formats.
    folder
        Where the temporary folder is made; None: beside the dataset.
    into
        The temporary folder of another plan, whose forms are shared where they are the same.
    limit, max_samples
        Take the first samples, as many as have so many bytes of values, at least one; and so many
        samples at most. None: all.
    buffer_size
        Of groups: samples (128), bytes (``"64MiB"``); None or ``"auto"``: `BUFFER`, or less, so
        that there are `GROUPS` of them.

    Raises
    ------
    UsageError
        If a form is unknown, or the folder cannot be used.
    FormatError
        If there are no samples.
    DsprepError, OSError
        If the dataset cannot be opened.
    """
    located = find_files(data)[0]
    files, format = tuple(path.absolute() for path, _ in located), located[0][1]
    dataset = dataset_of(files)
    where = into or folder_for(data, dataset, folder)
    with open_dataset(data, reading) as source:
        count = len(source)
        require(count, FormatError, "the dataset has no samples", where=dataset)
        ragged, fixed = source.schema.ragged, source.schema.fixed_nbytes
        mean = probe_nbytes(source, 0, count) if ragged else fixed
        samples = count if limit is None else min(count, max(1, limit // max(1, mean)))
        samples = samples if max_samples is None else min(samples, max(1, max_samples))
        grouped = _group_nbytes(source)
        buffer, text = _buffer(buffer_size, mean, samples * mean, grouped)
        facts = Preparation(
            data=tuple(data),
            reading=reading,
            files=files,
            source=format.name,
            schema=source.schema,
            folder=where,
            samples=samples,
            of=count,
            numbers=None if samples == count else np.arange(samples, dtype=np.int64),
            payload=samples * mean,
            grouped=grouped,
            buffer_nbytes=buffer,
            group_text=text,
        )
        known, impossible, notes = dict[str, Form](), {}, list(source.notes)
        for name in dict.fromkeys(containers):
            try:
                known[name] = _form(name, facts, source, dataset)
            except UnsupportedError as error:
                impossible[name] = str(error)
        is_written = any(form.write is not None for form in known.values())
        if is_written and existing(where).stat().st_dev != files[0].stat().st_dev:
            notes.append(
                "the scratch folder is on another file system than the data: "
                "what is measured there is not theirs"
            )
        if is_written and any(layout.codecs for layout in source.storage().values()):
            notes.append("the data are compressed, what is prepared from them is not")
    return replace(facts, forms=known, impossible=impossible, notes=tuple(notes))


def prepare(plan: Preparation) -> None:
    """Write every form of a plan that is not there.

    Raises
    ------
    TargetError
        If there is not enough space.
    DsprepError, OSError
        If the data are damaged, or a form cannot be written; no part of it is left.
    """
    if not plan.needed:
        return
    check_free(plan.folder, plan.needed)
    with open_dataset(list(plan.data), plan.reading) as source:
        for form in plan.forms.values():
            if form.write is not None and not form.path.exists():  # written for another plan
                form.path.parent.mkdir(parents=True, exist_ok=True)
                form.write(plan.chosen(source), form.path)


def folder_for(data: Sequence[str | Path], dataset: Path, within: Path | None) -> Path:
    """Return the temporary folder to write to, which does not exist yet.

    It is in `within`; None: beside the dataset.
    """
    parts = [Path(name).resolve() for name in data if Path(name).is_dir()]

    def is_part(folder: Path) -> bool:
        return any(p in (folder.resolve(), *folder.resolve().parents) for p in parts)

    folder = Path.cwd() if isinstance(dataset, StorePath) else dataset.parent
    while within is None and is_part(folder):
        folder = folder.parent
    folder = folder if within is None else within.absolute()
    problem = ""
    if folder.exists() and not folder.is_dir():
        problem = "this is not a folder"
    elif not os.access(existing(folder), os.W_OK | os.X_OK):
        problem = "the folder cannot be written to"
    elif is_part(folder):
        problem = "the folder is a part of the dataset"
    fix = "name a folder on the same file system with --scratch"
    require(not problem, UsageError, problem, where=folder, fix=fix)
    return folder / f".dsprep-bench-{secrets.token_hex(4)}"


def check_free(folder: Path, needed: int, fix: str = LESS) -> None:
    """Raise `TargetError` if there are fewer than `needed` bytes free where `folder` is."""
    free = free_nbytes(folder)
    facts = {"where": folder, "expected": show_nbytes(needed), "found": f"{show_nbytes(free)} free"}
    require(needed <= free, TargetError, "there is not enough space", **facts, fix=fix)


def _group_nbytes(source: Source) -> int | None:
    """Return the bytes of the first group of a dataset that was repacked; None: it was not."""
    if not isinstance(source, SidecarSource) or not source.sidecar.content.layouts:
        return None
    layouts = [source.sidecar.layout(i) for i in range(len(source.sidecar.content.files))]
    if any(layout.groups is None or layout.unlocated for layout in layouts):
        return None
    first = layouts[0].groups
    assert first is not None  # all have them
    return int(first.blocks.lengths.one(0)) if first.blocks.count else None


def _buffer(
    requested: str | int | None, each: int, payload: int, grouped: int | None
) -> tuple[int, str]:
    """Return the bytes of a group of samples of `each` bytes, and its size for `dsprep.repack`."""
    samples, limit = parse_buffer("auto" if requested is None else str(requested))
    if samples is not None:
        return max(1, samples * each), str(samples)
    nbytes = max(1, each, min(BUFFER, payload // GROUPS)) if grouped is None else grouped
    if limit is not None:
        nbytes = max(limit, each, 1)
    return nbytes, f"{nbytes}B"


def _form(name: str, facts: Preparation, source: Source, dataset: Path) -> Form:
    """Return a form of the dataset: in place, or how to write it."""
    here, reading = Form(path=dataset, numbers=facts.numbers), facts.reading
    is_whole = facts.numbers is None and not reading.fields
    if name == "files":
        return here
    if name == "source":
        return _source(facts, source, here)
    if name == "groups":
        is_fit = facts.grouped is not None and facts.grouped <= facts.buffer_nbytes * SLACK
        return here if is_whole and is_fit else _groups(facts)
    require(name in formats.WRITTEN, UsageError, f"{name!r} is not a form of a dataset")
    if is_whole and forms.is_readable(name, source, facts.files, facts.source):
        return here
    format, options = formats.writable(name), forms.options_of(name, facts.schema, facts.samples)
    estimate = format.plan(facts.schema, options, plain(facts.samples), facts.payload).nbytes

    def write(source: Source, target: Path) -> None:
        run_job(plan_job(source, target, to=name, write=options), QUICK)

    path = facts.folder / name / f"data{format.suffixes[0]}"
    return Form(path=path, estimate=estimate, write=write)


def _source(facts: Preparation, source: Source, here: Form) -> Form:
    """Return the sidecar of the dataset, as it has one or as it has to be made."""
    form = here
    if isinstance(source, SidecarSource) and not facts.reading.fields:
        content = source.sidecar.content
    else:
        path = facts.folder / "source" / f"data{SUFFIX}"
        made = provenance(list(facts.data), facts.reading, out=path, write=False)
        content = made.content

        def save(source: Source, target: Path) -> None:
            made.save()

        form = replace(here, path=path, data=here.path, estimate=made.nbytes, write=save)
    if names := {str(n) for layout in content.layouts for n in layout.get("unlocated", ())}:
        some = ", ".join(sorted(names)[:3])
        raise UnsupportedError(f"not every field can be located: not {some}")
    return form


def _groups(facts: Preparation) -> Form:
    """Return how groups are written: in the first format that can hold the fields."""
    refusal: UnsupportedError | None = None
    for name, suffix in forms.GROUPS.items():
        try:
            formats.writable(name).check(facts.schema, WriteOptions())
        except UnsupportedError as error:
            refusal = error
            continue
        options = RepackOptions(buffer_size=facts.group_text, to=name)

        def write(source: Source, target: Path, options: RepackOptions = options) -> None:
            run_repack(plan_repack(source, target, options), QUICK, measure=False)

        path = facts.folder / f"groups-{facts.group_text}" / f"data{suffix}"
        return Form(path=path, estimate=facts.payload * 5 // 4 + (1 << 20), write=write)
    assert refusal is not None  # no format can hold the fields
    raise refusal
