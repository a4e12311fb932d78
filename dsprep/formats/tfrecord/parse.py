"""What the records of a file hold: looked for in every record, as its header comes by.

Records that are alike are taken many at a time; only one that changes what is known is looked at
by itself, and counts if its CRC is right. Of large records only the tags, lengths and names are
read, not the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.errors import FormatError
from dsprep.formats.protobuf import Viewed, WireError
from dsprep.formats.tfrecord import example
from dsprep.formats.tfrecord.batch_parser import TAIL, is_padding, parse_together
from dsprep.formats.tfrecord.example import BYTES, INT64, TYPES, FeatureSpans, Value
from dsprep.formats.tfrecord.features import FeatureStats
from dsprep.formats.tfrecord.fields import gather
from dsprep.formats.tfrecord.framing import FOOTER, payload_right
from dsprep.storage.base import Handle

FEW = 8
"""Records that are looked at one by one rather than together."""
MOST_UNLIKE = 32
"""How many more times than not some records may differ before the rest is looked at one by one."""
BLOCK = 4 << 10
"""Bytes that are read at a time of a record that is not in memory."""
PIECE = 1 << 20

_TYPES = {type_: frozenset([type_]) for type_ in TYPES}
StatsByName: TypeAlias = Mapping[str, FeatureStats]
Outline: TypeAlias = list[tuple[int, bytes]]
"""Bytes of a record by their offsets in it."""


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
    """What has been seen in the records of one file, by feature.

    With `check_crc` a record counts only if its CRC is right; `records` counts them. `reason` is
    why the first ones cannot be taken apart, None if they can; `unlike` has an error for each
    feature that is of several types; `damaged` the number and the offset of the first record that
    was passed over, as its CRC is wrong. `alike`: all records so far differ in values alone.
    """

    def __init__(self, stream: Handle, check_crc: bool, where: object) -> None:
        self._stream, self._check_crc, self._where = stream, check_crc, where
        self.stats: dict[str, FeatureStats] = {}
        self.records = self._passed = 0
        self.reason: WireError | None = None
        self.unlike: dict[str, FormatError] = {}
        self.damaged: tuple[int, int] | None = None
        self.alike = True
        self._outline: Outline | None = None

    def take(self, buffer: Bytes, starts: Ints, lengths: Ints, at: int = 0) -> None:
        """Look into records that `buffer`, the bytes from offset `at` on, has with their CRCs."""
        parts = [(0, len(starts))]
        alike = unlike = 0
        while parts and self.reason is None:
            a, b = parts.pop()
            stats, outline = None, None
            if unlike <= MOST_UNLIKE + alike:
                stats, outline = _together(buffer, starts[a:b], lengths[a:b])
            if stats is not None and not self._changes(stats):
                self._add(stats, outline)
                alike += 1
                continue
            unlike += stats is None
            if b - a <= FEW or unlike > MOST_UNLIKE + alike:
                for start, length in zip(starts[a:b].tolist(), lengths[a:b].tolist(), strict=True):
                    self._one(example.view(buffer), start, length, at)
            else:
                middle = (a + b) // 2
                parts += [(middle, b), (a, middle)]

    def take_on_disk(self, start: int, length: int) -> None:
        """Look into a record that is not in memory, whose payload begins at `start`."""
        if self.reason is None:
            self._one(FileView(self._stream, start + length + FOOTER), start, length, 0)

    def _one(self, data: Viewed, start: int, length: int, at: int) -> None:
        if self.reason is not None:
            return
        try:
            parsed = example.parse(data, start, start + length)
            stats = _stats(parsed, data)
        except WireError as error:
            if self._sound(data, start, length, at):
                if self.stats:
                    raise self._unlike("it is not a tf.train.Example", "one", error) from error
                self.reason = error
            return
        if not self._changes(stats) or self._sound(data, start, length, at):
            for name, added in stats.items():
                known = self.stats.get(name, added).types
                if added.types != known and name not in self.unlike:
                    problem = f"feature {name} is of another type"
                    self.unlike[name] = self._unlike(problem, _lists(known), _lists(added.types))
            self._add(stats, _outline(parsed, data, start, length) if self.alike else None)

    def _unlike(self, problem: str, expected: object, actual: object) -> FormatError:
        return FormatError(
            f"the record is not like those before: {problem}",
            where=f"{self._where}, record {self.records + self._passed}",
            expected=expected,
            found=actual,
            fix="name the features of all records with --field, or take the records whole with "
            "--raw-records",
        )

    def _sound(self, data: Viewed, start: int, length: int, at: int) -> bool:
        """Whether the CRC of a record is right; if not, the record is passed over."""
        right = not self._check_crc or payload_right(data, start, length)
        if not right:
            self.damaged = self.damaged or (self.records + self._passed, at + start)
            self.alike = False
            self._passed += 1
        return right

    def _changes(self, stats: StatsByName) -> bool:
        """Whether `stats` say more of the records than is known."""
        if stats.keys() - self.stats.keys():
            return True
        return any(
            (name not in stats and s.records == self.records)
            or (name in stats and not s.covers(stats[name]) and s.changed_by(stats[name]))
            for name, s in self.stats.items()
        )

    def _add(self, stats: StatsByName, outline: Outline | None) -> None:
        if not self.records:
            self._outline = outline
        self.alike &= outline is not None and outline == self._outline
        for name, added in stats.items():
            known = self.stats.get(name)
            if known is not None and known.covers(added):
                known.records += added.records
            else:
                self.stats[name] = added if known is None else known.with_(added)
        self.records += max((s.records for s in stats.values()), default=1)


def _lists(types: frozenset[int]) -> str:
    return " and ".join(f"a {TYPES[t]} list" for t in sorted(types))


def _stats(features: Mapping[str, Value], data: Viewed) -> StatsByName:
    """Return what one record holds."""
    stats = {}
    for name, value in features.items():
        nbytes = sum(b - a for a, b in value.ranges)
        if value.type == BYTES:
            count = len(value.ranges)
        elif value.type == INT64:
            count = sum(_varints(data, a, b) for a, b in value.ranges)
        else:
            count = nbytes // 4
        stats[name] = FeatureStats(_TYPES[value.type], count, count, nbytes, nbytes, 1)
    return stats


def _varints(data: Viewed, start: int, stop: int) -> int:
    """Return how many varints end in a range."""
    if stop == start + 1:
        return 1
    count = 0
    for a in range(start, stop, PIECE):
        part = np.frombuffer(data[a : min(stop, a + PIECE)], np.uint8)
        count += int(np.count_nonzero(part < 128))
    return count


def _together(
    buffer: Bytes, starts: Ints, lengths: Ints
) -> tuple[StatsByName | None, Outline | None]:
    """Return what records hold that have the same features, and what they have beside values.

    None if they have not the same features; None if they differ in more than values and padding.
    """
    spans_of = outline = None
    start, length = int(starts[0]), int(lengths[0])
    if (lengths != length).any():
        length = _unpadded(buffer, starts, lengths)
    if length:
        spans_of = example.parse_alike(buffer, 0, starts, length)
    if spans_of is not None:
        data = example.view(buffer)
        outline = _outline(example.parse(data, start, start + length), data, start, length)
    else:
        spans_of = parse_together(buffer, starts, lengths)
    if spans_of is None:
        return None, None
    n, stats = len(starts), {}
    for name, spans in spans_of.items():
        counts = _counts(buffer, spans)
        low, high = int(counts.min()), int(counts.max())
        short, long = int(spans.totals.min()), int(spans.totals.max())
        stats[name] = FeatureStats(_TYPES[spans.type], low, high, short, long, n)
    return stats, outline


def _unpadded(buffer: Bytes, starts: Ints, lengths: Ints) -> int:
    """Return the bytes of the first record's features, 0 unless padding alone may follow them."""
    begin = int(starts[0])
    try:
        end = example.features_end(example.view(buffer)[begin : begin + int(lengths[0])])
    except WireError:
        return 0
    rest = lengths - end
    after = (starts + end)[rest > 0, None] + np.arange(TAIL)
    is_padded = (rest >= 0).all() and is_padding(
        buffer[np.minimum(after, len(buffer) - 1)], rest[rest > 0]
    )
    return end if is_padded else 0


def _outline(
    features: Mapping[str, Value], data: Viewed, start: int, length: int
) -> Outline | None:
    """Return the bytes of a record outside of its values and padding; see `example.glue`."""
    head = np.frombuffer(bytes(data[start : start + TAIL]), np.uint8)
    try:
        end = example.features_end(example.view(head))
    except WireError:
        return None
    tail = np.frombuffer(bytes(data[start + end : start + end + TAIL]).ljust(TAIL, b"\0"), np.uint8)
    if length > end and not is_padding(tail.reshape(1, TAIL), np.array([length - end])):
        end = length
    ranges = example.glue(features, start, start + end)
    return None if ranges is None else [(a - start, bytes(data[a:b])) for a, b in ranges]


def _counts(buffer: Bytes, spans: FeatureSpans) -> Ints:
    """Return how many values each record has."""
    if spans.type == BYTES:
        return np.ones(len(spans.totals), np.int64)
    if spans.type != INT64:
        return spans.totals // 4
    ends = np.cumsum(gather(buffer, spans, None, "") < 128)
    edges = np.cumsum(spans.totals)
    before = np.concatenate([np.zeros(1, np.int64), ends])[edges]
    return np.diff(before, prepend=0)
