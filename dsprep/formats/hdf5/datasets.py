"""All datasets of an HDF5 file, each once, whatever its links look like.

Groups are visited with a stack of our own and remembered by address, so that links which form a
cycle end. Soft and external links are not followed: what a soft link names inside the file has
a name of its own, and an external link may name any file on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsprep.formats.hdf5.element_types import Held, held
from dsprep.formats.hdf5.elsewhere import Elsewhere
from dsprep.formats.hdf5.guard import library


@dataclass
class Contents:
    """What `walk` found.

    Attributes
    ----------
    datasets
        Path without leading slash to the `h5py.Dataset` and what it holds, in the file's order.
    groups
        Path to the `h5py.Group`; ``""`` is the root.
    left_out
        Path to the reason, for what cannot be a field.
    """

    datasets: dict[str, tuple[Any, Held]] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def inside(self, group: str) -> list[str]:
        """Return the paths of the datasets directly in the group called `group`."""
        prefix = f"{group}/" if group else ""
        return [
            path
            for path in self.datasets
            if path.startswith(prefix) and "/" not in path[len(prefix) :]
        ]


def walk(file: Any, where: object, elsewhere: Elsewhere) -> Contents:
    """Return the contents of an `h5py.File`.

    `elsewhere` says which datasets may be read from other files.

    Raises
    ------
    FormatError
        If a link or an object header is damaged.
    """
    found = Contents()
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[str, Any]] = [("", file)]
    with library(where, "the file cannot be listed"):
        while stack:
            path, item = stack.pop()
            if isinstance(item, str):
                found.left_out[path] = item
            elif _new(item, seen):
                _visit(path, item, found, stack, where, elsewhere)
    return found


def _new(item: Any, seen: set[tuple[int, int]]) -> bool:
    """Whether an object is met for the first time; remembers it."""
    from h5py import h5o

    info = h5o.get_info(item.id)
    place = (int(info.fileno), int(info.addr))
    if place in seen:
        return False
    seen.add(place)
    return True


def _visit(
    path: str,
    item: Any,
    found: Contents,
    stack: list[tuple[str, Any]],
    where: object,
    elsewhere: Elsewhere,
) -> None:
    import h5py

    if isinstance(item, h5py.Group) and path.rpartition("/")[2].startswith("_i_"):
        found.left_out[path] = "it is an index that PyTables keeps"
    elif isinstance(item, h5py.Group):
        found.groups[path] = item
        prefix = f"{path}/" if path else ""
        # Reversed, because the stack gives back the last one first.
        for raw, hard in reversed(_links(item)):
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                label = prefix + raw.decode("utf-8", "backslashreplace")
                stack.append((label, "its name is not UTF-8"))
            else:
                stack.append((prefix + name, item[name] if hard else _not_followed(item, name)))
    elif isinstance(item, h5py.Dataset):
        what = elsewhere.reason(item) or held(item, f"{where}, field {path}")
        if isinstance(what, str):
            found.left_out[path] = what
        else:
            found.datasets[path] = (item, what)


def _links(group: Any) -> list[tuple[bytes, bool]]:
    """Return the names in an `h5py.Group`, and whether they are hard links, in the order of h5py.

    That is by creation if it was kept. The library walks them as they lie: to sort them it makes a
    table, and it crashes where damage stops it on the way.
    """
    from h5py import h5, h5l

    found: list[tuple[int, bytes, bool]] = []

    def note(name: bytes, info: Any) -> None:
        order = int(info.corder) if info.corder_valid else 0
        found.append((order, name, info.type == h5l.TYPE_HARD))

    group.id.links.iterate(note, idx_type=h5.INDEX_NAME, order=h5.ITER_NATIVE, info=True)
    return [(name, hard) for _, name, hard in sorted(found)]


def _not_followed(group: Any, name: str) -> str:
    """Return why a soft or external link is left out."""
    import h5py

    link = group.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        return f"it is a link to the file {link.filename}"
    return f"it is a link to {link.path}"
