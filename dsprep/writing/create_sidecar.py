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
    FileSurvey,
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

RETRIES = 5
"""Repeated scans of an output whose time stamps change, before it counts as modified."""

PROCESS_FILES = 4096
"""Files from which on processes pay off: threads mostly wait for the interpreter."""

FILES_PER_TASK = 256
"""Files of a task at most, and tasks at least."""


@dataclass(frozen=True)
class NewSidecar:
    """A sidecar that is not written yet.

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


def describe_output(
    format: Format,
    schema: Schema,
    path: Path,
    samples: int,
    writer: Writer,
    last: Batch | None = None,
) -> NewSidecar:
    """Return the sidecar of a file that `writer` has just completed.

    If the writer does not know the layout, the file is parsed. File systems may still change the
    time stamps of a file that was just written: then its sidecar is made again.

    Parameters
    ----------
    path, samples
        The file, and the number of its samples.
    last
        Its last sample, which is read back by the layout; None: not compared.
    """
    look = partial(_describe, format, schema, path, samples, writer, last)
    for _ in range(RETRIES):
        with suppress(ChangedError):
            return look()
    return look()


def _describe(
    format: Format, schema: Schema, path: Path, samples: int, writer: Writer, last: Batch | None
) -> NewSidecar:
    """Return the sidecar of `describe_output`; raise `ChangedError` if time stamps change."""
    beside, groups, opened = spec.sidecar_path(path), writer.groups(), _opener(path)
    identity, layout = Identity.of(path, format.facts(path)), writer.layout() if samples else None
    try:
        if layout is not None:
            layout = fit.fit(layout)
        else:
            with Dataset(format, [path], OpenOptions(), schema) as source:
                layout = _fit_layout(source)
        if last is not None and samples:
            _prove_last_sample(layout, schema, path, opened, last)
        if groups is not None and samples:
            layout = _with_rest(replace(layout, groups=fit.fit_groups(groups)), opened)
        return _assemble(Content(format.name, schema, ()), [path], [(layout, identity, None)], path)
    except UnsupportedError:
        entry = FileEntry(os.path.relpath(path, path), samples, identity)
        return NewSidecar(Content(format.name, schema, (entry,), {}), b"", path, beside)


def join_sidecars(
    format: Format,
    schema: Schema,
    dataset: Path,
    files: Sequence[Path],
    parts: Sequence[tuple[Content, bytes]],
    lineage: Mapping[str, Any],
) -> NewSidecar:
    """Return the sidecar of a dataset from those of its files: contents and companions."""
    path = spec.sidecar_path(dataset)
    if len(parts) == 1:
        ((content, companion),) = parts
        entry = replace(content.files[0], path=os.path.relpath(files[0], dataset))
        content = replace(content, files=(entry,), lineage=lineage)
        return NewSidecar(content, companion, dataset, path)
    located: list[LocatedFile] = []
    for content, companion in parts:
        entry = content.files[0]
        if content.layouts:
            json, tables = content.layouts[entry.layout], Tables(companion or None, dataset)
            layout = as_json.from_json(json, entry.samples, content.schema, tables)
            located.append((layout, entry.identity, None))
    if len(located) == len(parts):
        return _assemble(Content(format.name, schema, (), lineage), files, located, dataset)
    entries = tuple(
        FileEntry(os.path.relpath(file, dataset), content.samples, content.files[0].identity)
        for file, (content, _) in zip(files, parts, strict=True)
    )
    return NewSidecar(Content(format.name, schema, entries, lineage), b"", dataset, path)


def dataset_of(files: Sequence[Path]) -> Path:
    """Return the path beside which a sidecar of `files` is kept: a file, or their directory."""
    common = common_path(files)
    if not common.name:
        raise UsageError(
            "the files have no directory in common that could have a sidecar",
            found=f"{files[0]} and {files[-1]}",
        )
    return common


def made_by(function: str) -> dict[str, Any]:
    """Return the command as it was typed, or else `function`, for a lineage."""
    program = Path(sys.argv[0]).parts[-2:] if sys.argv else ()
    typed = program[-1:] == ("dsprep",) or program == ("dsprep", "__main__.py")
    return {
        "command": shlex.join(["dsprep", *sys.argv[1:]]) if typed else function,
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# --- making ----------------------------------------------------------------------------------


FileScan: TypeAlias = tuple[Schema, FileLayout | None, Identity, bytes | None]
"""Schema of a file, its layout if known, its identity, and its checksums if requested."""

OpenArguments: TypeAlias = tuple[OpenOptions, Schema | None, bool]
"""Options, hint and inferring: arguments of `open_alone`."""

ANY = "*"
"""The name of an only field until its name in all files is known."""


@dataclass(frozen=True)
class ScanOptions:
    """Options of scanning the files of a dataset.

    Attributes
    ----------
    checksums
        Whether to compute a CRC-32C of every block.
    progress
        Called with (files done, files in all).
    executor, processes
        Workers that scan; processes are used for `PROCESS_FILES` files or more.
    workers
        Threads, where there is no executor.
    known
        Files by number whose layout an older sidecar gives; the first file is always scanned.
    """

    checksums: bool = False
    progress: Progress | None = None
    executor: Executor | None = None
    processes: Executor | None = None
    workers: int | None = None
    known: Mapping[int, LocatedFile] = field(default_factory=dict)


def locate_files(format: Format, files: Sequence[Path], notes: Sequence[str]) -> NewSidecar:
    """Return a sidecar of files that have none, read by default options; nothing is written.

    Parameters
    ----------
    format, files, notes
        Format, absolute paths and notes of `dsprep.source.files.find_dataset`.

    Raises
    ------
    UnsupportedError
        If the samples have no offsets.
    DsprepError, OSError
        If the data are damaged, or have no directory in common.
    """
    refuse_partial(written_as(files))
    lineage = made_by("dsprep.Reader")
    made = make_sidecar(format, files, OpenOptions(), None, notes, ScanOptions(), lineage)
    check_located(made)
    return made


def check_located(made: NewSidecar) -> None:
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


def make_sidecar(
    format: Format,
    files: Sequence[Path],
    options: OpenOptions,
    hint: Schema | None,
    notes: Sequence[str],
    scan: ScanOptions,
    lineage: Mapping[str, Any],
) -> NewSidecar:
    """Return the sidecar of files, scanned once each; paths are absolute.

    A file is scanned again if its fields are known only after all files were seen.
    """
    scans: dict[int, FileScan] = {}
    opening = options, hint, format.infers and hint is None and len(files) > 1
    named = all(s.name != OTHERS for s in options.fields)
    surveyed = _survey(format, files, opening, scan, scans) if named else ()
    with Dataset(format, files, options, hint, notes, surveyed=surveyed) as source:
        fields = without(source.schema, source.options.file_field)
        again = [i for i in range(len(files)) if i not in scans or not _is_final(scans[i], fields)]
        opening = source.options, source.hint, False
        for i, (_, one) in zip(
            again, _scan_files(format, files, again, opening, scan), strict=True
        ):
            scans[i] = one
        schema, lost = with_static(source.schema, source, format)
        located, by_name = list[LocatedFile](), dict[int, FileLayout]()
        for i in range(len(files)):
            _, layout, identity, crcs = scans[i]
            assert layout is not None  # it was looked at again
            if id(layout) not in by_name:
                by_name[id(layout)] = _named(layout, fields)
            located.append((source.with_number(by_name[id(layout)], i), identity, crcs))
    content = Content(
        format.name,
        schema,
        (),
        lineage,
        reading=options.to_json(),
        notes=(*source.notes, *lost),
    )
    return _assemble(content, files, located, dataset_of(files))


def _assemble(
    content: Content, files: Sequence[Path], located: Sequence[LocatedFile], dataset: Path
) -> NewSidecar:
    """Return the sidecar of scanned files, with the schema, lineage and notes of `content`."""
    tables = Tables()
    layouts: dict[str, int] = {}
    known: dict[int, int] = {}  # many files have one layout
    entries, above = [], len(str(dataset / "_")) - 1
    for file, (layout, identity, crcs) in zip(files, located, strict=True):
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
    return NewSidecar(content, companion, dataset, spec.sidecar_path(dataset))


def _prove_last_sample(
    layout: FileLayout, schema: Schema, path: Path, opened: Callable[[str], Handle], last: Batch
) -> None:
    """Raise `FormatError` unless a layout gives the last sample of a file as it was written."""
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
    """Return a function that opens files of a dataset by their paths below it."""
    files: dict[str, Handle] = {}

    def opened(below: str) -> Handle:
        if below not in files:
            if len(files) >= KEPT:
                files.clear()
            files[below] = open_file(path / below if below else path)
        return files[below]

    return opened


def _with_rest(layout: FileLayout, opened: Callable[[str], Handle]) -> FileLayout:
    """Return a layout with checksums of the bytes outside its groups."""
    rest = rest_of(layout, opened)
    if rest is None or layout.groups is None:
        return layout
    return replace(layout, groups=fit.fit_groups(replace(layout.groups, rest=rest)))


LocatedFile: TypeAlias = tuple[FileLayout, Identity, bytes | None]


def _survey(
    format: Format,
    files: Sequence[Path],
    opening: OpenArguments,
    scan: ScanOptions,
    scans: dict[int, FileScan],
) -> Iterator[FileSurvey]:
    """Yield the survey of each file, and store its scan in `scans` by number."""
    options, hint, inferring = opening
    opening = survey_options(options) if inferring else options, hint, inferring
    ((first, scans[0]),) = _scan_files(format, files, [0], opening, scan)
    yield first
    known = dict(scan.known)
    if hint is None or differences(without(hint, options.file_field), first.schema):
        known = {}
    new = [i for i in range(1, len(files)) if i not in known]
    located, alike = _scan_files(format, files, new, opening, scan), dict[int, FileSurvey]()
    for i in range(1, len(files)):
        if i in known:
            layout, identity, crcs = known[i]
            scans[i] = first.schema, layout, identity, crcs
            if layout.count not in alike:
                alike[layout.count] = replace(first, count=layout.count, notes=(), dropped=0)
            yield alike[layout.count]
        else:
            survey, scans[i] = next(located)
            yield survey


def _scan_files(
    format: Format,
    files: Sequence[Path],
    numbers: Sequence[int],
    opening: OpenArguments,
    scan: ScanOptions,
) -> Iterator[tuple[FileSurvey, FileScan]]:
    """Yield surveys and scans of some files, in their order; several files at a time."""
    look = partial(_scan_task, format.name, opening, scan.checksums)
    if len(numbers) == 1:
        progress = scan.progress if len(files) == 1 else None
        yield from look((0, [str(files[numbers[0]])]), progress)
        return
    step = max(1, min(FILES_PER_TASK, len(numbers) // FILES_PER_TASK))
    tasks = [numbers[at : at + step] for at in range(0, len(numbers), step)]
    named = ((k, [str(files[i]) for i in some]) for k, some in enumerate(tasks))
    threads = scan.workers or min(THREADS, len(os.sched_getaffinity(0)))
    done: dict[int, list[tuple[FileSurvey, FileScan]]] = {}
    at = 0
    executor = scan.executor or (scan.processes if len(numbers) >= PROCESS_FILES else None)
    with nullcontext(executor) if executor else ThreadPoolExecutor(threads) as pool:
        for (k, _), scans in executors.run(pool, look, named):
            done[k] = scans
            if scan.progress is not None and len(files) > 1:
                scan.progress(min((at + len(done)) * step, len(numbers)), len(numbers))
            while at in done and at < len(tasks) - 1:
                yield from done.pop(at)
                at += 1
    # Who takes the last one may take no more: then the workers have ended their tasks.
    for number in range(at, len(tasks)):
        yield from done.pop(number)


def _scan_task(
    format_name: str,
    opening: OpenArguments,
    checksums: bool,
    task: tuple[int, list[str]],
    progress: Progress | None = None,
) -> list[tuple[FileSurvey, FileScan]]:
    """Scan some files, opened once each; equal surveys and layouts are one object."""
    (options, hint, inferring), format = opening, formats.load(format_name)
    scans, alike = list[tuple[FileSurvey, FileScan]](), dict[str, Any]()
    hint = None if hint is None else without(hint, options.file_field)
    for path in map(as_path, task[1]):
        with opened_once(path):
            identity = Identity.of(path, format.facts(path))
            with (
                unchanged(((path, identity),)),
                open_alone(format, path, options, hint, inferring) as source,
            ):
                if hint is not None:
                    source.check_types()
                layout, crcs, survey = None, None, FileSurvey.of(source)
                try:
                    layout = _fit_layout(source, progress)
                except DsprepError:
                    if not inferring:
                        raise
                if checksums and layout is not None:
                    crcs = _checksum_file(path, layout, source.schema)
        schema, layout = _nameless(survey.schema, layout)
        own, words = _text_of(schema), {**vars(survey), "schema": _text_of(survey.schema)}
        where = None if layout is None else as_json.to_json(layout, schema, _Digests())
        survey = alike.setdefault(repr(words), survey)
        schema, layout = alike.setdefault(repr((own, where)), (schema, layout))
        scans.append((survey, (schema, layout, identity, crcs)))
    return scans


class _Digests(Tables):
    """Digests of tables, to compare layouts without packing them."""

    def put(self, plain: bytes) -> Any:
        """Return a digest of a table."""
        return digest(plain)


def _text_of(schema: Schema) -> str:
    return repr((schema.to_json(), attributes_text(schema), schema.static))


def _nameless(schema: Schema, layout: FileLayout | None) -> tuple[Schema, FileLayout | None]:
    """Return schema and layout with an only field renamed to `ANY`, as files may name it."""
    if layout is None or [*layout.columns] != [*schema.names] or len(schema) != 1:
        return schema, layout
    ((name, column),) = layout.columns.items()
    field = replace(schema[name], name=ANY)
    return schema.replace(field), replace(layout, columns={ANY: column})


def _fit_layout(source: Source, progress: Progress | None = None) -> FileLayout:
    """Return the layout of one file, by the smallest laws."""
    if not len(source):
        return FileLayout(0, None, {name: Column(None) for name in source.schema.names})
    return fit.fit(source.extents(progress))


def _is_final(file_scan: FileScan, fields: Schema) -> bool:
    """Return whether a file was scanned with the fields of all files."""
    schema, layout, *_ = file_scan
    if schema.names == (ANY,) and len(fields) == 1:
        fields = fields.replace(replace(fields.fields[0], name=ANY))
    return layout is not None and (not layout.count or not differences(fields, schema))


def _named(layout: FileLayout, fields: Schema) -> FileLayout:
    """Return the layout of a file with the field names of the dataset."""
    if not layout.count:
        return FileLayout(0, None, {name: Column(None) for name in fields.names})
    if [*layout.columns] == [ANY]:
        return replace(layout, columns={fields.names[0]: layout.columns[ANY]})
    return layout


# --- checksums -------------------------------------------------------------------------------

CRC_BLOCK = 16 << 20


def _checksum_file(path: Path, layout: FileLayout, schema: Schema) -> bytes:
    """Return checksums of a file; raise `FormatError` if its own ones show that it is damaged."""
    members = stored_members(path)
    records = layout.records
    reader = None if records is None else RecordReader(records, schema, formats.decoders)
    if members is not None:
        file = open_file(path)
        for member in members:
            member.check(file)
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
