"""The sidecar of a dataset, regardless of what wrote it: made, made again, or refreshed."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep import __version__, formats
from dsprep.core.packing import to_planes
from dsprep.core.schema import Ints, Schema
from dsprep.errors import ChangedError, DsprepError, FormatError, UnsupportedError, UsageError
from dsprep.formats.base import Format
from dsprep.formats.options import OpenOptions, check_options
from dsprep.sidecar import spec
from dsprep.sidecar.entries import MANY, numbers
from dsprep.sidecar.sidecar import MissingError, Sidecar, changes, stale
from dsprep.sidecar.spec import Content
from dsprep.source.files import find_dataset, find_files, names_of
from dsprep.source.joined import refuse_join
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.identity import Identity, identities_of, unchanged
from dsprep.storage.paths import StorePath, all_absolute, as_path
from dsprep.writing.create_sidecar import (
    CRC_BLOCK,
    Looked,
    Looks,
    Made,
    Progress,
    check_located,
    dataset_of,
    made_by,
    make,
)

Known: TypeAlias = tuple[Content, Path, Path]
"""A sidecar, what it is of, and where it lies."""


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
    workers: int | None = None,
) -> Made:
    """Write the sidecar of a dataset, regardless of what wrote the dataset.

    Parameters
    ----------
    paths
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    options
        How the dataset is read, recorded in the sidecar; if left out, as an older sidecar states.
    out
        Where to write it, if not beside the dataset.
    law
        The law that offsets must follow; the smallest exact one if None.
    checksums
        Read all data once and keep the CRC-32C of every 16 MiB.
    write
        False: only make it.
    progress
        Called with (done, in all) where it takes long.
    executor
        Examines the files, if there are several; None: threads of this process.
    workers
        How many threads; by default one per core, at most 8.

    Returns
    -------
    Made
        The sidecar: its `path`, `content`, `nbytes`, and `companion` with the bulk tables.

    Raises
    ------
    UnsupportedError
        If the samples have no offsets, as in a TFRecord file that is one gzip stream.
    UsageError
        If `law` does not hold exactly, or the files have no directory in common.
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
    hint, looks = None, Looks(law, checksums, progress, executor, workers)
    before = None if old is None else old[0]
    if before is not None and as_before:
        options, hint = OpenOptions.from_json(before.reading), before.schema
    made = None if old is None else _taken_over(old, names, options, looks)
    if isinstance(made, Made):
        made = replace(made, content=replace(made.content, lineage=_lineage(before)))
    else:
        if made and before is not None:
            looks, hint = replace(looks, known=made), before.schema
        made = _make(format, names, (options, hint, notes), looks, _lineage(before))
        if before is not None:
            content = _with_unknown(made.content, before)
            made = replace(made, content=_with_groups(content, before, dataset))
    made = replace(made, path=path)
    check_located(made)
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
        How many of them had another time stamp.
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
    """Record the present time stamps of a dataset in its sidecar.

    Sizes and sampled blocks must be as they were, and so must be every
    checksum that the sidecar has of the files concerned, its own or those of groups: these are
    read whole.

    Parameters
    ----------
    paths
        The dataset, as `provenance` takes it.
    out
        The sidecar, if it is not beside the dataset.

    Raises
    ------
    MissingError, UsageError
        If there is no sidecar.
    StaleError
        If the data changed.
    DsprepError, OSError
        If the sidecar is damaged, or data cannot be read.
    """
    named = names_of("paths", paths)
    names = [p.absolute() for p, _ in find_files(named)[0]]
    if out is not None:
        dataset, path = dataset_of(names), as_path(out)
    elif (there := spec.find_path(names)) is not None:
        dataset, path = there
    else:
        raise MissingError(spec.sidecar_path(dataset_of(names)), dataset_of(names))
    content = spec.read(path)
    known = identities_of(dataset / f.path for f in content.files)
    with unchanged(known):
        pairs = enumerate(zip(known, content.files, strict=True))
        other = [
            i
            for i, ((_, now), f) in pairs
            if (now.mtime_ns, now.etag) != (f.identity.mtime_ns, f.identity.etag)
        ]
        # Objects that were uploaded again have other ETags, and perhaps the same content.
        bare = tuple(replace(f, identity=replace(f.identity, etag="")) for f in content.files)
        unnamed = replace(content, files=bare)
        changed = changes(unnamed, dataset)
        companion, sums = b"", False
        if content.layouts:
            with Sidecar(unnamed, dataset, path) as opened:
                companion = opened.companion() or b""
                for i in other if not changed else ():
                    try:
                        opened.proofs.check_file(i)
                    except FormatError as error:
                        raise stale(str(error), path, dataset) from error
                sums = all(opened.has_sums(i) for i in other)
        if changed:
            raise stale(changed[0], path, dataset)
        files = list(content.files)
        for i in other:
            file, _ = known[i]
            recorded = Identity.of(file, formats.load(content.format).facts(file))
            if sampled := files[i].identity.sampled:  # it was compared, and saved states name it
                recorded = replace(recorded, sampled=sampled)
            files[i] = replace(files[i], identity=recorded)
    if other:
        spec.write(replace(content, files=tuple(files)), path, companion)
    return Refreshed(path, len(files), len(other), sums)


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


