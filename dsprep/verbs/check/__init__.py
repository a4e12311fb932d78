"""Problems of a sidecar, and of the data that it describes.

The cheap check compares what is known of each file, parses every layout and computes extents: none
may be outside its file. The full one opens the files by their own library, finds every extent
again, compares all of them with those that the laws give, and reads: every checksum that there is,
and values, bit for bit. Of a sidecar that is damaged, and of each field of a file, the first
problem is reported; what does not fit the files any more is not compared further.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

from dsprep import formats
from dsprep.errors import DsprepError, FormatError
from dsprep.formats.options import OpenOptions
from dsprep.layout.model import FileLayout
from dsprep.reading.columns import ColumnReader
from dsprep.sidecar import spec
from dsprep.sidecar.entries import FileEntry
from dsprep.sidecar.sidecar import MissingError, Sidecar
from dsprep.sidecar.spec import Content
from dsprep.source.files import find_files
from dsprep.storage.paths import as_path, open_file
from dsprep.verbs.check.extents import wrong_extents
from dsprep.verbs.check.full import wrong_in_files
from dsprep.writing.create_sidecar import THREADS, dataset_of

__all__ = ["check"]

Progress: TypeAlias = Callable[[int, int], None]


def check(
    paths: str | Path | Sequence[str | Path] | Sidecar,
    *,
    full: bool = False,
    at: str | Path | None = None,
    progress: Progress | None = None,
) -> list[DsprepError]:
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
    list of DsprepError
        Each with `what`, `where`, `expected` and `found`; empty if the sidecar is valid.

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
    problems: dict[str, DsprepError] = {}
    try:
        content = _content(path)
        for problem in _wrong_files(content, dataset, requested, progress):
            problems[str(problem)] = problem
        if content.layouts and not problems:
            with Sidecar(content, dataset, path) as opened:
                for problem in _wrong_layouts(opened):
                    problems[str(problem)] = problem
                if full and not problems:
                    for problem in wrong_in_files(opened, progress):
                        problems[str(problem)] = problem
    except (DsprepError, OSError, MemoryError, OverflowError) as error:
        problem = error if isinstance(error, DsprepError) else _unreadable(error, path)
        problems[str(problem)] = problem
    return [*problems.values()]


def _unreadable(error: BaseException, path: Path) -> FormatError:
    named = getattr(error, "filename", None) or path
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return FormatError(f"it cannot be read: {text}", where=named)


def _named(paths: Sequence[str | Path], at: Path | None) -> tuple[Path, Path, list[Path]]:
    """Return the sidecar, its dataset, and the requested part of it."""
    first, requested = as_path(paths[0]), [*map(as_path, paths)]
    if len(paths) == 1 and first.name.endswith(spec.SUFFIX):
        dataset = first.with_name(first.name.removesuffix(spec.SUFFIX))
        path, requested = first, [dataset]
    elif len(paths) == 1 and (at is not None or spec.beside(first).is_file()):
        path, dataset = at or spec.beside(first), first
    else:
        requested = [p.absolute() for p, _ in find_files(paths)[0]]
        dataset = dataset_of(requested)
        path, above = at or spec.beside(dataset), spec.beside(dataset.parent)
        if at is None and len(requested) == 1 and not path.is_file() and above.is_file():
            path, dataset = above, dataset.parent
    if not path.is_file():
        raise MissingError(path, dataset)
    return path, dataset, requested


def _content(path: Path) -> Content:
    """Return the content of a sidecar, as far as it can be judged by itself."""
    content = spec.read(path)
    if content.format not in formats.FORMATS:
        known = ", ".join(formats.FORMATS)
        text = "it is of no known format"
        raise FormatError(text, where=path, expected=known, found=content.format)
    OpenOptions.from_json(content.reading)
    recorded = spec.read_json(path).get("samples")
    if recorded != content.samples:
        text = "it has another number of samples than its files"
        raise FormatError(text, where=path, expected=content.samples, found=recorded)
    return content


def _wrong_files(
    content: Content, dataset: Path, requested: Sequence[Path], progress: Progress | None
) -> Iterator[DsprepError]:
    """Yield how the files differ from what is known of them, and those that are not listed."""
    look = partial(_change, content.format, dataset)
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        for done, change in enumerate(pool.map(look, content.files), 1):
            if change is not None:
                yield change
            if progress is not None and len(content.files) > 1:
                progress(done, len(content.files))
    listed = {(dataset / path).absolute() for path in content.paths()}
    if all(path.exists() for path in requested):
        for path in (p.absolute() for p, _ in find_files(requested)[0]):
            if path not in listed:
                yield FormatError(
                    "it is in the dataset, and the sidecar does not list it", where=path
                )


def _change(format: str, dataset: Path, entry: FileEntry) -> DsprepError | None:
    path = dataset / entry.path
    try:
        how = entry.identity.changed(path, formats.load(format).facts)
    except DsprepError as error:
        return error
    except OSError as error:
        return _unreadable(error, path)
    return None if how is None else FormatError(how, where=path)


def _wrong_layouts(opened: Sidecar) -> Iterator[DsprepError]:
    """Yield the extents that are not in their files."""
    checked = set[tuple[object, ...]]()
    for i, entry in enumerate(opened.content.files):
        root, layout = opened.root(i), opened.layout(i)
        nbytes = root.stat().st_size if root.is_file() else root
        if (key := (entry.layout, entry.samples, nbytes)) not in checked:
            _prepare(layout, opened, root)
            yield from wrong_extents(layout, opened.schema, root, opened.first(i))
            checked.add(key)


def _prepare(layout: FileLayout, opened: Sidecar, root: Path) -> None:
    """Raise if a frame, recipe or filter is unknown or has wrong parameters."""
    if layout.records is not None:
        formats.decoders(layout.records, opened.schema)
    for name, column in layout.columns.items():
        field = opened.schema[name]
        ColumnReader(column, field, lambda path: open_file(root / path if path else root))
