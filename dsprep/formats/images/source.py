"""A folder of images as samples."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsprep.core.schema import Attrs, Field, Ints
from dsprep.errors import UsageError
from dsprep.formats.images.folder import METADATA, Folder, read_folder, tables_of
from dsprep.formats.images.pairs import complete, selections
from dsprep.formats.images.table import Table, read_table
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import FileLayout, Given, OwnFiles
from dsprep.layout.words import Words
from dsprep.reading.files import Files
from dsprep.storage.base import Handle
from dsprep.storage.identity import changed
from dsprep.storage.local import DirectoryGuard

LABELS = ("auto", "folders", "none", "pairs")
"""What labels images, if no table does."""

LISTED = 32 << 10
"""Bytes of the names of classes up to which they are an attribute of the labels."""


class ImageSource(LocatedSource):
    """A folder of images opened for reading; see `base.Source`."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        inside = DirectoryGuard(path, options.follow_external)
        tables = tables_of(path)
        chosen = _named_table(options.labels, tables, path)
        if chosen is not None and chosen not in tables.values():
            tables = {**tables, os.path.relpath(chosen, path): chosen}
        folder = read_folder(path, options.labels, selections(options.fields, path), tables, inside)
        chosen = chosen or _only_table(options.labels, tables, folder)
        table = None if chosen is None else _read_table(chosen, path, folder)
        samples = np.arange(len(folder.names)) if table is None else table.files
        if folder.joined is not None:
            complete_pairs = complete(folder.joined, folder.parts, samples, options.nulls, path)
            notes = (*folder.notes, *complete_pairs.notes)
            folder, samples = (
                replace(folder, parts=complete_pairs.parts, notes=notes),
                samples[complete_pairs.kept],
            )
            table = None if table is None else table.of(np.flatnonzero(complete_pairs.kept))
        self._files, self._newest = Files(inside, kept_open=1), folder.newest
        parsed = _parsed(folder, table, samples)
        super().__init__(path, parsed, options, self._open)
        for f in self.schema:
            if f.kind != parsed.fields[self.names[f.name]].kind:
                raise UsageError(f"field {f.name} is bytes and cannot have a type", where=path)

    def _open(self, path: str) -> Handle:
        file = self._files.get(0, path, lambda _: self.path)
        if file.status.ctime_ns > self._newest:
            raise changed(file.path, file.status._replace(ctime_ns=self._newest), file.status)
        return file

    def close(self) -> None:
        """Close the file that is open."""
        self._files.close()


def _named_table(labels: str, tables: Mapping[str, Path], path: Path) -> Path | None:
    """Return the table that is asked for: by its name, or elsewhere by its path."""
    if labels in tables or labels in LABELS:
        return tables.get(labels)
    named = Path(labels)
    if named.is_dir():
        inside = tables_of(named)
        if len(inside) == 1:
            return next(iter(inside.values()))
        parent = Path(os.path.commonpath([path.absolute(), named.absolute()]))
        fields = [os.path.relpath(p.absolute(), parent) for p in (path, named)]
        options = " ".join(f"--field {shlex.quote(f)}" for f in fields)
        raise UsageError(
            "a folder of files is a field, not a table",
            where=named,
            expected="a table, or a folder with one",
            found=", ".join(sorted(inside)) or "no table",
            fix=f"name the folder that has both, and these as fields: {parent} {options}",
        )
    if "/" in labels and named.is_file():
        return named
    raise UsageError(
        f"there is no table {labels}",
        where=path,
        expected=f"{', '.join(LABELS)}, a table in the folder, or beside it and named as it is"
        + (f": {', '.join(sorted(tables))}" if tables else "")
        + "; of one elsewhere, its path: ./labels.csv",
    )


