"""A TFRecord file as samples: a record is a sample, a feature is a field.

Every header is read and checked when the file is opened, and every record looked into for its
features, unless they are known; every payload's CRC is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.formats.base import Source
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.example import BYTES
from dsprep.formats.tfrecord.features import RECORD, Feature
from dsprep.formats.tfrecord.locate import opaque_parts, parts_of, records_of
from dsprep.formats.tfrecord.parse import Discovery
from dsprep.formats.tfrecord.stream import Unpacked, open_stream, read_blocks
from dsprep.layout.model import Blocks, FileLayout, Part
from dsprep.storage.base import Handle

INSPECTED = 200
"""Records that are looked into when a file is opened whose fields are known, at most."""
INSPECTED_NBYTES = 64 << 20
"""Their bytes together, about, but at least two records."""


def open_tfrecord(path: Path, options: OpenOptions, hint: Schema | None) -> Source:
    """Open a file; see `Format.open`."""
    stream = open_stream(path)
    with failure_closes(stream.close):
        parsed = _parse(path, stream, options, hint)
        options = replace(options, fields=())  # they are chosen
        return LocatedSource(path, parsed, options, stream.opened, stream.close)


def _parse(path: Path, stream: Handle, options: OpenOptions, hint: Schema | None) -> Parsed:
    if options.records == "opaque" and hint is not None and not features.is_opaque(hint):
        hint = Schema((), hint.attrs)  # it describes what is inside the records
    opaque = options.records == "opaque" or (hint is not None and features.is_opaque(hint))
    # Reading the headers of a file in a store takes reading all of it.
    through = not opaque and (not hint or stream.fd < 0)
    look = Discovery(stream, options.check_crc, path)
    blocks = read_blocks(stream, look if through else None, options.stop)
    if not (opaque or through):
        some = max(2, min(INSPECTED, INSPECTED_NBYTES * blocks.count // max(1, stream.nbytes)))
        spread = np.linspace(0, blocks.count - 1, min(blocks.count, some)).astype(np.int64)
        for i in np.unique(spread).tolist():
            look.take_on_disk(blocks.offsets.one(i), blocks.lengths.one(i))
    available, notes = (None, []) if opaque else _find_features(look, blocks, options, hint)
    opaque = available is None
    if available is None:
        available = {RECORD: Feature(RECORD, BYTES, Field.opaque(RECORD))}
    chosen = features.choose(available, options.fields, hint, path)
    if options.fields:
        notes += features.left_out(available, chosen)
    # What other records have beyond these must not get lost, unless a note has named it.
    names = frozenset(f.name for f in chosen)
    left_out = options.fields or (not hint and look.stats.keys() - names)
    known = None if left_out else names

    def label(record: int) -> str:
        return f"{path}, record {record}"

    def with_parts(parts: Mapping[str, Part]) -> FileLayout:
        return FileLayout(blocks.count, records_of(blocks, chosen, known, parts))

    def seen(look: Discovery) -> FileLayout:
        """Return the layout with the positions that all records have, which were looked into."""
        if hint and blocks.count:
            _confirm(look, chosen, known, path)
        constant = look.constant
        if known is not None and not constant.keys() <= known:
            constant = {}
        return with_parts(parts_of(constant, chosen, label))

    def examine() -> FileLayout:
        again = Discovery(stream, options.check_crc, path)
        read_blocks(stream, again, options.stop)
        return seen(again)

    layout = with_parts(opaque_parts(blocks, chosen, label) if opaque else {})
    packed = (stream.codec, stream.stored.nbytes) if isinstance(stream, Unpacked) else None
    over = f", {packed[0]} over the whole file" if packed else ""
    return Parsed(
        version=f"TFRecord of {'any' if opaque else 'tf.train.Example'} records{over}",
        fields={f.field.name: f.field for f in chosen},
        layout=seen(look) if through and not opaque else layout,
        attrs={} if hint is None else hint.attrs,
        notes=tuple(notes),
        label=label,
        verify="full" if options.check_crc else "header",
        examine=None if opaque or through else examine,
        packed=packed,
    )


def _find_features(
    look: Discovery, blocks: Blocks, options: OpenOptions, hint: Schema | None
) -> tuple[dict[str, Feature] | None, list[str]]:
    """Return the features, or None if records are to be kept whole, and notes."""
    if not blocks.count:
        known = {f.name: f for f in hint or ()}
        known |= {s.path: s.to_field() for s in options.fields if s.dtype is not None}
        available = {name: Feature(name, BYTES, f) for name, f in known.items()}
        return available, ["there are no records"]
    if look.reason is not None or not look.stats:
        reason = look.reason or "no features"
        return None, [f"the records are kept whole, not taken as tf.train.Example: {reason}"]
    available, notes = features.discover(look.stats, look.records, look.unlike)
    named = {s.path for s in options.fields}
    for name, error in look.unlike.items():
        if name in named or not named:
            raise error
    return available, notes


def _confirm(
    look: Discovery, chosen: list[Feature], known: frozenset[str] | None, path: Path
) -> None:
    """Raise `FormatError` if the records, all looked into, are not as was known beforehand."""
    if look.reason is not None:
        raise FormatError(
            f"the records cannot be taken apart: {look.reason}", where=path
        ) from look.reason
    named = {f.name for f in chosen}
    for name, error in look.unlike.items():
        if name in named or known is not None:
            raise error
    new = sorted(look.stats.keys() - (known or look.stats.keys()))
    if new:
        raise FormatError(f"there is a feature {new[0]}, which was not known", where=path)
    available, _ = features.discover(look.stats, look.records, look.unlike)
    schema = Schema(tuple(replace(f.field, name=f.key) for f in chosen))
    features.choose(available, (), schema, path)
