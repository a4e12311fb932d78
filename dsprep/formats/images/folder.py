"""The files of a folder of images, their order and their classes, by one look at each entry."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsprep import formats
from dsprep.core.schema import Ints
from dsprep.errors import FormatError, UsageError
from dsprep.formats.images import pairs
from dsprep.formats.images.pairs import Joined, Part, Selection
from dsprep.formats.images.recognise import has_suffix
from dsprep.formats.samples import listed, natural_order
from dsprep.formats.splits import parts_of, parts_of_many
from dsprep.layout.words import Words
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import DirectoryEntry, scan
from dsprep.storage.trees import HIDDEN, SIDECARS

IMAGE = "image"
"""The field of the only file that a sample has."""

METADATA = ("metadata.csv", "metadata.jsonl")
"""Tables that label images whatever their folders are called, as Hugging Face has it."""

TABLES = (".csv", ".tsv", ".jsonl")
"""Endings of the names of tables, in small letters."""


@dataclass(frozen=True)
class Folder:
    """The samples of a folder.

    Attributes
    ----------
    names
        What they are called: the paths of their images in the folder, class by class, in natural
        order; or what the names of their files have in common.
    parts
        Their files, by field. If there is only one, they are in the order of the samples.
    joined
        Which files each sample has, where there are several; else None.
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
    parts: tuple[Part, ...]
    joined: Joined | None
    classes: tuple[bytes, ...] | None
    counts: Ints
    newest: int
    notes: tuple[str, ...]


