"""The features of a file: looked for in every record, as its header comes by.

Records that are alike are taken many at a time; only one that changes what is known is looked at
by itself, and counts if its CRC is right. Of large records only the tags, lengths and names are
read, not the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError
from dsprep.formats.protobuf import Spans, Viewed, WireError
from dsprep.formats.tfrecord import example
from dsprep.formats.tfrecord.example import BYTES, INT64, TYPES, Value, parse_together
from dsprep.formats.tfrecord.features import FeatureStats
from dsprep.formats.tfrecord.framing import FOOTER, payload_right
from dsprep.storage.base import Handle

TOGETHER = 512
"""Records that are looked at together, at most."""
BLOCK = 1 << 10
"""Bytes that are read at a time of a record that is not in memory."""

_TYPES = {type_: frozenset([type_]) for type_ in TYPES}
StatsByName: TypeAlias = Mapping[str, FeatureStats]


class FileView:
    """The bytes of a stream up to `stop`, read as `example.parse` looks at them."""

    def __init__(self, stream: Handle, stop: int) -> None:
        self._stream, self._stop = stream, stop
        self._at, self._block = 0, b""

    def _read(self, start: int, stop: int) -> bytes:
        return self._stream.pread_exact(max(0, min(stop, self._stop) - start), start)

    def __getitem__(self, key: int | slice) -> int | bytes:
        if isinstance(key, slice):
            start, stop, _ = key.indices(self._stop)
            if self._at <= start and stop <= self._at + len(self._block):
                return self._block[start - self._at : stop - self._at]
            return self._read(start, stop)
        if not self._at <= key < self._at + len(self._block):
            self._at, self._block = key, self._read(key, key + BLOCK)
        return self._block[key - self._at]


class Discovery:
    """The features of the records of one file, as far as these were looked into.

    With `check_crc` a record that changes what is known has to have the right CRC: `FormatError`
    if not. `records` counts them; `reason` is why the first one cannot be taken apart, None if it
    can; `unlike` has an error for each feature that is of several types.
    """

    def __init__(self, stream: Handle, check_crc: bool, where: object) -> None:
        self._stream, self._check_crc, self._where = stream, check_crc, where
        self.stats: StatsByName = {}
        self.records = 0
        self.reason: WireError | None = None
        self.unlike: dict[str, FormatError] = {}

    @property
    def constant(self) -> StatsByName:
        """The features, if the ranges of all are the same in all records, else none."""
        every = self.stats.values()
        same = all(s.ranges is not None and s.records == self.records for s in every)
        return self.stats if same else {}

    def take(self, buffer: Bytes, starts: Ints, lengths: Ints, at: int = 0) -> None:
        """Look into records that `buffer`, the bytes from offset `at` on, has with their CRCs."""
        for i in range(0, len(starts), TOGETHER):
            a, b = starts[i : i + TOGETHER], lengths[i : i + TOGETHER]
            if not self.records or not self._take_together(buffer, a, b):
                for start, length in zip(a.tolist(), b.tolist(), strict=True):
                    self._one(buffer.data, start, length, at)

    def take_on_disk(self, start: int, length: int) -> None:
        """Look into a record that is not in memory, whose payload begins at `start`."""
        self._one(FileView(self._stream, start + length + FOOTER), start, length, 0)

    def _take_together(self, buffer: Bytes, starts: Ints, lengths: Ints) -> bool:
        """Take records that are as those before; return whether they are."""
        spans_of = None if self.reason else parse_together(buffer, starts, lengths)
        if spans_of is None:
            return False
        stats, n = {}, len(starts)
        for name, spans in spans_of.items():
            counts = _counts(buffer, spans)
            size, first = int(spans.totals.min()), int(spans.starts[0] - starts[0])
            values = int(counts.min()), int(counts.max())
            longest = int(spans.totals.max())
            ranges = None
            if size == longest and bool((spans.starts - starts == first).all()):
                ranges = [(first, first + size)] if size or spans.type == BYTES else []
            stats[name] = FeatureStats(_TYPES[spans.type], *values, size, longest, n, ranges)
        merged = self._with(stats)
        if self._is_news(merged, n):
            return False
        self.stats, self.records = merged, self.records + n
        return True

    def _one(self, data: Viewed, start: int, length: int, at: int) -> None:
        if self.reason is not None:
            return
        try:
            parsed = example.parse(data, start, start + length)
            stats = _stats(parsed, data, start)
        except WireError as error:
            self._check(data, start, length, at)
            if self.stats:
                raise self._unlike("it is not a tf.train.Example", "one", error) from error
            self.reason = error
            return
        merged = self._with(stats)
        if self._is_news(merged, 1):
            self._check(data, start, length, at)
        for name, s in merged.items():
            if len(s.types) > 1 and name not in self.unlike:
                problem, lists = f"feature {name} is of another type", _lists(self.stats[name])
                self.unlike[name] = self._unlike(problem, lists, _lists(stats[name]))
        self.stats, self.records = merged, self.records + 1

    def _unlike(self, problem: str, expected: object, actual: object) -> FormatError:
        return FormatError(
            f"the record is not like those before: {problem}",
            where=f"{self._where}, record {self.records}",
            expected=expected,
            found=actual,
            fix="name the features of all records with --field, or take the records whole with "
            "--raw-records",
        )

    def _check(self, data: Viewed, start: int, length: int, at: int) -> None:
        """Raise `FormatError` if the CRC of a record is wrong."""
        if self._check_crc and not payload_right(data, start, length):
            raise FormatError(
                "the CRC of the payload is wrong",
                where=f"{self._where}, record {self.records}, offset {at + start}",
                fix="the file is damaged there"
                + (f": --samples 0:{self.records} takes those before it" if self.records else ""),
            )

    def _with(self, stats: StatsByName) -> StatsByName:
        """Return what is known together with `stats`."""
        both = {name: s.with_(self.stats[name]) for name, s in stats.items() if name in self.stats}
        return {**self.stats, **stats, **both}

    def _is_news(self, merged: StatsByName, count: int) -> bool:
        """Return whether features are other kinds of fields by what `count` more records say."""
        before = {name: s.kind(self.records) for name, s in self.stats.items()}
        return before != {name: s.kind(self.records + count) for name, s in merged.items()}


def _lists(stats: FeatureStats) -> str:
    return " and ".join(f"a {TYPES[t]} list" for t in sorted(stats.types))


def _stats(features: Mapping[str, Value], data: Viewed, start: int) -> StatsByName:
    """Return the features of the record that begins at `start`."""
    stats = {}
    for name, value in features.items():
        nbytes = sum(b - a for a, b in value.ranges)
        count = len(value.ranges) if value.type == BYTES else nbytes // 4
        if value.type == INT64:
            parts = (np.frombuffer(data[a:b], np.uint8) for a, b in value.ranges)
            count = sum(int(np.count_nonzero(part < 128)) for part in parts)
        ranges = [(a - start, b - start) for a, b in value.ranges]
        stats[name] = FeatureStats(_TYPES[value.type], count, count, nbytes, nbytes, 1, ranges)
    return stats


def _counts(buffer: Bytes, spans: Spans) -> Ints:
    """Return how many values each record has."""
    if spans.type == BYTES:
        return np.ones(len(spans.totals), np.int64)
    if spans.type != INT64:
        return spans.totals // 4
    before = offsets_of((spans.gather(buffer) < 128).astype(np.int64))
    return np.diff(before[offsets_of(spans.totals)])
