"""Datasets whose values lie in other files: external storage and virtual datasets.

Whoever wrote a file can make the library read any file of the machine through it. So the files
that it would open are found first, as the library looks for them, and must lie in the directory of
the file itself, links resolved, unless the user allows others.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsprep.formats.hdf5.guard import open_file

_DEEPEST = 8
"""Virtual datasets of virtual datasets: more is refused, as circles are."""


class Elsewhere:
    """Which other files the datasets of one file may be read from.

    Parameters
    ----------
    path
        The file.
    follow
        Whether any other file may be read.

    Attributes
    ----------
    read
        The names of the other files, as the datasets name them.
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
                found = self._outside(name, _stored(name, path))
                if found is not None:
                    return found
        return None

    def _virtual(self, name: str, source: str, file: Any, path: Path, depth: int) -> str | None:
        """Return why a part of a virtual dataset is not read."""
        if depth == _DEEPEST:
            return "it is virtual, and so are its sources, without end"
        if name == ".":
            return self._source(file, source, path, depth)
        files = list(_sources(name, path))
        found = self._outside(name, files)
        if found is not None:
            return found
        for other in files:
            if not _is_hdf5(other):
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
        """Return why files that a dataset names are not read, if one lies outside."""
        for other in files:
            inside = any(other.resolve().is_relative_to(root) for root in self._roots)
            if not inside and not self._follow:
                return (
                    f"its values lie in {other}, outside the directory of the file "
                    "(--follow-external reads it)"
                )
        self.read.setdefault(name)
        return None


def _stored(name: str, path: Path) -> list[Path]:
    """Return the file that external storage called `name` lies in, as the library looks for it."""
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
    return [Path(_origin(prefix, path), name).absolute()]


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


def _is_hdf5(path: Path) -> bool:
    import h5py

    return path.is_file() and bool(h5py.is_hdf5(path))
