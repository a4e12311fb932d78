"""The keys of a Zarr store: files of a directory, or members of one ZIP file.

A store maps keys (``image/c.0.0``) to bytes. Both kinds answer the same few questions, of which
``chunk`` is the important one: the file descriptor and offset of a key's bytes as stored, so
that they can be read straight into their target. Names of ZIP members are keys and nothing else.
"""

from __future__ import annotations

import errno
import stat
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from dsprep.errors import FormatError
from dsprep.formats.zip_members import ZIP_ERRORS, begin
from dsprep.reading.files import Files
from dsprep.storage.base import Handle, stream
from dsprep.storage.checksums import check_member, read_crc32
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
    """Whether `name` is a number as the keys of chunks have it: no sign, no leading zeros."""
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
        their own, or of the ZIP file; ``nbytes`` is -1 where they are no plain bytes.
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


HEAD_NBYTES = 512
"""Bytes of a local header that are read of each member of an object: few names are longer."""


class Zip:
    """Every key is a member of the ZIP file `path`, below the folder that holds the root.

    The methods are those of `Directory`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_file(path)
        try:
            self._zip = zipfile.ZipFile(stream(self._file))
            self._root = zip_root(self._zip.namelist(), path)
        except (*ZIP_ERRORS, FormatError) as error:
            self._file.close()
            if isinstance(error, FormatError):
                raise
            raise FormatError("the ZIP file is truncated or damaged", where=path) from error
        self._size = self._file.nbytes
        self._starts: dict[str, int] = {}
        self._heads: dict[int, bytes] = {}
        self._verified: set[str] = set()
        self._verifying: dict[str, threading.Lock] = {}

    def document(self, key: str, limit: int = MAX_DOCUMENT) -> bytes | None:
        """See `Directory`."""
        info = self._zip.NameToInfo.get(join(self._root, key))
        if info is None:
            return None
        where = f"{self.path}, {info.filename}"
        packed = info.compress_type != zipfile.ZIP_STORED
        check_nbytes(info.file_size, min(limit, MAX_INFLATED) if packed else limit, where)
        try:
            return self._zip.read(info)
        except ZIP_ERRORS as error:
            raise FormatError(f"the ZIP member is damaged: {error}", where=where) from error

    def _below(self, folder: str) -> Iterator[tuple[str, zipfile.ZipInfo]]:
        """Yield what follows `folder` in the names of its members, and these."""
        prefix = join(self._root, folder)
        prefix = prefix and prefix + "/"
        for name, info in self._zip.NameToInfo.items():
            if name.startswith(prefix):
                yield name[len(prefix) :], info

    def children(self, group: str) -> list[str]:
        """See `Directory`."""
        return sorted({n.partition("/")[0] for n, _ in self._below(group) if "/" in n} - {""})

    def has(self, key: str) -> bool:
        """See `Directory`."""
        return join(self._root, key) in self._zip.NameToInfo

    def _extent(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            return 0, -1
        start = self._start(info)
        if info.compress_size != info.file_size or start + info.file_size > self._size:
            raise FormatError(
                "the ZIP member leaves the file",
                where=f"{self.path}, {info.filename}",
                expected=f"{info.file_size} bytes at {start}",
                found=f"{self._size} bytes in all",
            )
        return start, info.file_size

    def listed(self, folder: str, depth: int) -> Iterator[tuple[str, int, int]]:
        """See `Directory`; raise `FormatError` if a member leaves the file."""
        for name, info in self._below(folder):
            if name.count("/") == depth:
                yield name, *self._extent(info)

    @contextmanager
    def chunk(self, key: str) -> Iterator[tuple[Handle, int, int] | None]:
        """See `Directory`."""
        info = self._zip.NameToInfo.get(join(self._root, key))
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            yield None
            return
        start = self._start(info)
        nbytes = max(0, min(info.file_size, self._size - start))
        yield self._file, start, nbytes

    def open(self, path: str) -> Handle:
        """See `Directory`."""
        return self._file

    def verify_crc(self, keys: Iterable[str]) -> None:
        """See `Directory`; the checksum is the CRC-32 of the member."""
        for key in keys:
            name = join(self._root, key)
            info = self._zip.NameToInfo.get(name)
            if name in self._verified or info is None or info.compress_type != zipfile.ZIP_STORED:
                continue
            with self._verifying.setdefault(name, threading.Lock()):
                if name in self._verified:
                    continue
                where = f"{self.path}, {name}"
                start = self._start(info)
                end = min(start + info.file_size, self._size)
                check_member(read_crc32(self._file, start, end), info.CRC, where)
                self._verified.add(name)

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Return where the bytes of a member begin, which only its local header says."""
        if info.filename in self._starts:
            return self._starts[info.filename]
        if self._file.fd < 0 and not self._heads:  # all at once: each is a request
            offsets = [each.header_offset for each in self._zip.infolist()]
            offsets = [at for at in offsets if 0 <= at < self._size]
            heads = self._file.pread_blocks(HEAD_NBYTES, offsets)
            self._heads = dict(zip(offsets, heads, strict=True))
        where = f"{self.path}, {info.filename}"
        known = self._heads.get(info.header_offset, b"")
        start = self._starts[info.filename] = begin(self._file, info, where, known)
        return start

    def close(self) -> None:
        """See `Directory`."""
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
