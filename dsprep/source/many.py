"""Datasets opened by the library of their format, of one file or many.

Several files are read as one dataset. How each was opened is kept, for other processes.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dsprep import formats
from dsprep.core.gather import Assembly
from dsprep.core.schema import (
    OTHERS,
    Arena,
    Batch,
    FieldSpec,
    Schema,
    differences,
    empty_batch,
    with_others,
)
from dsprep.errors import AmbiguousError, DsprepError, FormatError, SchemaError, changed
from dsprep.formats import foreign
from dsprep.formats.base import CommonSchema, Format, Opening, Source
from dsprep.formats.fields import MissingField
from dsprep.formats.options import OpenOptions
from dsprep.layout.describe import FieldStorage
from dsprep.sidecar import spec
from dsprep.source.numbered import NumberedSource, without
from dsprep.source.turned import is_turned, open_turned
from dsprep.storage.identity import Identities, Identity
from dsprep.storage.paths import Candidate, common_path

MAX_OPEN = 8
"""Files of one dataset that are kept open at the same time, besides those being read."""

RECENT = 1
"""Those of them that are expected to be read again at once."""

RESCALING = ("scale_factor", "add_offset", "_Unsigned")
"""Attributes that say which value a stored number stands for."""


def open_native(
    format: Format,
    paths: Sequence[Path],
    options: OpenOptions,
    schema: Schema | None = None,
    notes: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    *,
    identities: Identities = (),
    first: int = 0,
) -> Source:
    """Open files of one format by its own library.

    Parameters
    ----------
    schema
        Types that the format does not keep.
    identities
        What the files were before; empty: not compared.
    first
        The number of the first file among those of the dataset.
    """
    schema = None if schema is None else without(schema, options.file_field)
    if any(s.name == OTHERS for s in options.fields):
        every = replace(options, fields=())
        with open_native(format, paths, every, schema, progress=progress) as all_of_them:
            own_schema = without(all_of_them.schema, options.file_field)
            notes = (*notes, *all_of_them.notes)
            options = replace(options, fields=with_others(options.fields, own_schema.names))
            common = _merged(format, (own_schema,), options, schema)
            options, schema = common.options, common.hint
    source: Source
    if len(paths) == 1:
        source = _open_file(format, paths[0], options, schema, first)
        source.notes = (*notes, *source.notes)
        if schema is not None:
            source.schema = _with_hinted_attrs(source.schema, schema)
        else:
            own_schema = own_names(without(source.schema, options.file_field), options)
            common = _merged(format, (own_schema,), options, None)
            options, schema = common.options, common.hint
    else:
        source = many = MultiSource(format, paths, options, schema, notes, progress, first)
        options, schema = many.options, many.hint
    if source.dropped:
        samples = len(source) + source.dropped
        source.notes = (*source.notes, f"left out {source.dropped:,} of {samples:,} samples")
    source.notes = tuple(dict.fromkeys(source.notes))
    source.opening, source.known = _opening(format, paths, options, schema, first), identities
    source.format, source.options = format.name, options
    return source


def _opening(
    format: Format, paths: Sequence[Path], options: OpenOptions, hint: Schema | None, first: int
) -> Opening:
    absolute = [path.absolute() for path in paths]
    return partial(_open_again, format.name, absolute, options, hint, first)


def _open_again(
    format: str, paths: Sequence[Path], options: OpenOptions, hint: Schema | None, first: int
) -> Source:
    return open_native(formats.load(format), paths, options, hint, first=first)


def _merged(
    format: Format, schemas: Sequence[Schema], options: OpenOptions, hint: Schema | None
) -> CommonSchema:
    """Return how files are read whose fields are known to agree."""
    common = format.merge_schemas(schemas, options, hint)
    assert common is not None
    return common


def own_names(schema: Schema, options: OpenOptions) -> Schema:
    """Return the fields of `schema` by the names that they have in the files."""
    paths = {s.name: s.path for s in options.fields}
    fields = {paths.get(f.name, f.name): f for f in schema}
    return Schema(tuple(replace(f, name=name) for name, f in fields.items()), schema.attrs)


def _open_file(
    format: Format, path: Path, options: OpenOptions, hint: Schema | None, number: int
) -> Source:
    """Open a file, the one of this number among those of the dataset."""
    name, options = options.file_field, replace(options, file_field=None)
    try:
        source: Source
        if "sample_axis" in format.open_options and is_turned(options):
            source = open_turned(partial(format.open, path, hint=None), options, format)
        else:
            source = format.open(path, options, hint)
    except FormatError as error:  # in directories, files are taken for what their names end in
        with closing(Candidate(path)) as candidate:
            alike = format.recognises(candidate)
        known = None if alike else foreign.certain(path, tuple(formats.FORMATS))
        raise known or error from error
    return source if name is None else NumberedSource(source, name, number)


def _with_hinted_attrs(schema: Schema, hint: Schema) -> Schema:
    """Return `schema` with the attributes that only the sidecar keeps."""
    fields = []
    for f in schema:
        known = hint[f.name].attrs if f.name in hint.names else {}
        fields.append(replace(f, attrs={**known, **f.attrs}))
    static = schema.static or hint.static
    return Schema(tuple(fields), {**hint.attrs, **schema.attrs}, static)


class _Slot:
    """An open file, or one that is being opened by the holder of the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: Source | None = None
        self.users = 0


