"""Writing sidecars: a look at the real structure, the smallest laws that give exactly it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep import __version__, executors, formats
from dsprep.core.marks import Mark, unchanged
from dsprep.core.packing import Tables, digest
from dsprep.core.schema import Schema
from dsprep.errors import DsprepError, FormatError, TargetError, UnsupportedError, UsageError
from dsprep.formats.base import Format, OpenOptions, Source, check_options
from dsprep.layout import as_json, fit
from dsprep.layout.model import Column, FileLayout, Groups
from dsprep.reading.files import KEPT, File
from dsprep.reading.proofs import rest_of
from dsprep.reading.records import RecordReader
from dsprep.sidecar import identity, spec
from dsprep.sidecar.sidecar import MissingError, Sidecar, changes, stale
from dsprep.sidecar.spec import Content, FileEntry, Identity
from dsprep.source.files import find_dataset, find_files
from dsprep.source.many import MultiSource, Opening, marks_of, open_native

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
        return len(spec.dump(self.content).encode()) + len(self.companion)

    def save(self, *, durable: bool = True) -> None:
        """Write it; what was there is replaced at once.

        Raises
        ------
        ReadOnlyError
            If this process may not write there.
        """
        try:
            spec.write(self.content, self.path, self.companion, durable=durable)
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


def provenance(
    paths: str | Path | Sequence[str | Path],
    options: OpenOptions | None = None,
    *,
    out: str | Path | None = None,
    law: str | None = None,
    checksums: bool = False,
    write: bool = True,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Made:
    """Write the sidecar of a dataset, whoever made it.

    Parameters
    ----------
    paths
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    options
        How to tell the samples, recorded in the sidecar; if left out, as an older sidecar says.
    out
        Where to write it, if not beside the dataset.
    law
        The law that offsets must have; the smallest exact one if None.
    checksums
        Read all data once and keep the CRC-32C of every 16 MiB.
    write
        False: only make it.
    progress
        Called with (done, in all) where it takes long.
    executor
        Who looks at the files, if there are several; None: threads of this process.

    Raises
    ------
    UnsupportedError
        If the samples have no offsets, as in a TFRecord file that is one gzip stream.
    UsageError
        If `law` does not hold exactly, or the files have no directory in common.
    DsprepError, OSError
        If the data are damaged or gone.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    format, found, notes = find_dataset(paths)
    names = [path.absolute() for path in found]
    options = options or OpenOptions()
    check_options(options, format.open_options, format.name)
    dataset = dataset_of(names)
    path = Path(out) if out is not None else spec.sidecar_path(dataset)
    _check_replaceable(path, names)
    as_before = options.meaning == OpenOptions()
    old = _old(names, format, needed=as_before and not format.keeps_types)
    hint = None
    if old is not None and as_before:
        options, hint = OpenOptions.from_json(old.reading), old.schema
    with _open(format, names, options, hint, notes) as source:
        subject = Subject(format, names, dataset, path, source.schema, _lineage(old), options)
        made = make(source, subject, Looks(law, checksums, progress, executor))
    if old is not None:
        made = replace(made, content=_with_groups(_with_unknown(made.content, old), old, dataset))
    _check_located(made)
    if write:
        made.save()
    return made


@dataclass(frozen=True)
class Refreshed:
    """A sidecar whose record of the files was renewed.

    Attributes
    ----------
    path
        The sidecar.
    files
        Of the dataset.
    renewed
        How many of them had another time stamp or inode.
    sums
        Whether all of those have checksums, which were compared.
    """

    path: Path
    files: int
    renewed: int
    sums: bool


def refresh(
    paths: str | Path | Sequence[str | Path], *, out: str | Path | None = None
) -> Refreshed:
    """Record the present time stamps and inodes of a dataset in its sidecar.

    Sizes, the format's own marks and sampled blocks must be as they were, and so must be every
    checksum that the sidecar has of the files concerned, its own or those of groups: these are
    read whole.

    Parameters
    ----------
    paths
        The dataset, as `provenance` takes it.
    out
        The sidecar, if it does not lie beside the dataset.

    Raises
    ------
    MissingError, UsageError
        If there is no sidecar.
    StaleError
        If the data changed.
    DsprepError, OSError
        If the sidecar is damaged, or data cannot be read.
    """
    named = [paths] if isinstance(paths, str | Path) else paths
    names = [p.absolute() for p, _ in find_files(named)[0]]
    if out is not None:
        dataset, path = dataset_of(names), Path(out)
    elif (there := spec.find_path(names)) is not None:
        dataset, path = there
    else:
        raise MissingError(spec.sidecar_path(dataset_of(names)), dataset_of(names))
    content = spec.read(path)
    marks = [Mark.of(dataset / f.path) for f in content.files]
    with unchanged(marks):
        other = [
            i
            for i, (mark, f) in enumerate(zip(marks, content.files, strict=True))
            if (mark.status[0], mark.status[2]) != (f.identity.inode, f.identity.mtime_ns)
        ]
        changed = changes(content, dataset, path=path)
        companion, sums = b"", False
        if content.layouts:
            with Sidecar(content, dataset, path) as opened:
                companion = opened.companion() or b""
                changed = changed or list(opened.wrong_sums(other))
                sums = all(opened.has_sums(i) for i in other)
        if changed:
            raise stale(changed[0], path, dataset)
        files = list(content.files)
        for i in other:
            who = identity.take(dataset / files[i].path, content.format)
            files[i] = replace(files[i], identity=who)
    if other:
        spec.write(replace(content, files=tuple(files)), path, companion)
    return Refreshed(path, len(files), len(other), sums)


