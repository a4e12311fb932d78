"""The keys of a Zarr store: files of a directory, or members of one ZIP file.

A store maps keys (``image/c.0.0``) to bytes. Both kinds answer the same few questions, of which
``chunk`` is the important one: the file descriptor and offset of a key's bytes as stored, so
that they can be read straight into their target. Names of ZIP members are keys and nothing else.
"""

from __future__ import annotations

import errno
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from dsprep.errors import FormatError
from dsprep.formats.zip_members import ZIP_ERRORS, Member, member_checks, members
from dsprep.reading.files import Files
from dsprep.storage.base import Handle, stream
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import open_file, scan

MARKERS = ("zarr.json", ".zarray", ".zgroup", ".zmetadata")
"""Keys of which at least one is at the root of every store."""

ZATTRS = ".zattrs"
DOCUMENTS = frozenset({*MARKERS, ZATTRS})
"""Names of metadata documents; all other keys are chunks."""

MAX_DOCUMENT = 64 << 20
"""Bytes of the largest metadata document that is read; real ones are a few kB."""

MAX_INFLATED = 1 << 30
"""Bytes of the largest compressed ZIP member that is read."""

KEPT = 8
"""Chunk files of a directory that stay open: there may be many stores in one dataset."""


def is_number(name: str) -> bool:
    """Return whether a name is a number as keys of chunks have it: no sign, no leading zeros."""
    plain = name.isascii() and name.isdecimal() and len(name) < 20
    return plain and (name == "0" or name[0] != "0")


def join(*parts: str) -> str:
    """Return the key made of `parts`, of which some may be empty."""
    return "/".join(filter(None, parts))


class Directory:
    """Every key is a file under `path`; links out of its directory only if `follow` allows it."""

    def __init__(self, path: Path, follow: bool = False) -> None:
        self.path = path
        self._inside = DirectoryGuard(path, follow)
        self._files = Files(self._inside, lambda _: path, kept_open=KEPT)

    def document(self, key: str, limit: int = MAX_DOCUMENT) -> bytes | None:
        """Return the bytes of a key, or None if it is not there.

        Raises
        ------
        FormatError
            If there are more than `limit` bytes.
        """
        with self.chunk(key) as chunk:
            if chunk is None:
                return None
            file, _, nbytes = chunk
            check_nbytes(nbytes, limit, f"{self.path}/{key}")
            return file.pread_exact(nbytes, 0)

    def children(self, group: str) -> list[str]:
        """Return the names in `group` (``""`` is the root) that have names below them, sorted."""
        return sorted(e.name for e in scan(self.path / group) if e.is_dir())

    def has(self, key: str) -> bool:
        """Return whether there is a key."""
        return (self.path / key).is_file()

    def listed(self, folder: str, depth: int) -> Iterator[tuple[str, int, int]]:
        """Yield ``(name, offset, nbytes)`` of all that is `depth` folders below `folder`.

        The name is what follows `folder` in the key. Its bytes begin at ``offset`` of a file of
        their own, or of the ZIP file; ``nbytes`` is -1 where they are not plain bytes.
        """
        try:
            for entry in scan(self.path / folder):
                if not depth:
                    with suppress(FileNotFoundError):  # a link that leads nowhere
                        facts = entry.stat()
                        regular = stat.S_ISREG(facts.st_mode)
                        yield entry.name, 0, facts.st_size if regular else -1
                elif is_number(entry.name) and entry.is_dir():
                    below = self.listed(join(folder, entry.name), depth - 1)
                    yield from ((f"{entry.name}/{n}", at, size) for n, at, size in below)
        except (FileNotFoundError, NotADirectoryError):
            return

    @contextmanager
    def chunk(self, key: str) -> Iterator[tuple[Handle, int, int] | None]:
        """Enter a file, and offset and number of the bytes of `key` there as they are stored.

        None: there is no such key, or its bytes are not stored as they are.
        """
        path = f"{self.path}/{key}"
        try:
            file = open_file(path)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                raise FormatError("no file can be called so", where=path[:200]) from error
            raise
        with closing(file):
            self._inside.check(file)
            yield file, 0, file.nbytes
            file.check_same()

    def open(self, path: str) -> Handle:
        """Return an open file by its path in the layout: ``""`` is a ZIP file itself."""
        return self._files.get(0, path)

    def verify_crc(self, keys: Iterable[str]) -> None:
        """Compare the bytes of these keys with checksums of the store: it has none."""

    def close(self) -> None:
        """Release files."""
        self._files.close()


