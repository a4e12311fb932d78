"""The metadata of BP5: the index, the formats of records, and the records.

``md.idx`` has for each step where its metadata are in ``md.0``, and where the data of each writer
begin in its subfile. ``mmd.0`` has the formats (of FFS) of what each writer put there: a C struct,
whose members are named after variables, and whose pointers are offsets. A block of data is at the
offset that the struct gives it, counted from where the writer's data of that step begin.

Specification: ``developer_docs/bp5format.md`` of https://github.com/ornladios/ADIOS2
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from dsprep.core.schema import DType, Ints
from dsprep.core.spans import ranges
from dsprep.errors import FormatError
from dsprep.formats.adios.metadata import (
    HEADER,
    METADATA,
    MOST_ATTRIBUTE,
    MOST_DIMS,
    OPERATOR,
    Blocks,
    Header,
    Kind,
    Metadata,
    Numbers,
    Variable,
    column_major,
    decoded,
    joined,
    plural,
)

KINDS: dict[str, Kind] = {
    "G": "array",
    "J": "joined",
    "L": "local",
    "g": "value",
    "l": "local value",
}
DTYPES = {
    1: "<i1",
    2: "<i2",
    3: "<i4",
    4: "<i8",
    5: "<u1",
    6: "<u2",
    7: "<u4",
    8: "<u8",
    9: "<f4",
    10: "<f8",
    12: "<c8",
    13: "<c16",
    15: "<i1",
}
"""Of the numbers that ADIOS2 gives to types; 11 is long double."""

STRING, STRUCT = 14, 16

LETTERS = {"integer": "i", "unsigned integer": "u", "float": "f", "double": "f", "char": "i"}
"""Of the types of members that are numbers."""

HEAD = 7
"""Numbers that each array has in a struct: axes, blocks, their product; pointers to the shape, to
sizes, starts and offsets of blocks."""

RECORD_HEAD = 24
"""Bytes of a record before its struct: the format's id, and lengths."""

ID_NBYTES = 12
ARRAYS = 18
"""Added to the code of an attribute that has several values."""


class Index(NamedTuple):
    """What ``md.idx`` says of consecutive steps that are alike.

    Attributes
    ----------
    first
        The number of the first of them.
    at, nbytes
        Where the metadata of each are in ``md.0``: int64, shape ``(steps,)``.
    data
        Of each step and writer ``(position, size)`` of what was written early, and the position of
        the rest: int64, shape ``(steps, writers, 2 * flushes + 1)``.
    subfiles
        Of each writer: int64, shape ``(writers,)``.
    """

    first: int
    at: Ints
    nbytes: Ints
    data: Ints
    subfiles: Ints


@dataclass(frozen=True)
class Records:
    """What each writer put into ``md.0`` in each step, in arrays of shape ``(n,)``, int64.

    Attributes
    ----------
    step, at, nbytes
        Its step, and its bytes in ``md.0``.
    subfile, position
        Where its data begin.
    early
        Where they are in several parts: by record the ``(position, size)`` of these, and the
        position of the rest.
    """

    step: Ints
    at: Ints
    nbytes: Ints
    subfile: Ints
    position: Ints
    early: dict[int, Ints]


class Member(NamedTuple):
    """A member of a struct: its name, type, size of an element, and offset."""

    name: str
    type: str
    nbytes: int
    offset: int


class Format(NamedTuple):
    """The bytes of a struct, and its members."""

    nbytes: int
    members: list[Member]


def parse(index: Numbers, formats: Numbers, numbers: Numbers) -> Metadata:
    """Return what ``md.idx``, ``mmd.0`` and ``md.0`` say.

    Raises
    ------
    FormatError
        If they are damaged, or of a kind that is not read.
    """
    header = Header.parse(index.text(0, HEADER), index.where)
    if header.column_major:
        raise column_major(index.where)
    runs, notes = read_index(index, header.active)
    variable, attribute = read_records(runs, numbers)
    if header.flat:
        variable = replace(variable, step=np.zeros_like(variable.step))
    structs = read_formats(formats)
    steps = sum(len(run.at) for run in runs)
    writers = max((len(run.subfiles) for run in runs), default=0)
    words = f"ADIOS2 BP5, {plural(steps, 'step')}, {plural(writers, 'writer')}"
    return Metadata(
        words,
        min(steps, 1) if header.flat else steps,
        read_variables(variable, structs, numbers),
        read_attributes(attribute, numbers),
        notes,
    )


