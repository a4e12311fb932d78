"""Tar archives by their headers: where each member is stored, without its bytes.

An archive is blocks of 512 bytes: for each member a header and then its bytes, filled up to a whole
block; behind the last one, two blocks of zeros. A member may be preceded by others that say more
of it: its long name (GNU, types ``L`` and ``K``), or its name and size as text (pax, type ``x``).

Headers that say all by themselves, as nearly all do, are decoded many at a time; each of the others
by `tarfile`. Where members are small the archive is read in large ranges, else only its headers.

Sources: POSIX.1-2001, "pax", the ustar and pax interchange formats; the GNU tar manual, "Basic Tar
Format".
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.errors import FormatError, UnsupportedError
from dsprep.storage.base import Handle

BLOCK = 512
EXTENSION = 1 << 20
"""Bytes of a long name, or of the text of a pax header, at most."""

LARGE = 8 << 20
"""Bytes that are read at once where members are small."""
SMALL = 4 << 10
"""Bytes that are read at once where they are large: a header, and what may precede it."""
APART = 32 << 10
"""Mean bytes between headers from which on they are read alone."""

EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")
REFUSED = {
    b"S": "a sparse file, of which only some bytes are stored",
    b"M": "the rest of a file that begins in another archive",
}

_EIGHTS = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_CHECKSUM = slice(148, 156)


Member: TypeAlias = tuple[bytes, int, int, int]
"""The name of a file, where the archive has it (-1: in two parts), and where its bytes are."""


class Members(NamedTuple):
    """Files of an archive, in its order.

    `columns` are int64, shape ``(3, n)``: where the archive has the name (-1: in two parts), the
    offset and the length of the bytes.
    """

    names: list[bytes]
    columns: Ints


class Archive:
    """Goes through an archive once.

    Parameters
    ----------
    file
        The archive.

    Attributes
    ----------
    at
        The offset of the next header.
    skipped
        Members that are not files, by what they are: how many, and the name of the first.
    """

    def __init__(self, file: Handle) -> None:
        self.file, self.at, self._ended = file, 0, False
        self.skipped: dict[str, tuple[int, bytes]] = {}

    def members(self) -> Iterator[Members]:
        """Yield the files, many at a time.

        Raises
        ------
        FormatError
            Behind the last whole file, if the archive is damaged or cut.
        UnsupportedError
            If a member is stored in a way that has no single range of bytes.
        """
        buffer, span = np.empty(min(LARGE, self.file.nbytes), np.uint8), 64 << 10
        while not self._ended and self.at < self.file.nbytes:
            begin = self.at
            rest = self.file.nbytes - begin
            if rest < BLOCK:
                raise self._cut("header", begin, BLOCK, rest)
            window = buffer[: min(span, rest) // BLOCK * BLOCK]
            self.file.read_into(window, begin)
            members, headers, damage = self._window(window.reshape(-1, BLOCK))
            if members.names:
                yield members
            if damage is not None:
                raise damage
            span = LARGE if self.at - begin <= APART * max(1, headers) else SMALL
        if not self._ended:
            raise FormatError(
                "the archive has no end, the blocks of zeros behind the last member",
                where=f"{self.file.path}, offset {self.at}",
                fix="the file was cut: bring it again from where it came from; if you know that it "
                "is complete, add them: truncate -s +1024 FILE",
            )

    def note(self, kind: str, name: bytes) -> None:
        """Count a member that is left out."""
        count, first = self.skipped.get(kind, (0, name))
        self.skipped[kind] = count + 1, first

    # --- many headers ------------------------------------------------------------------------

    def _window(self, blocks: Bytes) -> tuple[Members, int, FormatError | None]:
        """Return the files whose headers are in some blocks, how many headers, and damage."""
        begin, n = self.at, len(blocks)
        steps = _steps(blocks) if n * BLOCK > SMALL else [0] * n
        simple: list[int] = []
        others: dict[int, Member] = {}
        damage = None
        i = headers = 0
        while i < n and not self._ended:
            step = steps[i]
            if step:
                simple.append(i)
                i += step
                continue
            headers += 1
            self.at = begin + i * BLOCK
            try:
                member = self._one(blocks[i].tobytes())
            except FormatError as error:
                damage = error
                break
            if member is not None:
                others[i] = member
            i = (self.at - begin) // BLOCK
        if not self._ended:
            self.at = begin + i * BLOCK
        names, columns = members = _joined(blocks, begin, simple, others)
        if names:
            offset, length = columns[1:, -1].tolist()
            filled, rest = -(-length // BLOCK) * BLOCK, self.file.nbytes - offset
            if filled > rest:
                damage = self._cut(show(names[-1]), offset, filled, rest)
                members = Members(names[:-1], columns[:, :-1])
        return members, headers + len(simple), damage

    def _cut(self, subject: str, offset: int, expected: int, available: int) -> FormatError:
        return FormatError(
            f"the archive ends within {subject}",
            where=f"{self.file.path}, offset {offset}",
            expected=f"{expected} bytes",
            found=f"{max(0, available)} bytes",
            fix="the file was cut: bring it again from where it came from",
        )

    # --- one header --------------------------------------------------------------------------

    def _one(self, block: bytes) -> Member | None:
        """Return the file whose header is at `at`, which then is behind it; None if it is none."""
        if not any(block):
            self._end()
            return None
        at, where = self.at, f"{self.file.path}, offset {self.at}"
        data = self._headers(block)
        kind = data[-BLOCK:][156:157]
        if kind in REFUSED or b"GNU.sparse." in data[:-BLOCK]:
            raise _apart(REFUSED.get(kind, REFUSED[b"S"]), where)
        with _tar_errors(where), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            info = archive.next()
            if info is None or info.size < 0:
                raise tarfile.TarError("no size" if info else "no header")
        name = _text(info.name.encode("utf-8", "surrogateescape"))
        if archive.pax_headers.keys() & {"path", "size"}:
            raise _apart("named or sized by one header for all", where)
        begin, self.at = at + info.offset_data, at + archive.offset
        if info.isdir():
            return None
        if not info.isreg():
            self.note("members that are not files", name)
            return None
        if self.at > self.file.nbytes:
            raise self._cut(show(name), begin, self.at - begin, self.file.nbytes - begin)
        named = data.rfind(name)
        return name, at + named if named >= 0 else -1, begin, info.size

    def _headers(self, data: bytes) -> bytes:
        """Return the header of a member with those that precede it and say more of it."""
        while True:
            at = self.at + len(data)
            where = f"{self.file.path}, offset {at - BLOCK}"
            with _tar_errors(where):
                info = tarfile.TarInfo.frombuf(data[-BLOCK:], "utf-8", "surrogateescape")
            if info.type not in EXTENSIONS:
                return data
            nbytes = -(-info.size // BLOCK) * BLOCK + BLOCK
            if not BLOCK <= nbytes <= EXTENSION - len(data):
                raise FormatError(
                    "a header is impossibly long",
                    where=where,
                    expected=f"<= {EXTENSION}",
                    found=info.size,
                )
            more = self.file.pread(nbytes, at)
            if len(more) < nbytes:
                raise self._cut("a header", at, nbytes, len(more))
            data += more

    def _end(self) -> None:
        """Note the end of the archive; whatever follows has to be zeros."""
        self._ended, at = True, self.at
        buffer = np.empty(min(LARGE, self.file.nbytes - at), np.uint8)
        while at < self.file.nbytes:
            part = buffer[: self.file.nbytes - at]
            self.file.read_into(part, at)
            if part.any():
                raise FormatError(
                    "there is more behind the end of the archive",
                    where=f"{self.file.path}, offset {at + int((part != 0).argmax())}",
                    fix="of archives that were joined, each has to be a file of its own; else "
                    "the file is damaged",
                )
            at += len(part)


@contextmanager
def _tar_errors(where: str) -> Iterator[None]:
    """Turn what `tarfile` raises about a header into `FormatError`."""
    try:
        yield
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise FormatError(
            "this is not the header of a member of a tar archive, or it is damaged",
            where=where,
            found=error,
        ) from error


def is_header(block: bytes) -> bool:
    """Return whether this is the header of a member."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True


