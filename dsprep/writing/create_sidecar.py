"""Making sidecars: each file's own structure, and the smallest laws that give exactly that.

The verb `dsprep.verbs.provenance` makes the sidecar of any dataset, a writer that of its output.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep import __version__, executors, formats
from dsprep.core.packing import Tables, digest, to_planes
from dsprep.core.schema import Array, Batch, Ragged, Schema, without_padding
from dsprep.errors import FormatError, TargetError, UnsupportedError, UsageError
from dsprep.formats.base import Format, Writer
from dsprep.formats.options import OpenOptions
from dsprep.formats.zip_members import stored_members
from dsprep.layout import as_json, fit
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.files import KEPT
from dsprep.reading.layout_reader import LayoutReader
from dsprep.reading.records import RecordReader
from dsprep.sidecar import spec
from dsprep.sidecar.entries import FileEntry
from dsprep.sidecar.proofs import rest_of
from dsprep.sidecar.spec import Content
from dsprep.source.many import Dataset, open_native
from dsprep.source.static import with_static
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.base import Handle
from dsprep.storage.identity import Identity, identities_of, unchanged
from dsprep.storage.paths import common_path, open_file
from dsprep.storage.trees import data_files

Progress: TypeAlias = Callable[[int, int], None]

THREADS = 8


class ReadOnlyError(TargetError):
    """The directory of a sidecar cannot be written to."""


@dataclass(frozen=True)
class Made:
    """A sidecar that was made.

    Attributes
    ----------
    content
        What it says.
    companion
        The bytes of its companion; empty if it has none.
    dataset
        What it describes.
    path
        Where it lies, or would.
    """

    content: Content
    companion: bytes
    dataset: Path
    path: Path

    @property
    def nbytes(self) -> int:
        """Bytes of the sidecar and its companion."""
        return sum(map(len, spec.encode(self.content, self.companion)))

    def save(self, *, durable: bool = True, replace: bool = True) -> None:
        """Write it; what was there is replaced at once.

        Raises
        ------
        ReadOnlyError
            If this process may not write there.
        FileExistsError
            If there is one, or a companion, and `replace` is False.
        """
        try:
            spec.write(self.content, self.path, self.companion, durable=durable, replace=replace)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            data = shlex.quote(str(self.dataset))
            raise ReadOnlyError(
                f"the sidecar cannot be written: {os.strerror(error.errno)}",
                where=self.path,
                fix=f"write it elsewhere with dsprep provenance {data} --out F, and name it where "
                "it is used: --out F (--locate, --show, --check), --sidecar F (audit, inspect), "
                "dsprep.Reader(F, data=DATA)",
            ) from error


def describe(
    format: Format,
    schema: Schema,
    path: Path,
    samples: int,
    writer: Writer,
    last: Batch | None = None,
) -> Made:
    """Return the sidecar of a file of so many samples that `writer` has just completed.

    If the last sample is given, it is read back by the layout of the writer.

    The file is looked through where the writer does not know its layout. Where samples have no
    offsets the sidecar says nothing of their places.
    """
    beside, groups, opened = spec.sidecar_path(path), writer.groups(), _opener(path)
    who, layout = Identity.of(path, format.facts(path)), writer.layout() if samples else None
    try:
        if layout is not None:
            layout = fit.fit(layout)
            if last is not None:
                _prove(layout, schema, path, opened, last)
        else:
            with open_native(format, [path], OpenOptions(), schema) as source:
                layout = _fitted(source, 0, source.schema, None, None)
        if groups is not None and samples:
            layout = _with_rest(replace(layout, groups=fit.fit_groups(groups)), opened)
        subject = Subject(format, [path], path, beside, schema, {})
        return _made(subject, [(layout, who, None)])
    except UnsupportedError:
        entry = FileEntry(os.path.relpath(path, path), samples, who)
        return Made(Content(format.name, schema, (entry,), {}), b"", path, beside)


def joined(
    format: Format,
    schema: Schema,
    dataset: Path,
    files: Sequence[Path],
    parts: Sequence[tuple[Content, bytes]],
    lineage: Mapping[str, Any],
) -> Made:
    """Return the sidecar of a dataset whose files have one each, in `parts`, with its companion."""
    path = spec.sidecar_path(dataset)
    if len(parts) == 1:
        ((content, companion),) = parts
        entry = replace(content.files[0], path=os.path.relpath(files[0], dataset))
        return Made(replace(content, files=(entry,), lineage=lineage), companion, dataset, path)
    looked: list[Looked] = []
    for content, companion in parts:
        entry = content.files[0]
        if content.layouts:
            json, tables = content.layouts[entry.layout], Tables(companion or None, dataset)
            layout = as_json.from_json(json, entry.samples, content.schema, tables)
            looked.append((layout, entry.identity, None))
    if len(looked) == len(parts):
        return _made(Subject(format, files, dataset, path, schema, lineage), looked)
    entries = tuple(
        FileEntry(os.path.relpath(file, dataset), content.samples, content.files[0].identity)
        for file, (content, _) in zip(files, parts, strict=True)
    )
    return Made(Content(format.name, schema, entries, lineage), b"", dataset, path)


def dataset_of(files: Sequence[Path]) -> Path:
    """Return what a sidecar of `files` lies beside: the only file, or their common directory."""
    common = common_path(files)
    if not common.name:
        raise UsageError(
            "the files have no directory in common that could have a sidecar",
            found=f"{files[0]} and {files[-1]}",
        )
    return common


def made_by(function: str) -> dict[str, Any]:
    """Return what runs, for a lineage: the command as it was typed, or else `function`."""
    program = Path(sys.argv[0]).parts[-2:] if sys.argv else ()
    typed = program[-1:] == ("dsprep",) or program == ("dsprep", "__main__.py")
    return {
        "command": shlex.join(["dsprep", *sys.argv[1:]]) if typed else function,
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# --- making ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What a sidecar is to describe.

    Attributes
    ----------
    format, files
        The files, and their format.
    dataset, path
        What they are together, and where the sidecar is to be.
    schema
        The fields, with the attributes that the files may have no place for.
    lineage
        Who made them, and from what.
    options
        How they are read.
    """

    format: Format
    files: Sequence[Path]
    dataset: Path
    path: Path
    schema: Schema
    lineage: Mapping[str, Any]
    options: OpenOptions = field(default_factory=OpenOptions)


