"""One copy: some pieces of a dataset in a directory of a faster tier.

::

    images.h5-0f3a...-part-81c2.../
        copy.json   what it is a copy of; never changes
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
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from dsprep.cache.locks import Lock
from dsprep.cache.pieces import PAGE, Pieces, name_of
from dsprep.core.packing import digest
from dsprep.core.schema import Array, Ints
from dsprep.core.storage import boot, let_go, pread_exact, pwrite_all, remove, sync
from dsprep.reading.files import File

VERSION = 1

ABSENT, ASKED, PLANNED, READY, LEFT_OUT, REFUSED = range(6)
"""Of a piece: nobody has asked for it; somebody has; there is space reserved for it; it is there;
there is no room for it; it was not right when it was copied."""

OPEN = 64
"""Files of a copy that stay open."""

SYNCED = "synced"

UNFINISHED = ".dsprep-cache-partial"
"""How the names of copies end that are being made or removed."""

NOT_SYNCED = "it was not on the disk when the machine was started again"

LAST = np.iinfo(np.uint32).max
"""The turn of a piece that nobody has asked for."""


@dataclass(frozen=True)
class Facts:
    """What a copy is a copy of; its `name` is that of its directory.

    The same data may be reached by several paths: copies are the same, whichever it was.
    """

    dataset: str = field(compare=False)  # a path from the root
    sidecar: str = field(compare=False)
    fields: tuple[str, ...]
    key: str  # of `Pieces`
    part: str  # a word for the pieces of it that the copy has; empty: all
    pieces: tuple[tuple[int, int], ...] = ()  # which: runs ``low .. high``
    version: int = VERSION

    @classmethod
    def of(cls, pieces: Pieces, which: Ints | None = None) -> Self:
        """Return those of a copy of some pieces, which rise; None: of all."""
        part = "" if which is None else digest(which.tobytes())
        runs = ((0, len(pieces)),) if which is None else _runs(which)
        paths = [str(p.absolute()) for p in (pieces.sidecar.dataset, pieces.sidecar.path)]
        return cls(paths[0], paths[1], pieces.names, pieces.key, part, runs)

    @property
    def name(self) -> str:
        """The name of its directory."""
        stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(self.dataset).name)
        short = stem.lstrip(".").encode()[:64].decode(errors="ignore")
        return f"{short}-{self.key}" + (f"-part-{self.part}" if self.part else "")

    def nbytes(self, edges: Ints) -> int:
        """Return the bytes that a copy takes which holds nothing yet; see `Copy.create`."""
        count = sum(high - low for low, high in self.pieces)
        json_nbytes = len(json.dumps(self.to_json()))
        sizes = json_nbytes, edges.nbytes, count, 4 * count, 4 * count, PAGE, PAGE
        return sum(-(-n // PAGE) * PAGE for n in sizes)  # of files, and of their extents

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "boot": boot()}

    @classmethod
    def parse(cls, data: bytes) -> tuple[Self, str]:
        """Return what `to_json` was given, and the start of the machine; `ValueError` if not."""
        try:
            found = json.loads(data)
            runs = tuple((int(low), int(high)) for low, high in found["pieces"])
            if found["version"] != VERSION or any(not 0 <= low < high for low, high in runs):
                raise ValueError("it is of another version")
            names = tuple(map(str, found["fields"]))
            words = str(found["key"]), str(found["part"])
            made = cls(str(found["dataset"]), str(found["sidecar"]), names, *words, runs)
            return made, str(found["boot"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"copy.json is damaged: {error}") from error


class Handle:
    """A descriptor, closed when nothing refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        let_go(self.fd)


class _Table(Handle):
    """An array in a file that several processes read and write, element by element."""

    def __init__(self, fd: int, dtype: str, count: int) -> None:
        super().__init__(fd)
        self._dtype, self._count = np.dtype(dtype), count
        if os.fstat(fd).st_size != count * self._dtype.itemsize:
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

    def write(self, values: Array) -> None:
        """Set all elements."""
        pwrite_all(self.fd, [values.astype(self._dtype).tobytes()], 0)


class CopyFile(File):
    """A file of a copy; `number` and `inside` say which of the dataset it stands for.

    It may grow while it is read, by what nobody reads yet.
    """

    def __init__(self, path: Path, fd: int, number: int, inside: str) -> None:
        super().__init__(path, fd)
        self.number, self.inside = number, inside

    def check_same(self) -> None:
        """Do nothing: what is there is not written again."""