# --- md.idx ----------------------------------------------------------------------------------


def read_index(index: Numbers, active: bool) -> tuple[list[Index], tuple[str, ...]]:
    """Return what the index says of all steps, and what was left out.

    Raises
    ------
    FormatError
        If it is damaged, or ends within a record although nobody writes to it.
    """
    runs: list[Index] = []
    at, step, subfiles = HEADER, 0, np.zeros(0, np.int64)
    while at < index.nbytes:
        left = index.nbytes - at - 9
        length = index.one(at + 1) if left >= 0 else 0
        if not 0 <= length <= left:
            if active:
                return runs, (f"left out the end of {index.where.name}: it is being written",)
            raise index.damaged("ends within a record", found=f"{max(0, left)} of {length} bytes")
        kind = chr(index.one(at, 1))
        if kind == "w" and length >= 24:
            writers = index.one(at + 9)
            if length != 8 * (3 + writers):
                raise index.damaged("has a map of writers of a wrong length", found=length)
            subfiles = index.u64(at + 33 + 8 * np.arange(writers))
            if len(subfiles) and not 0 <= int(subfiles.min()) <= int(subfiles.max()) < 1 << 31:
                raise index.damaged("names a subfile that cannot be", found=subfiles.max())
            at += 9 + length
        elif kind == "s" and length >= 24 and len(subfiles):
            run = _alike(index, at, length, step, subfiles)
            runs.append(run)
            step += len(run.at)
            at += len(run.at) * (9 + length)
        else:
            raise index.damaged(
                f"has a record at offset {at} that is not known",
                "a map of writers, or a step",
                kind,
            )
    return runs, ()


def _alike(index: Numbers, at: int, length: int, step: int, subfiles: Ints) -> Index:
    """Return the steps from the one at `at` on whose records are alike."""
    flushes = index.one(at + 25)
    if length != 8 * (3 + len(subfiles) * (2 * flushes + 1)):
        raise index.damaged("has a step of a wrong length", found=length)
    stride = 9 + length
    limit = (index.nbytes - at) // stride
    rows = index.bytes[at : at + limit * stride].reshape(limit, stride)
    count = 1
    while count < limit:  # looks further ahead the more there were
        stop = min(limit, 4 * count)
        same = (rows[count:stop, :9] == rows[0, :9]).all(1)
        same &= (rows[count:stop, 25:33] == rows[0, 25:33]).all(1)
        if not same.all():
            count += int(same.argmin())
            break
        count = stop
    words = np.ascontiguousarray(rows[:count, 9:]).view(np.int64)
    data = words[:, 3:].reshape(count, len(subfiles), 2 * flushes + 1)
    if int(words.min()) < 0:
        raise index.damaged("gives an offset that cannot be", found=int(words.min()))
    return Index(step, words[:, 0], words[:, 1], data, subfiles)


# --- md.0 ------------------------------------------------------------------------------------


def read_records(runs: list[Index], numbers: Numbers) -> tuple[Records, Records]:
    """Return the records of variables, and those of attributes.

    Raises
    ------
    FormatError
        If they are not where the index says.
    """
    total = sum(float(run.nbytes.astype(float).sum()) for run in runs)
    if total > numbers.nbytes:
        raise numbers.damaged("has fewer bytes than md.idx says", total, numbers.nbytes)
    both: tuple[list[Records], list[Records]] = ([], [])
    before = 0
    for run in runs:
        writers = len(run.subfiles)
        if len(run.nbytes) and int(run.nbytes.min()) < 8 + 16 * writers:
            raise numbers.damaged("has a step without sizes", found=int(run.nbytes.min()))
        if (numbers.u64(run.at) != run.nbytes - 8).any():
            raise numbers.damaged("has a step of another size than md.idx says")
        sizes = numbers.u64(run.at[:, None] + 8 + 8 * np.arange(2 * writers))
        if sizes.size and not 0 <= int(sizes.min()) <= int(sizes.max()) <= numbers.nbytes:
            raise numbers.damaged("has a record of a size that cannot be", found=sizes.max())
        ends = (run.at + 8 + 16 * writers)[:, None] + np.cumsum(sizes, axis=1)
        if (ends[:, -1] != run.at + run.nbytes).any():
            raise numbers.damaged("has records that do not make up their step")
        begins = ends - sizes
        for k, records in enumerate(both):
            part = slice(k * writers, (k + 1) * writers)
            records.append(_records(run, begins[:, part], sizes[:, part], before))
        before += len(run.at) * writers
    return _all(both[0]), _all(both[1])


