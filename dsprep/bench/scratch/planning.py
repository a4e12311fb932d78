"""Deciding in which forms a dataset is needed, which it has already, and what has to be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from dsprep import formats
from dsprep.bench.scratch.folder import Item, folder_for
from dsprep.bench.strategies import forms
from dsprep.core.groups import plain
from dsprep.core.schema import Ints, Schema
from dsprep.errors import FormatError, UnsupportedError, UsageError
from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.sidecar.spec import SUFFIX
from dsprep.source.dataset import open_dataset
from dsprep.source.derived import DerivedSource, probe_nbytes
from dsprep.source.files import find_files
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.mounts import existing
from dsprep.storage.paths import StorePath
from dsprep.verbs.convert import ConvertOptions, plan_job
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
"""How forms are written; they are synced when they are complete."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What will be prepared; nothing has been written yet."""

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
    grouped: bool  # whether the dataset was repacked
    buffer_nbytes: int  # bytes of a group
    group_text: str  # its size as `dsprep.repack` takes it
    in_place: tuple[str, ...] = ()  # forms that the data themselves have
    # The other forms, in the folder. Several may be the same item: the source of a subset is that
    # of its own format.
    items: Mapping[str, Item] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)  # forms that cannot be had, and why
    notes: tuple[str, ...] = ()  # remarks, one clause each

    @property
    def not_copied(self) -> tuple[str, ...]:
        """The forms in which the data are read where they are, sidecars elsewhere included."""
        return (*self.in_place, *(n for n, item in self.items.items() if item.data is not None))

    @property
    def is_stored(self) -> bool:
        """Whether groups are read from an object store, and not from a copy of them here."""
        return isinstance(self.files[0], StorePath) and "groups" in self.not_copied

    @property
    def writes(self) -> dict[str, Item]:
        """The items, each once."""
        return {item.name: item for item in self.items.values()}

    @property
    def needed(self) -> int:
        """Bytes that will be written."""
        return sum(item.estimate for item in self.writes.values())

    def chosen(self, source: Source) -> Source:
        """Return the source of the samples that are taken."""
        return source if self.numbers is None else DerivedSource(source, self.numbers)

    def without(self, forms: Iterable[str]) -> Preparation:
        """Return the plan without some forms."""
        items = {name: item for name, item in self.items.items() if name not in forms}
        return replace(self, items=items)