@dataclass
class _Walk:
    """What was met so far, besides images.

    `skipped` are files that are no images and are not left out either; with `selections`, their
    files are taken, whatever they are, and no others.
    """

    inside: DirectoryGuard
    root: Path
    skipped: frozenset[bytes]
    selections: Sequence[Selection] = ()
    newest: int = 0
    empty: int = 0
    linked: bool = False
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    others: list[bytes] = field(default_factory=list)

    def leave(self, reason: str, name: bytes) -> None:
        """Count a file that is left out."""
        self.left_out[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < 4:
            examples.append(shown(name))

    def notes(self) -> Iterator[str]:
        """Yield what was left out, and what else is worth a note."""
        yield from self.remarks
        for reason, count in self.left_out.items():
            names = self.examples[reason]
            more = f" and {count - len(names):,} more" if count > len(names) else ""
            yield f"left out {', '.join(names)}{more}: {reason}"
        if self.empty:
            yield f"{self.empty:,} {'file is' if self.empty == 1 else 'files are'} empty"


def shown(name: bytes) -> str:
    """Return a name for a message, in one line."""
    text = name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else repr(text)


def read_folder(
    root: Path,
    labels: str,
    selections: Sequence[Selection],
    tables: Mapping[str, Path],
    inside: DirectoryGuard,
) -> Folder:
    """Return the samples below `root`.

    Parameters
    ----------
    labels
        As `OpenOptions.labels`.
    selections
        The fields that are asked for by their files; none: what the names of folders say.
    tables
        What `tables_of` found.
    inside
        Where links may lead.

    Raises
    ------
    FormatError
        If a folder is a link, a file leads nowhere, or a file of another format is among them.
    UsageError
        If it is doubtful what the classes are, or which files are one sample.
    """
    skipped = frozenset(map(os.fsencode, tables))
    walk = _Walk(inside, root, skipped)
    (top, sizes), folders = _listing(walk, b"")
    folders.sort(key=os.fsdecode)
    paired = selections or _selected(root, labels, folders)
    if paired:
        listing = _read_pairs(_Walk(inside, root, skipped, paired), not selections)
        if listing is not None:
            return listing
    trees = [_tree(walk, folder) for folder in folders]
    if walk.linked:
        inside.check_tree(root)
    counts = [len(names) for names, _ in trees]
    classed = labels == "folders"
    if labels == "auto":
        filled = {f: names for f, (names, _) in zip(folders, trees, strict=True) if names}
        images = [*top, *(name for names in filled.values() for name in names)]
        pairs.check_beside(images, walk.others, root)
        pairs.check_inside(images, root)
        classed = _has_classes(walk, top, filled, tables)
    if classed and not any(counts):
        raise UsageError("there are no folders with images: --labels folders", where=root)
    if classed:
        for name in top:
            walk.leave("not in a folder of a class", name)
        blocks = [_sorted(*each) for each in trees]
        empty = [shown(f) for f, n in zip(folders, counts, strict=True) if not n]
        notes = [f"no images in {listed(empty)}, each of which keeps its number"] * bool(empty)
    else:
        every = [(top, sizes), *trees]
        names = [name for each, _ in every for name in each]
        if labels == "auto":
            _check_one_part(root, names)
        blocks = [_sorted(names, np.concatenate([sizes for _, sizes in every]))]
        notes = []
    nbytes = np.concatenate([np.zeros(0, np.int64), *(s for _, s in blocks)])
    if not len(nbytes):
        raise FormatError("the folder holds no images", where=root)
    words = Words(b"".join(data for data, _ in blocks))
    return Folder(
        words,
        (Part(Selection(IMAGE, ""), words, nbytes),),
        None,
        tuple(folders) if classed else None,
        np.array(counts if classed else [len(nbytes)], np.int64),
        walk.newest,
        (*notes, *walk.notes()),
    )


def _has_classes(
    walk: _Walk,
    loose: Sequence[bytes],
    filled: Mapping[bytes, Sequence[bytes]],
    tables: Mapping[str, Path],
) -> bool:
    """Whether the folders are classes; `UsageError` if that is doubtful."""
    folders = [os.fsdecode(folder) for folder in filled]
    if not folders:
        return False
    alike = len(folders) > 1 and pairs.are_alike(filled)
    choices = ["--labels folders takes the folders as classes", "--labels none reads no labels"]
    choices += [f"--labels {name} reads that table" for name in sorted(tables)]
    problem, fix = "", "say what labels the images: " + ", ".join(choices)
    if all(map(parts_of, folders)):
        problem = "the folders are named as parts of a dataset, not as classes"
        fix = f"name one of them, such as {walk.root / folders[0]}; or {fix}"
    elif any(name in tables for name in METADATA):
        return False
    elif loose:
        problem = f"{len(loose):,} images are beside folders with images"
    elif len(folders) == 1 and pairs.role_of(folders[0]):
        if tables or not any(name.count(b"/") > 1 for names in filled.values() for name in names):
            return False
        problem = f"{folders[0]} is no class, but its folders may be"
        fix = f"name it, to have its folders as classes: {walk.root / folders[0]}; or {fix}"
    elif alike and all(folder.lower() in pairs.EITHER for folder in folders):
        problem = (
            "the folders may be classes, or fields of one sample: their files have equal names"
        )
        fix = f"say which: --labels pairs makes files of equal names one sample, {choices[0]}"
    elif tables:
        problem = f"both folders and a table may label the images: {listed(sorted(tables))}"
    if problem:
        names = listed([shown(folder) for folder in filled])
        raise UsageError(problem, where=walk.root, found=f"folders {names}", fix=fix)
    if alike:
        walk.remarks.append(
            "files have the same names in all folders, which are taken as classes (--labels pairs "
            "makes files of equal names one sample)"
        )
    return True


def _check_one_part(root: Path, names: list[bytes]) -> None:
    """Raise `UsageError` if the names of images state several parts of a dataset."""
    parts = parts_of_many(names)
    if len(parts) > 1:
        raise UsageError(
            "the images are named as parts of a dataset, not as one",
            where=root,
            found="names such as " + listed([*parts.values()]),
            fix="put those of each part into a folder of its own, and name that; or say what "
            "labels them to read all as one: --labels none, or --labels CSV",
        )


# --- fields that are folders -------------------------------------------------------------------


def _selected(root: Path, labels: str, folders: Sequence[bytes]) -> list[Selection]:
    """Return the folders whose files are fields of one sample, by what they are called.

    Raises
    ------
    UsageError
        If they are those of several parts of a dataset as well.
    """
    names = [os.fsdecode(folder) for folder in folders]
    if labels == "pairs":
        if len(names) < 2:
            raise UsageError("there are no folders to pair: --labels pairs", where=root)
        return [Selection(name, name) for name in names]
    roles = pairs.roles_of(names)
    if labels in ("folders", "none") or len(frozenset().union(*roles.values())) < 2:
        return []
    chosen = sorted(roles, key=lambda name: "image" not in roles[name])
    pairs.check_splits({name: name for name in chosen}, root)
    return [Selection(name, name) for name in chosen] if len(chosen) > 1 else []


def _read_pairs(walk: _Walk, auto: bool) -> Folder | None:
    """Return the samples that the files of several fields make up.

    None where these fields follow from the names of folders alone (`auto`), and only one of them
    has files of samples.
    """
    names, sizes = _tree(walk, b"")
    if walk.linked:
        walk.inside.check_tree(walk.root)
    numbers: dict[str, list[int]] = {s.path: [] for s in walk.selections}
    for i, name in enumerate(names):
        selection = pairs.chosen_for(name, walk.selections)
        assert selection is not None  # see `_listing`
        numbers[selection.path].append(i)
    for s in (s for s in walk.selections if s.pattern == "*"):
        images = [i for i in numbers[s.path] if has_suffix(names[i])]
        if images and len(images) < len(numbers[s.path]):
            for i in sorted({*numbers[s.path]} - {*images}):
                walk.leave("not the name of an image", names[i])
            numbers[s.path] = images
    parts = [
        Part(s, Words.of(names[i] for i in numbers[s.path]), sizes[numbers[s.path]])
        for s in walk.selections
    ]
    notes = []
    if auto:
        for part in [p for p in parts if len(p.names) and not pairs.belongs(p, parts)]:
            parts.remove(part)
            notes.append(
                f"left out {part.selection.path}: none of its {len(part.names):,} files is called "
                "as an image is"
            )
        parts = [part for part in parts if len(part.names)]
        if len(parts) < 2:
            return None
        pairs.check_splits_within(parts, walk.root)
    for part in parts:
        if not len(part.names):
            raise UsageError(f"there are no files: --field {part.selection.path}", where=walk.root)
    joined = pairs.join(parts, walk.root)
    return Folder(
        Words.of(joined.keys),
        tuple(parts),
        joined,
        None,
        np.array([len(joined.keys)], np.int64),
        walk.newest,
        (*joined.notes, *notes, *walk.notes()),
    )


# --- tables ------------------------------------------------------------------------------------


def tables_of(root: Path) -> dict[str, Path]:
    """Return the tables that may label the images: by name, those in the folder, and beside it.

    Beside the folder ``NAME`` only ``NAME.csv`` and the like count.
    """
    tables = {}
    for entry in sorted(scan(root), key=lambda entry: entry.name):
        hidden = entry.name.startswith(".")
        if entry.name.lower().endswith(TABLES) and not hidden and entry.is_file():
            tables[entry.name] = root / entry.name
    for suffix in TABLES:
        beside = root.absolute().with_name(root.absolute().name + suffix)
        if beside.is_file() and beside.name not in tables:
            tables[beside.name] = beside
    return tables


def facts(root: Path) -> dict[str, Any]:
    """Return what changes when other files are there, or tables say something else."""
    state, others = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    waiting = [b""]
    while waiting:
        inside = waiting.pop()
        folders, names = _names_in(root, inside)
        waiting += [inside + b"/" + f if inside else f for f in reversed(folders)]
        below = inside or b"."
        state.update(below + b"\0/")
        state.update(b"".join(n + b"\0" for n in names if has_suffix(n)))
        if inside:
            others.update(b"".join(b"%b/%b\0" % (below, n) for n in names if not has_suffix(n)))
    values = {"names": state.hexdigest(), "other_names": others.hexdigest()}
    for name, path in tables_of(root).items():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8))
        values[f"table {name}"] = digest.hexdigest()
    return values


