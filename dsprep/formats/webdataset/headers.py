"""Tar archives by their headers: where each member is stored, without its bytes.

An archive is blocks of 512 bytes: for each member a header and then its bytes, filled up to a whole
block; behind the last one, two blocks of zeros. A member may be preceded by others that say more
of it: its long name (GNU, types ``L`` and ``K``), or its name and size as text (pax, type ``x``).

Headers that say all by themselves, as nearly all do, are decoded many at a time; each of the others
one by one. Where members are small the archive is read in large ranges, else by the headers alone.

Sources: POSIX.1-2001, "pax", the ustar and pax interchange formats; the GNU tar manual, "Basic Tar
Format".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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

FILE, LONG_NAME, LONG_LINK, PAX, PAX_OF_ALL = (b"0", b"\0", b"7"), b"L", b"K", (b"x", b"X"), b"g"
OTHERS = {
    b"1": "hard links",
    b"2": "symbolic links",
    b"3": "devices",
    b"4": "devices",
    b"6": "pipes",
}
"""Members without bytes, and what they are called; besides, directories (``5``)."""
REFUSED = {
    b"S": "a sparse file, of which only some bytes are stored",
    b"M": "the rest of a file that begins in another archive",
}

_EIGHTS = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_CHECKSUM = slice(148, 156)


class Members(NamedTuple):
    """Files of an archive, in its order.

    Attributes
    ----------
    names
        Their names.
    named
        int64: where the file has the name; -1 if in two parts.
    offsets, lengths
        int64: their bytes.
    """

    names: list[bytes]
    named: Ints
    offsets: Ints
    lengths: Ints


class _Member(NamedTuple):
    name: bytes
    named: int
    offset: int
    length: int


@dataclass
class _Stated:
    """What precedes a member and is said of it."""

    name: bytes | None = None
    named: int = -1
    length: int | None = None


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
    ended
        Whether the blocks of zeros were found with which an archive ends; set by `members`.
    damage
        The error at which `members` ended, if it is damaged or cut.
    """

    def __init__(self, file: Handle) -> None:
        self.file, self.at, self.ended = file, 0, False
        self.damage: FormatError | None = None
        self.skipped: dict[str, tuple[int, bytes]] = {}
        self._stated: _Stated | None = None

    def members(self) -> Iterator[Members]:
        """Yield the files, many at a time, up to the end or to `damage`.

        Raises
        ------
        UnsupportedError
            If a member is stored in a way that has no single range of bytes.
        """
        buffer, span = np.empty(min(LARGE, self.file.nbytes), np.uint8), 64 << 10
        while not self.ended and self.at < self.file.nbytes:
            begin = self.at
            rest = self.file.nbytes - begin
            if rest < BLOCK:
                self.damage = self._cut("header", begin, BLOCK, rest)
                return
            window = buffer[: min(span, rest) // BLOCK * BLOCK]
            self.file.read_into(window, begin)
            batch, headers = self._window(window.reshape(-1, BLOCK))
            if batch.names:
                yield batch
            if self.damage is not None:
                return
            span = LARGE if self.at - begin <= APART * max(1, headers) else SMALL
        if self._stated is not None or not self.ended:
            self.damage = FormatError(
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

    def _window(self, blocks: Bytes) -> tuple[Members, int]:
        """Return the files whose headers are in some blocks, and how many headers were read."""
        begin, n = self.at, len(blocks)
        steps = _steps(blocks) if n * BLOCK > SMALL else [0] * n
        simple: list[int] = []
        others: dict[int, _Member] = {}
        i = headers = 0
        while i < n and not self.ended:
            step = steps[i]
            if step and self._stated is None:
                simple.append(i)
                i += step
                continue
            headers += 1
            self.at = begin + i * BLOCK
            try:
                member = self._one(blocks[i].tobytes())
            except FormatError as error:
                self.damage = error
                break
            if member is not None:
                others[i] = member
            i = (self.at - begin) // BLOCK
        if not self.ended:
            self.at = begin + i * BLOCK
        members = _joined(blocks, begin, simple, others)
        offset = int(members.offsets[-1]) if members.names else 0
        filled = -(-int(members.lengths[-1]) // BLOCK) * BLOCK if members.names else 0
        if offset + filled > self.file.nbytes:
            self.damage = self._cut(
                show(members.names[-1]), offset, filled, self.file.nbytes - offset
            )
            members = Members(members.names[:-1], *(column[:-1] for column in members[1:]))
        return members, headers + len(simple)

    def _cut(self, subject: str, offset: int, expected: int, available: int) -> FormatError:
        return FormatError(
            f"the archive ends within {subject}",
            where=f"{self.file.path}, offset {offset}",
            expected=f"{expected} bytes",
            found=f"{max(0, available)} bytes",
            fix="the file was cut: bring it again from where it came from",
        )

    # --- one header --------------------------------------------------------------------------

    def _one(self, block: bytes) -> _Member | None:
        """Return the file whose header is at `at`, which then is behind it; None if it is none."""
        at = self.at
        if not any(block):
            self._end()
            return None
        where = f"{self.file.path}, offset {at}"
        _check_sum(block, where)
        kind, length = block[156:157], _number(block[124:136], "size", where)
        if kind in (LONG_NAME, LONG_LINK, *PAX, PAX_OF_ALL):
            self._extend(kind, length)
            return None
        name, named = _name(block), at
        if block[257:263] == b"ustar\0" and block[345]:
            name, named = _text(block[345:500]) + b"/" + name, -1
        extended, self._stated = self._stated, None
        if extended is not None and extended.name is not None:
            name, named = extended.name, extended.named
        if extended is not None and extended.length is not None:
            length = extended.length
        if kind in REFUSED:
            raise _apart(REFUSED[kind], name, where)
        self.at = at + BLOCK
        if kind == b"5" or (kind == b"\0" and name.endswith(b"/")):
            return None
        if kind in OTHERS:
            self.note(OTHERS[kind], name)
            return None
        filled = -(-length // BLOCK) * BLOCK
        if filled > self.file.nbytes - self.at:
            raise self._cut(show(name), self.at, filled, self.file.nbytes - self.at)
        member = _Member(name, named, self.at, length)
        self.at += filled
        if kind in FILE:
            return member
        self.note(f"members of type {show(kind)}", name)
        return None

    def _extend(self, kind: bytes, length: int) -> None:
        """Take in what precedes a member and is said of it."""
        begin, where = self.at + BLOCK, f"{self.file.path}, offset {self.at}"
        if length > EXTENSION:
            raise FormatError(
                "a header is impossibly long", where=where, expected=f"<= {EXTENSION}", found=length
            )
        if length > self.file.nbytes - begin:
            raise self._cut("a header", begin, length, self.file.nbytes - begin)
        data = np.empty(length, np.uint8)
        self.file.read_into(data, begin)
        self.at = begin + -(-length // BLOCK) * BLOCK
        if kind == PAX_OF_ALL:
            wrong = [key for key, _, _ in _records(data.tobytes(), where) if _matters(key)]
            if wrong:
                raise _apart(f"named or sized by one header for all ({show(wrong[0])})", b"", where)
            return
        extended = self._stated = self._stated or _Stated()
        if kind == LONG_NAME and extended.name is None:
            extended.name, extended.named = _text(data.tobytes()), begin
        for key, value, at in _records(data.tobytes(), where) if kind in PAX else ():
            if key.startswith(b"GNU.sparse"):
                raise _apart(REFUSED[b"S"], b"", where)
            if key == b"path" and extended.name is None:
                extended.name, extended.named = _text(value), begin + at
            if key == b"size" and extended.length is None:
                if not value.isdigit() or len(value) > 20:
                    raise FormatError("a size is damaged", where=where, found=show(value))
                extended.length = int(value)
        if extended == _Stated():
            self._stated = None

    def _end(self) -> None:
        """Note the end of the archive; whatever follows has to be zeros."""
        self.ended, at = True, self.at
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


def is_header(block: bytes) -> bool:
    """Whether this is the header of a member."""
    if len(block) < BLOCK:
        return False
    try:
        _check_sum(block, "")
    except FormatError:
        return False
    return True


def show(name: bytes) -> str:
    """Return a name for a message."""
    return name.decode("utf-8", "backslashreplace")


def _joined(blocks: Bytes, begin: int, simple: list[int], others: dict[int, _Member]) -> Members:
    """Return files by the numbers of the blocks with their headers."""
    rows = np.array(simple, np.int64)
    rows = rows[blocks[rows, 156] != ord("x")]
    named = begin + rows * BLOCK
    names = np.ascontiguousarray(blocks[rows, :100]).view("S100").reshape(-1).tolist()
    if b"\0" in b"".join(names):
        names = list(map(_text, names))
    offsets, lengths = named + BLOCK, _sizes(blocks[rows, 124:135])
    if not others:
        return Members(names, named, offsets, lengths)
    names += [member.name for member in others.values()]
    columns = [named, offsets, lengths]
    for k, member in enumerate(zip(*(m[1:] for m in others.values()), strict=True)):
        columns[k] = np.append(columns[k], np.array(member, np.int64))
    order = np.argsort(np.append(rows, np.array(list(others), np.int64)))
    return Members([names[k] for k in order.tolist()], *(column[order] for column in columns))


def _steps(blocks: Bytes) -> list[int]:
    """Return for each block how many the next header is on; 0 if it does not say all by itself.

    It says all if it is the header of a file with its name in one part and its size in octal
    digits; or if it is a pax header that gives only a time, with its text in the next block.
    """
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


def _sizes(digits: Bytes) -> Ints:
    out: Ints = (digits - ord("0")) @ _EIGHTS
    return out


def _is_directory(names: Bytes) -> Bytes:
    """Whether names, of shape ``(n, 100)``, end in a slash."""
    ends = np.where((names == 0).any(axis=1), (names == 0).argmax(axis=1), names.shape[1])
    out: Bytes = names[np.arange(len(names)), ends - 1] == ord("/")
    return out


def _check_sum(block: bytes, where: str) -> None:
    stored = _number(block[_CHECKSUM], "checksum", where)
    values = np.frombuffer(block, np.uint8).copy()
    values[_CHECKSUM] = ord(" ")
    unsigned, signed = int(values.sum()), int(values.view(np.int8).sum())
    if stored not in (unsigned, signed):  # as some systems did that had bytes with a sign
        raise FormatError(
            "this is not the header of a member of a tar archive, or it is damaged",
            where=where,
            expected=f"the checksum {unsigned}",
            found=stored,
        )


def _name(block: bytes) -> bytes:
    return _text(block[:100])


def _text(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _number(data: bytes, name: str, where: str) -> int:
    """Return a number in octal digits, or in bytes behind one of 128."""
    if data[0] == 128:
        return int.from_bytes(data[1:], "big")
    text = _text(data).strip(b" ")
    if text and not text.strip(b"01234567"):
        return int(text, 8)
    if not text and name == "size":
        return 0
    raise FormatError(f"the {name} in the header of a member is damaged", where=where, found=data)


def _records(data: bytes, where: str) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield key, value and its place of every ``LENGTH KEY=VALUE`` in the text of a pax header."""
    at = 0
    while at < len(data):
        digits = data[at : at + 8].partition(b" ")[0]
        end = at + int(digits) if digits.isdigit() else -1
        key, equals, value = data[at + len(digits) + 1 : max(0, end - 1)].partition(b"=")
        if not at + len(digits) + 3 <= end <= len(data) or data[end - 1] != 10 or not equals:
            raise FormatError(
                "the text of a pax header is damaged", where=where, found=data[at:][:40]
            )
        yield key, value, end - 1 - len(value)
        at = end


def _matters(key: bytes) -> bool:
    return key in (b"path", b"size") or key.startswith(b"GNU.sparse")


def _apart(problem: str, name: bytes, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"a member is {problem}",
        where=where,
        found=show(name) if name else None,
        fix="unpack the archive, and write it again in the format ustar of tar",
    )
