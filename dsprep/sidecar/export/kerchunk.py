"""References in the format of kerchunk, version 1: the dataset as a virtual Zarr group.

``NAME.kerchunk.json`` beside the dataset. It opens with zarr-python 3 and fsspec; the data are read
from the dataset's own files::

    import fsspec, zarr
    from zarr.storage import FsspecStore

    fs = fsspec.filesystem("reference", fo="train.h5.kerchunk.json", asynchronous=True)
    group = zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r", zarr_format=2)
    group["x"][0]

Every field of fixed shape is an array ``(samples, *shape)``, slashes in its name are groups. A
chunk is a whole sample or more, or a chunk of the dataset with its filters. Left out, with a note,
is what Zarr version 2 cannot express: ragged fields, values without a fixed offset in a record,
chunks of different shape, types such as bfloat16.

Files are named by the template ``d``, the directory of the dataset, absolute. If the dataset has
moved (or was uploaded), give its new directory, with the slash at the end::

    fsspec.filesystem("reference", fo=..., template_overrides={"d": "/new/place/"}, ...)

Where contiguous rows end in the middle of a chunk, the last chunk extends into the bytes after
them, which Zarr ignores; if the file ends there, that chunk is kept in the JSON.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsprep.core.schema import DIMENSIONS, Field, name_axes
from dsprep.errors import UsageError
from dsprep.sidecar.export import Output
from dsprep.sidecar.export.zarr_arrays import (
    ArrayPlan,
    FileChunks,
    Inexpressible,
    attribute,
    codecs,
    plan,
    zarr_dtype,
)
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.ranges import pread_exact

SUFFIX = ".kerchunk.json"
MAX_REFERENCES = 1 << 24
"""Such a file would be larger than a gigabyte, and all of it has to be read to open it."""


def outputs(sidecar: Sidecar, notes: list[str]) -> list[Output]:
    """Return the file of references; `UsageError` for no field, or too many chunks."""
    plans: list[ArrayPlan] = []
    reasons = []
    for field in sidecar.schema:
        try:
            _check_name(field, plans)
            plans.append(plan(sidecar, field))
        except Inexpressible as reason:
            reasons.append(f"field {field.name}: {reason}")
    if not plans:
        raise UsageError(
            "no field can be expressed in references of kerchunk",
            where=sidecar.dataset,
            found="; ".join(reasons) or "no fields",
            fix="convert the dataset to fields of fixed shape",
        )
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
    metadata = _metadata(sidecar, plans, notes)
    content = partial(_content, sidecar, plans, metadata)
    return [Output(sidecar.dataset.name + SUFFIX, content)]


def _check_name(field: Field, before: Sequence[ArrayPlan]) -> None:
    parts = field.name.split("/")
    if any(p in ("", ".", "..") or p.startswith((".z", "__")) for p in parts):
        raise Inexpressible("its name is not a path in Zarr")
    for other in before:
        a, b = field.name + "/", other.field.name + "/"
        if a.startswith(b) or b.startswith(a):
            raise Inexpressible(f"field {other.field.name} is an array, not a group")


# --- metadata --------------------------------------------------------------------------------


def _metadata(sidecar: Sidecar, plans: Sequence[ArrayPlan], notes: list[str]) -> dict[str, str]:
    """Return the keys and texts of all groups and arrays."""
    root = _attributes(sidecar.schema.attrs, "the dataset", notes)
    texts = {".zgroup": '{"zarr_format": 2}', ".zattrs": json.dumps(root)}
    axes = name_axes(sidecar.schema, len(sidecar))
    for p in plans:
        name, inner = p.field.name, p.field.inner
        for k in range(1, len(name.split("/"))):
            group = "/".join(name.split("/")[:k])
            texts[f"{group}/.zgroup"] = texts[".zgroup"]
        filters, compressor = codecs(p.filters)
        array = {
            "zarr_format": 2,
            "shape": [len(sidecar), *inner],
            "chunks": list(p.chunks),
            "dtype": zarr_dtype(p.field.dtype),
            "compressor": compressor,
            "filters": filters,
            "fill_value": p.fill,
            "order": "C",
        }
        attrs = _attributes(p.field.attrs, f"field {name}", notes) | {DIMENSIONS: axes[name]}
        texts[f"{name}/.zarray"] = json.dumps(array)
        texts[f"{name}/.zattrs"] = json.dumps(attrs)
    return texts


def _attributes(attrs: Mapping[str, Any], owner: str, notes: list[str]) -> dict[str, Any]:
    encoded = {}
    for key, value in attrs.items():
        try:
            encoded[key] = attribute(value)
        except Inexpressible as reason:
            notes.append(f"left out attribute {key} of {owner}: {reason}")
    return encoded


# --- the file --------------------------------------------------------------------------------


def _content(
    sidecar: Sidecar, plans: Sequence[ArrayPlan], metadata: dict[str, str]
) -> Iterator[bytes]:
    urls = _Urls(sidecar.dataset.absolute().parent)
    templates = {"d": urls.directory} if urls.templated else {}
    yield f'{{"version": 1, "templates": {json.dumps(templates)}, "refs": {{\n'.encode()
    texts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in metadata.items()]
    yield ",\n".join(texts).encode()
    for p in plans:
        name = json.dumps(p.field.name)[:-1]
        for path, chunks in p.chunk_references():
            lines = _lines(name, urls.of(path), chunks)
            if lines:
                yield (",\n" + ",\n".join(lines)).encode()
        for key, path, offset, nbytes, size in p.tails():
            with path.open("rb", buffering=0) as file:
                data = pread_exact(file.fileno(), nbytes, offset, path).ljust(size, b"\0")
            yield f',\n{name}/{key}": "base64:{base64.b64encode(data).decode()}"'.encode()
    yield b"\n}}\n"


def _lines(name: str, url: str, chunks: FileChunks) -> list[str]:
    """Return a line of JSON for every chunk."""
    axis, inner = chunks.position[0].tolist(), chunks.position[1:]
    if not inner.any():
        rest: Iterator[str] = itertools.repeat(".0" * len(inner))
    else:
        rest = ("." + ".".join(map(str, tile)) for tile in inner.T.tolist())
    offsets, lengths = chunks.offset.tolist(), chunks.length.tolist()
    return [
        f'{name}/{k}{tail}": [{url}, {at}, {size}]'
        for k, tail, at, size in zip(axis, rest, offsets, lengths, strict=False)
    ]


class _Urls:
    """How files are named: by a template, unless braces in the directory would be taken for one.

    fsspec takes the name for a format string: a brace stands four times.
    """

    def __init__(self, directory: Path) -> None:
        self._base = directory
        self.directory = str(directory).rstrip("/") + "/"
        self.templated = "{{" not in self.directory

    def of(self, path: Path) -> str:
        """Return the JSON of a file's name."""
        absolute = path.absolute()
        if not self.templated:
            return json.dumps(str(absolute))
        name = os.path.relpath(absolute, self._base)
        return json.dumps("{{d}}" + name.replace("{", "{" * 4).replace("}", "}" * 4))
