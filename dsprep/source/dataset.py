"""Opening a dataset: from what the user typed to one source of samples ``0 .. N``.

A dataset is a file, a directory, a quoted glob, several of these, or ``@list.txt`` with one path
per line. Several files are read as one, in natural order (``part2`` before ``part10``). It is read
through its sidecar if there is a valid one, else by the library of its format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from dsprep.core.schema import Field, FieldSpec, Schema, with_others
from dsprep.errors import DsprepError, FormatError, SchemaError, UsageError
from dsprep.formats.base import Format, Opening, Source
from dsprep.formats.fields import MissingField, wanted
from dsprep.formats.options import OF_ALL, OF_DATASETS, UNRECORDED, OpenOptions, check_options
from dsprep.sidecar import sidecar, spec
from dsprep.source.files import find_dataset, find_files
from dsprep.source.from_sidecar import SidecarSource
from dsprep.source.joined import (
    KEY,
    JoinedSource,
    assign_fields,
    check_keys,
    check_lengths,
    joined_names,
)
from dsprep.source.many import NativeOpening, open_native
from dsprep.source.numbered import without
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.identity import Identities, identities_of
from dsprep.storage.paths import as_path

Progress: TypeAlias = Callable[[int, int], None]
Through: TypeAlias = Literal["sidecar", "library", "strict"]


ENCODED = (
    "bytes with a header, such as .npy files and serialised tensors, are decoded in a transform=, "
    "or by a program of your own that calls dsprep.write"
)
"""What to do about bytes that are not of the type that a field was given."""


def open_dataset(
    paths: str | Path | Sequence[str | Path],
    options: OpenOptions | None = None,
    progress: Progress | None = None,
    *,
    through: Through = "sidecar",
    at: str | Path | None = None,
    marked: bool = False,
) -> Source:
    """Open one or several files as one dataset.

    Parameters
    ----------
    paths
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    options
        How to read them; if left out, as the sidecar says.
    progress
        Called with (files opened, files in all) where there are many.
    through
        ``"sidecar"``: read through the sidecar if there is a valid one, else with a warning (and
        a note) by the format's own library, unless only the sidecar says what the fields are;
        ``"library"``: always by that; ``"strict"``: only through the sidecar.
    at
        The sidecar, if it is not beside the dataset.
    marked
        Look at every file before anything else is read, for `Source.identities`.

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
        If the data changed since the sidecar was written, and `through` is ``"strict"``, or it is
        ``"sidecar"``, `options` do not say how to read and the format does not keep the types.
    """
    named = [paths] if isinstance(paths, str | Path) else paths
    at = None if at is None else as_path(at)
    try:
        source = _open(named, options, progress, through, at, marked)
        if options is not None and any(s.dtype is not None for s in options.fields):
            with ExitStack() as opened:  # is closed if the bytes are not of the types given
                opened.enter_context(source).read(0, min(1, len(source)))
                opened.pop_all()
    except MissingField as error:
        fields = tuple(s.settled(error.names) for s in options.fields) if options else ()
        if options is None or fields == options.fields:
            raise
        return open_dataset(
            paths, replace(options, fields=fields), progress, through=through, at=at, marked=marked
        )
    except (FormatError, UsageError) as error:
        typed = options is not None and any(s.dtype is not None for s in options.fields)
        if not typed or type(error) not in (FormatError, UsageError):
            raise
        facts = {"where": error.where, "expected": error.expected, "found": error.found}
        fix = "; ".join(filter(None, (error.fix, ENCODED)))
        raise type(error)(error.what, **facts, fix=fix) from error
    return source


def _open(
    named: Sequence[str | Path],
    options: OpenOptions | None,
    progress: Progress | None,
    through: Through,
    at: Path | None,
    marked: bool,
) -> Source:
    """Open files as one dataset; see `open_dataset`."""
    if options is not None and options.join:
        if at is not None:
            raise UsageError("--sidecar does not go together with --join")
        return _open_joined(named, options, progress, through, marked)
    format, names, notes = find_dataset(named)
    if options is not None:
        check_options(options, format.open_options, format.name)
    files = _Files(format, names, at, notes)
    identities = identities_of(names) if marked else ()
    known, lost = _find_usable(files, options, through)
    if known is None:
        refuse_partial(written_as(names))
    options = _choose_options(options, known)
    source: Source | None = None
    if known is not None and through != "library":
        source = _open_through_sidecar(files, known, options, through, identities)
    if source is None:
        source = _open_by_library(files, known, lost, options, progress, identities)
    source.named = tuple(map(str, named))
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
        options, every | OF_DATASETS, " and ".join(dict.fromkeys(f.name for f in formats))
    )

    def opened(number: int, fields: tuple[FieldSpec, ...]) -> Source:
        known = formats[number].open_options | OF_ALL
        own = {name: getattr(options, name) for name in known}
        reading = OpenOptions(**{**own, "fields": fields})
        return open_dataset(datasets[number], reading, progress, through=through, marked=marked)

    def opened_keys(number: int) -> Source | None:
        name, opening = formats[number].key or KEY, parts[number].opening
        assert isinstance(opening, SidecarOpening | NativeOpening)
        keys_as, fields = None if formats[number].key else KEY, (FieldSpec(name, name),)
        reading = replace(opening.options, fields=fields, keys_as=keys_as, file_field=None)
        with suppress(MissingField, UsageError):  # keys that only count, and no groups of HDF5
            return open_dataset(datasets[number], reading, progress, through="library")
        return None

    with ExitStack() as stack:
        parts = [stack.enter_context(opened(i, ())) for i in range(len(datasets))]
        check_lengths(parts)
        names = joined_names([(part.path, part.schema) for part in parts])
        specs, order = assign_fields(options.fields, names, parts[0].path)
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


@dataclass(frozen=True, kw_only=True)
class SidecarOpening(Opening):
    """A dataset that was opened through its sidecar.

    Attributes
    ----------
    paths, options
        Its files, and how they are read.
    at
        The sidecar, if it is not beside the dataset.
    """

    paths: tuple[Path, ...]
    options: OpenOptions
    at: Path | None = None

    def open(self) -> Source:
        """Open the source through its sidecar, and in no other way."""
        format, names, notes = find_dataset(self.paths)
        check_options(self.options, format.open_options, format.name)
        files = _Files(format, names, self.at, notes)
        known = _require(_find_valid(files), names)
        source = _open_through_sidecar(
            files, known, _choose_options(self.options, known), "strict", ()
        )
        assert source is not None  # or it is refused
        source.named = tuple(map(str, self.paths))
        return source


@dataclass(frozen=True)
class _Files:
    """The files of a dataset being opened.

    Attributes
    ----------
    format, names
        Their format, and their paths.
    at
        The sidecar, if it is not beside them.
    notes
        What was left out and assumed; more may be added.
    """

    format: Format
    names: list[Path]
    at: Path | None
    notes: list[str]


def _find_usable(
    files: _Files, options: OpenOptions | None, through: Through
) -> tuple[ValidSidecar | None, UnusableSidecar | None]:
    """Return the valid sidecar, or what is lost with one that is not."""
    if through == "strict":
        return _require(_find_valid(files), files.names), None
    lost = None
    try:
        return _find_valid(files), None
    except DsprepError as error:
        if through == "sidecar":
            lost = _describe_unusable(files.names, files.format, options, error, files.at)
        if lost is None:
            _note_ignored(error, files.notes)
        else:
            files.notes.append(_ignored_note(error))
    return None, lost


def _require(known: ValidSidecar | None, names: Sequence[Path]) -> ValidSidecar:
    """Return a sidecar that has to be there."""
    if known is None:
        fix = "write one with dsprep provenance"
        raise UsageError("there is no sidecar", where=names[0], fix=fix)
    return known


def _open_through_sidecar(
    files: _Files,
    known: ValidSidecar,
    options: OpenOptions,
    through: Through,
    identities: Identities,
) -> Source | None:
    """Return the dataset opened through its sidecar, None if that does not serve."""
    source = None
    try:
        source = _make_source(known, options, files.names, files.format)
    except DsprepError as error:
        if through == "strict":
            raise
        _note_ignored(error, files.notes)
        return None
    if source is not None:
        source.notes = (*files.notes, *source.notes)
        source.opening = SidecarOpening(
            paths=tuple(p.absolute() for p in files.names),
            options=options,
            at=None if files.at is None else files.at.absolute(),
        )
        source.known = (*identities, *identities_of(source.beside())) if identities else ()
    elif through == "strict":
        raise UsageError(
            "what is asked for cannot be read through the sidecar",
            where=known.path,
            fix="write it again with these options: dsprep provenance, or leave them out",
        )
    return source


def _open_by_library(
    files: _Files,
    known: ValidSidecar | None,
    lost: UnusableSidecar | None,
    options: OpenOptions,
    progress: Progress | None,
    identities: Identities,
) -> Source:
    """Return the dataset opened by the format's own library."""
    schema = _type_hint(known.content) if known is not None else None
    try:
        native = open_native(
            files.format, files.names, options, schema, files.notes, progress, identities=identities
        )
    except SchemaError as error:
        raise error if lost is None else lost.error from error
    if lost is not None and not _matches_recorded(native.schema, lost.schema, options.fields):
        native.close()
        raise lost.error
    if lost is not None:
        warnings.warn(_ignored_note(lost.cause), sidecar.StaleWarning, stacklevel=3)
    return native


