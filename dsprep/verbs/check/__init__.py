"""What is wrong with a sidecar, or with the data that it describes.

The cheap check compares what is known of each file, parses every layout and computes extents: none
may be outside its file. The full one opens the files by their own library, finds every extent
again, compares all of them with those that the laws give, and reads: every checksum that there is,
and values, bit for bit. Of a sidecar that cannot be read, and of each field of a file, the first
problem is reported; what goes wrong meanwhile, the system's errors too, is one more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from dsprep import formats
from dsprep.core.schema import Schema
from dsprep.formats.options import OpenOptions
from dsprep.layout.model import FileLayout
from dsprep.reading.columns import ColumnReader
from dsprep.sidecar import spec
from dsprep.sidecar.entries import FileEntry
from dsprep.sidecar.sidecar import MissingError, Sidecar
from dsprep.sidecar.spec import Content
from dsprep.source.files import find_files
from dsprep.storage.paths import as_path, open_file
from dsprep.verbs.check.bounds import outside
from dsprep.verbs.check.full import against_files
from dsprep.verbs.check.problems import CAUGHT, Problem, problem
from dsprep.writing.create_sidecar import THREADS, dataset_of

__all__ = ["Problem", "check"]

Progress: TypeAlias = Callable[[int, int], None]


def check(
    paths: str | Path | Sequence[str | Path] | Sidecar,
    *,
    full: bool = False,
    at: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Problem]:
    """Return the problems of a sidecar and its data; none if both are as they should be.

    Parameters
    ----------
    paths
        The dataset, its sidecar, or an opened sidecar.
    full
        Compare every extent with what the format's own library finds, and every checksum.
    at
        The sidecar, if it is not beside the dataset.
    progress
        Called with (done, in all), in files or in samples.

    Returns
    -------
    list of Problem
        Each with `file`, `what`, `expected`, `found`, and `field` and `sample` where it is about
        one; empty if the sidecar is valid.

    Raises
    ------
    MissingError
        If there is no sidecar.
    """
    if isinstance(paths, Sidecar):
        path, dataset, requested = paths.path, paths.dataset, [paths.dataset]
    else:
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        path, dataset, requested = _named(given, None if at is None else as_path(at))
    content, problems = _content(path)
    if content is None:
        return problems
    problems += _unlisted(content, dataset, requested)
    problems += _identities(content.files, content.format, dataset, progress)
    opened, more = _opened(content, dataset, path)
    problems += more
    if full:
        problems += against_files(content, opened, dataset, path, progress)
    if opened is not None:
        opened.close()
    return list(dict.fromkeys(problems))


def _named(paths: Sequence[str | Path], at: Path | None) -> tuple[Path, Path, list[Path]]:
    """Return the sidecar, its dataset, and the requested part of it."""
    first = as_path(paths[0])
    requested = [as_path(p) for p in paths]
    if len(paths) == 1 and first.name.endswith(spec.SUFFIX):
        dataset = first.with_name(first.name.removesuffix(spec.SUFFIX))
        return _there(first, dataset), dataset, [dataset]
    if len(paths) == 1 and (at is not None or spec.beside(first).is_file()):
        return _there(at or spec.beside(first), first), first, requested
    files = [p.absolute() for p, _ in find_files(paths)[0]]
    dataset = dataset_of(files)
    path = at or spec.beside(dataset)
    above = spec.beside(dataset.parent)
    if at is None and len(files) == 1 and not path.is_file() and above.is_file():
        path, dataset = above, dataset.parent
    return _there(path, dataset), dataset, files


def _there(path: Path, dataset: Path) -> Path:
    if not path.is_file():
        raise MissingError(path, dataset)
    return path


# --- the sidecar -----------------------------------------------------------------------------


def _content(path: Path) -> tuple[Content | None, list[Problem]]:
    try:
        content = spec.read(path)
    except CAUGHT as error:
        return None, [problem(error, path)]
    problems = []
    if content.format not in formats.FORMATS:
        known = ", ".join(formats.FORMATS)
        return None, [Problem(str(path), "it is of no known format", known, content.format)]
    try:
        OpenOptions.from_json(content.reading)
    except CAUGHT as error:
        problems.append(problem(error, path))
    recorded = spec.read_json(path).get("samples")
    if recorded != content.samples:
        text = "it has another number of samples than its files"
        problems.append(Problem(str(path), text, content.samples, str(recorded)))
    return content, problems


def _opened(content: Content, dataset: Path, path: Path) -> tuple[Sidecar | None, list[Problem]]:
    """Return the sidecar if all of its layouts can be used, and what is wrong with them."""
    if not content.layouts:
        return None, []  # the samples have no offsets
    problems, tried = list[Problem](), dict[tuple[object, ...], list[Problem]]()
    opened = Sidecar(content, dataset, path)
    for i, entry in enumerate(content.files):
        root, first = dataset / entry.path, opened.first(i)
        try:
            layout = opened.layout(i)
            nbytes = root.stat().st_size if root.is_file() else None
            key = entry.layout, entry.samples, nbytes, root if nbytes is None else None
            if key not in tried:
                _prepare(layout, content.schema, root)
                tried[key] = list(outside(layout, content.schema, root))
            for outlier in tried[key]:
                sample = None if outlier.sample is None else outlier.sample + first
                problems.append(replace(outlier, file=str(root), sample=sample))
        except CAUGHT as error:
            problems.append(problem(error, path))
    return (None if problems else opened), list(dict.fromkeys(problems))


def _prepare(layout: FileLayout, schema: Schema, root: Path) -> None:
    """Raise if a frame, recipe or filter is unknown or has wrong parameters."""
    if layout.records is not None:
        formats.decoders(layout.records, schema)
    for name, column in layout.columns.items():
        ColumnReader(column, schema[name], lambda path: open_file(root / path if path else root))


# --- the files -------------------------------------------------------------------------------


def _unlisted(content: Content, dataset: Path, requested: Sequence[Path]) -> list[Problem]:
    """Return the files that are in the dataset and not in the sidecar."""
    try:
        present = [p.absolute() for p, _ in find_files(requested)[0]]
    except CAUGHT:
        return []  # each missing file is reported
    listed = {(dataset / f.path).absolute() for f in content.files}
    return [
        Problem(str(p), "it is in the dataset, and the sidecar does not list it")
        for p in present
        if p not in listed
    ]


def _identities(
    files: Sequence[FileEntry], format: str, dataset: Path, progress: Progress | None
) -> list[Problem]:
    """Return how the files differ from what is known of them."""
    done = 0

    def one(entry: FileEntry) -> list[Problem]:
        nonlocal done
        path = dataset / entry.path
        try:
            how = entry.identity.changed(path, formats.load(format).facts)
        except CAUGHT as error:
            return [problem(error, path)]
        done += 1
        if progress is not None:
            progress(done, len(files))
        return [Problem(str(path), how)] if how else []

    if len(files) < 2:
        return [p for f in files for p in one(f)]
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [p for some in pool.map(one, files) for p in some]
