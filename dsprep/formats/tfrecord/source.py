"""A TFRecord file as samples: a record is a sample, a feature is a field.

Records of one shape are read as views of the bytes that one `pread` brought, without a copy.
Every header is checked when the file is opened, every payload's CRC when it is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Batch, Field, Schema, empty_batch, new_array
from dsprep.errors import FormatError
from dsprep.formats.base import Layout, OpenOptions, Source
from dsprep.formats.tfrecord import columns, example, features, framing
from dsprep.formats.tfrecord.columns import Misfit
from dsprep.formats.tfrecord.discovery import Discovery
from dsprep.formats.tfrecord.example import BYTES, Places, WireError
from dsprep.formats.tfrecord.extents import file_layout
from dsprep.formats.tfrecord.features import RECORD, Feature
from dsprep.formats.tfrecord.snippet import loading_code
from dsprep.formats.tfrecord.stream import open_stream
from dsprep.layout.model import FileLayout

INSPECTED = 200
"""Records that are looked into when a file is opened whose fields are known, at most."""
INSPECTED_NBYTES = 64 << 20
"""Their bytes together, about, but at least two records."""


class TFRecordSource(Source):
    """One TFRecord file opened for reading.

    Every record is looked into for its features, unless `hint` gives them.
    """

    def __init__(self, path: Path, options: OpenOptions, hint: Schema | None) -> None:
        self.path = path
        self._check_crc = options.check_crc
        if options.records == "opaque" and hint is not None and not features.is_opaque(hint):
            hint = Schema((), hint.attrs)  # it describes what is inside the records
        self._stream = open_stream(path)
        try:
            opaque = options.records == "opaque" or (hint is not None and features.is_opaque(hint))
            every = not opaque and not hint
            look = Discovery(self._stream, options.check_crc, path)
            self._index = self._stream.index(look if every else None)
            if not opaque and not every:
                self._sample(look)
            found, notes = (None, []) if opaque else self._found(look, options, hint)
            self._opaque = found is None
            if found is None:
                found = {RECORD: Feature(RECORD, BYTES, Field.opaque(RECORD))}
            self._features = features.choose(found, options.fields, hint, path)
            if options.fields:
                notes += features.left_out(found, self._features)
        except BaseException:
            self.close()
            raise
        self._looked = every
        # What other records have beyond these must not get lost, unless by the user's choice.
        self._known = None if options.fields else frozenset(f.name for f in self._features)
        fields = tuple(f.field for f in self._features)
        self.schema = Schema(fields, {} if hint is None else hint.attrs)
        packed = f", {self._stream.codec} over the whole file" if self._stream.codec else ""
        self.version = (
            f"TFRecord of {'any' if self._opaque else 'tf.train.Example'} records{packed}"
        )
        self.notes = tuple(notes)

    # --- what the records hold ---

    def _found(
        self, look: Discovery, options: OpenOptions, hint: Schema | None
    ) -> tuple[dict[str, Feature] | None, list[str]]:
        """Return the features, or None if records are to be kept whole, and notes."""
        if not self._index.count:
            known = {f.name: f for f in hint or ()}
            known |= {s.path: s.to_field() for s in options.fields if s.dtype is not None}
            found = {name: Feature(name, BYTES, f) for name, f in known.items()}
            return found, ["there are no records"]
        if look.damaged is not None and not look.records:
            record, start = look.damaged
            raise FormatError(
                "the CRC of the payload is wrong",
                where=f"{self.path}, offset {start - framing.HEADER}, record {record}",
                fix="the file is damaged there",
            )
        try:
            if look.why is not None:
                raise look.why
            if not look.seen:
                raise WireError("no features")
            return features.discover(look.seen, look.records)
        except WireError as why:
            return None, [f"the records are kept whole, not taken as tf.train.Example: {why}"]

    def _sample(self, look: Discovery) -> None:
        """Look into some records."""
        for i in self._inspected() if self._index.count else ():
            length = int(self._index.lengths_of(i, i + 1)[0])
            look.take_far(self._index.offset(i) + framing.HEADER, length)

    def _inspected(self) -> list[int]:
        """Return the records to look into: spread over the file, shortest and longest included."""
        index, count = self._index, self._index.count
        if self._stream.codec:  # what lies further back takes unpacking all before it
            count = max(1, bisect_right(range(count + 1), INSPECTED_NBYTES, key=index.offset) - 1)
        mean = max(1, index.offset(count) // count)
        chosen = set(framing.spread(count, max(2, min(INSPECTED, INSPECTED_NBYTES // mean))))
        if isinstance(index.lengths, np.ndarray):
            chosen |= {int(index.lengths[:count].argmin()), int(index.lengths[:count].argmax())}
        return sorted(chosen)

    # --- reading ---

    def __len__(self) -> int:
        return self._index.count

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`.

        Raises
        ------
        FormatError
            If a CRC is wrong, or a record is not of the schema that the others have: a feature
            beyond those of the schema counts too, unless fields were asked for.
        """
        if start == stop or not self._features:
            return empty_batch(self.schema)
        buffer, starts, lengths = self._records(start, stop, arena)
        try:
            if self._opaque:
                stride = int(lengths[0]) + framing.FRAME if (lengths == lengths[0]).all() else 0
                places = {RECORD: Places(BYTES, starts, lengths, lengths, stride)}
            else:
                places = dict(columns.locate(buffer, starts, lengths, self._features, self._known))
            return {
                f.field.name: columns.column(buffer, places[f.name], f, arena)
                for f in self._features
            }
        except Misfit as m:
            raise m.named(lambda i: f"{self.path}, record {start + i}") from m

    def _records(
        self, start: int, stop: int, arena: Arena | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return records as a buffer, and where in it each payload starts and how long it is."""
        begin, end = self._index.offset(start), self._index.offset(stop)
        buffer = new_array(arena, "read", (end - begin,), np.dtype(np.uint8))
        self._stream.read_into(buffer, begin)
        lengths = self._index.lengths_of(start, stop)
        starts = np.cumsum(lengths + framing.FRAME) - lengths - framing.FOOTER
        heads = buffer[(starts - framing.HEADER)[:, None] + np.arange(framing.HEADER)]
        bad = (heads != framing.headers(lengths)).any(axis=1)
        what = "the header has changed since the file was opened"
        if self._check_crc and not bad.any():
            at = (starts + lengths)[:, None] + np.arange(framing.FOOTER)
            stored = buffer[at].view("<u4").reshape(-1)
            bad = framing.payload_crcs(buffer, starts, lengths) != stored
            what = "the CRC of the payload is wrong"
        if bad.any():
            i = start + int(bad.argmax())
            raise FormatError(
                what,
                where=f"{self.path}, offset {self._index.offset(i)}, record {i}",
                fix="the file is damaged there",
            )
        return buffer, starts, lengths

    def sizes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return each sample's bytes: exact without ragged fields, else the record's length.

        That counts names, and features that are not fields, too: an upper bound, unless there are
        int64 lists that are not padded, which take fewer bytes than their values do in memory.
        """
        if not self.schema.ragged:
            return np.full(stop - start, self.schema.fixed_nbytes, np.int64)
        return self._index.lengths_of(start, stop)

    def confirm(self) -> None:
        """Look into every record, if types were known when the file was opened."""
        if self._opaque or not self._index.count or self._looked:
            return
        look = Discovery(self._stream, self._check_crc, self.path)
        self._stream.index(look)
        try:
            found, _ = features.discover(look.seen, look.records)
        except WireError as error:
            raise FormatError(
                f"the records cannot be taken apart: {error}", where=self.path
            ) from error
        new = sorted(found.keys() - (self._known or found.keys()))
        if new:
            raise FormatError(f"there is a feature {new[0]}, which was not known", where=self.path)
        known = Schema(tuple(replace(f.field, name=f.name) for f in self._features))
        features.choose(found, (), known, self.path)

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every record lies, and the fields that have one place in all of them.

        See `Source.extents`, and `dsprep.formats.tfrecord.extents`.
        """
        try:
            return file_layout(
                self._stream, self._index, self._features, self._opaque, self._known, progress
            )
        except Misfit as m:
            raise m.named(lambda i: f"{self.path}, record {i}") from m

    # --- what a person sees ---

    def layouts(self) -> dict[str, Layout]:
        """Return how the records lie, which is the same for each field of them."""
        lengths, codec = self._index.lengths, self._stream.codec
        if isinstance(lengths, np.ndarray):
            low, high = int(lengths.min()) + framing.FRAME, int(lengths.max()) + framing.FRAME
            storage = f"records of {low:,} to {high:,} bytes"
            access = "one read at an offset known only after all headers have been read"
        else:
            storage = f"records of {lengths + framing.FRAME:,} bytes, constant stride"
            access = "one read at a computed offset"
        if codec:
            access = f"slow: {codec} runs over the whole file, so what lies before is unpacked too"
        alone = self._stream.stored_nbytes if len(self._features) == 1 else None
        codecs = (codec,) if codec else ()
        mean = float(np.mean(lengths)) + framing.FRAME if np.size(lengths) else 0.0
        return {
            f.field.name: Layout(
                storage=storage if self._opaque else f"{storage}, {example.TYPES[f.type]}_list",
                codecs=codecs,
                stored_nbytes=alone,
                access=access,
                reads=None if codec else 1,
                read_nbytes=None if codec else mean,
            )
            for f in self._features
        }

    def loading_code(self) -> str:
        """Return a tf.data program; see `Source.loading_code`."""
        return loading_code(self.path, self._stream.codec, self._features, self._opaque)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
