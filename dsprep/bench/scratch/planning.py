"""Deciding in which forms a dataset is needed, which it has already, and what has to be written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import dsprep
from dsprep import formats
from dsprep.bench.scratch import in_place
from dsprep.bench.scratch.folder import existing, folder_for, identity
from dsprep.bench.strategies import find
from dsprep.core.marks import Mark
from dsprep.core.schema import Schema
from dsprep.errors import FormatError, UnsupportedError, UsageError
from dsprep.formats.base import Format, OpenOptions, Source, WriteOptions
from dsprep.sidecar.spec import SUFFIX, Content
from dsprep.source.dataset import open_dataset
from dsprep.source.files import find_files
from dsprep.source.from_sidecar import SidecarSource
from dsprep.verbs.provenance import provenance
from dsprep.verbs.repack import RepackOptions, plan_repack
from dsprep.write.buffers import InBytes, InSamples, parse_buffer
from dsprep.write.create_sidecar import Made, dataset_of
from dsprep.write.plan import probe_nbytes
from dsprep.write.split import SelectedSource

BUFFER = 64 << 20
"""Bytes of a group that are aimed at where nothing is asked for."""

GROUPS = 8
"""Groups that there are to be at least, so that a small dataset has some to shuffle."""

PAGE = 4 << 10
"""Bytes below which reading less is no faster."""

ZARR_FILES = 4096
"""Up to so many samples, zarr gets a file for each, which its library reads fastest."""

ZARR_SHARD = 256
"""Chunks of a shard beyond that: readers load its index, 16 bytes a chunk, for every sample."""

OWN_NBYTES = 1536
"""Bytes of a field of a sample besides its values in another project's form: a member of a tar."""

STEP = 1 << 18
"""Samples whose sizes are looked at together."""

GROUP_FORMATS = ("hdf5", "zarr", "tfrecord", "lmdb")
"""Formats for groups, the first one that can hold the fields."""

MADE = "made.json"
"""In a directory that is complete: what it was made from."""


