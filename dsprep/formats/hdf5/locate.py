"""The places of the elements of a dataset in the file, and the encoding of its chunks.

A dataset is described by a `Grid` if its bytes are exactly those of the field's dtype and every
chunk can be decoded by `dsprep.core.filters`. Whatever else the library may do to the bytes
(convert types, look into heaps, other files or the object header) makes it *unlocated*, with the
reason.

The library walks the index of the chunks once, whatever its kind, and calls back for each chunk;
asking it for one chunk after another would take hours for a million of them.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsprep.core.filters import decode
from dsprep.errors import FormatError
from dsprep.formats.located import Unlocated
from dsprep.layout.describe import Chunking
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Grid
from dsprep.storage.base import Handle

# --- filters ---------------------------------------------------------------------------------

Filters: TypeAlias = tuple[Mapping[str, Any], ...]

_NAMES = {
    1: "gzip",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}
_SHUFFLE = 2
_UNDONE = {1: "zlib", 3: "fletcher32", 32001: "blosc", 32015: "zstd"}
"""Filters whose output is exactly what `dsprep.core.filters` takes; lz4's framing differs."""


def filter_name(code: int, label: bytes) -> str:
    """Return how a person calls a filter; `label` is what the file calls it."""
    return _NAMES.get(code) or label.decode("utf-8", "replace").strip("\0 ") or str(code)


def filters_of(plist: Any) -> Filters | str:
    """Return filters as `dsprep.core.filters` knows them, or the name of one that it does not.

    They are those of a ``h5py.h5p.PropDCID``.
    """
    filters: list[Mapping[str, Any]] = []
    for i in range(plist.get_nfilters()):
        code, _, values, label = plist.get_filter(i)
        # Without a size, as on variable-length types, the library leaves the shuffle out.
        size = int(values[0]) if values else 1
        if code == _SHUFFLE and 0 < size < 1 << 31:
            filters.append({"id": "shuffle", "elementsize": size})
        elif code in _UNDONE:
            filters.append({"id": _UNDONE[code]})
        else:
            return filter_name(code, label)
    return tuple(filters)


def check_chunks(dataset: Any, start: int, stop: int, where: object) -> None:
    """Raise `FormatError` if a chunk of rows ``start <= i < stop`` cannot be left to the library.

    It takes memory for whatever a stream inflates to, and any bytes for a whole chunk. So the
    chunks are decoded here too, and nothing of them is kept.
    """
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    if plist.get_layout() != h5d.CHUNKED:
        return
    filters = filters_of(plist)
    if isinstance(filters, str) or not dataset.size:
        return
    shape, chunk = tuple(map(int, dataset.shape)), tuple(map(int, dataset.chunks))
    nbytes = math.prod(chunk) * int(dataset.id.get_type().get_size())
    first = start // chunk[0] * chunk[0]
    others = (range(0, n, c) for n, c in zip(shape[1:], chunk[1:], strict=True))
    for corner in itertools.product(range(first, stop, chunk[0]), *others):
        info, here = dataset.id.get_chunk_info_by_coord(corner), f"{where}, chunk at {corner}"
        over = any(a + c > n for a, c, n in zip(corner, chunk, shape, strict=True))
        if info.byte_offset is None or (info.size == nbytes and (over or not filters)):
            continue  # those that stick out may be stored without filters
        if not filters:  # the library leaves the rest of its memory as it was
            raise FormatError(
                "a chunk without filters is not of a chunk's size",
                where=f"{here}, offset {info.byte_offset}",
                expected=f"{nbytes} bytes",
                found=f"{info.size}",
            )
        mask, data = dataset.id.read_direct_chunk(corner)
        decode(data, filters, mask, nbytes, here)


# --- the index of the chunks -----------------------------------------------------------------

CHUNK = np.dtype([("address", "<i8"), ("nbytes", "<u4"), ("mask", "<u4")])

_FEW = 1 << 20


