"""All datasets of an HDF5 file, each once, what they hold, and whether they may be read.

Groups are visited with a stack of our own and remembered by address, so that links which form a
cycle end. Soft and external links are not followed: what a soft link names inside the file has
a name of its own, and an external link may name any file on the machine.

External storage and virtual datasets have their values in other files. Whoever wrote a file can
make the library read any file of the machine through them. So the files that it would open are
found first, as the library looks for them, and must be in the directory of the file itself, links
resolved, unless the user allows others (`Elsewhere`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Kind
from dsprep.errors import FormatError
from dsprep.formats.hdf5.attributes import attribute_names, has_attributes, marked
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, Carrier, overlaps, plain, read_carrier
from dsprep.formats.hdf5.guard import library, open_file

_DEEPEST = 8
"""Virtual datasets of virtual datasets: more is refused, as circles are."""


@dataclass(frozen=True)
class Held:
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


def held(dataset: Any, where: object, *, attributed: bool = True) -> Held | str:
    """Return what an `h5py.Dataset` holds, or why it cannot be a field.

    `attributed` is whether it has attributes.
    """
    import h5py

    found = dataset.shape
    if found is None:
        return "it holds no data"
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"its type is unknown to numpy: {error}"
    shape = tuple(map(int, found))
    string = h5py.check_string_dtype(dtype)
    if string is not None and string.length is None:
        byte = np.dtype(np.uint8)
        return _unreadable(dataset) or Held(Carrier(byte, byte), shape, "str", vlen=True)
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
        return _unreadable(dataset) or Held(Carrier(element, element), shape, kind, vlen=True)
    text = marked(dataset, DTYPE_ATTRIBUTE, where) if attributed else None
    if text is None:
        return Held(Carrier(element, element), shape)
    carrier = read_carrier(text, element, shape, where)
    return Held(carrier, shape[: len(shape) - len(carrier.axis)])


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
    """

    file: Any
    where: object
    datasets: dict[str, Held] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributed: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)

    def open(self, path: str) -> Any:
        """Return the h5py object at `path`."""
        with library(f"{self.where}, {path}", "it cannot be opened"):
            return self.file[path] if path else self.file

    @cached_property
    def _inside(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in self.datasets:
            found.setdefault(path.rpartition("/")[0], []).append(path)
        return found

    def inside(self, group: str) -> list[str]:
        """Return the paths of the datasets directly in the group called `group`."""
        return self._inside.get(group, [])

    def leave_out(self, path: str, reason: str) -> None:
        """Leave out a dataset that was found."""
        del self.datasets[path]
        self.left_out[path] = reason
        self.__dict__.pop("_inside", None)


def walk(file: Any, where: object, elsewhere: Elsewhere) -> Contents:
    """Return the contents of an `h5py.File`; `elsewhere` says what may be read from other files.

    Raises
    ------
    FormatError
        If a link or an object header is damaged.
    """
    import h5py
    from h5py import h5d, h5g, h5o

    found = Contents(file, where)
    alike: dict[Held, Held] = {}
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[str, Any, bytes | str]] = [("", file.id, b"/")]
    with library(where, "the file cannot be listed"):
        while stack:
            path, parent, link = stack.pop()
            if isinstance(link, str):
                found.left_out[path] = link
                continue
            item = h5o.open(parent, link)
            info = h5o.get_info(item)
            address = int(info.fileno), int(info.addr)
            if address in seen:
                continue
            seen.add(address)
            if isinstance(item, h5g.GroupID) and path.rpartition("/")[2].startswith("_i_"):
                found.left_out[path] = "it is an index that PyTables keeps"
            elif isinstance(item, h5g.GroupID):
                group = h5py.Group(item)
                found.groups[path] = attribute_names(group) if info.num_attrs else ()
                # Reversed, because the stack gives back the last one first.
                stack.extend(reversed([*_members(group, f"{path}/" if path else "")]))
            elif isinstance(item, h5d.DatasetID):
                dataset = h5py.Dataset(item)
                known = bool(info.num_attrs)
                what = elsewhere.reason(dataset) or held(
                    dataset, f"{where}, field {path}", attributed=known
                )
                if isinstance(what, str):
                    found.left_out[path] = what
                    continue
                found.datasets[path] = alike.setdefault(what, what)
                if known and has_attributes(attribute_names(dataset)):
                    found.attributed.add(path)
    return found


def _members(group: Any, prefix: str) -> Iterator[tuple[str, Any, bytes | str]]:
    """Yield the paths in an `h5py.Group`, each with the group and the name, or why it is left out.

    Names are as stored, reasons are texts.
    """
    import h5py

    for raw, hard in _links(group):
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            path = prefix + raw.decode("utf-8", "backslashreplace")
            yield path, group.id, "its name is not UTF-8"
            continue
        if hard:
            yield prefix + name, group.id, raw
            continue
        item: Any = group.get(name, getlink=True)
        external = isinstance(item, h5py.ExternalLink)
        where = f"the file {item.filename}" if external else item.path
        yield prefix + name, group.id, f"it is a link to {where}"


