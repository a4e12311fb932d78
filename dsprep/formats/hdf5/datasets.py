"""All datasets of an HDF5 file, each once, what they hold, and whether they may be read.

Groups are visited with a stack of our own and remembered by address, so that links which form a
cycle end. Soft and external links are not followed: what a soft link names inside the file has
a name of its own, and an external link may name any file on the machine.

External storage and virtual datasets have their values in other files. Whoever wrote a file can
make the library read any file of the machine through them, so they are read only if the user allows
it (`Elsewhere`). For files that are missing the library gives fill values: here that is an error
(`open_sources`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsprep.core.schema import DType, Kind
from dsprep.errors import FormatError
from dsprep.formats.hdf5.attributes import attribute_names, has_attributes, marked
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, Carrier, overlaps, plain, read_carrier
from dsprep.formats.hdf5.guard import hdf5_errors, open_hdf5
from dsprep.formats.samples import listed
from dsprep.storage.base import Handle

_DEEPEST = 8
"""Virtual datasets of virtual datasets: more is refused, as circles are."""


@dataclass(frozen=True)
class StoredType:
    """What a dataset holds.

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
        """Of the elements."""
        return self.carrier.dtype

    @property
    def nbytes(self) -> int:
        """Logical bytes, as Python's unbounded integer; 16 for each sequence when `vlen`."""
        total = 16 if self.vlen else self.carrier.dtype.itemsize
        for n in self.shape:
            total *= n
        return total


def _unreadable(dataset: Any) -> str | None:
    """Return why values of variable length are left out: only the library would find them."""
    from h5py import h5d

    kinds = {h5d.COMPACT: "compact", h5d.VIRTUAL: "virtual"}
    kind = kinds.get(dataset.id.get_create_plist().get_layout())
    if kind is None:
        return None
    return f"it is {kind}, and of variable length (h5repack -l CHUNK=64 changes that)"


