"""The metadata documents of an output, made by zarr-python so that they are always valid.

They are made in memory and given back as bytes: the writer puts them in place last, the root's
at the very end, because a store without it is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dsprep.core.schema import Schema, encode_dtype
from dsprep.formats.base import WriteOptions
from dsprep.formats.zarr import codecs
from dsprep.formats.zarr.attributes import FIELDS, KIND, to_json
from dsprep.formats.zarr.carriers import DTYPE
from dsprep.formats.zarr.plan import ArrayPlan


def root_key(zarr_format: int) -> str:
    """Return the key whose presence makes a directory a store."""
    return "zarr.json" if zarr_format == 3 else ".zgroup"


def documents(
    schema: Schema,
    arrays: list[tuple[ArrayPlan, int]],
    options: WriteOptions,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    raw: frozenset[str] = frozenset(),
) -> dict[str, bytes]:
    """Return the documents by key.

    Parameters
    ----------
    schema
        All fields.
    arrays
        Each array and its number of rows.
    options
        As given to `base.Format.create`.
    own
        Attributes of dsprep's, by path of the node.
    raw
        Paths of arrays that are not compressed though `options` says so.
    """
    import zarr

    own = own or {}
    bare = replace(options, compress=None)

    held: dict[str, Any] = {}
    attrs, _ = to_json(schema.attrs, "the dataset")
    root = zarr.create_group(
        held,
        zarr_format=3 if options.zarr_format == 3 else 2,
        attributes={**attrs, FIELDS: list(schema.names)},
    )
    for field in schema:
        if field.ragged:
            attrs, _ = to_json(field.attrs, "")
            root.create_group(
                field.name, attributes={**attrs, KIND: field.kind, **own.get(field.name, {})}
            )
    for plan, rows in arrays:
        how = bare if plan.path in raw else options
        _create(root, plan.settled(rows), rows, how, own.get(plan.path, {}))
    return {key: held[key].to_bytes() for key in sorted(held)}


def _create(
    root: Any, plan: ArrayPlan, rows: int, options: WriteOptions, own: Mapping[str, Any]
) -> None:
    """Create one array in the group `root`."""
    from zarr.codecs import BytesCodec

    attrs: dict[str, Any] = {}
    if plan.role == "samples":
        attrs, _ = to_json(plan.field.attrs, "")
    if plan.carrier.stands_in:
        attrs[DTYPE] = encode_dtype(plan.field.dtype)
    attrs.update(own)
    axes = tuple(max(1, n) for n in plan.inner)
    dtype, compress = plan.carrier.dtype, options.compress
    more: dict[str, Any] = {}
    if options.zarr_format == 2:
        more["compressors"] = codecs.v2(compress) if compress else None
    else:
        more["compressors"] = codecs.v3(compress, plan) if compress else None
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
        filters=None,
        fill_value=np.zeros((), dtype)[()],
        attributes=attrs,
        **more,
    )
