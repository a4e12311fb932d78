"""Opening a dataset: from what the user typed to one source of samples ``0 .. N``.

A dataset is a file, a directory, a quoted glob, several of these, or ``@list.txt`` with one path
per line. Several files are read as one, in natural order (``part2`` before ``part10``).
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
import threading
import warnings
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dsprep import formats
from dsprep.core.atomic import restore
from dsprep.core.marks import Mark, Status, changed, same_file, status
from dsprep.core.schema import (
    OTHERS,
    Arena,
    Array,
    Batch,
    Field,
    FieldSpec,
    Ragged,
    Schema,
    concatenate,
    differences,
    empty_batch,
    new_array,
    with_others,
)
from dsprep.errors import DsprepError, FormatError, SchemaError, TargetError, UsageError
from dsprep.formats.base import (
    UNRECORDED,
    Format,
    Layout,
    OpenOptions,
    Settled,
    Source,
    check_options,
    wanted,
)
from dsprep.formats.samples import listed, natural_key
from dsprep.sidecar import sidecar, spec
from dsprep.source.from_sidecar import SidecarSource

MAX_LIST_NBYTES = 256 << 20
"""No list of paths is larger."""

MAX_OPEN = 8
"""Files of one dataset that are kept open at the same time, besides those being read."""


def find_files(paths: Sequence[str | Path]) -> tuple[list[tuple[Path, Format]], list[str]]:
    """Return the files and stores that `paths` mean, in order, and notes on what was left out.

    Raises
    ------
    UsageError, FormatError, FileNotFoundError
        If a path does not exist, a pattern matches nothing, a directory holds no dataset, or a
        named file is of no known format.
    """
    found: list[tuple[Path, Format]] = []
    notes: list[str] = []
    for text in paths:
        for path in _expand(str(text)):
            format = _format_of(path) if path.is_dir() else formats.recognise(path)
            if format is None:
                inside, skipped = _walk(path)
                if not inside:
                    raise FormatError(
                        "the directory holds no dataset",
                        where=path,
                        expected="files of " + ", ".join(formats.FORMATS),
                        found=f"{len(skipped)} other files" if skipped else "nothing",
                    )
                if skipped:
                    names = listed([p.name for p in skipped])
                    notes.append(f"left out {names} in {path}: of no known format")
                found += inside
            else:
                found.append((path, format))
    if not found:
        raise UsageError("no dataset is named")
    return found, notes


def _expand(text: str) -> list[Path]:
    """Return the paths that one argument means: a list file, a glob or itself."""
    if not text.startswith("@"):
        return _match(text)
    listing = Path(text[1:])
    if not listing.is_file() or listing.stat().st_size > MAX_LIST_NBYTES:
        raise UsageError("this is no list of paths", where=listing)
    lines = [os.fsdecode(w.strip()) for w in listing.read_bytes().splitlines()]
    names = [w for w in lines if w and not w.startswith("#")]
    if not names:
        raise UsageError("the list names no file", where=listing)
    return [path for name in names for path in _match(os.path.join(listing.parent, name))]  # noqa: PTH118 (keeps names as they are)


def _match(text: str) -> list[Path]:
    """Return the paths that a glob matches, in natural order, or the one that `text` is."""
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a path")
    path = Path(text)
    missing = not os.path.lexists(path)
    if missing and glob.has_magic(text):
        # pathlib's ** does not follow links to directories, which may lead in circles.
        found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        hidden = path.name.startswith(".")
        matches = [
            m
            for m in found
            if not m.name.endswith(spec.NAMES) and (hidden or not m.name.startswith("."))
        ]
        if not matches:
            raise UsageError(f"nothing matches {text!r}")
        return sorted(matches, key=natural_key)
    if missing:
        restore(path)
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError("it is neither a file nor a directory", where=path)
    return [path]


def _walk(directory: Path) -> tuple[list[tuple[Path, Format]], list[Path]]:
    """Return the datasets under `directory` in natural order, and the files that are none."""
    found: list[tuple[Path, Format]] = []
    skipped: list[Path] = []
    waiting = [directory]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            path = Path(entry.path)
            if entry.name.startswith(".") or entry.name.endswith(spec.NAMES):
                continue
            if entry.is_dir(follow_symlinks=False):
                if (format := _format_of(path)) is None:
                    waiting.append(path)
                    continue
            elif (
                not _is_file(entry)
                or (format := formats.by_suffix(path) or _format_of(path)) is None
            ):
                skipped.append(path)
                continue
            found.append((path, format))
    found.sort(key=lambda item: natural_key(item[0]))
    return found, sorted(skipped, key=natural_key)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a regular file, perhaps by way of links that lead to one."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _format_of(path: Path) -> Format | None:
    try:
        return formats.recognise(path)
    except FormatError:
        return None


def open_dataset(
    paths: str | Path | Sequence[str | Path],
    options: OpenOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    through: Literal["sidecar", "library", "strict"] = "sidecar",
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
        Look at the status of every file before anything is read, for `marks_of`.

    Raises
    ------
    DsprepError, OSError
        If something is missing, damaged, of mixed formats, or the files disagree about fields.
    StaleError
        If the data changed since the sidecar was written, and `through` is ``"strict"``, or it is
        ``"sidecar"``, `options` do not say how to read and the format does not keep the types.
    """
    named = [paths] if isinstance(paths, str | Path) else paths
    place = None if at is None else Path(at)
    return _opened(named, options, progress, through, place, marked=marked, trusted=False)


