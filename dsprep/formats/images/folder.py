"""The files of a folder of images, by one look at each entry, and in which ways they are read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dsprep import formats
from dsprep.errors import AmbiguousError, FormatError
from dsprep.formats.images import patterns
from dsprep.formats.images.table import key_columns
from dsprep.formats.samples import listed, natural_order
from dsprep.formats.splits import parts_of_many
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import DirectoryEntry, scan
from dsprep.storage.trees import HIDDEN, SIDECARS

METADATA = ("metadata.csv", "metadata.jsonl")
"""Tables that label images whatever else is there, as Hugging Face has it."""

TABLES = (".csv", ".tsv", ".jsonl", ".json")
"""Endings of the names of tables, in small letters."""


@dataclass
class Files:
    """The files of a folder that `is_sample` chooses, by their paths in it, and all others.

    Attributes
    ----------
    folders
        Those right in it.
    others
        Other files.
    newest
        The newest time stamp of all files, in ns.
    notes
        What was left out, one clause each.
    """

    root: Path
    is_sample: Callable[[bytes], bool]
    names: list[bytes] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    others: list[bytes] = field(default_factory=list)
    newest: int = 0
    linked: bool = False
    left_out: dict[str, list[bytes]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, is_sample: Callable[[bytes], bool], inside: DirectoryGuard) -> Files:
        """Return the files below `root`.

        Raises
        ------
        FormatError
            If a folder is a link, a file leads nowhere or outside, or there are no images.
        """
        files, waiting = cls(root, is_sample), [b""]
        while waiting:
            folders = files._look(waiting.pop())
            files.folders = files.folders or sorted(folders, key=os.fsdecode)
            waiting += folders
        if files.linked:
            inside.check_tree(root)
        if not files.names:
            raise FormatError("the folder holds no images", where=root)
        return files

    @property
    def notes(self) -> list[str]:
        """Notes on files that are left out, or empty."""
        notes = [
            f"left out {listed([*map(shown, names)])}: {reason}"
            for reason, names in self.left_out.items()
        ]
        if empty := self.nbytes.count(0):
            notes.append(f"{empty:,} {'file is' if empty == 1 else 'files are'} empty")
        return notes

    def leave(self, reason: str, names: Sequence[bytes]) -> None:
        """Note that files are left out."""
        if names:
            self.left_out.setdefault(reason, []).extend(names)

    def _look(self, below: bytes) -> list[bytes]:
        """Take the files in a folder; return its folders."""
        folders: list[bytes] = []
        for entry in scan(self.root / os.fsdecode(below)):
            name = os.path.join(below, os.fsencode(entry.name))  # noqa: PTH118 (bytes)
            if entry.name.startswith("."):
                if not entry.name.startswith(HIDDEN):
                    self.leave("hidden", [name])
            elif entry.is_dir(follow_symlinks=False):
                folders.append(name)
            elif entry.is_symlink() and entry.is_dir():
                raise FormatError(
                    "a folder is a symbolic link, and these are not followed",
                    where=self.root / os.fsdecode(name),
                    fix="name the folder that it leads to, or make a copy of hard links: "
                    "cp -rlL FROM TO",
                )
            elif entry.name.endswith(SIDECARS):
                continue
            elif self.is_sample(name):
                self._take(entry, name)
            else:
                self.others.append(name)
        return folders

    def _take(self, entry: DirectoryEntry, name: bytes) -> None:
        try:
            status = entry.stat()
        except FileNotFoundError as error:
            where = self.root / os.fsdecode(name)
            raise FormatError("a symbolic link leads nowhere", where=where) from error
        if not stat.S_ISREG(status.st_mode):
            self.leave("not a file", [name])
            return
        self.linked = self.linked or entry.is_symlink()
        self.newest = max(self.newest, status.st_mtime_ns)
        self.names.append(name)
        self.nbytes.append(status.st_size)

    def check_images(self, own: Container[bytes]) -> None:
        """Note what is neither an image nor `own`; `FormatError` if a name is that of a dataset."""
        self.others = [name for name in self.others if name not in own]
        for name in self.others:
            path = self.root / os.fsdecode(name)
            format = formats.by_suffix(path)
            if format is not None:
                raise FormatError(
                    f"among the images is a file of {format.name}",
                    where=path,
                    fix="name that file, or a folder with images alone",
                )
        self.leave("not the name of an image", self.others)

    def check_certain(self) -> None:
        """Raise `AmbiguousError` if the images can be read in several ways."""
        inside = [name for name in self.names if b"/" in name]
        tops = {name.partition(b"/")[0] for name in inside}
        tables = [] if inside else list(tables_of(self.root).values())
        fields = patterns.readings([*self.names, *self.others])
        parts = [] if inside else [*parts_of_many(self.names).values()]
        if not inside and not tables and not fields and len(parts) < 2:
            return
        ways = [("--labels none", f"{len(self.names):,} samples without labels")]
        if inside:
            loose = f", without {len(self.names) - len(inside):,} beside the folders"
            gives = f"{len(inside):,} samples of {len(tops):,} classes"
            ways.insert(0, ("--labels folders", gives + loose * (len(inside) < len(self.names))))
        for path in tables:
            with suppress(FormatError):  # JSON of other things
                keys = key_columns(path, [[os.fsdecode(name) for name in self.names]])
                ways += [(f"--labels {path.name}:{k}", f"{n:,} labelled samples") for k, n in keys]
        if inside:
            first = self.root / os.fsdecode(min(tops))
            reason = f"folders may be classes, fields or parts: {listed(sorted(map(shown, tops)))}"
            fix = f"name a folder alone: {first}; or patterns: --field NAME='FOLDER/*_TAIL.png'"
        else:
            beside = "there may be labels beside the images", [path.name for path in tables]
            parted = "the images may be parts of several datasets", parts
            words, names = beside if tables else parted if parts[1:] else ("files go together", [])
            reason = f"{words}: {listed(names)}" if names else words
            fix = "--labels TABLE:COLUMN, or patterns of names: --field image='NAME_*.png'"
        raise AmbiguousError(reason, [*ways, *fields], where=self.root, fix=fix)

    def in_order(self, by_folders: bool) -> tuple[list[int], tuple[bytes, ...] | None, list[int]]:
        """Return the images in natural order, those of one folder after another.

        With the folders, None if not `by_folders`, and how many images each has. Images that are in
        none of these are left out.
        """
        if not by_folders:
            return natural_order(self.names), None, []
        rows: dict[bytes, list[int]] = {folder: [] for folder in self.folders}
        for i, name in enumerate(self.names):
            folder, slash, _ = name.partition(b"/")
            if slash:
                rows[folder].append(i)
            else:
                self.leave("not in a folder of a class", [name])
        if not any(rows.values()):
            raise FormatError("there are no folders with images: --labels folders", where=self.root)
        empty = [folder for folder, images in rows.items() if not images]
        self.leave("no images in it, and it keeps its number", empty)
        numbers = [
            images[i]
            for images in rows.values()
            for i in natural_order([self.names[i] for i in images])
        ]
        return numbers, tuple(rows), [*map(len, rows.values())]


def shown(name: bytes) -> str:
    """Return a name for a message, in one line."""
    text = name.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else repr(text)


# --- identity ----------------------------------------------------------------------------------


def tables_of(root: Path) -> dict[str, Path]:
    """Return the tables in a folder, by name."""
    names = sorted(e.name for e in scan(root) if not e.name.startswith(".") and e.is_file())
    return {name: root / name for name in names if name.lower().endswith(TABLES)}


def digests(root: Path) -> dict[str, str]:
    """Return what changes when the tables say something else."""
    values = {}
    for name, path in tables_of(root).items():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8))
        values[f"table {name}"] = digest.hexdigest()
    return values