def _only_table(labels: str, tables: Mapping[str, Path], folder: Folder) -> Path | None:
    """Return the table that labels the images; `UsageError` if several may."""
    if labels != "auto" or folder.classes is not None or not tables:
        return None
    chosen = [name for name in METADATA if name in tables] or [*tables]
    if len(chosen) > 1:
        raise UsageError(
            "several tables may label the images",
            found=", ".join(chosen),
            fix="say which: --labels NAME.csv, or --labels none",
        )
    return tables[chosen[0]]


def _read_table(chosen: Path, path: Path, folder: Folder) -> Table:
    """Return what a table says of the samples of a folder, by whatever it calls them."""
    names = [_texts(folder.names)]
    if folder.joined is not None:
        names = []
        for part in folder.parts:
            numbers = folder.joined.numbers[part.selection.path].tolist()
            paths = _texts(part.names)
            below = len(part.selection.folder) + 1 if part.selection.folder else 0
            called = [paths[i] if i >= 0 else "" for i in numbers]
            names += [called, [name[below:] for name in called]]
        names.insert(0, _texts(folder.names))
    taken = {"name", *(part.selection.path for part in folder.parts)}
    return read_table(chosen, path.absolute().name, names, taken)


def _texts(words: Words) -> list[str]:
    return [os.fsdecode(word) for word in words.data.split(b"\0")[:-1]]


def _parsed(folder: Folder, table: Table | None, samples: Ints) -> Parsed:
    """Return what every sample has, and where."""
    count, joined = len(samples), folder.joined
    fields: dict[str, Field] = {}
    files: dict[str, OwnFiles] = {}
    for part in folder.parts:
        name = part.selection.path
        numbers = samples if joined is None else joined.numbers[name][samples]
        files[name] = OwnFiles(_some(part.names, numbers), Explicit(part.sizes[numbers]))
        fields[name] = Field.opaque(name)
    names = _some(folder.names, samples)
    given: dict[str, Given] = {}
    every, notes = Affine(count, 0, 1), [*folder.notes]
    if folder.classes is not None:
        classes = Words.of(folder.classes)
        label = Given(Explicit(np.repeat(np.arange(len(classes)), folder.counts)))
        attrs = _classes(folder.classes)
        fields["label"] = Field("label", np.dtype(np.int64), (), attrs=attrs)
        fields["class"] = _text("class", classes, notes)
        given = {"label": label, "class": Given(label.value_numbers, classes)}
    elif table is not None:
        notes += table.notes
        fields |= {f.name: f for f, _ in table.fields}
        given = {f.name: one for f, one in table.fields}
    elif joined is None:
        notes.append("the images have no labels: there are neither folders nor a table")
    fields["name"] = _text("name", names, notes)
    given["name"] = Given(every, names)
    version = "image folder"
    if folder.classes is not None:
        version += f", {len(folder.classes):,} {'class' if len(folder.classes) == 1 else 'classes'}"
    elif joined is not None:
        version += f", {len(folder.parts)} {'file' if len(folder.parts) == 1 else 'files'} a sample"
    return Parsed(
        version=version,
        fields=fields,
        layout=FileLayout(count, given=given, files=files),
        notes=tuple(notes),
    )


def _some(words: Words, numbers: Ints) -> Words:
    """Return some strings, or all as they are."""
    if len(numbers) == len(words) and bool((numbers == np.arange(len(words))).all()):
        return words
    return Words.of(words[i] for i in numbers.tolist())


def _classes(names: tuple[bytes, ...]) -> Attrs:
    """Return the attribute of labels that says what they mean, JSON, unless there are too many."""
    text = json.dumps([os.fsdecode(name) for name in names])
    return {"classes": text} if len(text) <= LISTED else {}


def _text(name: str, words: Words, notes: list[str]) -> Field:
    """Return the field of names of files: `str`, or `bytes` where they are not UTF-8."""
    try:
        words.data.decode()
    except UnicodeDecodeError:
        notes.append(f"field {name} is bytes: some names are not UTF-8")
        return Field.opaque(name)
    return Field.opaque(name, "str")