@dataclass(frozen=True)
class ValidSidecar:
    """A valid sidecar: its content (only the requested files), the dataset, and its path."""

    content: spec.Content
    dataset: Path
    path: Path


def _find_valid(files: _Files) -> ValidSidecar | None:
    """Return the sidecar of `files`, None if there is none.

    Raises
    ------
    DsprepError
        If it is not valid.
    OSError
        If that cannot be seen.
    """
    located = spec.find(files.names, files.at)
    if located is None:
        return None
    content, dataset, path = located
    if content.format != files.format.name:
        raise FormatError(
            "the sidecar is of another format",
            where=path,
            expected=content.format,
            found=files.format.name,
            fix=f"write it again with dsprep provenance {dataset}",
        )
    changed = sidecar.changes(content, dataset, "unnamed")
    if changed:
        raise sidecar.stale(changed[0], path, dataset)
    return ValidSidecar(content, dataset, path)


@dataclass(frozen=True)
class UnusableSidecar:
    """A sidecar that cannot be used: its fields, the error if they are needed, and why not."""

    schema: Schema
    error: DsprepError
    cause: DsprepError


def _describe_unusable(
    files: Sequence[Path],
    format: Format,
    options: OpenOptions | None,
    error: DsprepError,
    at: Path | None,
) -> UnusableSidecar | None:
    """Return what is lost with a sidecar that is not valid; None if nothing is.

    Raises
    ------
    DsprepError
        If without it nothing says what the fields are.
    """
    requested = options or OpenOptions()
    typed = any(s.dtype is not None or s.index for s in requested.fields)
    if typed or replace(requested, fields=()).meaning != OpenOptions():
        return None
    dataset = files[0]
    try:
        located = spec.find_path(files, at)
        if located is None:
            return None
        dataset, path = located
        content = spec.read(path)
    except FormatError:
        if format.keeps_types:
            return None
        raise _unusable_error(error, dataset, readable=False) from error
    refused = _unusable_error(error, dataset, readable=True)
    if content.reading or content.format != format.name:
        if content.reading or not format.keeps_types:
            raise refused from error
        return None
    return None if format.keeps_types else UnusableSidecar(content.schema, refused, error)


