"""Reads an LMDB file as samples, with ``pread`` alone: no map, no lock, no limit on threads.

Values are read by the layout of the file, which `parse` found when it was opened. The header of
each value's first overflow page is read along with it and compared. The file must not be written
to while it is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dsprep.core.schema import Arena, Batch, Column, Field, Ints, Ragged, Schema
from dsprep.core.spans import offsets_of, ranges
from dsprep.errors import SchemaError, UnsupportedError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.fields import retype, wanted
from dsprep.formats.lmdb import families
from dsprep.formats.lmdb.datum import Datum, looks_like_datum
from dsprep.formats.lmdb.families import KEY, VALUE, Family, numbers
from dsprep.formats.lmdb.locate import file_layout, records_of
from dsprep.formats.lmdb.overflow import describe_frame
from dsprep.formats.lmdb.parse import Records, shown
from dsprep.formats.lmdb.values import Values, is_group
from dsprep.formats.options import OpenOptions
from dsprep.layout import model
from dsprep.layout.describe import FieldStorage, Sizes, of_record
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import FileLayout, Part
from dsprep.reading.layout_reader import LayoutReader

APART = "a sample is several records, each at an offset of its own, which sidecars do not keep"
_PROBED = 1 << 24  # bytes of a value that is looked into when the file is opened
_AT_ONCE = 1 << 20  # samples whose sizes are looked at together
_FIRST = 100  # keys that are looked at
_MOST_NAMED = 8  # samples that a message names


class RecordsSource(Source):
    """Samples whose fields are read by layouts of one LMDB file, which belongs to this source."""

    def __init__(self, records: Records) -> None:
        self.path, self.records = records.path, records
        self.readers: list[tuple[LayoutReader, tuple[str, ...]]] = []

    def add_reader(self, layout: FileLayout, fields: Schema) -> None:
        """Read some fields by this layout."""
        self.readers.append((self.records.reader(layout, fields, self.label), fields.names))

    def label(self, sample: int) -> str:
        """Return the name of a sample, for messages."""
        return f"{self.path}, sample {sample}"

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`.

        Pages are found without LMDB's table of readers, so that whoever commits meanwhile may use
        them again: then it is a `ChangedError`.
        """
        samples = np.arange(start, stop, dtype=np.int64)
        batch: Batch = {}
        for reader, names in self.readers:
            own = None if arena is None else arena.part(names[0])
            batch |= reader.read(samples, names, "header", own)
        columns = {
            f.name: batch[f.name] if f.name in batch else self.column(f, start, stop)
            for f in self.schema
        }
        self.records.file.check_same()
        return columns

    def column(self, field: Field, start: int, stop: int) -> Column:
        """Return a field of samples that is not in values."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        self.records.close()


class LmdbSource(RecordsSource):
    """The records of one database as samples, or as the fields of samples; see `Format.open`."""

    def __init__(self, records: Records, options: OpenOptions, hint: Schema | None) -> None:
        super().__init__(records)
        self._options = options
        self.families = self._families(hint)
        self.key = self._key(hint)
        self._decoder, self._fields = self._choose(hint)
        attrs = hint.attrs if hint is not None else {}
        self.schema = Schema(tuple(f for _, f in self._fields), attrs)
        self.version = f"LMDB 0.9, data version 1, pages of {records.pages.psize} bytes"
        self.notes = (*self._notes(), *getattr(self._decoder, "notes", ()))
        if self.families:
            self.version += ", a record per field"
            self._read_families()
            return
        self._check_sizes()
        inside = [(path, f) for path, f in self._fields if path != self.key]
        if inside:
            stored = records_of(
                records.blocks, self._decoder, inside, None, records.order, records.framed
            )
            self.add_reader(FileLayout(len(records), stored), Schema(tuple(f for _, f in inside)))

    def _read_families(self) -> None:
        """Read each field by the records of its family."""
        records = self.records
        for path, f in self._fields:
            if path in self.families:
                stored = model.Records(
                    records.blocks,
                    {f.name: Part(0)},
                    order=Explicit(self.families[path].rows),
                    frame=describe_frame(records.framed) if records.framed else None,
                )
                self.add_reader(FileLayout(len(self), stored), Schema((f,)))

    @property
    def _numbers(self) -> Ints:
        """The number of each sample that is several records."""
        return next(iter(self.families.values())).numbers

    def __len__(self) -> int:
        return len(self._numbers) if self.families else len(self.records)

    # --- what there is -----------------------------------------------------------------------

    def _families(self, hint: Schema | None) -> dict[str, Family]:
        """Return the families of keys that are fields, by their names; empty if there are none."""
        options = self._options
        candidates = self.records.keys.families() if options.keys_as is None else []
        names = (
            families.field_names(candidates) if candidates and options.values == "opaque" else None
        )
        self._doubtful: tuple[str, ...] = ()
        if names is None:
            return {}
        missing, every = families.lacking(candidates)
        if options.fields:
            chosen = {s.path for s in options.fields} <= {*names, KEY}
        elif hint is not None and hint.names != (VALUE,):
            chosen = set(names) == set(hint.names) - {KEY}
        else:
            counts = self.records.facts.values()
            chosen = families.are_fields(names, len(every), counts)
        if len(missing) and not (chosen and hint is None):
            return {}
        if len(missing):
            raise self._incomplete(candidates, missing, every)
        if not chosen:
            self._doubtful = tuple(names)
            return {}
        if options.order == "file":
            raise UsageError(
                "samples of several records have no order in the file",
                where=self.path,
                expected="fields " + ", ".join(names),
                fix="leave out --order file, or keep a sample per record with --keys-as key",
            )
        return dict(zip(names, candidates, strict=True))

    def _incomplete(self, candidates: Sequence[Family], missing: Ints, every: Ints) -> SchemaError:
        """Return the error for samples that are several records, of which some are not there."""
        skipped, lost = list[bytes](), list[bytes]()
        for number in missing[:_MOST_NAMED].tolist():
            rows = [f.rows[f.numbers == number] for f in candidates]
            keys = [self.records.key(int(r[0])) if len(r) else b"" for r in rows]
            family, key = next((f, k) for f, k in zip(candidates, keys, strict=True) if k)
            digits = key[len(family.before) : len(key) - len(family.after)]
            lost += [
                f.before + digits + f.after for f, k in zip(candidates, keys, strict=True) if not k
            ]
            skipped += filter(None, keys)
        options = " ".join(f"--skip-key {shlex.quote(shown([key]))}" for key in skipped)
        return SchemaError(
            f"{len(missing)} of {len(every)} samples lack records that are fields of the others",
            where=self.path,
            expected=f"keys such as {shown(lost)}",
            fix=f"leave {'them' if len(missing) > 1 else 'it'} out with {options}"
            f"{' ...' if len(missing) > _MOST_NAMED else ''}, or take each record as a sample "
            "with --keys-as key",
        )

    def _key(self, hint: Schema | None) -> str | None:
        """Return the field that the keys become, None if they do not."""
        options = self._options
        if options.keys_as is not None or self.records.counter or self.families:
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
        for start in range(0, n, _AT_ONCE):

            def label(i: int, start: int = start) -> str:
                row = start + i
                return self.label(row if order is None else int((order == row).argmax()))

            decoder.check_lengths(lengths.span(start, min(start + _AT_ONCE, n)), label)

    def label(self, sample: int) -> str:
        """Return the name of a sample, with its key."""
        name = super().label(sample)
        if self.families:
            return name
        return f"{name}, key {self.records.key(sample)!r}"

    def _choose(self, hint: Schema | None) -> tuple[Values | Datum, list[tuple[str, Field]]]:
        """Return what decodes the values, and which of its fields become which."""
        options = self._options
        if self.families:
            available = {name: Field.opaque(name) for name in self.families}
            if not bool((np.diff(self._numbers) == 1).all()):
                available[KEY] = Field(KEY, np.dtype(np.int64))
            known = {f.name: f for f in hint or () if f.name in available}
            pairs = wanted(options.fields, available)
            if not options.fields:
                pairs = [(path, known.get(path, f)) for path, f in pairs]
            return Values(Schema((Field.opaque(VALUE),))), pairs
        typed = [s for s in options.fields if s.dtype is not None and s.path != self.key]
        key = {self.key: Field.opaque(self.key)} if self.key else {}
        decoder: Values | Datum
        if hint is not None and self.key is not None and options.keys_as is None:
            hint = Schema(tuple(f for f in hint if f.name != self.key), hint.attrs)
        if options.values == "datum":
            spread = self.records.largest - self.records.smallest
            decoder = Datum.probed(self.records.probe(64, _PROBED), spread, self.path)
        elif typed:
            schema = Schema(tuple(s.to_field() for s in typed))
            ragged = [f.name for f in schema.fields[:-1] if f.ragged]
            if ragged:
                raise UsageError(
                    f"field {ragged[0]} varies in length, so where the next begins is not known",
                    fix="only the last field may vary",
                )
            decoder = Values(schema)
            named = {f.name: f for f in schema} | key
            others = [s.path for s in options.fields if s not in typed and s.path not in key]
            if others:
                raise UsageError(
                    f"field {others[0]} needs a dtype, since others have one",
                    fix=f"give it as --field {others[0]}:float32[...]",
                )
            chosen = [s.name if s in typed else s.path for s in options.fields]
            pairs = [(n, named[n]) for n in (*chosen, *(k for k in key if k not in chosen))]
            return decoder, pairs
        else:
            if hint and hint.names != (VALUE,) and self._has_groups():
                raise UnsupportedError(
                    "each value is a group of samples, as repack once wrote them",
                    where=self.path,
                    fix="read it with the version of dsprep that wrote it, and convert it",
                )
            decoder = Values(hint if hint else Schema((Field.opaque(VALUE),)))
        available = {f.name: f for f in decoder.schema}
        if key.keys() & available.keys():
            raise UsageError(
                f"keys cannot be the field {self.key}: it is there already",
                expected="another name than " + ", ".join(available),
            )
        pairs = wanted(options.fields, available | key)
        chosen_paths = {path for path, _ in pairs}
        return decoder, [*pairs, *((k, f) for k, f in key.items() if k not in chosen_paths)]

    def _has_groups(self) -> bool:
        """Whether the first values are groups of samples, which is not written any more."""
        probes = self.records.probe(3, _PROBED)
        return bool(probes) and all(map(is_group, probes))

    def _notes(self) -> list[str]:
        """Return what was left out, and what the first values and keys look like."""
        options, records = self._options, self.records
        notes = []
        if records.databases:
            notes.append(f"left out the named databases {shown(records.databases)}")
        if records.skipped:
            notes.append(f"left out the keys {shown(sorted(records.skipped))}")
        missing = [key for key in options.skip_keys if key not in records.skipped]
        if missing:
            notes.append(f"there are no keys {shown(missing)} to leave out")
        if not len(self):
            return notes
        notes += self._key_notes()
        first = records.nodes(np.arange(min(_FIRST, len(records))))
        number = ~numbers(first.pages.reshape(-1), first.key_at, first.key_size)[1]
        if options.order == "key" and len(np.unique(first.key_size[number])) > 1:
            notes.append(
                "the keys are numbers without leading zeros, so 10 comes before 2 "
                "(--order numeric sorts them as numbers)"
            )
        if isinstance(self._decoder, Values) and self._decoder.schema.names == (VALUE,):
            probes = records.probe(3, _PROBED)
            if self._has_groups():
                notes.append(
                    "values are groups of samples, as repack once wrote them; each is "
                    "kept as one opaque byte string"
                )
            elif any(v[:1] == b"\x80" and v[1:2] in b"\2\3\4\5" and v[-1:] == b"." for v in probes):
                notes.append(
                    "values look like Python pickles, kept as opaque bytes: dsprep.write(TARGET, "
                    "ITEMS, function=...) takes a function of yours that loads them"
                )
            elif probes and all(map(looks_like_datum, probes)):
                notes.append("values look like Caffe Datum messages (--values datum reads them)")
        return notes

    def _key_notes(self) -> list[str]:
        """Return what keys are facts, and what is kept of the others."""
        records, notes = self.records, []
        samples = len(self)
        if records.facts:
            notes.append(f"left out the keys {shown(records.facts)}: facts about the dataset")
        for name, count in records.facts.items():
            if count not in (None, samples):
                notes.append(f"{shown([name])} is {count}, but there are {samples} samples")
        if self.families:
            names = ", ".join(self.families)
            notes.append(f"a sample is several records, of which each is a field: {names}")
            return notes
        if self._doubtful:
            options = " ".join(f"--field {name}" for name in self._doubtful)
            notes.append(
                f"keys of several kinds have the same numbers: each record is a sample; {options} "
                "makes them the fields of one"
            )
        if self.key is not None and self._options.keys_as is None and not self._options.fields:
            odd = records.keys.odd
            such = "" if odd is None else f" such as {shown([odd])}"
            notes.append(f"the keys are not a counter{such}: field {self.key} has them")
        elif self.key is None and not records.counter:
            notes.append("the keys are not a counter, and are left out (--keys-as key keeps them)")
        elif self.key is None and self._options.order == "file" and records.order is not None:
            notes.append("samples are numbered by offset; --keys-as key keeps their keys")
        elif self.key is None and self._options.order == "key" and records.keys.start not in (0, 1):
            notes.append("the keys do not count from 0 or 1 (--keys-as key keeps them)")
        return notes

    # --- reading -----------------------------------------------------------------------------

    def column(self, field: Field, start: int, stop: int) -> Column:
        """Return the keys of samples, or their numbers."""
        if self.families:
            return self._numbers[start:stop]
        nodes = self.records.nodes(self.records.rows(start, stop))
        flat = nodes.pages.reshape(-1)[ranges(nodes.key_at, nodes.key_size)]
        return retype(Ragged(flat, offsets_of(nodes.key_size), "bytes"), field, self.path, start)

    def sizes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return the payload bytes of each sample, from the tree alone."""
        if not self.schema.ragged:
            return super().sizes(start, stop)
        lengths, families = self.records.lengths, self.families
        if families:
            total = np.zeros(stop - start, np.int64)
            for path, f in self._fields:
                own = families.get(path)
                total += f.row_nbytes if own is None else lengths.at(own.rows[start:stop])
            return total
        if isinstance(self._decoder, Datum):
            return None
        chosen = {path for path, _ in self._fields}
        ragged = {f.name for f in self._decoder.ragged}
        if chosen & ragged and not chosen >= ragged:
            return None  # how a value divides between them is in the value
        fixed = sum(f.row_nbytes for f in self._decoder.fixed if f.name in chosen)
        out = np.full(stop - start, fixed, np.int64)
        if chosen & ragged:
            out += lengths.at(self.records.rows(start, stop)) - self._decoder.head
        for at in range(start, stop if self.key is not None else start, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            out[at - start : end - start] += self.records.nodes(self.records.rows(at, end)).key_size
        return out

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every value is stored; see `Source.extents`.

        The blocks are the records that are samples, in key order. Keys are not in them.
        """
        if self.families:
            return FileLayout(len(self), unlocated={f.name: APART for f in self.schema})
        return file_layout(self.records, self._decoder, self._fields)

    # --- describing --------------------------------------------------------------------------

    def storage(self) -> dict[str, FieldStorage]:
        """Return how the values are stored; all fields of a sample are in one."""
        if self.families:
            access = "one read per field, each at an offset of its own"
            own = FieldStorage(storage="a record per field", access=access)
            number = FieldStorage(storage="the number in the keys", access=access)
            return {f.name: own if p in self.families else number for p, f in self._fields}
        index, n = self.records, max(1, len(self))
        where = " in overflow pages" if index.big else " inside the leaf pages"
        if index.big and index.big < n:
            where += f" ({index.big:,} of {n:,}; the others in leaf pages)"
        by_key = index.big > 0 and index.order is None
        described = of_record(
            Sizes(index.smallest, index.largest, index.payload, n),
            kind="values",
            where=where,
            alone=len(self._decoder.schema) == 1,
            backward=index.backward / index.big if by_key else None,
        )
        access = described.access
        if not index.big:
            access += "; samples share their pages"
        elif self._options.order == "file" and not by_key:
            access += "; samples are numbered in the order of the file"
        elif not by_key:
            access += "; samples are numbered by their keys' numbers, wherever they are stored"
        elif index.backward >= 0.01 * index.big:
            access += "; --order file reads them as stored"
        if self.key:
            access += "; keys are in the leaf pages"
        key = FieldStorage(storage="keys in the leaf pages", access=access)
        described = replace(described, access=access)
        return {f.name: key if p == self.key else described for p, f in self._fields}
