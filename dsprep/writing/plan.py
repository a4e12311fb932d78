"""Deciding what a conversion does, before anything is written. Nothing here does I/O on targets.

A dataset is cut into shards (output files), and a shard into pieces (what one worker reads,
encodes and writes at a time). Both cuts depend only on the samples and the options, so that the
output is the same whatever the number of workers and interruptions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.groups import Grouping
from dsprep.core.schema import Array, Batch, DType, Field, Ints, Ragged, Schema, show_dtype
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.base import FilePlan, Source, WritableFormat
from dsprep.source.derived import probe_nbytes

PIECE_NBYTES = 8 << 20
"""Payload of a piece: large enough for full speed, small enough to stay near the caches."""


@dataclass(frozen=True)
class Shard:
    """One output file.

    Attributes
    ----------
    name
        Its file name.
    start
        The first sample of the source that it holds.
    grouping
        Its samples, and their groups.
    plan
        The plan by which it is written.
    """

    name: str
    start: int
    grouping: Grouping
    plan: FilePlan

    @property
    def stop(self) -> int:
        """The sample behind its last one."""
        return self.start + len(self)

    def __len__(self) -> int:
        return self.grouping.total


def shard_names(stem: str, suffix: str, count: int) -> list[str]:
    """Return ``stem-00000-of-00064.suffix`` and so on."""
    digits = max(5, len(str(count)))
    return [f"{stem}-{i:0{digits}d}-of-{count:0{digits}d}{suffix}" for i in range(count)]


def split_suffix(target: Path, format: WritableFormat) -> tuple[str, str]:
    """Return the name of an output without its suffix, and the suffix of its shards."""
    known = (*format.suffixes, format.archive)
    name = target.name
    suffix = max((s for s in known if name.lower().endswith(s)), key=len, default="")
    if len(suffix) in (0, len(name)):
        return name, format.suffixes[0]
    return name[: -len(suffix)], name[-len(suffix) :]


def shards_by_samples(start: int, stop: int, per_shard: int) -> list[tuple[int, int]]:
    """Return ranges of `per_shard` samples; the last may be shorter. One if there are none."""
    if per_shard < 1:
        raise UsageError(f"{per_shard} samples per file is not possible", expected="at least 1")
    edges = [*range(start, stop, per_shard), stop]
    return list(itertools.pairwise(edges)) or [(start, stop)]


def shards_by_bytes(source: Source, start: int, stop: int, limit: int) -> list[tuple[int, int]]:
    """Return ranges of samples with at most `limit` bytes of payload, or of one sample."""
    if limit < 1:
        raise UsageError(f"a shard of {limit} bytes is not possible", expected="at least 1")
    edges = [start, *range_ends(source, start, stop, 1, limit, start)]
    return list(itertools.pairwise(edges)) or [(start, stop)]


def range_ends(
    source: Source, start: int, stop: int, unit: int, limit: int, origin: int
) -> Iterator[int]:
    """Yield the ends of ranges of at most `limit` payload bytes; the last is `stop`.

    Parameters
    ----------
    unit
        Samples that stay together.
    limit
        Payload bytes of a range at most, unless one unit is larger.
    origin
        First sample of the dataset or shard: unknown sizes are estimated over all of it.
    """
    block = max(1, (1 << 18) // unit) * unit

    def sizes() -> Iterator[Ints]:
        guess: int | None = None
        for at in range(start, stop, block):
            end = min(stop, at + block)
            sizes_ = source.sizes(at, end) if guess is None else None
            if sizes_ is None:
                guess = guess or probe_nbytes(source, origin, stop)
                sizes_ = np.full(end - at, guess, np.int64)
            yield sizes_

    return (start + end for end in ends_by_bytes(sizes(), limit, unit))


def ends_by_bytes(sizes: Iterable[Ints], limit: int, unit: int = 1) -> Iterator[int]:
    """Yield the ends of ranges of at most `limit` bytes; the last is the number of samples.

    A range is as many whole units as fit, at least one. Its end depends only on its start, so a
    run that continues from any end finds the same ends.

    Parameters
    ----------
    sizes
        Bytes of the samples: slices of int64, of whole units but the last, one after another.
    unit
        Samples that stay together.
    """
    at = last = pending = 0  # samples before this slice, the last end, bytes of the range since
    for part in sizes:
        ends = (
            np.cumsum(np.add.reduceat(part, np.arange(0, len(part), unit))) if len(part) else part
        )
        i, base = 0, -pending  # units of this slice, and their bytes, in ranges that have ended
        while True:
            j = int(np.searchsorted(ends, base + limit, "right"))
            if j == i and at + i * unit == last:
                j += 1  # one unit is larger than the limit
            if j >= len(ends):
                pending = int(ends[-1]) - base if len(ends) else pending
                break
            last = at + j * unit
            yield last
            i, base = j, int(ends[j - 1]) if j else 0
        at += len(part)
    if at > last:
        yield at


def pieces(
    source: Source,
    start: int = 0,
    stop: int | None = None,
    unit: int = 1,
    target: int = PIECE_NBYTES,
    after: int = 0,
) -> Iterator[tuple[int, int]]:
    """Yield samples ``start <= i < stop``, by default all, as ranges to be read at a time.

    Parameters
    ----------
    unit
        Every range but the last has a multiple of this many samples.
    target
        Payload bytes that a range should not pass, unless one unit does.
    after
        Samples that are done already; must be the end of a range.
    """
    stop = len(source) if stop is None else stop
    first = start + after
    if source.schema.ragged:
        ends = range_ends(source, first, stop, unit, target, start)
    else:
        nbytes = max(1, source.schema.fixed_nbytes)
        step = unit * max(1, min(target // (nbytes * unit), (1 << 20) // unit))
        ends = itertools.chain(range(first + step, stop, step), [stop] if first < stop else [])
    yield from itertools.pairwise(itertools.chain([first], ends))


def group_pieces(
    shard: Shard, nbytes: int, *, is_whole: bool, target: int = PIECE_NBYTES, after: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the samples of a shard that is written in groups, as `pieces` does.

    Parameters
    ----------
    nbytes
        Payload bytes of a sample, about.
    is_whole
        Every range is a group; otherwise it is a part of one, or a whole one.
    target, after
        Payload bytes of a range, and samples that are done already, as in `pieces`.
    """
    step, edges = max(1, min(target // max(1, nbytes), 1 << 20)), shard.grouping.edges.tolist()
    for g in range(shard.grouping.of(after) if after else 0, shard.grouping.count):
        first, last = max(after, edges[g]), edges[g + 1]
        for start in range(first, last, max(1, last - first) if is_whole else step):
            yield shard.start + start, shard.start + (last if is_whole else min(start + step, last))


def payload_nbytes(source: Source, start: int, stop: int) -> tuple[int, int]:
    """Return the payload bytes of some samples, and those of the largest, as far as known."""
    if not source.schema.ragged:
        return source.schema.fixed_nbytes * (stop - start), source.schema.fixed_nbytes
    payload = largest = 0
    for at in range(start, stop, 1 << 18):
        sizes = source.sizes(at, min(stop, at + (1 << 18)))
        if sizes is None:
            mean = probe_nbytes(source, start, stop)
            return mean * (stop - start), mean
        payload += int(sizes.sum())
        largest = max(largest, int(sizes.max()))
    return payload, largest


def count_rows(
    source: Source, schema: Schema, ranges: Sequence[tuple[int, int]]
) -> list[dict[str, int]]:
    """Return the rows of the ragged fields of `schema` in ranges of samples; none if one lacks."""
    counted = []
    for start, stop in ranges:
        rows = dict.fromkeys((f.name for f in schema if f.ragged), 0)
        for name, at in itertools.product(rows, range(start, stop, 1 << 18)):
            known = source.rows(name, at, min(stop, at + (1 << 18)))
            if known is None:
                return [{} for _ in ranges]
            rows[name] += int(known.sum())
        counted.append(rows)
    return counted


@dataclass(frozen=True)
class Cast:
    """A change of one field's dtype that refuses values which the new dtype cannot hold.

    Text, such as the digits of a label in WebDataset, becomes the number that it states.
    """

    field: Field
    dtype: DType

    @property
    def result(self) -> Field:
        """The field after the cast."""
        shape = self.field.shape if self.field.kind == "array" else ()
        return Field(self.field.name, self.dtype, shape, attrs=self.field.attrs)

    def apply(self, column: Array | Ragged, start: int) -> Array | Ragged:
        """Return `column` with the new dtype.

        Raises
        ------
        SchemaError
            If a finite value would become infinite or wrap around, if a value that is no
            whole number would become an integer, or if text states no number. Floats are rounded
            to floats.
        """
        if self.field.kind != "array":
            return self._cast(self._numbers(column, start), start, None)
        if isinstance(column, Ragged):
            return Ragged(self._cast(column.values, start, column.offsets), column.offsets)
        return self._cast(column, start, None)

    def _numbers(self, texts: Array | Ragged, start: int) -> Array:
        """Return the numbers that texts state: int64, or float64 for a float dtype."""
        kind, numbers = (float, "<f8") if _is_float(self.dtype) else (int, "<i8")
        out = np.empty(len(texts), numbers)
        for i in range(len(texts)):
            try:
                out[i] = kind(texts[i])
            except (ValueError, OverflowError) as error:
                raise SchemaError(
                    f"{str(texts[i])[:40]} is not a number that fits {show_dtype(self.dtype)}",
                    where=f"sample {start + i}, field {self.field.name}",
                    fix="leave the field out of --cast; bytes with a header are decoded in a "
                    "transform=, or by a program of your own that calls dsprep.write",
                ) from error
        return out

    def _cast(self, values: Array, start: int, offsets: Array | None) -> Array:
        with np.errstate(all="ignore"):
            out = values.astype(self.dtype)
            if _is_float(self.dtype):
                bad = ~np.isfinite(out) & np.isfinite(values)
            else:
                bad = out.astype(values.dtype) != values
                if _is_float(values.dtype):
                    bad |= ~np.isfinite(values)
                else:
                    bad |= (out < 0) != (values < 0)
        if bad.any():
            at = int(np.argmax(bad.reshape(-1)))
            value = values.reshape(-1)[at]
            rows = values.reshape(len(values), -1).shape[1]
            row = at // max(1, rows)
            sample = row if offsets is None else int(np.searchsorted(offsets, row, "right")) - 1
            wider = "choose a wider dtype" if np.isfinite(value) else "choose a float dtype"
            raise SchemaError(
                f"{value} does not fit {show_dtype(self.dtype)}",
                where=f"sample {start + sample}, field {self.field.name}",
                fix=f"{wider}, or leave the field out of --cast",
            )
        return out


def _is_float(dtype: DType) -> bool:
    return dtype.kind in "fc" or "float" in dtype.name


def make_casts(schema: Schema, dtypes: Mapping[str, DType]) -> dict[str, Cast]:
    """Return the casts by field name.

    Raises
    ------
    SchemaError, UsageError
        If a field does not exist, or either type is not numeric.
    """
    casts = {}
    for name, dtype in dtypes.items():
        f = schema[name]
        numeric = all(
            d.names is None and (d.kind in "biufc" or _is_float(d)) for d in (f.dtype, dtype)
        )
        if not numeric or (f.dtype.kind == "c") > (dtype.kind == "c"):
            raise UsageError(
                f"--cast cannot turn {f} into {show_dtype(dtype)}",
                expected="numbers, or text that states them, into numbers",
            )
        casts[name] = Cast(f, dtype)
    return casts


def cast_schema(schema: Schema, casts: Mapping[str, Cast]) -> Schema:
    """Return the schema after the casts."""
    return schema.replace(*(casts[f.name].result if f.name in casts else f for f in schema))


def apply_casts(batch: Batch, casts: Mapping[str, Cast], start: int) -> Batch:
    """Return the batch whose first sample is `start` after the casts."""
    if not casts:
        return batch
    return {n: casts[n].apply(c, start) if n in casts else c for n, c in batch.items()}


def parse_range(text: str, count: int) -> tuple[int, int]:
    """Return the samples that ``START:STOP`` means, half-open; negative ones count from the end.

    >>> parse_range("-10:", 100)
    (90, 100)

    Raises
    ------
    UsageError
        If it is something else, ends before it begins, or reaches beyond the samples there are.
    """
    start, colon, stop = text.partition(":")
    try:
        first, last = int(start) if start else 0, int(stop) if stop else count
    except ValueError:
        colon = ""
    if not colon:
        raise UsageError(f"{text!r} is not a range of samples", expected="START:STOP")
    for bound in (first, last):
        if not -count <= bound <= count:
            raise UsageError(
                f"the range {text} reaches beyond the dataset",
                expected=f"bounds of at most {count}",
                found=bound,
                fix="leave the bound out to take all samples up to the end",
            )
    first, last = (b + count if b < 0 else b for b in (first, last))
    if first > last:
        raise UsageError(f"the range {text} ends before it begins", expected="START:STOP")
    return first, last


def parse_stop(text: str | None) -> int | None:
    """Return STOP of ``START:STOP``, the samples that a read needs at most; None: unknown.

    >>> parse_stop("5:10"), parse_stop("-5:10"), parse_stop("5:")
    (10, None, None)
    """
    match = re.fullmatch(r"\d*:(\d+)", text or "")
    return int(match[1]) or None if match else None
