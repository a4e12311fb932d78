"""Opening a dataset: from what the user typed to one source of samples ``0 .. N``.

A dataset is a file, a directory, a quoted glob, several of these, or ``@list.txt`` with one path
per line. Several files are read as one, in natural order (``part2`` before ``part10``). It is read
through its sidecar if there is a valid one, else by the library of its format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Field, FieldSpec, Schema, with_others
from dsprep.errors import DsprepError, FormatError, UsageError
from dsprep.formats.base import Format, Source
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
from dsprep.source.many import open_native, without
from dsprep.storage.atomic import refuse_partial, written_as
from dsprep.storage.identity import identities_of
from dsprep.storage.paths import all_absolute, as_path

Progress: TypeAlias = Callable[[int, int], None]
Through: TypeAlias = Literal["sidecar", "library", "strict"]


MANY, LOOKED_INTO = 1000, 64
"""Of more files than these, so many are opened to inspect all of them."""

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
    inspected: int | None = None,
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
        Look at every file before it is read, for `Source.identities`; a sidecar has done so.
    inspected
        Of more than `MANY` files without a sidecar, only so many of the first ones are opened, and
        `LOOKED_INTO` that are spread over all: see `Source.unopened`.

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
    known: Known | None = None
    source: Source | None = None
    try:
        absolute = all_absolute(names)
        known = _find_valid(format, absolute, at)
        if known is None and through == "strict":
            fix = "write one with dsprep provenance"
            raise UsageError("there is no sidecar", where=names[0], fix=fix)
    except DsprepError as error:
        if through == "strict":
            raise
        if through == "sidecar":
            _refuse_if_needed(format, names, at, options, error)
        _ignore(error, notes)
    if known is None:
        refuse_partial(written_as(names))
    options = _choose_options(options, known)
    if known is not None and through != "library":
        try:
            source = _make_source(known, options, format)
        except DsprepError as error:
            if through == "strict":
                raise
            _ignore(error, notes)
        if source is None and through == "strict":
            raise UsageError(
                "what is asked for cannot be read through the sidecar",
                where=known[2],
                fix="write it again with these options: dsprep provenance, or leave them out",
            )
    if source is None:
        hint = None if known is None else _type_hint(known[0])
        marks = identities_of(names) if marked else ()
        some = names if inspected is None or len(names) <= MANY else _spread(names, inspected)
        source = open_native(format, some, options, hint, notes, progress, identities=marks)
        source.unopened = len(names) - len(some)
    else:
        source.notes = (*notes, *source.notes)
        beside = None if at is None else at.absolute()
        source.format, source.options = format.name, options
        source.opening = partial(open_dataset, absolute, options, through="strict", at=beside)
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
        name, how = formats[number].key or KEY, parts[number].options
        keys_as, fields = None if formats[number].key else KEY, (FieldSpec(name, name),)
        reading = replace(how, fields=fields, keys_as=keys_as, file_field=None)
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


Known: TypeAlias = tuple[spec.Content, Path, Path]
"""A valid sidecar: its content (only of the requested files), the dataset, and its path."""


def _spread(names: Sequence[Path], first: int) -> list[Path]:
    """Return so many of the first files, and some that are spread over all."""
    spread = np.linspace(0, len(names) - 1, LOOKED_INTO).astype(int).tolist()
    return [names[i] for i in sorted({*range(min(first, len(names))), *spread})]


def _find_valid(format: Format, names: Sequence[Path], at: Path | None) -> Known | None:
    """Return the sidecar of files, None if there is none.

    Raises
    ------
    DsprepError
        If it is not valid.
    OSError
        If that cannot be seen.
    """
    located = spec.find(names, at)
    if located is None:
        return None
    content, dataset, path = located
    if content.format != format.name:
        raise FormatError(
            "the sidecar is of another format",
            where=path,
            expected=content.format,
            found=format.name,
            fix=f"write it again with dsprep provenance {dataset}",
        )
    changed = sidecar.changes(content, dataset, "unnamed")
    if changed:
        raise sidecar.stale(changed[0], path, dataset)
    return located


def _refuse_if_needed(
    format: Format,
    names: Sequence[Path],
    at: Path | None,
    options: OpenOptions | None,
    error: DsprepError,
) -> None:
    """Raise an error if a sidecar that is not valid alone says what the fields are."""
    requested = options or OpenOptions()
    typed = any(s.dtype is not None or s.index for s in requested.fields)
    if typed or replace(requested, fields=()).meaning != OpenOptions():
        return
    dataset, reading, fix = names[0], False, "bring it back from where the data came from, or name "
    fix += "the fields: dsprep provenance DATA --field NAME:DTYPE[SHAPE]"
    with suppress(FormatError):
        located = spec.find_path(names, at)
        if located is None:
            return
        dataset = located[0]
        reading = bool(spec.read(located[1]).reading)
        fix = f"write it again with dsprep provenance {dataset}, which keeps them"
    if format.keeps_types and not reading:
        return
    kind = sidecar.StaleError if isinstance(error, sidecar.StaleError) else FormatError
    raise kind(
        "the sidecar cannot be used, and only the sidecar says what the fields are: " + error.what,
        where=error.where,
        expected=error.expected,
        found=error.found,
        fix=f"{fix}; or move it away to read what the format itself keeps",
    ) from error


def _ignore(error: DsprepError, notes: list[str]) -> None:
    notes.append(f"sidecar ignored: {error}")
    warnings.warn(notes[-1], sidecar.StaleWarning, stacklevel=4)


def _choose_options(options: OpenOptions | None, known: Known | None) -> OpenOptions:
    """Return how to read: as requested, else as the sidecar was made."""
    requested = options or OpenOptions()
    if known is None or replace(requested, fields=()).meaning != OpenOptions():
        return requested
    recorded = OpenOptions.from_json(known[0].reading)
    if requested.fields and recorded.fields:
        return requested
    own = {name: getattr(requested, name) for name in UNRECORDED}
    return replace(recorded, fields=requested.fields or recorded.fields, **own)


def _make_source(known: Known, options: OpenOptions, format: Format) -> SidecarSource | None:
    """Return the dataset read through its sidecar, or None if that does not serve."""
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


def _type_hint(content: spec.Content) -> Schema | None:
    """Return the types that the format may not keep, None where options gave them.

    Fields that options renamed, left out or took apart are not those of the files.
    """
    return None if content.reading else content.schema