def _unusable_error(error: DsprepError, dataset: Path, *, readable: bool) -> DsprepError:
    """Return the error for a sidecar that is needed and cannot be used."""
    again = f"write it again with dsprep provenance {dataset}, which keeps them"
    if not readable:
        again = (
            "bring it back from where the data came from, or write another one with dsprep "
            f"provenance {dataset} --field NAME:DTYPE[SHAPE]"
        )
    kind = sidecar.StaleError if isinstance(error, sidecar.StaleError) else FormatError
    return kind(
        "the sidecar cannot be used, and only the sidecar says what the fields are: " + error.what,
        where=error.where,
        expected=error.expected,
        found=error.found,
        fix=f"{again}; or move it away to read what the format itself keeps",
    )


def _matches_recorded(opened: Schema, recorded: Schema, fields: Sequence[FieldSpec]) -> bool:
    """Whether fields, or the requested ones, are those of a sidecar."""
    pairs = [(s.path, s.name) for s in fields] or [(n, n) for n in recorded.names]
    if len(pairs) != len(opened.names):
        return False
    return all(
        path in recorded.names
        and name in opened.names
        and _type_of(recorded[path]) == _type_of(opened[name])
        for path, name in pairs
    )


def _type_of(f: Field) -> tuple[object, ...]:
    return f.dtype, f.shape, f.kind


def _note_ignored(error: DsprepError, notes: list[str]) -> None:
    notes.append(_ignored_note(error))
    warnings.warn(_ignored_note(error), sidecar.StaleWarning, stacklevel=4)


def _ignored_note(error: DsprepError) -> str:
    return f"sidecar ignored: {error}"


def _choose_options(options: OpenOptions | None, known: ValidSidecar | None) -> OpenOptions:
    """Return how to read: as requested, else as the sidecar was made."""
    requested = options or OpenOptions()
    if known is None or replace(requested, fields=()).meaning != OpenOptions():
        return requested
    recorded = OpenOptions.from_json(known.content.reading)
    if requested.fields and recorded.fields:
        return requested
    own = {name: getattr(requested, name) for name in UNRECORDED}
    return replace(recorded, fields=requested.fields or recorded.fields, **own)


def _make_source(
    known: ValidSidecar, options: OpenOptions, files: Sequence[Path], format: Format
) -> SidecarSource | None:
    """Return the dataset read through its sidecar, or None if that does not serve."""
    content = known.content
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
    opened = sidecar.Sidecar(
        content, known.dataset, known.path, follow_external=options.follow_external
    )
    opened.expect()
    if content.files:
        opened.layout(0)  # with the companion: a pair that a killed run left does not go together
    full = "check_crc" in format.open_options and options.check_crc
    if content.files and opened.proofs.has_members(0):
        full = opened.proofs.once = True
    return SidecarSource(
        opened,
        chosen,
        "full" if full else "header",
        lambda: open_native(format, files, options, _type_hint(content)),
    )


def _type_hint(content: spec.Content) -> Schema | None:
    """Return the types that the format may not keep, None where options gave them.

    Fields that options renamed, left out or took apart are not those of the files.
    """
    return None if content.reading else content.schema
