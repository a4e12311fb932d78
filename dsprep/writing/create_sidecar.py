"""Making sidecars: each file's own structure, and the smallest laws that give exactly that.

The verb `dsprep.verbs.provenance` makes the sidecar of any dataset, a writer that of its output.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep import __version__, executors, formats
from dsprep.core.packing import Tables, digest, to_planes
from dsprep.core.schema import (
    OTHERS,
    Array,
    Batch,
    Ragged,
    Schema,
    differences,
    without_padding,
)
from dsprep.errors import (
    ChangedError,
    DsprepError,
    FormatError,
    TargetError,
    UnsupportedError,
    UsageError,
)
from dsprep.formats.base import Format, Source, Writer
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
from dsprep.source.many import (
    Dataset,
    Surveyed,
    attributes_text,
    open_alone,
    survey_options,
    without,
)
from dsprep.source.static import with_static
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.base import Handle
from dsprep.storage.identity import Identity, unchanged
from dsprep.storage.paths import as_path, common_path, open_file, opened_once
from dsprep.storage.trees import data_files

Progress: TypeAlias = Callable[[int, int], None]

THREADS = 8

MOVES = 5
"""Moves of the times of an output after which something else must have changed it."""

MANY = 4096
"""Files from which on processes are worth their start: threads mostly wait for the interpreter."""

AT_ONCE = 256
"""Files that one task looks at, at most, and tasks that there are, at least."""


@dataclass(frozen=True)
class Made:
    """A sidecar that was made.

    Attributes
    ----------
    content
        Its statements.
    companion
        The bytes of its companion; empty if it has none.
    dataset
        The files that it describes.
    path
        Its place.
    """

    content: Content
    companion: bytes
    dataset: Path
    path: Path

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the sidecar and its companion."""
        return sum(map(len, spec.encode(self.content, self.companion)))

    def save(self, *, durable: bool = True, replace: bool = True) -> None:
        """Write it; what was there is replaced at once.

        Raises
        ------
        TargetError
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
            raise TargetError(
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

    If the last sample is given, it is read back by the layout.

    The file is looked through where the writer does not know its layout. Where samples have no
    offsets the sidecar says nothing of their places. It is the writer's alone, but file systems may
    still move the times of what has just been written: then it is looked at again.
    """
    look = partial(_describe, format, schema, path, samples, writer, last)
    for _ in range(MOVES):
        with suppress(ChangedError):
            return look()
    return look()


def _describe(
    format: Format, schema: Schema, path: Path, samples: int, writer: Writer, last: Batch | None
) -> Made:
    """Do what `describe` does, while no time moves."""
    beside, groups, opened = spec.sidecar_path(path), writer.groups(), _opener(path)
    identity, layout = Identity.of(path, format.facts(path)), writer.layout() if samples else None
    try:
        if layout is not None:
            layout = fit.fit(layout)
        else:
            with Dataset(format, [path], OpenOptions(), schema) as source:
                layout = _fitted(source)
        if last is not None and samples:
            _prove(layout, schema, path, opened, last)
        if groups is not None and samples:
            layout = _with_rest(replace(layout, groups=fit.fit_groups(groups)), opened)
        return _made(Content(format.name, schema, ()), [path], [(layout, identity, None)], path)
    except UnsupportedError:
        entry = FileEntry(os.path.relpath(path, path), samples, identity)
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
        return _made(Content(format.name, schema, (), lineage), files, looked, dataset)
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


Sight: TypeAlias = tuple[Schema, FileLayout | None, Identity, bytes | None]
"""The schema of a file, its layout if it is known, its identity, and requested checksums."""

How: TypeAlias = tuple[OpenOptions, Schema | None, bool]
"""Options, a hint, and whether fields are inferred: see `open_alone`."""

ANY = "*"
"""The name of an only field while it is not known what all files call it."""


@dataclass(frozen=True)
class Looks:
    """Parameters of looking at files; the attributes are those of `provenance`.

    `known` has what an old sidecar with the fields of `hint` states of files, by their numbers;
    the first file is looked at in any case.
    """

    checksums: bool = False
    progress: Progress | None = None
    executor: Executor | None = None
    processes: Executor | None = None
    workers: int | None = None
    known: Mapping[int, Looked] = field(default_factory=dict)


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
    made = make(format, files, OpenOptions(), None, notes, Looks(), made_by("dsprep.Reader"))
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


