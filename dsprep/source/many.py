"""Datasets opened by parsing their files, of one format."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from typing_extensions import override

from dsprep import formats
from dsprep.core.closing import failure_closes
from dsprep.core.gather import Assembly, ranges_in
from dsprep.core.schema import (
    OTHERS,
    Arena,
    Batch,
    Field,
    FieldSpec,
    Ints,
    Schema,
    differences,
    empty_batch,
    with_others,
)
from dsprep.errors import AmbiguousError, DsprepError, FormatError, SchemaError, UsageError, changed
from dsprep.formats import foreign
from dsprep.formats.base import Format, Opening, Source
from dsprep.formats.fields import MissingField
from dsprep.formats.options import OpenOptions
from dsprep.formats.samples import listed
from dsprep.layout.describe import FieldStorage
from dsprep.layout.laws import Affine
from dsprep.layout.model import FileLayout, Given
from dsprep.sidecar import spec
from dsprep.source.turned import is_turned, open_turned
from dsprep.storage.identity import Identity
from dsprep.storage.paths import Candidate, common_path

RESCALING = ("scale_factor", "add_offset", "_Unsigned", "classes")
"""Attributes that say what a stored number stands for: a value, or a class."""


def _open_again(
    format: str, paths: Sequence[Path], options: OpenOptions, hint: Schema | None, first: int
) -> Dataset:
    return Dataset(formats.load(format), paths, options, hint, first=first)


def _own_names(schema: Schema, options: OpenOptions) -> Schema:
    """Return the fields of `schema` by the names that they have in the files."""
    paths = {s.name: s.path for s in options.fields}
    fields = {paths.get(f.name, f.name): f for f in schema}
    return Schema(tuple(replace(f, name=name) for name, f in fields.items()), schema.attrs)


def without(schema: Schema, name: str | None) -> Schema:
    """Return a schema without the field that has the numbers of files."""
    return schema.replace(*(f for f in schema if f.name != name))


def survey_options(options: OpenOptions) -> OpenOptions:
    """Return options that survey files by the fields' own names, to infer fields from all files."""
    names = dict.fromkeys(s.path for s in options.fields)
    return replace(options, fields=tuple(FieldSpec(name, name) for name in names))


def open_alone(
    format: Format, path: Path, options: OpenOptions, hint: Schema | None, inferring: bool
) -> Source:
    """Open a file; while fields are inferred, those that only other files have are left out."""
    missing: MissingField | None = None
    options = replace(options, file_field=None)
    while True:
        try:
            if "sample_axis" in format.open_options and is_turned(options):
                return open_turned(partial(format.open, path, hint=None), options, format)
            return format.open(path, options, hint)
        except MissingField as error:
            rest = tuple(s for s in options.fields if s.path != error.path)
            if not inferring or len(rest) == len(options.fields):
                raise
            options, missing = replace(options, fields=rest), error
        except DsprepError as error:
            if missing is not None and not options.fields:
                raise missing from error  # the error is of fields that were not requested
            if isinstance(error, FormatError):  # in directories, names' ends tell formats
                with closing(Candidate(path)) as candidate:
                    if not format.recognises(candidate):
                        raise foreign.refused(path, tuple(formats.FORMATS)) from error
            raise


def _with_hinted_attrs(schema: Schema, hint: Schema) -> Schema:
    """Return `schema` with the attributes that only the sidecar keeps."""
    fields = []
    for f in schema:
        known = hint[f.name].attrs if f.name in hint.names else {}
        fields.append(replace(f, attrs={**known, **f.attrs}))
    static = schema.static or hint.static
    return Schema(tuple(fields), {**hint.attrs, **schema.attrs}, static)


@dataclass(frozen=True, eq=False)
class FileSurvey:
    """Facts about one file of a dataset, named as attributes of `Source`."""

    schema: Schema
    count: int
    version: str
    notes: tuple[str, ...] = ()
    dropped: int = 0
    others: tuple[str, ...] = ()
    random_access: bool = False

    @classmethod
    def of(cls, source: Source) -> Self:
        """Return the survey of an opened file."""
        names = [field.name for field in fields(cls)[2:]]
        facts = {name: getattr(source, name) for name in names}
        return cls(source.schema, len(source), **facts)

    def __len__(self) -> int:
        return self.count


