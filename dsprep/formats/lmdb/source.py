"""Reads an LMDB file as samples, with ``pread`` alone: no map, no lock, no limit on threads.

The tree is read once when the file is opened, and every node is checked; of it stays the number of
each leaf page and of its first record. A read loads the leaves of its samples again, finds where
their values lie, and fetches neighbouring values with one call. The header of each value's first
overflow page is fetched along with it and compared, so a file that was changed since it was opened
is noticed. The file must not be written to while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.pread import NEAR, move_spans, packed, ranges, read_spans
from dsprep.core.schema import Arena, Batch, Bytes, Field, Ints, Ragged, Schema, new_array
from dsprep.core.storage import let_go, pread_most
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats.base import Layout, OpenOptions, Source, retype, wanted
from dsprep.formats.lmdb import families
from dsprep.formats.lmdb.datum import Datum, looks_like_datum
from dsprep.formats.lmdb.extents import Finder, Found, file_layout, find, history
from dsprep.formats.lmdb.families import KEY, VALUE, Family
from dsprep.formats.lmdb.frame import wrong_headers
from dsprep.formats.lmdb.group_values import is_group
from dsprep.formats.lmdb.index import Index, build, named_databases, numbers
from dsprep.formats.lmdb.meta import Database
from dsprep.formats.lmdb.pages import HEADER, P_LEAF, Nodes, Pages
from dsprep.formats.lmdb.snippet import loading_code
from dsprep.formats.lmdb.values import Values
from dsprep.formats.samples import listed
from dsprep.layout.model import FileLayout

_U8 = np.dtype(np.uint8)
_PROBED = 1 << 24  # bytes of a value that is looked into when the file is opened
_AT_ONCE = 1 << 20  # samples whose sizes are found at once


class LmdbSource(Source):
    """The records of one database as samples.

    Parameters
    ----------
    path
        The environment.
    file
        Its data file.
    options, hint
        As for `Format.open`.
    """

    def __init__(
        self,
        path: Path,
        file: Path,
        options: OpenOptions,
        hint: Schema | None,
        *,
        survey: bool = False,
    ) -> None:
        self._finder = Finder() if survey else None
        self.path = path
        self.file = file
        self._options = options
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._pages = Pages(self._fd, path)
            self._index = self._open_index()
            self.families = self._families(hint)
            self.key = self._key(hint)
            self._decoder, self._fields = self._choose(hint)
        except BaseException:
            self.close()
            raise
        attrs = hint.attrs if hint is not None else {}
        self.schema = Schema(tuple(f for _, f in self._fields), attrs)
        self.version = f"LMDB 0.9, data version 1, pages of {self._pages.psize} bytes"
        self.notes = (*self._notes(), *getattr(self._decoder, "notes", ()))

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            let_go(self._fd)
            self._fd = -1

    # --- what there is -----------------------------------------------------------------------

    def _open_index(self) -> Index:
        options, pages = self._options, self._pages
        database = pages.meta.main
        if options.database is not None:
            database = self._named(options.database)
        self._database = database
        seen = self._finder.add if self._finder is not None else None
        index = build(pages, database, options.order, options.skip_keys, seen)
        if index.databases and not len(index):
            raise SchemaError(
                "the main database holds only named databases",
                where=self.path,
                expected="one of " + _shown(index.databases),
                fix="choose one with --db NAME",
            )
        return index

    def _named(self, name: str) -> Database:
        databases = named_databases(self._pages)
        found = databases.get(name.encode("utf-8", "surrogateescape"))
        if found is None:
            raise SchemaError(
                f"there is no database {name}",
                where=self.path,
                expected="one of " + _shown(databases) if databases else "no named database",
            )
        return found

    def _families(self, hint: Schema | None) -> dict[str, Family]:
        """Return the families of keys that are fields, by their names; empty if there are none."""
        options, index = self._options, self._index
        found = index.keys.families() if options.keys_as is None else []
        names = families.field_names(found) if found and options.values == "opaque" else None
        self._doubtful: tuple[str, ...] = ()
        if names is None:
            return {}
        if options.fields:
            chosen = {s.path for s in options.fields} <= {*names, KEY}
        elif hint is not None and hint.names != (VALUE,):
            chosen = set(names) == set(hint.names) - {KEY}
        else:
            counts = index.facts.values()
            chosen = families.are_fields(names, len(found[0].numbers), counts)
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
        return dict(zip(names, found, strict=True))

    def _key(self, hint: Schema | None) -> str | None:
        """Return the field that the keys become, None if they do not."""
        options = self._options
        if options.keys_as is not None or self._index.counter or self.families:
            return options.keys_as
        if options.fields:
            return KEY if any(s.path == KEY for s in options.fields) else None
        known = hint is not None and hint.names != (VALUE,)
        return KEY if not known or (hint is not None and KEY in hint.names) else None

    def check_sizes(self) -> None:
        """Raise `FormatError` unless all values have bytes that the types asked for can have."""
        index, decoder = self._index, self._decoder
        if not len(self) or not isinstance(decoder, Values):
            return
        ends = np.array([index.smallest, index.largest])
        with suppress(FormatError):
            decoder.check_lengths(ends, lambda i: "")
            return
        for start in range(0, len(self), _AT_ONCE):
            nodes = self._nodes(index.records(start, min(start + _AT_ONCE, len(self))), None)

            def label(i: int, start: int = start, nodes: Nodes = nodes) -> str:
                return f"{self.path}, sample {start + i}, key {nodes.key(i)!r}"

            decoder.check_lengths(nodes.size, label)

    def _choose(self, hint: Schema | None) -> tuple[Values | Datum, list[tuple[str, Field]]]:
        """Return what decodes the values, and which of its fields become which."""
        options = self._options
        if self.families:
            return Values(Schema((Field.opaque(VALUE),))), []
        typed = [s for s in options.fields if s.dtype is not None and s.path != self.key]
        key = {self.key: Field.opaque(self.key)} if self.key else {}
        decoder: Values | Datum
        if hint is not None and self.key is not None and options.keys_as is None:
            hint = Schema(tuple(f for f in hint if f.name != self.key), hint.attrs)
        if options.values == "datum":
            index = self._index
            decoder = Datum.probed(self._probe(64), index.largest - index.smallest, self.path)
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
            decoder = Values(hint if hint else Schema((Field.opaque(VALUE),)))
        available = {f.name: f for f in decoder.schema}
        if key.keys() & available.keys():
            raise UsageError(
                f"keys cannot be the field {self.key}: it is there already",
                expected="another name than " + ", ".join(available),
            )
        pairs = wanted(options.fields, available | key)
        asked = {path for path, _ in pairs}
        return decoder, [*pairs, *((k, f) for k, f in key.items() if k not in asked)]

    def _probe(self, most: int) -> list[bytes]:
        """Return up to `most` values, spread over the dataset, that are not very large."""
        spread = np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64))
        found = []
        for i in spread.tolist():
            nodes = self._nodes(self._index.records(i, i + 1), None)
            if int(nodes.size[0]) <= _PROBED:
                found.append(self._values(nodes, None).tobytes())
        return found

    def _notes(self) -> list[str]:
        """Return what was left out, and what the first values and keys look like."""
        options, index = self._options, self._index
        notes = []
        if index.databases:
            notes.append(f"left out the named databases {_shown(index.databases)}")
        if index.skipped:
            notes.append(f"left out the keys {_shown(sorted(index.skipped))}")
        missing = [key for key in options.skip_keys if key not in index.skipped]
        if missing:
            notes.append(f"there are no keys {_shown(missing)} to leave out")
        if not len(self):
            return notes
        notes += self._key_notes()
        first = self._edge(0)
        flat = first.pages.reshape(-1)
        number = ~numbers(flat, first.key_at, first.key_size)[1]
        if options.order == "key" and number.any():
            shown = np.unique(first.key_size[number])
            if len(shown) > 1:
                notes.append(
                    "the keys are numbers without leading zeros, so 10 comes before 2 "
                    "(--order numeric sorts them as numbers)"
                )
        if isinstance(self._decoder, Values) and self._decoder.schema.names == (VALUE,):
            probes = self._probe(3)
            if probes and all(map(is_group, probes)):
                notes.append(
                    "values are groups of samples that dsprep packed: without their sidecar, which "
                    "tells the fields, each is one opaque byte string"
                )
            elif any(v[:1] == b"\x80" and v[1:2] in b"\2\3\4\5" and v[-1:] == b"." for v in probes):
                notes.append("values look like Python pickles; dsprep keeps them as opaque bytes")
            elif probes and all(map(looks_like_datum, probes)):
                notes.append("values look like Caffe Datum messages (--values datum reads them)")
        return notes

    def _key_notes(self) -> list[str]:
        """Return what keys are facts, and what is kept of the others."""
        index, notes = self._index, []
        samples = (
            len(self) if not self.families else len(next(iter(self.families.values())).numbers)
        )
        if index.facts:
            notes.append(f"left out the keys {_shown(index.facts)}: facts about the dataset")
        for name, count in index.facts.items():
            if count not in (None, samples):
                notes.append(f"{_shown([name])} is {count}, but there are {samples} samples")
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
            odd = index.keys.odd
            shown = "" if odd is None else f" such as {_shown([odd])}"
            notes.append(f"the keys are not a counter{shown}: field {self.key} has them")
        elif self.key is None and not index.counter:
            notes.append("the keys are not a counter, and are left out (--keys-as key keeps them)")
        elif self.key is None and self._options.order == "file" and self._reordered():
            notes.append("samples are numbered by place; --keys-as key keeps which is which")
        elif self.key is None and self._options.order == "key" and index.keys.start not in (0, 1):
            notes.append("the keys do not count from 0 or 1 (--keys-as key keeps them)")
        return notes

    def _reordered(self) -> bool:
        order = self._index.order
        return order is not None and bool((np.diff(order) < 0).any())

    def _edge(self, leaf: int) -> Nodes:
        """Return all nodes of one leaf."""
        numbers_ = self._index.leaves[leaf : leaf + 1]
        out = np.empty(self._pages.psize, np.uint8)
        pages, counts = self._pages.load(numbers_, P_LEAF, out)
        slots = np.arange(counts[0])
        return self._pages.nodes(pages, numbers_, np.zeros_like(slots), slots)

    # --- reading -----------------------------------------------------------------------------

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        nodes = self._nodes(self._index.records(start, stop), arena)

        def label(i: int) -> str:
            return f"{self.path}, sample {start + i}, key {nodes.key(i)!r}"

        batch = self._decoder.decode(self._values(nodes, arena), nodes.size, label)
        if self.key:
            lengths = packed(nodes.key_size)
            flat = nodes.pages.reshape(-1)[ranges(nodes.key_at, nodes.key_size)]
            batch[self.key] = Ragged(flat, lengths, "bytes")
        return {
            field.name: retype(batch[path], field, self.path, start) for path, field in self._fields
        }

    def values_of(self, records: Ints, arena: Arena | None, tag: str) -> tuple[Bytes, Ints]:
        """Return the values of some records one after another, and the bytes of each.

        `tag` says which memory of `arena` to use.
        """
        nodes = self._nodes(records, arena)
        return self._values(nodes, arena, f"read.{tag}"), nodes.size

    def sizes_of(self, records: Ints) -> Ints:
        """Return the bytes of the values of some records."""
        return self._nodes(records, None).size

    def key_of(self, record: int) -> bytes:
        """Return the key of a record."""
        return self._nodes(np.array([record]), None).key(0)

    def _nodes(self, records: Ints, arena: Arena | None) -> Nodes:
        """Return the nodes of `records`, from their leaves read again."""
        leaves, rows, slots = self._index.locate(records)
        numbers_ = self._index.leaves[leaves]
        out = new_array(arena, "read.pages", (len(leaves) * self._pages.psize,), _U8)
        pages, counts = self._pages.load(numbers_, P_LEAF, out)
        first = self._index.first
        if (counts != first[leaves + 1] - first[leaves]).any():
            raise self._changed("the number of records on a leaf page")
        return self._pages.nodes(pages, numbers_, rows, slots)

    def _values(self, nodes: Nodes, arena: Arena | None, tag: str = "read.values") -> Bytes:
        """Return the values one after another: uint8, shape ``(total,)``."""
        sizes, big = nodes.size, nodes.big
        places = packed(sizes)
        total, runs = int(places[-1]), int(big.sum())
        if total > self._pages.nbytes:
            raise FormatError(
                "values overlap: together they are larger than the file",
                where=self.path,
                expected=f"at most {self._pages.nbytes} bytes",
                found=total,
            )
        at, size, place = nodes.offset[big], sizes[big], places[:-1][big]
        if (np.diff(at) < 0).any():
            order = np.argsort(at, kind="stable")
            at, size, place = at[order], size[order], place[order]
        # The page header before a value is read too, with all since a near value before it: one
        # buffer instead of two.
        lead = np.full(runs, HEADER, np.int64)
        gap = at[1:] - at[:-1] - size[:-1]
        lead[1:] = np.where((gap >= HEADER) & (gap <= NEAR), gap, HEADER)
        there = packed(lead) + total
        out = new_array(arena, tag, (int(there[-1]),), _U8)
        if runs < len(nodes):
            small = ~big
            flat = nodes.pages.reshape(-1)
            move_spans(flat, nodes.inline_at[small], sizes[small], out, places[:-1][small])
        if runs:
            spans = np.empty((3, runs, 2), np.int64)
            spans[0, :, 0], spans[0, :, 1] = at - lead, at
            spans[1, :, 0], spans[1, :, 1] = lead, size
            spans[2, :, 0], spans[2, :, 1] = there[:-1], place
            offsets, lengths, targets = spans.reshape(3, -1)
            read_spans(self._fd, offsets, lengths, out, targets, self.path)
            headers = out[(there[1:] - HEADER)[:, None] + np.arange(HEADER)]
            bad = wrong_headers(headers, at - HEADER, size, self._pages.psize)
            if bad.any():
                page = int(at[int(bad.argmax())]) // self._pages.psize
                raise self._changed(f"the header of page {page}")
        return out[:total]

    def _changed(self, what: str) -> FormatError:
        return FormatError(
            f"{what} is not what it must be",
            where=self.path,
            fix="the file is damaged, or was changed since it was opened",
        )

    def sizes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return the payload bytes of each sample, from the tree alone."""
        if not self.schema.ragged:
            return super().sizes(start, stop)
        if isinstance(self._decoder, Datum):
            return None
        chosen = {path for path, _ in self._fields}
        ragged = {f.name for f in self._decoder.ragged}
        if chosen & ragged and not chosen >= ragged:
            return None  # how a value divides between them is in the value
        fixed = sum(f.row_nbytes for f in self._decoder.fixed if f.name in chosen)
        out = np.full(stop - start, fixed, np.int64)
        for at in range(start, stop, _AT_ONCE):
            end = min(at + _AT_ONCE, stop)
            nodes = self._nodes(self._index.records(at, end), None)
            if chosen & ragged:
                out[at - start : end - start] += nodes.size - self._decoder.head
            if self.key is not None:
                out[at - start : end - start] += nodes.key_size
        return out

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every value lies; see `Source.extents`.

        The leaf pages are read again, unless the file was opened by `Format.survey`.
        The blocks are the records that are samples, in key order. Keys have no place in them.
        """
        index = self._index

        def label(i: int) -> str:
            key = self._nodes(self._index.records(i, i + 1), None).key(0)
            return f"{self.path}, sample {i}, key {key!r}"

        records = self.places(progress)
        layout = file_layout(records, index, self._decoder, self._fields, self.inside, label)
        named = self._options.database is not None
        laws, facts = history(records, self._database.depth, named)
        return replace(layout, candidates=laws, facts=facts)

    def places(self, progress: Callable[[int, int], None] | None = None) -> Found:
        """Return where the values lie, in key order."""
        if self._finder is not None:
            found, self._finder = self._finder.found(self._pages), None
            return found
        return find(self._pages, self._index, progress)

    @property
    def inside(self) -> str:
        """The file below the path of the dataset: empty if that is the file."""
        return "" if self.file == self.path else self.file.name

    def first(self, nbytes: int) -> tuple[bytes, bytes]:
        """Return the key of the first sample and the first bytes of its value."""
        if not len(self):
            return b"", b""
        nodes = self._nodes(self._index.records(0, 1), None)
        size = min(nbytes, int(nodes.size[0]))
        return nodes.key(0), pread_most(self._fd, size, int(nodes.offset[0]))

    # --- describing --------------------------------------------------------------------------

    def layouts(self) -> dict[str, Layout]:
        """Return how the values lie; all fields of a sample are in one."""
        index = self._index
        n = max(1, len(index))
        if not index.big:
            storage = "values inside the leaf pages"
            access = "one page read per sample, and samples share their pages"
        else:
            rest = "" if index.big >= n else f" ({index.big} of {n}; the others in leaf pages)"
            storage = f"values in overflow pages{rest}"
            scattered = index.backward / index.big
            access = (
                "a read of a leaf page, then one of the value (with a sidecar: of that alone); "
            )
            if index.order is not None and self._options.order == "file":
                access += "samples are numbered as they lie in the file"
            elif index.order is not None:
                access += "samples are numbered by their keys' numbers, however they lie"
            elif scattered < 0.01:
                access += "neighbours in key order are neighbours in the file"
            else:
                access += (
                    f"but {scattered:.0%} of them lie before the sample before, so ranges are "
                    "scattered (--order file reads them as they lie)"
                )
        if self.key:
            access += "; keys are in the leaf pages"
        alone = len(self._decoder.schema) == 1
        stored = index.payload if alone else None
        where = storage if alone else f"{storage}, all fields of a sample in one value"
        layout = Layout(
            storage=where,
            stored_nbytes=stored,
            access=access,
            reads=1 + index.big / n,
            read_nbytes=self._pages.psize + index.payload / n * (index.big > 0),
        )
        key = Layout(storage="keys in the leaf pages", access=access)
        return {f.name: key if p == self.key else layout for p, f in self._fields}

    def loading_code(self) -> str:
        """Return a py-lmdb program that loads sample 0; see `Source.loading_code`."""
        key = self._nodes(self._index.records(0, 1), None).key(0) if len(self) else None
        database = self._options.database
        return loading_code(self.file, database, self._decoder, self.key, key)


def _shown(names: Iterable[bytes]) -> str:
    """Return keys or names of databases for a message."""
    return listed([name.decode("utf-8", "backslashreplace") for name in names])
