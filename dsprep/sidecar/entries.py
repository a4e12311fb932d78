"""The files that a sidecar lists: rows of its JSON, and from `MANY` on columns of its companion.

Columns are mapped, so that processes of one machine share them, and a row is made when it is asked
for. In the JSON ``files`` is then an object: ``count``; ``at``, ``nbytes`` and ``blake2b`` of the
columns in the companion, which follow its tables; and ``columns``, by the keys of a row
(a key that no file has is left out):

- ``{"all": value}``: the same for every file;
- ``{"at", "width"}``: a number of so many bytes, little-endian, for each file; ``sampled`` is one
  that has 16 hexadecimal digits;
- ``{"at", "width", "nbytes"}``: numbers where the text of each file ends, and behind them so many
  bytes of texts: a path, or JSON.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Array, Bytes, Ints
from dsprep.errors import FormatError
from dsprep.storage.identity import Identity
from dsprep.storage.paths import open_file

MANY = 1000
"""Files from which on there are columns."""

MAX_SAMPLES = 1 << 60
"""Numbers of samples are smaller."""

_STEP = 1 << 20
_COUNTED = ("samples", "nbytes", "layout", "files")
_OWN = ("path", "samples", "layout", "crc32c")
_OF_IDENTITY = ("nbytes", "mtime_ns", "files", "sampled", "etag", "facts")
_DIGITS = re.compile("[0-9a-f]{16}").fullmatch


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file (or store directory) of the dataset.

    Attributes
    ----------
    path
        Relative to the dataset; ``.`` for the dataset itself.
    samples
        Samples in it.
    identity
        By which a change is noticed.
    layout
        The number of its layout in the sidecar.
    crc32c
        The JSON of its checksums; None without.
    """

    path: str
    samples: int
    identity: Identity
    layout: int = 0
    crc32c: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; `from_json` is the inverse."""
        json = {"path": self.path, "samples": self.samples, **self.identity.to_json()}
        if self.layout:
            json["layout"] = self.layout
        if self.crc32c is not None:
            json["crc32c"] = dict(self.crc32c)
        return json

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote; a built-in exception if it is something else."""
        path, samples, layout = json["path"], json["samples"], json.get("layout", 0)
        if not isinstance(path, str) or path.startswith("/") or "\0" in path:
            raise ValueError(f"the path {path!r} is not relative")
        if not path.isascii():
            os.fsencode(path)  # ValueError if no file can be called so
        if ".." in path and ".." in path.split("/"):
            raise ValueError(f"the path {path!r} leaves the dataset")
        for value in (samples, layout):
            if type(value) is not int or not 0 <= value < MAX_SAMPLES:
                raise TypeError(f"{value!r} is not a number of samples, or of a layout")
        crcs = json.get("crc32c")
        if crcs is not None and not isinstance(crcs, Mapping):
            raise TypeError("crc32c is not a JSON object")
        return cls(path, samples, Identity.from_json(json), layout, crcs)