def stored_type_of(dataset: Any, where: object, *, attributed: bool = True) -> StoredType | str:
    """Return what an `h5py.Dataset` holds, or why it cannot be a field.

    `attributed` is whether it has attributes.
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
    """What `walk` found, by path without a leading slash: ``""`` is the root.

    The datasets are in the file's order, each with what it holds, the groups with the names of
    their attributes; for what is left out there is the reason. Objects are opened when they are
    used: each that is open takes kilobytes, and there may be millions.

    Attributes
    ----------
    attributed
        The datasets that have attributes.
    unnoted
        What is left out and holds no values.
    scales
        Those that have the attributes of a dimension scale, and the addresses of their headers.
    """

    file: Any
    where: object
    datasets: dict[str, StoredType] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributed: set[str] = field(default_factory=set)
    scales: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unnoted: set[str] = field(default_factory=set)

    def open(self, path: str) -> Any:
        """Return the h5py object at `path`."""
        with hdf5_errors(f"{self.where}, {path}", "it cannot be opened"):
            return self.file[path] if path else self.file

    @cached_property
    def _inside(self) -> dict[str, list[str]]:
        inside: dict[str, list[str]] = {}
        for path in self.datasets:
            inside.setdefault(path.rpartition("/")[0], []).append(path)
        return inside

    def inside(self, group: str) -> list[str]:
        """Return the paths of the datasets directly in the group called `group`."""
        return self._inside.get(group, [])

    def leave_out(self, path: str, reason: str, *, noted: bool = True) -> None:
        """Leave out a dataset that was found; without `noted`, nobody misses it."""
        del self.datasets[path]
        self.left_out[path] = reason
        if not noted:
            self.unnoted.add(path)
        self.__dict__.pop("_inside", None)


def walk(file: Any, disk: Handle, where: object, elsewhere: Elsewhere) -> Contents:
    """Return the contents of an `h5py.File`; `elsewhere` says what may be read from other files.

    Raises
    ------
    FormatError
        If a link or an object header is damaged.
    """
    import h5py
    from h5py import h5a, h5d, h5g, h5o

    contents = Contents(file, where)
    known = _Headers(file, disk)
    visited: set[int] = set()
    with hdf5_errors(where, "the file cannot be listed"):
        stack = [_Link("", file.id, b"/", int(h5o.get_info(file.id).addr))]
        while stack:
            path, parent, name, address = stack.pop()
            if isinstance(name, str):
                contents.left_out[path] = name
                continue
            if address in visited:
                continue
            visited.add(address)
            header = known.header(address)
            if (stored_type := known.datasets.get(header)) is not None:
                contents.datasets[path] = stored_type
                continue
            item = h5o.open(parent, name)
            attributed = h5a.get_num_attrs(item) > 0
            if isinstance(item, h5g.GroupID) and path.rpartition("/")[2].startswith("_i_"):
                contents.left_out[path] = "it is an index that PyTables keeps"
            elif isinstance(item, h5g.GroupID):
                contents.groups[path] = attribute_names(h5py.Group(item)) if attributed else ()
                # Reversed, because the stack gives back the last one first.
                stack.extend(reversed([*_members(item, f"{path}/" if path else "", where)]))
            elif isinstance(item, h5d.DatasetID):
                dataset = h5py.Dataset(item)
                reason = elsewhere.reason(dataset) or stored_type_of(
                    dataset, f"{where}, field {path}", attributed=attributed
                )
                if isinstance(reason, str):
                    contents.left_out[path] = reason
                    continue
                contents.datasets[path] = known.keep(header, reason)
                names = attribute_names(dataset) if attributed else ()
                if has_attributes(names):
                    contents.attributed.add(path)
                if _SCALE.issubset(names):
                    contents.scales[path] = address
    return contents


_SCALE = frozenset(("CLASS", "NAME"))


class _Link(NamedTuple):
    """A name in a group, as stored, and the address of what it leads to.

    Instead of the name there is a text where it is left out: the reason.
    """

    path: str
    group: Any
    name: bytes | str
    address: int


def _members(group: Any, prefix: str, where: object) -> Iterator[_Link]:
    """Yield what is in an open group (`h5py.h5g.GroupID`)."""
    import h5py

    for raw, address in _links(group, f"{where}, /{prefix}"):
        try:
            path = prefix + raw.decode("utf-8")
        except UnicodeDecodeError:
            path = prefix + raw.decode("utf-8", "backslashreplace")
            yield _Link(path, group, "its name is not UTF-8", -1)
            continue
        if address is not None:
            yield _Link(path, group, raw, address)
            continue
        item: Any = h5py.Group(group).get(raw.decode("utf-8"), getlink=True)
        external = isinstance(item, h5py.ExternalLink)
        target = f"the file {item.filename}" if external else item.path
        yield _Link(path, group, f"it is a link to {target}", -1)


def _links(group: Any, where: str) -> list[tuple[bytes, int | None]]:
    """Return the names in an open group, in the order of h5py, with the address of hard links.

    That is by creation if it was kept. The library walks them as stored: to sort them it makes a
    table, and it crashes where damage stops it on the way.
    """
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


class _Headers:
    """What datasets hold that the library need not open: their headers are known.

    Opening one takes a tenth of a millisecond, and there may be one for each sample. What a dataset
    holds follows from its object header alone. So one whose header has the same bytes as that of a
    dataset which was opened holds the same, wherever its values are and whenever they were written.
    That goes for headers of version 1 in one block, without attributes. Source: HDF5 File Format
    Specification, section IV.A.1.a, "Version 1 Data Object Header Prefix".

    Attributes
    ----------
    datasets
        What datasets hold, by their headers as `header` returns them.
    """

    def __init__(self, file: Any, disk: Handle) -> None:
        self._disk = disk
        self._alike: dict[StoredType, StoredType] = {}
        self.datasets: dict[bytes | None, StoredType] = {}
        plist = file.id.get_create_plist()
        self._usable = plist.get_userblock() == 0 and plist.get_sizes() == (8, 8)

    def header(self, address: int) -> bytes | None:
        """Return the header of a dataset without the address and the time of its values.

        None if it is another object's, or something else may matter too.
        """
        if not self._usable or not 0 < address < self._disk.nbytes:
            return None
        data = bytearray(self._disk.pread(_HEADER_NBYTES, address))
        if len(data) < 16 or data[0] != 1:
            return None
        at, end = 16, 16 + int.from_bytes(data[8:12], "little")
        if end > len(data):
            return None
        located = False
        while at + 8 <= end:
            kind, nbytes, _ = _MESSAGE.unpack_from(data, at)
            at += 8
            if kind in _MATTERS or at + nbytes > end:
                return None
            if kind == _LAYOUT:
                if located or not self._take_address(data, at, nbytes):
                    return None
                located = True
            elif kind == _MODIFIED:
                data[at : at + nbytes] = bytes(nbytes)
            at += nbytes
        return bytes(data[:end]) if located else None

    def _take_address(self, data: bytearray, at: int, nbytes: int) -> bool:
        """Set the address in a layout to zeros; return whether it is one in the file."""
        if nbytes < 18 or data[at : at + 2] != b"\3\1":  # version 3, contiguous
            return False
        address, size = _PLACE.unpack_from(data, at + 2)
        data[at + 2 : at + 10] = bytes(8)
        inside: bool = 0 < address <= self._disk.nbytes - size
        return inside

    def keep(self, header: bytes | None, stored_type: StoredType) -> StoredType:
        """Keep what a dataset holds, and return it or what is equal to it."""
        stored_type = self._alike.setdefault(stored_type, stored_type)
        if header is not None and len(self.datasets) < _MOST_HEADERS:
            self.datasets[header] = stored_type
        return stored_type


_HEADER_NBYTES = 512
"""That of a dataset which h5py made has 272, and 288 bytes in it that matter are many."""

_MOST_HEADERS = 4096
_MESSAGE = struct.Struct("<HHI")
_PLACE = struct.Struct("<QQ")
_LAYOUT, _MODIFIED = 0x08, 0x12
_MATTERS = frozenset((0x07, 0x0C, 0x10, 0x11, 0x15, 0x16))
"""External files, attributes, more of the header elsewhere, and that it is a group."""


# --- other files -----------------------------------------------------------------------------


class Elsewhere:
    """Whether datasets are read that have values in other files: only if `follow` allows it.

    `read` has the names of the other files, as the datasets name them.
    """

    def __init__(self, follow: bool) -> None:
        self._follow = follow
        self.read: dict[str, None] = {}

    def reason(self, dataset: Any) -> str | None:
        """Return why an `h5py.Dataset` is not read, or None if it may be."""
        names = dict.fromkeys(_other_files(dataset))
        if names and not self._follow:
            return f"its values are in other files, {listed([*names])} (--follow-external reads it)"
        self.read |= names
        return None


def _other_files(dataset: Any, depth: int = 0) -> Iterator[str]:
    """Yield the names of the other files, and of links, that an `h5py.Dataset` is read through."""
    import h5py
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    _check_depth(depth, dataset)
    if layout == h5d.CONTIGUOUS:
        for i in range(plist.get_external_count()):
            yield os.fsdecode(plist.get_external(i)[0])
    for i in range(plist.get_virtual_count() if layout == h5d.VIRTUAL else 0):
        if (name := plist.get_virtual_filename(i)) != ".":
            yield name
            continue
        item, source = dataset.file, plist.get_virtual_dsetname(i)
        for part in source.strip("/").split("/"):
            link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
            if link is not None and not isinstance(link, h5py.HardLink):
                yield f"through the link {source}"
            item = item[part] if isinstance(link, h5py.HardLink) else None
        if isinstance(item, h5py.Dataset):
            yield from _other_files(item, depth + 1)


def _check_depth(depth: int, dataset: Any) -> None:
    if depth == _DEEPEST:
        raise FormatError(
            "a dataset is virtual, and so are its sources, without end",
            where=f"{dataset.file.filename}, field {str(dataset.name).strip('/')}",
        )


def open_sources(dataset: Any, where: str, depth: int = 0) -> None:
    """Have the library open every source of a virtual dataset, and look for external files.

    For a source that it cannot open it gives the fill value. One that it has read from stays open
    as long as the dataset.

    Raises
    ------
    FormatError
        If a file or a dataset is missing, or too short.
    """
    import h5py
    from h5py import h5d, h5s, h5t

    plist, path = dataset.id.get_create_plist(), Path(dataset.file.filename)
    if plist.get_layout() != h5d.VIRTUAL:
        check_external(dataset, where)
        return
    _check_depth(depth, dataset)
    missing, points, kept = list[str](), [], []
    files: dict[str, Any] = {".": dataset.file}
    with ExitStack() as opened:
        for i in range(plist.get_virtual_count()):
            name, source = plist.get_virtual_filename(i), plist.get_virtual_dsetname(i)
            if "%b" in (name + source).replace("%%", ""):
                raise FormatError(
                    "a virtual dataset has any number of sources, so none is known to be missing",
                    where=where,
                    found=f"{source} in {name}",
                    fix="make it again with a source of its own for each part",
                )
            if name not in files:
                found = next(filter(Path.is_file, _candidates(name, path)), None)
                with hdf5_errors(f"{where}, source {found}", "it cannot be opened"):
                    files[name] = found and opened.enter_context(open_hdf5(found))
            item = None if files[name] is None else files[name].get(source)
            if not isinstance(item, h5py.Dataset):
                missing.append(name if files[name] is None else f"{source} in {name}")
                continue
            open_sources(item, where, depth + 1)
            kept.append(item)
            points.append(_first_point(plist.get_virtual_vspace(i)))
        if missing:
            raise FormatError(
                "sources of a virtual dataset are missing",
                where=where,
                expected=f"beside {path}, or where HDF5_VDS_PREFIX says",
                found=f"{len(missing)} of {plist.get_virtual_count()}: {listed(missing)}",
            )
        with path.open("rb"):  # the library needs one more at times
            pass
        space, one = dataset.id.get_space(), np.zeros(1, dataset.dtype)
        for point in points:
            if all(p < n for p, n in zip(point, dataset.shape, strict=True)):
                space.select_hyperslab(point, (1,) * len(point))
                element = h5t.py_create(dataset.dtype, logical=True)
                dataset.id.read(h5s.create_simple((1,)), space, one, element)


def _first_point(space: Any) -> tuple[int, ...]:
    """Return a point of the selection that a source of a virtual dataset fills."""
    from h5py import h5s

    if space.get_select_type() == h5s.SEL_ALL:
        return (0,) * int(space.get_simple_extent_ndims())
    if space.is_regular_hyperslab():
        return tuple(map(int, space.get_regular_hyperslab()[0]))
    return tuple(map(int, space.get_select_hyper_blocklist()[0][0]))


def check_external(dataset: Any, where: str) -> None:
    """Raise `FormatError` if a file of external storage is missing, or short, which reads as 0."""
    plist, path = dataset.id.get_create_plist(), Path(dataset.file.filename)
    left = math.prod(dataset.shape) * int(dataset.id.get_type().get_size())
    for i in range(plist.get_external_count()):
        name, offset, size = plist.get_external(i)
        # As the library looks for it.
        file = Path(_origin(os.environ.get("HDF5_EXTFILE_PREFIX", ""), path), os.fsdecode(name))
        needed = offset + min(size, left)
        nbytes = file.stat().st_size if file.is_file() else -1
        if nbytes < needed:
            raise FormatError(
                f"a file of its values is missing or too short: {file.absolute()}",
                where=where,
                expected=f"{needed} bytes",
                found=f"{nbytes} bytes" if nbytes >= 0 else "none",
            )
        left -= min(size, left)


def _candidates(name: str, path: Path) -> Iterator[Path]:
    """Yield the files that may be the one that a virtual dataset calls `name`, as the library does.

    It tries the variable's directories, that of the file, and the current one; of an absolute path
    that is not there, the last part alone.
    """
    name = name.replace("%%", "%")
    names = [name, Path(name).name] if Path(name).is_absolute() else [name]
    prefixes = [_origin(p, path) for p in os.environ.get("HDF5_VDS_PREFIX", "").split(":") if p]
    for folder in (*map(Path, prefixes), path.parent, path.resolve().parent, Path()):
        yield from (folder / each for each in names)


def _origin(prefix: str, path: Path) -> str:
    return prefix.replace("${ORIGIN}", str(path.resolve().parent))
