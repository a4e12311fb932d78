"""How each field will be stored: decided from the schema and the options, before any I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsprep.core.schema import Field, Schema, renamed
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.hdf5.dtypes import Carrier, carrier_of
from dsprep.formats.hdf5.guard import import_plugins

if TYPE_CHECKING:
    from dsprep.formats.base import Compression, WriteOptions

CHUNK_NBYTES = 1 << 20
"""Large enough for a codec to find repetitions, small enough for HDF5's chunk cache."""

_EAGER_NBYTES = 64 << 10
_MOST_CHUNK_NBYTES = (1 << 32) - 1  # HDF5 keeps the size of a chunk in 32 bits
_MOST_AXES = 32
_DEFAULT_LEVEL = {"gzip": 4, "zstd": 3}


@dataclass(frozen=True)
class FieldPlan:
    """How one field is stored.

    Attributes
    ----------
    field
        The field.
    carrier
        The dtype of its dataset.
    chunk
        Samples, or rows of a ragged field, per chunk; 0 is contiguous.
    codec, level
        None, or how chunks are compressed.
    late
        Whether chunks are made when all samples are there: those of ragged fields, and of fields
        that are too small beside the others to fill a chunk with each piece.
    """

    field: Field
    carrier: Carrier
    chunk: int = 0
    codec: str | None = None
    level: int = 0
    late: bool = False

    @property
    def shuffle(self) -> bool:
        """Whether the bytes of equal weight are brought together before compressing."""
        return self.codec is not None and self.carrier.stored.itemsize > 1

    @property
    def eager(self) -> bool:
        """Whether the chunks are encoded with each piece."""
        return self.codec is not None and not self.late

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the dataset with this number of samples or rows."""
        return (rows, *self.field.inner, *self.carrier.axis)

    def chunk_rows(self, rows: int) -> int:
        """Return the rows per chunk of a dataset with this many rows; 0 is contiguous."""
        return min(self.chunk, rows) if self.field.row_nbytes else 0

    def __str__(self) -> str:
        """Return it for a person, who may not know yet how many samples there will be."""
        unit = "rows" if self.field.ragged else "samples"
        storage = f"chunks of up to {self.chunk:,} {unit}," if self.chunk else "contiguous"
        text = f"{storage} {self.carrier}"
        if self.codec:
            text += f", {'shuffle, ' if self.shuffle else ''}{self.codec}:{self.level}"
        return f"group of values, first, count: {text}" if self.field.ragged else text


def plan(schema: Schema, options: WriteOptions, count: int | None) -> list[FieldPlan]:
    """Return the plan of each field.

    Parameters
    ----------
    count
        The number of samples, or None if it is not known yet.

    Raises
    ------
    UnsupportedError
        If HDF5 cannot hold a field, its name, or the codec.
    UsageError
        If the chunk is not positive.
    """
    if options.chunk is not None and options.chunk < 1:
        raise UsageError(f"a chunk of {options.chunk} samples", expected="1 or more")
    _check_names(schema)
    codec, level = _codec(options.compress)
    # Chunks are encoded as the pieces come, so the fields share one number of samples.
    shared = options.chunk or max(1, CHUNK_NBYTES // max(1, schema.fixed_nbytes))
    plans = []
    for field in schema:
        carrier = carrier_of(field.dtype)
        if len(field.shape) + 1 + len(carrier.axis) > _MOST_AXES:
            raise UnsupportedError(
                f"field {field.name} has too many axes for HDF5",
                expected=f"at most {_MOST_AXES - 1 - len(carrier.axis)}",
                found=len(field.shape),
            )
        chunk, late = 0, False
        if field.ragged:
            chunk, late = (_own_chunk(field), True) if codec else (0, False)
        elif options.chunk is not None or codec:
            late = options.chunk is None and shared * field.row_nbytes < _EAGER_NBYTES
            chunk = _own_chunk(field) if late else shared
            chunk = chunk if count is None else min(chunk, count)
        if chunk * field.row_nbytes > _MOST_CHUNK_NBYTES:
            raise UnsupportedError(
                f"field {field.name}: {chunk} samples make too large a chunk for HDF5",
                expected="less than 4 GiB",
                found=f"{chunk * field.row_nbytes} bytes",
                fix="use fewer samples per chunk, or none and no compression",
            )
        if not chunk or not field.row_nbytes:
            plans.append(FieldPlan(field, carrier))
        else:
            plans.append(FieldPlan(field, carrier, chunk, codec, level, late))
    return plans


def unit(schema: Schema, options: WriteOptions) -> int:
    """Return how many samples stay together: a chunk, if chunks are encoded as they come."""
    eager = [p.chunk for p in plan(schema, options, None) if p.eager]
    return max(eager, default=1)


def _own_chunk(field: Field) -> int:
    return max(1, CHUNK_NBYTES // max(1, field.row_nbytes))


def _codec(compress: Compression | None) -> tuple[str | None, int]:
    if compress is None:
        return None, 0
    if compress.codec not in _DEFAULT_LEVEL:
        raise UnsupportedError(
            f"HDF5 files are not written with {compress.codec}",
            expected="gzip, zstd or none",
            fix="use gzip, which every reader knows",
        )
    if compress.codec == "zstd" and not import_plugins():
        raise UnsupportedError(
            "HDF5 needs hdf5plugin for zstd",
            fix="pip install 'dsprep[hdf5plugin]', or use gzip, which every reader knows",
        )
    level = _DEFAULT_LEVEL[compress.codec] if compress.level is None else compress.level
    return compress.codec, level


def _check_names(schema: Schema) -> None:
    """Raise `UnsupportedError` for names that are no HDF5 paths, or that lie in one another."""
    names = set(schema.names)
    for name in schema.names:
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise UnsupportedError(
                f"HDF5 has no place for a field called {name!r}",
                fix=f"rename it: {renamed(name)}",
            )
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in name):
            raise UnsupportedError(f"{name!r} is not Unicode", fix=f"rename it: {renamed(name)}")
        for k in range(1, len(parts)):
            outer = "/".join(parts[:k])
            if outer in names:
                raise UnsupportedError(
                    f"HDF5 cannot hold field {name} inside field {outer}",
                    fix=f"rename one of them: {renamed(outer)}",
                )


def estimate(schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
    """Return the bytes of a file of `count` samples; an upper bound when compressed."""
    total = 4096 + payload
    for p in plan(schema, options, count):
        total += 8192  # headers, and the alignment of large datasets
        if p.field.ragged:
            total += 16 * count
        elif p.chunk:
            chunks = -(-count // p.chunk)
            total += 24 * chunks + (chunks * p.chunk - count) * p.field.row_nbytes
    if options.compress is not None:
        total += payload // 1000 + 64 * (payload // CHUNK_NBYTES + 1)  # what does not shrink
    return total
