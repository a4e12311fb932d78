"""The sidecar of a dataset, regardless of what wrote it: made, or made again."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsprep import __version__, formats
from dsprep.core.packing import to_planes
from dsprep.core.schema import Ints, Schema
from dsprep.errors import ChangedError, DsprepError, FormatError, UnsupportedError, UsageError
from dsprep.formats.base import Format
from dsprep.formats.options import OpenOptions, check_options
from dsprep.reader.options import at_least
from dsprep.sidecar import spec
from dsprep.sidecar.entries import MANY, FileEntry, numbers
from dsprep.sidecar.sidecar import Sidecar, changes
from dsprep.sidecar.spec import Content
from dsprep.source.dataset import FoundSidecar
from dsprep.source.files import find_dataset, names_of
from dsprep.source.joined import refuse_join
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.identity import Identity
from dsprep.storage.paths import StorePath, all_absolute, as_path
from dsprep.writing.create_sidecar import (
    CRC_BLOCK,
    LocatedFile,
    NewSidecar,
    Progress,
    ScanOptions,
    check_located,
    dataset_of,
    made_by,
    make_sidecar,
)


def provenance(
    paths: str | Path | Sequence[str | Path],
    options: OpenOptions | None = None,
    *,
    out: str | Path | None = None,
    checksums: bool = False,
    write: bool = True,
    progress: Progress | None = None,
    executor: Executor | None = None,
    processes: Executor | None = None,
    workers: int | None = None,
) -> NewSidecar:
    """Write the sidecar of a dataset, regardless of what wrote the dataset.

    Parameters
    ----------
    paths
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    options
        How the dataset is read, recorded in the sidecar; if left out, as an older sidecar states.
    out
        Where to write it, if not beside the dataset.
    checksums
        Read all data once and keep the CRC-32C of every 16 MiB.
    write
        False: only make it.
    progress
        Called with (done, in all) where it takes long.
    executor
        Examines the files, if there are several; None: threads of this process.
    processes
        Used in place of threads where there are thousands of files.
    workers
        How many threads; by default one per core, at most 8.

    Returns
    -------
    NewSidecar
        The sidecar: its `path`, `content`, `nbytes`, and `companion` with the bulk tables.

    Raises
    ------
    UnsupportedError
        If the samples have no offsets, as in a TFRecord file that is one gzip stream.
    UsageError
        If the files have no directory in common.
    DsprepError, OSError
        If the data are damaged or gone.
    """
    options = options or OpenOptions()
    refuse_join(options.join, "provenance")
    format, files, notes = find_dataset(names_of("paths", paths))
    names = all_absolute(files)
    refuse_partial(written_as(names))
    check_options(options, format.open_options, format.name)
    dataset = dataset_of(names)
    path = as_path(out) if out is not None else spec.sidecar_path(dataset)
    _check_replaceable(path, names)
    as_before = options.meaning == OpenOptions()
    old = _old(names, format, needed=as_before and not format.keeps_types)
    if workers is not None:
        at_least("workers", workers, 1)
    hint, scan = None, ScanOptions(checksums, progress, executor, processes, workers)
    before = None if old is None else old[0]
    if before is not None and as_before:
        options, hint = OpenOptions.from_json(before.reading), before.schema
    made = None if old is None else _taken_over(old, names, options, scan)
    if isinstance(made, NewSidecar):
        made = replace(made, content=replace(made.content, lineage=_lineage(before)))
    else:
        if made and before is not None:
            scan, hint = replace(scan, known=made), before.schema
        made = _make(format, names, (options, hint, notes), scan, _lineage(before))
    made = replace(made, path=path)
    check_located(made)
    if write:
        made.save()
    return made


def _check_replaceable(path: Path, files: Sequence[Path]) -> None:
    """Raise `UsageError` if a sidecar at `path` would replace something else."""
    if path.absolute() in files or (path.exists() and not path.is_file()):
        raise UsageError("a sidecar cannot be written here: this is data or a device", where=path)
    if not path.is_file() or path.name.endswith(spec.SUFFIX):
        return
    try:
        spec.read(path)
    except FormatError as error:
        raise UsageError(
            "a sidecar cannot be written here: this is another file", where=path
        ) from error


def _old(files: Sequence[Path], format: Format, *, needed: bool) -> FoundSidecar | None:
    """Return the sidecar that is there, valid or not: it may know types that the file does not."""
    existing = spec.find_path(files)
    if existing is None:
        return None
    dataset, path = existing
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
    with suppress(FormatError):  # there are more files now, of the same fields
        content = spec.reduced(content, dataset, files, path)
    return content, dataset, path


def _make(
    format: Format,
    files: Sequence[Path],
    how: tuple[OpenOptions, Schema | None, Sequence[str]],
    scan: ScanOptions,
    lineage: Mapping[str, Any],
) -> NewSidecar:
    """Look at files with the types of the old sidecar if they still fit, else without."""
    options, hint, notes = how
    if hint is not None:
        try:
            return make_sidecar(format, files, options, hint, notes, scan, lineage)
        except (ChangedError, UnsupportedError, UsageError):
            raise
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
    return make_sidecar(format, files, options, None, notes, replace(scan, known={}), lineage)


def _taken_over(
    old: FoundSidecar, files: Sequence[Path], options: OpenOptions, scan: ScanOptions
) -> NewSidecar | dict[int, LocatedFile] | None:
    """Return what an old sidecar states of files that are as they were, or of all of them."""
    # Of few files without groups, which no file states by itself, none are taken over, nor where
    # something else is asked for than what it has.
    content, dataset, path = old
    other = scan.checksums or options.to_json() != dict(content.reading)
    if other or not content.layouts or dataset != dataset_of(files):
        return None
    try:
        with Sidecar(content, dataset, path) as opened:
            if any(layout.groups is not None for layout, _ in opened.layouts()):
                return _renewed(opened, files)
            stated = [content.lineage, content.lineage.get("sidecar")]
            versions = [each.get("version") for each in stated if isinstance(each, Mapping)]
            if len(files) < MANY or __version__ not in versions or isinstance(dataset, StorePath):
                return None
            rows = _unchanged(content, dataset, files)
            if np.array_equal(rows, np.arange(len(content.files))):
                return NewSidecar(content, opened.companion() or b"", dataset, path)
            kept = np.flatnonzero(rows >= 0).tolist() if not content.notes else []
            return {i: _row(opened, int(rows[i])) for i in kept}
    except FormatError:
        return None


def _renewed(opened: Sidecar, files: Sequence[Path]) -> NewSidecar | None:
    """Return a sidecar with the present time stamps and ETags of files that are as they were."""
    content, dataset = opened.content, opened.dataset
    # Objects that were uploaded again have other ETags, and perhaps the same content.
    bare = [replace(f, identity=replace(f.identity, etag="")) for f in content.files]
    listed = [dataset / path for path in content.paths()]
    if listed != [*files] or changes(replace(content, files=bare), dataset):
        return None
    entries, facts = list[FileEntry](), formats.load(content.format).facts
    for i, (entry, file) in enumerate(zip(content.files, files, strict=True)):
        now, before = Identity.of(file, facts(file)), entry.identity
        if before.etag not in ("", now.etag) and any(opened.proofs.bad_groups(i)):
            return None
        now = replace(now, sampled=before.sampled or now.sampled)  # saved states name it
        entries.append(replace(entry, identity=now))
    made = replace(content, files=tuple(entries))
    return NewSidecar(made, opened.companion() or b"", dataset, opened.path)


def _unchanged(content: Content, dataset: Path, files: Sequence[Path]) -> Ints:
    """Return the entry of each file in a sidecar, by size and time stamp; else -1: int64."""
    rows = np.full(len(files), -1)
    sizes, times, counts = (
        numbers(content.files, key).tolist() for key in ("nbytes", "mtime_ns", "files")
    )
    at = {f"{dataset}/{path}": row for row, path in enumerate(content.paths())}
    for i, file in enumerate(files):
        row, now = at.get(str(file), -1), file.stat()
        if row >= 0 and counts[row] == 1 and stat.S_ISREG(now.st_mode):
            same = (now.st_size, now.st_mtime_ns) == (sizes[row], times[row])
            rows[i] = row if same else -1
    return rows


def _row(opened: Sidecar, number: int) -> LocatedFile:
    """Return layout, identity and checksums of a file from a sidecar."""
    entry, sums = opened.content.files[number], opened.proofs.block_sums(number)
    crcs = None if sums is None or sums[0] != CRC_BLOCK else to_planes(sums[1])
    return opened.layout(number), entry.identity, crcs


def _lineage(old: Content | None) -> dict[str, Any]:
    """Return the lineage: this command, and facts on the data from an older sidecar."""
    now = made_by("dsprep.provenance")
    if old is None or "source" not in old.lineage:
        return now
    kept = {k: v for k, v in old.lineage.items() if k != "sidecar"}
    return {**kept, "sidecar": now}
