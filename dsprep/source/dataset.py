"""Opening a dataset: from paths to one source of samples ``0 .. N``.

A dataset is a file, a directory, a quoted glob, several of these, or ``@list.txt`` with one path
per line. Several files are read as one, in natural order (``part2`` before ``part10``). It is read
through its sidecar if there is one, else by parsing the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Field, FieldSpec, with_others
from dsprep.errors import DsprepError, UsageError
from dsprep.formats.base import Format, Source
from dsprep.formats.fields import MissingField, wanted
from dsprep.formats.options import (
    COMMON_OPTIONS,
    DATASET_OPTIONS,
    UNRECORDED,
    OpenOptions,
    check_options,
)
from dsprep.sidecar import sidecar, spec
from dsprep.source.files import find_dataset, find_files, names_of
from dsprep.source.from_sidecar import SidecarSource
from dsprep.source.joined import (
    KEY,
    JoinedSource,
    assign_fields,
    check_keys,
    check_lengths,
)
from dsprep.source.many import Dataset, without
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.identity import identities_of
from dsprep.storage.paths import all_absolute, as_path

Progress: TypeAlias = Callable[[int, int], None]
Through: TypeAlias = Literal["sidecar", "library", "strict"]


MANY_FILES, INSPECTED_FILES = 1000, 64
"""Files from which on a sample of the files is inspected, and the size of that sample."""


def check_opened(*sources: Any) -> None:
    """Raise `UsageError` unless these are datasets that were opened."""
    for each in sources:
        if not isinstance(each, Source):
            raise UsageError(
                f"{each!r:.100} is not an opened dataset", fix="open it with dsprep.open"
            )


def open_dataset(
    paths: str | Path | Sequence[str | Path],
    options: OpenOptions | None = None,
    progress: Progress | None = None,
    *,
    through: Through = "sidecar",
    at: str | Path | None = None,
    marked: bool = False,
    inspected: int | None = None,
) -> Source:
    """Open one or several files as one dataset.

    Parameters
    ----------
    paths
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    options
        Options on reading; if left out, those of the sidecar.
    progress
        Called with (files opened, files in all) where there are many.
    through
        ``"sidecar"``: read through the sidecar if there is one and it has what is asked for, else
        by parsing the files; ``"library"``: always so; ``"strict"``: only through the sidecar.
    at
        The sidecar, if it is not beside the dataset.
    marked
        Look at every file before it is read, for `Source.identities`; a sidecar has done so.
    inspected
        Number of first files to open, with `INSPECTED_FILES` spread over all, of more than
        `MANY_FILES` without a sidecar; None: all. `Source.unopened` counts the others.

    Returns
    -------
    Source
        ``len(source)``, ``source.schema``, ``source[i]``, ``source[i:j]`` and iteration give the
        samples; to be closed by `close` or by leaving a ``with`` block.

    Raises
    ------
    DsprepError, OSError
        If something is missing, damaged, of mixed formats, or the files disagree about fields.
    StaleError
        If the data changed since the sidecar was written, unless `through` is ``"library"``.
    """
    named = names_of("paths", paths)
    at = None if at is None else as_path(at)
    try:
        source = _open(named, options, progress, through, at, marked, inspected)
        if options is not None and any(s.dtype is not None for s in options.fields):
            with ExitStack() as opened:  # is closed if the bytes are not of the types given
                opened.enter_context(source).read(0, min(1, len(source)))
                opened.pop_all()
    except MissingField as error:
        fields = tuple(s.settled(error.names) for s in options.fields) if options else ()
        if options is None or fields == options.fields:
            raise
        again = partial(open_dataset, paths, replace(options, fields=fields), progress)
        return again(through=through, at=at, marked=marked, inspected=inspected)
    return source


def _open(
    named: Sequence[str | Path],
    options: OpenOptions | None,
    progress: Progress | None,
    through: Through,
    at: Path | None,
    marked: bool,
    inspected: int | None,
) -> Source:
    """Open files as one dataset; see `open_dataset`."""
    if options is not None and options.join:
        if at is not None:
            raise UsageError("--sidecar does not go together with --join")
        return _open_joined(named, options, progress, through, marked)
    format, names, notes = find_dataset(named)
    if options is not None:
        check_options(options, format.open_options, format.name)
    known: FoundSidecar | None = None
    absolute = all_absolute(names)
    try:
        directory = as_path(named[0]).absolute() if len(named) == 1 else None
        known = find_sidecar(absolute, at, directory)
    except DsprepError as error:
        if through != "library":
            raise
        notes.append(f"sidecar ignored: {error}")
    if known is None:
        refuse_partial(written_as(names))
    options, source = _choose_options(options, known), None
    if known is not None and through != "library":
        source = _make_source(known, options, format)
    if source is None and through == "strict":
        problem, fix = "there is no sidecar", "write one with dsprep provenance"
        if known is not None:
            problem = "what is asked for cannot be read through the sidecar"
            fix = "write it again with these options: dsprep provenance, or leave them out"
        raise UsageError(problem, where=names[0] if known is None else known[2], fix=fix)
    if source is None:
        # Fields that options renamed, left out or took apart are not those of the files.
        hint = None if known is None or known[0].reading else known[0].schema
        marks = identities_of(names) if marked else ()
        some = names
        if inspected is not None and len(names) > MANY_FILES:  # some of the first ones, and of all
            spread = np.linspace(0, len(names) - 1, INSPECTED_FILES).astype(int).tolist()
            some = [names[i] for i in sorted({*range(min(inspected, len(names))), *spread})]
        native = Dataset(format, some, options, hint, notes, progress)
        native.unopened, native.named = len(names) - len(some), tuple(map(str, named))
        native.file_identities = marks
        return native
    beside = None if at is None else at.absolute()
    source.format, source.options, source.named = format.name, options, tuple(map(str, named))
    source.opening = partial(open_dataset, absolute, options, through="strict", at=beside)
    source.notes = (*notes, *source.notes)
    return source


def _open_joined(
    named: Sequence[str | Path],
    options: OpenOptions,
    progress: Progress | None,
    through: Through,
    marked: bool,
) -> JoinedSource:
    """Return several datasets as one with the fields of all: see `OpenOptions.join`."""
    if options.file_field is not None:
        raise UsageError("--file-field does not go together with --join")
    datasets = [*named]
    if len(datasets) == 1:
        datasets = [path for path, _ in find_files(named)[0]]
    if len(datasets) < 2:
        raise UsageError(
            "--join needs more than one dataset", expected="two paths or more", found=named[0]
        )
    formats = [find_dataset([path])[0] for path in datasets]
    every: frozenset[str] = frozenset().union(*(f.open_options for f in formats))
    check_options(
        options, every | DATASET_OPTIONS, " and ".join(dict.fromkeys(f.name for f in formats))
    )

    def opened(number: int, fields: tuple[FieldSpec, ...]) -> Source:
        known = formats[number].open_options | COMMON_OPTIONS
        own = {name: getattr(options, name) for name in known}
        reading = OpenOptions(**{**own, "fields": fields})
        return open_dataset(datasets[number], reading, progress, through=through, marked=marked)

    def opened_keys(number: int) -> Source | None:
        name, how = formats[number].key or KEY, parts[number].options
        keys_as, fields = None if formats[number].key else KEY, (FieldSpec(name, name),)
        reading = replace(how, fields=fields, keys_as=keys_as, file_field=None)
        with suppress(MissingField, UsageError):  # keys that only count, and no groups of HDF5
            return open_dataset(datasets[number], reading, progress, through="library")
        return None

    with ExitStack() as stack:
        parts = [stack.enter_context(opened(i, ())) for i in range(len(datasets))]
        check_lengths(parts)
        specs, order = assign_fields(options.fields, parts)
        for i, fields in enumerate(specs):
            if fields != tuple(FieldSpec(name, name) for name in parts[i].schema.names):
                parts[i].close()
                parts[i] = stack.enter_context(opened(i, fields)) if fields else parts[i]
        keyed = [i for i, f in enumerate(formats) if f.key or "keys_as" in f.open_options]
        if len(keyed) > 1:
            known = [source for i in keyed if specs[i] and (source := opened_keys(i)) is not None]
            check_keys([stack.enter_context(source) for source in known])
        source = JoinedSource([p for p, own in zip(parts, specs, strict=True) if own], order)
        source.named = tuple(map(str, named))
        stack.pop_all()
    return source


FoundSidecar: TypeAlias = tuple[spec.Content, Path, Path]
"""A valid sidecar: its content (only of the requested files), the dataset, and its path."""


def find_sidecar(
    names: Sequence[Path], at: Path | None, directory: Path | None = None
) -> FoundSidecar | None:
    """Return the valid sidecar of files, None if there is none; see `spec.find`.

    Raises
    ------
    DsprepError
        If it is not valid.
    OSError
        If its files cannot be examined.
    """
    located = spec.find(names, at, directory)
    if located is None:
        return None
    content, dataset, path = located
    changed = sidecar.changes(content, dataset, "unnamed")
    if changed:
        raise sidecar.stale(changed[0], path, dataset)
    return located


def _choose_options(options: OpenOptions | None, known: FoundSidecar | None) -> OpenOptions:
    """Return the options requested, else those of the sidecar."""
    requested = options or OpenOptions()
    if known is None or replace(requested, fields=()).meaning != OpenOptions():
        return requested
    recorded = OpenOptions.from_json(known[0].reading)
    if requested.fields and recorded.fields:
        return requested
    own = {name: getattr(requested, name) for name in UNRECORDED}
    return replace(recorded, fields=requested.fields or recorded.fields, **own)


def _make_source(known: FoundSidecar, options: OpenOptions, format: Format) -> SidecarSource | None:
    """Return the dataset read through its sidecar, or None if it lacks a requested field."""
    content, dataset, path = known
    recorded = OpenOptions.from_json(content.reading)
    if not content.layouts or replace(options, fields=()).meaning != replace(recorded, fields=()):
        return None
    chosen: list[tuple[str, Field]] = [(f.name, f) for f in content.schema]
    if options.fields != recorded.fields:
        if recorded.fields or any(s.dtype is not None or s.index for s in options.fields):
            return None
        available = {f.name: f for f in content.schema}
        specs = with_others(options.fields, without(content.schema, recorded.file_field).names)
        number = recorded.file_field
        if number is not None and all(s.path != number for s in specs):
            specs = (*specs, FieldSpec(number, number))
        if any(s.path not in available for s in specs):
            return None
        chosen = wanted(specs, available)
    lost = {name for layout in content.layouts for name in layout.get("unlocated", ())}
    if lost & {name for name, _ in chosen}:
        return None
    opened = sidecar.Sidecar(content, dataset, path, follow_external=options.follow_external)
    opened.expect()
    if content.files:
        opened.layout(0)  # with the companion: a pair that a killed run left does not go together
    full = "check_crc" in format.open_options and options.check_crc
    if content.files and opened.proofs.has_members(0):
        full = opened.proofs.once = True
    return SidecarSource(opened, chosen, "full" if full else "header")
