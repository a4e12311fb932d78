"""A folder of images as samples."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsprep.core.marks import changed
from dsprep.core.schema import Attrs, Field
from dsprep.core.storage import Inside
from dsprep.errors import UsageError
from dsprep.formats.images.folder import Folder, read_folder, tables_of
from dsprep.formats.images.table import Table, read_table
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import FileLayout, Given, OwnFiles
from dsprep.layout.words import Words
from dsprep.reading.files import File, Files

LISTED = 32 << 10
"""Bytes of the names of classes up to which they are an attribute of the labels."""


class ImageSource(LocatedSource):
    """A folder of images opened for reading; see `base.Source`."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        inside = Inside(path, options.follow_external)
        tables = tables_of(path)
        if options.labels not in ("auto", "folders", "none", *tables):
            raise UsageError(
                f"there is no table {options.labels}",
                where=path,
                expected="auto, folders, none, or a CSV in the folder, or beside it and named as "
                "it is" + (f": {', '.join(sorted(tables))}" if tables else ""),
            )
        folder = read_folder(path, options.labels, tables, inside)
        table = None
        chosen = _table(options.labels, tables, folder)
        if chosen is not None:
            paths = [os.fsdecode(folder.names[i]) for i in range(len(folder.names))]
            table = read_table(chosen, paths)
            folder = _those(folder, table)
        self._files, self._newest = Files(inside, most=1), folder.newest
        parsed = _parsed(folder, table)
        super().__init__(path, parsed, options, self._open)
        for f in self.schema:
            if f.kind != parsed.fields[self.names[f.name]].kind:
                raise UsageError(f"field {f.name} is bytes and cannot have a type", where=path)

    def _open(self, path: str) -> File:
        file = self._files.get(0, path, lambda _: self.path)
        if file.status[3] > self._newest:
            raise changed(file.path, (*file.status[:3], self._newest), file.status)
        return file

    def loading_code(self) -> str:
        """Return a program that reads sample 0; see `Source.loading_code`."""
        sample = self[0]
        lines = ["from pathlib import Path", "", f"root = Path({str(self.path.absolute())!r})"]
        lines += ["sample = {"]
        for name, value in sample.items():
            if name in self._layout.files:
                path = os.fsdecode(self._layout.files[name].names[0])
                shown = f"(root / {path!r}).read_bytes()"
            else:
                shown = repr(value.item() if isinstance(value, np.generic) else value)
            lines.append(f"    {name!r}: {shown},")
        lines += ["}", "for name, value in sample.items():"]
        lines += ["    print(name, type(value).__name__, len(value) if hasattr(value, '__len__') "]
        lines[-1] += "else value)"
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Close the file that is open."""
        self._files.close()


def _table(labels: str, tables: Mapping[str, Path], folder: Folder) -> Path | None:
    """Return the table that labels the images; `UsageError` if several may."""
    if labels in tables:
        return tables[labels]
    if labels != "auto" or folder.classes is not None or not tables:
        return None
    if len(tables) > 1:
        raise UsageError(
            "several tables may label the images",
            found=", ".join(sorted(tables)),
            fix="say which: --labels NAME.csv, or --labels none",
        )
    return next(iter(tables.values()))


def _those(folder: Folder, table: Table) -> Folder:
    """Return the images that a table names."""
    if len(table.files) == len(folder.sizes):
        return folder
    names = Words.of(folder.names[i] for i in table.files.tolist())
    return replace(folder, names=names, sizes=folder.sizes[table.files])


def _parsed(folder: Folder, table: Table | None) -> Parsed:
    """Return what every sample has, and where."""
    count = len(folder.sizes)
    own = OwnFiles(folder.names, Explicit(folder.sizes))
    fields = {"image": Field.opaque("image")}
    given: dict[str, Given] = {}
    every, notes = Affine(count, 0, 1), [*folder.notes]
    if folder.classes is not None:
        classes = Words.of(folder.classes)
        label = Given(Explicit(np.repeat(np.arange(len(classes)), folder.counts)))
        attrs = _classes(folder.classes)
        fields["label"] = Field("label", np.dtype(np.int64), (), attrs=attrs)
        fields["class"] = _text("class", classes, notes)
        given = {"label": label, "class": Given(label.which, classes)}
    elif table is None:
        notes.append("the images have no labels: there are neither folders nor a table")
    else:
        notes += table.notes
        fields |= {f.name: f for f, _ in table.fields}
        given = {f.name: one for f, one in table.fields}
    fields["name"] = _text("name", folder.names, notes)
    given["name"] = Given(every, folder.names)
    version = "image folder"
    if folder.classes is not None:
        version += f", {len(folder.classes):,} {'class' if len(folder.classes) == 1 else 'classes'}"
    return Parsed(
        version=version,
        fields=fields,
        layout=FileLayout(count, files={"image": own}, given=given),
        notes=tuple(notes),
    )


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
