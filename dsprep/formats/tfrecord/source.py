"""A TFRecord file as samples: a record is a sample, a feature is a field.

Records of one shape are read as views of the bytes that one `pread` brought, without a copy.
Every header is checked when the file is opened, every payload's CRC when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Batch, Field, Schema, empty_batch
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats import decoders
from dsprep.formats.base import Source
from dsprep.formats.options import OpenOptions
from dsprep.formats.protobuf import WireError
from dsprep.formats.tfrecord import example, features, framing
from dsprep.formats.tfrecord.example import BYTES
from dsprep.formats.tfrecord.features import RECORD, Feature
from dsprep.formats.tfrecord.locate import opaque_parts, parts_of, records_of
from dsprep.formats.tfrecord.parse import Discovery
from dsprep.formats.tfrecord.stream import Unpacked, open_stream, read_blocks
from dsprep.layout.describe import FieldStorage, of_layout
from dsprep.layout.model import FileLayout, Part
from dsprep.reading.layout_reader import LayoutReader
from dsprep.reading.records import Verify

INSPECTED = 200
"""Records that are looked into when a file is opened whose fields are known, at most."""
INSPECTED_NBYTES = 64 << 20
"""Their bytes together, about, but at least two records."""


class TFRecordSource(Source):
    """One TFRecord file opened for reading.

    Every header is read for the offsets, and every record looked into for its features, unless
    `hint` gives them.
    """

    def __init__(self, path: Path, options: OpenOptions, hint: Schema | None) -> None:
        self.path = path
        self._check_crc, self._stop = options.check_crc, options.stop
        if options.records == "opaque" and hint is not None and not features.is_opaque(hint):
            hint = Schema((), hint.attrs)  # it describes what is inside the records
        self._stream = open_stream(path)
        try:
            opaque = options.records == "opaque" or (hint is not None and features.is_opaque(hint))
            every = not opaque and not hint
            look = Discovery(self._stream, options.check_crc, path)
            # Reading the headers of a file in a store takes reading all of it.
            through = every or not (opaque or self._stream.fd >= 0)
            shown = look if through else None
            self._blocks = read_blocks(self._stream, shown, options.stop)
            mean = max(1, framing.end_of(self._blocks) // max(1, self._blocks.count))
            some = max(2, min(INSPECTED, INSPECTED_NBYTES // mean))
            for i in framing.spread(self._blocks.count, 0 if opaque or through else some):
                look.take_on_disk(self._blocks.offsets.one(i), self._blocks.lengths.one(i))
            available, notes = (None, []) if opaque else self._find_features(look, options, hint)
            self._opaque = available is None
            if available is None:
                available = {RECORD: Feature(RECORD, BYTES, Field.opaque(RECORD))}
            self._features = features.choose(available, options.fields, hint, path)
            if options.fields:
                notes += features.left_out(available, self._features)
        except BaseException:
            self.close()
            raise
        self._look = look if through else None
        self._is_confirmed = every
        # What other records have beyond these must not get lost, unless a note has named it.
        names = frozenset(f.name for f in self._features)
        left_out = options.fields or (every and look.stats.keys() - names)
        self._known = None if left_out else names
        fields = tuple(f.field for f in self._features)
        self.schema = Schema(fields, {} if hint is None else hint.attrs)
        codec = self._codec
        packed = f", {codec} over the whole file" if codec else ""
        self.version = (
            f"TFRecord of {'any' if self._opaque else 'tf.train.Example'} records{packed}"
        )
        self.notes = tuple(notes)
        parts = {f.field.name: Part(0) for f in self._features} if self._opaque else {}
        self._layout = self._layout_with(parts)
        self._reader = LayoutReader(
            self._layout, self.schema, lambda _: self._stream, path, decoders, self._label
        )

    def _layout_with(self, parts: Mapping[str, Part]) -> FileLayout:
        records = records_of(self._blocks, self._features, self._known, parts)
        return FileLayout(self._blocks.count, records)

    @property
    def _codec(self) -> str | None:
        """How the file is compressed."""
        return self._stream.codec if isinstance(self._stream, Unpacked) else None

    def _label(self, record: int) -> str:
        return f"{self.path}, record {record}"

    # --- what the records hold ---

    def _find_features(
        self, look: Discovery, options: OpenOptions, hint: Schema | None
    ) -> tuple[dict[str, Feature] | None, list[str]]:
        """Return the features, or None if records are to be kept whole, and notes."""
        if not self._blocks.count:
            known = {f.name: f for f in hint or ()}
            known |= {s.path: s.to_field() for s in options.fields if s.dtype is not None}
            available = {name: Feature(name, BYTES, f) for name, f in known.items()}
            return available, ["there are no records"]
        try:
            if look.reason is not None or not look.stats:
                raise look.reason or WireError("no features")
        except WireError as why:
            return None, [f"the records are kept whole, not taken as tf.train.Example: {why}"]
        available, notes = features.discover(look.stats, look.records, look.unlike)
        named = {s.path for s in options.fields}
        for name, error in look.unlike.items():
            if name in named or not named:
                raise error
        return available, notes

    # --- reading ---

    def __len__(self) -> int:
        return self._blocks.count

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`.

        A feature beyond those of the schema is an error too, unless fields were asked for.
        """
        if start == stop or not self._features:
            return empty_batch(self.schema)
        records = np.arange(start, stop, dtype=np.int64)
        verify: Verify = "full" if self._check_crc else "header"
        return self._reader.read(records, self.schema.names, verify, arena)

    def sizes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return each sample's bytes: exact without ragged fields, else the record's length.

        That counts names, and features that are not fields, too: an upper bound, unless there are
        int64 lists that are not padded, which take fewer bytes than their values do in memory.
        """
        if not self.schema.ragged:
            return np.full(stop - start, self.schema.fixed_nbytes, np.int64)
        return self._blocks.lengths.span(start, stop)

    def confirm(self) -> None:
        """Look into every record, if types were known when the file was opened."""
        if self._opaque or not self._blocks.count or self._is_confirmed:
            return
        look = self._look_through()
        available, _ = features.discover(look.stats, look.records, look.unlike)
        if look.reason is not None:
            raise FormatError(
                f"the records cannot be taken apart: {look.reason}", where=self.path
            ) from look.reason
        named = {f.name for f in self._features}
        for name, error in look.unlike.items():
            if name in named or self._known is not None:
                raise error
        new = sorted(look.stats.keys() - (self._known or look.stats.keys()))
        if new:
            raise FormatError(f"there is a feature {new[0]}, which was not known", where=self.path)
        known = Schema(tuple(replace(f.field, name=f.key) for f in self._features))
        features.choose(available, (), known, self.path)

    def _look_through(self) -> Discovery:
        """Return what all records hold."""
        if self._look is None:
            self._look = Discovery(self._stream, self._check_crc, self.path)
            read_blocks(self._stream, self._look, self._stop)
        return self._look

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every record is stored, and the fields with the same offset in all of them.

        See `Source.extents`, and `dsprep.formats.tfrecord.locate`.
        """
        if self._codec:
            raise UnsupportedError(
                f"samples have no offsets inside a {self._codec} stream",
                where=self.path,
                fix="dsprep convert DATA DST writes the whole dataset without compression",
            )
        self._stream.check_same()
        if self._opaque:
            return self._layout_with(opaque_parts(self._blocks, self._features, self._label))
        if not self._features:
            return self._layout_with({})
        places = self._look_through().places or {}
        if self._known is not None and not places.keys() <= self._known:
            places = {}
        return self._layout_with(parts_of(places, self._features, self._label))

    # --- what a person sees ---

    def storage(self) -> dict[str, FieldStorage]:
        """Return how the records are stored, which is the same for each field of them."""
        described = of_layout(self._layout, self.schema)
        codec = self._codec
        if codec:
            how = f"slow: {codec} runs over the whole file, which is unpacked for its first sample"
            alone = None
            if isinstance(self._stream, Unpacked) and len(self._features) == 1:
                alone = self._stream.stored.nbytes
            packed = FieldStorage(storage="", codecs=(codec,), stored_nbytes=alone, access=how)
            described = {n: replace(packed, storage=each.storage) for n, each in described.items()}
        types = {f.field.name: f"{example.TYPES[f.type]}_list" for f in self._features}
        if self._opaque:
            return described
        return {n: replace(x, storage=f"{x.storage}, {types[n]}") for n, x in described.items()}

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