class FileColumns(Sequence[FileEntry]):
    """The rows that columns in a companion make up.

    Parameters
    ----------
    described
        Their description in the sidecar.
    block
        Their bytes.
    where
        The companion, for messages.

    Raises
    ------
    ValueError, TypeError, KeyError
        If they are not as described.
    """

    def __init__(self, described: Mapping[str, Any], block: Bytes, where: object = None) -> None:
        self.described, self.block, self._where = described, block, where
        self._count = _count_of(described["count"])
        self._numbers: dict[str, Array] = {}
        columns = described["columns"]
        self._paths = self._texts(columns["path"])
        self._values = {
            k: self._column(k, columns[k]) for k in (*_OWN[1:], *_OF_IDENTITY) if k in columns
        }
        self._row = lru_cache(maxsize=4096)(self._make_row)
        for key in _COUNTED:
            low, high = self.numbers(key).min(initial=0), self.numbers(key).max(initial=0)
            if low < 0 or high >= MAX_SAMPLES:
                raise ValueError(f"impossible {key} of a file")

    @classmethod
    def open(cls, described: Mapping[str, Any], path: Path) -> Self:
        """Return the columns in the companion `path`, mapped if it is a file of this machine.

        Raises
        ------
        OSError
            If it cannot be read.
        ValueError, TypeError, KeyError
            If it is damaged, or another sidecar's.
        """
        at, nbytes = _count_of(described["at"]), _count_of(described["nbytes"])
        state = hashlib.blake2b(digest_size=8)
        with closing(open_file(path)) as file:
            if at + nbytes == file.nbytes:  # read, not mapped: such pages are not this process's
                for begin in range(at, at + nbytes, _STEP):
                    state.update(file.pread_exact(min(_STEP, at + nbytes - begin), begin))
            if state.hexdigest() != described["blake2b"]:
                raise ValueError(f"the companion {path.name} is of another sidecar")
            if file.fd < 0:
                return cls(described, np.frombuffer(file.pread_exact(nbytes, at), np.uint8), path)
            mapped = mmap.mmap(file.fd, file.nbytes, access=mmap.ACCESS_READ)
        return cls(described, np.frombuffer(mapped, np.uint8, nbytes, at), path)

    @property
    def end(self) -> int:
        """Bytes of the companion."""
        return int(self.described["at"] + self.described["nbytes"])

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.described, self.block, self._where)

    @overload
    def __getitem__(self, index: int) -> FileEntry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FileEntry]: ...

    @override
    def __getitem__(self, index: int | slice) -> FileEntry | Sequence[FileEntry]:
        numbers = range(self._count)[index]
        return self._row(numbers) if isinstance(numbers, int) else tuple(map(self._row, numbers))

    def _make_row(self, number: int) -> FileEntry:
        try:
            row = {key: value(number) for key, value in self._values.items()}
            row["path"] = os.fsdecode(_text(*self._paths, number))
            return FileEntry.from_json(row)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "the sidecar does not follow its specification",
                where=self._where,
                found=f"file {number}: {type(error).__name__}: {str(error)[:200]}",
            ) from error

    def paths(self) -> list[str]:
        """Return the paths of all files as they are stated, which are not checked."""
        data, ends = self._paths[1].tobytes(), self._paths[0].tolist()
        return [os.fsdecode(data[a:b]) for a, b in pairwise((0, *ends))]

    def numbers(self, key: str) -> Ints:
        """Return a number of every file, by its key; 0 where there is none."""
        if key in self._numbers:
            return self._numbers[key].astype(np.int64)
        column = self.described["columns"].get(key, {"all": 0})
        if "all" in column:
            return np.full(self._count, column["all"] or 0, np.uint64).astype(np.int64)
        values = [value or 0 for value in map(self._values[key], range(self._count))]
        return np.array(values, np.uint64).astype(np.int64)

    def _column(self, key: str, column: Mapping[str, Any]) -> Callable[[int], Any]:
        """Return what gives the value of a file."""
        if "all" in column:
            return lambda number: column["all"]
        if "nbytes" in column and key not in _COUNTED:
            texts = self._texts(column)
            return lambda number: json.loads(_text(*texts, number))
        numbers = self._numbers[key] = self._array(column)
        if key == "sampled":
            return lambda number: f"{int(numbers[number]):016x}"
        return lambda number: int(numbers[number])

    def _array(self, column: Mapping[str, Any]) -> Array:
        at, width = _count_of(column["at"]), _count_of(column["width"])
        if width not in (1, 2, 4, 8) or at + width * self._count > len(self.block):
            raise ValueError("a column of files is not in the companion")
        return self.block[at : at + width * self._count].view(f"<u{width}")

    def _texts(self, column: Mapping[str, Any]) -> tuple[Array, Bytes]:
        """Return where each text ends, and all of them."""
        ends, nbytes = self._array(column), _count_of(column["nbytes"])
        texts = self.block[column["at"] + ends.nbytes :][:nbytes]
        if bool((ends[1:] < ends[:-1]).any()) or ends.max(initial=0) > len(texts):
            raise ValueError("a column of texts is not in the companion")
        return ends, texts


def _text(ends: Array, texts: Bytes, i: int) -> bytes:
    return texts[int(ends[i - 1]) if i else 0 : int(ends[i])].tobytes()


def _count_of(number: Any) -> int:
    if type(number) is not int or not 0 <= number < MAX_SAMPLES:
        raise TypeError(f"{str(number)[:40]!r} is not a number of files or bytes")
    return number


def numbers(files: Sequence[FileEntry], key: str) -> Ints:
    """Return a number of every file, by its key; 0 where there is none."""
    if isinstance(files, FileColumns):
        return files.numbers(key)
    values = [value or 0 for value in map(_value_of(key), files)]
    return np.array(values, np.uint64).astype(np.int64)


def _value_of(key: str) -> attrgetter[Any]:
    return attrgetter(key if key in _OWN else f"identity.{key}")


def encode(files: Sequence[FileEntry]) -> tuple[dict[str, Any], bytes]:
    """Return rows as columns: how they are described, but for where they are, and their bytes."""
    if isinstance(files, FileColumns):
        return {**files.described}, files.block.tobytes()
    block, columns = bytearray(), dict[str, Any]()

    def put(numbers: Array, texts: bytes = b"") -> dict[str, int]:
        largest = int(numbers.max())
        width = next(w for w in (1, 2, 4, 8) if largest < 1 << 8 * w)
        block.extend(bytes(-len(block) % 8))
        column = {"at": len(block), "width": width}
        block.extend(numbers.astype(f"<u{width}").tobytes())
        block.extend(texts)
        return column

    for key in (*_OWN, *_OF_IDENTITY):
        values = [*map(_value_of(key), files)]
        if key != "path" and all(value == values[0] for value in values):
            if values[0] not in (None, "", {}):
                columns[key] = {"all": values[0]}
        elif key == "sampled" and all(map(_DIGITS, values)):
            columns[key] = put(np.array([int(value, 16) for value in values], np.uint64))
        elif key != "path" and all(type(value) is int for value in values):
            columns[key] = put(np.array(values, np.uint64))
        else:
            texts = [os.fsencode(v) if key == "path" else json.dumps(v).encode() for v in values]
            column = put(np.cumsum([*map(len, texts)], dtype=np.uint64), b"".join(texts))
            columns[key] = {**column, "nbytes": sum(map(len, texts))}
    digest = hashlib.blake2b(block, digest_size=8).hexdigest()
    facts = {"count": len(files), "nbytes": len(block), "blake2b": digest, "columns": columns}
    return facts, bytes(block)
