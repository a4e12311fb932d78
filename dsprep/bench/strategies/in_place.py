"""The files as they are, as a plain training script reads them before anything is prepared.

Tar shards are read one after another, shuffled in a buffer; all else sample by sample, by the
library of the format, in files that stay open.
"""

from __future__ import annotations

import os
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep.bench.delays import Delay, delay_of
from dsprep.bench.strategies.base import Way
from dsprep.bench.sums import nbytes_of
from dsprep.bench.task import Task
from dsprep.core.schema import Array, Batch, Column, Field, Ints, Ragged, concatenate
from dsprep.source.dataset import open_dataset
from dsprep.source.many import Dataset

Contents: TypeAlias = tuple[int, Mapping[str, bytes]]
"""The number of a sample, and the bytes of its fields, as they are in files."""

MAX_OPEN = 512
"""Files that stay open, as a training script leaves them: half of what most systems allow."""

BUFFER, ROOM = 1000, 256 << 20
"""Samples, and bytes, of the shuffle buffer at most."""

AHEAD = 1 << 20
"""Bytes of a tar shard that are read at a time."""

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_META = re.compile(r"__[^/]*__(/|$)")


def open_in_place(task: Task, resources: ExitStack) -> Way:
    """Open all files of the dataset as a plain script reads them, shuffled."""
    source, delay = open_dataset(list(task.files), task.reading, through="library"), delay_of(task)
    resources.callback(source.close)
    numbers = np.arange(task.samples) if task.numbers is None else task.numbers
    fields = {f.name: f.name for f in task.schema} | {s.name: s.path for s in task.reading.fields}

    def batch(item: list[Contents]) -> Batch:
        """Return the contents of members of shards as fields."""
        return {f.name: _column([own[fields[f.name]] for _, own in item], f) for f in task.schema}

    if source.format == "webdataset":
        source.close()  # what is read is not to be in its library already
        return Way(partial(_from_shards, task, numbers, source.locate), len, batch)
    if isinstance(source, Dataset):
        source.max_open = MAX_OPEN

    def epoch(number: int) -> Iterator[Batch]:
        for step in task.batches(number):
            samples = []
            for i in numbers[step].tolist():
                samples.append(source.read(i, i + 1))
                delay(nbytes_of(samples[-1]), len(task.schema))
            yield concatenate(task.schema, samples)

    return Way(epoch)


def _from_shards(
    task: Task, numbers: Ints, locate: Callable[[int], tuple[Path, int]], epoch: int
) -> Iterator[list[Contents]]:
    """Yield the samples of whole shards, of those that hold this rank's part."""
    rng = random.Random(f"{task.seed} {epoch}")
    mine: dict[Path, dict[int, int]] = {}  # by shard and by the sample's number in it
    for number in np.array_split(numbers, task.world_size)[task.rank].tolist():
        path, index = locate(number)
        mine.setdefault(path, {})[index] = number
    shards = [*mine.items()]
    rng.shuffle(shards)
    how = task.reading.keys_as, delay_of(task)
    samples = _shuffled((s for each in shards for s in _in_shard(*each, *how)), rng)
    while step := [*islice(samples, task.batch_size)]:
        yield step


def _in_shard(
    path: Path, numbers: Mapping[int, int], keys_as: str | None, delay: Delay
) -> Iterator[Contents]:
    key, index, last = "", -1, max(numbers)
    contents: dict[str, bytes] = {}
    read = 0  # bytes, which come by large reads
    with tarfile.open(path, "r|") as archive:
        for member in archive:
            if member.offset - read >= AHEAD:
                delay(member.offset - read, 1)
                read = member.offset
            archive.members.clear()  # type: ignore[attr-defined]  # or it keeps all
            name = _MEMBER.fullmatch(member.name)
            if not name or not member.isfile() or _META.match(member.name):
                continue
            if name[1] != key:
                if index in numbers:
                    yield numbers[index], contents
                key, index, contents = name[1], index + 1, {}
                if keys_as is not None:
                    contents[keys_as] = os.fsencode(key)
                if index > last:
                    return
            content = archive.extractfile(member) if index in numbers else None
            if content is not None:
                contents[name[2].lower()] = content.read()
    if index in numbers:
        yield numbers[index], contents


def _shuffled(samples: Iterator[Contents], rng: random.Random) -> Iterator[Contents]:
    """Yield samples in the order in which they leave a buffer, each from any place in it."""
    buffer: list[Contents] = []
    nbytes = 0
    for sample in samples:
        buffer.append(sample)
        nbytes += sum(map(len, sample[1].values()))
        if len(buffer) > BUFFER or nbytes > ROOM:
            at = rng.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            nbytes -= sum(map(len, buffer[-1][1].values()))
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
