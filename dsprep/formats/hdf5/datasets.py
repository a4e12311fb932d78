"""All datasets of an HDF5 file, each once, what they hold, and whether they may be read.

Groups are visited with a stack of our own and remembered by address, so that links which form a
cycle end. Soft and external links are not followed: what a soft link names inside the file has
a name of its own, and an external link may name any file on the machine.

External storage and virtual datasets have their values in other files. Whoever wrote a file can
make the library read any file of the machine through them, so they are read only if the user allows
it. For files that are missing the library gives fill values: here that is an error (`sources`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import DType, Kind
from dsprep.errors import FormatError
from dsprep.formats.hdf5.attributes import attribute_names, has_attributes, marked
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, Carrier, overlaps, plain, read_carrier
from dsprep.formats.hdf5.guard import hdf5_errors, open_hdf5
from dsprep.formats.hdf5.heaps import Heaps
from dsprep.formats.hdf5.locate import obstacle
from dsprep.formats.samples import listed
from dsprep.storage.base import Handle


@dataclass(frozen=True)
class StoredType:
    """The contents of a dataset.

    Attributes
    ----------
    carrier
        The elements; those inside the sequences when `vlen`.
    shape
        With the axes of array types, and without those of carriers.
    kind
        ``"str"`` and ``"bytes"`` only with `vlen`.
    vlen
        Whether each element is a sequence of its own length.
    """

    carrier: Carrier
    shape: tuple[int, ...]
    kind: Kind = "array"
    vlen: bool = False

    @property
    def dtype(self) -> DType:
        """The dtype of the elements."""
        return self.carrier.dtype

    @property
    def nbytes(self) -> int:
        """Logical bytes, as Python's unbounded integer; 16 for each sequence when `vlen`."""
        return math.prod(self.shape) * (16 if self.vlen else self.carrier.dtype.itemsize)


SEQUENCES = "sequences of variable length are read only from one axis of samples"


def _unreadable(dataset: Any) -> str | None:
    """Return why values of variable length are left out: only the library would find them."""
    import h5py
    from h5py import h5t

    if len(dataset.shape) > 1:
        return SEQUENCES
    if reason := obstacle(dataset, raw=True):
        return f"{reason}, and of variable length (h5repack -l CHUNK=64 -f GZIP=1 changes that)"
    element = dataset.id.get_type()
    if not isinstance(element, h5t.TypeVlenID):
        return None
    items, base = element.get_super(), h5py.check_vlen_dtype(dataset.dtype)
    if items.get_class() == h5t.OPAQUE or items == h5t.py_create(base, logical=True):
        return None
    return "the items of its sequences are of a type that numpy lacks"


def stored_type_of(dataset: Any, where: object, *, attributed: bool = True) -> StoredType | str:
    """Return the stored type of an `h5py.Dataset`, or the reason why it cannot be a field.

    `attributed` states whether it has attributes.
    """
    import h5py

    sizes = dataset.shape
    if sizes is None:
        return "it holds no data"
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"its type is unknown to numpy: {error}"
    shape = tuple(map(int, sizes))
    string = h5py.check_string_dtype(dtype)
    if string is not None and string.length is None:
        byte = np.dtype(np.uint8)
        return _unreadable(dataset) or StoredType(Carrier(byte, byte), shape, "str", vlen=True)
    if h5py.check_ref_dtype(dtype) is not None:
        return "it holds references"
    base = h5py.check_vlen_dtype(dtype)
    element = dtype if base is None else np.dtype(base)
    if element.hasobject or element.itemsize == 0:
        return "its type has parts of variable length"
    element = plain(element)
    if overlaps(element):
        return "h5py gives it a type whose members overlap"
    if element.subdtype is not None:
        if base is not None:
            return "its type is a sequence of arrays"
        element, extra = element.subdtype
        shape += extra
    if base is not None:
        kind: Kind = "bytes" if element.str == "|V1" else "array"
        element = np.dtype(np.uint8) if kind == "bytes" else element
        return _unreadable(dataset) or StoredType(Carrier(element, element), shape, kind, vlen=True)
    text = marked(dataset, DTYPE_ATTRIBUTE, where) if attributed else None
    if text is None:
        return StoredType(Carrier(element, element), shape)
    carrier = read_carrier(text, element, shape, where)
    return StoredType(carrier, shape[: len(shape) - len(carrier.axis)])


# --- the file --------------------------------------------------------------------------------


