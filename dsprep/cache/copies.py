"""One copy: some pieces of a dataset in a directory of a faster tier.

::

    images.h5-0f3a...-part-81c2....dsprep-copy/
        copy.json   what it is a copy of, and by its key that it is one; never changes
        edges       int64: the first sample of each piece of the dataset, and the number of samples
        state       uint8 per piece: see `ABSENT` and what follows
        turn        uint32 per piece: which is wanted sooner
        sums        uint32 per piece: the CRC-32C of its ranges, one after another
        use         locked by all who read it or fill it; its time is that of the last use
        fill        locked by the one who fills it; its time is when something arrived
        files       a line with name and bytes of each file of the dataset that it has
        synced      there once all that it holds is on the disk
        compared    what the files of the dataset were when they were compared with the sidecar;
                    only where it was staged
        0, 1-5be0.. the files of the dataset, sparse

What is written is in the page cache and survives the end of a process, not that of the kernel: a
copy that is not `synced` and was made before the last start is worthless, and removed.

Whose a directory is does not follow from its name. One is a copy if its name and a key in its
``copy.json`` say so, and it counts if nobody else can write to it; see `dsprep.cache.root`. One is
removed file by file, those alone that copies have, and only if there are no others.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from typing_extensions import override

from dsprep.cache.locks import Lock
from dsprep.cache.pieces import PAGE, Pieces, name_of
from dsprep.cache.root import Root
from dsprep.core.packing import digest
from dsprep.core.schema import Array, Ints
from dsprep.storage.directory import Directory
from dsprep.storage.durable import sync
from dsprep.storage.local import LocalFile
from dsprep.storage.nodes import boot
from dsprep.storage.ranges import close_quietly, fstat, pread_exact, pwrite_all
from dsprep.storage.trees import HIDDEN, soon

VERSION = 2

KEY = "dsprep_copy"
"""The key of ``copy.json`` that no other file has; its value is `VERSION`."""

ABSENT, ASKED, PLANNED, READY, LEFT_OUT, REFUSED = range(6)
"""Of a piece: nobody has asked for it; somebody has; there is space reserved for it; it is there;
there is no room for it; it was not right when it was copied."""

OPEN = 64
"""Files of a copy that stay open."""

FACTS, SYNCED, COMPARED = "copy.json", "synced", "compared"

FILES = {FACTS, "edges", "state", "turn", "sums", "use", "fill", "files", SYNCED, COMPARED}
"""The files of a copy, but for those that stand for files of the dataset: see `DATA`."""

DATA = re.compile(r"\d+(-[0-9a-f]{16})?")

SUFFIX = ".dsprep-copy"
"""How the names of copies end."""

UNFINISHED = ".dsprep-cache-partial"
"""How the names of copies end that are being made or removed."""

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

NOT_SYNCED = "it was not on the disk when the machine was started again"

IN_USE = "in use"
"""Why a copy is not removed."""

LAST = np.iinfo(np.uint32).max
"""The turn of a piece that nobody has asked for."""


@dataclass(frozen=True)
class Facts:
    """What a copy is a copy of; its `name` is that of its directory.

    The same data may be reached by several paths: copies are the same, whichever it was.
    """

    dataset: str = field(compare=False)  # a path from the root
    sidecar: str = field(compare=False)  # empty: in the memory of the program that copied
    fields: tuple[str, ...]
    key: str  # of `Pieces`
    part: str  # a word for the pieces of it that the copy has; empty: all
    pieces: tuple[tuple[int, int], ...] = ()  # which: runs ``low .. high``

    @classmethod
    def of(cls, pieces: Pieces, numbers: Ints | None = None) -> Self:
        """Return those of a copy of some pieces, which rise; None: of all."""
        part = "" if numbers is None else digest(numbers.tobytes())
        runs = ((0, len(pieces)),) if numbers is None else _runs(numbers)
        opened = pieces.sidecar
        where = str(opened.path.absolute()) if opened.kept else ""
        return cls(str(opened.dataset.absolute()), where, pieces.names, pieces.key, part, runs)

    @property
    def name(self) -> str:
        """The name of its directory."""
        stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(self.dataset).name)
        short = stem.lstrip(".").encode()[:64].decode(errors="ignore")
        return f"{short}-{self.key}" + (f"-part-{self.part}" if self.part else "") + SUFFIX

    def nbytes(self, edges: Ints) -> int:
        """Return the bytes that a copy takes which holds nothing yet; see `Copy.create`."""
        count = sum(high - low for low, high in self.pieces)
        json_nbytes = len(json.dumps(self.to_json()))
        sizes = json_nbytes, edges.nbytes, count, 4 * count, 4 * count, PAGE, PAGE
        return sum(-(-n // PAGE) * PAGE for n in sizes)  # of files, and of their extents

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {KEY: VERSION, **asdict(self), "boot": boot()}

    @classmethod
    def parse(cls, data: bytes) -> tuple[Self, str]:
        """Return what `to_json` was given, and the start of the machine; `ValueError` if not."""
        try:
            content = json.loads(data)
            runs = tuple((int(low), int(high)) for low, high in content["pieces"])
            if content[KEY] != VERSION or any(not 0 <= low < high for low, high in runs):
                raise ValueError("it is of another version")
            names = tuple(map(str, content["fields"]))
            words = str(content["key"]), str(content["part"])
            made = cls(str(content["dataset"]), str(content["sidecar"]), names, *words, runs)
            return made, str(content["boot"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{FACTS} is damaged: {error}") from error


class Descriptor:
    """A descriptor, closed when nothing refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        close_quietly(self.fd)


