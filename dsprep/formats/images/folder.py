"""The files of a folder of images, their order and their classes, by one look at each entry."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsprep import formats
from dsprep.core.schema import Ints
from dsprep.core.storage import HIDDEN, SIDECARS, Inside
from dsprep.errors import FormatError, UsageError
from dsprep.formats.images.recognise import has_suffix
from dsprep.formats.samples import listed, natural_key
from dsprep.formats.splits import parts_of, parts_of_many
from dsprep.layout.words import Words

_FORM = bytes(ord("0" if 48 <= c < 58 else "a" if c < 128 else "?") for c in range(256))


@dataclass(frozen=True)
class Folder:
    """The images of a folder.

    Attributes
    ----------
    names
        Their paths in the folder, class by class, in natural order.
    sizes
        Bytes of each, int64.
    classes
        The names of the classes, in the order of their numbers; None: there are none.
    counts
        Images of each class.
    newest
        The newest change time of all files, in ns.
    notes
        What was left out, one clause each.
    """

    names: Words
    sizes: Ints
    classes: tuple[bytes, ...] | None
    counts: Ints
    newest: int
    notes: tuple[str, ...]


@dataclass
class _Walk:
    """What has been found so far, besides images."""

    inside: Inside
    root: Path
    newest: int = 0
    empty: int = 0
    linked: bool = False
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def leave(self, why: str, name: bytes) -> None:
        """Count a file that is left out."""
        self.left_out[why] += 1
        examples = self.examples.setdefault(why, [])
        if len(examples) < 4:
            examples.append(shown(name))

    def notes(self) -> Iterator[str]:
        """Yield what was left out."""
        for why, count in self.left_out.items():
            names = self.examples[why]
            more = f" and {count - len(names):,} more" if count > len(names) else ""
            yield f"left out {', '.join(names)}{more}: {why}"
        if self.empty:
            yield f"{self.empty:,} {'file is' if self.empty == 1 else 'files are'} empty"


def shown(name: bytes) -> str:
    """Return a name for a message, in one line."""
    text = name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else repr(text)


def read_folder(root: Path, labels: str, tables: Mapping[str, Path], inside: Inside) -> Folder:
    """Return the images below `root`.

    Parameters
    ----------
    labels
        As `OpenOptions.labels`.
    tables
        What `tables_of` found.
    inside
        Where links may lead.

    Raises
    ------
    FormatError
        If a folder is a link, a file leads nowhere, or a file of another format is among them.
    UsageError
        If it is doubtful what the classes are.
    """
    walk = _Walk(inside, root)
    top, folders = _listing(walk, b"", frozenset(map(os.fsencode, tables)))
    folders.sort(key=os.fsdecode)
    found = [_tree(walk, folder) for folder in folders]
    if walk.linked:
        inside.check_tree(root)
    counts = [len(names) for names, _ in found]
    classed = labels == "folders"
    if labels == "auto":
        classed = _has_classes(root, len(top[0]), folders, counts, tables)
    if classed and not any(counts):
        raise UsageError("there are no folders with images: --labels folders", where=root)
    if classed:
        for name in top[0]:
            walk.leave("not in a folder of a class", name)
        blocks = [_sorted(*each) for each in found]
        empty = [shown(f) for f, n in zip(folders, counts, strict=True) if not n]
        notes = [f"no images in {listed(empty)}, each of which keeps its number"] * bool(empty)
    else:
        every = [top, *found]
        names = [name for each, _ in every for name in each]
        if labels == "auto":
            _check_one_part(root, names)
        blocks = [_sorted(names, np.concatenate([sizes for _, sizes in every]))]
        notes = []
    sizes = np.concatenate([np.zeros(0, np.int64), *(s for _, s in blocks)])
    if not len(sizes):
        raise FormatError("the folder holds no images", where=root)
    return Folder(
        Words(b"".join(data for data, _ in blocks)),
        sizes,
        tuple(folders) if classed else None,
        np.array(counts if classed else [len(sizes)], np.int64),
        walk.newest,
        (*notes, *walk.notes()),
    )


def _has_classes(
    root: Path, loose: int, folders: list[bytes], counts: list[int], tables: Mapping[str, Path]
) -> bool:
    """Whether the folders are classes; `UsageError` if that is doubtful."""
    filled = [f for f, n in zip(folders, counts, strict=True) if n]
    if not filled:
        return False
    names = listed([shown(f) for f in filled])
    choices = ["--labels folders takes the folders as classes", "--labels none reads no labels"]
    choices += [f"--labels {name} reads that table" for name in sorted(tables)]
    what, fix = "", "say what labels the images: " + ", ".join(choices)
    if all(parts_of(os.fsdecode(f)) for f in filled):
        what = "the folders are named as parts of a dataset, not as classes"
        first = root / os.fsdecode(filled[0])
        fix = f"name one of them, such as {first}; or {fix}"
    elif loose:
        what = f"{loose:,} images are beside folders with images"
    elif tables:
        what = f"both folders and a table may label the images: {listed(sorted(tables))}"
    if what:
        raise UsageError(what, where=root, found=f"folders {names}", fix=fix)
    return True


def _check_one_part(root: Path, names: list[bytes]) -> None:
    """Raise `UsageError` if the names of images state several parts of a dataset."""
    found = parts_of_many(names)
    if len(found) > 1:
        raise UsageError(
            "the images are named as parts of a dataset, not as one",
            where=root,
            found="names such as " + listed([*found.values()]),
            fix="put those of each part into a folder of its own, and name that; or say what "
            "labels them to read all as one: --labels none, or --labels CSV",
        )


def tables_of(root: Path) -> dict[str, Path]:
    """Return the tables that may label the images: by name, CSV files in the folder, and beside it.

    Beside the folder ``NAME`` only ``NAME.csv`` counts.
    """
    found = {}
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.lower().endswith(".csv") and not entry.name.startswith("."):
                found[entry.name] = Path(entry.path)
    beside = root.absolute().with_name(f"{root.absolute().name}.csv")
    if beside.is_file() and beside.name not in found:
        found[beside.name] = beside
    return found


def facts(root: Path) -> dict[str, Any]:
    """Return what changes when other images are there, or tables say something else."""
    state = hashlib.blake2b(digest_size=8)
    for directory, folders, names in os.walk(os.fsencode(root)):
        folders[:] = sorted(f for f in folders if not f.startswith(b"."))
        state.update(os.path.relpath(directory, os.fsencode(root)) + b"\0/")
        kept = sorted(n for n in names if has_suffix(n) and not n.startswith(b"."))
        state.update(b"".join(n + b"\0" for n in kept))
    found = {"names": state.hexdigest()}
    for name, path in sorted(tables_of(root).items()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8))
        found[f"table {name}"] = digest.hexdigest()
    return found


# --- files -----------------------------------------------------------------------------------


def _listing(
    walk: _Walk, below: bytes, tables: frozenset[bytes] = frozenset()
) -> tuple[tuple[list[bytes], Ints], list[bytes]]:
    """Return the images in a folder with their sizes, and its folders, all by paths from the root.

    `tables` are files that are no images and are not left out either.
    """
    names: list[bytes] = []
    sizes: list[int] = []
    folders: list[bytes] = []
    with os.scandir(os.path.join(os.fsencode(walk.root), below)) as entries:  # noqa: PTH118 (bytes)
        for entry in entries:
            name = below + b"/" + entry.name if below else entry.name
            if entry.name.startswith(b"."):
                if not entry.name.startswith(tuple(map(str.encode, HIDDEN))):
                    walk.leave("hidden", name)
            elif entry.is_dir(follow_symlinks=False):
                folders.append(name)
            elif entry.is_symlink() and entry.is_dir():
                raise FormatError(
                    "a folder is a symbolic link, and these are not followed",
                    where=walk.root / os.fsdecode(name),
                    fix="name the folder that it leads to, or make a copy of hard links: "
                    "cp -rlL FROM TO",
                )
            elif has_suffix(entry.name):
                _image(walk, entry, name, names, sizes)
            elif name not in tables and not os.fsdecode(entry.name).endswith(SIDECARS):
                _other(walk, name)
    return (names, np.array(sizes, np.int64)), folders


def _image(
    walk: _Walk, entry: os.DirEntry[bytes], name: bytes, names: list[bytes], sizes: list[int]
) -> None:
    """Take a file as a sample, if it is one."""
    try:
        found = entry.stat()
    except FileNotFoundError as error:
        raise FormatError(
            "a symbolic link leads nowhere", where=walk.root / os.fsdecode(name)
        ) from error
    if not stat.S_ISREG(found.st_mode):
        walk.leave("not a file", name)
        return
    walk.linked = walk.linked or entry.is_symlink()
    walk.newest = max(walk.newest, found.st_ctime_ns)
    walk.empty += not found.st_size
    names.append(name)
    sizes.append(found.st_size)


def _other(walk: _Walk, name: bytes) -> None:
    """Leave a file out; `FormatError` if by its name it is a dataset."""
    path = walk.root / os.fsdecode(name)
    format = formats.by_suffix(path)
    if format is not None:
        raise FormatError(
            f"among the images is a file of {format.name}",
            where=path,
            fix="name that file, or a folder with images alone",
        )
    walk.leave("not the name of an image", name)


def _tree(walk: _Walk, folder: bytes) -> tuple[list[bytes], Ints]:
    """Return all images below a folder, with their sizes."""
    names: list[bytes] = []
    sizes = [np.zeros(0, np.int64)]
    waiting = [folder]
    while waiting:
        (found, nbytes), folders = _listing(walk, waiting.pop())
        names += found
        sizes.append(nbytes)
        waiting += folders
    return names, np.concatenate(sizes)


def _sorted(names: list[bytes], sizes: Ints) -> tuple[bytes, Ints]:
    """Return names in natural order, each with a NUL behind it, and their sizes."""
    order = natural_order(names)
    return b"".join([names[i] + b"\0" for i in order]), sizes[np.array(order, np.int64)]


def natural_order(names: list[bytes]) -> list[int]:
    """Return the numbers of names in natural order, as `natural_key` gives it."""
    if _plain_digits(names):
        return sorted(range(len(names)), key=names.__getitem__)
    keys = [natural_key(os.fsdecode(name)) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def _plain_digits(names: Iterable[bytes]) -> bool:
    """Whether all names are ASCII, with digits at the same places: their bytes sort them."""
    forms = {name.translate(_FORM) for name in names}
    return len(forms) <= 1 and not any(b"?" in form for form in forms)