class _Slot:
    """An open file, or one that is being opened by the holder of the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: Source | None = None
        self.users = 0


class Dataset(Source):
    """Files of one format, read as one dataset.

    Of several, each is opened once to count its samples and compare its schema with the first
    one's, and again when samples of it are read; not many stay open. Where the options name a field
    for it, samples have the number of their file as the last field.

    Parameters
    ----------
    format, paths, options
        The files, and how they are read.
    hint
        Types that the format does not keep.
    notes
        Notes on the dataset.
    progress
        Called with (files opened, files in all).
    first
        The number of the first file among those of the dataset.
    surveyed
        Facts that each file, opened with `survey_options`, tells; empty: they are opened for it.

    Raises
    ------
    DsprepError, OSError
        If a file cannot be read, or has other fields than the first one.
    """

    def __init__(
        self,
        format: Format,
        paths: Sequence[Path],
        options: OpenOptions,
        hint: Schema | None = None,
        notes: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        first: int = 0,
        surveyed: Iterable[FileSurvey] = (),
    ) -> None:
        hint = None if hint is None else without(hint, options.file_field)
        if any(s.name == OTHERS for s in options.fields):
            every = replace(options, fields=())
            with Dataset(format, paths, every, hint, progress=progress) as all_of_them:
                own_schema = without(all_of_them.schema, options.file_field)
                notes = (*notes, *all_of_them.notes)
            options = replace(options, fields=with_others(options.fields, own_schema.names))
            hint, surveyed = own_schema if format.infers else hint, ()
        self._format, self.format, self.paths, self.first = format, format.name, [*paths], first
        self.options, self.hint = options, hint
        self.max_open = format.max_open  # may be changed while it is used
        alone = len(paths) == 1
        self.path = paths[0] if alone else common_path([p.absolute().parent for p in paths])
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Slot] = OrderedDict()
        self._note_counts: Counter[str] = Counter()
        self._identities: dict[int, Identity] = {}
        self._inferring = format.infers and hint is None and not alone
        with failure_closes(self.close):
            counts = self._survey(progress, iter(surveyed))
            self._complete_schema()
        self._starts: Ints = np.concatenate([[0], np.cumsum(counts)])
        own = [self._counted(n, k) for n, k in self._note_counts.items()]
        if self.dropped:
            own.append(f"left out {self.dropped:,} of {len(self) + self.dropped:,} samples")
        self.notes = tuple(dict.fromkeys((*notes, *own)))
        self.opening = self._opening(slice(None))
        only = self._open.get(0) if alone and options.file_field is None else None
        self._only = None if only is None else only.source

    def _counted(self, note: str, files: int) -> str:
        return (
            note if files == len(self.paths) else f"{note} (in {files} of {len(self.paths)} files)"
        )

    def _survey(
        self, progress: Callable[[int, int], None] | None, surveyed: Iterator[FileSurvey]
    ) -> Ints:
        """Set the schema, if need be inferred from all files, and notes; count samples by file."""
        counts = np.zeros(len(self.paths), np.int64)
        options, known = self.options, None
        latest: Schema | None = None
        if self._inferring:
            self.options = survey_options(options)
        for i, path in enumerate(self.paths):
            survey = next(surveyed, None)
            with self.file(i) if survey is None else nullcontext(survey) as source:
                schema, counts[i] = source.schema, len(source)
                if i == 0:
                    self.schema, self.version = schema, source.version
                    self.others, self.random_access = source.others, source.random_access
                self._note(i, source)
            if progress is not None and len(self.paths) > 1:
                progress(i + 1, len(self.paths))
            if schema is latest and counts[i]:
                continue
            latest = schema
            if not self._inferring:
                if i and differences(self.schema, schema):
                    raise self._disagree(path, self.schema, schema)
            elif known is None:
                known = schema if counts[i] else None
            elif counts[i]:
                merged = self._format.merge(known, schema, self.options)
                if merged is None:
                    raise self._disagree(path, known, schema)
                known = merged
        one = known is not None and len(known) == 1 and options.sample_axis == "auto"
        if one and self._format.doubtful:
            ways = {"none": len(self.paths), "first": int(counts.sum())}
            raise AmbiguousError(
                "each file may be one sample, or hold several",
                [(f"--sample-axis {axis}", f"{n:,} samples") for axis, n in ways.items()],
                where=common_path(self.paths),
                fix=foreign.WAY_OUT,
            )
        if self._inferring:
            self._settle(options, known, int(np.flatnonzero(counts)[0]) if counts.any() else 0)
        return counts

    def _settle(self, options: OpenOptions, known: Schema | None, first: int) -> None:
        """Open files from here on with the fields of all of them; `first` has samples."""
        before, self._inferring, self.options = self.options, False, options
        if known is not None:
            self.hint = known
        if self.options != before or self.hint is not None:
            with self._lock:  # files opened so far were opened without knowing the others
                for index in list(self._open):
                    self._close(index)
        with self.file(first) as source:
            self.schema, self.version = source.schema, source.version
            self._note_counts |= {note: len(self.paths) for note in source.notes if options.fields}

    def _complete_schema(self) -> None:
        """Give the schema what the sidecar alone keeps, and the number of the file."""
        if self.hint is not None:
            self.schema = _with_hinted_attrs(self.schema, self.hint)
        elif self._format.infers:
            self.hint = _own_names(self.schema, self.options)
        name = self.options.file_field
        if name in self.schema.names:
            raise UsageError(
                f"--file-field {name}: there is a field of this name",
                where=self.path,
                fix="give it another name",
            )
        if name is not None:
            self.schema = self.schema.replace(*self.schema, Field(name, np.dtype("<i8")))

    def _note(self, index: int, source: Source | FileSurvey) -> None:
        """Note what a file tells, and other attributes than the first's; some change meanings."""
        self._note_counts.update(source.notes)
        self.dropped += source.dropped
        if len(self.paths) == 1:
            return
        if not len(source):
            self._note_counts["there are no samples"] += 1
        attrs = attributes_text(source.schema)
        if index == 0:
            self._attrs = attrs
        known = self._attrs
        unlike = [k for k in sorted({*known, *attrs}) if known.get(k) != attrs.get(k)]
        if not unlike:
            return
        both = {*self.schema.names} & {*source.schema.names} if len(source) else set()
        for field, name in unlike:
            if name in RESCALING and field in both:
                raise SchemaError(
                    f"{name} of {field}: not as in {self.paths[0]}, so that equal numbers mean two "
                    "things",
                    where=self.paths[index],
                    expected=self.schema[field].attrs.get(name, "none"),
                    found=source.schema[field].attrs.get(name, "none"),
                    fix="take only files in which it is the same, leave the field out with "
                    "--field (of images: --labels none), or write the values with dsprep.write",
                )
        names = listed([f"{name} of {field}" if field else name for field, name in unlike])
        kept = f"attributes are not those of the first file, which are kept: {names}"
        self._note_counts[kept] += 1

    def _disagree(self, path: Path, known: Schema, schema: Schema) -> SchemaError:
        common = [f"--field {f.name}" for f in schema if f in tuple(known)]
        fix = f"take what all files have: {' '.join(common)}; or " if common else ""
        if not {*schema.names} & {*known.names}:
            fix = "if the files hold fields of the same samples, take them together: --join; or "
        if "records" in self._format.open_options:
            fix += "take the records whole: --raw-records; or "
        elif self.options.sample_axis == "auto" and "sample_axis" in self._format.open_options:
            fix += "if each file is one sample: --sample-axis none; or "
        return SchemaError(
            f"its fields differ from those of {self.paths[0]}: "
            + "; ".join(differences(known, schema)[:3]),
            where=path,
            fix=fix + foreign.WAY_OUT,
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
                idle = [i for i, other in self._open.items() if not other.users]
                for unused in idle[: max(0, len(self._open) - self.max_open)]:
                    self._close(unused)

    def _opened(self, index: int) -> Source:
        """Open a file: the same one as before, if it was opened before."""
        path = self.paths[index]
        opened = partial(open_alone, self._format, path, self.options, self.hint, self._inferring)
        if path.is_dir():
            return opened()
        before = self._identities.setdefault(index, Identity.look(path))
        source = opened()
        if how := before.changed(path):
            source.close()
            raise changed(path, how)
        return source

    def _close(self, index: int) -> None:
        source = self._open.pop(index).source
        if source is not None:
            source.close()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def check_types(self) -> None:
        for i in range(len(self.paths)):
            with self.file(i) as source:
                source.check_types()

    def _opening(self, some: slice) -> Callable[[], Dataset]:
        paths, first = [p.absolute() for p in self.paths[some]], self.first + (some.start or 0)
        return partial(_open_again, self.format, paths, self.options, self.hint, first)

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Only the files that hold some of the samples are opened.
        numbers = [i for i, _, _ in ranges_in(self._starts, start, stop)] or [0]
        opening = self._opening(slice(numbers[0], numbers[-1] + 1))
        return opening, int(self._starts[numbers[0]])

    def files(self) -> list[Path]:
        """Return all files."""
        return self.paths

    def locate(self, sample: int) -> tuple[Path, int]:
        """Return the file that holds `sample`, and the sample's number in it."""
        index = bisect_right(self._starts, sample) - 1
        return self.paths[index], sample - int(self._starts[index])

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if self._only is not None:
            return self._only.read(start, stop, arena)
        ranges = list(ranges_in(self._starts, start, stop))
        if not ranges:
            return empty_batch(self.schema)
        if len(ranges) == 1:
            return self._read(*ranges[0], arena)
        assembly = Assembly(self.schema, stop - start, arena, "multi")
        scratch = None if assembly.ragged.fields else Arena()
        at = 0
        for index, first, last in ranges:
            assembly.put(at, self._read(index, first, last, scratch))
            at += last - first
        return assembly.batch()

    def _read(self, index: int, start: int, stop: int, arena: Arena | None) -> Batch:
        """Return samples of a file."""
        with self.file(index) as source:
            batch = source.read(start, stop, arena)
        if self.options.file_field is not None:
            numbers = np.full(stop - start, self.first + index, np.int64)
            batch = {**batch, self.options.file_field: numbers}
        return {name: batch[name] for name in self.schema.names}

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if not self.schema.ragged:
            return super().sizes(start, stop)
        number, parts = 8 * (self.options.file_field is not None), [np.zeros(0, np.int64)]
        for index, first, last in ranges_in(self._starts, start, stop):
            with self.file(index) as source:
                sizes = source.sizes(first, last)
            if sizes is None:
                return None
            parts.append(sizes + number)
        return np.concatenate(parts)

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        if len(self.paths) > 1:
            return None
        with self.file(0) as source:
            return source.rows(name, start, stop)

    @override
    def resident_nbytes(self) -> int:
        with self.file(0) as source:
            return min(len(self.paths), self.max_open) * source.resident_nbytes()

    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of the fields in the first file."""
        number = FieldStorage(
            storage="in no file: the number of the file",
            stored_nbytes=0,
            access="no read",
            reads=0,
            read_nbytes=0,
        )
        with self.file(0) as source:
            stored = source.storage()
        return {name: stored.get(name, number) for name in self.schema.names}

    def count(self, index: int) -> int:
        """Return the samples of a file."""
        return int(self._starts[index + 1] - self._starts[index])

    def layout(self, index: int, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return the layout of a file; see `Source.extents`."""
        with self.file(index) as source:
            return self.with_number(source.extents(progress), index)

    def with_number(self, layout: FileLayout, index: int) -> FileLayout:
        """Return the layout of a file with that of the field that has its number."""
        if self.options.file_field is None:
            return layout
        number = Given(Affine(layout.count, self.first + index))
        return replace(layout, given={**layout.given, self.options.file_field: number})

    @override
    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        return self.layout(0, progress) if len(self.paths) == 1 else super().extents(progress)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for index in list(self._open):
                self._close(index)


def attributes_text(schema: Schema) -> dict[tuple[str, str], str]:
    """Return the text of each attribute by field and name, to compare those of two files."""
    attrs_of = {"": schema.attrs, **{f.name: f.attrs for f in schema}}
    return {
        (field, name): json.dumps(spec.encode_attr(value), sort_keys=True)
        for field, attrs in attrs_of.items()
        for name, value in attrs.items()
    }
