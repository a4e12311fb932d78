"""The arrays of a dataset: of one file, of the members of a ZIP file, or of a directory's files."""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import DType
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.npy_header import MAGIC, Header, check_size, parse
from dsprep.formats.ragged import may_be_table
from dsprep.formats.samples import is_file, listed, natural_key
from dsprep.formats.splits import without_part
from dsprep.formats.zip_members import Member, members, opened_zip
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Column, Grid
from dsprep.storage.base import Handle
from dsprep.storage.paths import scan
from dsprep.storage.trees import HIDDEN, SIDECARS

SUFFIX = ".npy"

MAX_COLUMNS, MAX_COLUMNS_NBYTES = 1 << 16, 256 << 20
"""Values of a sample, and bytes of an array in Fortran order, up to which it is read: as a whole,
since every sample is spread over all of it."""

MAX_FIELDS = 256
"""Files of a directory from which on they are not taken for fields."""

MAX_INFLATED = 1 << 30
"""Bytes of the largest deflated member that is read: it is decoded as a whole."""

_PLACEHOLDER = re.compile(r"\{[0-9]+\}")


@dataclass(frozen=True)
class StoredArray:
    """An array, and where its values are.

    Attributes
    ----------
    dtype, shape
        Of the array.
    offset, nbytes
        Of its bytes in the file, or of the deflated member.
    path
        The file: ``""``, or its name in the directory.
    filters
        What is undone when it is read.
    columns
        Whether it is in Fortran order.
    member
        The member of a ZIP file that has it as it is.
    """

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: str = ""
    filters: tuple[Mapping[str, Any], ...] = ()
    columns: bool = False
    member: Member | None = None

    @property
    def vlen(self) -> bool:
        """True if elements vary in length: never, as nothing is unpickled."""
        return False

    def column(self, *, whole_file: bool, ragged: bool = False) -> Column:
        """Return its layout: a row for each sample, or (`whole_file`) all of it as the only one."""
        shape = self.shape or (1,)
        if 0 in shape:
            none = Affine(1, 0)
            return Column(None, first=none, count=none) if ragged else Column(None)
        size, chunk = self.dtype.itemsize, shape
        blocks = Blocks(Affine(1, self.offset), Affine(1, self.nbytes), self.path)
        if self.columns:  # a chunk holds one value of each row, and the first inner axis runs first
            inner, nbytes = shape[1:], shape[0] * size
            count, chunk = math.prod(inner), (shape[0], *(1 for _ in inner))
            numbers = np.arange(count, dtype=np.int64).reshape(inner, order="F").reshape(-1)
            offsets = Explicit(self.offset + nbytes * numbers)
            blocks = Blocks(offsets, Affine(count, nbytes), self.path)
        grid = Grid(blocks, shape, size, chunk, filters=self.filters)
        return Column(grid, shape[0] if whole_file else 1)