def _opened(
    paths: Sequence[str | Path],
    options: OpenOptions | None,
    progress: Callable[[int, int], None] | None,
    through: Literal["sidecar", "library", "strict"],
    place: Path | None,
    *,
    marked: bool,
    trusted: bool,
) -> Source:
    """Open a dataset; `trusted`: it is known to be the one that was compared with the sidecar."""
    files, notes = find_files(paths)
    format = files[0][1]
    for path, other in files:
        if other is not format:
            raise FormatError(
                "the dataset mixes formats",
                where=path,
                expected=f"{format.name} as {files[0][0]}",
                found=other.name,
            )
    if options is not None:
        check_options(options, format.open_options, format.name)
    names = [path for path, _ in files]
    marks = tuple(Mark.of(path.absolute()) for path in names) if marked else ()
    known, lost = None, None
    try:
        known = _known(names, format, notes, trusted, place)
    except DsprepError as error:
        if through == "strict":
            raise
        if through == "sidecar":
            lost = _lost(names, format, options, error, place)
        if lost is None:
            _ignore(error, notes)
        else:
            notes.append(_ignored(error))
    if known is None and lost is None and through == "strict":
        fix = "write one with dsprep provenance"
        raise UsageError("there is no sidecar", where=names[0], fix=fix)
    options = _reading(options, known)
    if known is not None and through != "library":
        opened = None
        try:
            opened = _through_sidecar(known, options, names, format)
        except DsprepError as error:
            if through == "strict":
                raise
            _ignore(error, notes)
        if opened is not None:
            opened.notes, opened.named = (*notes, *opened.notes), tuple(map(str, paths))
            absolute = tuple(p.absolute() for p in names)
            there = None if place is None else place.absolute()
            if marked:
                marks = (*marks, *_beside(opened))
            opened.opening = Opening(absolute, options, marks=marks, at=there)
            return opened
        if through == "strict":
            raise UsageError(
                "what is asked for cannot be read through the sidecar",
                where=known.path,
                fix="write it again with these options: dsprep provenance, or leave them out",
            )
    schema = _hint(known.content) if known is not None else None
    try:
        native = open_native(format, names, options, schema, notes, progress, marks=marks)
    except SchemaError as error:
        raise error if lost is None else lost.error from error
    if lost is not None and not _as_recorded(native.schema, lost.schema, options.fields):
        native.close()
        raise lost.error
    if lost is not None:
        warnings.warn(_ignored(lost.cause), sidecar.StaleWarning, stacklevel=3)
    native.named = tuple(map(str, paths))
    return native


