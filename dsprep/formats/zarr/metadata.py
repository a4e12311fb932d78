"""The metadata documents of Zarr, read and checked: what an array is and how its chunks are stored.

v2 (``.zarray``, ``.zgroup``, ``.zattrs``): https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
v3 (``zarr.json``): https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html

Nothing is taken on trust: sizes are bounded, names of codecs that run Python are refused, and
whatever is not understood is an error that names it. The consolidated copies of the metadata are
not used; the documents themselves are always there.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dsprep.core.schema import (
    DIMENSIONS,
    DType,
    Kind,
    check_dtype,
    extension,
    known_axes,
)
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.zarr.attributes import FILL, decode_fill
from dsprep.formats.zarr.chunks import NUMCODECS
from dsprep.formats.zarr.store import ZATTRS, Store, join

MAX_ROW = 2**40
"""Bytes of the largest sample or chunk that is believed."""

LOCATED = frozenset({"blosc", "bz2", "crc32c", "gzip", "lz4", "zlib", "zstd"})
"""Codecs behind the one that makes bytes of elements that leave chunks readable without zarr."""

WRONG = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, SyntaxError, SchemaError,
    RecursionError,
)  # fmt: skip
"""The errors that wrong metadata raise; `SyntaxError` is from `numpy.dtype`."""


VARYING = "only zarr reads elements of varying length"


class NoField(FormatError):
    """An array is of a type that no field has; it is not damaged, and others can be read."""


V3_TYPES = {
    np.dtype(code).name: np.dtype(code)
    for code in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()  # noqa: SIM905
}
"""The core data types of v3, by name."""

VLEN_KINDS: Mapping[str, Kind] = {
    "string": "str",
    "variable_length_bytes": "bytes",
    "bytes": "bytes",
    "vlen-utf8": "str",
    "vlen-bytes": "bytes",
}
"""Data types of v3, and object codecs of v2, whose elements vary in length."""

VLEN = {"str": "vlen-utf8", "bytes": "vlen-bytes"}
"""The only codec of theirs that is read, before at most one compressor, by kind of field."""

Codec = tuple[str, Mapping[str, Any]]
"""A name and a configuration."""


Sharding = tuple[bool, bool]
"""True if the index of a shard is at its start, and if it ends in a CRC-32C."""


@dataclass(frozen=True)
class ArrayMeta:
    """One array, in the same terms for both versions.

    Attributes
    ----------
    path
        In the store; ``""`` for an array at the root.
    version
        2 or 3.
    shape, grid
        Of the array, and of what one file holds (a chunk, or a shard).
    chunk
        Of a chunk; the same as `grid` unless there are shards.
    dtype
        As stored, byte order included.
    kind
        ``bytes`` and ``str`` for elements of varying length.
    codecs
        Names, in the order of writing.
    filters
        What was done to the elements of a chunk in C order, as `dsprep.core.filters` undoes it.
    unlocated
        Why only zarr reads the chunks, a clause; ``""``: `filters` say all.
    keys
        What chunk keys begin with, and what separates their numbers.
    sharding
        Where shards have their index; None without shards, or if it is encoded.
    wrapped
        Whether shards are encoded as a whole.
    attrs
        The attributes.
    axes
        The name of each axis, ``""`` for those without; or nothing.
    """

    path: str
    version: Literal[2, 3]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: DType
    kind: Kind = "array"
    codecs: tuple[str, ...] = ()
    filters: tuple[Mapping[str, Any], ...] = ()
    unlocated: str = ""
    keys: tuple[str, str] = ("", ".")
    sharding: Sharding | None = None
    wrapped: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    axes: tuple[str, ...] = ()

    @property
    def vlen(self) -> bool:
        """True if elements vary in length."""
        return self.kind != "array"

    @property
    def raw(self) -> bool:
        """True if the bytes of a file are rows one after another."""
        rows = tuple(max(1, n) for n in self.shape[1:])
        rows_only = bool(self.shape) and self.grid[1:] == self.chunk[1:] == rows
        return rows_only and not (self.filters or self.unlocated)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row along the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def along(self) -> tuple[int, ...]:
        """Files along each axis; an array without axes has one axis, of size 1, here and below."""
        pairs = zip(self.shape, self.grid, strict=True)
        return tuple(-(-n // g) for n, g in pairs) or (1,)

    @property
    def per(self) -> tuple[int, ...]:
        """Chunks per file along each axis."""
        return tuple(g // c for g, c in zip(self.grid, self.chunk, strict=True)) or (1,)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)) or (1,)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, decoded."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def key(self, *numbers: int) -> str:
        """Return the key of a file by its position in the grid; axes left out have position 0."""
        start, separator = self.keys
        if not self.shape:
            return join(self.path, start.rstrip("./") or "0")
        rest = len(self.shape) - len(numbers)
        return join(self.path, start + separator.join(map(str, (*numbers, *(0,) * rest))))

    def file_keys(self, start: int, stop: int) -> Iterator[str]:
        """Yield the keys of the files that hold the rows ``start <= i < stop``."""
        rows = range(start // self.grid[0], -(-stop // self.grid[0]))
        others = (range(-(-n // g)) for n, g in zip(self.shape[1:], self.grid[1:], strict=True))
        return (self.key(*numbers) for numbers in itertools.product(rows, *others))


def _document(store: Store, key: str) -> dict[str, Any] | None:
    """Return the JSON object at `key`, None if nothing is there."""
    data = store.document(key)
    document = None if data is None else json.loads(data)
    if not isinstance(document, dict | None):
        raise FormatError("the metadata is not a JSON object")
    return document


def read_node(store: Store, path: str) -> ArrayMeta | dict[str, Any] | None:
    """Return the array at `path`, or the attributes of the group there, or None.

    Raise `FormatError` if its documents are damaged, or what they say is not known.
    """
    for name, kind in (("zarr.json", ""), (".zarray", "array"), (".zgroup", "group")):
        key = join(path, name)
        try:
            document = _document(store, key)
            if document is None:
                continue
            attrs = document.get("attributes") if not kind else _document(store, join(path, ZATTRS))
            attrs = attrs if isinstance(attrs, dict) else {}
            kind, version = kind or document.get("node_type", ""), document.get("zarr_format")
            if version != (2 if name[0] == "." else 3) or kind not in ("array", "group"):
                raise FormatError("this describes no Zarr v2 or v3 node")
            if kind == "group":
                return attrs
            meta = (_read_v3 if version == 3 else _read_v2)(document, attrs, path)
            codecs, axes = meta.codecs, len(meta.shape)
            if meta.vlen and (axes != 1 or codecs[0] != VLEN[meta.kind] or len(codecs) > 2):
                by = ", ".join(codecs)
                raise NoField(f"strings along {axes} axes, by {by}, are not read")
            return replace(meta, attrs=_conventional(meta, document))
        except FormatError as error:
            where = error.where or f"{store.path}, {key}"
            raise type(error)(error.what, where=where, found=error.found, fix=error.fix) from error
        except WRONG as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            problem = f"the metadata is wrong ({reason})"
            raise FormatError(problem, where=f"{store.path}, {key}") from error
    return None


def _conventional(meta: ArrayMeta, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an array with the names of axes, and what marks missing values."""
    attrs = {name: value for name, value in meta.attrs.items() if name != DIMENSIONS}
    attrs |= known_axes(meta.path, meta.axes)
    fill = document.get("fill_value") if meta.version == 2 and DIMENSIONS in meta.attrs else None
    if fill is not None and meta.dtype.kind in "iuf":
        attrs.setdefault(FILL, fill)
    if FILL in attrs:
        attrs[FILL] = decode_fill(attrs[FILL], meta.dtype)
    return attrs