def _names_in(root: Path, below: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the folders and files in a folder, but those that are hidden, in order."""
    folders, names = list[bytes](), list[bytes]()
    with suppress(OSError):
        for entry in scan(root / os.fsdecode(below)):
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                names.append(os.fsencode(entry.name))
            elif not entry.is_symlink():
                folders.append(os.fsencode(entry.name))
    return sorted(folders), sorted(names)


# --- files -----------------------------------------------------------------------------------


def _listing(walk: _Walk, below: bytes) -> tuple[tuple[list[bytes], Ints], list[bytes]]:
    """Return the images in a folder with their sizes, and its folders, all by paths from the root.

    Where the walk has selections, it is their files.
    """
    names: list[bytes] = []
    sizes: list[int] = []
    folders: list[bytes] = []
    for entry in scan(walk.root / os.fsdecode(below)):
        name = os.fsencode(entry.name)
        name = below + b"/" + name if below else name
        if entry.name.startswith("."):
            if not entry.name.startswith(HIDDEN):
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
        elif name in walk.skipped or entry.name.endswith(SIDECARS):
            continue
        elif walk.selections and pairs.chosen_for(name, walk.selections) is None:
            walk.leave("in none of the fields", name)
        elif walk.selections or has_suffix(name):
            _image(walk, entry, name, names, sizes)
        else:
            _other(walk, name)
    return (names, np.array(sizes, np.int64)), folders


def _image(
    walk: _Walk, entry: DirectoryEntry, name: bytes, names: list[bytes], sizes: list[int]
) -> None:
    """Take a file as a sample, if it is one."""
    try:
        status = entry.stat()
    except FileNotFoundError as error:
        raise FormatError(
            "a symbolic link leads nowhere", where=walk.root / os.fsdecode(name)
        ) from error
    if not stat.S_ISREG(status.st_mode):
        walk.leave("not a file", name)
        return
    walk.linked = walk.linked or entry.is_symlink()
    walk.newest = max(walk.newest, status.st_ctime_ns)
    walk.empty += not status.st_size
    names.append(name)
    sizes.append(status.st_size)


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
    walk.others.append(name)
    walk.leave("not the name of an image", name)


def _tree(walk: _Walk, folder: bytes) -> tuple[list[bytes], Ints]:
    """Return all images below a folder, with their sizes."""
    names: list[bytes] = []
    sizes = [np.zeros(0, np.int64)]
    waiting = [folder]
    while waiting:
        (images, nbytes), folders = _listing(walk, waiting.pop())
        names += images
        sizes.append(nbytes)
        waiting += folders
    return names, np.concatenate(sizes)


def _sorted(names: list[bytes], sizes: Ints) -> tuple[bytes, Ints]:
    """Return names in natural order, each with a NUL behind it, and their sizes."""
    order = natural_order(names)
    return b"".join([names[i] + b"\0" for i in order]), sizes[np.array(order, np.int64)]
