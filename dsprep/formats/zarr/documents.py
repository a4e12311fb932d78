"""The metadata documents of an output, and the codecs that they name.

zarr-python makes the documents, so that they are always valid; they are given back as bytes, since
the writer puts them in place last, the root's at the very end: without it the directory is not a
store.

`encode_file` makes the bytes of chunks with numcodecs, whose formats the codecs of Zarr are, the
same whenever and wherever it is done: gzip gets no time stamp. Blosc compresses with LZ4 behind a
byte shuffle: fast enough to read that training does not wait for it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Schema, StaticArray, encode_dtype, name_axes
from dsprep.formats.options import Compression, WriteOptions
from dsprep.formats.zarr.attributes import DTYPE, FIELDS, KIND, STATIC, name_axes_in, to_json
from dsprep.formats.zarr.plan import ArrayPlan
from dsprep.storage.ranges import as_bytes

LEVELS = {"gzip": 5, "zstd": 3, "blosc": 5}
"""The levels, unless the user names one."""

MAX_TYPESIZE = 255


def documents(
    schema: Schema,
    arrays: list[tuple[ArrayPlan, int]],
    options: WriteOptions,
    own: Mapping[str, Mapping[str, Any]],
) -> dict[str, bytes]:
    """Return the documents by key.

    `arrays` are given with their rows, `own` are attributes of dsprep's by path of the node.
    """
    import zarr

    memory_store: dict[str, Any] = {}
    attrs, _ = to_json(schema.attrs, "the dataset")
    root = zarr.create_group(
        memory_store,
        zarr_format=3 if options.zarr_format == 3 else 2,
        attributes={**attrs, FIELDS: list(schema.names)},
    )
    if schema.static:
        root.attrs[STATIC] = [s.field.name for s in schema.static]
    for field in schema:
        if field.ragged:
            attrs, _ = to_json(field.attrs, "")
            root.create_group(
                field.name, attributes={**attrs, KIND: field.kind, **own.get(field.name, {})}
            )
    axes = name_axes(schema, next((rows for plan, rows in arrays if plan.role != "values"), 0))
    for plan, rows in arrays:
        _create(root, plan.settled(rows), rows, options.zarr_format, axes.get(plan.path))
    for s in schema.static:
        _put(root, s, axes[s.field.name], options.zarr_format)
    return {key: memory_store[key].to_bytes() for key in sorted(memory_store)}


def _put(root: Any, static: StaticArray, names: list[str], zarr_format: int) -> None:
    """Add a static array to the group `root`: one chunk, which is in no need of a codec."""
    attrs, _ = to_json(static.field.attrs, "")
    values = np.asarray(static.values)
    more = name_axes_in(zarr_format, names, values.dtype, attrs)
    if zarr_format == 3:
        more |= {"chunk_key_encoding": {"name": "default", "separator": "."}}
    if values.dtype.kind not in "SU":
        more |= {"filters": None}
    array = root.create_array(
        static.field.name,
        shape=values.shape,
        dtype=str if values.dtype.kind in "SU" else values.dtype,
        chunks=tuple(max(1, n) for n in values.shape),
        compressors=None,
        attributes=attrs,
        config={"write_empty_chunks": True},
        **more,
    )
    array[...] = values.astype(str) if values.dtype.kind in "SU" else values


def _create(
    root: Any,
    plan: ArrayPlan,
    rows: int,
    zarr_format: int,
    names: Sequence[str] | None,
) -> None:
    """Create one array in the group `root`."""
    from zarr.codecs import BytesCodec

    attrs: dict[str, Any] = {}
    if plan.role == "samples":
        attrs, _ = to_json(plan.field.attrs, "")
    if plan.stands_in:
        attrs[DTYPE] = encode_dtype(plan.field.dtype)
    axes = tuple(max(1, n) for n in plan.inner)
    dtype, compress = plan.stored, plan.codec
    more: dict[str, Any] = {"fill_value": np.zeros((), dtype)[()], "filters": None}
    if names:
        own = plan.path.rpartition("/")[2]  # of a stand-in, as `name_axes` makes names up
        names = [*names, *(f"{own}_{k}" for k in range(len(names), 1 + len(plan.inner)))]
        more |= name_axes_in(zarr_format, names, plan.field.dtype, attrs)
    if zarr_format == 2:
        more["compressors"] = numcodec(compress) if compress else None
    else:
        more["compressors"] = v3(compress, plan) if compress else None
        # Dots keep all files of an array in one directory: slashes would give each file as many
        # directories of its own as the samples have axes.
        more["chunk_key_encoding"] = {"name": "default", "separator": "."}
        big = dtype.itemsize > 1 and dtype.str[0] == ">"
        if dtype.itemsize > 1:
            more["serializer"] = BytesCodec(endian="big" if big else "little")
    root.create_array(
        plan.path,
        shape=(rows, *plan.inner),
        dtype=dtype,
        chunks=(plan.chunk, *axes),
        shards=(plan.file, *axes) if plan.sharded else None,
        attributes=attrs,
        **more,
    )


# --- codecs ----------------------------------------------------------------------------------


def level(compression: Compression) -> int:
    """Return the level of the codec."""
    return LEVELS[compression.codec] if compression.level is None else compression.level


def typesize(plan: ArrayPlan) -> int:
    """Return the bytes of an element as the user knows it, for blosc's shuffle."""
    size = (plan.field.dtype if plan.stands_in else plan.stored).itemsize
    return size if size <= MAX_TYPESIZE else 1


def v3(compression: Compression, plan: ArrayPlan) -> Any:
    """Return the codec for zarr-python's v3 arrays."""
    configuration: dict[str, Any] = {"level": level(compression)}
    if compression.codec == "blosc":
        how = {"clevel": level(compression), "typesize": typesize(plan), "blocksize": 0}
        configuration = {"cname": "lz4", "shuffle": "shuffle", **how}
    if compression.codec == "zstd":
        configuration["checksum"] = False
    return {"name": compression.codec, "configuration": configuration}


def numcodec(compression: Compression, **more: int) -> Any:
    """Return the codec of numcodecs, whose formats those of Zarr are."""
    import numcodecs

    if compression.codec == "blosc":
        return numcodecs.Blosc("lz4", level(compression), numcodecs.Blosc.SHUFFLE, **more)
    kind = numcodecs.GZip if compression.codec == "gzip" else numcodecs.Zstd
    return kind(level(compression))


def encoder(plan: ArrayPlan) -> Callable[[Array], Any]:
    """Return the function that turns one chunk (uint8, C-contiguous) into its stored bytes."""
    compression = plan.codec
    if compression is None:
        return as_bytes
    if compression.codec == "gzip":
        return lambda chunk: gzip.compress(as_bytes(chunk), level(compression), mtime=0)
    import zarr  # noqa: F401  (tells blosc to use no threads: with them its bytes vary)

    codec = numcodec(compression, typesize=typesize(plan))
    return codec.encode  # type: ignore[no-any-return]


def encode_file(rows: Array, plan: ArrayPlan, encode: Callable[[Array], Any]) -> list[Any]:
    """Return the chunks of one file, encoded; zeros fill up the last one.

    `rows` are those in the file: uint8, shape ``(n, row_nbytes)``.
    """
    chunks = []
    for start in range(0, len(rows), plan.chunk):
        part = rows[start : start + plan.chunk]
        if len(part) < plan.chunk:
            part = np.pad(part, ((0, plan.chunk - len(part)), (0, 0)))
        chunks.append(encode(part))
    return chunks