def open_native(
    format: Format,
    paths: Sequence[Path],
    options: OpenOptions,
    schema: Schema | None = None,
    notes: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    *,
    survey: bool = False,
    marks: tuple[Mark, ...] = (),
) -> Source:
    """Open files of one format by its own library.

    Parameters
    ----------
    schema
        Types that the format does not keep.
    survey
        Whether it is for `Source.extents`.
    marks
        What the files were before; empty: not looked at.
    """
    if any(s.name == OTHERS for s in options.fields):
        every = replace(options, fields=())
        with open_native(format, paths, every, schema, progress=progress) as all_of_them:
            names = all_of_them.schema.names
            options = replace(options, fields=with_others(options.fields, names))
            options, schema = _settled(format, (all_of_them.schema,), options, schema)[1:]
    source: Source
    if len(paths) == 1:
        source = _open_file(format, paths[0], options, schema, survey)
        source.notes = (*notes, *source.notes)
        if schema is None:
            found = own_names(source.schema, options)
            options, schema = _settled(format, (found,), options, None)[1:]
    else:
        source = many = MultiSource(format, paths, options, schema, notes, progress, survey)
        options, schema = many.options, many.hint
    absolute = tuple(p.absolute() for p in paths)
    source.opening = Opening(absolute, options, format.name, schema, marks)
    return source


def _settled(
    format: Format, schemas: Sequence[Schema], options: OpenOptions, hint: Schema | None
) -> Settled:
    """Return how files are read whose fields are known to agree."""
    settled = format.settle(schemas, options, hint)
    assert settled is not None
    return settled


def own_names(schema: Schema, options: OpenOptions) -> Schema:
    """Return the fields of `schema` by the names that they have in the files."""
    paths = {s.name: s.path for s in options.fields}
    fields = {paths.get(f.name, f.name): f for f in schema}
    return Schema(tuple(replace(f, name=name) for name, f in fields.items()), schema.attrs)


def marks_of(source: Source) -> tuple[Mark, ...]:
    """Return what the files of `source` were when it was opened, or else are now.

    Those of its files come first, in their order; empty for a source made in this process.
    """
    opening = source.opening
    if not isinstance(opening, Opening):
        return ()
    if not opening.marks:
        marks = tuple(map(Mark.of, opening.paths))
        beside = _beside(source) if isinstance(source, SidecarSource) else ()
        source.opening = opening = replace(opening, marks=(*marks, *beside))
    return opening.marks


def _beside(source: SidecarSource) -> Iterator[Mark]:
    """Yield the marks of the sidecar and its companion, by which the samples are found."""
    path = source.sidecar.path
    yield Mark.of(path.absolute())
    if source.sidecar.content.companion is not None:
        yield Mark.of(path.with_name(spec.companion_name(path)).absolute())


@dataclass(frozen=True)
class Opening:
    """How a source was opened, so that another process can open it as well.

    Attributes
    ----------
    paths
        Its files.
    options
        How they are read.
    format
        By the library of which format; None: through their sidecar.
    hint
        Types that the format does not keep.
    marks
        What the files were, then the sidecar's; empty: not looked at.
    at
        The sidecar, if it is not beside the dataset.
    """

    paths: tuple[Path, ...]
    options: OpenOptions
    format: str | None = None
    hint: Schema | None = None
    marks: tuple[Mark, ...] = ()
    at: Path | None = None

    def open(self) -> Source:
        """Open the source.

        Raises
        ------
        DsprepError, OSError
            If it has changed meanwhile, or cannot be reached from here.
        """
        if self.format is None:
            sure = bool(self.marks)
            return _opened(
                self.paths, self.options, None, "strict", self.at, marked=False, trusted=sure
            )
        return open_native(formats.load(self.format), self.paths, self.options, self.hint)