def make(
    format: Format,
    files: Sequence[Path],
    options: OpenOptions,
    hint: Schema | None,
    notes: Sequence[str],
    looks: Looks,
    lineage: Mapping[str, Any],
) -> Made:
    """Return the sidecar of files, each of which is looked at once; paths are absolute.

    That is done again where only all files together say what the fields of each are.
    """
    sights: dict[int, Sight] = {}
    how = options, hint, format.infers and hint is None and len(files) > 1
    named = all(s.name != OTHERS for s in options.fields)
    surveyed = _survey(format, files, how, looks, sights) if named else ()
    with Dataset(format, files, options, hint, notes, surveyed=surveyed) as source:
        fields = without(source.schema, source.options.file_field)
        again = [
            i for i in range(len(files)) if i not in sights or not _is_final(sights[i], fields)
        ]
        how = source.options, source.hint, False
        for i, (_, one) in zip(again, _look_at(format, files, again, how, looks), strict=True):
            sights[i] = one
        schema, lost = with_static(source.schema, source, format)
        looked, by_name = list[Looked](), dict[int, FileLayout]()
        for i in range(len(files)):
            _, layout, identity, crcs = sights[i]
            assert layout is not None  # it was looked at again
            if id(layout) not in by_name:
                by_name[id(layout)] = _named(layout, fields)
            looked.append((source.with_number(by_name[id(layout)], i), identity, crcs))
    content = Content(
        format.name,
        schema,
        (),
        lineage,
        reading=options.to_json(),
        notes=(*source.notes, *lost),
    )
    return _made(content, files, looked, dataset_of(files))


def _made(content: Content, files: Sequence[Path], looked: Sequence[Looked], dataset: Path) -> Made:
    """Return the sidecar of files that have been looked at, with what else `content` says."""
    tables = Tables()
    layouts: dict[str, int] = {}
    known: dict[int, int] = {}  # many files have one layout
    entries, above = [], len(str(dataset / "_")) - 1
    for file, (layout, identity, crcs) in zip(files, looked, strict=True):
        if id(layout) not in known:
            text = json.dumps(as_json.to_json(layout, content.schema, tables))
            known[id(layout)] = layouts.setdefault(text, len(layouts))
        relative = "." if file == dataset else str(file)[above:]
        crc32c = {"block": CRC_BLOCK, "data": tables.put(crcs)} if crcs is not None else None
        entries.append(FileEntry(relative, layout.count, identity, known[id(layout)], crc32c))
    companion = bytes(tables.written)
    content = replace(
        content,
        files=tuple(entries),
        layouts=tuple(json.loads(text) for text in layouts),
        companion={"nbytes": len(companion), "blake2b": digest(companion)} if companion else None,
    )
    return Made(content, companion, dataset, spec.sidecar_path(dataset))


def _prove(
    layout: FileLayout, schema: Schema, path: Path, opened: Callable[[str], Handle], last: Batch
) -> None:
    """Raise `FormatError` if the last sample of a file is not where a layout says."""
    reader = LayoutReader(layout, schema, opened, path, formats.decoders)
    names = [name for name in schema.names if name not in layout.unlocated]
    values = reader.read(np.array([layout.count - 1]), names)
    for name in names:
        if _bits(values[name]) != _bits(last[name]):
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


def _survey(
    format: Format, files: Sequence[Path], how: How, looks: Looks, sights: dict[int, Sight]
) -> Iterator[Surveyed]:
    """Yield what each file tells of the dataset, and put the rest into `sights`."""
    options, hint, inferring = how
    how = survey_options(options) if inferring else options, hint, inferring
    ((first, sights[0]),) = _look_at(format, files, [0], how, looks)
    yield first
    known = dict(looks.known)
    if hint is None or differences(without(hint, options.file_field), first.schema):
        known = {}
    new = [i for i in range(1, len(files)) if i not in known]
    looked, alike = _look_at(format, files, new, how, looks), dict[int, Surveyed]()
    for i in range(1, len(files)):
        if i in known:
            layout, identity, crcs = known[i]
            sights[i] = first.schema, layout, identity, crcs
            if layout.count not in alike:
                alike[layout.count] = replace(first, count=layout.count, notes=(), dropped=0)
            yield alike[layout.count]
        else:
            survey, sights[i] = next(looked)
            yield survey


