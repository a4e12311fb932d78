"""The files of a dataset: from paths and patterns to files and their format."""

from __future__ import annotations

import codecs
import glob
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from dsprep import formats
from dsprep.errors import DsprepError, FormatError, NotFoundError, TargetError, UsageError, near
from dsprep.formats import foreign
from dsprep.formats.base import Format, WritableFormat
from dsprep.formats.samples import is_file, listed, natural_key, natural_order
from dsprep.formats.splits import HINT, by_part, parts_of_many
from dsprep.sidecar import spec
from dsprep.source.braces import expand
from dsprep.storage.atomic import refuse_partial, restore, written_as
from dsprep.storage.paths import StorePath, all_absolute, as_path, common_path, scan

MAX_LIST_NBYTES, MAX_LISTED = 256 << 20, 2_000_000
"""No list of paths is larger, in bytes and lines."""

NAMED = 8
"""Files of a part that are named one by one where no pattern gives them."""

MAX_SIBLINGS = 10_000
"""Names of a directory that are looked through for one like a name that is not there."""


def names_of(name: str, given: Any) -> list[str]:
    """Return the paths that a parameter names; raise `UsageError` if it is something else."""
    several = [given] if isinstance(given, (str, Path)) else given
    if not (isinstance(several, (list, tuple)) and several) or not all(
        isinstance(each, (str, Path)) for each in several
    ):
        raise UsageError(f"{name} is {given!r}", expected="a path, or a list of paths")
    for path in several:
        if not path or "\0" in str(path):
            raise UsageError(f"{path!r} is not a path")
    return [*map(str, several)]


def find_dataset(paths: Sequence[str | Path]) -> tuple[Format, list[Path], list[str]]:
    """Return the format of a dataset, its files in order, and notes on what was left out.

    Raises
    ------
    FormatError
        If the files are of several formats.
    DsprepError, OSError
        As `find_files` raises them.
    """
    files, notes = find_files(paths)
    first, format = files[0]
    for path, other in files:
        if other is not format:
            refuse_partial(written_as([path for path, _ in files]))
            raise FormatError(
                "the dataset mixes formats",
                where=path,
                expected=f"{format.name} as {first}",
                found=other.name,
                fix="name the files of one format",
            )
    return format, [path for path, _ in files], notes


def find_files(paths: Sequence[str | Path]) -> tuple[list[tuple[Path, Format]], list[str]]:
    """Return the files and stores that `paths` mean, in order, and notes on what was left out.

    Raises
    ------
    UsageError, FormatError, NotFoundError
        If a path does not exist, a pattern matches nothing, a directory holds no dataset, or a
        named file is of no known format.
    """
    files: list[tuple[Path, Format]] = []
    notes: list[str] = []
    named = [path for text in paths for path in _expand(str(text))]
    for path in named:
        format = _format_of(path) if path.is_dir() else formats.recognise(path)
        if format is None:
            inside, skipped = _walk(path)
            if not inside:
                refuse_partial([path])
                raise foreign.nothing_in(path, skipped, tuple(formats.FORMATS))
            _check_one_part(path, [file for file, _ in inside])
            if skipped:
                names = listed([p.name for p in skipped])
                notes.append(f"left out {names} in {path}: of no known format")
            files += inside
        else:
            files.append((path, format))
    if not files:
        raise UsageError("no dataset is named")
    if len(named) > 1:
        _check_once([path for path, _ in files])
    return files, notes


def _check_once(paths: list[Path]) -> None:
    """Raise `UsageError` if a file is named twice."""
    names = [*map(os.path.normpath, all_absolute(paths))]
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise UsageError(
            "the file is named twice",
            where=paths[names.index(twice)],
            fix="name it once; dsprep repack --duplicate K gives each sample K times",
        )


def _expand(text: str) -> list[Path]:
    """Return the paths that one argument means: a list file, a glob or itself."""
    if not text.startswith("@"):
        return _match(text)
    listing = as_path(text[1:])
    status = _status(listing)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_LIST_NBYTES:
        raise UsageError("this is not a list of paths", where=listing)
    data = listing.read_bytes().removeprefix(codecs.BOM_UTF8)
    if max(data.count(b"\n"), data.count(b"\r")) > MAX_LISTED:
        raise UsageError("the list is too long", where=listing, expected=f"<= {MAX_LISTED:,} lines")
    lines = [os.fsdecode(w.strip()) for w in data.splitlines()]
    names = [w for w in lines if w and not w.startswith("#")]
    if not names:
        raise UsageError("the list names no file", where=listing)
    above = str(listing.parent)
    where = [name if "://" in name else os.path.join(above, name) for name in names]  # noqa: PTH118 (keeps names as they are)
    if isinstance(listing, StorePath):
        bucket = "/".join(above.split("/")[:3])
        for name, path in zip(names, where, strict=True):
            if not path.startswith(f"{bucket}/"):
                raise UsageError(
                    f"the list names {name}, and others may have written it: a list in a store "
                    f"names only what is in {bucket}",
                    where=listing,
                    fix="copy the list to a disk if you trust it, and name that",
                )
    return [path for name in where for path in _match(name)]


