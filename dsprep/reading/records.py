"""Samples from records: byte ranges read with few calls, and what they decode to.

Records near each other are read together. Where they also have one size and one distance, as in
most TFRecord files, the result is a view of the bytes as they lie, without another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Bytes,
    Column,
    Field,
    Ints,
    Ragged,
    Schema,
    new_array,
)
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import FormatError, layout_mismatch
from dsprep.layout.model import Part, Records
from dsprep.storage.base import Handle

Verify: TypeAlias = Literal["header", "full"] | None

WASTE = 1.25
"""Bytes read per byte wanted up to which a range of the file is read in one piece."""

SMALL = 256
"""Bytes per record that may be read along besides: an address of its own costs as much."""

LARGE = 2 << 10
"""Bytes of a record from which on a buffer of its own costs less than another copy."""

PROVED = 8 << 20
"""Bytes of records whose checksums are compared together."""

_U8 = np.dtype(np.uint8)


class Frame(Protocol):
    """Bytes around each block that can prove it: so many before and after."""

    before: int
    after: int

    def wrong(self, before: Bytes, offsets: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return which blocks are not proven by the bytes before them, shape ``(n, before)``."""

    def payload_wrong(
        self, buffer: Bytes, starts: Ints, lengths: Ints, after: Bytes
    ) -> NDArray[np.bool_] | None:
        """Return which blocks differ from their checksums; None if they have none.

        Block i is ``buffer[starts[i]:][:lengths[i]]``; `after` has shape ``(n, after)``.
        """


class Recipe(Protocol):
    """Takes records apart whose fields have no constant place."""

    def decode(
        self,
        buffer: Bytes,
        starts: Ints,
        lengths: Ints,
        label: Callable[[int], str],
        arena: Arena | None = None,
    ) -> Batch:
        """Return the fields of the records ``buffer[starts[i]:][:lengths[i]]``.

        Columns may be views of `buffer`, or arrays taken from `arena`.
        """

    def one(self, record: Bytes) -> Batch | None:
        """Return the fields of one record; None where only `decode` judges it."""


def damaged_recipe(problem: str, expected: object = None, found: object = None) -> FormatError:
    """Return the error for a recipe in a sidecar that does not follow the specification."""
    return FormatError(
        problem,
        where="the recipe of a sidecar",
        expected=expected,
        found=found,
        fix="write the sidecar again with dsprep provenance",
    )


Label: TypeAlias = Callable[[int], str]
"""Returns the name of a record, for messages."""

Decoders: TypeAlias = Callable[[Records, Schema], tuple[Frame | None, Recipe | None]]
"""Returns what the frame and the recipe of records stand for: `dsprep.formats.decoders`."""


@dataclass(frozen=True)
class Taken:
    """Records in memory: record i is ``buffer[starts[i]:][:lengths[i]]``.

    With a `stride` they begin that many bytes apart. If `cut`, only a part of each is there.
    """

    buffer: Bytes
    starts: Ints
    lengths: Ints
    stride: int = 0
    cut: bool = False


