"""References in the format of kerchunk, version 1: the dataset as a virtual Zarr group.

``NAME.kerchunk.json`` beside the dataset. It opens with zarr-python 3 and fsspec; the data are read
from the dataset's own files::

    import fsspec, zarr
    from zarr.storage import FsspecStore

    fs = fsspec.filesystem("reference", fo="train.h5.kerchunk.json", asynchronous=True)
    group = zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r", zarr_format=2)
    group["x"][0]

Every field of fixed shape is an array ``(samples, *shape)``, slashes in its name are groups. A
chunk is one or more contiguous samples, or a chunk of the dataset with its filters. Left out, with
a note, is what Zarr version 2 cannot express: ragged fields, values without a fixed offset in a
record, chunks of different shape or filters, types such as bfloat16.

Files are named by the template ``d``, the directory of the dataset, absolute. If the dataset has
moved (or was uploaded), give its new directory, with the slash at the end::

    fsspec.filesystem("reference", fo=..., template_overrides={"d": "/new/place/"}, ...)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dsprep.core.schema import DIMENSIONS, Field, name_axes, show_dtype
from dsprep.errors import UsageError
from dsprep.sidecar.export import Outputs
from dsprep.sidecar.export.zarr_arrays import ArrayPlan, Inexpressible, plan
from dsprep.sidecar.sidecar import Sidecar

SUFFIX = ".kerchunk.json"
MAX_REFERENCES = 1 << 24
"""Such a file would be larger than a gigabyte, and all of it has to be read to open it."""


def outputs(sidecar: Sidecar, notes: list[str]) -> Outputs:
    """Return the file of references; `UsageError` for no field, or too many chunks."""
    from zarr import create_group
    from zarr.storage import MemoryStore

    plans, reasons, texts = list[ArrayPlan](), list[str](), dict[str, Any]()
    attrs = _attributes(sidecar.schema.attrs, "the dataset", notes)
    group = create_group(MemoryStore(texts), zarr_format=2, attributes=attrs)
    axes = name_axes(sidecar.schema, len(sidecar))
    for field in sidecar.schema:
        try:
            _check_name(field, plans)
            array = plan(sidecar, field)
            attrs = _attributes(field.attrs, f"field {field.name}", notes)
            attrs[DIMENSIONS] = axes[field.name]
            plans.append(_create(group, array, len(sidecar), attrs))
        except Inexpressible as reason:
            reasons.append(f"field {field.name}: {reason}")
    if not plans:
        raise UsageError(
            "no field can be expressed in references of kerchunk",
            where=sidecar.dataset,
            found="; ".join(reasons) or "no fields",
            fix="convert the dataset to fields of fixed shape",
        )
    if "{{" in str(sidecar.dataset.absolute().parent):
        raise UsageError("fsspec takes {{ in the name of a directory for a template")
    notes += [f"left out {reason}" for reason in reasons]
    total = sum(p.count for p in plans)
    if total > MAX_REFERENCES:
        largest = max(plans, key=lambda p: p.count)
        raise UsageError(
            f"field {largest.field.name} has too many chunks for a file of references",
            where=sidecar.dataset,
            expected=f"at most {MAX_REFERENCES} in all",
            found=total,
            fix="convert the dataset with larger chunks, or read it with dsprep.open",
        )
    metadata = {key: value.to_bytes().decode() for key, value in texts.items()}
    return {sidecar.dataset.name + SUFFIX: partial(_content, sidecar, plans, metadata)}


def _create(group: Any, array: ArrayPlan, count: int, attrs: dict[str, Any]) -> ArrayPlan:
    """Make and return the metadata of an array, without a fill value that JSON does not keep."""
    # Raises `Inexpressible` if Zarr version 2 lacks its dtype or a filter.
    from numcodecs import get_codec

    field, above = array.field, array.field.name.rpartition("/")[0]
    if above:
        group.require_group(above)
    # By default numcodecs puts the checksum in front.
    end = {"crc32c": {"location": "end"}}
    filters = [
        get_codec({k: v for k, v in {**f, **end.get(f["id"], {})}.items() if v is not None})
        for f in array.filters or ()
    ]
    for fill in (array.fill, None):
        try:
            made = group.create_array(
                field.name,
                shape=(count, *field.inner),
                chunks=array.chunks,
                dtype=field.dtype,
                filters=filters or None,
                compressors=None,
                fill_value=fill,
                attributes=attrs,
                overwrite=True,
            )
        except ValueError as error:
            reason = f"Zarr version 2 has no dtype {show_dtype(field.dtype)}"
            raise Inexpressible(reason) from error
        if made.dtype != field.dtype:
            del group[field.name]
            raise Inexpressible(f"Zarr version 2 has no dtype {show_dtype(field.dtype)}")
        kept = group[field.name].fill_value
        if fill is None or np.array(kept, field.dtype).tobytes() == fill.tobytes():
            break
    return replace(array, fill=fill)


def _check_name(field: Field, before: Sequence[ArrayPlan]) -> None:
    parts = field.name.split("/")
    if any(p in ("", ".", "..") or p.startswith((".z", "__")) for p in parts):
        raise Inexpressible("its name is not a path in Zarr")
    for other in before:
        a, b = field.name + "/", other.field.name + "/"
        if a.startswith(b) or b.startswith(a):
            raise Inexpressible(f"field {other.field.name} is an array, not a group")


def _attributes(attrs: Mapping[str, Any], owner: str, notes: list[str]) -> dict[str, Any]:
    """Return attributes as JSON: numpy values and arrays become numbers and lists."""
    encoded = {}
    for key, value in attrs.items():
        is_plain = isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufUO"
        encoded[key] = value.tolist() if is_plain else value
        try:
            json.dumps(encoded[key])
        except TypeError:
            del encoded[key]
            notes.append(f"left out attribute {key} of {owner}: JSON has no {type(value).__name__}")
    return encoded


# --- the file --------------------------------------------------------------------------------


def _content(
    sidecar: Sidecar, plans: Sequence[ArrayPlan], metadata: dict[str, str]
) -> Iterator[bytes]:
    base = sidecar.dataset.absolute().parent
    templates = {"d": str(base).rstrip("/") + "/"}
    yield f'{{"version": 1, "templates": {json.dumps(templates)}, "refs": {{\n'.encode()
    texts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in metadata.items()]
    yield ",\n".join(texts).encode()
    for p in plans:
        name = json.dumps(p.field.name)[:-1]
        for path, position, offset, length in p.references():
            # fsspec takes the name for a format string: a brace stands four times.
            inside = os.path.relpath(path.absolute(), base).replace("{", "{" * 4)
            url = json.dumps("{{d}}" + inside.replace("}", "}" * 4))
            keys = (".".join(map(str, tile)) for tile in position.T.tolist())
            rows = zip(keys, offset.tolist(), length.tolist(), strict=True)
            lines = [f'{name}/{key}": [{url}, {at}, {size}]' for key, at, size in rows]
            if lines:
                yield (",\n" + ",\n".join(lines)).encode()
    yield b"\n}}\n"