@dataclass(frozen=True)
class Item:
    """A container that is written, or was: its directory, what it is, and how it is made."""

    name: str
    directory: Path
    file: str
    estimate: int
    told: Mapping[str, Any]
    format: str = ""
    options: WriteOptions = field(default_factory=WriteOptions)
    made: Made | None = None

    @property
    def path(self) -> Path:
        """The container."""
        return self.directory / self.file


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be prepared; nothing has been written."""

    # data, reading, files: the dataset: as it was named, how it is read, and its files
    data: tuple[str | Path, ...]
    reading: OpenOptions
    files: tuple[Path, ...]
    # source, schema: its format, and its fields
    source: str
    schema: Schema
    # folder, temporary: where forms are written, and whether that is removed in the end
    folder: Path
    temporary: bool
    # samples, of: samples that are taken, the first ones, and those of the dataset
    samples: int
    of: int
    payload: int  # bytes of their values
    # buffer_nbytes, group_text: bytes of a group, and its size as `dsprep.repack` takes it
    buffer_nbytes: int
    group_text: str
    in_place: tuple[str, ...] = ()  # forms that the data themselves have
    # items, writes: forms in the folder, and which of them will be written; the others are there
    # from before
    items: Mapping[str, Item] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    # forms that are another one: the source of a subset is that, in its own format
    same: Mapping[str, str] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)  # forms that cannot be had, and why
    notes: tuple[str, ...] = ()  # remarks, one clause each

    @property
    def cached(self) -> tuple[str, ...]:
        """Forms that are in the folder from before."""
        return tuple(name for name in self.items if name not in self.writes)

    @property
    def needed(self) -> int:
        """Bytes that will be written."""
        return sum(self.items[name].estimate for name in self.writes)


def plan(
    data: Sequence[str | Path],
    reading: OpenOptions,
    containers: Sequence[str],
    *,
    folder: Path | None = None,
    limit: int | None = None,
    buffer_size: str | int | None = None,
) -> Plan:
    """Decide what has to be written so that every form can be read.

    Parameters
    ----------
    data, reading
        The dataset, and how to read it.
    containers
        ``source``, ``groups``, ``hdf5``, ``lmdb``, ``tfrecord``, ``zarr``, ``own:STRATEGY``.
    folder
        Where to write, and to keep it; None: a temporary one beside the dataset.
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
    found = find_files(data)[0]
    files, format = tuple(path.absolute() for path, _ in found), found[0][1]
    dataset = dataset_of(files)
    place, temporary = folder_for(data, dataset, folder)
    with open_dataset(data, reading) as source:
        if not len(source):
            raise FormatError("the dataset has no samples", where=dataset)
        samples, payload = first_samples(source, limit)
        whole = samples == len(source) and not reading.fields
        grouped = in_place.group_nbytes(source) if whole else None
        buffer, text = _buffer(buffer_size, -(-payload // samples), payload, grouped)
        facts = Plan(
            data=tuple(data),
            reading=reading,
            files=files,
            source=format.name,
            schema=source.schema,
            folder=place,
            temporary=temporary,
            samples=samples,
            of=len(source),
            payload=payload,
            buffer_nbytes=buffer,
            group_text=text,
        )
        return _Deciding(facts, source, format, whole, grouped).decided(containers)


def _buffer(
    asked: str | int | None, each: int, payload: int, grouped: int | None
) -> tuple[int, str]:
    """Return the bytes of a group of samples of `each` bytes, and its size for `dsprep.repack`."""
    buffer = parse_buffer("auto" if asked is None else str(asked))
    if isinstance(buffer, InSamples):
        return max(1, buffer.count * each), str(buffer.count)
    nbytes = max(1, each, min(BUFFER, payload // GROUPS)) if grouped is None else grouped
    if isinstance(buffer, InBytes):
        nbytes = max(buffer.nbytes, each, 1)
    return nbytes, f"{nbytes}B"


class _Deciding:
    """What is decided about forms; `facts` is the plan without that."""

    def __init__(
        self, facts: Plan, source: Source, format: Format, whole: bool, grouped: int | None
    ) -> None:
        self.facts, self.source, self.format = facts, source, format
        self.whole, self.grouped = whole, grouped
        self.samples, self.text, self.place = facts.samples, facts.group_text, facts.folder
        self.items: dict[str, Item] = {}
        self.here: list[str] = []
        self.impossible: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.notes = list(source.notes)
        self.identity = identity(facts.files)

    def decide(self, name: str) -> None:
        """Decide about one container."""
        try:
            if name == "source":
                self._source()
            elif name == "groups":
                self._groups()
            elif name in formats.FORMATS:
                self._format(name)
            elif name.startswith("own:"):
                self._own(name)
            else:
                raise UsageError(f"{name!r} is not a form of a dataset")
        except UnsupportedError as error:
            self.impossible[name] = str(error)

    def _source(self) -> None:
        if self.whole and isinstance(self.source, SidecarSource):
            if not self._partly(self.source.sidecar.content):
                self.here.append("source")
                return
        elif self.whole:
            item = self._item("source", f"data{SUFFIX}", 0, {})
            if complete(item):
                self.items["source"] = item
                return
            try:
                made = provenance(
                    list(self.facts.data), self.facts.reading, out=item.path, write=False
                )
            except UnsupportedError as error:
                self.notes.append(f"the data cannot be located, so a copy is read: {error}")
            else:
                if not self._partly(made.content):
                    self.items["source"] = self._item(
                        "source", f"data{SUFFIX}", made.nbytes, {}, made=made
                    )
                    return
        self.same["source"] = self.format.name
        if self.format.name not in self.items:
            self._format(self.format.name, again=True)

    def _partly(self, content: Content) -> bool:
        """Tell whether fields cannot be located, so that a sidecar is not enough; remark it."""
        names = {str(n) for layout in content.layouts for n in layout.get("unlocated", ())}
        if names:
            told = ", ".join(sorted(names)[:3])
            self.notes.append(f"not every field can be located, so a copy is read: not {told}")
        return bool(names)

    def _groups(self) -> None:
        if self.grouped is not None and self.grouped <= self.facts.buffer_nbytes * in_place.SLACK:
            self.here.append("groups")
            return
        options = WriteOptions()
        for name in GROUP_FORMATS:
            format = formats.load(name)
            ending = ".zarr.zip" if name == "zarr" else format.suffixes[0]
            try:
                format.plan(self.source.schema, options)
                estimate = self._grouped_nbytes(name, ending)
            except UnsupportedError:
                if name == GROUP_FORMATS[-1]:
                    raise
                continue
            settings = {"format": name, "size": self.text}
            self.items["groups"] = self._item(
                "groups", f"data{ending}", estimate, settings, format=name
            )
            return

    def _grouped_nbytes(self, name: str, ending: str) -> int:
        """Return about how many bytes groups take; of ragged samples without reading them."""
        if self.source.schema.ragged:
            return self.facts.payload * 5 // 4 + (1 << 20)
        planned = plan_repack(
            chosen(self.source, self.samples),
            self.place / f"data{ending}",
            RepackOptions(buffer_size=self.text, to=name),
        )
        return planned.parts[0].layout.nbytes

    def _format(self, name: str, again: bool = False) -> None:
        here = self.whole and not again
        if here and in_place.has_form(name, self.source, self.facts.files, self.format):
            self.here.append(name)
            return
        format, schema = formats.load(name), self.source.schema
        options = zarr_options(schema, self.samples) if name == "zarr" else WriteOptions()
        estimate = format.plan(schema, options, self.samples, self.facts.payload).nbytes
        settings = {"chunk": options.chunk, "shard": options.zarr_shard}
        self.items[name] = self._item(
            name, f"data{format.suffixes[0]}", estimate, settings, format=name, options=options
        )

    def _own(self, name: str) -> None:
        strategy = name.removeprefix("own:")
        entry = find(strategy)
        if entry.missing:
            self.impossible[name] = f"{' and '.join(entry.missing)} is not installed"
            return
        members = self.samples * len(self.source.schema) * OWN_NBYTES
        self.items[name] = self._item(name, "data", self.facts.payload * 11 // 10 + members, {})

    def _item(
        self, name: str, file: str, estimate: int, settings: Mapping[str, Any], **more: Any
    ) -> Item:
        told = {
            "data": [str(p) for p in self.facts.files[:64]],
            "identity": self.identity,
            "samples": self.samples,
            "reading": self.facts.reading.to_json(),
            "schema": self.source.schema.to_json(),
            "container": name,
            "settings": dict(settings),
            "version": dsprep.__version__,
        }
        key = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
        stem = f"{dataset_of(self.facts.files).name[:40]}-{name.replace(':', '-')}-{key}"
        return Item(name, self.place / stem, file, estimate, told, **more)

    def decided(self, containers: Sequence[str]) -> Plan:
        """Return the plan for some forms."""
        for name in dict.fromkeys(containers):
            self.decide(name)
        writes = tuple(name for name, item in self.items.items() if not complete(item))
        if writes and existing(self.place).stat().st_dev != self.facts.files[0].stat().st_dev:
            self.notes.append(
                "the scratch folder is on another file system than the data: "
                "what is measured there is not theirs"
            )
        if writes and any(layout.codecs for layout in self.source.storage().values()):
            self.notes.append("the data are compressed, what is prepared from them is not")
        return replace(
            self.facts,
            in_place=tuple(self.here),
            items=self.items,
            writes=writes,
            same=self.same,
            impossible=self.impossible,
            notes=tuple(self.notes),
        )


def first_samples(source: Source, limit: int | None) -> tuple[int, int]:
    """Return how many of the first samples have at most `limit` bytes, and their bytes."""
    count = len(source)
    if not source.schema.ragged:
        each = source.schema.fixed_nbytes
        samples = count if limit is None else min(count, max(1, limit // max(1, each)))
        return samples, samples * each
    done = 0
    for at in range(0, count, STEP):
        sizes = source.sizes(at, min(count, at + STEP))
        if sizes is None:
            mean = probe_nbytes(source, 0, count)
            samples = count if limit is None else min(count, max(1, limit // mean))
            return samples, samples * mean
        ends = done + np.cumsum(sizes)
        if limit is not None and int(ends[-1]) > limit:
            fit = int(np.searchsorted(ends, limit, "right"))
            fit = max(fit, 1 if at == 0 else 0)
            return at + fit, int(ends[fit - 1]) if fit else done
        done = int(ends[-1])
    return count, done


def chosen(source: Source, samples: int) -> Source:
    """Return the source of the first samples."""
    if samples == len(source):
        return source
    return SelectedSource(source, np.arange(samples, dtype=np.int64))


def zarr_options(schema: Schema, samples: int) -> WriteOptions:
    """Return how to write Zarr so that a sample is read without its neighbours.

    A chunk is a sample, or as many as make up a page. Few samples get a file each. Many would
    cost as many inodes, so chunks are put into shards then; small ones, since zarr reads the
    index of a shard for every sample.
    """
    largest = max((f.row_nbytes for f in schema if not f.ragged), default=0)
    chunk = max(1, min(samples, PAGE // max(1, largest)))
    if -(-samples // chunk) <= ZARR_FILES:
        return WriteOptions(chunk=chunk, zarr_shard=0)
    return WriteOptions(chunk=chunk, zarr_shard=chunk * ZARR_SHARD)


def complete(item: Item) -> bool:
    """Whether a container is there from before, as it was made."""
    told = told_of(item.directory)
    try:
        if told.get("from") != dict(item.told) or not item.path.exists():
            return False
        if item.name.startswith("own:"):
            return True
        then = Mark.from_json(told["mark"], item.path)
        return then.is_same(Mark.with_files(item.path)[0])  # else written to, whoever did
    except (OSError, KeyError, TypeError, ValueError):
        return False


def told_of(directory: Path) -> dict[str, Any]:
    """Return what the directory of a container says that it was made from; empty: nothing."""
    try:
        told = json.loads((directory / MADE).read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
