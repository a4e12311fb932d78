"""What is done to the chunks of an array before they are stored, in the words of `filters`.

Only what `dsprep.core.filters` undoes has such words, behind elements that lie in C order. For all
else `Unlocated` says what it is that only zarr reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsprep.core import filters
from dsprep.core.schema import is_extension
from dsprep.errors import FormatError
from dsprep.formats.zarr.metadata import WRONG, ArrayMeta, byte_order, named, read_document
from dsprep.formats.zarr.store import Store, join

Filters = tuple[Mapping[str, Any], ...]

NEEDED = {"shuffle": ("elementsize",), "crc32c": ("location",)}
"""Parameters that matter when reading, by codec."""

NUMCODECS = "numcodecs."
"""What v3 puts before the names of codecs that have no specification."""


class Unlocated(Exception):
    """Only zarr reads this; the text is the reason, a clause."""


def chunk_filters(store: Store, meta: ArrayMeta) -> Filters:
    """Return the filters of the chunks, in the order of writing.

    Raises
    ------
    Unlocated
        If they are not known, or elements do not lie in C order.
    FormatError
        If the metadata have been damaged since the store was opened.
    """
    if meta.vlen:
        raise Unlocated("only zarr reads elements of varying length")
    key = join(meta.path, "zarr.json" if meta.version == 3 else ".zarray")
    document = read_document(store, key)
    if document is None:
        raise FormatError("the metadata have vanished", where=f"{store.path}, {key}")
    try:
        return (_v3 if meta.version == 3 else _v2)(document, meta)
    except FormatError:
        raise
    except WRONG as error:
        where = f"{store.path}, {key}"
        raise FormatError(f"the metadata is wrong ({error})", where=where) from error


def _v2(document: Mapping[str, Any], meta: ArrayMeta) -> Filters:
    if document.get("order", "C") != "C" and len(meta.shape) > 1:
        raise Unlocated("only zarr reads chunks in Fortran order")
    codecs = [*(document.get("filters") or []), document.get("compressor")]
    return _known([(c["id"], c) for c in codecs if c is not None])


def _v3(document: Mapping[str, Any], meta: ArrayMeta) -> Filters:
    codecs = [named(c) for c in document["codecs"]]
    if codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            raise Unlocated("only zarr reads shards that are encoded as a whole")
        if meta.sharding is None:
            raise Unlocated("only zarr reads shards whose index is encoded otherwise")
        codecs = [named(c) for c in codecs[0][1]["codecs"]]
    if codecs[0][0] != "bytes":
        raise Unlocated(f"only zarr reads codec {codecs[0][0]}")
    # zarr-python passes over the order of bytes of these.
    composed = meta.dtype.names is not None or is_extension(meta.dtype)
    if composed and meta.dtype.itemsize > 1 and byte_order(codecs) == ">":
        raise Unlocated(f"only zarr reads big-endian {meta.dtype}")
    return _known(codecs[1:])


def _known(codecs: Sequence[tuple[str, Mapping[str, Any]]]) -> Filters:
    """Return the codecs as filters, with the parameters that matter."""
    found = []
    for name, configuration in codecs:
        id = name.removeprefix(NUMCODECS)
        kept = {k: configuration[k] for k in NEEDED.get(id, ()) if k in configuration}
        try:
            filters.check([{"id": id, **kept}], name)
        except FormatError as error:
            raise Unlocated(f"only zarr reads codec {name}") from error
        found.append({"id": id, **kept})
    return tuple(found)