def grid_of(dataset: Any) -> tuple[int, ...]:
    """Return the number of chunks along each axis of an `h5py.Dataset`."""
    return tuple(-(-int(n) // int(c)) for n, c in zip(dataset.shape, dataset.chunks, strict=True))


def chunk_table(dataset: Any, file_nbytes: int) -> NDArray[Any] | None:
    """Return offsets and sizes of the chunks of a dataset.

    Returns
    -------
    Array of `CHUNK`, one for each chunk, in C order of the chunks: file offset or -1 if it is not
    stored; bytes on disk; and a bit for each filter that was left out. None if the library
    cannot list them, may list them at wrong places, or nearly none of very many is stored.

    Raises
    ------
    FormatError
        If the index names a chunk twice.
    """
    grid = grid_of(dataset)
    chunks = math.prod(grid)
    if chunks > max(file_nbytes, _FEW):
        return None
    if chunks > _FEW and dataset.id.get_num_chunks() < chunks // 64:
        return None
    where = f"{dataset.file.filename}, field {str(dataset.name).strip('/')}"
    rows, rank = array("q"), len(grid)

    def note(chunk: Any) -> None:
        corner, mask, address, nbytes = chunk
        rows.extend((*corner, -1 if address is None else address, nbytes, mask))

    dataset.id.chunk_iter(note)
    listed = np.array(rows, np.int64).reshape(-1, rank + 3)
    listed = listed[listed[:, rank] >= 0]
    indices, rest = np.divmod(listed[:, :rank], np.array(dataset.chunks, np.int64))
    inside = (indices < np.array(grid)).all(axis=1) & ~rest.any(axis=1)
    numbers = np.ravel_multi_index(tuple(indices[inside].T), grid)
    if bool((listed[:, rank + 1] >> 32).any()):
        raise FormatError("a chunk is larger than the format allows", where=where)
    table = np.zeros(chunks, CHUNK)
    table["address"] = -1
    table["address"][numbers], table["nbytes"][numbers] = listed[inside, rank : rank + 2].T
    table["mask"][numbers] = listed[inside, rank + 2] & 0xFFFFFFFF
    # By a damaged index the library finds other chunks than it lists.
    if not inside.all() or (dataset.id.get_num_chunks() and misplaced(dataset, table)):
        return None
    if len(numbers) != int(np.count_nonzero(table["address"] >= 0)):
        raise FormatError("the index of the chunks names one of them twice", where=where)
    return table


def _corner(dataset: Any, number: int) -> tuple[int, ...]:
    """Return the first element of a chunk, by its number in C order."""
    indices = np.unravel_index(number, grid_of(dataset))
    return tuple(int(p) * int(c) for p, c in zip(indices, dataset.chunks, strict=True))


def misplaced(dataset: Any, table: NDArray[Any]) -> bool:
    """Return whether the library may have listed chunks at places that are those of others.

    Releases of HDF5 count wrongly through the index that datasets of its latest format have when
    one axis is unlimited and it is not the first one: axes before that stay at 0, and places along
    it are skipped.
    """
    one = dataset.maxshape.count(None) == 1 and dataset.maxshape[0] is not None
    return one and bool((table["address"] < 0).any())


# --- datasets --------------------------------------------------------------------------------


def chunking(dataset: Any) -> Chunking:
    """Return the form of an `h5py.Dataset`, as far as it is known without its chunks."""
    from h5py import h5d

    plist, shape = dataset.id.get_create_plist(), tuple(map(int, dataset.shape))
    layout_class, chunk, stored, labels = plist.get_layout(), None, "", []
    if layout_class == h5d.CHUNKED:
        chunk = tuple(map(int, dataset.chunks))
        for i in range(plist.get_nfilters()):
            code, _, values, name = plist.get_filter(i)
            label = filter_name(code, name)
            labels.append(f"{label}:{values[0]}" if code == 1 and values else label)
    elif layout_class != h5d.CONTIGUOUS or plist.get_external_count():
        stored = {h5d.COMPACT: "compact", h5d.VIRTUAL: "virtual"}.get(layout_class, "external")
    located = not obstacle(dataset) and (chunk is not None or dataset.id.get_storage_size() > 0)
    return Chunking(
        shape=shape,
        itemsize=int(dataset.dtype.itemsize),
        chunk=chunk,
        codecs=tuple(labels),
        plain=located and not labels and (chunk is None or chunk[1:] == shape[1:]),
        library="" if located else "the HDF5 library",
        stored=stored,
    )


def obstacle(dataset: Any, *, raw: bool = False) -> str:
    """Return why only the library can read an `h5py.Dataset`, "" if its metadata say nothing."""
    from h5py import h5d, h5t

    if not raw and h5t.py_create(dataset.dtype, logical=True) != dataset.id.get_type():
        return "the HDF5 library converts its type when it reads"
    plist = dataset.id.get_create_plist()
    layout_class = plist.get_layout()
    if layout_class == h5d.COMPACT:
        return "it is compact: its values are in the file's metadata"
    if layout_class == h5d.VIRTUAL:
        return "it is virtual: it is made of parts of other datasets"
    if plist.get_external_count():
        return "its values are in external files"
    filters = filters_of(plist)
    if isinstance(filters, str):
        return f"its chunks are encoded by {filters}, which only HDF5 libraries decode"
    return ""


def locate_grid(
    dataset: Any,
    file: Handle,
    where: str,
    *,
    raw: int | None = None,
) -> Grid | None:
    """Return where the rows of an `h5py.Dataset` in `file` are; None if it has no bytes.

    With `raw`, elements of so many bytes are wanted as stored, whatever their type is; what was
    never written is then zero bytes.

    Raises
    ------
    Unlocated
        If only the library can read them.
    FormatError
        If they are outside the file, or the index of its chunks is damaged.
    """
    shape = tuple(map(int, dataset.shape))
    if not math.prod(shape):
        return None
    if reason := obstacle(dataset, raw=raw is not None):
        raise Unlocated(reason)
    itemsize = raw or int(dataset.id.get_type().get_size())
    of_layout = _contiguous if dataset.chunks is None else _chunked
    return of_layout(dataset, shape, itemsize, file, where, raw=raw is not None)


def _contiguous(
    dataset: Any, shape: tuple[int, ...], itemsize: int, file: Handle, where: str, *, raw: bool
) -> Grid:
    nbytes = math.prod(shape) * itemsize
    stored, offset = dataset.id.get_storage_size(), dataset.id.get_offset() or 0
    if not shape:  # one element, perhaps of an array type
        shape = (dataset.dtype.subdtype or (None, (1,)))[1]
        itemsize = nbytes // math.prod(shape)
    if stored not in (0, nbytes):
        raise Unlocated("it has another size than its shape says")
    # Before the first write there is no address, or, with a user block, a false one.
    if not stored and offset <= dataset.file.id.get_create_plist().get_userblock():
        if not raw:
            raise Unlocated("nothing was ever written to it")
        fill = _no_items(dataset, itemsize)
        return Grid(Blocks(Affine(1, -1), Affine(1, 0)), shape, itemsize, shape, fill=fill)
    if not 0 < offset <= file.nbytes - nbytes:
        raise FormatError(
            "the data are outside the file",
            where=where,
            expected=f"{nbytes} bytes from {offset} on",
            found=f"a file of {file.nbytes} bytes",
        )
    return Grid(Blocks(Affine(1, offset), Affine(1, nbytes)), shape, itemsize, shape)


def _chunked(
    dataset: Any, shape: tuple[int, ...], itemsize: int, file: Handle, where: str, *, raw: bool
) -> Grid:
    plist = dataset.id.get_create_plist()
    filters = filters_of(plist)
    assert not isinstance(filters, str)  # see `obstacle`
    chunk = tuple(map(int, dataset.chunks))
    nbytes = math.prod(chunk) * itemsize
    table = chunk_table(dataset, file.nbytes)
    if table is None:
        raise Unlocated("the HDF5 library cannot list its chunks")
    _check(table, nbytes if not filters else None, file, where)
    stored = table["address"] >= 0
    if dataset.file.id.get_create_plist().get_userblock() and not _believed(dataset, table, file):
        raise Unlocated("the HDF5 library gives wrong addresses after a user block")
    if filters:
        _check_edges(dataset, table, nbytes, file, filters)
    blocks = Blocks(
        Explicit(np.ascontiguousarray(table["address"])),
        Explicit(table["nbytes"].astype(np.int64)),
    )
    mask = table["mask"] & np.uint32((1 << len(filters)) - 1)
    masks = Explicit(mask.astype(np.int64)) if bool(mask.any()) else None
    missing = None
    if not stored.all() and raw:
        missing = _no_items(dataset, itemsize)
    elif not stored.all():  # the element that the library gives
        corner = _corner(dataset, int(stored.argmin()))
        missing = _by_library(dataset, corner, (1,) * len(chunk))
    return Grid(blocks, shape, itemsize, chunk, None, filters, masks, missing)


def _check(table: NDArray[Any], nbytes: int | None, file: Handle, where: str) -> None:
    """Raise `FormatError` unless every stored chunk is in the file, of `nbytes` if given."""
    address, sizes = table["address"], table["nbytes"].astype(np.int64)
    wrong = (address == 0) | (address > file.nbytes - sizes)
    wrong |= (address > 0) & ((sizes == 0) if nbytes is None else (sizes != nbytes))
    if bool(wrong.any()):
        i = int(wrong.argmax())
        raise FormatError(
            "a chunk is outside the file, or has a wrong size",
            where=f"{where}, offset {int(address[i])}",
            expected=None if nbytes is None else f"{nbytes} bytes",
            found=f"{int(sizes[i])} bytes in a file of {file.nbytes} bytes",
        )


def _check_edges(
    dataset: Any, table: NDArray[Any], nbytes: int, file: Handle, filters: Filters
) -> None:
    """Raise `Unlocated` if chunks that stick out of a filtered dataset may not be filtered."""
    # That is an option of the dataset (``H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS``) which neither h5py
    # nor the chunk's own mask states. It is ruled out where one of these chunks has another size
    # than its content, which is `nbytes`, or the first one can be decoded.
    sticks_out = np.zeros(grid_of(dataset), bool)
    for axis, (n, c) in enumerate(zip(dataset.shape, dataset.chunks, strict=True)):
        np.moveaxis(sticks_out, axis, 0)[-1] |= n % c != 0
    edges = table[sticks_out.reshape(-1) & (table["address"] >= 0)]
    if not len(edges) or ((edges["nbytes"] != nbytes) | (edges["mask"] != 0)).any():
        return
    data = file.pread_exact(nbytes, int(edges["address"][0]))
    try:
        decode(data, filters, 0, nbytes, "")
        proven = any(f["id"] != "shuffle" for f in filters)
    except FormatError:
        proven = False
    if not proven:
        raise Unlocated("chunks at its edges may be stored without its filters")


def _believed(dataset: Any, table: NDArray[Any], file: Handle) -> bool:
    """Return whether a chunk is where the library says: some releases forget the user block."""
    stored = np.flatnonzero(table["address"] >= 0)
    if not len(stored):
        return True
    number = int(stored[int(table["nbytes"][stored].argmin())])
    _, data = dataset.id.read_direct_chunk(_corner(dataset, number))
    entry = table[number]
    return file.pread(int(entry["nbytes"]), int(entry["address"])) == bytes(data)


def _by_library(dataset: Any, corner: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    """Return elements as the library reads them, zeros where it reads none."""
    from h5py import h5s, h5t

    space = dataset.id.get_space()
    space.select_hyperslab(corner, shape)
    values = np.zeros(shape, dataset.dtype)
    element = h5t.py_create(dataset.dtype, logical=True)
    dataset.id.read(h5s.create_simple(shape), space, values, element)
    return values.tobytes()


def _no_items(dataset: Any, itemsize: int) -> bytes:
    """Return a descriptor of no items: that is what chunks hold that were never written."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    if plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
        raise Unlocated("it has a fill value of variable length")
    return bytes(itemsize)