def _records(run: Index, at: Ints, nbytes: Ints, before: int) -> Records:
    """Return the records of some steps, with their numbers in all of them in `early`."""
    steps = run.first + np.arange(len(run.at))
    step = np.repeat(steps, len(run.subfiles))
    subfile = np.tile(run.subfiles, len(run.at))
    flat = run.data.reshape(-1, run.data.shape[2])
    early = {before + i: row for i, row in enumerate(flat)} if run.data.shape[2] > 1 else {}
    return Records(step, at.reshape(-1), nbytes.reshape(-1), subfile, flat[:, -1], early)


def _all(parts: list[Records]) -> Records:
    """Return all records; those of no bytes keep their numbers."""
    none = np.zeros(0, np.int64)
    early = {number: row for part in parts for number, row in part.early.items()}

    def every(name: str) -> Ints:
        return np.concatenate([none, *(getattr(p, name) for p in parts)])

    columns = {n: every(n) for n in ("step", "at", "nbytes", "subfile", "position")}
    return Records(**columns, early=early)


# --- mmd.0 -----------------------------------------------------------------------------------


def read_formats(formats: Numbers) -> dict[bytes, Format]:
    """Return the structs in ``mmd.0``, by the id of their format.

    Raises
    ------
    FormatError
        If they are damaged, or were written by a machine with another byte order or other pointers.
    """
    known: dict[bytes, Format] = {}
    at = 0
    while at < formats.nbytes:
        own, length = formats.one(at), formats.one(at + 8)
        formats.check(at + 16, own)
        formats.check(at + 16 + own, length)
        if own != ID_NBYTES or length < 8 + 28:
            raise formats.damaged(
                f"has a format at offset {at} that cannot be", found=(own, length)
            )
        name = formats.text(at + 16, own)
        known[name] = _format(formats, formats.text(at + 16 + own, length))
        at += 16 + own + length
    return known


def _format(formats: Numbers, text: bytes) -> Format:
    """Return the first struct of a description."""
    head, order, version = text[8:], text[2], text[3]
    pointer = head[16]
    if order or version != 2 or pointer != 8:
        raise FormatError(
            "a writer had another byte order, or other pointers",
            where=formats.where,
            expected="little-endian, 64 bits",
            found=f"order {order}, version {version}, {8 * pointer} bits",
            fix="rewrite it with adios2_reorganize on a machine of 64 bits that is little-endian",
        )
    count, start = int.from_bytes(head[8:12], "little"), head[17]
    if start < 28 or start + 16 * count > len(head):
        raise formats.damaged("has a format with too many members", found=count)
    rows = np.frombuffer(head, "<u4", 4 * count, start).reshape(-1, 4).tolist()
    members = [
        Member(decoded(_word(head, a)), decoded(_word(head, b)), size, at)
        for a, b, size, at in rows
    ]
    nbytes = int.from_bytes(head[12:16], "little")
    return Format(nbytes, members)


def _word(text: bytes, start: int) -> bytes:
    """Return the text that ends with a zero; one that does not end is empty."""
    stop = text.find(b"\0", start, start + (1 << 16))
    return text[start:stop] if 0 <= start < stop else b""


# --- variables -------------------------------------------------------------------------------


