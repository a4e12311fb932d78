"""The files as they are, as a plain training script reads them before anything is prepared.

Tar shards are read one after another, shuffled in a buffer; images are files that are opened and
read; arrays of HDF5 (netCDF-4), Zarr and NumPy are indexed by their own library, in files that stay
open. What has no such plain way is read sample by sample as dsprep finds it.
"""

from __future__ import annotations

import os
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.bench.strategies.base import Strategy
from dsprep.core.schema import Array, Batch, Column, Field, Ints, Ragged, concatenate
from dsprep.formats.base import Source
from dsprep.layout.model import Given
from dsprep.source.dataset import open_dataset
from dsprep.source.many import MultiSource, NativeOpening

Contents: TypeAlias = tuple[int, Mapping[str, bytes]]
"""The number of a sample, and the bytes of its fields, as they are in files."""

MAX_OPEN = 512
"""Files that stay open, as a training script leaves them: half of what most systems allow."""

BUFFER, ROOM = 1000, 256 << 20
"""Samples, and bytes, of the shuffle buffer at most."""

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_META = re.compile(r"__[^/]*__(/|$)")


class InPlace(Strategy):
    """All files of the dataset as a plain script reads them, shuffled."""

    def prepare(self, resources: ExitStack) -> None:
        """Find out what the files are, and open those that stay open."""
        task = self.task
        source = self._opened(resources)
        self._schema = source.schema
        self._paths = {s.name: s.path for s in task.reading.fields}
        self._given: Mapping[str, Given] = {}
        self._numbers = np.arange(task.samples) if task.numbers is None else task.numbers
        opening = source.opening
        format = opening.format if isinstance(opening, NativeOpening) else ""
        self._loop: Callable[[int], Iterator[Any]] = self._by_source
        if format == "webdataset":
            self._loop = self._from_shards
        elif format == "images" and not isinstance(source, MultiSource):
            layout = source.extents()
            self._given = layout.given
            self._files = {
                self._paths.get(name, name): [
                    source.path / os.fsdecode(own.names[i]) for i in range(len(source))
                ]
                for name, own in layout.files.items()
            }
            self._loop = self._from_files
        elif format in _ARRAYS and not source.schema.ragged:
            self._open = lru_cache(MAX_OPEN)(_ARRAYS[format])
            resources.callback(self._open.cache_clear)
            source.close()  # or h5py shares what the library keeps for it, such as its cache
            if self._has_arrays(source):
                self._loop = self._from_arrays
            else:
                source = self._opened(resources)
        if self._loop != self._by_source:
            source.close()  # what is read is not to be in its library already
        elif isinstance(source, MultiSource):
            source.max_open = MAX_OPEN

    def _opened(self, resources: ExitStack) -> Source:
        files = list(self.task.files)
        self._source = open_dataset(files, self.task.reading, through="library")
        resources.callback(self._source.close)
        return self._source

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples, shuffled."""
        return self._loop(number)

    def size(self, item: Any) -> int:
        """Return the number of samples in an item."""
        return len(item) if isinstance(item, list) else super().size(item)

    def batch(self, item: Any) -> Batch:
        """Return the contents of files as fields."""
        if not isinstance(item, list):
            return super().batch(item)
        indices = np.array([index for index, _ in item], np.int64)
        return {
            f.name: self._given[f.name].at(indices, f)
            if f.name in self._given
            else _column([contents[self._path(f)] for _, contents in item], f)
            for f in self._schema
        }

    def _path(self, field: Field) -> str:
        return self._paths.get(field.name, field.name)

    def _locate(self, index: int) -> tuple[Path, int]:
        """Return the file with a sample, and the sample's number in it."""
        source = self._source
        return source.locate(index) if isinstance(source, MultiSource) else (source.path, index)

    def _steps(self, epoch: int) -> Iterator[Ints]:
        return (self._numbers[indices] for indices in self.task.batches(epoch))

    # --- the ways --------------------------------------------------------------------------------

    def _by_source(self, epoch: int) -> Iterator[Batch]:
        for numbers in self._steps(epoch):
            samples = [self._source.read(i, i + 1) for i in numbers.tolist()]
            yield concatenate(self._schema, samples)

    def _has_arrays(self, source: Source) -> bool:
        """Whether the fields are arrays of all files, a row per sample."""
        count = 0
        try:
            for path in source.files():
                arrays = [(self._open(path)[self._path(f)], f) for f in self._schema]
                if any((a.shape[1:], a.dtype) != (f.inner, f.dtype) for a, f in arrays):
                    return False
                (rows,) = {int(array.shape[0]) for array, _ in arrays}
                count += rows
        except (OSError, LookupError, ValueError, TypeError, AttributeError):
            return False
        if len(source.files()) > 1:  # scripts open these as they come to them
            self._open.cache_clear()
        return count == len(source)

    def _from_arrays(self, epoch: int) -> Iterator[Batch]:
        fields = [(f.name, self._path(f)) for f in self._schema]
        for numbers in self._steps(epoch):
            rows: dict[str, list[Array]] = {name: [] for name, _ in fields}
            for file, row in map(self._locate, numbers.tolist()):
                arrays = self._open(file)
                for name, path in fields:
                    rows[name].append(arrays[path][row])
            yield {f.name: np.stack(rows[f.name], dtype=f.dtype) for f in self._schema}

    def _from_files(self, epoch: int) -> Iterator[list[Contents]]:
        for numbers in self._steps(epoch):
            yield [
                (i, {name: paths[i].read_bytes() for name, paths in self._files.items()})
                for i in numbers.tolist()
            ]

    def _from_shards(self, epoch: int) -> Iterator[list[Contents]]:
        """Yield the samples of whole shards, of those that hold this rank's part."""
        task, rng = self.task, random.Random(f"{self.task.seed} {epoch}")
        mine: dict[Path, dict[int, int]] = {}  # by shard and by the sample's number in it
        for number in np.array_split(self._numbers, task.world_size)[task.rank].tolist():
            path, index = self._locate(number)
            mine.setdefault(path, {})[index] = number
        shards = [*mine.items()]
        rng.shuffle(shards)
        samples = _shuffled((s for each in shards for s in self._in_shard(*each)), rng)
        while step := [*islice(samples, task.batch_size)]:
            yield step

    def _in_shard(self, path: Path, numbers: Mapping[int, int]) -> Iterator[Contents]:
        key, index, last = "", -1, max(numbers)
        contents: dict[str, bytes] = {}
        with tarfile.open(path, "r|") as archive:
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # or it keeps all
                found = _MEMBER.fullmatch(member.name)
                if not found or not member.isfile() or _META.match(member.name):
                    continue
                if found[1] != key:
                    if index in numbers:
                        yield numbers[index], contents
                    key, index, contents = found[1], index + 1, {}
                    if (name := self.task.reading.keys_as) is not None:
                        contents[name] = os.fsencode(key)
                    if index > last:
                        return
                file = archive.extractfile(member) if index in numbers else None
                if file is not None:
                    contents[found[2].lower()] = file.read()
        if index in numbers:
            yield numbers[index], contents