def show(name: bytes) -> str:
    """Return a name for a message."""
    return name.decode("utf-8", "backslashreplace")


def _joined(blocks: Bytes, begin: int, simple: list[int], others: dict[int, Member]) -> Members:
    """Return files by the numbers of the blocks with their headers."""
    rows = np.array(simple, np.int64)
    rows = rows[blocks[rows, 156] != ord("x")]
    named = begin + rows * BLOCK
    names = np.ascontiguousarray(blocks[rows, :100]).view("S100").reshape(-1).tolist()
    if b"\0" in b"".join(names):
        names = list(map(_text, names))
    columns = np.stack([named, named + BLOCK, (blocks[rows, 124:135] - ord("0")) @ _EIGHTS])
    if not others:
        return Members(names, columns)
    names += [member[0] for member in others.values()]
    odd = np.array([member[1:] for member in others.values()], np.int64).T
    order = np.argsort(np.append(rows, np.array(list(others), np.int64)))
    return Members([names[k] for k in order.tolist()], np.hstack([columns, odd])[:, order])


def _steps(blocks: Bytes) -> list[int]:
    """Return for each block how many the next header is on; 0 if it does not say all by itself."""
    # It says all if it is the header of a file with its name in one part and its size in octal
    # digits; or if it is a pax header that gives only a time, with its text in the next block.
    steps = np.zeros(len(blocks), np.int64)
    kind = blocks[:, 156]
    here = np.flatnonzero((blocks[:, 257] == ord("u")) & np.isin(kind, (0, ord("0"), ord("x"))))
    heads = blocks[here]
    digits, sums = heads[:, 124:135] - ord("0"), heads[:, 148:154] - ord("0")
    good = (heads[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(axis=1)
    good &= (digits < 8).all(axis=1) & (sums < 8).all(axis=1)
    good &= np.isin(heads[:, 135], (0, ord(" "))) & np.isin(heads[:, 154], (0, ord(" ")))
    good &= (heads[:, 345] == 0) & (heads[:, 0] != 0)
    signed = heads.sum(axis=1, dtype=np.int32) - heads[:, _CHECKSUM].sum(axis=1, dtype=np.int32)
    good &= signed + 8 * ord(" ") == sums @ _EIGHTS[5:]
    size = digits @ _EIGHTS
    good[kind[here] == 0] &= ~_is_directory(heads[kind[here] == 0, :100])
    pax = np.flatnonzero(good & (kind[here] == ord("x")))
    good[pax] = False
    inside = pax[(here[pax] + 1 < len(blocks)) & (size[pax] < 100)]
    text = blocks[here[inside] + 1]
    two = (text[:, 0].astype(np.int64) - ord("0")) * 10 + text[:, 1] - ord("0")
    only = (two == size[inside]) & (size[inside] > 10)
    only &= (text[:, 2:9] == np.frombuffer(b" mtime=", np.uint8)).all(axis=1)
    only &= text[np.arange(len(text)), size[inside] - 1] == ord("\n")
    good[inside[only]] = True
    steps[here[good]] = 1 + -(-size[good] // BLOCK)
    return steps.tolist()


def _is_directory(names: Bytes) -> Bytes:
    """Return whether names, of shape ``(n, 100)``, end in a slash."""
    ends = np.where((names == 0).any(axis=1), (names == 0).argmax(axis=1), names.shape[1])
    out: Bytes = names[np.arange(len(names)), ends - 1] == ord("/")
    return out


def _text(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _apart(problem: str, where: str) -> UnsupportedError:
    fix = "unpack the archive, and write it again in the format ustar of tar"
    return UnsupportedError(f"a member is {problem}", where=where, fix=fix)