def read_variables(
    records: Records, structs: dict[bytes, Format], numbers: Numbers
) -> dict[str, Variable]:
    """Return the variables that the records have.

    Raises
    ------
    FormatError
        If a record is of a format that is not there, or damaged.
    """
    parts: dict[str, list[Variable]] = defaultdict(list)
    filled = np.flatnonzero(records.nbytes > 0)
    if len(filled) and int(records.nbytes[filled].min()) < RECORD_HEAD + 24:
        raise numbers.damaged("has a record that is too short")
    at = records.at[filled]
    ids = np.stack([numbers.u64(at), numbers.u32(at + 8)], axis=1)
    known, positions = np.unique(ids, axis=0, return_inverse=True)
    order = np.argsort(positions.reshape(-1), kind="stable")
    edges = np.searchsorted(positions.reshape(-1)[order], np.arange(len(known) + 1))
    used = np.zeros(len(records.at), np.int64)
    for k, (low, high) in enumerate(known):
        rows = filled[order[edges[k] : edges[k + 1]]]
        name = low.tobytes() + high.tobytes()[:4]
        if name not in structs:
            raise numbers.damaged("has a record of a format that is not in mmd.0", found=name.hex())
        nbytes, members = structs[name]
        if [m.name for m in members[:3]] != OWN or [m.offset for m in members[:3]] != [0, 8, 16]:
            raise numbers.damaged("has a record that is not of variables", found=name.hex())
        struct = Struct(records, rows, numbers, used, nbytes)
        for number, member in enumerate(members[3:]):
            blocks = struct.variable(number, member)
            if blocks is not None:
                parts[blocks.name].append(blocks)
    return {name: joined(blocks) for name, blocks in parts.items()}


OWN = ["BitFieldCount", "BitField", "DataBlockSize"]
"""The first members of every struct of variables."""


_NAME = re.compile(r"BP([GJL])(-[0-9]+-[^-]*-|_)([0-9]{1,9})_([0-9]{1,3})_(.*)", re.DOTALL)