def _shuffled(samples: Iterator[Contents], rng: random.Random) -> Iterator[Contents]:
    """Yield samples in the order in which they leave a buffer, each from any place in it."""
    buffer: list[Contents] = []
    held = 0
    for sample in samples:
        buffer.append(sample)
        held += sum(map(len, sample[1].values()))
        if len(buffer) > BUFFER or held > ROOM:
            at = rng.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            held -= sum(map(len, buffer[-1][1].values()))
            yield buffer.pop()
    rng.shuffle(buffer)
    yield from buffer


def _column(contents: list[bytes], field: Field) -> Column:
    """Return a field of samples, given its bytes in each."""
    values: Array = np.frombuffer(b"".join(contents), field.dtype).reshape(-1, *field.inner)
    if not field.ragged:
        return values.reshape(len(contents), *field.inner)
    lengths = np.array([len(one) for one in contents], np.int64) // field.row_nbytes
    return Ragged.from_lengths(values, lengths, field.kind)


def _hdf5(path: Path) -> Mapping[str, Any]:
    import h5py

    return _Members(h5py.File(path, "r"))


def _zarr(path: Path) -> Mapping[str, Any]:
    import zarr

    return _Members(zarr.open_group(path, mode="r"))


def _npy(path: Path) -> Mapping[str, Any]:
    return {path.stem: np.load(path, mmap_mode="r")}


class _Members(dict[str, Any]):
    """The arrays of a file or store, opened once."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, path: str) -> Any:
        self[path] = self._root[path]
        return self[path]


_ARRAYS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    "hdf5": _hdf5,
    "numpy": _npy,
    "zarr": _zarr,
}
