"""One copy: some pieces of a dataset in a directory of a faster tier.

::

    images.h5-0f3a...-part-81c2....dsprep-copy/
        copy.json   what it is a copy of, and by its key that it is one; never changes
        state       uint8 per piece: see `ABSENT` and what follows
        turn        uint32 per piece: which is wanted sooner
        use         locked by all who read it or fill it; its time is that of the last use
        fill        locked by the one who fills it
        files       a line with name and bytes of each file of the dataset that it has
        synced      there once all that it holds is on the disk
        0, 1-5be0.. the files of the dataset, sparse

What is written is in the page cache and survives the end of a process, not that of the kernel: a
copy that is not `synced` and was made before the last start, or that lacks a file, is worthless: it
is removed and made again. A directory is a copy if its name and a key in its ``copy.json`` say so.
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
from typing_extensions import override

from dsprep.cache.pieces import PAGE, Pieces, name_of
from dsprep.core.packing import digest
from dsprep.core.schema import Array, Ints
from dsprep.storage.durable import sync, sync_directory
from dsprep.storage.local import LocalFile
from dsprep.storage.locking import Lock
from dsprep.storage.nodes import boot
from dsprep.storage.ranges import close_quietly, fstat, pread_exact, pwrite_all
from dsprep.storage.trees import remove

VERSION = 3

KEY = "dsprep_copy"
"""The key of ``copy.json`` that no other file has; its value is `VERSION`."""

ABSENT, ASKED, PLANNED, READY, LEFT_OUT, REFUSED = range(6)
"""Of a piece: nobody has asked for it; somebody has; there is space reserved for it; it is there;
there is no room for it; it was not right when it was copied."""

OPEN = 64
"""Files of a copy that stay open."""

FACTS, SYNCED = "copy.json", "synced"

SUFFIX = ".dsprep-copy"
"""The suffix of the names of copies."""

UNFINISHED = ".dsprep-cache-partial"
"""The suffix of copies that are being made or removed."""

NOT_SYNCED = "it was not on the disk when the machine was started again"

IN_USE = "in use"
"""Why a copy is not removed."""

LAST = np.iinfo(np.uint32).max
"""The turn of a piece that nobody has asked for."""


@dataclass(frozen=True)
class Facts:
    """The origin of a copy; `name` is the name of its directory.

    The same data may be reached by several paths: copies are the same, whichever it was.
    """

    dataset: str = field(compare=False)  # a path from the root
    fields: tuple[str, ...]
    key: str  # of `Pieces`
    part: str  # a word for the pieces of it that the copy has; empty: all
    pieces: tuple[tuple[int, int], ...] = ()  # which: runs ``low .. high``

    @classmethod
    def of(cls, pieces: Pieces, numbers: Ints | None = None) -> Self:
        """Return those of a copy of some pieces, which rise; None: of all."""
        part = "" if numbers is None else digest(numbers.tobytes())
        runs = ((0, len(pieces)),) if numbers is None else _runs(numbers)
        where = str(pieces.sidecar.dataset.absolute())
        return cls(where, pieces.names, pieces.key, part, runs)

    @property
    def name(self) -> str:
        """The name of its directory."""
        stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(self.dataset).name)
        short = stem.lstrip(".").encode()[:64].decode(errors="ignore")
        return f"{short}-{self.key}" + (f"-part-{self.part}" if self.part else "") + SUFFIX

    @property
    def nbytes(self) -> int:
        """Bytes that a copy takes which holds nothing yet; see `Copy.create`."""
        count = sum(high - low for low, high in self.pieces)
        json_nbytes = len(json.dumps(self.to_json()))
        sizes = json_nbytes, count, 4 * count, PAGE, PAGE
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
            dataset, key, part = (str(content[name]) for name in ("dataset", "key", "part"))
            return cls(dataset, names, key, part, runs), str(content["boot"])
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

    def write(self, values: Array, first: int = 0) -> None:
        """Set the elements from one on."""
        data = values.astype(self._dtype).tobytes()
        pwrite_all(self.fd, [data], first * self._dtype.itemsize)


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

    Attributes
    ----------
    path
        Where it is.
    numbers
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
        self.path, self.name = path, path.name
        self._use: Lock | None = None
        self._opened: dict[str, _Table] = {}
        self._files: dict[tuple[int, str], CopyFile] = {}
        self._lock = threading.Lock()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._directory: Descriptor | None = Descriptor(os.open(path, flags))
        # Who only asks whether somebody uses it has the lock for a moment.
        self._use = Lock(self.open_path("use"), shared=True, seconds=1.0)
        if not os.path.samestat(path.stat(), fstat(self._directory.fd)):
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(path))
        self.facts, started = Facts.parse((path / FACTS).read_bytes())
        if not is_synced(path, started):
            raise ValueError(NOT_SYNCED)
        count = sum(high - low for low, high in self.facts.pieces)
        for table, dtype in (("state", "<u1"), ("turn", "<u4")):
            self._opened[table] = _Table(self.open(table, os.O_RDWR), dtype, count)
        runs = [np.arange(low, high, dtype=np.int64) for low, high in self.facts.pieces]
        self.numbers: Ints = np.concatenate([np.zeros(0, np.int64), *runs])

    @classmethod
    def create(cls, path: Path, facts: Facts) -> Copy:
        """Open the copy of these facts at a path; make it, empty, if there is none.

        What is there but not whole is removed. Called with the directory of all copies locked.
        """
        try:
            copy = cls(path)
            problem = "files of it were removed, or their ends cut off"
            if copy.facts == facts and copy.is_intact:
                return copy
            copy.close()
        except (ValueError, FileNotFoundError) as error:
            problem = str(error)
            del error  # its traceback refers to what was opened
        if reason := remove_unused(path):
            words = f"{problem}; it is not removed, as {reason}"
            raise OSError(errno.EBUSY, words, str(path))
        unfinished = _unfinished(path)
        unfinished.mkdir(0o700)
        count = sum(high - low for low, high in facts.pieces)
        contents = {
            FACTS: json.dumps(facts.to_json()).encode(),
            "state": bytes(count),
            "turn": np.full(count, LAST, "<u4").tobytes(),
            **dict.fromkeys(("use", "fill", "files"), b""),
        }
        for file, content in contents.items():
            (unfinished / file).write_bytes(content)
        with (unfinished / FACTS).open("rb") as out:  # so that it can be removed after a crash
            sync(out.fileno(), data=True)
        unfinished.rename(path)
        return cls(path)

    def touch(self) -> None:
        """Note that it is used now."""
        os.utime(self.open_path("use"))

    def close(self) -> None:
        """Let others remove it. What reads a file of it reads on; nothing else is open."""
        if self._use is not None:
            self._use.release()
        self._opened, self._files, self._directory = {}, {}, None

    def __del__(self) -> None:
        self.close()

    def open_path(self, name: str = "") -> Path:
        """Return a path to a file of it: of this copy, also if another one took its place."""
        if self._directory is None:
            raise OSError(errno.EBADF, "the copy was closed", str(self.path))
        return Path(f"/proc/self/fd/{self._directory.fd}") / name

    def _table(self, name: str) -> _Table:
        table = self._opened.get(name)
        if table is None:
            raise OSError(errno.EBADF, "the copy was closed", str(self.path))
        return table

    # --- what it holds -----------------------------------------------------------------------

    def index(self, pieces: Ints) -> Ints | None:
        """Return where pieces are in the tables: int64; None if it is not for all of them."""
        if not len(self.numbers) or not len(pieces):
            return None
        positions = np.searchsorted(self.numbers, pieces)
        inside = np.minimum(positions, len(self.numbers) - 1)
        return inside if bool((self.numbers[inside] == pieces).all()) else None

    def refresh(self) -> None:
        """Read anew what other nodes may have written: clients of some servers keep pages."""
        for table in self._opened.values():
            os.posix_fadvise(table.fd, 0, 0, os.POSIX_FADV_DONTNEED)

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
        self._set_states(np.array([i]), state)

    def _set_states(self, chosen: Ints, state: int) -> None:
        """Set some states, given rising, and none of those between them."""
        for low, high in _runs(chosen):
            self._table("state").write(np.full(high - low, state), low)

    @property
    def is_filled(self) -> bool:
        """True if nothing of it is still to come."""
        states = self.states()
        return not bool(((states == ASKED) | (states == PLANNED)).any())

    @property
    def is_synced(self) -> bool:
        """True if all that it holds is on the disk."""
        return self.open_path(SYNCED).exists()

    def turns(self) -> Array:
        """Return which pieces are wanted sooner: uint32, shape ``(n,)``."""
        return self._table("turn").read()

    def ask(self, pieces: Ints) -> None:
        """Have pieces filled in, in this order, or as soon as others have asked for them."""
        index = np.searchsorted(self.numbers, pieces[np.isin(pieces, self.numbers)])
        states = self.states()[index]
        absent = states == ABSENT
        if bool((absent | (states == ASKED) | (states == PLANNED)).any()):
            turns = self.turns().copy()
            np.minimum.at(turns, index, np.arange(len(index), dtype=np.uint32))
            self._table("turn").write(turns)
        self._set_states(np.sort(index[absent]), ASKED)

    def ask_again(self) -> None:
        """Have it seen whether there is room now for what was left out."""
        self._set_states(np.flatnonzero(self.states() == LEFT_OUT), ASKED)

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
        """Open a file of it; see `open_path`."""
        try:
            return os.open(self.open_path(name), flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error

    def files(self) -> dict[str, int]:
        """Return name and bytes of the files of the dataset that it has; `ValueError` if not."""
        lines = self.open_path("files").read_text().splitlines()
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
        """True if all files are known and there, and none is truncated."""
        try:
            return all(
                self.open_path(name).stat().st_size == nbytes
                for name, nbytes in self.files().items()
            )
        except (FileNotFoundError, ValueError):
            return False

    def sync(self) -> None:
        """Bring all that it holds to the disk, and note that."""
        for name in os.listdir(self.open_path()):  # noqa: PTH208
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
            self.open_path(SYNCED).unlink()
            self._sync_names()

    def _sync_names(self) -> None:
        with suppress(OSError):  # some file systems do not know that of directories
            sync_directory(self.open_path())

    def fill_lock(self) -> Lock | None:
        """Return what keeps others from filling it; None if another one does."""
        try:
            return Lock(self.open_path("fill"))
        except BlockingIOError:
            return None

    def is_filled_by_somebody(self) -> bool:
        """Return whether a process fills it now."""
        lock = self.fill_lock()
        if lock is not None:
            lock.release()
        return lock is None


def _runs(numbers: Ints) -> tuple[tuple[int, int], ...]:
    """Return rising numbers as runs ``low .. high``."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    return tuple((int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(edges) if b > a)


def is_synced(path: Path, started: str) -> bool:
    """Return whether a copy is durable: it was made since the machine started, or synced."""
    return started == boot() or (path / SYNCED).exists()


def remove_unused(path: Path, *, dry_run: bool = False) -> str:
    """Remove a copy unless somebody uses it; return why it stays, empty: it is gone.

    `dry_run`: or would be. Called with the directory of all copies locked.
    """
    try:
        Facts.parse((path / FACTS).read_bytes())  # nothing else is removed
        lock = Lock(path / "use")
        try:
            if not dry_run:
                remove(path.rename(_unfinished(path)))  # nobody opens it from here on
        finally:
            lock.release()
    except BlockingIOError:
        return IN_USE
    except FileNotFoundError:
        return f"it has no {FACTS}" if path.exists() else ""
    except ValueError as error:
        return str(error)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _unfinished(path: Path) -> Path:
    """Return another name for a copy that is being made or removed."""
    return path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}{UNFINISHED}")