class Struct:
    """The records of one format: ``rows`` are their numbers, ``nbytes`` is what the struct has.

    ``used`` counts for every record the bytes that its arrays take, which cannot be more than it
    has: no damaged one makes more of it.
    """

    def __init__(
        self, records: Records, rows: Ints, numbers: Numbers, used: Ints, nbytes: int
    ) -> None:
        self._records, self._rows, self._numbers, self._used = records, rows, numbers, used
        self._nbytes, self._base = nbytes, records.at[rows] + RECORD_HEAD
        every = np.arange(len(rows))
        if (records.nbytes[rows] < RECORD_HEAD + nbytes).any():
            raise numbers.damaged("has a record that is shorter than its struct")
        self._bits = numbers.u64(self._base)
        if (numbers.u64(self._base + 8) & 7).any():
            raise numbers.damaged("has a bit field at an odd offset")
        self._bit_at = self._pointed(every, numbers.u64(self._base + 8), 8 * self._bits)

    def _pointed(self, rows: Ints, pointers: Ints, nbytes: Ints) -> Ints:
        """Return the offsets of what pointers of some of the records point to, all behind structs.

        Raises
        ------
        FormatError
            If they do not point to so many bytes of their record.
        """
        room = self._records.nbytes[self._rows[rows]] - RECORD_HEAD
        bad = (nbytes < 0) | (nbytes > room) | (pointers < self._nbytes)
        if ((bad | (pointers > room - nbytes)) & (nbytes != 0)).any():
            raise self._numbers.damaged("has a pointer that leaves its record")
        offsets: Ints = self._base[rows] + pointers
        return offsets

    def variable(self, number: int, member: Member) -> Variable | None:
        """Return the variable of a member in these records; None if none of them has it."""
        small = member.name[:4] in ("BPg_", "BPl_")
        if member.offset + (member.nbytes if small else 8 * HEAD) > self._nbytes:
            raise self._numbers.damaged(f"has {member.name}, which leaves its struct")
        if member.offset % (min(8, member.nbytes) or 1 if small else 8):
            raise self._numbers.damaged(f"has {member.name} at an odd offset", found=member.offset)
        has = self._bits > number // 64
        words = self._numbers.u64(self._bit_at[has] + 8 * (number // 64))
        has[has] = (words >> (number % 64)) & 1 == 1
        if not has.any():
            return None
        if small:
            return self._values(member, has)
        matched = _NAME.fullmatch(member.name)
        if matched is None:
            raise self._numbers.damaged("has a variable of no known kind", found=member.name)
        letter, derived, nbytes, code, name = matched.groups()
        if derived != "_":
            return self._unknown(name, "it is derived from other variables")
        if not member.type.startswith("MetaArray"):
            return self._unknown(name, "ADIOS2 2.8.0 or older wrote it")
        if int(code) == STRUCT:
            return self._unknown(name.partition("_")[2], "it is of structs")
        dtype = DTYPES.get(int(code))
        if dtype is None or np.dtype(dtype).itemsize != int(nbytes):
            return self._unknown(name, f"its type is not supported (number {code})")
        variable = self._arrays(name, KINDS[letter], np.dtype(dtype), member.offset, has)
        if member.type.startswith("MetaArrayOp"):
            return replace(variable, problem=OPERATOR)
        return variable

    def _values(self, member: Member, has: Any) -> Variable:
        rows, at = self._rows[has], self._base[has] + member.offset
        name, kind = member.name[4:], KINDS[member.name[2]]
        dtype = _scalar(member)
        nbytes = None
        if member.type == "string":
            pointers = self._numbers.u64(at)
            where = self._pointed(np.flatnonzero(has), pointers, np.ones_like(pointers))
            at, nbytes = self._strings(rows, where)
        elif dtype is None and member.type in LETTERS:
            return self._unknown(name, f"its type is not supported ({member.type})")
        elif dtype is None:
            raise self._numbers.damaged(f"has {member.name} of an unknown type", found=member.type)
        none = np.zeros((len(rows), 0), np.int64)
        file = np.full(len(rows), METADATA, np.int64)
        step = self._records.step[rows]
        return Variable(name, dtype, kind, Blocks(rows, step, none, none, none, file, at, nbytes))

    def _strings(self, rows: Ints, at: Ints) -> tuple[Ints, Ints]:
        """Return offsets and lengths of strings that end with a zero."""
        ends = (self._records.at + self._records.nbytes)[rows]
        pairs = zip(at.tolist(), ends.tolist(), strict=True)
        stop = np.array([self._numbers.find_zero(a, b) for a, b in pairs], np.int64)
        if (stop < at).any():
            raise self._numbers.damaged("has a string that does not end")
        return at, stop - at

    def _arrays(self, name: str, kind: Kind, dtype: DType, offset: int, has: Any) -> Variable:
        rows, base, numbers = self._rows[has], self._base[has], self._numbers
        head = numbers.u64((base + offset)[:, None] + 8 * np.arange(HEAD))
        dims, count, every = (head[:, k] for k in range(3))
        axes, limit = int(dims[0]), self._records.nbytes[rows]
        if (dims != axes).any():
            return self._unknown(name, "its number of axes changes between steps")
        if not 0 < axes <= MOST_DIMS:
            return self._unknown(name, f"it has {axes} axes")
        if (count < 0).any() or (count > limit).any() or (every != count * axes).any():
            raise numbers.damaged(f"gives variable {name} a number of blocks that cannot be")
        self._used[rows] += 8 * (axes + 2 * every + count)
        if (self._used[rows] > limit).any():
            raise numbers.damaged(f"gives variable {name} more blocks than there is room for")
        chosen, block = np.flatnonzero(has), np.repeat(np.arange(len(rows)), count)
        number = ranges(np.zeros(len(rows), np.int64), count)
        along = 8 * np.arange(axes)

        def taken(k: int, nbytes: Ints, at: Ints) -> Ints:
            """Return the numbers at `at` behind what pointer `k` points to."""
            if (head[:, k] & 7).any():
                raise numbers.damaged(f"has a pointer of {name} at an odd offset")
            origin = self._pointed(chosen, head[:, k], nbytes)[block]
            return numbers.u64(at + (origin[:, None] if at.ndim > 1 else origin))

        each = 8 * axes * number[:, None] + along
        start = shape = np.zeros_like(each)
        if kind != "local":
            shape = taken(3, np.full_like(count, 8 * axes), np.broadcast_to(along, each.shape))
        if kind == "array":
            start = taken(5, 8 * every, each)
        size = taken(4, 8 * every, each)
        at = self._data(rows[block], taken(6, 8 * count, 8 * number))
        blocks = Blocks(
            rows[block],
            self._records.step[rows[block]],
            shape,
            start,
            size,
            self._records.subfile[rows[block]],
            at,
        )
        return Variable(name, dtype, kind, blocks)

    def _data(self, rows: Ints, inside: Ints) -> Ints:
        """Return offsets in subfiles, of offsets in what each writer wrote in a step."""
        out: Ints = self._records.position[rows] + inside
        if self._records.early:
            edges = np.flatnonzero(np.append(True, np.diff(rows) != 0))
            for low, high in zip(edges, np.append(edges[1:], len(rows)), strict=True):
                early = self._records.early.get(int(rows[low]))
                if early is not None:
                    out[low:high] = _after(early, inside[low:high])
        return out

    def _unknown(self, name: str, problem: str) -> Variable:
        none, empty = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
        blocks = Blocks(none, none, empty, empty, empty, none, none)
        return Variable(name, np.dtype("u1"), "array", blocks, problem)


def _after(early: Ints, inside: Ints) -> Ints:
    """Return offsets where data were written in several parts: see `Records.early`."""
    positions, sizes = early[0::2], early[1::2]
    ends = np.cumsum(np.minimum(sizes, 1 << 40))
    part = np.searchsorted(ends, inside, "right")
    return cast(Ints, positions[part] + inside - np.append(0, ends)[part])


def _scalar(member: Member) -> DType | None:
    """Return the type of a number in a struct; None if it is of no type that is read."""
    if member.type in ("complex4", "complex8"):
        return np.dtype(f"<c{2 * int(member.type[-1])}")
    if member.type not in LETTERS or member.nbytes not in (1, 2, 4, 8):
        return None
    code = f"<{LETTERS[member.type]}{member.nbytes}"
    return None if code in ("<f1", "<f2") else np.dtype(code)


# --- attributes ------------------------------------------------------------------------------


def read_attributes(records: Records, numbers: Numbers) -> dict[str, Any]:
    """Return the attributes, the last of each name; large ones and unknown types are left out."""
    attributes: dict[str, Any] = {}
    for row in np.flatnonzero(records.nbytes >= RECORD_HEAD + 32).tolist():
        start, stop = int(records.at[row]), int(records.at[row] + records.nbytes[row])
        text = numbers.text(start + RECORD_HEAD, stop - start - RECORD_HEAD)
        attributes.update(_attributes(text))
    return attributes


def _attributes(text: bytes) -> dict[str, Any]:
    """Return the attributes of one record, whose offsets count from its struct on."""
    attributes: dict[str, Any] = {}
    left = len(text)
    some, first, words, then = np.frombuffer(text, "<u8", 4).tolist()
    for count, at, strings in ((some, first, False), (words, then, True)):
        if not 0 < at <= len(text) - 24 * count:
            continue
        for name, nbytes, value in (
            np.frombuffer(text, "<u8", 3 * count, at).reshape(-1, 3).tolist()
        ):
            label = _word(text, name).decode("utf-8", "replace")
            code = ord(label[0]) - ord("0") if label else 0
            left -= len(label) + nbytes
            if left < 0:
                return attributes
            if strings:
                kept = _texts(text, value, nbytes)
                left -= sum(map(len, kept or ()))
                several = code != STRING
            else:
                several = code not in DTYPES
                kept = _number(text, value, nbytes, code - ARRAYS if several else code)
            if kept is not None and len(label) > 1:
                attributes[label[1:]] = kept if several else kept[0]
    return attributes


def _number(text: bytes, at: int, nbytes: int, code: int) -> Any:
    """Return numbers of a type; None if they are not there, are too many, or of another type."""
    dtype = np.dtype(DTYPES.get(code, "V1"))
    if dtype.kind == "V" or not 0 < nbytes <= MOST_ATTRIBUTE or at + nbytes > len(text):
        return None
    return None if nbytes % dtype.itemsize else np.frombuffer(text[at : at + nbytes], dtype)


def _texts(text: bytes, at: int, count: int) -> list[str] | None:
    """Return strings, to which there are pointers; None if they are too many, or not there."""
    if not 0 < count <= MOST_ATTRIBUTE // 8 or at + 8 * count > len(text):
        return None
    texts, left = [], MOST_ATTRIBUTE
    for pointer in np.frombuffer(text, "<u8", count, at).tolist():
        word = _word(text, pointer)
        left -= len(word)
        if left < 0:
            return None
        texts.append(word.decode("utf-8", "replace"))
    return texts