class Zip:
    """Every key is a member of the ZIP file `path`, below the folder that holds the root."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_file(path)
        try:
            self._zip = zipfile.ZipFile(stream(self._file))
            self._root = zip_root(self._zip.namelist(), path)
            self._members = {m.name: m for m in members(self._file, self._zip)}
        except (*ZIP_ERRORS, FormatError) as error:
            self._file.close()
            if isinstance(error, FormatError):
                raise
            raise FormatError("the ZIP file is truncated or damaged", where=path) from error
        self._check = member_checks(self._file)

    def document(self, key: str, limit: int = MAX_DOCUMENT) -> bytes | None:
        """Return the bytes of a key, or None if it is not there."""
        member = self._member(key)
        if member is None:
            return None
        where = f"{self.path}, {member.name}"
        check_nbytes(member.nbytes, limit if member.plain else min(limit, MAX_INFLATED), where)
        try:
            return self._zip.read(member.name)
        except ZIP_ERRORS as error:
            raise FormatError(f"the ZIP member is damaged: {error}", where=where) from error

    def _member(self, key: str) -> Member | None:
        return self._members.get(join(self._root, key))

    def _below(self, folder: str) -> Iterator[tuple[str, Member]]:
        """Yield what follows `folder` in the names of its members, and these."""
        prefix = join(self._root, folder)
        prefix = prefix and prefix + "/"
        for name, member in self._members.items():
            if name.startswith(prefix):
                yield name[len(prefix) :], member

    def children(self, group: str) -> list[str]:
        """Return the names in `group` that have names below them, sorted."""
        return sorted({n.partition("/")[0] for n, _ in self._below(group) if "/" in n} - {""})

    def has(self, key: str) -> bool:
        """Return whether there is a key."""
        return self._member(key) is not None

    def listed(self, folder: str, depth: int) -> Iterator[tuple[str, int, int]]:
        """Yield ``(name, offset, nbytes)`` of all that is `depth` folders below `folder`."""
        for name, member in self._below(folder):
            if name.count("/") == depth:
                yield name, member.offset, member.nbytes if member.plain else -1

    @contextmanager
    def chunk(self, key: str) -> Iterator[tuple[Handle, int, int] | None]:
        """Enter the ZIP file, and offset and size of a member; None: absent or compressed."""
        member = self._member(key)
        if member is None or not member.plain:
            yield None
        else:
            yield self._file, member.offset, member.nbytes

    def open(self, path: str) -> Handle:
        """Return the ZIP file, open."""
        return self._file

    def verify_crc(self, keys: Iterable[str]) -> None:
        """Compare the bytes of these keys with the CRC-32 of their members."""
        self._check(member for key in keys if (member := self._member(key)) is not None)

    def close(self) -> None:
        """Release files."""
        self._zip.close()
        self._file.close()


Store = Directory | Zip


def zip_root(names: list[str], where: object) -> str:
    """Return the folder in a ZIP file that is the root of the store: the outermost with a marker.

    Raise `FormatError` if there is none, or others lie outside it.
    """
    roots = [n.rpartition("/")[0] for n in names if n.rpartition("/")[2] in MARKERS]
    if not roots:
        expected = " or ".join(MARKERS)
        raise FormatError("the ZIP file holds no Zarr store", where=where, expected=expected)
    root = min(roots, key=lambda root: (root.count("/") + bool(root), root))
    others = sorted({r for r in roots if root and not f"{r}/".startswith(f"{root}/")})
    if others:
        raise FormatError(
            "the ZIP file holds several stores, or has lost the root of one",
            where=where,
            expected="one folder that holds all arrays and groups",
            found=", ".join([root, *others][:4]),
            fix="unpack it, and name one of them",
        )
    return root


def check_nbytes(nbytes: int, limit: int, where: str) -> None:
    """Raise `FormatError` if what is to be read as a whole is larger than any real one."""
    if nbytes > limit:
        raise FormatError(
            "this is too large to be read as a whole",
            where=where,
            expected=f"at most {limit} bytes",
            found=f"{nbytes}",
        )