def _links(group: Any) -> list[tuple[bytes, bool]]:
    """Return the names in an `h5py.Group`, and whether they are hard links, in the order of h5py.

    That is by creation if it was kept. The library walks them as stored: to sort them it makes a
    table, and it crashes where damage stops it on the way.
    """
    from h5py import h5, h5l

    found: list[tuple[int, bytes, bool]] = []

    def note(name: bytes, info: Any) -> None:
        order = int(info.corder) if info.corder_valid else 0
        found.append((order, name, info.type == h5l.TYPE_HARD))

    group.id.links.iterate(note, idx_type=h5.INDEX_NAME, order=h5.ITER_NATIVE, info=True)
    if len({name for _, name, _ in found}) < len(found):
        # The library opens one of them by both names, and nothing gives the other.
        names = sorted(name for _, name, _ in found)
        twice = next(a for a, b in pairwise(names) if a == b).decode("utf-8", "backslashreplace")
        raise FormatError(
            f"a group holds two objects of the name {twice}",
            where=f"{group.file.filename}, {group.name}",
            fix="the file was changed or is damaged",
        )
    return [(name, hard) for _, name, hard in sorted(found)]


# --- other files -----------------------------------------------------------------------------


class Elsewhere:
    """Which other files the datasets of the file at `path` may be read from; with `follow`, any.

    `read` has the names of the other files, as the datasets name them.
    """

    def __init__(self, path: Path, follow: bool) -> None:
        self._path, self._follow = path, follow
        # By the name that was given, and by the one that it leads to.
        self._roots = tuple({path.parent.resolve(), path.resolve().parent})
        self.read: dict[str, None] = {}

    def reason(self, dataset: Any) -> str | None:
        """Return why an `h5py.Dataset` is not read, or None if it may be."""
        return self._reason(dataset, self._path, 0)

    def _reason(self, dataset: Any, path: Path, depth: int) -> str | None:
        from h5py import h5d

        plist = dataset.id.get_create_plist()
        layout = plist.get_layout()
        if layout == h5d.VIRTUAL:
            for i in range(plist.get_virtual_count()):
                name = plist.get_virtual_filename(i)
                source = plist.get_virtual_dsetname(i)
                found = self._virtual(name, source, dataset.file, path, depth)
                if found is not None:
                    return found
        elif layout == h5d.CONTIGUOUS:
            for i in range(plist.get_external_count()):
                name = os.fsdecode(plist.get_external(i)[0])
                prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
                # As the library looks for it.
                found = self._outside(name, [Path(_origin(prefix, path), name).absolute()])
                if found is not None:
                    return found
        return None

    def _virtual(self, name: str, source: str, file: Any, path: Path, depth: int) -> str | None:
        """Return why a part of a virtual dataset is not read."""
        import h5py

        if depth == _DEEPEST:
            return "it is virtual, and so are its sources, without end"
        if name == ".":
            return self._source(file, source, path, depth)
        files = list(_sources(name, path))
        found = self._outside(name, files)
        if found is not None:
            return found
        for other in files:
            if not (other.is_file() and h5py.is_hdf5(other)):
                continue  # which the library takes for missing
            with open_file(other) as opened:
                found = self._source(opened, source, other, depth)
            if found is not None:
                return found
        return None

    def _source(self, file: Any, source: str, path: Path, depth: int) -> str | None:
        """Return why a dataset that a virtual one is made of is not read."""
        import h5py

        item = file
        for part in source.replace("%b", "0").strip("/").split("/"):
            link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
            if link is None:
                return None  # missing: the library gives the fill value
            if not isinstance(link, h5py.HardLink):
                return None if self._follow else f"it is made of a link, {source} in {path}"
            item = item[part]
        return self._reason(item, path, depth + 1) if isinstance(item, h5py.Dataset) else None

    def _outside(self, name: str, files: list[Path]) -> str | None:
        """Return why files that a dataset names are not read, if one is outside."""
        for other in files:
            inside = any(other.resolve().is_relative_to(root) for root in self._roots)
            if not inside and not self._follow:
                return (
                    f"its values are in {other}, outside the directory of the file "
                    "(--follow-external reads it)"
                )
        self.read.setdefault(name)
        return None


def _sources(name: str, path: Path) -> Iterator[Path]:
    """Yield the files that may be the one that a virtual dataset calls `name`.

    ``%b`` stands for the number of a block. The library tries the variable's directories, that of
    the file, and the current one; of an absolute path that is not there, the last part alone.
    """
    pattern = glob.escape(name).replace("%b", "*").replace("%%", "%")
    names = [pattern, Path(pattern).name] if Path(name).is_absolute() else [pattern]
    prefixes = [_origin(p, path) for p in os.environ.get("HDF5_VDS_PREFIX", "").split(":") if p]
    folders: list[str | Path] = [*prefixes, path.parent, path.resolve().parent, Path()]
    for folder in folders:
        for each in names:
            found = glob.iglob(str(Path(folder, each).absolute()))  # noqa: PTH207 (absolute)
            yield from map(Path, found)


def _origin(prefix: str, path: Path) -> str:
    return prefix.replace("${ORIGIN}", str(path.resolve().parent))