def plan(
    data: Sequence[str | Path],
    reading: OpenOptions,
    containers: Sequence[str],
    *,
    folder: Path | None = None,
    into: Path | None = None,
    limit: int | None = None,
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
    limit
        Take the first samples, as many as have so many bytes of values; at least one. None: all.
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
        if not len(source):
            raise FormatError("the dataset has no samples", where=dataset)
        samples, payload = first_samples(source, limit)
        kept = None if samples == len(source) else np.arange(samples, dtype=np.int64)
        is_whole = samples == len(source) and not reading.fields
        grouped = _group_nbytes(source)
        buffer, text = _buffer(buffer_size, -(-payload // samples), payload, grouped)
        facts = Preparation(
            data=tuple(data),
            reading=reading,
            files=files,
            source=format.name,
            schema=source.schema,
            folder=where,
            samples=samples,
            of=len(source),
            numbers=kept,
            payload=payload,
            grouped=grouped is not None,
            buffer_nbytes=buffer,
            group_text=text,
        )
        return _Deciding(facts, source, format, is_whole, grouped).decided(containers)


def first_samples(source: Source, limit: int | None) -> tuple[int, int]:
    """Return how many of the first samples have about `limit` bytes, and their bytes, about."""
    count = len(source)
    if not source.schema.ragged:
        each = source.schema.fixed_nbytes
        samples = count if limit is None else min(count, max(1, limit // max(1, each)))
        return samples, samples * each
    mean = probe_nbytes(source, 0, count)
    samples = count if limit is None else min(count, max(1, limit // max(1, mean)))
    return samples, samples * mean


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


class _Deciding:
    """What is decided about forms; `facts` is the plan without that."""

    def __init__(
        self, facts: Preparation, source: Source, format: Format, whole: bool, grouped: int | None
    ) -> None:
        self.facts, self.source, self.format = facts, source, format
        self.whole, self.grouped = whole, grouped
        self.notes = list(source.notes)

    def decided(self, containers: Sequence[str]) -> Preparation:
        """Return the plan for some forms."""
        items: dict[str, Item] = {}
        here, impossible = [], {}
        for name in dict.fromkeys(containers):
            try:
                item = self._decide(name)
            except UnsupportedError as error:
                impossible[name] = str(error)
                continue
            if item is None:
                here.append(name)
            else:
                items[name] = item
        device = existing(self.facts.folder).stat().st_dev
        if items and device != self.facts.files[0].stat().st_dev:
            self.notes.append(
                "the scratch folder is on another file system than the data: "
                "what is measured there is not theirs"
            )
        if items and any(layout.codecs for layout in self.source.storage().values()):
            self.notes.append("the data are compressed, what is prepared from them is not")
        return replace(
            self.facts,
            in_place=tuple(here),
            items=items,
            impossible=impossible,
            notes=tuple(self.notes),
        )

    def _decide(self, name: str) -> Item | None:
        """Return what has to be there for a form; None: the data have it."""
        if name == "files":
            return None
        if name == "source":
            return self._source()
        if name == "groups":
            return self._groups()
        if name not in formats.WRITTEN:
            raise UsageError(f"{name!r} is not a form of a dataset")
        readable = forms.is_readable(name, self.source, self.facts.files, self.format)
        return None if self.whole and readable else self._converted(name)

    def _source(self) -> Item | None:
        """Return the sidecar that has to be made; None: the dataset has one."""
        facts, item = self.facts, None
        if isinstance(self.source, SidecarSource) and not facts.reading.fields:
            content = self.source.sidecar.content
        else:
            path = facts.folder / "source" / f"data{SUFFIX}"
            made = provenance(list(facts.data), facts.reading, out=path, write=False)

            def save(source: Source, target: Path) -> None:
                replace(made, path=target).save()

            content, data = made.content, dataset_of(facts.files)
            item = Item(name="source", path=path, estimate=made.nbytes, write=save, data=data)
        if names := {str(n) for layout in content.layouts for n in layout.get("unlocated", ())}:
            some = ", ".join(sorted(names)[:3])
            raise UnsupportedError(f"not every field can be located: not {some}")
        return item

    def _groups(self) -> Item | None:
        if self.whole and self.grouped and self.grouped <= self.facts.buffer_nbytes * SLACK:
            return None
        size, reason = self.facts.group_text, None
        for name, suffix in forms.GROUPS.items():
            options = RepackOptions(buffer_size=size, to=name)
            try:
                formats.writable(name).check(self.source.schema, WriteOptions())
            except UnsupportedError as error:
                reason = error
                continue

            def write(source: Source, target: Path, options: RepackOptions = options) -> None:
                run_repack(plan_repack(source, target, options), QUICK, measure=False)

            estimate = self.facts.payload * 5 // 4 + (1 << 20)
            return self._item("groups", f"data{suffix}", estimate, write)
        assert reason is not None  # no format can hold the fields
        raise reason

    def _converted(self, name: str) -> Item:
        facts, format = self.facts, formats.writable(name)
        options = forms.options_of(name, facts.schema, facts.samples)
        samples = plain(facts.samples)
        estimate = format.plan(facts.schema, options, samples, facts.payload).nbytes

        def write(source: Source, target: Path) -> None:
            how = ConvertOptions(to=name, write=options)
            run_job(plan_job(source, target, how), QUICK)

        return self._item(name, f"data{format.suffixes[0]}", estimate, write)

    def _item(
        self, name: str, file: str, estimate: int, write: Callable[[Source, Path], None]
    ) -> Item:
        part = f"groups-{self.facts.group_text}" if name == "groups" else name
        path = self.facts.folder / part / file
        return Item(name=name, path=path, estimate=estimate, write=write)