def _check_replaceable(path: Path, files: Sequence[Path]) -> None:
    """Raise `UsageError` if a sidecar at `path` would replace something else."""
    if path.absolute() in files or path.is_dir():
        raise UsageError("this is no place for a sidecar: there are data", where=path)
    if not path.is_file() or path.name.endswith(spec.SUFFIX):
        return
    try:
        spec.read(path)
    except FormatError as error:
        raise UsageError(
            "this is no place for a sidecar: there is another file", where=path
        ) from error


def _check_located(made: Made) -> None:
    """Raise `UnsupportedError` if no field of any file has places."""
    layouts, names = made.content.layouts, made.content.schema.names
    if not names or any(len(layout.get("unlocated", ())) < len(names) for layout in layouts):
        return
    for layout in layouts:
        name, reason = next(iter(layout["unlocated"].items()))
        raise UnsupportedError(
            f"no field has places, {name} since {reason.partition(';')[0]}",
            where=made.dataset,
            fix=f"dsprep convert {made.dataset} DST writes them so that they do",
        )


def describe(
    format: Format,
    schema: Schema,
    files: Sequence[tuple[Path, int]],
    dataset: Path,
    lineage: Mapping[str, Any],
    groups: Sequence[Groups] = (),
    executor: Executor | None = None,
) -> Made:
    """Return the sidecar of a dataset that has just been written.

    Where samples have no offsets it says nothing of their places.

    Parameters
    ----------
    files
        Path and samples of each file.
    groups
        The groups of each file, if it was written in groups.
    executor
        Who looks at the files, if there are several; None: threads of this process.
    """
    paths, path = [p for p, _ in files], spec.sidecar_path(dataset)
    marks = tuple(replace(Mark.of(p.absolute()), locked=True) for p in paths)
    try:
        with open_native(format, paths, OpenOptions(), schema, survey=True, marks=marks) as source:
            subject = Subject(format, paths, dataset, path, schema, lineage, groups=groups)
            made = make(source, subject, Looks(executor=executor))
        return replace(made, content=replace(made.content, notes=()))
    except UnsupportedError:
        entries = tuple(
            FileEntry(os.path.relpath(p, dataset), n, identity.take(p, format.name))
            for p, n in files
        )
        return Made(Content(format.name, schema, entries, lineage), b"", dataset, path)


def dataset_of(files: Sequence[Path]) -> Path:
    """Return what a sidecar of `files` lies beside: the only file, or their common directory."""
    common = Path(os.path.commonpath(files))
    if common == Path(common.anchor):
        raise UsageError(
            "the files have no directory in common that could have a sidecar",
            found=f"{files[0]} and {files[-1]}",
        )
    return common


def _old(files: Sequence[Path], format: Format, *, needed: bool) -> Content | None:
    """Return the sidecar that is there, valid or not: it may know types that the file does not.

    Raises
    ------
    FormatError
        If it is `needed` and cannot be read.
    """
    found = spec.find_path(files)
    if found is None:
        return None
    dataset, path = found
    try:
        content = spec.read(path)
    except FormatError as error:
        if not needed:
            return None
        raise FormatError(
            "the sidecar that is there cannot be read, and it may be all that says what the "
            f"fields are: {error.what}",
            where=path,
            found=error.found,
            fix="bring it back from where the data came from, or name the fields with "
            "--field NAME:DTYPE[SHAPE]; or move it away if the data have no types",
        ) from error
    if content.format != format.name:
        return None
    try:
        return spec.reduced(content, dataset, files, path)
    except FormatError:  # there are more files now, of the same fields
        return content


