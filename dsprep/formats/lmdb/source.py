"""An LMDB file as samples: what fields the records of a database are, and where these are.

Values are read with ``pread`` alone: no map, no lock, no limit on threads. The header of each
value's first overflow page is read along with it and compared. Pages are found without LMDB's table
of readers, so that whoever commits meanwhile may use them again: then it is a `ChangedError`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Field, Ints, Ragged, Schema
from dsprep.core.spans import offsets_of, ranges
from dsprep.errors import AmbiguousError, SchemaError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.fields import wanted
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.lmdb.datum import Datum, looks_like_datum
from dsprep.formats.lmdb.families import KEY, VALUE, fields_in, numbers
from dsprep.formats.lmdb.locate import records_of
from dsprep.formats.lmdb.parse import Records, shown
from dsprep.formats.lmdb.values import Values
from dsprep.formats.located import LazyField, LocatedSource, Parsed, Unlocated
from dsprep.formats.options import OpenOptions
from dsprep.formats.samples import listed
from dsprep.layout.describe import FieldStorage
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Column, FileLayout, Given, Grid

_PROBED = 1 << 24  # bytes of a value that is looked into when the file is opened
_AT_ONCE = 1 << 20  # samples whose sizes are looked at together
_KEYS = 100  # keys that are looked at


def open_records(records: Records, options: OpenOptions, hint: Schema | None) -> Source:
    """Return the records of one database as samples, or as the fields of samples."""
    parsed = _parse_fields(records, options, hint) or _parse_values(records, options, hint)
    attrs = hint.attrs if hint is not None else {}
    return LocatedSource(
        records.path,
        replace(parsed, attrs=attrs),
        replace(options, fields=()),  # they are chosen
        lambda _: records.file,
        records.close,
    )


class KeyField(LazyField):
    """The keys of samples."""

    def __init__(self, records: Records) -> None:
        self._records = records

    @override
    def locate(self) -> Column:
        raise Unlocated("keys are in the leaf pages of the tree, not in the values")

    @override
    def storage(self) -> FieldStorage:
        return FieldStorage(storage="keys in the leaf pages", access="its leaf page is read")

    @override
    def read(self, start: int, stop: int) -> Ragged:
        nodes = self._records.nodes(self._records.rows(start, stop))
        flat = nodes.pages.reshape(-1)[ranges(nodes.key_at, nodes.key_size)]
        return Ragged(flat, offsets_of(nodes.key_size), "bytes")

    @override
    def sizes(self, start: int, stop: int) -> Ints:
        return self._records.nodes(self._records.rows(start, stop)).key_size


# --- a record is a field ---------------------------------------------------------------------


def _parse_fields(records: Records, options: OpenOptions, hint: Schema | None) -> Parsed | None:
    """Return samples that are several records each, if that is how their fields are called."""
    # Raises `AmbiguousError` if they may be, and nothing says which fields there are.
    if options.keys_as is not None or options.values != "opaque" or records.counter:
        return None
    n = len(records)
    spread = np.unique(np.linspace(0, n - 1, min(n, _KEYS)).astype(np.int64))
    nodes = records.nodes(np.union1d(spread, np.arange(min(n, _KEYS))))
    around = fields_in([nodes.key(i) for i in range(len(nodes))])
    names = {s.path for s in options.fields} or {f.name for f in hint or ()} - {VALUE}
    if not around or not names <= {*around, KEY} or names == {KEY}:
        return None
    parts = records.numbered({k: v for k, v in around.items() if not names or k in names})
    every, counts = np.unique(np.concatenate([n for n, _ in parts.values()]), return_counts=True)
    if not names:
        if not (counts > 1).any():
            return None
        ways = [
            (
                " ".join(f"--field {shlex.quote(name)}" for name in around),
                f"a sample for each number, with {', '.join(around)}",
            ),
            (f"--keys-as {KEY}", f"{n} samples, each record one"),
        ]
        raise AmbiguousError(
            "keys of several kinds have numbers", ways, where=records.path, fix=WAY_OUT
        )
    if options.order == "file":
        raise UsageError(
            "samples of several records have no order in the file",
            where=records.path,
            fix=f"leave out --order file, or take each record with --keys-as {KEY}",
        )
    incomplete = every[counts != len(parts)]
    if len(incomplete) or any(len(own) != len(every) for own, _ in parts.values()):
        raise SchemaError(
            f"{len(incomplete)} of {len(every)} samples lack records that are fields of the others",
            where=records.path,
            found=f"samples such as {listed([*map(str, incomplete.tolist())])}",
            fix="leave their records out with --skip-key KEY, or take each record as a sample with "
            f"--keys-as {KEY}",
        )
    return _joined(records, options, hint, every, parts)


def _joined(
    records: Records,
    options: OpenOptions,
    hint: Schema | None,
    every: Ints,
    parts: Mapping[str, tuple[Ints, Ints]],
) -> Parsed:
    """Return samples with the numbers `every`; `parts` has the rows of each field behind them."""
    known = {f.name: f for f in hint or ()}
    available = {name: Field.opaque(name) for name in parts}
    if not bool((np.diff(every) == 1).all()):
        available[KEY] = Field(KEY, np.dtype(np.int64))
    pairs = wanted(options.fields, available)
    if not options.fields:
        pairs = [(path, known.get(path, f)) for path, f in pairs]
    grid = Grid(
        Blocks(Affine(1, 0), Affine(1, records.file.nbytes), records.inside),
        (records.file.nbytes,),
        1,
        (records.file.nbytes,),
    )
    columns, given = dict[str, Column](), dict[str, Given]()
    for path, f in pairs:
        if path == KEY and path not in parts:
            given[f.name] = Given(Explicit(every))
            continue
        rows = parts[path][1]
        lengths = records.lengths.at(rows)
        Values(Schema((f,))).check_lengths(lengths, lambda i: f"{records.path}, sample {i}")
        columns[f.name] = Column(grid, 1, Explicit(records.offsets.at(rows)), Explicit(lengths))
    return Parsed(
        version=f"{_version(records)}, a record per field",
        fields={f.name: f for _, f in pairs},
        layout=FileLayout(len(every), columns=columns, given=given),
        notes=(
            *_left_out(records),
            f"a sample is several records, each a field: {', '.join(parts)}",
        ),
    )


# --- a record is a sample --------------------------------------------------------------------


def _parse_values(records: Records, options: OpenOptions, hint: Schema | None) -> Parsed:
    """Return samples that are one record each."""
    key = _key(records, options, hint)
    decoder, pairs = _choose(records, options, hint, key)
    label = partial(_label, records)
    if isinstance(decoder, Values):
        _check_sizes(records, decoder)
    inside = [(path, f) for path, f in pairs if path != key]
    stored = records_of(records.blocks, decoder, inside, records.order, records.framed)
    layout = FileLayout(len(records), stored if inside else None)

    def examine() -> FileLayout:
        laws, facts = records.recover()
        return replace(layout, candidates=laws, facts=facts)

    return Parsed(
        version=_version(records),
        fields={f.name: f for _, f in pairs},
        layout=layout,
        lazy={f.name: KeyField(records) for path, f in pairs if path == key},
        notes=(*_notes(records, options, key, decoder), *getattr(decoder, "notes", ())),
        label=label,
        verify="header",
        examine=examine,
    )


def _key(records: Records, options: OpenOptions, hint: Schema | None) -> str | None:
    """Return the field that the keys become, None if they do not."""
    if options.keys_as is not None or records.counter:
        return options.keys_as
    if options.fields:
        return KEY if any(s.path == KEY for s in options.fields) else None
    known = hint is not None and hint.names != (VALUE,)
    return KEY if not known or (hint is not None and KEY in hint.names) else None


def _label(records: Records, sample: int) -> str:
    """Return the name of a sample, with its key."""
    return f"{records.path}, sample {sample}, key {records.key(sample)!r}"


def _check_sizes(records: Records, decoder: Values) -> None:
    """Raise `FormatError` unless all values have bytes that the types asked for can have."""
    n = min(len(records), 1) if isinstance(records.lengths, Affine) else len(records)
    for at in range(0, n, _AT_ONCE):
        lengths = records.lengths.at(records.rows(at, min(at + _AT_ONCE, n)))
        decoder.check_lengths(lengths, lambda i: _label(records, at + i))  # noqa: B023


def _choose(
    records: Records, options: OpenOptions, hint: Schema | None, key: str | None
) -> tuple[Values | Datum, list[tuple[str, Field]]]:
    """Return what decodes the values, and which of its fields become which."""
    typed = [s for s in options.fields if s.dtype is not None and s.path != key]
    keys = {key: Field.opaque(key)} if key else {}
    if hint is not None and key is not None and options.keys_as is None:
        hint = Schema(tuple(f for f in hint if f.name != key), hint.attrs)
    specs = options.fields
    decoder: Values | Datum
    if options.values == "datum":
        spread = records.largest - records.smallest
        decoder = Datum.probed(records.probe(64, _PROBED), spread, records.path)
    else:
        schema = Schema(tuple(s.to_field() for s in typed)) if typed else hint
        decoder = Values(schema or Schema((Field.opaque(VALUE),)))
        ragged = [f.name for f in decoder.schema.fields[:-1] if typed and f.ragged]
        if ragged:
            raise UsageError(
                f"field {ragged[0]} varies in length, so where the next begins is not known",
                fix="only the last field may vary",
            )
        # A type says what a value begins with, whatever its name.
        specs = tuple(replace(s, path=s.name) if s in typed else s for s in specs)
    available = {f.name: f for f in decoder.schema}
    if keys.keys() & available.keys():
        raise UsageError(
            f"keys cannot be the field {key}: it is there already",
            expected="another name than " + ", ".join(available),
        )
    pairs = wanted(specs, available | keys)
    chosen = {path for path, _ in pairs}
    return decoder, [*pairs, *((k, f) for k, f in keys.items() if k not in chosen)]


# --- what a person sees ----------------------------------------------------------------------


def _version(records: Records) -> str:
    return f"LMDB 0.9, data version 1, pages of {records.pages.psize} bytes"


def _left_out(records: Records) -> list[str]:
    """Return notes on the records that are not samples."""
    kinds = [
        ("named databases", records.databases, ""),
        ("keys", sorted(records.skipped), ""),
        ("keys", records.facts, ": facts about the dataset"),
    ]
    return [f"left out the {kind} {shown(names)}{reason}" for kind, names, reason in kinds if names]


def _notes(
    records: Records, options: OpenOptions, key: str | None, decoder: Values | Datum
) -> list[str]:
    """Return what was left out, and what the first values and keys look like."""
    notes = _left_out(records)
    if key == KEY and options.keys_as is None and not options.fields:
        such = f" such as {shown([records.keys.odd])}" if records.keys.odd else ""
        notes.append(f"the keys are not a counter{such}: field {KEY} has them")
    elif key is None and not records.counter:
        notes.append("the keys are not a counter, and are left out (--keys-as key keeps them)")
    if not len(records):
        return notes
    first = records.nodes(np.arange(min(_KEYS, len(records))))
    number = ~numbers(first.pages.reshape(-1), first.key_at, first.key_size)[1]
    if options.order == "key" and len(np.unique(first.key_size[number])) > 1:
        notes.append(
            "the keys are numbers without leading zeros, so 10 comes before 2 "
            "(--order numeric sorts them as numbers)"
        )
    if isinstance(decoder, Values) and decoder.schema.names == (VALUE,):
        probes = records.probe(3, _PROBED)
        if any(v[:1] == b"\x80" and v[1:2] in b"\2\3\4\5" and v[-1:] == b"." for v in probes):
            notes.append(
                "values look like Python pickles, kept as opaque bytes: dsprep.write(TARGET, "
                "ITEMS, function=...) takes a function of yours that loads them"
            )
        elif probes and all(map(looks_like_datum, probes)):
            notes.append("values look like Caffe Datum messages (--values datum reads them)")
    return notes
