"""Names of files in stores, as paths: local ones, and ``scheme://...`` of a store that is known.

A path of a store behaves as a `pathlib.Path` of a file that is only read. So whatever takes a path
works for all stores, as long as it opens files by `open_file` and lists directories by `scan`.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from glob import has_magic
from importlib import import_module
from itertools import takewhile
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from typing_extensions import override

from dsprep.errors import UnsupportedError, UsageError
from dsprep.storage.base import Handle, Store, stream
from dsprep.storage.local import LocalFile

if TYPE_CHECKING:
    from dsprep.storage.identity import Identity

_stores: dict[str, Store] = {}

HEAD_NBYTES = 4096
"""Bytes of a file that formats are recognised by."""


def register(scheme: str, store: Store) -> None:
    """Have ``scheme://...`` name what is in a store."""
    _stores[scheme] = store


SCHEMES = dict.fromkeys(("s3", "gs", "az", "https", "http"), "dsprep.storage.objects.store")
"""Schemes of stores that are not registered at first, and the modules that do so for one.

An entry point ``dsprep.stores`` of another distribution, called as its scheme, names a function
that returns the store."""

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables of the environment that name the server of a scheme."""


def _store(scheme: str) -> Store:
    """Return the store of a scheme, registered when it is first named."""
    if scheme not in _stores:
        register(scheme, import_module(SCHEMES[scheme]).store(scheme))
    return _stores[scheme]


class StorePath(PosixPath):
    """The path of a file or directory in a `Store`: ``scheme://name``.

    It is absolute, has no links, and is only read; its store puts whole files.
    """

    @property
    def store(self) -> Store:
        """The store that it is in."""
        return _store(self.parts[0].removesuffix(":"))

    @property
    def key(self) -> str:
        """Its name in the store."""
        return "/".join(self.parts[1:])

    @override
    def __str__(self) -> str:
        scheme, *names = self.parts
        return f"{scheme}//{'/'.join(names)}"

    @override
    def __fspath__(self) -> str:
        return str(self)

    @property
    @override
    def name(self) -> str:
        return super().name if len(self.parts) > 1 else ""

    @property
    @override
    def parent(self) -> Self:
        return super().parent if len(self.parts) > 1 else self

    @property
    @override
    def parents(self) -> tuple[Self, ...]:
        # What has no name is not asked for: a scheme alone, where the bucket would be one.
        return tuple(type(self)(*self.parts[:n]) for n in range(len(self.parts) - 1, 1, -1))

    @override
    def is_absolute(self) -> bool:
        return True

    @override
    def absolute(self) -> Self:
        return self

    @override
    def resolve(self, strict: bool = False) -> Self:
        return self

    @override
    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.store.stat(self.key)

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    @override
    def exists(self, **_: Any) -> bool:
        return self._mode() != 0

    @override
    def is_file(self, **_: Any) -> bool:
        return stat.S_ISREG(self._mode())

    @override
    def is_dir(self, **_: Any) -> bool:
        return stat.S_ISDIR(self._mode())

    @override
    def is_symlink(self) -> bool:
        return False

    @override
    def iterdir(self) -> Generator[Self, None, None]:
        return (self / entry.name for entry in scan(self))

    @override
    def glob(self, pattern: str, **_: Any) -> Generator[Self, None, None]:
        first, _slash, rest = pattern.partition("/")
        if rest and not has_magic(first):
            yield from (self / first).glob(rest)
            return
        if first == "**" and rest:
            yield from self.glob(rest)
        for entry in list(scan(self)):
            path = self / entry.name
            if first == "**":
                yield from path.glob(pattern) if entry.is_dir() else ()
            elif fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else [path]

    @override
    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        if mode != "rb":
            raise UsageError("files of a store are only read", where=self)
        return stream(open_file(self))

    @override
    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.stat()
        self.store.remove(self.key)

    @override
    def read_bytes(self) -> bytes:
        with closing(open_file(self)) as file:
            return file.pread_exact(file.nbytes, 0)


def as_path(name: str | Path) -> Path:
    """Return a name that a user or a file gives as a path, of a store if it is ``scheme://...``.

    Raises
    ------
    UsageError
        If no such store is known.
    """
    if isinstance(name, Path):
        return name
    if "://" not in name:
        return Path(name)
    scheme = name.partition("://")[0]
    if scheme in _stores or scheme in SCHEMES:
        bucket = name.partition("://")[2].partition("/")[0]
        if scheme in SCHEMES and (not bucket or "@" in bucket):
            raise UsageError(
                f"this {scheme}:// URL names no bucket or host, or has a user in it",
                expected=f"{scheme}://bucket/name, and credentials in the environment",
            )
        path = StorePath(name)
        _store(scheme)
        return path
    if not scheme.isalnum():
        return Path(name)
    from importlib.metadata import entry_points

    for entry in entry_points(group="dsprep.stores", name=scheme):
        register(scheme, entry.load()(scheme))
        return StorePath(name)
    raise UsageError(
        f"{scheme}:// is not a kind of store that dsprep reads", where=name, fix="copy it to a disk"
    )


def check_local(path: Path) -> None:
    """Raise `UnsupportedError` if a path is one of a store, where only local files will do."""
    if isinstance(path, StorePath):
        raise UnsupportedError(
            "this needs files of this machine's file systems", where=path, fix="copy it to a disk"
        )


def all_absolute(paths: Sequence[Path]) -> list[Path]:
    """Return the absolute paths, with one look-up of the current directory."""
    here = None if all(path.is_absolute() for path in paths) else Path.cwd()
    return [path if here is None or path.is_absolute() else here / path for path in paths]


def common_path(paths: Sequence[Path]) -> Path:
    """Return the longest path that all of some absolute paths begin with.

    Raises
    ------
    UsageError
        If they are in different stores.
    """
    first = paths[0]
    if not any(isinstance(path, StorePath) for path in paths):
        texts = [f"{path}/" for path in paths]  # what the first and the last share, all do
        return Path(os.path.commonpath((min(texts), max(texts))))
    if len({path.parts[0] for path in paths}) > 1:
        raise UsageError(
            "files of different stores, or of one and a disk, are not one dataset",
            found=" ".join(sorted({path.parts[0] for path in paths})),
            fix="copy them to one place",
        )
    levels = zip(*(path.parts for path in paths), strict=False)
    return type(first)(*(names[0] for names in takewhile(lambda n: len({*n}) == 1, levels)))


def open_file(path: str | Path, known: Identity | None = None) -> Handle:
    """Return a file of a dataset, open for reading; `OSError` if it cannot be opened.

    `known`: what is known of a file in a store; see `Store.open`.
    """
    if isinstance(path, str) and "://" in path:
        path = as_path(path)
    if isinstance(path, StorePath):
        return path.store.open(path.key, str(path), known)
    if getattr(_once, "path", None) == os.fspath(path):
        return LocalFile(path, os.dup(_once.fd))
    return LocalFile(path)


_once = threading.local()


@contextmanager
def opened_once(path: Path) -> Iterator[None]:
    """Open a file of this machine once for all that this thread does with it by `open_file`."""
    if isinstance(path, StorePath) or not path.is_file():
        yield
        return
    with closing(LocalFile(path)) as file:
        _once.path, _once.fd = os.fspath(path), file.fd
        try:
            yield
        finally:
            _once.path = None


DirectoryEntry: TypeAlias = "os.DirEntry[str] | StoreEntry"


def scan(directory: str | Path) -> Iterator[DirectoryEntry]:
    """Yield the entries of a directory, in no order; raises as `os.scandir`."""
    if isinstance(directory, str) and "://" in directory:
        directory = as_path(directory)
    if isinstance(directory, StorePath):
        for name, status in directory.store.listing(directory.key):
            yield StoreEntry(name, f"{directory}/{name}", status)
        return
    with os.scandir(directory) as entries:
        yield from entries


@dataclass(frozen=True)
class StoreEntry:
    """An entry of a directory in a store, as `os.DirEntry` has it."""

    name: str
    path: str
    status: os.stat_result

    def is_dir(self, **_: object) -> bool:
        """Return whether it is a directory."""
        return stat.S_ISDIR(self.status.st_mode)

    def is_file(self, **_: object) -> bool:
        """Return whether it is a file."""
        return stat.S_ISREG(self.status.st_mode)

    def is_symlink(self) -> bool:
        """Return False: stores have no links."""
        return False

    def stat(self, **_: object) -> os.stat_result:
        """Return its status."""
        return self.status


def status_of(entry: DirectoryEntry) -> os.stat_result:
    """Return the status of what is in a directory, as it is now: entries keep what they saw."""
    return entry.status if isinstance(entry, StoreEntry) else os.stat(entry.path)  # noqa: PTH116


class Candidate:
    """A path that may be a dataset: what formats look at to recognise theirs, read once.

    Attributes
    ----------
    path
        Of a file or directory.
    is_file, is_directory
        What it is; neither, if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = 0
        self.is_file, self.is_directory = stat.S_ISREG(mode), stat.S_ISDIR(mode)

    @cached_property
    def file(self) -> Handle:
        """The file, open; `OSError` if it cannot be opened."""
        return open_file(self.path)

    def close(self) -> None:
        """Close the file."""
        if "file" in vars(self):
            self.file.close()

    @cached_property
    def head(self) -> bytes:
        """Its first 4 KiB, fewer of a shorter file; none of what is not a file."""
        return self.file.pread(HEAD_NBYTES, 0) if self.is_file else b""