def _status(path: Path) -> os.stat_result:
    """Return the status of what has a name; `NotFoundError` with names like it if nothing has."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        names: list[str] = []
        with suppress(OSError), os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, MAX_SIBLINGS)]
        fix = None if path.name in names else near(path.name, names)
        raise NotFoundError(error.strerror or str(error), where=path, fix=fix) from None


def _match(text: str) -> list[Path]:
    """Return the paths of a pattern: braces in their order, globs in natural order."""
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a path")
    path = as_path(text)
    missing = not (path.exists() or path.is_symlink())
    if missing and "{" in text and len(names := expand(text)) > 1:
        return [path for name in names for path in _match(name)]
    if missing and glob.has_magic(text):
        # pathlib's ** does not follow links to directories, which may lead in circles.
        above = type(path)(*path.parts[:2]) if isinstance(path, StorePath) else Path(path.anchor)
        matching = above.glob("/".join(path.parts[len(above.parts) :]))
        hidden = path.name.startswith(".")
        matches = [
            m
            for m in matching
            if not m.name.endswith(spec.NAMES) and (hidden or not m.name.startswith("."))
        ]
        if not matches:
            raise UsageError(f"nothing matches {text!r}")
        for above in {above for m in matches for above in m.absolute().parents}:
            with suppress(PermissionError):  # which says nothing of what is there
                foreign.check_no_table(above, tuple(formats.FORMATS))
        return sorted(matches, key=natural_key)
    if missing:
        restore(path)
        refuse_partial([path])
    mode = _status(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError("it is neither a file nor a directory", where=path)
    return [path]


def _walk(directory: Path) -> tuple[list[tuple[Path, Format]], list[Path]]:
    """Return the datasets under `directory` in natural order, and the files of no known format."""
    datasets: list[tuple[Path, Format]] = []
    skipped: list[Path] = []
    waiting = [directory]
    while waiting:
        current = waiting.pop()
        foreign.check_no_table(current, tuple(formats.FORMATS))
        for entry in scan(current):
            if entry.name.startswith(".") or entry.name.endswith(spec.NAMES):
                continue
            path = current / entry.name
            if entry.is_dir(follow_symlinks=False):
                format = _format_of(path)
                if format is None or format.named_only:
                    waiting.append(path)
                    continue
            elif (
                not is_file(entry)
                or (format := formats.by_suffix(path) or _format_of(path)) is None
            ):
                skipped.append(path)
                continue
            datasets.append((path, format))
    order = natural_order([os.fsencode(path) for path, _ in datasets])
    return [datasets[i] for i in order], sorted(skipped, key=natural_key)


def _check_one_part(directory: Path, files: Sequence[Path]) -> None:
    """Raise `UsageError` if names of files state parts of a dataset that no sidecar joins."""
    above = len(str(directory / "_")) - 1
    below = [str(file)[above:] for file in files]
    parts = by_part(below) if parts_of_many(map(os.fsencode, below)) else {}
    if len(parts) < 2:
        return
    with suppress(DsprepError, OSError):
        if spec.find(files) is not None:
            return
    paths = {part: [directory / name for name in names] for part, names in parts.items()}
    ways = [_way_to(directory, some, files) or f"the files of {p}" for p, some in paths.items()]
    raise UsageError(
        "the names of its files state parts of a dataset, which are not read as one unasked",
        where=directory,
        found="; ".join(listed(names) for names in parts.values()),
        fix=f"name one of them: {', or '.join(ways)}; or name all of them, one after another",
    )


def _way_to(directory: Path, part: Sequence[Path], files: Sequence[Path]) -> str:
    """Return arguments that name some files of a directory, to paste; "" if too long."""
    folder = common_path(part)
    if folder != directory and [*part] == [file for file in files if folder in file.parents]:
        return shlex.quote(str(folder))
    words = re.findall(HINT, str(part[0].relative_to(directory))) if len(part) > 1 else ()
    for pattern in (p for word in words for p in (f"**/*{word}*", f"**/*{word}*/*")):
        with suppress(UsageError):  # nothing matches
            matching = f"{glob.escape(str(directory))}/{pattern}"
            if set(_match(matching)) == set(part):
                return shlex.quote(matching)
    return shlex.join(map(str, part)) if len(part) <= NAMED else ""


def _format_of(path: Path) -> Format | None:
    try:
        return formats.recognise(path)
    except FormatError:
        return None


def check_replaceable(target: Path) -> None:
    """Raise `TargetError` if `target` is a directory that holds more than datasets."""
    if not target.is_dir() or target.is_symlink() or not any(target.iterdir()):
        return
    try:
        inside, others = find_files([target])
        foreign_files = [path for path, f in inside if not isinstance(f, WritableFormat)]
        problem = [*foreign_files, *map(str, others)][:1]
    except DsprepError as error:
        problem = [error.what]
    if problem:
        raise TargetError(
            f"it holds more than a dataset that dsprep wrote, and is not replaced: {problem[0]}",
            where=target,
            fix="remove it yourself if it is not needed",
        )