class RecordReader:
    """Reads the fields of one file that lie in records, of those of `schema`.

    `decoders` gives the frame and the `recipe`, and raises `FormatError` if they do not exist or
    have wrong parameters; `label` gives the name of a sample, for messages: None for file and
    number.
    """

    def __init__(
        self,
        records: Records,
        schema: Schema,
        decoders: Decoders,
        label: Callable[[int], str] | None = None,
    ) -> None:
        self.records, self.schema, self._label = records, schema, label
        self._frame, self.recipe = decoders(records, schema)

    def read(
        self,
        file: Handle,
        indices: Ints,
        names: Sequence[str],
        verify: Verify,
        arena: Arena | None,
        first: int = 0,
    ) -> Batch:
        """Return fields `names` of the samples `indices` of the file.

        `verify`: ``"header"`` compares what frames the records, ``"full"`` their checksums too;
        `first` is the dataset's number of the file's sample 0, for messages.
        """
        records = self.records
        offsets, lengths = records.extents(indices, file.path)
        file.check_extents(offsets, lengths, "a record")
        if len(offsets) > 1:
            _check_disjoint(offsets, lengths, file)
        parts = [(self.schema[n], records.parts[n]) for n in names]
        entire = any(part.at is None for _, part in parts) or verify == "full"

        def label(i: int) -> str:
            sample = int(indices[i])
            if self._label is not None:
                return self._label(sample)
            return f"{file.path}, sample {first + sample}"

        needed_parts = [] if entire else parts
        taken = self._take(file, offsets, lengths, needed_parts, verify, arena, label)
        out: Batch = {}
        if any(part.at is None for _, part in parts) and self.recipe is not None:
            out = self.recipe.decode(
                taken[0].buffer, taken[0].starts, taken[0].lengths, label, arena
            )
            if not out.keys() >= set(names):
                lists = ", ".join(names), ", ".join(out)
                raise layout_mismatch("has a recipe that lacks fields", file.path, *lists)
            return {name: out[name] for name in names}
        for i, (field, part) in enumerate(parts):
            part_taken = taken[i] if taken[0].cut else taken[0]
            at = 0 if part_taken.cut else int(part.at or 0)
            out[field.name] = take_field(part_taken, field, part, at, label)
        return out

    @property
    def has_crcs(self) -> bool:
        """True if every record is followed by its checksum in the file."""
        return self._frame is not None and self._frame.after > 0

    def prove(self, file: Handle, indices: Ints) -> None:
        """Compare the records of samples with their checksums, without taking them apart."""
        blocks = self.records.blocks
        numbers = np.unique(self.records.numbers(indices, file.path))
        offsets, lengths = blocks.offsets.at(numbers), blocks.lengths.at(numbers)
        file.check_extents(offsets, lengths, "a record")
        ends = np.cumsum(lengths)
        i = 0
        while i < len(numbers):
            before = int(ends[i]) - int(lengths[i])
            j = max(i + 1, int(np.searchsorted(ends, before + PROVED, "right")))
            some = offsets[i:j], lengths[i:j]
            self._take(file, *some, [], "full", None, lambda _: str(file.path))
            i = j

    def _take(
        self,
        file: Handle,
        offsets: Ints,
        lengths: Ints,
        parts: Sequence[tuple[Field, Part]],
        verify: Verify,
        arena: Arena | None,
        label: Label,
    ) -> list[Taken]:
        """Return the records whole as one `Taken`, or, if `parts` are given, perhaps each part."""
        n, before, after = len(offsets), 0, 0
        frame = self._frame if verify is not None else None
        if frame is not None:
            parts, before, after = [], frame.before, frame.after if verify == "full" else 0
        begins, ends = np.maximum(offsets - before, 0), offsets + lengths
        beyond = np.minimum(ends + after, file.nbytes)
        pieces = [(offsets, lengths)]
        if parts:
            pieces = [(offsets + int(p.at or 0), _part_lengths(lengths, p, file)) for _, p in parts]
        elif frame is not None:
            pieces += [(begins, offsets - begins), (ends, beyond - ends)]
        nbytes = sum(int(sizes.sum()) for _, sizes in pieces)
        begin, end = (int(begins.min()), int(beyond.max())) if n else (0, 0)
        step = int(offsets[1] - offsets[0]) if n > 1 else int(lengths.sum())
        even = bool((np.diff(offsets) == step).all()) and bool((lengths == lengths[:1]).all())
        # Values have to end up back to back, if they are ragged or no view has them: by preadv
        # that costs nothing.
        packed_by_read = any(f.ragged for f, _ in parts) or (bool(parts) and not even)
        scattered = packed_by_read and nbytes > n * LARGE and n > 1
        if n and not scattered and end - begin <= nbytes * WASTE + 4096 + n * SMALL:
            buffer = new_array(arena, "sidecar.range", (end - begin,), _U8)
            file.read_into(buffer, begin)
            taken = [Taken(buffer, at - begin, sizes) for at, sizes in pieces]
            taken[0] = Taken(buffer, offsets - begin, lengths, step if even else 0)
            taken = taken[:1] if parts else taken
        else:
            taken = _read_pieces(file, pieces, arena, cut=bool(parts))
        if frame is not None:
            self._verify(frame, taken, offsets, verify, label)
        return taken

    def _verify(
        self, frame: Frame, taken: Sequence[Taken], offsets: Ints, verify: Verify, label: Label
    ) -> None:
        """Compare records with what is in front of them, and behind, which was read along."""
        records, front, back = taken
        rows = _rows(front.buffer, front.starts, front.lengths, frame.before)
        bad = frame.wrong(rows, offsets, records.lengths)
        problem = "the bytes before the record are not those of a record of this size"
        if verify == "full" and not bad.any():
            behind = _rows(back.buffer, back.starts, back.lengths, frame.after)
            wrong = frame.payload_wrong(records.buffer, records.starts, records.lengths, behind)
            bad = bad if wrong is None else wrong
            problem = "the CRC of the payload is wrong"
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                problem,
                where=f"{label(i)}, offset {offsets[i]}",
                fix="the file is damaged, or was changed since its layout was found: "
                "dsprep provenance --check --full compares them",
            )