@dataclass(frozen=True)
class Looks:
    """How files are looked at; the attributes are parameters of `provenance`."""

    law: str | None = None
    checksums: bool = False
    progress: Progress | None = None
    executor: Executor | None = None
    workers: int | None = None


def locate(format: Format, files: Sequence[Path], notes: Sequence[str]) -> Made:
    """Return the sidecar of files that have none and are read as by default; nothing is written.

    Parameters
    ----------
    format, files, notes
        As `dsprep.source.files.find_dataset` gives them; paths are absolute.

    Raises
    ------
    UnsupportedError
        If the samples have no offsets.
    DsprepError, OSError
        If the data are damaged, or have no directory in common.
    """
    refuse_partial(written_as(files))
    dataset, known = dataset_of(files), identities_of(files)
    options, path = OpenOptions(), spec.sidecar_path(dataset)
    with open_native(format, files, options, None, notes, identities=known) as source:
        lineage = made_by("dsprep.Reader")
        made = make(source, Subject(format, files, dataset, path, source.schema, lineage), Looks())
    check_located(made)
    return made


def check_located(made: Made) -> None:
    """Raise `UnsupportedError` if no field of any file can be located."""
    layouts, names = made.content.layouts, made.content.schema.names
    if not names or any(len(layout.get("unlocated", ())) < len(names) for layout in layouts):
        return
    for layout in layouts:
        name, reason = next(iter(layout["unlocated"].items()))
        raise UnsupportedError(
            f"no field can be located, {name} since {reason.partition(';')[0]}",
            where=made.dataset,
            fix=f"dsprep convert {made.dataset} DST writes them so that they do",
        )


def make(source: Dataset, subject: Subject, looks: Looks) -> Made:
    """Return the sidecar of a dataset that the format's own library has opened."""
    schema, lost = with_static(subject.schema, source, subject.format)
    subject = replace(subject, schema=schema)
    with unchanged(source.identities()):
        looked = _look(source, subject, looks)
    return _made(subject, looked, (*source.notes, *lost))


def _made(subject: Subject, looked: Sequence[Looked], notes: Sequence[str] = ()) -> Made:
    """Return the sidecar of files that have been looked at."""
    tables = Tables()
    layouts: dict[str, int] = {}
    entries = []
    for file, (layout, who, crcs) in zip(subject.files, looked, strict=True):
        text = json.dumps(as_json.to_json(layout, subject.schema, tables))
        number = layouts.setdefault(text, len(layouts))
        relative = os.path.relpath(file, subject.dataset)
        crc32c = {"block": CRC_BLOCK, "data": tables.put(crcs)} if crcs is not None else None
        entries.append(FileEntry(relative, layout.count, who, number, crc32c))
    companion = bytes(tables.written)
    known = {"nbytes": len(companion), "blake2b": digest(companion)} if companion else None
    content = Content(
        subject.format.name,
        subject.schema,
        tuple(entries),
        subject.lineage,
        layouts=tuple(json.loads(text) for text in layouts),
        reading=subject.options.to_json(),
        companion=known,
        notes=tuple(notes),
    )
    return Made(content, companion, subject.dataset, subject.path)