def _open(
    format: Format,
    files: Sequence[Path],
    options: OpenOptions,
    hint: Schema | None,
    notes: Sequence[str],
) -> Source:
    """Open the files with the types of the old sidecar if they still fit, else without.

    Raises
    ------
    FormatError
        If they do not fit, and the files themselves have none.
    """
    marks = tuple(map(Mark.of, files))
    if hint is not None:
        try:
            with ExitStack() as opened:
                source = open_native(format, files, options, hint, notes, survey=True, marks=marks)
                opened.callback(source.close)
                source.confirm()
                opened.pop_all()
                return source
        except DsprepError as error:
            if not format.keeps_types:
                raise FormatError(
                    f"the fields of the sidecar that is there do not fit the data: {error.what}",
                    where=error.where,
                    expected=error.expected,
                    found=error.found,
                    fix="move the sidecar away if these are other data, or name their fields with "
                    "--field NAME:DTYPE[SHAPE]",
                ) from error
    return open_native(format, files, options, None, notes, survey=True, marks=marks)


def _with_unknown(content: Content, old: Content) -> Content:
    """Return a sidecar with the keys of the one before that this version does not know."""
    kept = {f.path: f.unknown for f in old.files}
    files = tuple(replace(f, unknown=kept.get(f.path, {})) for f in content.files)
    return replace(content, files=files, unknown=old.unknown)


def _with_groups(content: Content, old: Content, dataset: Path) -> Content:
    """Return a sidecar with the groups of the one before, which no file tells by itself.

    Only if all places are still the same; and without their checksums if the data were changed.
    """
    bare = tuple({k: v for k, v in x.items() if k != "groups"} for x in old.layouts)
    if content.companion or old.companion or not bare or len(content.files) != len(old.files):
        return content
    pairs = list(zip(content.files, old.files, strict=True))
    if any(a.path != b.path or content.layouts[a.layout] != bare[b.layout] for a, b in pairs):
        return content
    untouched = not changes(old, dataset)
    layouts = []
    for layout in old.layouts:
        groups = layout.get("groups")
        if isinstance(groups, Mapping) and not untouched:
            groups = {k: v for k, v in groups.items() if k not in ("crc32c", "rest")}
        kept = {k: v for k, v in layout.items() if k != "groups"}
        layouts.append(kept if groups is None else {**kept, "groups": groups})
    files = tuple(replace(a, layout=b.layout) for a, b in pairs)
    return replace(content, files=files, layouts=tuple(layouts))


def _lineage(old: Content | None) -> dict[str, Any]:
    """Return who made this sidecar, and what an older one says about the data."""
    now = made_by("dsprep.provenance")
    if old is None or "source" not in old.lineage:
        return now
    kept = {k: v for k, v in old.lineage.items() if k != "sidecar"}
    return {**kept, "sidecar": now}


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
    groups
        The groups of each file, which no file gives by itself.
    """

    format: Format
    files: Sequence[Path]
    dataset: Path
    path: Path
    schema: Schema
    lineage: Mapping[str, Any]
    options: OpenOptions = field(default_factory=OpenOptions)
    groups: Sequence[Groups] = ()


@dataclass(frozen=True)
class Looks:
    """How files are looked at; the attributes are parameters of `provenance`."""

    law: str | None = None
    checksums: bool = False
    progress: Progress | None = None
    executor: Executor | None = None


def make(source: Source, subject: Subject, looks: Looks) -> Made:
    """Return the sidecar of a dataset that the format's own library has opened."""
    tables = Tables()
    layouts: dict[str, int] = {}
    entries = []
    if looks.executor is not None and isinstance(source, MultiSource):
        found = _look_apart(source, subject, looks, looks.executor)
    else:
        found = _look(source, subject, looks)
    for i, (file, (layout, who, crcs)) in enumerate(zip(subject.files, found, strict=True)):
        if subject.groups and layout.count:
            layout = replace(layout, groups=fit.fit_groups(subject.groups[i]))
            layout = _with_rest(layout, file)
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
        notes=tuple(source.notes),
    )
    return Made(content, companion, subject.dataset, subject.path)


def _with_rest(layout: FileLayout, path: Path) -> FileLayout:
    """Return a layout with the checksums of what lies outside the ranges of its groups."""
    files: dict[str, File] = {}

    def opened(below: str) -> File:
        if below not in files:
            if len(files) >= KEPT:
                files.clear()
            files[below] = File(path / below if below else path)
        return files[below]

    rest = rest_of(layout, opened)
    if rest is None or layout.groups is None:
        return layout
    return replace(layout, groups=fit.fit_groups(replace(layout.groups, rest=rest)))


Looked: TypeAlias = tuple[FileLayout, Identity, bytes | None]