@dataclass
class Contents:
    """The contents of a file, by path without a leading slash: ``""`` is the root.

    The datasets are in the file's order, each with what it holds, the groups with the names of
    their attributes; for what is left out there is the reason. Objects are opened when they are
    used: each that is open takes kilobytes, and there may be millions.

    Attributes
    ----------
    attributed
        The datasets that have attributes.
    scales
        Those that have the attributes of a dimension scale.
    disk, heaps
        The file open for plain reads, and its heaps.
    elsewhere
        The names of other files that have values.
    enums
        The datasets of numbers that have names.
    """

    file: Any
    disk: Handle
    heaps: Heaps
    datasets: dict[str, StoredType] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributed: set[str] = field(default_factory=set)
    scales: set[str] = field(default_factory=set)
    elsewhere: dict[str, None] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    enums: list[str] = field(default_factory=list)

    @cached_property
    def where(self) -> Path:
        """The path of the file, for messages."""
        return self.disk.path

    def open(self, path: str) -> Any:
        """Return the h5py object at `path`."""
        with hdf5_errors(f"{self.where}, {path}", "it cannot be opened"):
            return self.file[path] if path else self.file

    def leave_out(self, path: str, reason: str) -> None:
        """Leave out a dataset that was found."""
        del self.datasets[path]
        self.left_out[path] = reason


def walk(file: Any, disk: Handle, *, follow: bool) -> Contents:
    """Return the contents of an `h5py.File`, which is open for plain reads as `disk` too.

    With `follow`, values may be in other files.

    Raises
    ------
    FormatError
        If a link or an object header is damaged.
    """
    import h5py
    from h5py import h5a, h5d, h5g, h5o, h5t

    where, visited = disk.path, set[int]()
    with hdf5_errors(where, "the HDF5 file cannot be opened"):
        contents = Contents(file, disk, Heaps(disk, file))
    plain_types: dict[tuple[Any, ...], StoredType] = {}  # there may be millions
    with hdf5_errors(where, "the file cannot be listed"):
        stack = [("", file.id, b"/", int(h5o.get_info(file.id).addr))]
        while stack:
            path, parent, name, address = stack.pop()
            if address in visited:
                continue
            visited.add(address)
            item = h5o.open(parent, name)
            attributed = h5a.get_num_attrs(item) > 0
            if isinstance(item, h5g.GroupID) and path.rpartition("/")[2].startswith("_i_"):
                contents.left_out[path] = "it is an index that PyTables keeps"
            elif isinstance(item, h5g.GroupID):
                contents.groups[path] = attribute_names(h5py.Group(item)) if attributed else ()
                # Reversed, because the stack gives back the last one first.
                stack.extend(reversed([*_members(item, f"{path}/" if path else "", contents)]))
            elif isinstance(item, h5d.DatasetID):
                space, element = item.get_space(), item.get_type()
                key = element.encode(), space.get_simple_extent_type(), space.shape
                stored_type: StoredType | str | None = None
                others = other_files(item)
                if others and not follow:
                    stored_type = f"its values are in other files, {listed(others)} ({_FOLLOW})"
                else:
                    contents.elsewhere.update(dict.fromkeys(others))
                    stored_type = None if attributed else plain_types.get(key)
                if stored_type is None:
                    dataset, at = h5py.Dataset(item), f"{where}, field {path}"
                    stored_type = stored_type_of(dataset, at, attributed=attributed)
                if isinstance(stored_type, str):
                    contents.left_out[path] = stored_type
                    continue
                if isinstance(element, h5t.TypeEnumID) and stored_type.dtype.kind in "iu":
                    contents.enums.append(path)
                contents.datasets[path] = stored_type
                if not attributed and not stored_type.vlen:
                    plain_types[key] = stored_type
                names = attribute_names(h5py.Dataset(item)) if attributed else ()
                if attributed and has_attributes(names):
                    contents.attributed.add(path)
                if _SCALE.issubset(names):
                    contents.scales.add(path)
    return contents


_SCALE, _FOLLOW = frozenset(("CLASS", "NAME")), "--follow-external reads it"