class Copy:
    """A copy that is open: it is not removed meanwhile. Safe to use from several threads.

    Attributes
    ----------
    which
        int64, rising: the pieces that it is for.

    Raises
    ------
    FileNotFoundError
        If it has been removed.
    ValueError
        If it is damaged.
    OSError
        If the file system does not do what is needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._use: Lock | None = None
        self._opened: dict[str, Handle] = {}
        self._files: dict[tuple[int, str], CopyFile] = {}
        self._lock = threading.Lock()
        self._opened[""] = Handle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        # Who only asks whether somebody uses it has the lock for a moment.
        self._use = Lock(self.open("use", os.O_RDWR), shared=True, seconds=1.0)
        if not path.samefile(f"/proc/self/fd/{self._handle().fd}"):
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(path))
        self.facts, self._boot = Facts.parse(self._read("copy.json"))
        if not self.is_trusted:
            raise ValueError(NOT_SYNCED)
        count = sum(high - low for low, high in self.facts.pieces)
        for name, dtype in (("state", "<u1"), ("turn", "<u4"), ("sums", "<u4")):
            self._opened[name] = _Table(self.open(name, os.O_RDWR), dtype, count)
        runs = [np.arange(low, high, dtype=np.int64) for low, high in self.facts.pieces]
        self.which: Ints = np.concatenate([np.zeros(0, np.int64), *runs])

    @classmethod
    def create(cls, root: Path, facts: Facts, edges: Ints) -> Copy:
        """Open the copy of these facts below a directory; make it, empty, if there is none.

        `edges` are those of the pieces of the dataset. What is there but cannot be trusted is
        removed. Called with the directory locked.
        """
        path = root / facts.name
        try:
            found = cls(path)
            problem = "files of it were removed, or their ends cut off"
            if found.facts == facts and found.is_intact:
                return found
            found.close()
        except (ValueError, FileNotFoundError) as error:
            problem = str(error)
            del error  # its traceback refers to what was opened
        if not remove_unused(path):
            raise OSError(errno.EBUSY, f"another process or node uses it; {problem}", str(path))
        made = _unfinished(path)
        made.mkdir()
        count = sum(high - low for low, high in facts.pieces)
        (made / "copy.json").write_text(json.dumps(facts.to_json()))
        (made / "edges").write_bytes(edges.astype("<i8").tobytes())
        (made / "state").write_bytes(bytes(count))
        (made / "turn").write_bytes(np.full(count, LAST, "<u4").tobytes())
        (made / "sums").write_bytes(bytes(4 * count))
        for name in ("use", "fill", "files"):
            (made / name).touch()
        made.rename(path)
        return cls(path)

    def touch(self) -> None:
        """Note that it is used now."""
        os.utime(f"/proc/self/fd/{self._handle().fd}/use")

    def close(self) -> None:
        """Let others remove it. What reads a file of it reads on; nothing else is open."""
        if self._use is not None:
            self._use.release()
        self._opened, self._files = {}, {}

    def __del__(self) -> None:
        self.close()

    def _handle(self, name: str = "") -> Handle:
        """Return its directory, or a table, open."""
        found = self._opened.get(name)
        if found is None:
            raise OSError(errno.EBADF, "the copy was closed", str(self.path))
        return found

    def _table(self, name: str) -> _Table:
        found = self._handle(name)
        assert isinstance(found, _Table), name
        return found

    # --- what it holds -----------------------------------------------------------------------

    @property
    def is_trusted(self) -> bool:
        """Whether what it says it holds is there."""
        return is_trusted(self.path, self._boot)

    def index(self, pieces: Ints) -> Ints | None:
        """Return where pieces are in the tables: int64; None if it is not for all of them."""
        if not len(self.which) or not len(pieces):
            return None
        found = np.searchsorted(self.which, pieces)
        inside = np.minimum(found, len(self.which) - 1)
        return inside if bool((self.which[inside] == pieces).all()) else None

    def states(self) -> Array:
        """Return the state of each piece: uint8, shape ``(n,)``."""
        return self._table("state").read()

    def states_at(self, index: Ints) -> Array:
        """Return the state of some pieces."""
        low, high = int(index[0]), int(index[-1]) + 1
        found: Array = self._table("state").read(low, high)[index - low]
        return found

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
        return os.access(SYNCED, os.F_OK, dir_fd=self._handle().fd)

    def turns(self) -> Array:
        """Return which pieces are wanted sooner: uint32, shape ``(n,)``."""
        return self._table("turn").read()

    def ask(self, pieces: Ints) -> None:
        """Have pieces filled in, in this order, or as soon as others have asked for them."""
        found = np.searchsorted(self.which, pieces[np.isin(pieces, self.which)])
        states = self.states()[found]
        absent = states == ABSENT
        if bool((absent | (states == ASKED) | (states == PLANNED)).any()):
            turns = self.turns().copy()
            np.minimum.at(turns, found, np.arange(len(found), dtype=np.uint32))
            self._table("turn").write(turns)
        self._table("state").put_all(np.sort(found[absent]), ASKED)

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
        return np.frombuffer(self._read("edges"), "<i8").astype(np.int64)

    # --- files -------------------------------------------------------------------------------

    def file(self, number: int, path: str) -> CopyFile:
        """Return what stands for the file at `path` below file entry `number`, open."""
        key, name = (number, path), name_of(number, path)
        with self._lock:
            found = self._files.get(key)
            if found is None:
                if len(self._files) >= OPEN:
                    self._files.clear()  # who reads one keeps it open
                found = CopyFile(self.path / name, self.open(name), number, path)
                self._files[key] = found
            return found

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file of it: of this copy, also if another one has taken its place meanwhile."""
        try:
            return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=self._handle().fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error

    def _read(self, name: str) -> bytes:
        with os.fdopen(self.open(name), "rb") as file:
            return file.read()

    def files(self) -> dict[str, int]:
        """Return name and bytes of the files of the dataset that it has; `ValueError` if not."""
        lines = self._read("files").decode().splitlines()
        return {name: int(nbytes) for name, nbytes in map(str.split, lines)}

    def add_file(self, name: str, nbytes: int) -> None:
        """Note that there is one; called by who fills it."""
        fd = self.open("files", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, f"{name} {nbytes}\n".encode())
        finally:
            let_go(fd)

    @property
    def is_intact(self) -> bool:
        """Whether all files are there, nobody has cut off their ends, and they are known."""
        try:
            return all(
                os.stat(name, dir_fd=self._handle().fd).st_size == nbytes
                for name, nbytes in self.files().items()
            )
        except (FileNotFoundError, ValueError):
            return False

    def sync(self) -> None:
        """Bring all that it holds to the disk, and note that."""
        for name in os.listdir(self._handle().fd):  # noqa: PTH208 (it is no path)
            out = self.open(name)
            try:
                sync(out, data=True)
            finally:
                let_go(out)
        self._sync_names()
        let_go(self.open(SYNCED, os.O_WRONLY | os.O_CREAT))

    def not_synced(self) -> None:
        """Note that more is to come; on the disk before any of that."""
        with suppress(FileNotFoundError):
            os.unlink(SYNCED, dir_fd=self._handle().fd)
            self._sync_names()

    def _sync_names(self) -> None:
        with suppress(OSError):  # some file systems do not know that of directories
            os.fsync(self._handle().fd)

    def fill_lock(self) -> Lock | None:
        """Return what keeps others from filling it; None if another one does."""
        try:
            return Lock(self.open("fill", os.O_RDWR))
        except BlockingIOError:
            return None

    def beat(self) -> None:
        """Note that something of it arrives, perhaps a part of a large piece."""
        os.utime(f"/proc/self/fd/{self._handle().fd}/fill")

    def beaten(self) -> int:
        """Return when that was, by the clock of the file system."""
        return os.stat("fill", dir_fd=self._handle().fd).st_mtime_ns

    def is_filled_by_somebody(self) -> bool:
        """Whether a process fills it now."""
        lock = self.fill_lock()
        if lock is not None:
            lock.release()
        return lock is None


def _runs(which: Ints) -> tuple[tuple[int, int], ...]:
    """Return rising numbers as runs ``low .. high``."""
    breaks = np.flatnonzero(np.diff(which) != 1) + 1
    edges = [0, *breaks.tolist(), len(which)]
    return tuple((int(which[a]), int(which[b - 1]) + 1) for a, b in pairwise(edges) if b > a)


def is_trusted(path: Path, started: str) -> bool:
    """Whether a copy holds what it says: it was made since the machine was started, or synced."""
    return started == boot() or (path / SYNCED).exists()


def remove_unused(path: Path) -> bool:
    """Remove a copy unless somebody uses it; return whether it is gone."""
    lock = None
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            lock = Lock(os.open(path / "use", os.O_RDWR | os.O_CLOEXEC))
        aside = _unfinished(path)
        path.rename(aside)  # nobody opens it from here on
        remove(aside)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    finally:
        if lock is not None:
            lock.release()
    return True


def _unfinished(path: Path) -> Path:
    """Return another name for a copy that is being made or removed."""
    return path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}{UNFINISHED}")