def _sizes(value: Any, minimum: int) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(n) is int and minimum <= n < 2**63 for n in sizes) or len(sizes) > 32:
        raise FormatError("an array has impossible sizes", found=str(value)[:200])
    return sizes


def _grid(shape: tuple[int, ...], value: Any, dtype: DType) -> tuple[int, ...]:
    grid = tuple(max(1, n) for n in _sizes(value, 0))
    if len(grid) != len(shape):
        raise FormatError("chunks and array differ in their number of axes", found=str(value))
    if max(math.prod(shape[1:]), math.prod(grid[1:])) * dtype.itemsize > MAX_ROW:
        raise FormatError("a sample is impossibly large", found=f"{list(shape)} of {dtype}")
    if math.prod(grid) * dtype.itemsize >= 2**62:
        raise FormatError("a chunk is impossibly large", found=str(value))
    return grid


def _filters(codecs: list[Codec], known: str) -> dict[str, Any]:
    """Return the filters that undo codecs; `known`: why only zarr reads the chunks, if known."""
    ids = [name.removeprefix(NUMCODECS) for name, _ in codecs]
    foreign = [name for name, _ in codecs if name.removeprefix(NUMCODECS) not in LOCATED]
    if known or foreign or any(each.get("location", "end") != "end" for _, each in codecs):
        return {"unlocated": known or f"only zarr reads codec {(*foreign, 'crc32c')[0]}"}
    return {"filters": tuple({"id": id} for id in ids)}