def _members(group: Any, prefix: str, contents: Contents) -> Iterator[tuple[str, Any, bytes, int]]:
    """Yield path, group, name and address of what is in an open group (`h5py.h5g.GroupID`)."""
    import h5py

    for raw, address in _links(group, f"{contents.where}, /{prefix}"):
        path = prefix + raw.decode("utf-8", "backslashreplace")
        if path.encode() != prefix.encode() + raw:
            contents.left_out[path] = "its name is not UTF-8"
        elif address is not None:
            yield path, group, raw, address
        else:
            item: Any = h5py.Group(group).get(raw.decode("utf-8"), getlink=True)
            external = isinstance(item, h5py.ExternalLink)
            target = f"the file {item.filename}" if external else item.path
            contents.left_out[path] = f"it is a link to {target}"


def _links(group: Any, where: str) -> list[tuple[bytes, int | None]]:
    """Return the names in an open group, in the order of h5py, with the address of hard links."""
    # That is by creation if it was kept. The library walks them as stored: to sort them it makes a
    # table, and it crashes where damage stops it on the way.
    from h5py import h5, h5l

    links: list[tuple[int, bytes, int | None]] = []

    def note(name: bytes, info: Any) -> None:
        order = int(info.corder) if info.corder_valid else 0
        links.append((order, name, int(info.u) if info.type == h5l.TYPE_HARD else None))

    group.links.iterate(note, idx_type=h5.INDEX_NAME, order=h5.ITER_NATIVE, info=True)
    links.sort(key=itemgetter(0, 1))
    if len({name for _, name, _ in links}) < len(links):
        # The library opens one of them by both names, and nothing gives the other.
        names = sorted(name for _, name, _ in links)
        twice = next(a for a, b in pairwise(names) if a == b).decode("utf-8", "backslashreplace")
        raise FormatError(
            f"a group holds two objects of the name {twice}",
            where=where,
            fix="the file was changed or is damaged",
        )
    return [(name, address) for _, name, address in links]


# --- other files -----------------------------------------------------------------------------


def other_files(item: Any) -> list[str]:
    """Return the names of the files that have the values of a dataset, if others do.

    `item` is an open one: an `h5py.h5d.DatasetID`.
    """
    from h5py import h5d

    plist = item.get_create_plist()
    if plist.get_layout() == h5d.VIRTUAL:
        names = map(plist.get_virtual_filename, range(plist.get_virtual_count()))
        return [*dict.fromkeys(names)] or ["."]
    external = map(plist.get_external, range(plist.get_external_count()))
    return [os.fsdecode(name) for name, *_ in external]


def sources(dataset: Any, where: str) -> list[tuple[Path, int]]:
    """Return the files that a dataset is read through, each with the bytes that it must have.

    Raises
    ------
    FormatError
        If one is missing or damaged, or refers to further ones.
    """
    import h5py
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    if not other_files(dataset.id):
        return []
    path = Path(dataset.file.filename)
    if plist.get_layout() != h5d.VIRTUAL:
        left, files = math.prod(dataset.shape) * int(dataset.id.get_type().get_size()), []
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(path.parent))
        for i in range(plist.get_external_count()):
            name, offset, size = plist.get_external(i)
            files.append((Path(prefix, os.fsdecode(name)), offset + min(size, left)))
            left -= min(size, left)
        return files
    files, names_by_file = [], dict[str, list[str]]()
    for i in range(plist.get_virtual_count()):
        names_by_file.setdefault(plist.get_virtual_filename(i), []).append(
            plist.get_virtual_dsetname(i)
        )
    for name, names in names_by_file.items():
        file = path if name == "." else path.parent / name.replace("%%", "%")
        here = f"{where}, source {file}"
        if not file.is_file():
            raise FormatError("a source of a virtual dataset is missing", where=here)
        files.append((file, file.stat().st_size))
        with hdf5_errors(here, "it cannot be opened"), open_hdf5(file) as opened:
            for inside in names:
                if not isinstance(item := opened.get(inside), h5py.Dataset):
                    raise FormatError(f"the virtual dataset's source lacks {inside}", where=here)
                if other_files(item.id):
                    raise FormatError(f"{inside} is virtual or external, too", where=here, fix=_FIX)
    return files


def check_sources(files: Sequence[tuple[Path, int]], where: str) -> None:
    """Raise `FormatError` if one of `sources` is gone or too short: the library makes up values."""
    for file, needed in files:
        nbytes = file.stat().st_size if file.is_file() else -1
        if nbytes < needed:
            raise FormatError(
                f"a file of its values is missing or too short: {file.absolute()}",
                where=where,
                expected=f"{needed} bytes",
                found=f"{nbytes} bytes" if nbytes >= 0 else "none",
            )


_FIX = "make the virtual dataset again of the datasets that have the values"
