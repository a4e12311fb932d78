"""Caffe's Datum: an image and its label as one protobuf message.

From ``caffe.proto`` (proto2): ``channels = 1``, ``height = 2``, ``width = 3`` (int32),
``data = 4`` (bytes: the image, uint8, C order, or an encoded image), ``label = 5`` (int32),
``float_data = 6`` (repeated float, packed or not), ``encoded = 7`` (bool). Unknown fields are
skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Batch, Bytes, Field, Ints, Ragged, Schema
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError
from dsprep.formats.protobuf import Spans, Together, WireError, decode_varints, read_fields

CHANNELS, HEIGHT, WIDTH, DATA, LABEL, FLOAT_DATA, ENCODED = range(1, 8)
WIRES: dict[int, tuple[int, ...]] = {
    CHANNELS: (0,),
    HEIGHT: (0,),
    WIDTH: (0,),
    LABEL: (0,),
    ENCODED: (0,),
}
WIRES |= {DATA: (2,), FLOAT_DATA: (2, 5)}

SIDES = slice(CHANNELS, WIDTH + 1)
LABEL_FIELD = Field("label", np.dtype(np.int32))

Fields: TypeAlias = list[tuple[int, int, Ints, Ints]]
"""Number, wire type, starts and stops of each field of some messages."""


def read_messages(
    data: Bytes, starts: Ints, lengths: Ints, label: Callable[[int], str]
) -> tuple[Ints, Spans, Array]:
    """Return ``(numbers, images, floats)``: what n messages hold; `FormatError` if one is no Datum.

    `numbers` are by field number, shape ``(n, 8)``, -1 where missing; `images` are the bytes of the
    values, of floats where `floats` says so.
    """
    n = len(lengths)
    numbers, counts = np.full((n, 8), -1, np.int64), np.ones(n, np.int64)
    owners, parts = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    floats = np.zeros(n, bool)
    for rows, fields in _alike(data, starts, starts + lengths, label) if n else ():
        images = [np.zeros((len(rows), 2), np.int64)]  # start and length, of data and of floats
        for number, wire, start, stop in fields:
            sizes = stop - start
            good = wire in WIRES.get(number, (wire,))
            if good and WIRES.get(number) == (0,):
                values = decode_varints(Spans(start, sizes, sizes).gather(data), sizes)[0]
                good = number > WIDTH or not (values >> 31).any()
                numbers[rows, number] = values & 0xFFFFFFFF
            elif good and number == DATA:
                images[0] = np.stack([start, sizes], axis=1)
            elif good and number == FLOAT_DATA:
                good = not (sizes % 4).any()
                images.append(np.stack([start, sizes], axis=1))
            if not good:
                raise _not_datum(label(int(rows[0])), f"field {number} is damaged")
        ranges = np.stack(images, axis=1)
        ranges[ranges[:, 0, 1] > 0, 1:, 1] = 0  # data comes first
        floats[rows], counts[rows] = ranges[:, 1:, 1].any(axis=1), len(images)
        parts.append(ranges.reshape(-1, 2))
        owners.append(np.repeat(rows, len(images)))
    order = np.argsort(np.concatenate(owners), kind="stable")
    starts, sizes = np.concatenate(parts)[order].T
    totals = np.diff(offsets_of(sizes)[offsets_of(counts)])
    spans = Spans(starts, sizes, totals, None if len(starts) == n else counts)
    return numbers, spans, floats


def _alike(
    data: Bytes, starts: Ints, ends: Ints, label: Callable[[int], str]
) -> Iterator[tuple[Ints, Fields]]:
    """Yield the fields of messages that have the same ones, all or each: numbers, fields."""
    every = [*zip(starts.tolist(), ends.tolist(), strict=True)]
    try:
        first = read_fields(data.data, *every[0])
        together = Together(data, starts, ends).fields(first)
    except WireError:
        pass
    else:
        yield np.arange(len(every)), together
        return
    for i, (start, stop) in enumerate(every):
        try:
            fields = read_fields(data.data, start, stop)
        except WireError as error:
            raise _not_datum(label(i), str(error)) from error
        yield np.array([i]), [(n, wire, np.array([a]), np.array([b])) for n, wire, a, b in fields]


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
        data = np.frombuffer(b"".join(messages), np.uint8)
        lengths = np.array([*map(len, messages)], np.int64)
        starts = offsets_of(lengths)[:-1]
        numbers, images, of_floats = read_messages(
            data, starts, lengths, lambda i: f"{where}, probe {i}"
        )
        shapes = np.unique(numbers[:, SIDES].clip(0), axis=0).tolist()
        is_encoded = numbers[:, ENCODED] > 0
        encoded, floats = bool(is_encoded.any()), bool((of_floats & ~is_encoded).any())
        c, h, w = min(shapes, default=(0, 0, 0))
        # A label takes up to 10 bytes and a tag, or is not there at all.
        alike = len(shapes) == 1 and spread <= 11
        nbytes = c * h * w * (4 if floats else 1)
        fixed = not encoded and alike and bool((images.totals == nbytes).all())
        notes = []
        if (numbers[:, LABEL] < 0).any():
            notes.append("some messages have no label, which is taken as 0")
        if encoded:
            notes.append("the images are encoded; dsprep keeps them as stored")
        elif not fixed:
            notes.append(
                "the images have several shapes, or are not of uint8: data holds their bytes "
                "(--field data:DTYPE[SHAPE] gives their type)"
            )
        return cls((c, h, w) if fixed else None, floats, not fixed and not encoded, notes)

    def to_json(self) -> dict[str, Any]:
        """Return the decoder as JSON, without its notes; `from_json` is the inverse."""
        shape = self.shape and list(self.shape)
        return {"shape": shape, "floats": self.floats, "sides": bool(self.sides)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Datum:
        """Return the decoder that `to_json` wrote; `ValueError` if it is not such a one."""
        shape, floats, sides = (json.get(key) for key in ("shape", "floats", "sides"))
        if not (type(floats) is type(sides) is bool) or not (
            shape is None or [type(n) is int and 0 <= n < 1 << 31 for n in shape] == [True] * 3
        ):
            raise ValueError("Datum messages have channels, height and width")
        return cls(shape and tuple(shape), floats, sides)

    def decode(
        self, data: Bytes, starts: Ints, lengths: Ints, label: Callable[[int], str]
    ) -> Batch:
        """Return the samples whose messages are there in `data`; see `Values.decode`."""
        numbers, images, _ = read_messages(data, starts, lengths, label)
        sides = numbers[:, SIDES].clip(0)
        column: Array | Ragged
        if self.shape is None:
            column = Ragged(images.gather(data), offsets_of(images.totals), "bytes")
        else:
            bad = (sides != self.shape).any(axis=1) | (images.totals != self.nbytes)
            if bad.any():
                i = int(bad.argmax())
                raise FormatError(
                    "a message is of another shape than the first",
                    where=label(i),
                    expected=f"{self.shape}, {self.nbytes} bytes",
                    found=f"{tuple(sides[i].tolist())}, {images.totals[i]} bytes",
                    fix="convert it with --values opaque",
                )
            values = images.rows(data, self.nbytes).view(self.schema["data"].dtype)
            column = values.reshape(len(lengths), *self.shape)
        labels = numbers[:, LABEL].clip(0).astype(np.uint32).view(np.int32)
        others = zip(self.sides, sides.astype(np.int32).T, strict=False)
        return {"data": column, "label": labels, **dict(others)}

    @property
    def nbytes(self) -> int:
        """Bytes of the image in every sample, when fixed."""
        return self.schema.fields[0].row_nbytes


def looks_like_datum(value: bytes) -> bool:
    """Return whether `value` is a Datum with an image."""
    data, start = np.frombuffer(value, np.uint8), np.zeros(1, np.int64)
    try:
        numbers, images, floats = read_messages(data, start, start + len(value), str)
    except FormatError:
        return False
    nbytes, pixels = int(images.totals[0]), math.prod(numbers[0, SIDES].clip(0).tolist())
    pixels *= 4 if floats[0] else 1
    return nbytes > 0 and (int(numbers[0, ENCODED]) > 0 or nbytes == pixels)


def _not_datum(where: str, reason: str) -> FormatError:
    return FormatError(
        f"the value is not a Caffe Datum: {reason}", where=where, fix="leave out --values datum"
    )
