"""Inspecting a dataset: its content, how it is stored, and what reading it will cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.memory import allowed_memory
from dsprep.core.schema import Array, Batch, Field, Ragged, batch_nbytes, encode_dtype
from dsprep.core.units import show_nbytes
from dsprep.formats.base import Source
from dsprep.formats.options import memory_error
from dsprep.layout.describe import FieldStorage
from dsprep.sidecar.spec import encode_attr
from dsprep.source.dataset import check_opened
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.paths import StorePath
from dsprep.writing.plan import pieces

SAMPLED, SAMPLED_STORED = 256, 32
"""Samples read for the statistics of ragged fields in large datasets: of files, and of an object
store, where each is a request."""

TOGETHER_NBYTES = 8 << 20
"""Bytes of samples that are read together where all are read."""

MAX_TYPED_NBYTES = 64 << 20
"""Bytes that are read at most to check whether the requested types fit."""

COPIES = 2
"""Copies of a sample in memory while it is read: as stored, and as returned."""

EXACT = 4096
"""Datasets with fewer samples, of a moderate size, are read completely."""


@dataclass(frozen=True)
class Lengths:
    """The spread of the lengths of a ragged field.

    Attributes
    ----------
    shortest, mean, longest
        Rows per sample (bytes for `bytes` and `str`).
    samples
        Samples read.
    exact
        Whether these are all samples.
    """

    shortest: int
    mean: float
    longest: int
    samples: int
    exact: bool


@dataclass(frozen=True)
class FieldFacts:
    """Facts about one field.

    Attributes
    ----------
    field
        The field itself.
    nbytes
        Payload bytes over all samples; an estimate if `lengths` is not exact.
    lengths
        For ragged fields; None for fixed ones and empty datasets.
    storage
        How it is stored.
    """

    field: Field
    nbytes: int
    lengths: Lengths | None
    storage: FieldStorage | None


@dataclass(frozen=True)
class Inspection:
    """The content of a dataset and its storage: the result of `inspect`.

    Attributes
    ----------
    path
        The dataset, or the directory that holds its files.
    version
        Format and version.
    files, stored_files
        Number of files (or stores), and of the files that are in them.
    looked_into
        Of how many of the files samples and bytes are known; of more, they are an estimate.
    samples
        N.
    stored_nbytes
        Bytes on disk.
    fields
        Facts by field, in order.
    attrs
        Attributes of the dataset.
    notes
        What was assumed or left out.
    groups
        Of a repacked dataset that is read through its sidecar: how many groups, and how many
        samples each of them has at most; else None.
    epoch_requests
        Of a dataset in a store: about how many requests a Reader makes in an epoch.
    """

    path: str
    version: str
    files: int
    stored_files: int
    looked_into: int
    samples: int
    stored_nbytes: int
    fields: tuple[FieldFacts, ...]
    attrs: Mapping[str, Any]
    notes: tuple[str, ...]
    groups: tuple[int, int] | None = None
    epoch_requests: int | None = None

    @property
    def payload(self) -> int:
        """Bytes of all values."""
        return sum(f.nbytes for f in self.fields)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        json = {**vars(self), "payload_nbytes": self.payload, "notes": list(self.notes)}
        json["fields"] = [_field_json(f) for f in self.fields]
        json["attrs"] = {k: encode_attr(v) for k, v in self.attrs.items()}
        if self.groups is not None:
            json["groups"] = dict(zip(("count", "samples"), self.groups, strict=True))
        if self.epoch_requests is None:
            del json["epoch_requests"]
        return json


def _field_json(facts: FieldFacts) -> dict[str, Any]:
    f, stored, lengths = facts.field, facts.storage, facts.lengths
    return {
        "name": f.name,
        "kind": f.kind,
        "dtype": encode_dtype(f.dtype),
        "shape": list(f.shape),
        "nbytes": facts.nbytes,
        "attrs": {k: encode_attr(v) for k, v in f.attrs.items()},
        "lengths": None if lengths is None else vars(lengths),
        "layout": None if stored is None else vars(stored),
    }


def inspect(source: Source, memory: int | None = None) -> Inspection:
    """Return the fields, the storage and the read cost of a dataset, without reading all of it.

    Parameters
    ----------
    source
        The opened dataset.
    memory
        Bytes that a sample may take; None: a quarter of what is free.

    Returns
    -------
    Inspection
        Format, files, samples, bytes, attributes, and facts for each field; estimates are marked.

    Raises
    ------
    DsprepError, OSError
        If the dataset is damaged or gone, or a sample is larger than the memory allows.
    """
    check_opened(source)
    if isinstance(source, SidecarSource):
        source.sidecar.check_objects()
    storage, limit, paths = source.storage(), allowed_memory(memory), source.files()
    files = len(paths) + source.unopened
    every = files / len(paths)
    if files > 1:  # these are of the first file; the others may differ
        storage = {
            name: replace(stored, storage=f"{stored.storage} (first file)", stored_nbytes=None)
            for name, stored in storage.items()
        }
    spread = ragged_lengths(source, limit)
    if not spread:
        check_types(source, limit)
    facts = []
    for f in source.schema:
        lengths = spread.get(f.name)
        rows = 1.0 if lengths is None else lengths.mean
        if f.ragged and lengths is None:
            rows = 0
        nbytes = round(len(source) * rows * f.row_nbytes * every)
        facts.append(FieldFacts(f, nbytes, lengths, storage.get(f.name)))
    stored, stored_nbytes = (round(n * every) for n in source.count_files())
    groups = _groups(source)
    return Inspection(
        path=str(source.path.absolute()),
        version=source.version,
        files=files,
        stored_files=stored,
        looked_into=len(paths),
        samples=round(len(source) * every),
        stored_nbytes=stored_nbytes,
        fields=tuple(facts),
        attrs=source.schema.attrs,
        notes=(*source.notes, *_note_of_small_files(stored, stored_nbytes)),
        groups=groups,
        epoch_requests=_epoch_requests(paths[0], files, stored_nbytes, groups),
    )


def _epoch_requests(
    first: Path, files: int, nbytes: int, groups: tuple[int, int] | None
) -> int | None:
    """Return about how many requests reading all files by groups takes; None of local ones."""
    from dsprep.reader.units import BUFFER_NBYTES, epoch_requests

    units = max(files, groups[0] if groups else -(-nbytes // BUFFER_NBYTES))
    return epoch_requests(first, units, nbytes / units)


def _note_of_small_files(files: int, nbytes: int) -> list[str]:
    """Return a line if a Reader opens more files at a time than it should."""
    if files == 1:
        return []
    from dsprep.reader.units import BUFFER_FILES, BUFFER_NBYTES

    if files <= BUFFER_FILES or nbytes >= files * (BUFFER_NBYTES // BUFFER_FILES):
        return []
    text = f"{files:,} files of {show_nbytes(nbytes // files)} on average, opened in every epoch"
    return [f"{text}; dsprep repack puts them into few large ones"]


def _groups(source: Source) -> tuple[int, int] | None:
    """Return the number of groups of a sidecar, and the samples of the largest."""
    if not isinstance(source, SidecarSource):
        return None
    count = largest = 0
    for layout, files in source.sidecar.layouts():
        if layout.count and layout.groups is None:
            return None
        if layout.count and layout.groups is not None:
            count += files * layout.groups.blocks.count
            largest = max(largest, layout.groups.samples)
    return (count, largest) if count else None


def first_samples(source: Source, count: int, memory: int | None) -> Iterator[dict[str, Any]]:
    """Yield samples ``0 .. count``, of as many as there are, each within the memory."""
    for i in range(min(count, len(source))):
        batch = _some(source, i, i + 1, allowed_memory(memory))
        yield {name: column[0] for name, column in batch.items()}


def _some(source: Source, start: int, stop: int, limit: int) -> Batch:
    """Return samples; refused where they are known to be too large."""
    sizes = source.sizes(start, stop)
    needed = 0 if sizes is None else COPIES * int(sizes.sum())
    if needed > limit:
        named = f"sample {start}" if stop == start + 1 else f"samples {start} to {stop - 1}"
        raise memory_error(
            f"{named} cannot be read in the memory allowed",
            needed,
            limit,
            where=source.path,
            fix="raise --memory, or name smaller fields with --field",
        )
    return source.read(start, stop)


def check_types(source: Source, limit: int) -> None:
    """Read some samples of all files if types were requested, which fails if they do not fit."""
    options, count = source.options, len(source)
    if all(s.dtype is None for s in options.fields):
        return
    done = 0
    for i in np.unique(np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64)).tolist():
        done += batch_nbytes(_some(source, i, i + 1, limit))
        if done > MAX_TYPED_NBYTES:
            return


def ragged_lengths(source: Source, limit: int) -> dict[str, Lengths]:
    """Return the distribution of the lengths of ragged fields, by field name."""
    ragged = [f for f in source.schema if f.ragged]
    count = len(source)
    if not ragged or not count:
        return {}
    parts_of: dict[str, list[Array]] = {f.name: [] for f in ragged}
    stored = isinstance(source.files()[0], StorePath)
    sizes = source.sizes(0, count) if count <= EXACT else None
    exact = sizes is not None and int(sizes.sum()) <= (TOGETHER_NBYTES if stored else 64 << 20)
    looked_at = count if exact else min(count, SAMPLED_STORED if stored else SAMPLED)
    parts = [(i, i + 1) for i in (np.arange(looked_at) * count // looked_at).tolist()]
    if exact:
        parts = [*pieces(source, target=max(1, min(TOGETHER_NBYTES, limit // (2 * COPIES))))]
    for start, stop in parts:
        columns = _some(source, start, stop, limit).items()
        batch_lengths = {
            name: column.lengths for name, column in columns if isinstance(column, Ragged)
        }
        del columns  # before the next ones take as much memory
        for name, lengths in batch_lengths.items():
            parts_of[name].append(lengths)
    exact = exact or looked_at == count
    result = {}
    for name, parts_of_field in parts_of.items():
        lengths = np.concatenate(parts_of_field)
        result[name] = Lengths(
            int(lengths.min()), float(lengths.mean()), int(lengths.max()), looked_at, exact
        )
    return result


def preview(value: Any, limit: int = 6) -> str:
    """Return one sample's value in a line: its first elements, or its first bytes."""
    if isinstance(value, bytes):
        text = repr(value[:32])
        return text if len(value) <= 32 else f"{text}... ({len(value)} bytes)"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}... ({len(value)} characters)"
    array = np.asarray(value)
    shown = ", ".join(str(v) for v in array.reshape(-1)[:limit])
    if array.ndim == 0:
        return shown
    more = ", ..." if array.size > limit else ""
    return f"[{shown}{more}]  shape {array.shape}"
