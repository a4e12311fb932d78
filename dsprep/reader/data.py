"""The dataset that a program names: its sidecar, which is made where there is none.

Data without a sidecar are located as `dsprep.provenance` does it, if that is quick: up to
`QUICK_NBYTES` in up to `QUICK_FILES` files. The sidecar is written beside a file or directory that
is named, if it may be and none is there; of several processes that do so the first one writes it,
and all read that. Otherwise it stays in memory.
"""

from __future__ import annotations

import glob
import shlex
import time
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from dsprep.core.units import show_nbytes
from dsprep.errors import DsprepError, LocatedWarning, UsageError
from dsprep.formats.base import Format
from dsprep.sidecar import spec
from dsprep.sidecar.join import join
from dsprep.sidecar.sidecar import MissingError, Sidecar
from dsprep.source.files import find_dataset, names_of
from dsprep.storage.identity import Identity
from dsprep.storage.paths import as_path, common_path
from dsprep.writing.create_sidecar import locate_files

Paths: TypeAlias = str | Path | Sequence[str | Path]
"""A file, a directory, a glob, ``@list.txt``, or a sequence of these."""

PAUSES = (0.0, 0.1, 0.3, 1.2)
"""Seconds in which another process that has written a companion writes its sidecar."""

QUICK_NBYTES, QUICK_FILES = 4 * 10**9, 1000

_noted: set[str] = set()


def absolute(path: str) -> str:
    """Return a path, or ``@list.txt``, that means the same in every directory."""
    at = "@" if path.startswith("@") else ""
    return f"{at}{as_path(path.removeprefix(at)).absolute()}"


def open_data(
    path: Paths | Sidecar, data: Paths | None = None, *, check: bool = True, note: bool = True
) -> Sidecar:
    """Open a dataset through its sidecar.

    Parameters
    ----------
    path
        The dataset, its sidecar, or an opened one.
    data
        The dataset, where it is not the one beside the sidecar.
    check
        Whether to check that the data have not changed.
    note
        Whether to warn of what has no sidecar.

    Returns
    -------
    Sidecar
        To be closed.

    Raises
    ------
    MissingError
        If there is no sidecar, and it is not made without being asked for.
    UsageError, StaleError, FormatError, UnsupportedError
        If files do not go together, changed, are damaged, or cannot be located.
    """
    if isinstance(path, Sidecar):
        opened = path.again()
        if check:
            opened.check()
        return opened
    named, of = names_of("path", path), data if data is None else names_of("data", data)
    if len(named) == 1 and (of is None or (len(of) == 1 and as_path(of[0]).exists())):
        try:
            where = None if of is None else of[0]
            return Sidecar.open(named[0], where, check=check)
        except MissingError:
            several = named[0].startswith("@") or "{" in named[0] or glob.has_magic(named[0])
            exists = as_path(named[0]).exists()
            if of is not None or named[0].endswith(spec.SUFFIX) or not (several or exists):
                raise
    format, files, notes = find_dataset(named if of is None else of)
    files = [file.absolute() for file in files]
    if of is not None:
        if len(named) > 1:
            raise UsageError("data= belongs to one sidecar", found=", ".join(named[:3]))
        at = spec.find_path(files, as_path(named[0]))
        assert at is not None  # or it raises
        opened = _reduced(at, files)
    else:
        located = _find(format, files)
        if located is None:
            located = _located(named, (format, files, notes), note)
        opened = located
    if check:
        opened.check()
    return opened


def _reduced(located: tuple[Path, Path], files: Sequence[Path]) -> Sidecar:
    """Return a dataset that has a sidecar, reduced to some files in their order."""
    dataset, where = located
    content = spec.read(where)
    part = spec.reduced(content, dataset, files, where)
    return Sidecar(part, dataset, where, kept=part.files == content.files)


def _find(format: Format, files: Sequence[Path]) -> Sidecar | None:
    """Return the sidecar of some files, or the sidecars of all of them as one."""
    look = lru_cache(maxsize=1024)(spec.find_beside)  # another process may just write one
    located = spec.find_path(files, look=look)
    if located is not None:
        listed = {located[0] / entry.path for entry in spec.read(located[1]).files}
        if listed.issuperset(files) or not (format.keeps_types or listed.isdisjoint(files)):
            return _reduced(located, files)
    dataset = common_path(files)
    joined = join(files, dataset, look)
    if joined is None:
        return None
    content, companion = joined
    return Sidecar(content, dataset, spec.sidecar_path(dataset), companion, kept=False)


def _located(
    named: Sequence[str], data_files: tuple[Format, list[Path], list[str]], note: bool
) -> Sidecar:
    """Return the sidecar of files that have none: written, or else in memory."""
    format, files, _ = data_files
    command = "dsprep provenance " + shlex.join(named[:3]) + " ..." * (len(named) > 3)
    count = nbytes = 0
    for file in files[: QUICK_FILES + 1]:
        identity = Identity.look(file)
        count, nbytes = count + identity.files, nbytes + identity.nbytes
    size = f"{show_nbytes(nbytes)} in {count:,} file{'s' * (count != 1)}"
    if count > QUICK_FILES or nbytes > QUICK_NBYTES:
        raise MissingError(spec.sidecar_path(common_path(files)), common_path(files), command, size)
    made = locate_files(*data_files)
    where, reason = made.path, "they are named one by one, or by a pattern"
    if len(named) == 1 and as_path(named[0]).exists():
        try:
            made.save(durable=False, replace=False)
        except FileExistsError:  # another process was first
            reason = f"{where.name} or its companion is of others"
            for pause in PAUSES:
                if where.exists():
                    break
                time.sleep(pause)  # it has written the companion, which comes first
        except (OSError, UsageError) as error:  # the latter of a web server
            reason = error.what if isinstance(error, DsprepError) else str(error)
        opened = _find(format, files)
        if opened is not None:
            _note(f"{made.dataset}: there was no sidecar; wrote {where.name} of {size}", note)
            return opened
    text = (
        f"{made.dataset}: {size} have no sidecar, and are located in memory each time ({reason}); "
    )
    _note(f"{text}{command} --out F writes one, for path=F with data= these files", note)
    return Sidecar(made.content, made.dataset, where, made.companion or None, kept=False)


def _note(text: str, note: bool) -> None:
    """Warn, once in this process."""
    if note and text not in _noted:
        _noted.add(text)
        warnings.warn(text, LocatedWarning, stacklevel=6)