def _old(files: Sequence[Path], format: Format, *, needed: bool) -> Known | None:
    """Return the sidecar that is there, valid or not: it may know types that the file does not.

    Raises
    ------
    FormatError
        If it is `needed` and cannot be read.
    """
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
    looks: Looks,
    lineage: Mapping[str, Any],
) -> Made:
    """Look at files with the types of the old sidecar if they still fit, else without.

    Raises
    ------
    FormatError
        If they do not fit, and the files themselves have none.
    """
    options, hint, notes = how
    if hint is not None:
        try:
            return make(format, files, options, hint, notes, looks, lineage)
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
    return make(format, files, options, None, notes, replace(looks, known={}), lineage)


def _taken_over(
    old: Known, files: Sequence[Path], options: OpenOptions, looks: Looks
) -> Made | dict[int, Looked] | None:
    """Return what an old sidecar states of files that are as they were, or of all of them.

    Of few files none are taken over, nor where something else is asked for than what it has.
    """
    content, dataset, path = old
    stated = [content.lineage, content.lineage.get("sidecar")]
    versions = [each.get("version") for each in stated if isinstance(each, Mapping)]
    other = looks.law or looks.checksums or options.to_json() != dict(content.reading)
    if other or len(files) < MANY or __version__ not in versions or not content.layouts:
        return None
    if dataset != dataset_of(files) or any(isinstance(file, StorePath) for file in files):
        return None
    rows = _unchanged(content, dataset, files)
    try:
        with Sidecar(content, dataset, path) as opened:
            for _ in opened.layouts():  # which are not damaged
                pass
            if np.array_equal(rows, np.arange(len(content.files))):
                return Made(content, opened.companion() or b"", dataset, path)
            kept = np.flatnonzero(rows >= 0).tolist() if not content.notes else []
            return {i: _row(opened, int(rows[i])) for i in kept}
    except FormatError:
        return None


def _unchanged(content: Content, dataset: Path, files: Sequence[Path]) -> Ints:
    """Return which row of a sidecar each file has, if it has the size and time stamp; else -1."""
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


def _row(opened: Sidecar, number: int) -> Looked:
    """Return what a sidecar states of a file."""
    entry, sums = opened.content.files[number], opened.proofs.block_sums(number)
    crcs = None if sums is None or sums[0] != CRC_BLOCK else to_planes(sums[1])
    return opened.layout(number), entry.identity, crcs


def _with_unknown(content: Content, old: Content) -> Content:
    """Return a sidecar with the keys of the one before that this version does not know."""
    kept = {f.path: f.unknown for f in old.files if f.unknown}
    files = content.files
    if kept:
        files = tuple(replace(f, unknown=kept.get(f.path, {})) for f in files)
    return replace(content, files=files, unknown=old.unknown)


def _with_groups(content: Content, old: Content, dataset: Path) -> Content:
    """Return a sidecar with the groups of the one before, which no file states by itself.

    Only if all extents are still the same; and without their checksums if the data were changed.
    """
    bare = tuple({k: v for k, v in x.items() if k != "groups"} for x in old.layouts)
    if not any("groups" in x for x in old.layouts) or len(content.files) != len(old.files):
        return content
    if content.companion or old.companion:
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