@dataclass(frozen=True)
class Known:
    """A valid sidecar: its content (only the files asked for), the dataset, and where it lies."""

    content: spec.Content
    dataset: Path
    path: Path
    marks: Mapping[int, Mark] = field(default_factory=dict)


def _known(
    files: Sequence[Path], format: Format, notes: list[str], trusted: bool, at: Path | None
) -> Known | None:
    """Return the sidecar of `files`, None if there is none.

    Parameters
    ----------
    notes
        Is told if files were touched.
    trusted
        Whether not to compare the files with it.
    at
        The sidecar, if it is not beside the dataset.

    Raises
    ------
    DsprepError
        If it is not valid.
    OSError
        If that cannot be seen.
    """
    found = spec.find(files, at)
    if found is None:
        return None
    content, dataset, path = found
    marks: dict[int, Mark] = {}
    known = Known(content, dataset, path, marks)
    if content.format != format.name:
        raise FormatError(
            "the sidecar is of another format",
            where=path,
            expected=content.format,
            found=format.name,
            fix=f"write it again with dsprep provenance {dataset}",
        )
    if not trusted:
        changed = sidecar.changes(content, dataset, sidecar.CHECKED, path, notes, marks)
        if changed:
            raise sidecar.stale(changed[0], path, dataset)
    return known


@dataclass(frozen=True)
class _Lost:
    """A sidecar that cannot be used: its fields, the error if they are needed, and why not."""

    schema: Schema
    error: DsprepError
    cause: DsprepError


def _lost(
    files: Sequence[Path],
    format: Format,
    options: OpenOptions | None,
    error: DsprepError,
    at: Path | None,
) -> _Lost | None:
    """Return what is lost with a sidecar that is not valid; None if nothing is.

    Raises
    ------
    DsprepError
        If without it nothing says what the fields are.
    """
    asked = options or OpenOptions()
    typed = any(s.dtype is not None or s.index for s in asked.fields)
    if typed or replace(asked, fields=()).meaning != OpenOptions():
        return None
    dataset = files[0]
    try:
        found = spec.find_path(files, at)
        if found is None:
            return None
        dataset, path = found
        content = spec.read(path)
    except FormatError:
        if format.keeps_types:
            return None
        raise _refused(error, dataset, readable=False) from error
    refused = _refused(error, dataset, readable=True)
    if content.reading or content.format != format.name:
        if content.reading or not format.keeps_types:
            raise refused from error
        return None
    return None if format.keeps_types else _Lost(content.schema, refused, error)


def _refused(error: DsprepError, dataset: Path, *, readable: bool) -> DsprepError:
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


def _as_recorded(found: Schema, recorded: Schema, fields: Sequence[FieldSpec]) -> bool:
    """Whether fields, or those that were asked for, are what a sidecar says."""
    pairs = [(s.path, s.name) for s in fields] or [(n, n) for n in recorded.names]
    if len(pairs) != len(found.names):
        return False
    return all(
        path in recorded.names
        and name in found.names
        and _type(recorded[path]) == _type(found[name])
        for path, name in pairs
    )


def _type(f: Field) -> tuple[object, ...]:
    return f.dtype, f.shape, f.kind


def _ignore(error: DsprepError, notes: list[str]) -> None:
    notes.append(_ignored(error))
    warnings.warn(_ignored(error), sidecar.StaleWarning, stacklevel=4)


def _ignored(error: DsprepError) -> str:
    return f"sidecar ignored: {error}"


def _reading(options: OpenOptions | None, known: Known | None) -> OpenOptions:
    """Return how to read: as asked, else as the sidecar was made."""
    asked = options or OpenOptions()
    if known is None or replace(asked, fields=()).meaning != OpenOptions():
        return asked
    recorded = OpenOptions.from_json(known.content.reading)
    if asked.fields and recorded.fields:
        return asked
    own = {name: getattr(asked, name) for name in UNRECORDED}
    return replace(recorded, fields=asked.fields or recorded.fields, **own)


