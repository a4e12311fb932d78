"""Caffe's Datum: an image and its label as one protobuf message.

From ``caffe.proto`` (proto2): ``channels = 1``, ``height = 2``, ``width = 3`` (int32),
``data = 4`` (bytes: the image, uint8, C order, or an encoded image), ``label = 5`` (int32),
``float_data = 6`` (repeated float, packed or not), ``encoded = 7`` (bool). A message is a row of
``tag, value`` pairs; a tag is the varint ``number << 3 | wire type``; unknown ones are skipped.

Nearly all messages of a dataset differ only in the data and the label, so one is parsed, and the
others are compared with it byte by byte at once, except there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, Bytes, Field, Ints, Ragged, Schema
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import FormatError
from dsprep.formats.protobuf import WireError, read_field, read_varint

CHANNELS, HEIGHT, WIDTH, DATA, LABEL, FLOAT_DATA, ENCODED = range(1, 8)
_FLOAT_TAG = FLOAT_DATA << 3 | 5
_TEMPLATES = 16  # tried on many messages at once, before one by one

LABEL_FIELD = Field("label", np.dtype(np.int32))


@dataclass
class Message:
    """The offsets of the parts of one message, in bytes from its start.

    `numbers` are the integer fields but the label, by field number; `data` and the varint of the
    `label` are ``(start, stop)``, None where missing; `floats` are the offsets of each float.
    """

    numbers: dict[int, int] = field(default_factory=dict)
    data: tuple[int, int] | None = None
    label: tuple[int, int] | None = None
    floats: list[Ints] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width; 0 where missing."""
        c, h, w = (self.numbers.get(n, 0) for n in (CHANNELS, HEIGHT, WIDTH))
        return c, h, w

    @property
    def float_bytes(self) -> Ints:
        """The place of each byte of the floats."""
        offsets = np.concatenate([np.zeros(0, np.int64), *self.floats])
        return (offsets[:, None] + np.arange(4)).reshape(-1)

    @property
    def payload(self) -> int:
        """Bytes of the image's values."""
        if self.data is not None and self.data[1] > self.data[0]:
            return self.data[1] - self.data[0]
        return 4 * sum(map(len, self.floats))


def parse(message: bytes) -> Message:
    """Return the offsets of the parts of `message`; `WireError` if it is not a Datum."""
    parsed = Message()
    at, end = 0, len(message)
    while at < end:
        if message[at] == _FLOAT_TAG:
            tags = np.frombuffer(message, np.uint8)[at : end - 4 : 5]
            other = np.flatnonzero(tags != _FLOAT_TAG)
            n = int(other[0]) if len(other) else len(tags)
            if n:
                parsed.floats.append(at + 1 + 5 * np.arange(n, dtype=np.int64))
                at += 5 * n
                continue
        number, wire, start, at = read_field(message, at, end)
        if number in (CHANNELS, HEIGHT, WIDTH, LABEL, ENCODED) and wire != 0:
            raise WireError(f"field {number} has wire type {wire}")
        if number in (CHANNELS, HEIGHT, WIDTH, ENCODED):
            value = read_varint(message, start, at)[0]
            if number != ENCODED and value >> 31:
                raise WireError(f"field {number} is {value}")
            parsed.numbers[number] = value
        elif number == LABEL:
            parsed.label = start, at
        elif number == DATA:
            if wire != 2:
                raise WireError(f"data has wire type {wire}")
            parsed.data = start, at
        elif number == FLOAT_DATA:
            if wire != 2 or (at - start) % 4:
                raise WireError("float_data is damaged")
            parsed.floats.append(np.arange(start, at, 4, dtype=np.int64))
    return parsed


