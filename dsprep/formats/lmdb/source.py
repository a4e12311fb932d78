"""Reads an LMDB file as samples, with ``pread`` alone: no map, no lock, no limit on threads.

Values are read by the layout of the file, which `parse` found when it was opened. The header of
each value's first overflow page is read along with it and compared. The file must not be written
to while it is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Batch, Column, Field, Ints, Ragged, Schema
from dsprep.core.spans import offsets_of, ranges
from dsprep.errors import AmbiguousError, SchemaError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.fields import retype, wanted
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.lmdb.datum import Datum, looks_like_datum
from dsprep.formats.lmdb.families import KEY, VALUE, fields_in, numbers
from dsprep.formats.lmdb.locate import file_layout, records_of
from dsprep.formats.lmdb.overflow import describe_frame
from dsprep.formats.lmdb.parse import Records, shown
from dsprep.formats.lmdb.values import Values
from dsprep.formats.options import OpenOptions
from dsprep.layout import model
from dsprep.layout.describe import FieldStorage, of_layout
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import FileLayout, Part
from dsprep.reading.layout_reader import LayoutReader

APART = "a sample is several records, each at an offset of its own, which sidecars do not keep"
_PROBED = 1 << 24  # bytes of a value that is looked into when the file is opened
_AT_ONCE = 1 << 20  # samples whose sizes are looked at together
_KEYS = 100  # keys that are looked at
_NAMED = 8  # samples that a message names


class LmdbSource(Source):
    """The records of one database as samples, or as the fields of samples; see `Format.open`.

    Attributes
    ----------
    key
        The field that the keys become; None if they do not.
    apart
        Where samples are several records: those of each field. `numbers` are in their keys.
    """

    def __init__(self, records: Records, options: OpenOptions, hint: Schema | None) -> None:
        self.path, self.records, self._options = records.path, records, options
        self.numbers: Ints = np.zeros(0, np.int64)
        self.apart = self._records_by_field(hint)
        self.key = self._key(hint)
        self._decoder, self._fields = self._choose(hint)
        attrs = hint.attrs if hint is not None else {}
        self.schema = Schema(tuple(f for _, f in self._fields), attrs)
        self.version = f"LMDB 0.9, data version 1, pages of {records.pages.psize} bytes"
        self.notes = (*self._notes(), *getattr(self._decoder, "notes", ()))
        self._readers: list[tuple[LayoutReader, tuple[str, ...]]] = []
        self._stored: list[tuple[FileLayout, Schema]] = []
        if self.apart:
            self.version += ", a record per field"
            frame = describe_frame(records.framed) if records.framed else None
            for path, f in self._fields:
                if path in self.apart:
                    order = Explicit(self.apart[path])
                    parts = {f.name: Part(0)}
                    self._add_reader(model.Records(records.blocks, parts, order, frame=frame), f)
            return
        self._check_sizes()
        inside = [(path, f) for path, f in self._fields if path != self.key]
        if inside:
            stored = records_of(
                records.blocks, self._decoder, inside, records.order, records.framed
            )
            self._add_reader(stored, *(f for _, f in inside))

    def _add_reader(self, stored: model.Records, *fields: Field) -> None:
        """Read some fields by this layout."""
        layout, schema = FileLayout(len(self), stored), Schema(fields)
        self._stored.append((layout, schema))
        self._readers.append((self.records.reader(layout, schema, self.label), schema.names))

    def __len__(self) -> int:
        return len(self.numbers) if self.apart else len(self.records)

    # --- what there is -----------------------------------------------------------------------

    def _records_by_field(self, hint: Schema | None) -> dict[str, Ints]:
        """Return the rows of each field, where samples are several records; else nothing."""
        options, records = self._options, self.records
        if options.keys_as is not None or options.values != "opaque" or records.counter:
            return {}
        n = len(records)
        spread = np.unique(np.linspace(0, n - 1, min(n, _KEYS)).astype(np.int64))
        nodes = records.nodes(np.union1d(spread, np.arange(min(n, _KEYS))))
        around = fields_in([nodes.key(i) for i in range(len(nodes))])
        names = {s.path for s in options.fields} or set(around)
        if not around or not names <= {*around, KEY} or names == {KEY}:
            return {}
        if not options.fields and (hint is None or hint.names == (VALUE,)):
            if not any(self._alike(nodes.key(i), around) for i in (0, len(nodes) // 2, -1)):
                return {}
            fields = " ".join(f"--field {shlex.quote(name)}" for name in around)
            ways = [
                (fields, f"a sample for each number, with {', '.join(around)}"),
                (f"--keys-as {KEY}", f"{n} samples, each record one"),
            ]
            raise AmbiguousError(
                "keys of several kinds have numbers", ways, where=self.path, fix=WAY_OUT
            )
        if not options.fields and hint is not None and names != set(hint.names) - {KEY}:
            return {}
        if options.order == "file":
            raise UsageError(
                "samples of several records have no order in the file",
                where=self.path,
                fix=f"leave out --order file, or take each record with --keys-as {KEY}",
            )
        parts = records.numbered({name: around[name] for name in around if name in names})
        self.numbers = next(iter(parts.values()))[0]
        rising = bool((np.diff(self.numbers) > 0).all())
        if not rising or any(not np.array_equal(self.numbers, each) for each, _ in parts.values()):
            raise self._incomplete(list(parts.values()))
        return {name: rows for name, (_, rows) in parts.items()}

    def _alike(self, key: bytes, around: Mapping[str, tuple[bytes, bytes]]) -> bool:
        """Return whether other kinds of keys have the number of this one."""
        kinds = (k for k in around.values() if key.startswith(k[0]) and key.endswith(k[1]))
        before, after = max(kinds, key=lambda kind: len(kind[0]) + len(kind[1]))
        number = key[len(before) : len(key) - len(after)]
        return sum(self.records.has(a + number + b) for a, b in around.values()) > 1

    def _incomplete(self, parts: list[tuple[Ints, Ints]]) -> SchemaError:
        """Return the error for samples that are several records, of which some are not there."""
        every, counts = np.unique(np.concatenate([n for n, _ in parts]), return_counts=True)
        wrong = every[counts != len(parts)]
        rows = np.concatenate([rows[np.isin(n, wrong[:_NAMED])] for n, rows in parts])
        nodes = self.records.nodes(np.sort(rows))
        keys = (shlex.quote(shown([nodes.key(i)])) for i in range(len(nodes)))
        options = " ".join(f"--skip-key {key}" for key in keys)
        return SchemaError(
            f"{len(wrong)} of {len(every)} samples lack records that are fields of the others",
            where=self.path,
            fix=f"leave them out with {options}{' ...' * (len(wrong) > _NAMED)}, or take each "
            f"record as a sample with --keys-as {KEY}",
        )

    def _key(self, hint: Schema | None) -> str | None:
        """Return the field that the keys become, None if they do not."""
        options = self._options
        if options.keys_as is not None or self.records.counter or self.apart:
            return options.keys_as
        if options.fields:
            return KEY if any(s.path == KEY for s in options.fields) else None
        known = hint is not None and hint.names != (VALUE,)
        return KEY if not known or (hint is not None and KEY in hint.names) else None

    def _check_sizes(self) -> None:
        """Raise `FormatError` unless all values have bytes that the types asked for can have."""
        lengths, order, decoder = self.records.lengths, self.records.order, self._decoder
        if isinstance(decoder, Datum):
            return
        n = min(len(self), 1) if isinstance(lengths, Affine) else len(self)  # all the same, or not

        def label(row: int) -> str:
            return self.label(row if order is None else int((order == row).argmax()))

        for at in range(0, n, _AT_ONCE):
            own = partial(lambda at, i: label(at + i), at)
            decoder.check_lengths(lengths.span(at, min(at + _AT_ONCE, n)), own)

    def label(self, sample: int) -> str:
        """Return the name of a sample, with its key."""
        name = f"{self.path}, sample {sample}"
        return name if self.apart else f"{name}, key {self.records.key(sample)!r}"

    def _choose(self, hint: Schema | None) -> tuple[Values | Datum, list[tuple[str, Field]]]:
        """Return what decodes the values, and which of its fields become which."""
        options = self._options
        if self.apart:
            available = {name: Field.opaque(name) for name in self.apart}
            if not bool((np.diff(self.numbers) == 1).all()):
                available[KEY] = Field(KEY, np.dtype(np.int64))
            known = {f.name: f for f in hint or () if f.name in available}
            pairs = wanted(options.fields, available)
            if not options.fields:
                pairs = [(path, known.get(path, f)) for path, f in pairs]
            return Values(Schema((Field.opaque(VALUE),))), pairs
        typed = [s for s in options.fields if s.dtype is not None and s.path != self.key]
        key = {self.key: Field.opaque(self.key)} if self.key else {}
        if hint is not None and self.key is not None and options.keys_as is None:
            hint = Schema(tuple(f for f in hint if f.name != self.key), hint.attrs)
        decoder: Values | Datum
        if options.values == "datum":
            spread = self.records.largest - self.records.smallest
            decoder = Datum.probed(self.records.probe(64, _PROBED), spread, self.path)
        else:
            schema = Schema(tuple(s.to_field() for s in typed)) if typed else hint
            decoder = Values(schema or Schema((Field.opaque(VALUE),)))
        ragged = [f.name for f in decoder.schema.fields[:-1] if typed and f.ragged]
        if isinstance(decoder, Values) and ragged:
            raise UsageError(
                f"field {ragged[0]} varies in length, so where the next begins is not known",
                fix="only the last field may vary",
            )
        available = {f.name: f for f in decoder.schema}
        if key.keys() & available.keys():
            raise UsageError(
                f"keys cannot be the field {self.key}: it is there already",
                expected="another name than " + ", ".join(available),
            )
        specs = options.fields
        if isinstance(decoder, Values):  # a type says what a value begins with, whatever its name
            specs = tuple(replace(s, path=s.name) if s in typed else s for s in specs)
        pairs = wanted(specs, available | key)
        chosen = {path for path, _ in pairs}
        return decoder, [*pairs, *((k, f) for k, f in key.items() if k not in chosen)]

    def _notes(self) -> list[str]:
        """Return what was left out, and what the first values and keys look like."""
        options, records = self._options, self.records
        notes = []
        if records.databases:
            notes.append(f"left out the named databases {shown(records.databases)}")
        if records.skipped:
            notes.append(f"left out the keys {shown(sorted(records.skipped))}")
        if records.facts:
            notes.append(f"left out the keys {shown(records.facts)}: facts about the dataset")
        if self.apart:
            notes.append(f"a sample is several records, each a field: {', '.join(self.apart)}")
        elif self.key == KEY and options.keys_as is None and not options.fields:
            such = f" such as {shown([records.keys.odd])}" if records.keys.odd else ""
            notes.append(f"the keys are not a counter{such}: field {KEY} has them")
        elif self.key is None and not records.counter:
            notes.append("the keys are not a counter, and are left out (--keys-as key keeps them)")
        if not len(self):
            return notes
        first = records.nodes(np.arange(min(_KEYS, len(records))))
        number = ~numbers(first.pages.reshape(-1), first.key_at, first.key_size)[1]
        if options.order == "key" and len(np.unique(first.key_size[number])) > 1:
            notes.append(
                "the keys are numbers without leading zeros, so 10 comes before 2 "
                "(--order numeric sorts them as numbers)"
            )
        if isinstance(self._decoder, Values) and self._decoder.schema.names == (VALUE,):
            probes = records.probe(3, _PROBED)
            if any(v[:1] == b"\x80" and v[1:2] in b"\2\3\4\5" and v[-1:] == b"." for v in probes):
                notes.append(
                    "values look like Python pickles, kept as opaque bytes: dsprep.write(TARGET, "
                    "ITEMS, function=...) takes a function of yours that loads them"
                )
            elif probes and all(map(looks_like_datum, probes)):
                notes.append("values look like Caffe Datum messages (--values datum reads them)")
        return notes

    # --- reading -----------------------------------------------------------------------------

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`.

        Pages are found without LMDB's table of readers, so that whoever commits meanwhile may use
        them again: then it is a `ChangedError`.
        """
        samples = np.arange(start, stop, dtype=np.int64)
        batch: Batch = {}
        for reader, names in self._readers:
            own = None if arena is None else arena.part(names[0])
            batch |= reader.read(samples, names, "header", own)
        columns = {
            f.name: batch[f.name] if f.name in batch else self._keys(f, start, stop)
            for f in self.schema
        }
        self.records.file.check_same()
        return columns

    def _keys(self, field: Field, start: int, stop: int) -> Column:
        """Return the keys of samples, or their numbers."""
        if self.apart:
            return self.numbers[start:stop]
        nodes = self.records.nodes(self.records.rows(start, stop))
        flat = nodes.pages.reshape(-1)[ranges(nodes.key_at, nodes.key_size)]
        return retype(Ragged(flat, offsets_of(nodes.key_size), "bytes"), field, self.path, start)

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the payload bytes of each sample, from the tree alone."""
        if not self.schema.ragged:
            return super().sizes(start, stop)
        lengths = self.records.lengths
        out = np.zeros(stop - start, np.int64)
        if self.apart:
            for path, f in self._fields:
                rows = self.apart.get(path)
                out += f.row_nbytes if rows is None else lengths.at(rows[start:stop])
            return out
        if isinstance(self._decoder, Datum):
            return None
        chosen = {path for path, _ in self._fields}
        out += sum(f.row_nbytes for f in self._decoder.fixed if f.name in chosen)
        ragged = [f.name in chosen for f in self._decoder.ragged]
        if any(ragged) and not all(ragged):
            return None  # how a value divides between them is in the value
        if any(ragged):
            out += lengths.at(self.records.rows(start, stop)) - self._decoder.head
        for at in range(start, stop if self.key is not None else start, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            out[at - start : end - start] += self.records.nodes(self.records.rows(at, end)).key_size
        return out

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every value is stored; see `Source.extents`.

        The blocks are the records that are samples, in key order. Keys are not in them.
        """
        if self.apart:
            return FileLayout(len(self), unlocated={f.name: APART for f in self.schema})
        return file_layout(self.records, self._decoder, self._fields)

    # --- describing --------------------------------------------------------------------------

    def storage(self) -> dict[str, FieldStorage]:
        """Return how the values are stored, or the keys that are fields."""
        described: dict[str, FieldStorage] = {}
        for layout, schema in self._stored:
            described |= of_layout(layout, schema)
        key = FieldStorage(storage="keys in the leaf pages", access="its leaf page is read")
        return {f.name: described.get(f.name, key) for _, f in self._fields}

    def close(self) -> None:
        """Close the file."""
        self.records.close()
