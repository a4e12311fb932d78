"""The numbers of samples in a chunk, and in a file.

A reader that knows only Zarr has to read, and decompress, the whole chunk of a sample it wants;
every chunk costs it some 100 us. So a chunk of a shard is `CHUNK` bytes: small enough that a
random read moves no more than one request of a parallel file system, large enough to stream.
Every file costs an inode and an open: a shard of raw chunks is `SHARD` bytes, so that a terabyte
is about 4,000 files. A compressed shard is encoded in memory as a whole and is `ENCODED` bytes.
Without shards (v2, or if asked for) a chunk is a file and `PLAIN` bytes, between the two.

Where nothing else is asked for, samples per chunk is a power of two, so that the chunks of all
fields fit into one another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dsprep.core.schema import DType, Field, Schema, show_dtype
from dsprep.errors import UsageError
from dsprep.formats.options import Compression, WriteOptions
from dsprep.formats.zarr.attributes import carrier
from dsprep.formats.zarr.chunks import index_nbytes
from dsprep.formats.zip_members import LOCAL_HEADER

CHUNK = 256 << 10
SHARD = 256 << 20
ENCODED = 64 << 20
PLAIN = 16 << 20

MAX_CHUNKS = 1 << 16
"""Chunks in a shard at most: readers load its index, 16 bytes a chunk, before its first value."""

SMALLEST = 64
"""If samples are compressed, a field with less than 1/64 of the largest one's bytes gets
files of its own length, lest every 64 MiB of images made a file of 500 bytes of labels."""


LARGEST = 0xFFFFFFFE
"""Bytes of the largest member of a ZIP file; one more means that ZIP64 has the number."""

Role = Literal["samples", "values", "first", "count"]


@dataclass(frozen=True)
class ArrayPlan:
    """One array that will be stored.

    Attributes
    ----------
    field
        The field it belongs to.
    role
        ``samples``: a fixed field; ``values``, ``first`` and ``count``: the parts of a ragged one.
    stored
        The dtype of its elements, byte order included.
    inner
        The shape of a row as stored.
    chunk, file
        Rows in a chunk, and in a file; ``file`` is a multiple of ``chunk``.
    sharded
        Whether a file is a shard with an index.
    codec
        Compression of chunks; None: uncompressed.
    whole_files
        Whether pieces consist of whole files, so that a piece can be compressed when it comes.
    """

    field: Field
    role: Role
    stored: DType
    inner: tuple[int, ...]
    chunk: int
    file: int
    sharded: bool
    codec: Compression | None = None
    whole_files: bool = False

    @property
    def path(self) -> str:
        """Its path in the group: ``image``, ``points/values``."""
        return self.field.name if self.role == "samples" else f"{self.field.name}/{self.role}"

    @property
    def stands_in(self) -> bool:
        """True if an attribute has to say which dtype its elements have."""
        return self.role in ("samples", "values") and self.stored != self.field.dtype

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row, uncompressed."""
        return int(np.prod(self.inner, dtype=object)) * self.stored.itemsize

    def key(self, file: int | None, zarr_format: int) -> str:
        """Return the key of a file; None: of all, as layouts spell it."""
        start = "c." if zarr_format == 3 else ""
        numbers = [file or 0, *(0 for _ in self.inner)]
        words = [str(n) if file is not None else f"{{{k}}}" for k, n in enumerate(numbers)]
        return f"{self.path}/{start}" + ".".join(words)

    def settled(self, rows: int) -> ArrayPlan:
        """Return the plan for `rows` rows in all.

        A single chunk is no longer than they are, and a single shard has no more chunks than it
        takes to hold them, because its index has an entry even for chunks that are not there.
        """
        if rows > self.chunk:
            return replace(self, file=min(self.file, self.chunks(rows) * self.chunk))
        return replace(self, chunk=max(1, rows), file=max(1, rows))

    def files(self, rows: int) -> int:
        """Return the number of files of `rows` rows."""
        return -(-rows // self.file) if self.row_nbytes else 0

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, uncompressed."""
        return self.chunk * self.row_nbytes

    def file_rows(self, rows: int, i: int) -> int:
        """Return the number of `rows` rows that are in file `i`."""
        return min(self.file, rows - i * self.file)

    def chunks(self, rows: int) -> int:
        """Return the number of chunks of `rows` rows."""
        return -(-rows // self.chunk)

    def stored_nbytes(self, rows: int) -> int:
        """Return the bytes of all files, when nothing is compressed."""
        if not self.row_nbytes:
            return 0
        index = index_nbytes(self.file // self.chunk) * self.files(rows) if self.sharded else 0
        return self.chunks(rows) * self.chunk_nbytes + index


def plan_arrays(schema: Schema, options: WriteOptions) -> tuple[list[ArrayPlan], int]:
    """Return the arrays of `schema`, and the unit of a piece in samples.

    Raise `DsprepError` if a dtype has no stand-in, or the options contradict each other.
    """
    sharded = options.zarr_format == 3 and options.zarr_shard != 0
    _check(options)
    unit, largest = 1, 0
    if options.compress is not None:
        largest = max((f.row_nbytes for f in schema if not f.ragged), default=0)
        unit = _unit(schema, options, sharded)
    plans = []
    for f in schema:
        if f.ragged:
            plans += _ragged(f, options, sharded)
            continue
        large = options.compress is not None and f.row_nbytes * SMALLEST >= largest
        chunk, file = _rows(f.row_nbytes, options, sharded)
        if large:
            chunk, file = (min(chunk, unit), unit) if sharded else (unit, unit)
        stored, trailing = carrier(f.dtype, options.zarr_format)
        inner, how = (*f.inner, *trailing), (sharded, options.compress)
        plan = ArrayPlan(f, "samples", stored, inner, chunk, file, *how)
        plans.append(replace(plan, whole_files=large and plan.row_nbytes > 0))
    return plans, unit


def _ragged(field: Field, options: WriteOptions, sharded: bool) -> list[ArrayPlan]:
    """Rows of values are not samples: what the user asks of samples is not for these."""
    free = replace(options, chunk=None, zarr_shard=None)
    stored, trailing = carrier(field.dtype, options.zarr_format)
    index = np.dtype("<i8")
    arrays: list[tuple[Role, DType, tuple[int, ...], int]] = [
        ("values", stored, (*field.inner, *trailing), field.row_nbytes),
        ("first", index, (), 8),
        ("count", index, (), 8),
    ]
    return [
        ArrayPlan(
            field,
            role,
            dtype,
            inner,
            *_rows(row_nbytes, free, sharded),
            sharded,
            options.compress,
        )
        for role, dtype, inner, row_nbytes in arrays
    ]


def _rows(row_nbytes: int, options: WriteOptions, sharded: bool) -> tuple[int, int]:
    """Return the rows of a chunk and of a file."""
    chunk = options.chunk or power_of_two((CHUNK if sharded else PLAIN) // max(1, row_nbytes))
    if not sharded:
        return chunk, chunk
    if options.zarr_shard:
        if options.chunk is None:
            chunk = next(n for n in range(chunk, 0, -1) if options.zarr_shard % n == 0)
        return chunk, options.zarr_shard
    target = ENCODED if options.compress else SHARD
    return chunk, chunk * min(MAX_CHUNKS, max(1, target // max(1, chunk * row_nbytes)))


def _unit(schema: Schema, options: WriteOptions, sharded: bool) -> int:
    """Return the samples in the files of the large fields, when they are compressed."""
    if sharded and options.zarr_shard:
        return options.zarr_shard
    if not sharded and options.chunk:
        return options.chunk
    target = ENCODED if sharded else PLAIN
    step = options.chunk or 1
    times = target // max(1, step * schema.fixed_nbytes)
    if options.chunk is None:
        return power_of_two(times)
    return step * min(MAX_CHUNKS, max(1, times))


def _check(options: WriteOptions) -> None:
    chunk, shard = options.chunk or 1, options.zarr_shard or 0
    if options.zarr_format not in (2, 3):
        raise UsageError(f"there is no Zarr v{options.zarr_format}", expected="2 or 3")
    if options.compress is not None and options.compress.codec == "zlib":
        raise UsageError("zarr: zlib is not a codec of Zarr v3", expected="gzip, zstd or blosc")
    if options.chunk == 0 or chunk < 1 or shard < 0 or shard % chunk:
        raise UsageError(
            f"zarr: {options.chunk} samples per chunk, {shard} per shard",
            expected="1 or more per chunk, and a multiple of that per shard",
        )
    if shard and options.zarr_format == 2:
        raise UsageError("zarr-shard: v2 has no shards", fix="write v3, or leave it out")


def header_nbytes(name: str) -> int:
    """Return the bytes of the local header of a ZIP file's member."""
    return LOCAL_HEADER + len(name.encode())


def power_of_two(n: int) -> int:
    """Return the largest power of two that is not above `n`, at least 1."""
    return 1 << max(0, n.bit_length() - 1)


def show(plan: ArrayPlan) -> str:
    """Return the plan for a person to read."""
    stored = plan.stored.name if plan.stored.isnative else plan.stored.str
    unit, text = "samples", stored
    if plan.role == "values":
        unit, text = "rows", f"group of first, count and values: {stored}"
    text += f" ({show_dtype(plan.field.dtype)} bits)" * plan.stands_in
    text += f", chunks of up to {plan.chunk:,} {unit}"
    text += f", shards of up to {plan.file:,}" * plan.sharded
    return text + (f", {plan.codec}" if plan.codec else "")