def _look_at(
    format: Format, files: Sequence[Path], numbers: Sequence[int], how: How, looks: Looks
) -> Iterator[tuple[Surveyed, Sight]]:
    """Yield what looking at some of the files gives, in their order; several are at a time."""
    look = partial(_look, format.name, how, looks.checksums)
    if len(numbers) == 1:
        progress = looks.progress if len(files) == 1 else None
        yield from look((0, [str(files[numbers[0]])]), progress)
        return
    step = max(1, min(AT_ONCE, len(numbers) // AT_ONCE))
    tasks = [numbers[at : at + step] for at in range(0, len(numbers), step)]
    named = ((k, [str(files[i]) for i in some]) for k, some in enumerate(tasks))
    threads = looks.workers or min(THREADS, len(os.sched_getaffinity(0)))
    done: dict[int, list[tuple[Surveyed, Sight]]] = {}
    at = 0
    executor = looks.executor or (looks.processes if len(numbers) >= MANY else None)
    with nullcontext(executor) if executor else ThreadPoolExecutor(threads) as pool:
        for (k, _), sights in executors.run(pool, look, named):
            done[k] = sights
            if looks.progress is not None and len(files) > 1:
                looks.progress(min((at + len(done)) * step, len(numbers)), len(numbers))
            while at in done and at < len(tasks) - 1:
                yield from done.pop(at)
                at += 1
    # Who takes the last one may take no more: then the workers have ended their tasks.
    for number in range(at, len(tasks)):
        yield from done.pop(number)


def _look(
    format_name: str,
    how: How,
    checksums: bool,
    task: tuple[int, list[str]],
    progress: Progress | None = None,
) -> list[tuple[Surveyed, Sight]]:
    """Look at some files, each of which is opened once; what is alike is the same object."""
    (options, hint, inferring), format = how, formats.load(format_name)
    sights, alike = list[tuple[Surveyed, Sight]](), dict[str, Any]()
    hint = None if hint is None else without(hint, options.file_field)
    for path in map(as_path, task[1]):
        with opened_once(path):
            identity = Identity.of(path, format.facts(path))
            with (
                unchanged(((path, identity),)),
                open_alone(format, path, options, hint, inferring) as source,
            ):
                if hint is not None:
                    source.confirm()
                layout, crcs, survey = None, None, Surveyed.of(source)
                try:
                    layout = _fitted(source, progress)
                except DsprepError:
                    if not inferring:
                        raise
                if checksums and layout is not None:
                    crcs = _summed(path, layout, source.schema)
        schema, layout = _nameless(survey.schema, layout)
        own, words = _text_of(schema), {**vars(survey), "schema": _text_of(survey.schema)}
        where = None if layout is None else as_json.to_json(layout, schema, _Digests())
        survey = alike.setdefault(repr(words), survey)
        schema, layout = alike.setdefault(repr((own, where)), (schema, layout))
        sights.append((survey, (schema, layout, identity, crcs)))
    return sights


class _Digests(Tables):
    """Tells tables apart without packing them."""

    def put(self, plain: bytes) -> Any:
        """Return a digest of a table."""
        return digest(plain)


def _text_of(schema: Schema) -> str:
    return repr((schema.to_json(), attributes_text(schema), schema.static))


def _nameless(schema: Schema, layout: FileLayout | None) -> tuple[Schema, FileLayout | None]:
    """Return what does not depend on the name of the only field, which may be that of the file."""
    if layout is None or [*layout.columns] != [*schema.names] or len(schema) != 1:
        return schema, layout
    ((name, column),) = layout.columns.items()
    field = replace(schema[name], name=ANY)
    return schema.replace(field), replace(layout, columns={ANY: column})


def _fitted(source: Source, progress: Progress | None = None) -> FileLayout:
    """Return the layout of one file, by the smallest laws."""
    if not len(source):
        return FileLayout(0, None, {name: Column(None) for name in source.schema.names})
    return fit.fit(source.extents(progress))


def _is_final(sight: Sight, fields: Schema) -> bool:
    """Return whether a file was looked at with the fields that all files turned out to have."""
    schema, layout, *_ = sight
    if schema.names == (ANY,) and len(fields) == 1:
        fields = fields.replace(replace(fields.fields[0], name=ANY))
    return layout is not None and (not layout.count or not differences(fields, schema))


def _named(layout: FileLayout, fields: Schema) -> FileLayout:
    """Return the layout of a file with the names of the fields of all."""
    if not layout.count:
        return FileLayout(0, None, {name: Column(None) for name in fields.names})
    if [*layout.columns] == [ANY]:
        return replace(layout, columns={fields.names[0]: layout.columns[ANY]})
    return layout


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