@dataclass(frozen=True)
class Arrays:
    """The contents of a dataset.

    Attributes
    ----------
    version
        What it is, for a person.
    names
        Of all arrays.
    arrays
        Those that are wanted, by name: in the order of members, in natural order of files.
    refused
        The errors for arrays that cannot be read, by name.
    notes
        What was left out, one clause each.
    """

    version: str
    names: list[str]
    arrays: dict[str, StoredArray] = field(default_factory=dict)
    refused: dict[str, UnsupportedError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def name_of(path: str) -> str:
    """Return what a file or a member is called as a field."""
    return path.removesuffix(SUFFIX)


def of_file(file: Handle, name: str) -> Arrays:
    """Return the array of a file.

    Raises
    ------
    FormatError, UnsupportedError
        If it is damaged, or of a kind that is not read.
    """
    notes: list[str] = []
    return Arrays("NumPy array", [name], {name: _in_file(file, "", notes)}, notes=notes)


def _in_file(file: Handle, path: str, notes: list[str]) -> StoredArray:
    header = parse(partial(file.pread, offset=0), file.path)
    check_size(header, file.nbytes, file.path)
    end = header.begin + header.nbytes
    if end < file.nbytes:
        another = file.pread(len(MAGIC), end) == MAGIC
        notes.append(
            f"left out the last {file.nbytes - end:,} bytes{f' of {path}' if path else ''}: "
            + ("another array, of which a file has one" if another else "behind the array")
        )
    _check_order(header, file.path)
    extent = header.begin, header.nbytes, path
    return StoredArray(header.dtype, header.shape, *extent, columns=header.columns)


def _check_order(header: Header, where: object, *, deflated: bool = False) -> None:
    """Raise `UnsupportedError` for an array in Fortran order that is not small and open."""
    large = header.nbytes > MAX_COLUMNS_NBYTES or math.prod(header.shape[1:]) > MAX_COLUMNS
    if header.columns and (deflated or large):
        raise UnsupportedError(
            "the array is in Fortran order: every sample is spread over all of it",
            where=where,
            fix="save it in C order: numpy.save(FILE, numpy.ascontiguousarray(array))",
        )


def of_archive(file: Handle, names: Collection[str]) -> Arrays:
    """Return the arrays of a ZIP file.

    Parameters
    ----------
    names
        The fields that are wanted; all if empty.

    Raises
    ------
    FormatError
        If it is damaged.
    """
    arrays, others = Arrays("NumPy arrays in a ZIP file", []), list[str]()
    with opened_zip(file) as archive:
        for member in sorted(members(file, archive), key=lambda m: m.offset):
            name = name_of(member.name)
            if not member.name.endswith(SUFFIX):
                others.append(name)
                continue
            arrays.names.append(name)
            if names and name not in names and not may_be_table(name):
                continue
            try:
                arrays.arrays[name] = _in_member(file, member)
            except UnsupportedError as error:
                arrays.refused[name] = error
    if others:
        arrays.notes.append(f"left out {listed(others)}: no arrays")
    return arrays


def _in_member(file: Handle, member: Member) -> StoredArray:
    where, deflated = f"{file.path}, {member.name}", member.method == zipfile.ZIP_DEFLATED
    reason = ""
    if member.method == -1:
        reason = "is encrypted"
    elif not (deflated or member.plain):
        reason = f"is compressed by method {member.method}"
    elif deflated and member.nbytes > MAX_INFLATED:
        reason = f"is deflated and has {member.nbytes} bytes, more than {MAX_INFLATED}"
    if reason:
        raise UnsupportedError(
            f"the ZIP member {reason}", where=where, fix=f"unpack it: unzip {file.path} -d DIR"
        )

    def head(nbytes: int) -> bytes:
        data = file.pread(min(nbytes, member.stored), member.offset)
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, nbytes) if deflated else data

    header = parse(head, where)
    check_size(header, member.nbytes, where)
    if (nbytes := header.begin + header.nbytes) != member.nbytes:
        problem = "the ZIP member is not of the size of its array"
        raise FormatError(problem, where=where, expected=f"{nbytes} bytes", found=member.nbytes)
    _check_order(header, where, deflated=deflated)
    kind = header.dtype, header.shape
    if deflated:
        filters = ({"id": "deflate", "crc32": member.crc32, "skip": header.begin},)
        return StoredArray(*kind, member.offset, member.stored, filters=filters)
    extent = member.offset + header.begin, header.nbytes
    return StoredArray(*kind, *extent, columns=header.columns, member=member)


# --- directories -------------------------------------------------------------------------------


def in_directory(path: Path) -> tuple[list[str], list[str]]:
    """Return the array files right in a directory, and all else that is there."""
    arrays, others = list[str](), list[str]()
    for entry in scan(path):
        if entry.name.startswith((".", *HIDDEN)) or entry.name.endswith(SIDECARS):
            continue
        regular = entry.name.lower().endswith(SUFFIX) and is_file(entry)
        (arrays if regular else others).append(entry.name)
    return arrays, others


def are_fields(path: Path) -> bool:
    """Return whether a directory is one dataset, each of whose files is a field.

    That is so if most of what is in it are array files, at least two and not very many, unless
    their names differ in a number or a part alone: shards, or samples.
    """
    arrays, others = in_directory(path)
    if not len(others) < len(arrays) <= MAX_FIELDS:
        return False
    names = {re.sub("[0-9]+", "0", without_part(name_of(name))) for name in arrays}
    return len(names) > 1


def of_directory(path: Path, names: Collection[str], open_file: Callable[[str], Handle]) -> Arrays:
    """Return the arrays of the files of a directory; see `of_archive`.

    Parameters
    ----------
    open_file
        Opens a file by its name.
    """
    inside, others = (sorted(some, key=natural_key) for some in in_directory(path))
    arrays = Arrays("NumPy arrays in a directory", [file[: -len(SUFFIX)] for file in inside])
    if others:
        arrays.notes.append(f"left out {listed(others)}: no arrays")
    for file in inside:
        name = file[: -len(SUFFIX)]
        if names and name not in names and not may_be_table(name):
            continue
        if _PLACEHOLDER.search(file):
            fix = "rename it"
            error = UnsupportedError("its name has braces", where=path / file, fix=fix)
            arrays.refused[name] = error
            continue
        try:
            arrays.arrays[name] = _in_file(open_file(file), file, arrays.notes)
        except UnsupportedError as error:
            arrays.refused[name] = error
    return arrays