def _prove(
    layout: FileLayout, schema: Schema, path: Path, opened: Callable[[str], Handle], last: Batch
) -> None:
    """Raise `FormatError` if the last sample of a file is not where a layout says."""
    reader = LayoutReader(layout, schema, opened, path, formats.decoders)
    names = [name for name in schema.names if name not in layout.unlocated]
    found = reader.read(np.array([layout.count - 1]), names)
    for name in names:
        if _bits(found[name]) != _bits(last[name]):
            raise FormatError(
                "the sample that was written is not read back",
                where=f"{path}, sample {layout.count - 1}, field {name}",
                fix="the disk, or a version of a library, does not do what dsprep expects",
            )


def _bits(column: Array | Ragged) -> bytes:
    values = column.values if isinstance(column, Ragged) else column
    return without_padding(values).tobytes()


def _opener(path: Path) -> Callable[[str], Handle]:
    """Return what opens files of a dataset by their paths below it."""
    files: dict[str, Handle] = {}

    def opened(below: str) -> Handle:
        if below not in files:
            if len(files) >= KEPT:
                files.clear()
            files[below] = open_file(path / below if below else path)
        return files[below]

    return opened


def _with_rest(layout: FileLayout, opened: Callable[[str], Handle]) -> FileLayout:
    """Return a layout with the checksums of what lies outside the ranges of its groups."""
    rest = rest_of(layout, opened)
    if rest is None or layout.groups is None:
        return layout
    return replace(layout, groups=fit.fit_groups(replace(layout.groups, rest=rest)))


Looked: TypeAlias = tuple[FileLayout, Identity, bytes | None]


def _looked(
    format: Format,
    schema: Schema,
    law: str | None,
    checksums: bool,
    source: Dataset,
    number: int,
    progress: Progress | None = None,
) -> Looked:
    """Return layout, identity and checksums of a file of a dataset of this schema."""
    path = source.paths[number]
    who = Identity.of(path, format.facts(path))
    layout = _fitted(source, number, schema, law, progress)
    return layout, who, _summed(path, layout, schema) if checksums else None


def _fitted(
    source: Dataset, number: int, schema: Schema, law: str | None, progress: Progress | None
) -> FileLayout:
    """Return the layout of one file, by the smallest laws."""
    if not source.count(number):
        return FileLayout(0, None, {name: Column(None) for name in schema.names})
    return fit.fit(source.layout(number, progress), law)


def _look(source: Dataset, subject: Subject, looks: Looks) -> list[Looked]:
    """Return layout, identity and checksums of every file, several files at a time."""
    files = subject.files
    look = partial(_looked, subject.format, source.schema, looks.law, looks.checksums)
    if len(files) == 1:
        return [look(source, 0, looks.progress)]
    results: dict[int, Looked] = {}

    def note(number: int, looked: Looked) -> None:
        results[number] = looked
        if looks.progress is not None:
            looks.progress(len(results), len(files))

    if looks.executor is not None:
        apart = partial(_look_apart, look)
        for (number, _), looked in executors.run(
            looks.executor, apart, enumerate(source.openings())
        ):
            note(number, looked)
    else:
        here = partial(look, source)
        with ThreadPoolExecutor(
            looks.workers or min(THREADS, len(os.sched_getaffinity(0)))
        ) as pool:
            for number, looked in executors.run(pool, here, range(len(files))):
                note(number, looked)
    return [results[i] for i in range(len(files))]


def _look_apart(look: Callable[..., Looked], file: tuple[int, Callable[[], Dataset]]) -> Looked:
    """Look at a file that this process has to open."""
    with file[1]() as source:
        return look(source, 0)


# --- checksums -------------------------------------------------------------------------------

CRC_BLOCK = 16 << 20


def _summed(path: Path, layout: FileLayout, schema: Schema) -> bytes:
    """Return the checksums of a file, which agrees with those that it keeps itself.

    Raises
    ------
    FormatError
        If it does not: new checksums would make damaged data look sound.
    """
    members = stored_members(path)
    records = layout.records
    reader = None if records is None else RecordReader(records, schema, formats.decoders)
    if members is not None:
        file = open_file(path)
        for i in range(len(members.offsets)):
            members.check(file, i)
    elif reader is not None and reader.has_crcs:
        below = reader.records.blocks.path
        reader.prove(open_file(path / below if below else path), np.arange(layout.count))
    return checksums_of(path)


def checksums_of(path: Path, block: int = CRC_BLOCK) -> bytes:
    """Return the CRC-32C of each `block` bytes of a file, or of a directory's data files.

    Those of a directory are taken back to back, in the order of their paths.
    """
    from google_crc32c import extend

    crcs: list[int] = []
    crc = filled = 0
    for file in sorted(data_files(path)):
        with file.open("rb", buffering=0) as opened:
            while data := opened.read(min(CRC_BLOCK, block - filled)):
                crc = int(extend(crc, data))
                filled += len(data)
                if filled == block:
                    crcs.append(crc)
                    crc = filled = 0
    if filled:
        crcs.append(crc)
    return to_planes(np.array(crcs, np.int64))