def _through_sidecar(
    known: Known, options: OpenOptions, files: Sequence[Path], format: Format
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
        specs = with_others(options.fields, available)
        if any(s.path not in available for s in specs):
            return None
        chosen = wanted(specs, available)
    lost = {name for layout in content.layouts for name in layout.get("unlocated", ())}
    if lost & {name for name, _ in chosen}:
        return None
    opened = sidecar.Sidecar(
        content, known.dataset, known.path, follow_external=options.follow_external
    )
    opened.expect(known.marks)
    if content.files:
        opened.layout(0)  # with the companion: a pair that a killed run left does not go together
    full = "check_crc" in format.open_options and options.check_crc
    if content.files and opened.proofs.has_members(0):
        full = opened.proofs.once = True
    return SidecarSource(
        opened,
        chosen,
        "full" if full else "header",
        lambda: open_native(format, files, options, _hint(content)),
    )


def _hint(content: spec.Content) -> Schema | None:
    """Return the types that the format may not keep, None where options told them.

    Fields that options renamed, left out or took apart are not those of the files.
    """
    return None if content.reading else content.schema


def check_replaceable(target: Path) -> None:
    """Raise `TargetError` if `target` is a directory that holds more than datasets."""
    if not target.is_dir() or target.is_symlink() or not any(target.iterdir()):
        return
    try:
        others = find_files([target])[1]
    except DsprepError as error:
        raise TargetError(
            "it is a directory that holds no dataset, and is not replaced",
            where=target,
            fix="remove it yourself if it is not needed",
        ) from error
    if others:
        raise TargetError(
            f"it holds more than a dataset, and is not replaced: {others[0]}",
            where=target,
            fix="remove it yourself if it is not needed",
        )


def _open_file(
    format: Format, path: Path, options: OpenOptions, hint: Schema | None, survey: bool
) -> Source:
    source = _opener(format, survey)(path, options, hint)
    if hint is not None:
        source.schema = _with_hinted_attrs(source.schema, hint)
    return source


def _opener(format: Format, survey: bool) -> Callable[[Path, OpenOptions, Schema | None], Source]:
    """Return what opens one file."""

    def open_file(path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        try:
            return format.open(path, options, hint, survey=survey)
        except FormatError as error:  # in directories, files are taken for what their names end in
            raise formats.foreign(path) or error from error

    return open_file


def _with_hinted_attrs(schema: Schema, hint: Schema) -> Schema:
    """Return `schema` with the attributes that only the sidecar keeps."""
    fields = []
    for f in schema:
        known = hint[f.name].attrs if f.name in hint.names else {}
        fields.append(replace(f, attrs={**known, **f.attrs}))
    return Schema(tuple(fields), {**hint.attrs, **schema.attrs})


class _Slot:
    """An open file, or one that is being opened by whoever holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: Source | None = None
        self.users = 0


class MultiSource(Source):
    """Several files of one format, read as one dataset.

    Opens each file once to count its samples and compare its schema with the first one's, and
    again when samples of it are read; at most `MAX_OPEN` stay open.
    """

    def __init__(
        self,
        format: Format,
        paths: Sequence[Path],
        options: OpenOptions,
        hint: Schema | None = None,
        notes: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        survey: bool = False,
    ) -> None:
        self._opener = _opener(format, survey)
        self.format, self.paths = format, list(paths)
        self.options, self.hint = options, hint
        self.path = Path(os.path.commonpath([p.absolute().parent for p in paths]))
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Slot] = OrderedDict()
        self._said: Counter[str] = Counter()
        self._status: dict[int, Status] = {}
        try:
            if format.infers and hint is None:
                counts = self._infer(progress)
            else:
                counts = self._check_files(progress)
        except BaseException:
            self.close()
            raise
        if hint is not None:
            self.schema = _with_hinted_attrs(self.schema, hint)
        self._starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)])
        self.notes = (*notes, *(self._counted(n, k) for n, k in self._said.items()))

    def _counted(self, note: str, files: int) -> str:
        return (
            note if files == len(self.paths) else f"{note} (in {files} of {len(self.paths)} files)"
        )

    def _check_files(self, progress: Callable[[int, int], None] | None) -> NDArray[np.int64]:
        """Set the schema and notes; return the samples of each file."""
        counts = np.zeros(len(self.paths), np.int64)
        for i, source in self._each(progress):
            counts[i] = len(source)
            if i == 0:
                self.schema, self.version = source.schema, source.version
            elif differences(self.schema, source.schema):
                raise self._disagree(self.paths[i], source.schema)
        return counts

    def _infer(self, progress: Callable[[int, int], None] | None) -> NDArray[np.int64]:
        """Set the schema, from what all files hold, and notes; return the samples of each file."""
        counts = np.zeros(len(self.paths), np.int64)
        options, self.options = self.options, replace(self.options, fields=())
        known: Schema | None = None
        for i, source in self._each(progress):
            counts[i] = len(source)
            if known is None or not len(source):
                known = source.schema if len(source) else known
                continue
            merged = self.format.settle((known, source.schema), self.options, None)
            if merged is None:
                self.schema = known
                raise self._disagree(self.paths[i], source.schema)
            known = merged.schema
        self.options = options
        if known is not None:
            _, self.options, self.hint = _settled(self.format, (known,), options, None)
        if self.options != replace(options, fields=()) or self.hint is not None:
            with self._lock:  # files opened so far were opened without knowing the others
                for index in list(self._open):
                    self._close(index)
        first = int(np.flatnonzero(counts)[0]) if counts.any() else 0
        with self.file(first) as source:
            self.schema, self.version = source.schema, source.version
            self._said |= {note: len(self.paths) for note in source.notes if options.fields}
        return counts

    def _each(self, progress: Callable[[int, int], None] | None) -> Iterator[tuple[int, Source]]:
        """Yield every file, opened, and collect notes."""
        first = ""
        for i in range(len(self.paths)):
            with self.file(i) as source:
                self._said.update(source.notes)
                if not len(source):
                    self._said["there are no samples"] += 1
                if i == 0:
                    first = attributes_text(source.schema)
                elif attributes_text(source.schema) != first:
                    self._said["attributes are not those of the first file, which are kept"] += 1
                yield i, source
            if progress is not None:
                progress(i + 1, len(self.paths))

    def _disagree(self, path: Path, found: Schema) -> SchemaError:
        whole = "records" in self.format.open_options
        return SchemaError(
            f"its fields differ from those of {self.paths[0]}: "
            + "; ".join(differences(self.schema, found)[:3]),
            where=path,
            fix="name the fields that all files have with --field, or leave the file out"
            + (", or take the records whole with --raw-records" if whole else ""),
        )

    @contextmanager
    def file(self, index: int) -> Iterator[Source]:
        """Lend the source of one file, opening it if need be."""
        with self._lock:
            slot = self._open.setdefault(index, _Slot())
            self._open.move_to_end(index)
            slot.users += 1
        try:
            with slot.lock:
                if slot.source is None:
                    slot.source = self._opened(index)
            yield slot.source
        finally:
            with self._lock:
                slot.users -= 1
                self._close_some()

    def _opened(self, index: int) -> Source:
        """Open a file: the same one as before, if it was opened before."""
        path = self.paths[index]
        if path.is_dir():
            return self._opener(path, self.options, self.hint)
        before = self._status.setdefault(index, status(path.stat()))
        source = self._opener(path, self.options, self.hint)
        now = status(path.stat())
        if not same_file(before, now):
            source.close()
            raise changed(path, before, now)
        return source

    def _close_some(self) -> None:
        idle = [i for i, slot in self._open.items() if not slot.users]
        for index in idle[: max(0, len(self._open) - MAX_OPEN)]:
            self._close(index)

    def _close(self, index: int) -> None:
        source = self._open.pop(index).source
        if source is not None:
            source.close()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def confirm(self) -> None:
        """See `Source.confirm`."""
        for i in range(len(self.paths)):
            with self.file(i) as source:
                source.confirm()

    def openings(self) -> Iterator[Opening]:
        """Yield how to open each file by itself, with the fields of all."""
        marks = self.opening.marks
        for i, path in enumerate(self.paths):
            one = (path.absolute(),)
            yield Opening(one, self.options, self.format.name, self.hint, marks[i : i + 1])

    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        """Return how to open the files that hold some samples, and the first sample in those."""
        numbers = [i for i, _, _ in self._ranges(start, stop)] or [0]
        some = slice(numbers[0], numbers[-1] + 1)
        paths = tuple(p.absolute() for p in self.paths[some])
        marks = self.opening.marks[some]
        opening = Opening(paths, self.options, self.format.name, self.hint, marks)
        return opening, int(self._starts[numbers[0]])

    def locate(self, sample: int) -> tuple[Path, int]:
        """Return the file that holds `sample`, and the sample's number in it."""
        index = bisect_right(self._starts, sample) - 1
        return self.paths[index], sample - int(self._starts[index])

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, first, last + 1) for the files that hold samples of ``start .. stop``."""
        index = max(0, int(np.searchsorted(self._starts, start, "right")) - 1)
        while start < stop:
            base, end = int(self._starts[index]), int(self._starts[index + 1])
            if end > start:
                yield index, start - base, min(stop, end) - base
                start = min(stop, end)
            index += 1

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        ranges = list(self._ranges(start, stop))
        if not ranges:
            return empty_batch(self.schema)
        if len(ranges) == 1:
            index, first, last = ranges[0]
            with self.file(index) as source:
                batch = source.read(first, last, arena)
            return {name: batch[name] for name in self.schema.names}
        parts: list[Batch] = []
        fixed: dict[str, Array] = {
            f.name: new_array(arena, f"multi.{f.name}", (stop - start, *f.inner), f.dtype)
            for f in self.schema
            if not f.ragged
        }
        done = 0
        scratch = Arena()
        for index, first, last in ranges:
            with self.file(index) as source:
                batch = source.read(first, last, scratch)
            for name, out in fixed.items():
                out[done : done + last - first] = batch[name]
            done += last - first
            parts.append({f.name: _own(batch[f.name]) for f in self.schema if f.ragged})
        ragged = tuple(f for f in self.schema if f.ragged)
        joined = concatenate(Schema(ragged), parts) if ragged else {}
        return {name: fixed.get(name, joined.get(name)) for name in self.schema.names}  # type: ignore[misc]

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the payload bytes of each sample; see `Source.sizes`."""
        if not self.schema.ragged:
            return super().sizes(start, stop)
        parts = [np.zeros(0, np.int64)]
        for index, first, last in self._ranges(start, stop):
            with self.file(index) as source:
                sizes = source.sizes(first, last)
            if sizes is None:
                return None
            parts.append(sizes)
        return np.concatenate(parts)

    def resident_nbytes(self) -> int:
        """Return what reading holds in all files that are open at once; see `Source`."""
        with self.file(0) as source:
            return source.resident_nbytes() * min(len(self.paths), MAX_OPEN)

    def layouts(self) -> dict[str, Layout]:
        """Return how the fields lie in the first file."""
        with self.file(0) as source:
            return source.layouts()

    def loading_code(self) -> str:
        """Return a program that loads sample 0 of the first file."""
        with self.file(0) as source:
            return source.loading_code()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for index in list(self._open):
                self._close(index)


def _own(column: Array | Ragged) -> Array | Ragged:
    """Return the column in memory of its own, since the arena is used for the next file."""
    if isinstance(column, Ragged):
        return Ragged(column.values.copy(), column.offsets, column.kind)
    return column.copy()


def attributes_text(schema: Schema) -> str:
    """Return all attributes as text, to compare those of two files."""
    found = {"": schema.attrs, **{f.name: f.attrs for f in schema}}
    return json.dumps(
        {n: {k: spec.encode_attr(v) for k, v in a.items()} for n, a in found.items() if a},
        sort_keys=True,
    )