def _axes(names: Any) -> tuple[str, ...]:
    """Return the names of axes as metadata give them, where anything else is none."""
    known = isinstance(names, list | tuple) and any(isinstance(n, str) for n in names)
    return tuple(n if isinstance(n, str) else "" for n in names) if known else ()


# --- v2 --------------------------------------------------------------------------------------


def _read_v2(document: Mapping[str, Any], attrs: Mapping[str, Any], path: str) -> ArrayMeta:
    shape = _sizes(document["shape"], 0)
    every = [*(document.get("filters") or []), document.get("compressor")]
    codecs: list[Codec] = [(str(c["id"]), c) for c in every if c is not None]
    names = tuple(name for name, _ in codecs)
    for name in names:
        if "pickle" in name.lower():
            raise FormatError(f"codec {name} runs Python code from the file; it is refused")
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise FormatError("unknown dimension_separator", found=repr(separator))
    kind: Kind = "array"
    vlen, unlocated = document["dtype"] == "|O", ""
    if vlen:
        name = names[0] if document.get("filters") else "none"
        if name not in VLEN_KINDS:
            raise NoField(f"Python objects by codec {name} are not read")
        kind, unlocated = VLEN_KINDS[name], VARYING
    dtype = np.dtype(np.uint8) if vlen else _dtype_v2(document["dtype"])
    check_dtype(dtype)
    grid = _grid(shape, document["chunks"], dtype)
    if document.get("order", "C") != "C" and len(shape) > 1:
        unlocated = unlocated or "only zarr reads chunks in Fortran order"
    more: dict[str, Any] = {"kind": kind, "codecs": names, "attrs": attrs}
    more |= {"keys": ("", separator), "axes": _axes(attrs.get(DIMENSIONS))}
    more |= _filters(codecs, unlocated)
    return ArrayMeta(path, 2, shape, grid, grid, dtype, **more)


def _dtype_v2(value: Any) -> DType:
    if isinstance(value, str):
        return np.dtype(value)
    members: list[Any] = []
    for name, inside, *shape in value:
        members.append((str(name), _dtype_v2(inside), *(tuple(s) for s in shape)))
    return np.dtype(members)


# --- v3 --------------------------------------------------------------------------------------


def _read_v3(document: Mapping[str, Any], attrs: Mapping[str, Any], path: str) -> ArrayMeta:
    shape = _sizes(document["shape"], 0)
    if document["chunk_grid"]["name"] != "regular":
        raise FormatError("unknown chunk grid", found=repr(document["chunk_grid"]["name"]))
    if document.get("storage_transformers"):
        raise FormatError("storage transformers are not known")
    codecs, flat = [named(c) for c in document["codecs"]], _flat(document["codecs"])
    type_name, _ = named(document["data_type"])
    kind, vlen = VLEN_KINDS.get(type_name, "array"), type_name in VLEN_KINDS
    dtype = np.dtype(np.uint8) if vlen else _dtype_v3(document["data_type"])
    check_dtype(dtype)
    if _byte_order(flat) == ">":
        dtype = dtype.newbyteorder(">")
    grid = chunk = _grid(shape, document["chunk_grid"]["configuration"]["chunk_shape"], dtype)
    sharding, (first, configuration) = None, codecs[0]
    if first == "sharding_indexed":
        chunk = _grid(shape, configuration["chunk_shape"], dtype)
        if any(g % c for g, c in zip(grid, chunk, strict=True)):
            raise FormatError("a shard is not a multiple of its chunks", found=str(chunk))
        sharding = _sharding(configuration)
    keys = _keys_v3(document.get("chunk_key_encoding", "default"))
    more: dict[str, Any] = {"kind": kind, "codecs": tuple(name for name, _ in flat)}
    more |= {"keys": keys, "sharding": sharding, "attrs": attrs}
    more["wrapped"] = first == "sharding_indexed" and len(codecs) > 1
    more["axes"] = _axes(document.get("dimension_names") or attrs.get(DIMENSIONS))
    more |= _decoding_v3(codecs, sharding, VARYING if vlen else "")
    return ArrayMeta(path, 3, shape, grid, chunk, dtype, **more)