class Datum:
    """The decoder of Datum messages.

    Its `schema` is ``data: uint8[C,H,W]`` (``float32`` from float_data, with `floats`) and ``label:
    int32``. `data` is `bytes` when images are encoded or their shapes vary (`shape` is None), with
    ``channels``, ``height`` and ``width`` as further fields (`sides`) when they vary.
    """

    def __init__(
        self,
        shape: tuple[int, int, int] | None,
        floats: bool,
        sides: bool,
        notes: Sequence[str] = (),
    ) -> None:
        self.shape, self.fixed, self.floats = shape, shape is not None, floats
        dtype = np.dtype("<f4") if floats else np.dtype(np.uint8)
        data = Field.opaque("data") if shape is None else Field("data", dtype, shape)
        self.sides = ("channels", "height", "width") if sides else ()
        others = (Field(side, np.dtype(np.int32)) for side in self.sides)
        self.schema = Schema((data, LABEL_FIELD, *others))
        self.notes = tuple(notes)

    @classmethod
    def probed(cls, messages: Sequence[bytes], spread: int, where: object) -> Datum:
        """Return the decoder for a dataset, its fields found from a few of its messages.

        `spread` are the bytes between the smallest and the largest message of the dataset. Raises
        `FormatError` if one of them is not a Datum.
        """
        decoded = []
        for i, message in enumerate(messages):
            try:
                decoded.append(parse(message))
            except WireError as error:
                raise _not_datum(f"{where}, probe {i}", str(error)) from error
        shapes = {m.shape for m in decoded}
        encoded = any(m.numbers.get(ENCODED) for m in decoded)
        floats = any(m.floats and not m.numbers.get(ENCODED) for m in decoded)
        c, h, w = shape = min(shapes, default=(0, 0, 0))
        # A label takes up to 10 bytes and a tag, or is not there at all.
        alike = len(shapes) == 1 and spread <= 11
        sizes = {m.payload for m in decoded}
        fixed = not encoded and alike and sizes == {c * h * w * (4 if floats else 1)}
        notes = []
        if any(m.label is None for m in decoded):
            notes.append("some messages have no label, which is taken as 0")
        if encoded:
            notes.append("the images are encoded; dsprep keeps them as stored")
        elif not fixed:
            notes.append(
                "the images have several shapes, or are not of uint8: data holds their bytes "
                "(--field data:DTYPE[SHAPE] gives their type)"
            )
        return cls(shape if fixed else None, floats, not fixed and not encoded, notes)

    def to_json(self) -> dict[str, Any]:
        """Return the decoder as JSON, without its notes; `from_json` is the inverse."""
        shape = None if self.shape is None else list(self.shape)
        return {"shape": shape, "floats": self.floats, "sides": bool(self.sides)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Datum:
        """Return the decoder that `to_json` wrote; `ValueError` if it is not such a one."""
        shape, floats, sides = json.get("shape"), json.get("floats"), json.get("sides")
        if not isinstance(floats, bool) or not isinstance(sides, bool):
            raise ValueError("what its messages hold is not said")  # noqa: TRY004  (of the file)
        if shape is None:
            return cls(None, floats, sides)
        if not isinstance(shape, list) or len(shape) != 3:
            raise ValueError(f"{shape!r} is not channels, height and width")
        if any(type(n) is not int or not 0 <= n < 1 << 31 for n in shape):
            raise ValueError(f"{shape!r} is not channels, height and width")
        c, h, w = shape
        if 4 * c * h * w >= 1 << 32:
            raise ValueError(f"{shape!r} is larger than any message")
        return cls((c, h, w), floats, sides)

    def decode(self, data: Bytes, lengths: Ints, label: Callable[[int], str]) -> Batch:
        """Return the samples whose messages follow one another in `data`; see `Values.decode`."""
        n = len(lengths)
        offsets = offsets_of(lengths)
        starts, sizes = np.zeros(n, np.int64), np.zeros(n, np.int64)
        labels, sides = np.zeros(n, np.int32), np.zeros((n, 3), np.int32)
        floats: dict[int, tuple[Ints, Ints]] = {}
        for rows, message in self._alike(data, offsets, lengths, label):
            if self.fixed and (message.shape != self.shape or message.payload != self.nbytes):
                raise FormatError(
                    "a message is of another shape than the first",
                    where=label(int(rows[0])),
                    expected=f"{self.shape}, {self.nbytes} bytes",
                    found=f"{message.shape}, {message.payload} bytes",
                    fix="convert it with --values opaque",
                )
            begin = offsets[rows]
            sizes[rows] = message.payload
            sides[rows] = message.shape
            if message.data is not None and message.data[1] > message.data[0]:
                starts[rows] = begin + message.data[0]
            elif message.payload:
                floats[int(rows[0])] = rows, message.float_bytes
            if message.label is not None:
                labels[rows] = _labels(data, begin, message.label)
        batch: Batch = {"data": self._images(data, offsets, starts, sizes, floats)}
        batch["label"] = labels
        for k, side in enumerate(self.sides):
            batch[side] = sides[:, k]
        return batch

    @property
    def nbytes(self) -> int:
        """Bytes of the image in every sample, when fixed."""
        return self.schema.fields[0].row_nbytes

    def _alike(
        self, data: Bytes, offsets: Ints, lengths: Ints, label: Callable[[int], str]
    ) -> list[tuple[Ints, Message]]:
        """Return messages that differ only in data and label: their numbers, and one parsed."""
        rows = []
        order = np.argsort(lengths, kind="stable")
        breaks = np.flatnonzero(np.diff(lengths[order])) + 1
        for group in np.split(order, breaks):
            rest, tried = group, 0
            while len(rest):
                i = int(rest[0])
                message = data[offsets[i] : offsets[i + 1]].tobytes()
                try:
                    parsed = parse(message)
                except WireError as error:
                    raise _not_datum(label(i), str(error)) from error
                same = np.zeros(len(rest), bool)
                if tried < _TEMPLATES and len(rest) > 1:
                    same = _same_frame(data, offsets[rest], message, parsed)
                same[0] = True
                rows.append((rest[same], parsed))
                rest, tried = rest[~same], tried + 1
        return rows

    def _images(
        self,
        data: Bytes,
        offsets: Ints,
        starts: Ints,
        sizes: Ints,
        floats: dict[int, tuple[Ints, Ints]],
    ) -> Array | Ragged:
        """Return the column of the images."""
        n, first = len(sizes), self.schema.fields[0]
        if self.fixed and self.nbytes and not floats and n:
            step = np.diff(starts)
            if n == 1 or (step == step[0]).all():  # a view: nothing is copied
                strides = (int(step[0]) if n > 1 else 0, 1)
                rows = np.ndarray((n, self.nbytes), np.uint8, data, int(starts[0]), strides)
                return rows.view(first.dtype).reshape(n, *first.inner)
        ends = offsets_of(sizes)
        out = np.empty(int(ends[-1]), np.uint8)
        copied = np.ones(n, bool)
        for rows, where in floats.values():
            at = ends[rows][:, None] + np.arange(len(where))
            out[at] = data[offsets[rows][:, None] + where]
            copied[rows] = False
        move_spans(data, starts[copied], sizes[copied], out, ends[:-1][copied])
        if self.fixed:
            return out.view(first.dtype).reshape(n, *first.inner)
        return Ragged(out, ends, "bytes")


def _same_frame(data: Bytes, begin: Ints, message: bytes, parsed: Message) -> np.ndarray:
    """Return which messages at `begin` equal `message` in all but data, floats and label."""
    free = np.zeros(len(message), bool)
    if parsed.data is not None:
        free[slice(*parsed.data)] = True
    if parsed.label is not None:
        free[slice(*parsed.label)] = True
    free[parsed.float_bytes] = True
    frame = np.flatnonzero(~free)
    own = np.frombuffer(message, np.uint8)
    same = (data[begin[:, None] + frame] == own[frame]).all(axis=1)
    if parsed.label is not None:  # a varint of as many bytes: all but the last have the top bit
        at = np.arange(*parsed.label)
        same &= ((data[begin[:, None] + at] ^ own[at]) < 0x80).all(axis=1)
    return np.asarray(same)


def _labels(data: Bytes, begin: Ints, label: tuple[int, int]) -> Array:
    """Return the varints at ``begin + label``, as protobuf's int32."""
    total = np.zeros(len(begin), np.uint64)
    for k, at in enumerate(range(*label)):
        total |= (data[begin + at] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * k)
    return total.astype(np.uint32).view(np.int32)


def looks_like_datum(value: bytes) -> bool:
    """Whether `value` is a Datum with an image."""
    try:
        message = parse(value)
    except WireError:
        return False
    c, h, w = message.shape
    values = message.payload // (1 if message.data else 4)
    return message.payload > 0 and (bool(message.numbers.get(ENCODED)) or values == c * h * w > 0)


def _not_datum(where: str, reason: str) -> FormatError:
    return FormatError(
        f"the value is not a Caffe Datum: {reason}", where=where, fix="leave out --values datum"
    )