@dataclass(frozen=True)
class _FileTask:
    """One file to be looked at, perhaps by another process.

    Attributes
    ----------
    number
        Its place among all.
    path, format, marks
        The file, its format, and what it was when the dataset was opened.
    opening
        How another process opens it; None: it is open.
    schema
        The fields of the dataset.
    law, checksums
        As in `Looks`.
    """

    number: int
    path: Path
    format: str
    marks: tuple[Mark, ...]
    opening: Opening | None
    schema: Schema
    law: str | None
    checksums: bool


def _looked(
    task: _FileTask,
    opened: Callable[[], AbstractContextManager[Source]],
    progress: Progress | None = None,
) -> Looked:
    """Return layout, identity and checksums of a file."""
    with unchanged(task.marks):
        who = identity.take(task.path, task.format)
        with opened() as source:
            layout = _fitted(source, task.schema, task.law, progress)
        crcs = None
        if task.checksums:
            crcs = _summed(formats.load(task.format), task.path, layout, task.schema)
    return layout, who, crcs


def _fitted(
    source: Source, schema: Schema, law: str | None, progress: Progress | None
) -> FileLayout:
    """Return the layout of one file, by the smallest laws."""
    if not len(source):
        return FileLayout(0, None, {name: Column(None) for name in schema.names})
    return fit.fit(source.extents(progress), law)


def _task(
    source: Source, subject: Subject, looks: Looks, i: int, opening: Opening | None = None
) -> _FileTask:
    return _FileTask(
        i,
        subject.files[i],
        subject.format.name,
        marks_of(source)[i : i + 1],
        opening,
        source.schema,
        looks.law,
        looks.checksums,
    )


def _look(source: Source, subject: Subject, looks: Looks) -> list[Looked]:
    """Return layout, identity and checksums of every file, several files at a time."""
    files = len(subject.files)
    done = 0

    def one(i: int) -> Looked:
        nonlocal done
        found = _looked(
            _task(source, subject, looks, i),
            lambda: source.file(i) if isinstance(source, MultiSource) else nullcontext(source),
            looks.progress if files == 1 else None,
        )
        done += 1
        if looks.progress is not None and files > 1:
            looks.progress(done, files)
        return found

    if files == 1:
        return [one(0)]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(one, range(files)))


def _look_apart(
    source: MultiSource, subject: Subject, looks: Looks, executor: Executor
) -> list[Looked]:
    """Return the same as `_look`, from other processes."""
    marks_of(source)
    openings = source.openings()
    tasks = (_task(source, subject, looks, i, opening) for i, opening in enumerate(openings))
    found: dict[int, Looked] = {}
    for task, looked in executors.run(executor, _look_at, tasks, count=len(subject.files)):
        found[task.number] = looked
        if looks.progress is not None:
            looks.progress(len(found), len(subject.files))
    return [found[i] for i in range(len(subject.files))]


def _look_at(task: _FileTask) -> Looked:
    """Look at a file that this process has to open."""
    opening, format = task.opening, formats.load(task.format)
    assert opening is not None  # of every task that travels
    (path,) = opening.paths
    return _looked(
        replace(task, path=path),
        lambda: open_native(format, [path], opening.options, opening.hint, survey=True),
    )


# --- checksums -------------------------------------------------------------------------------

CRC_BLOCK = 16 << 20


def _summed(format: Format, path: Path, layout: FileLayout, schema: Schema) -> bytes:
    """Return the checksums of a file, which agrees with those that it keeps itself.

    Raises
    ------
    FormatError
        If it does not: new checksums would make damaged data look sound.
    """
    members = format.identity(path).members()
    records = layout.records
    reader = None if records is None else RecordReader(records, schema, formats.decoders)
    if members is not None:
        file = File(path)
        for i in range(len(members.offsets)):
            members.check(file.fd, i, path)
    elif reader is not None and reader.has_crcs:
        below = reader.records.blocks.path
        reader.prove(File(path / below if below else path), np.arange(layout.count))
    return checksums_of(path)


def checksums_of(path: Path, block: int = CRC_BLOCK) -> bytes:
    """Return the CRC-32C of each `block` bytes of a file, or of a directory's data files.

    Those of a directory are taken one behind another, in the order of their paths.
    """
    import google_crc32c

    from dsprep.core.packing import to_planes
    from dsprep.core.storage import data_files

    crcs: list[int] = []
    crc = filled = 0
    for file in sorted(data_files(path)):
        with file.open("rb", buffering=0) as opened:
            while data := opened.read(min(CRC_BLOCK, block - filled)):
                crc = int(google_crc32c.extend(crc, data))
                filled += len(data)
                if filled == block:
                    crcs.append(crc)
                    crc = filled = 0
    if filled:
        crcs.append(crc)
    return to_planes(np.array(crcs, np.int64))