def _decoding_v3(codecs: list[Codec], sharding: Sharding | None, unlocated: str) -> dict[str, Any]:
    if codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            unlocated = unlocated or "only zarr reads shards that are encoded as a whole"
        if sharding is None:
            unlocated = unlocated or "only zarr reads shards whose index is encoded otherwise"
        codecs = [named(c) for c in codecs[0][1]["codecs"]]
    if codecs[0][0] != "bytes":
        unlocated = unlocated or f"only zarr reads codec {codecs[0][0]}"
    return _filters(codecs[1:], unlocated)


def named(value: Any) -> Codec:
    """Return name and configuration: v3 writes ``"bytes"`` or ``{"name": "bytes", ...}``."""
    if isinstance(value, str):
        return value, {}
    configuration = value.get("configuration") or {}
    if not isinstance(value["name"], str) or not isinstance(configuration, dict):
        raise FormatError("this is not a name with a configuration", found=str(value)[:200])
    if "pickle" in value["name"].lower():
        raise FormatError(f"codec {value['name']} runs Python code from the file; it is refused")
    return value["name"], configuration


def _only(configuration: Mapping[str, Any], *known: str) -> None:
    """Refuse parameters that might change what is stored."""
    if configuration.keys() - set(known):
        raise FormatError("unknown parameters", found=str(sorted(configuration))[:200])


def _flat(values: Any) -> list[Codec]:
    """Return codecs in the order of writing, those inside shards behind these."""
    codecs = list[Codec]()
    for value in values:
        name, configuration = named(value)
        inside = _flat(configuration["codecs"]) if name == "sharding_indexed" else ()
        codecs += [(name, configuration), *inside]
    return codecs


def _byte_order(codecs: list[Codec]) -> Any:
    """Return ``<`` or ``>``, as the codec ``bytes`` has it, also that of a shard's chunks."""
    configuration = next((c for name, c in codecs if name == "bytes"), {})
    _only(configuration, "endian")
    return {"little": "<", "big": ">"}[configuration.get("endian", "little")]


def _sharding(configuration: Mapping[str, Any]) -> Sharding | None:
    """Return where the index is, or None if only zarr-python can read it."""
    _only(configuration, "chunk_shape", "codecs", "index_codecs", "index_location")
    at_start = {"start": True, "end": False}[configuration.get("index_location", "end")]
    index = [named(c) for c in configuration["index_codecs"]]
    names = [name for name, _ in index]
    if names not in (["bytes"], ["bytes", "crc32c"]) or _byte_order(index) != "<":
        return None
    return at_start, len(names) > 1


def _keys_v3(value: Any) -> tuple[str, str]:
    name, configuration = named(value)
    _only(configuration, "separator")
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if name not in ("default", "v2") or separator not in (".", "/"):
        raise FormatError("unknown chunk key encoding", found=str(value)[:200])
    return ("c" + separator if name == "default" else ""), separator


def _dtype_v3(value: Any) -> DType:
    name, _ = named(value)
    if name in V3_TYPES:
        return V3_TYPES[name]
    if name[:1] == "r" and name[1:].isdecimal() and int(name[1:]) % 8 == 0:
        return np.dtype(f"V{int(name[1:]) // 8}")
    extension_type = extension(name)
    if extension_type is not None:
        return extension_type
    from zarr.dtype import parse_dtype

    try:
        found: DType = parse_dtype(value, zarr_format=3).to_native_dtype()
    except Exception as error:  # whatever a package makes of it that has registered its own
        raise NoField(f"unknown data type {name}") from error
    if found.kind == "O":
        raise NoField(f"unknown data type {name}")
    return found