class _Table(Descriptor):
    """An array in a file that several processes read and write, element by element."""

    def __init__(self, fd: int, dtype: str, count: int) -> None:
        super().__init__(fd)
        self._dtype, self._count = np.dtype(dtype), count
        if fstat(fd).st_size != count * self._dtype.itemsize:
            raise ValueError("one of its tables has another size")

    def read(self, first: int = 0, last: int | None = None) -> Array:
        """Return the elements ``first .. last``."""
        size, stop = self._dtype.itemsize, self._count if last is None else last
        data = pread_exact(self.fd, (stop - first) * size, first * size, "a table of the cache")
        return np.frombuffer(data, self._dtype)

    def put(self, i: int, value: int) -> None:
        """Set an element."""
        data = np.array(value, self._dtype).tobytes()
        pwrite_all(self.fd, [data], i * self._dtype.itemsize)

    def put_all(self, chosen: Ints, value: int) -> None:
        """Set some elements, given rising, and none of those between them."""
        for low, high in _runs(chosen):
            data = np.full(high - low, value, self._dtype).tobytes()
            pwrite_all(self.fd, [data], low * self._dtype.itemsize)

    def refresh(self) -> None:
        """Read anew what others may have written meanwhile: clients of some servers keep pages."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def write(self, values: Array) -> None:
        """Set all elements."""
        pwrite_all(self.fd, [values.astype(self._dtype).tobytes()], 0)


class CopyFile(LocalFile):
    """A file of a copy, which stands for one of the dataset: its `original`.

    It may grow while it is read, by what nobody reads yet.
    """

    def __init__(self, path: Path, fd: int, number: int, inside: str) -> None:
        super().__init__(path, fd)
        self.original = number, inside

    @override
    def check_same(self, offset: int | None = None) -> None:
        """Do nothing: what is there is not written again."""


class Copy:
    """A copy that is open: it is not removed meanwhile. Safe to use from several threads.

    Parameters
    ----------
    root, name
        The directory of all copies, and the name of this one in it.

    Attributes
    ----------
    path
        Where it is, for messages.
    which
        int64, rising: the pieces that it is for.
    is_writable
        Whether this process may fill it, and note that it is used: not if it is root's.

    Raises
    ------
    FileNotFoundError
        If it has been removed.
    ValueError
        If it is damaged.
    OSError
        If it is somebody else's, or the file system does not do what is needed.
    """

    def __init__(self, root: Root, name: str) -> None:
        self.root, self.name, self.path = root, name, root.path / name
        self._use: Lock | None = None
        self._opened: dict[str, _Table] = {}
        self._files: dict[tuple[int, str], CopyFile] = {}
        self._lock = threading.Lock()
        self.is_writable = True
        opened = root.copy(name)
        self._directory: Directory | None = opened
        # Who only asks whether somebody uses it has the lock for a moment.
        self._use = Lock(self._opened_use(), shared=True, seconds=1.0)
        if not root.is_at(name, opened):
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.path))
        self.facts, self._boot = Facts.parse(opened.read(FACTS))
        if not is_synced(opened, self._boot):
            raise ValueError(NOT_SYNCED)
        count = sum(high - low for low, high in self.facts.pieces)
        for table, dtype in (("state", "<u1"), ("turn", "<u4"), ("sums", "<u4")):
            self._opened[table] = _Table(self.open(table, self._access), dtype, count)
        runs = [np.arange(low, high, dtype=np.int64) for low, high in self.facts.pieces]
        self.which: Ints = np.concatenate([np.zeros(0, np.int64), *runs])

    def _opened_use(self) -> int:
        """Open the file that all who use it lock; note if this may not write to it."""
        try:
            return self.open("use", os.O_RDWR)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
        self.is_writable = False
        return self.open("use")

    @property
    def _access(self) -> int:
        return os.O_RDWR if self.is_writable else os.O_RDONLY

    @classmethod
    def create(cls, root: Root, facts: Facts, edges: Ints) -> Copy:
        """Open the copy of these facts in a directory; make it, empty, if there is none.

        `edges` are those of the pieces of the dataset. What is there but cannot be trusted is
        removed. Called with the directory locked.
        """
        name = facts.name
        try:
            copy = cls(root, name)
            problem = "files of it were removed, or their ends cut off"
            if copy.facts == facts and copy.is_intact:
                return copy
            copy.close()
        except (ValueError, FileNotFoundError) as error:
            problem = str(error)
            del error  # its traceback refers to what was opened
        if reason := remove_unused(root, name):
            words = f"{problem}; it is not removed, as {reason}: move it away"
            if reason == IN_USE:
                words = f"another process or node uses it; {problem}"
            raise OSError(errno.EBUSY, words, str(root.path / name))
        unfinished = _unfinished(name)
        made = root.make(unfinished)
        count = sum(high - low for low, high in facts.pieces)
        contents = {  # the first of them says whose the others are, also after a loss of power
            FACTS: json.dumps(facts.to_json()).encode(),
            "edges": edges.astype("<i8").tobytes(),
            "state": bytes(count),
            "turn": np.full(count, LAST, "<u4").tobytes(),
            "sums": bytes(4 * count),
            **dict.fromkeys(("use", "fill", "files"), b""),
        }
        for file, content in contents.items():
            out = Descriptor(made.open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            pwrite_all(out.fd, [content], 0)
            if file == FACTS:
                sync(out.fd, data=True)
        root.rename(unfinished, name)
        return cls(root, name)

    def touch(self) -> None:
        """Note that it is used now."""
        if self.is_writable:
            self.directory.touch("use")

    def close(self) -> None:
        """Let others remove it. What reads a file of it reads on; nothing else is open."""
        if self._use is not None:
            self._use.release()
        self._opened, self._files, self._directory = {}, {}, None

    def __del__(self) -> None:
        self.close()

    @property
    def directory(self) -> Directory:
        """It itself, open."""
        if self._directory is None:
            raise OSError(errno.EBADF, "the copy was closed", str(self.path))
        return self._directory

    def _table(self, name: str) -> _Table:
        table = self._opened.get(name)
        if table is None:
            raise OSError(errno.EBADF, "the copy was closed", str(self.path))
        return table

    # --- what it holds -----------------------------------------------------------------------

    def index(self, pieces: Ints) -> Ints | None:
        """Return where pieces are in the tables: int64; None if it is not for all of them."""
        if not len(self.which) or not len(pieces):
            return None
        positions = np.searchsorted(self.which, pieces)
        inside = np.minimum(positions, len(self.which) - 1)
        return inside if bool((self.which[inside] == pieces).all()) else None

    def refresh(self) -> None:
        """See what other nodes have written."""
        for name in ("state", "turn", "sums"):
            self._table(name).refresh()

    def states(self) -> Array:
        """Return the state of each piece: uint8, shape ``(n,)``."""
        return self._table("state").read()

    def states_at(self, index: Ints) -> Array:
        """Return the state of some pieces."""
        low, high = int(index[0]), int(index[-1]) + 1
        states: Array = self._table("state").read(low, high)[index - low]
        return states

    def set_state(self, i: int, state: int) -> None:
        """Set the state of the piece at a place in the tables."""
        self._table("state").put(i, state)

    @property
    def is_filled(self) -> bool:
        """Whether nothing of it is still to come."""
        states = self.states()
        return not bool(((states == ASKED) | (states == PLANNED)).any())

    @property
    def is_synced(self) -> bool:
        """Whether all that it holds is on the disk."""
        return self.directory.has(SYNCED)

    def turns(self) -> Array:
        """Return which pieces are wanted sooner: uint32, shape ``(n,)``."""
        return self._table("turn").read()

    def ask(self, pieces: Ints) -> None:
        """Have pieces filled in, in this order, or as soon as others have asked for them.

        Raises `PermissionError` if this may not fill it, and something is not there.
        """
        index = np.searchsorted(self.which, pieces[np.isin(pieces, self.which)])
        states = self.states()[index]
        absent = states == ABSENT
        if not self.is_writable and bool((states != READY).any()):
            raise PermissionError(errno.EACCES, "what it lacks cannot be copied", str(self.path))
        if bool((absent | (states == ASKED) | (states == PLANNED)).any()):
            turns = self.turns().copy()
            np.minimum.at(turns, index, np.arange(len(index), dtype=np.uint32))
            self._table("turn").write(turns)
        self._table("state").put_all(np.sort(index[absent]), ASKED)

    def ask_again(self) -> None:
        """Have it seen whether there is room now for what was left out."""
        self._table("state").put_all(np.flatnonzero(self.states() == LEFT_OUT), ASKED)

    def sum(self, i: int) -> int:
        """Return the CRC-32C of the piece at a place in the tables, which is ready."""
        return int(self._table("sums").read(i, i + 1)[0])

    def set_sum(self, i: int, crc: int) -> None:
        """Set it."""
        self._table("sums").put(i, crc)

    def edges(self) -> Ints:
        """Return the edges of the pieces of the dataset, as `Pieces` has them."""
        return np.frombuffer(self.directory.read("edges"), "<i8").astype(np.int64)

    # --- files -------------------------------------------------------------------------------

    def file(self, number: int, path: str) -> CopyFile:
        """Return what stands for the file at `path` below file entry `number`, open."""
        key, name = (number, path), name_of(number, path)
        with self._lock:
            opened = self._files.get(key)
            if opened is None:
                if len(self._files) >= OPEN:
                    self._files.clear()  # who reads one keeps it open
                opened = CopyFile(self.path / name, self.open(name), number, path)
                self._files[key] = opened
            return opened

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file of it: of this copy, also if another one has taken its place meanwhile."""
        return self.directory.open_file(name, flags)

    def files(self) -> dict[str, int]:
        """Return name and bytes of the files of the dataset that it has; `ValueError` if not."""
        lines = self.directory.read("files").decode().splitlines()
        return {name: int(nbytes) for name, nbytes in map(str.split, lines)}

    def add_file(self, name: str, nbytes: int) -> None:
        """Note that there is one; called by who fills it."""
        fd = self.open("files", os.O_WRONLY)
        try:
            pwrite_all(fd, [f"{name} {nbytes}\n".encode()], os.fstat(fd).st_size)
        finally:
            close_quietly(fd)

    @property
    def is_intact(self) -> bool:
        """Whether all files are there, nobody has cut off their ends, and they are known."""
        try:
            return all(
                self.directory.stat(name).st_size == nbytes for name, nbytes in self.files().items()
            )
        except (FileNotFoundError, ValueError):
            return False

    def sync(self) -> None:
        """Bring all that it holds to the disk, and note that."""
        for name in self.directory.names():
            out = self.open(name)
            try:
                sync(out, data=True)
            finally:
                close_quietly(out)
        self._sync_names()
        close_quietly(self.open(SYNCED, os.O_WRONLY | os.O_CREAT))

    def not_synced(self) -> None:
        """Note that more is to come; on the disk before any of that."""
        with suppress(FileNotFoundError):
            self.directory.unlink(SYNCED)
            self._sync_names()

    def _sync_names(self) -> None:
        with suppress(OSError):  # some file systems do not know that of directories
            os.fsync(self.directory.fd)

    def fill_lock(self) -> Lock | None:
        """Return what keeps others from filling it; None if another one does."""
        try:
            return Lock(self.open("fill", self._access))
        except BlockingIOError:
            return None

    def beat(self) -> None:
        """Note that something of it arrives, perhaps a part of a large piece."""
        self.directory.touch("fill")

    def beaten(self) -> int:
        """Return when that was, by the clock of the file system."""
        return self.directory.stat("fill").st_mtime_ns

    def is_filled_by_somebody(self) -> bool:
        """Whether a process fills it now."""
        lock = self.fill_lock()
        if lock is not None:
            lock.release()
        return lock is None


