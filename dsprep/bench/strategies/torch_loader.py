"""torch's DataLoader over h5py: a map-style dataset, read sample by sample in worker processes.

As the usual advice goes: every worker opens the file for itself at its first sample, workers stay
from epoch to epoch, prefetching and collating are the default. The workers are started when the
strategy is opened, by an epoch of no batches, so that what is measured is reading.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from dsprep.bench.strategies.base import Way, iterated
from dsprep.bench.strategies.samples import Stored, as_field
from dsprep.bench.task import Task
from dsprep.core.schema import Array, Batch, DType, Ragged

Sample = dict[str, Any]


class Samples:
    """The map-style dataset: a sample is a dict of arrays, of which torch makes tensors.

    What torch has no dtype for is uint8, with an axis more: the same bits.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._fields: list[Stored] | None = None

    def __len__(self) -> int:
        return self._task.samples

    def __getitem__(self, index: int) -> Sample:
        if self._fields is None:
            import h5py

            file = h5py.File(self._task.path, "r")  # open until the worker ends
            self._fields = [Stored(file, f, self._task) for f in self._task.schema]
            self._bits = {f.name for f in self._task.schema if not known(f.dtype)}
        sample = {s.field.name: s.sample(index) for s in self._fields}
        for name in self._bits:
            sample[name] = bits(sample[name])
        return sample


def known(dtype: DType) -> bool:
    """Return whether torch has this dtype."""
    import torch

    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def bits(array: Array) -> Array:
    """Return the bytes of an array: uint8, with an axis more."""
    shape = (*array.shape, array.dtype.itemsize)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(shape)


def start(worker: int = 0) -> None:
    """Import h5py, as a program does at its top: workers that are forked have it already."""
    import_module("h5py")


def collate(samples: Sequence[Sample], ragged: frozenset[str]) -> Sample:
    """Return a batch: made by torch's own function, but for `ragged` fields, which are joined."""
    import torch
    from torch.utils.data import default_collate

    batch: Sample = {}
    for name in samples[0]:
        values = [s[name] for s in samples]
        if name in ragged:
            lengths = torch.tensor([len(v) for v in values], dtype=torch.int64)
            batch[name] = torch.from_numpy(np.concatenate(values)), lengths
        else:
            batch[name] = default_collate(values)
    return batch


def open_torch(task: Task, resources: ExitStack) -> Way:
    """Open a DataLoader with ``threads`` workers, and start them."""
    from torch.utils.data import DataLoader

    start()
    order: list[int] = []
    with warnings.catch_warnings():  # how many workers are wise is for the user to find out
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader = DataLoader(
            Samples(task),
            task.batch_size,
            sampler=order,
            num_workers=task.threads,
            collate_fn=partial(collate, ragged=frozenset(f.name for f in task.schema if f.ragged)),
            worker_init_fn=start,
            persistent_workers=True,
        )
        for _ in loader:
            pass

    def epoch(number: int) -> Iterator[Any]:
        order[:] = task.share(number).tolist()
        yield from iterated(loader)

    def size(item: Any) -> int:
        column = next(iter(item.values()))
        return len(column[1] if isinstance(column, tuple) else column)

    def batch(item: Any) -> Batch:
        """Return the tensors as arrays; nothing is copied."""
        columns: Batch = {}
        for f in task.schema:
            column = item[f.name]
            tensor, lengths = column if isinstance(column, tuple) else (column, None)
            values = as_field(tensor.numpy(), f, (len(tensor), *f.inner))
            columns[f.name] = (
                values if lengths is None else Ragged.from_lengths(values, lengths.numpy(), f.kind)
            )
        return columns

    return Way(epoch, size, batch)