def _read_pieces(
    file: Handle, pieces: Sequence[tuple[Ints, Ints]], arena: Arena | None, *, cut: bool
) -> list[Taken]:
    """Read ranges of a file, each of the lists packed."""
    bases = offsets_of(np.array([int(sizes.sum()) for _, sizes in pieces], np.int64))
    out = new_array(arena, "sidecar.spans", (int(bases[-1]),), _U8)
    at = [offsets_of(sizes)[:-1] for _, sizes in pieces]
    file.read_spans(
        np.concatenate([offsets for offsets, _ in pieces]),
        np.concatenate([sizes for _, sizes in pieces]),
        out,
        np.concatenate([positions + base for positions, base in zip(at, bases, strict=False)]),
    )
    taken = []
    for i, (_, sizes) in enumerate(pieces):
        stride = int(sizes[0]) if len(sizes) and bool((sizes == sizes[0]).all()) else 0
        part = out[int(bases[i]) : int(bases[i + 1])]
        taken.append(Taken(part, at[i], sizes, stride, cut))
    return taken


def _check_disjoint(offsets: Ints, lengths: Ints, file: Handle) -> None:
    """Raise if records that are not the same overlap, before memory is taken for all of them."""
    if int(lengths.sum()) > file.nbytes:
        _, chosen = np.unique(offsets, return_index=True)
        if int(lengths[chosen].sum()) > file.nbytes:
            raise layout_mismatch("gives records that overlap", file.path)


def _part_lengths(lengths: Ints, part: Part, file: Handle) -> Ints:
    """Return the bytes of a part of each record, which must hold it."""
    at = int(part.at or 0)
    rest = lengths - at
    minimum = 0 if part.nbytes is None else part.nbytes
    if len(rest) and int(rest.min()) < minimum:
        raise layout_mismatch(
            "gives a field an offset beyond its record",
            file.path,
            f"at most {int(lengths.min())} bytes",
            at + minimum,
        )
    return rest if part.nbytes is None else np.full(len(lengths), part.nbytes, np.int64)


def _rows(buffer: Bytes, starts: Ints, lengths: Ints, width: int) -> Bytes:
    """Return ``buffer[starts[i]:][:lengths[i]]`` as rows of `width` bytes, zeros where shorter."""
    out = np.zeros((len(starts), width), np.uint8)
    if len(starts) and bool((lengths == width).all()):
        out[:] = buffer[starts[:, None] + np.arange(width)]
        return out
    for i in np.flatnonzero(lengths > 0).tolist():
        a, k = int(starts[i]), int(lengths[i])
        out[i, width - k :] = buffer[a : a + k]
    return out


def take_field(
    taken: Taken, field: Field, part: Part, at: int, label: Callable[[int], str]
) -> Column:
    """Return one field of records in memory; it begins `at` bytes into each."""
    n = len(taken.starts)
    sizes = taken.lengths - at if part.nbytes is None else np.full(n, part.nbytes, np.int64)
    if n and (int(sizes.min()) < 0 or bool((taken.lengths < at + sizes).any())):
        i = int((taken.lengths < at + sizes).argmax())
        raise FormatError(f"the record is too short for field {field}", where=label(i))
    field.check_nbytes(sizes, label)
    if not field.ragged:
        return _fixed(taken, field, at, sizes)
    rows = _packed(taken, at, sizes).view(field.dtype).reshape(-1, *field.inner)
    return Ragged.from_lengths(rows, sizes // max(1, field.row_nbytes), field.kind)


def _fixed(taken: Taken, field: Field, at: int, sizes: Ints) -> Array:
    shape = (len(sizes), *field.inner)
    nbytes = field.row_nbytes
    if not nbytes or not len(sizes):
        return np.empty(shape, field.dtype)
    if taken.stride:
        start = int(taken.starts[0]) + at
        rows = as_strided(
            taken.buffer[start:], (len(sizes), nbytes), (taken.stride, 1), writeable=False
        )
    else:
        rows = _packed(taken, at, sizes).reshape(len(sizes), nbytes)
    return rows.view(field.dtype).reshape(shape)


def _packed(taken: Taken, at: int, sizes: Ints) -> Bytes:
    """Return the bytes of a field of all records, one after another."""
    positions = offsets_of(sizes)
    if len(sizes) and bool((np.diff(taken.starts) == sizes[:-1]).all()):
        start = int(taken.starts[0]) + at
        return taken.buffer[start : start + int(positions[-1])]
    out = np.empty(int(positions[-1]), np.uint8)
    move_spans(taken.buffer, taken.starts + at, sizes, out, positions[:-1])
    return out