def _runs(numbers: Ints) -> tuple[tuple[int, int], ...]:
    """Return rising numbers as runs ``low .. high``."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    return tuple((int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(edges) if b > a)


def is_synced(directory: Directory, started: str) -> bool:
    """Whether a copy holds what it says: it was made since the machine was started, or synced."""
    return started == boot() or directory.has(SYNCED)


def remove_unused(root: Root, name: str, *, dry_run: bool = False) -> str:
    """Remove a copy unless somebody uses it; return why it stays, empty: it is gone.

    `dry_run`: or would be.
    """
    lock = None
    try:
        directory = root.copy(name)
        if reason := _not_a_copy(directory):
            return reason
        with suppress(FileNotFoundError):
            lock = Lock(directory.open_file("use", os.O_RDWR))
        if dry_run:
            return ""
        aside = _unfinished(name)
        root.rename(name, aside)  # nobody opens it from here on
        if not root.is_at(aside, directory):
            root.rename(aside, name)
            return "it was replaced meanwhile"
        _remove_files(root, aside, directory)
    except BlockingIOError:
        return IN_USE
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error.strerror or error)
    finally:
        if lock is not None:
            lock.release()
    return ""


def _unfinished(name: str) -> str:
    """Return another name for a copy that is being made or removed."""
    return f".{name}.{os.getpid()}-{time.monotonic_ns()}{UNFINISHED}"


def remove_unfinished(root: Root, name: str) -> bool:
    """Remove what an ended process was making or removing; return whether it was a copy."""
    with suppress(OSError):  # somebody else's: it stays
        directory = root.copy(name)
        if not _not_a_copy(directory):
            _remove_files(root, name, directory)
            return True
    return False


def _not_a_copy(directory: Directory) -> str:
    """Return why a directory is never removed, empty: it is one that was made here."""
    names = [name for name in directory.names() if not name.startswith(HIDDEN)]
    for name in names:
        plain = not stat.S_ISDIR(directory.stat(name).st_mode)
        if not (plain and (name in FILES or DATA.fullmatch(name))):
            return f"it holds {name}, which is no part of a copy"
    if not names or (names == [FACTS] and not directory.stat(FACTS).st_size):
        return ""  # it was just being made
    try:
        Facts.parse(directory.read(FACTS))
    except FileNotFoundError:
        return f"it has no {FACTS}"
    except ValueError as error:
        return str(error)
    return ""


def _remove_files(root: Root, name: str, directory: Directory) -> None:
    """Remove the files of a copy, first all but the one that says what it is, and then itself."""
    for file in sorted(directory.names(), key=lambda file: file == FACTS):
        try:
            directory.unlink(file)
        except OSError as error:
            if error.errno != errno.ENOENT and not file.startswith(HIDDEN):
                raise

    def is_empty() -> bool:
        try:
            root.rmdir(name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    soon(is_empty)
