"""A folder of images as samples."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np

from dsprep.core.schema import Attrs, Field, Ints
from dsprep.errors import AmbiguousError, UsageError, changed
from dsprep.formats.images.folder import METADATA, Files, tables_of
from dsprep.formats.images.patterns import Part, join, patterns
from dsprep.formats.images.recognise import has_suffix
from dsprep.formats.images.table import FILE_NAME, read_table
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import FileLayout, Given, OwnFiles
from dsprep.layout.words import Words
from dsprep.reading.files import Files as OpenFiles
from dsprep.storage.base import Handle
from dsprep.storage.local import DirectoryGuard

IMAGE = "image"
"""The field of the only file that a sample has."""

LABELS = ("auto", "folders", "none")
"""Ways to label images without a table."""

LISTED = 32 << 10
"""Bytes of the names of classes up to which they are an attribute of the labels."""


def open_images(path: Path, options: OpenOptions) -> LocatedSource:
    """Open a folder of images for reading; see `base.Format.open`."""
    inside = DirectoryGuard(path, options.follow_external)
    files, parsed = parse(path, options, inside)
    opened = OpenFiles(inside, lambda _: path, kept_open=1)

    def open_file(below: str) -> Handle:
        file = opened.get(0, below)
        if file.mtime_ns > files.newest:
            raise changed(file.path, "it is newer than when it was listed")
        return file

    source = LocatedSource(path, parsed, options, open_file, opened.close)
    for f in source.schema:
        if f.kind != parsed.fields[source.names[f.name]].kind:
            raise UsageError(f"field {f.name} is bytes and cannot have a type", where=path)
    return source


def parse(path: Path, options: OpenOptions, inside: DirectoryGuard) -> tuple[Files, Parsed]:
    """Return the files of a folder, and what they are."""
    chosen = patterns(options.fields)
    files = Files.read(
        path,
        (lambda name: any(f.key(name) is not None for f in chosen)) if chosen else has_suffix,
        inside,
    )
    table = _table(options.labels, path)
    notes = list[str]()
    sizes = np.array(files.nbytes, np.int64)
    classes: tuple[bytes, ...] | None = None
    counts: list[int] = []
    if chosen:
        names, parts, notes = join(chosen, files.names, sizes, options.nulls, path)
    else:
        own = [] if table is None else [os.fsencode(os.path.relpath(table[0], path))]
        files.check_images(own)
        if options.labels == "auto" and table is None:
            files.check_certain()
        order, classes, counts = files.in_order(options.labels == "folders")
        names = [files.names[i] for i in order]
        parts = [Part(IMAGE, Words.of(names), sizes[order])]
    notes += files.notes
    samples, given = np.arange(len(names)), list[tuple[Field, Given]]()
    version = "image folder" if len(parts) == 1 else f"image folder, {len(parts)} files a sample"
    if table is not None:
        ways = [Words.of(names), *(part.files for part in parts)]
        texts = [[*map(os.fsdecode, words.some(np.arange(len(names))))] for words in ways]
        taken = {"name", *(part.name for part in parts)}
        samples, given, more = read_table(*table, texts, taken)
        notes += more
    elif classes is not None:
        numbers = Explicit(np.repeat(np.arange(len(classes)), counts))
        label = Field("label", np.dtype(np.int64), (), attrs=_classes(classes))
        words = Words.of(classes)
        given = [(label, Given(numbers)), (_text("class", words, notes), Given(numbers, words))]
        version += f", {len(classes):,} {'class' if len(classes) == 1 else 'classes'}"
    elif len(parts) == 1:
        notes.append("the images have no labels")
    called = _some(Words.of(names), samples)
    given.append((_text("name", called, notes), Given(Affine(len(samples), 0, 1), called)))
    own_files = {
        part.name: OwnFiles(_some(part.files, samples), Explicit(part.sizes[samples]))
        for part in parts
    }
    fields = {part.name: Field.opaque(part.name) for part in parts}
    return files, Parsed(
        version=version,
        fields=fields | {f.name: f for f, _ in given},
        layout=FileLayout(
            len(samples), given={f.name: values for f, values in given}, files=own_files
        ),
        notes=tuple(notes),
    )


def _table(labels: str, path: Path) -> tuple[Path, str] | None:
    """Return the table that labels the images, and its key column: ``TABLE[:COLUMN]``."""
    tables = tables_of(path)
    if labels in LABELS:
        known = [name for name in METADATA if name in tables and labels == "auto"]
        if len(known) > 1:
            ways = [(f"--labels {name}", "its rows") for name in known]
            raise AmbiguousError("there are two tables", ways, where=path, fix="--labels none")
        return (tables[known[0]], FILE_NAME) if known else None
    for cut in (len(labels), *(m.start() for m in re.finditer(":", labels))):
        at = Path(labels[:cut]) if "/" in labels else path / labels[:cut]
        if cut and at.is_file():
            return at, labels[cut + 1 :] or FILE_NAME
    raise UsageError(
        f"there is no table {labels}",
        where=path,
        expected="folders, none, a table in the folder, or with a slash the path of another one: "
        "./TABLE:COLUMN",
        found=", ".join(tables) or None,
    )


def _some(words: Words, numbers: Ints) -> Words:
    return words if len(numbers) == len(words) else Words.of(words.some(numbers))


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