class MultiSource(Source):
    """Several files of one format, read as one dataset.

    Opens each file once to count its samples and compare its schema with the first one's, and
    again when samples of it are read; at most `max_open` stay open.
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
    ) -> None:
        self._format, self.format = format, format.name
        self.paths, self.first = list(paths), first
        self.options, self.hint = options, hint
        self.max_open = MAX_OPEN  # may be changed while it is used
        self.path = common_path([p.absolute().parent for p in paths])
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Slot] = OrderedDict()
        self._note_counts: Counter[str] = Counter()
        self._seen: dict[int, Identity] = {}
        self._inferring = format.infers and hint is None
        try:
            counts = self._infer(progress) if self._inferring else self._check_files(progress)
        except BaseException:
            self.close()
            raise
        if hint is not None:
            self.schema = _with_hinted_attrs(self.schema, hint)
        self._starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)])
        self.notes = (*notes, *(self._counted(n, k) for n, k in self._note_counts.items()))

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
                self.others = source.others
            elif differences(self.schema, source.schema):
                raise self._disagree(self.paths[i], source.schema)
        return counts

    def _infer(self, progress: Callable[[int, int], None] | None) -> NDArray[np.int64]:
        """Set the schema, from what all files hold, and notes; return the samples of each file."""
        counts = np.zeros(len(self.paths), np.int64)
        options, names = self.options, dict.fromkeys(s.path for s in self.options.fields)
        first_look = replace(options, fields=tuple(FieldSpec(name, name) for name in names))
        self.options = first_look
        known: Schema | None = None
        alone = False
        for i, source in self._each(progress):
            counts[i] = len(source)
            schema = without(source.schema, options.file_field)
            if known is None or not len(source):
                known = schema if len(source) else known
                continue
            merged = self._format.merge_schemas((known, schema), self.options, None)
            if merged is None:
                self.schema = known
                raise self._disagree(self.paths[i], schema)
            known, alone = merged.schema, alone or merged.alone
        if alone:
            ways = {"none": len(self.paths), "first": int(counts.sum())}
            raise AmbiguousError(
                "each file may be one sample, or hold several",
                [(f"--sample-axis {axis}", f"{n:,} samples") for axis, n in ways.items()],
                where=common_path(self.paths),
                fix=foreign.WAY_OUT,
            )
        self.options, self._inferring = options, False
        if known is not None:
            common = _merged(self._format, (known,), options, None)
            self.options, self.hint = common.options, common.hint
        if self.options != first_look or self.hint is not None:
            with self._lock:  # files opened so far were opened without knowing the others
                for index in list(self._open):
                    self._close(index)
        first = int(np.flatnonzero(counts)[0]) if counts.any() else 0
        with self.file(first) as source:
            self.schema, self.version = source.schema, source.version
            self._note_counts |= {note: len(self.paths) for note in source.notes if options.fields}
        return counts

    def _each(self, progress: Callable[[int, int], None] | None) -> Iterator[tuple[int, Source]]:
        """Yield every file, opened, and collect notes."""
        first, known = Schema(()), dict[tuple[str, str], str]()
        for i in range(len(self.paths)):
            with self.file(i) as source:
                self._note_counts.update(source.notes)
                self.dropped += source.dropped
                if not len(source):
                    self._note_counts["there are no samples"] += 1
                attrs = attributes_text(source.schema)
                if i == 0:
                    first, known = source.schema, attrs
                unlike = [k for k in sorted({*known, *attrs}) if known.get(k) != attrs.get(k)]
                both = {*first.names} & {*source.schema.names} if len(source) else set()
                for field, name in unlike:
                    if name in RESCALING and field in both:
                        raise SchemaError(
                            f"{name} of {field} is not that of {self.paths[0]}, so that equal "
                            "numbers stand for different values",
                            where=self.paths[i],
                            expected=first[field].attrs.get(name, "none"),
                            found=source.schema[field].attrs.get(name, "none"),
                            fix="take only files in which it is the same, leave the field out with "
                            "--field, or write the unpacked values with dsprep.write",
                        )
                if unlike:
                    names = [f"{name} of {field}" if field else name for field, name in unlike[:3]]
                    more = f" and {len(unlike) - 3} more" if unlike[3:] else ""
                    self._note_counts[
                        "attributes are not those of the first file, which are kept: "
                        f"{', '.join(names)}{more}"
                    ] += 1
                yield i, source
            if progress is not None:
                progress(i + 1, len(self.paths))

    def _disagree(self, path: Path, schema: Schema) -> SchemaError:
        common = [f"--field {f.name}" for f in schema if f in tuple(self.schema)]
        fix = f"take what all files have: {' '.join(common)}; or " if common else ""
        if not {*schema.names} & {*self.schema.names}:
            fix = "if the files hold fields of the same samples, take them together: --join; or "
        if "records" in self._format.open_options:
            fix += "take the records whole: --raw-records; or "
        elif self.options.sample_axis == "auto" and "sample_axis" in self._format.open_options:
            fix += "if each file is one sample: --sample-axis none; or "
        return SchemaError(
            f"its fields differ from those of {self.paths[0]}: "
            + "; ".join(differences(self.schema, schema)[:3]),
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
                self._close_some()

    def _opened(self, index: int) -> Source:
        """Open a file: the same one as before, if it was opened before."""
        path = self.paths[index]
        if path.is_dir():
            return self._open_path(path, self.first + index)
        before = self._seen.setdefault(index, Identity.look(path))
        source = self._open_path(path, self.first + index)
        if how := before.changed(path):
            source.close()
            raise changed(path, how)
        return source

    def _open_path(self, path: Path, number: int) -> Source:
        """Open a file; while fields are inferred, those that only other files have are left out."""
        options, missing = self.options, None
        while True:
            try:
                return _open_file(self._format, path, options, self.hint, number)
            except MissingField as error:
                fields = tuple(s for s in options.fields if s.path != error.path)
                if not self._inferring or len(fields) == len(options.fields):
                    raise
                options, missing = replace(options, fields=fields), error
            except DsprepError as error:
                if missing is None or options.fields:
                    raise
                raise missing from error  # the error is of fields that were not requested

    def _close_some(self) -> None:
        idle = [i for i, slot in self._open.items() if not slot.users]
        for index in idle[: max(0, len(idle) - RECENT)]:
            source = self._open[index].source
            if source is not None:
                source.rest()
        for index in idle[: max(0, len(self._open) - self.max_open)]:
            self._close(index)

    def _close(self, index: int) -> None:
        source = self._open.pop(index).source
        if source is not None:
            source.close()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def confirm(self) -> None:
        for i in range(len(self.paths)):
            with self.file(i) as source:
                source.confirm()

    def openings(self) -> Iterator[Opening]:
        """Yield how to open each file by itself, with the fields of all."""
        return (self._opening(slice(i, i + 1)) for i in range(len(self.paths)))

    def _opening(self, some: slice) -> Opening:
        first = self.first + some.start
        return _opening(self._format, self.paths[some], self.options, self.hint, first)

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Only the files that hold some of the samples are opened.
        numbers = [i for i, _, _ in self._ranges(start, stop)] or [0]
        opening = self._opening(slice(numbers[0], numbers[-1] + 1))
        return opening, int(self._starts[numbers[0]])

    def files(self) -> list[Path]:
        """Return all files."""
        return self.paths

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

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        ranges = list(self._ranges(start, stop))
        if not ranges:
            return empty_batch(self.schema)
        if len(ranges) == 1:
            index, first, last = ranges[0]
            with self.file(index) as source:
                batch = source.read(first, last, arena)
            return {name: batch[name] for name in self.schema.names}
        assembly = Assembly(self.schema, stop - start, arena, "multi")
        scratch = None if assembly.ragged.fields else Arena()
        at = 0
        for index, first, last in ranges:
            with self.file(index) as source:
                assembly.put(at, source.read(first, last, scratch))
            at += last - first
        return assembly.batch()

    @override
    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
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

    @override
    def resident_nbytes(self) -> int:
        files = min(len(self.paths), MAX_OPEN)
        busy = min(files, 1 + RECENT)
        with self.file(0) as source:
            return busy * source.resident_nbytes() + (files - busy) * source.idle_nbytes()

    def storage(self) -> dict[str, FieldStorage]:
        """Return how the fields are stored in the first file."""
        with self.file(0) as source:
            return source.storage()

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
