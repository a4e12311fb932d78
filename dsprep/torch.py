"""PyTorch tensors: `Batches`, alone or in a DataLoader, on the CPU or ahead on a GPU; `Samples`.

The tensors share memory with what ``preadv`` filled: nothing is copied on the CPU.

>>> from dsprep.torch import Batches
>>> batches = Batches("train.h5", 256, remainder="drop", epochs=10)  # doctest: +SKIP
>>> for epoch in range(10):  # doctest: +SKIP
...     for batch in batches:
...         loss = model(batch["x"], batch["y"])

With ``device="cuda"`` the memory of the reader is page-locked, so that the bytes go from the file
system by ``preadv`` into memory that the GPU fetches from, and the copy of the next batch runs in
a stream of its own while this one is computed. Order of the streams, and what holds memory:

- a batch is delivered once the current stream waits for its copy (an event, on the
  GPU; the program continues);
- its memory on the CPU is held until the event of its copy has happened, its memory on the GPU
  until the stream that uses it is through (``record_stream``);
- at most two copies are under way: a program that runs ahead of its GPU waits for the copies,
  which limits the memory.

Fields of dtypes that PyTorch lacks are refused when `Batches` is made. Big-endian numbers are
swapped (a copy), bfloat16 and float8 of ``ml_dtypes`` are the same of PyTorch, ``S10`` is uint8
with one axis more, `bytes` and `str` (UTF-8) are ragged uint8.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from dsprep.core.schema import Array, Column, DType, Ragged, Schema, is_extension
from dsprep.errors import MissingExtra, UnsupportedError, UsageError, require
from dsprep.reader.adapters import Ahead, B, ReaderLoops, Values, check_fields, mapped, native
from dsprep.reader.data import Paths, absolute, open_data
from dsprep.reader.each import Collate
from dsprep.reader.loader import Reader
from dsprep.reader.memory import in_huge_pages
from dsprep.reader.options import ReaderOptions, check_names
from dsprep.reader.subset import Subset, kept_samples
from dsprep.reader.transforms import Transforms, as_transforms
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.files import names_of

try:
    import torch
    from torch import distributed
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ImportError as error:
    raise MissingExtra("dsprep.torch needs PyTorch", fix="pip install 'dsprep[torch]'") from error

COPIES = 2
"""Copies to a device that are under way at a time."""

_PORTABLE = 1  # cudaHostRegisterPortable: for every context, not that of one device


class Batches(ReaderLoops[B], IterableDataset[B]):
    """Batches of tensors, read by `dsprep.Reader`; each loop runs through the next epoch.

    A batch is a dict of field name to tensor of shape ``(n, *shape)``; ragged fields are
    `dsprep.reader.adapters.Values`. It stays as it is as long as a tensor of it exists. Where a
    transform makes something else of it, type checkers learn so from
    ``Batches[tuple[Tensor, Tensor]](path, 64, transform=...)``.

    There are no workers: the reader's threads read while the program computes, and no batch is
    copied from process to process. For a transform that holds the GIL for long, there is `Samples`
    in a ``DataLoader``.

    Lightning, Accelerate and the Trainer of Hugging Face take it as the loader itself, where each
    rank reads its own part: see `dsprep.lightning` and `dsprep.transformers`.

    Parameters
    ----------
    path, batch_size
        As in `Reader`.
    device
        Where tensors shall be: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
    pin_memory
        Whether the reader's memory is page-locked; None: if `device` is a GPU. On the CPU, keep a
        batch until its copy is done: the memory of one that nobody holds is filled again at once.
    nested
        Ragged fields as nested tensors of layout ``torch.jagged``.
    transform
        As in `Reader`: gets the batch of numpy arrays, in threads; every array in what it
        returns becomes a tensor.
    collate
        As in `Reader`; the values of samples are those of `Samples`: tensors (of no axes for
        numbers), `bytes` and `str`. So what is written for a DataLoader works as it is.
    **options
        All others of `Reader`. Rank and world size come from ``torch.distributed`` if it is
        initialised when they are first used; else see there.

    Attributes
    ----------
    reader
        The `Reader`.
    batch_size, drop_last, prefetch_factor
        What libraries look for in a ``DataLoader``: what ``DataLoader(batches, batch_size=None)``
        has.

    Raises
    ------
    UnsupportedError
        If PyTorch has no dtype for a field, and no transform is given.
    UsageError
        If arguments contradict each other, or there is no such device.
    """

    batch_size, drop_last, prefetch_factor = None, False, None

    def __init__(
        self,
        path: Paths,
        batch_size: int,
        *,
        device: str | torch.device = "cpu",
        pin_memory: bool | None = None,
        nested: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_names(
            options, (*ReaderOptions.__dataclass_fields__, "device", "nested", "pin_memory")
        )
        self._device = _device(device)
        pins = self._device.type == "cuda" if pin_memory is None else pin_memory
        self._pinned = Pinned(self._device) if pins else None
        self._nested = nested
        if (collate := options.get("collate")) is not None:
            options["collate"] = Collate(collate, _tensors)
        self._arguments: dict[str, Any] = {"path": path, "batch_size": batch_size, **options}
        self._is_early = options.get("rank") is None and not _is_initialized()
        # Lightning has started this process: of its variables none states the rank.
        known, env = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"), os.environ
        is_child = self._is_early and all(name in env for name in known) and "RANK" not in env
        self._reader = self._made(**({"rank": 0, "world_size": 1} if is_child else {}))
        if not self._reader.transforms:
            check_fields(self._reader.schema, takes, "PyTorch")

    def _made(self, **alone: int) -> Reader:
        reader = Reader(**{**self._arguments, **alone})
        if self._pinned is not None:
            reader.allocate = self._pinned
        return reader

    @property
    def reader(self) -> Reader:
        """The `Reader`, of this rank as soon as ``torch.distributed`` is initialised."""
        if self._is_early and _is_initialized():
            self._is_early, before = False, self._reader
            ranks = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            if any(getattr(before.rank_info, name) != ranks[name] for name in ranks):
                before.close()
                self._arguments |= ranks
                self._reader = self._made()
                self._reader.load_state_dict(before.state_dict(), other_data=True)
        return self._reader

    @reader.setter
    def reader(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def dataset(self) -> Self:
        """The object itself, of which Accelerate skips batches."""
        return self

    def __iter__(self) -> Iterator[B]:
        """Return the batches of the next epoch, or of what is left of it.

        Raises
        ------
        UsageError
            If workers were to read them.
        """
        words = "batches are read by threads of this process, not by workers"
        fix = "use num_workers=0, which is faster; for a slow transform, take dsprep.torch.Samples"
        require(get_worker_info() is None, UsageError, words, fix=fix)
        return self._noted(self._host() if self._device.type == "cpu" else self._fed())

    def _host(self) -> Generator[Any, None, None]:
        batches = iter(self.reader)
        try:
            for batch in map(self._tensors, batches):
                yield self._finished(batch)
                del batch
        finally:
            batches.close()

    def _fed(self) -> Generator[Any, None, None]:
        feed = Feed(self.reader, self._tensors, Cuda(self._device))
        self._ahead = feed.ahead
        try:
            for batch in feed:
                yield self._finished(batch)
                del batch
        finally:
            feed.close()
            if self._ahead is feed.ahead:  # else another loop has begun after the last batch
                self._ahead = None

    def _tensors(self, batch: Any) -> Any:
        return mapped(_leaf, batch)

    def _finished(self, batch: Any) -> Any:
        return mapped(_nested, batch, (Values,)) if self._nested else batch

    # --- epochs and states -------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self.reader, **super().__getstate__()}

    def __repr__(self) -> str:
        return f"<Batches on {self._device} of {self.reader!r}>"


# --- samples -----------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Samples by their numbers, for a ``DataLoader`` with samplers and workers of its own.

    A sample is a dict of field name to tensor of the field's shape; a ragged field is a tensor of
    shape ``(rows, *inner)``, `bytes` and `str` are what they are called. All the samples of a batch
    are read together (``__getitems__``). With a list of numbers, as from a ``BatchSampler`` under
    ``batch_size=None``, the result is a batch as that of `Batches`, which no worker has to collate.

    `Batches` is better wherever its order serves: it reads a group of hundreds of samples by one
    call instead of each sample by one call or several, needs no workers (which copy every batch
    from process to process), copies ahead to a GPU, and its states are exact. `Samples` is for
    orders that somebody else decides: weighted samplers, curricula, subsets, retrieval.

    Every process opens the files for itself, so it can be pickled, forked and spawned.

    Parameters
    ----------
    path
        The dataset, its sidecar, or an opened one; as in `Reader`.
    fields
        The fields wanted, or the name of one; all when empty.
    subset
        Which samples there are, numbered from 0 in the order of the dataset; as in `Reader`.
    data
        The dataset, if it is not beside the sidecar.
    transform
        Gets a sample, whose values are numpy arrays, `bytes` and `str`; every array in what it
        returns becomes a tensor. None: a sample is as above; a list: one after another.
    **others
        There are none: a `UsageError` names the nearest option.

    Attributes
    ----------
    schema
        The fields.

    Raises
    ------
    MissingError, StaleError
        If there is no sidecar, or the data have changed since it was written.
    UnsupportedError
        If PyTorch has no dtype for a field, and no transform is given.

    Examples
    --------
    >>> samples = Samples("train.h5", fields=["x", "y"])  # doctest: +SKIP
    >>> loader = DataLoader(samples, 256, shuffle=True, num_workers=4)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: Paths | Sidecar,
        *,
        fields: Sequence[str] = (),
        subset: Any = None,
        data: Paths | None = None,
        transform: Transforms = None,
        **others: Any,
    ) -> None:
        if others.keys() & {"batch_size", "shuffle", "num_workers", "sampler"}:
            raise UsageError(
                f"there is no option {min(others)}", fix="give it to the DataLoader of the samples"
            )
        check_names(others, ("fields", "subset", "data", "transform"))
        self._path: Any = path
        if not isinstance(path, Sidecar):
            self._path = [*map(absolute, names_of("path", path))]
        self._data = None if data is None else [*map(absolute, names_of("data", data))]
        self._transforms = as_transforms(transform, of="sample")
        self._stated: bytes | None = None
        self._opened: tuple[int, Sidecar] | None = None
        subset, known = Subset.of(subset), self._sidecar().schema
        self._kept = None if subset is None else kept_samples(subset, self._sidecar())
        chosen = (fields,) if isinstance(fields, str) else fields or known.names
        self.schema = Schema(tuple(known[name] for name in chosen))
        self._names = self.schema.names
        if not self._transforms:
            check_fields(self.schema, takes, "PyTorch")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._sidecar() if self._kept is None else self._kept)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample by its number, or a batch by a list of numbers or a slice.

        Raises
        ------
        IndexError
            If there is no such sample.
        ChangedError
            If the data were written to since they were opened.
        """
        if not hasattr(index, "__index__"):
            fix = "give the DataLoader a batch_size, or a batch_sampler"
            words = "a transform takes one sample, not a batch"
            require(not self._transforms, UsageError, words, fix=fix)
            return mapped(_leaf, self._sidecar().read(self._numbers(index), self._names))
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, which are read together."""
        numbers = self._numbers([*map(operator.index, indices)])
        batch = self._sidecar().read(numbers, self._names)
        if not self._transforms:
            return _apart({name: _tensors(column) for name, column in batch.items()})
        samples: list[Any] = _apart({name: _arrays(column) for name, column in batch.items()})
        for transform in self._transforms:
            samples = [*map(transform, samples)]
        return [mapped(_leaf, sample) for sample in samples]

    def _numbers(self, indices: Any) -> Any:
        """Return which samples of the dataset some of these are."""
        return indices if self._kept is None else self._kept[indices]

    def _sidecar(self) -> Sidecar:
        """Return the dataset, opened by this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            opened = open_data(self._path, self._data)
            facts = replace(opened.content, lineage={}).to_json()
            stated = hashlib.blake2b(json.dumps(facts).encode()).digest()
            is_same, fix = stated == (self._stated or stated), "make Samples anew"
            words = "the sidecar was written again since these samples were first opened"
            require(is_same, UsageError, words, where=opened.path, fix=fix)
            self._stated, self._opened = stated, (os.getpid(), opened)
        return self._opened[1]

    def close(self) -> None:
        """Close all files; reading opens them again."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __repr__(self) -> str:
        return f"<Samples of {', '.join(self._path[:3])}: {len(self)} of {self.schema}>"


def _apart(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the samples whose values are in columns."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _arrays(column: Column) -> list[Any]:
    """Return the values of samples; those without axes are arrays, too."""
    if isinstance(column, Ragged):
        return list(column)
    return [column[i, ...] for i in range(len(column))]


def _tensors(column: Column) -> Sequence[Any]:
    if isinstance(column, Ragged):
        return [_leaf(value) for value in column]
    tensors: Sequence[Any] = tensor(column).unbind()
    return tensors


# --- tensors -----------------------------------------------------------------------------------


def takes(dtype: DType) -> bool:
    """Return whether values of a dtype become a tensor."""
    if is_extension(dtype):
        return isinstance(getattr(torch, dtype.name, None), torch.dtype)
    if dtype.names is not None or dtype.subdtype is not None:
        return False
    return dtype.kind == "S" or dtype.char in "?bBhHiIlLqQefdFD"


def tensor(values: Array) -> Any:
    """Return an array as a tensor that shares its memory where the dtype allows.

    Raises
    ------
    UnsupportedError
        If PyTorch has no such dtype.
    """
    dtype = values.dtype
    if not takes(dtype):
        raise UnsupportedError(f"PyTorch has no dtype for an array of {dtype}")
    values = native(values)
    if not (values.flags.c_contiguous and values.flags.writeable):
        values = np.require(values, requirements=("C", "W"))
    if is_extension(dtype):
        bits = values.view(f"u{dtype.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, dtype.name))
    if dtype.kind == "S":
        flat = values.reshape(-1).view(np.uint8)
        return torch.from_numpy(flat.reshape(*values.shape, dtype.itemsize))
    return torch.from_numpy(values)


def _leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor(value)
    if isinstance(value, Ragged):
        return Values(tensor(value.values), tensor(value.offsets))
    return value


def _nested(value: Any) -> Any:
    if isinstance(value, Values):
        return torch.nested.nested_tensor_from_jagged(value.values, value.offsets)
    return value


def _is_initialized() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


# --- devices -----------------------------------------------------------------------------------


def _device(name: str | torch.device) -> torch.device:
    """Return a device that there is; a GPU with its number."""
    words, expected = f"device is {name!r}", "cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(words, expected=expected) from error
    is_known = device.type in ("cpu", "cuda")
    require(is_known, UsageError, words, expected=expected, fix="copy from the CPU")
    if device.type == "cuda":
        is_there = torch.cuda.is_available()
        require(is_there, UsageError, f"{words}, but PyTorch sees no GPU here")
        count, index = torch.cuda.device_count(), device.index
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        require(device.index < count, UsageError, words, expected=f"one of {count} GPUs")
    return device


class Cuda:
    """A GPU, given with its number, and a stream for copies; tests have a fake one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def copy(self, values: Any) -> Any:
        """Begin to copy a tensor."""
        with torch.cuda.stream(self.stream):
            return values.to(self.device, non_blocking=True)

    def mark(self) -> Any:
        """Return an event of the stream."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def use(self, values: list[Any], event: Any) -> None:
        """Hand tensors over to the current stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for each in values:
            each.record_stream(current)  # else their memory could be filled again too early


class Feed(Iterator[Any]):
    """Batches on a device: one delivered, the copy of the next one under way.

    `convert` makes tensors of batches, `side` is the device, `ahead` the loop through the reader.
    """

    def __init__(self, reader: Reader, convert: Callable[[Any], Any], side: Cuda) -> None:
        self._convert, self._side = convert, side
        self._copying: deque[tuple[Any, Any]] = deque()  # events, and what is copied until then
        self.ahead = Ahead(reader, self._begin)

    def _begin(self, batch: Any) -> tuple[Any, Any]:
        host = self._convert(batch)
        self._wait(COPIES - 1)
        try:
            copy = mapped(self._copy, host)
        finally:  # also a copy that has begun before another one failed needs its memory
            event = self._side.mark()
            self._copying.append((event, host))
        return copy, event

    def _copy(self, value: Any) -> Any:
        return self._side.copy(value) if isinstance(value, torch.Tensor) else value

    def __next__(self) -> Any:
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        batch, event = next(self.ahead)
        tensors: list[Any] = []
        mapped(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, batch)
        self._side.use(tensors, event)
        return batch

    def close(self) -> None:
        """Wait for the copies that are under way, then end the loop."""
        self._wait(0)
        self.ahead.close()

    def _wait(self, seconds: int) -> None:
        """Wait until at most so many copies are under way; only then let go of their memory."""
        while len(self._copying) > seconds:
            self._copying[0][0].synchronize()
            self._copying.popleft()


class Pinned:
    """Gives page-locked memory, which a GPU copies from by itself: `allocate` of a `Reader`.

    The memory is shared with forked children, not copied on write: after a fork, a page that was
    copied would no longer be the one that the GPU knows. The context of `device` is used; for the
    CPU, that of the current GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UsageError("memory can be pinned only where PyTorch sees a GPU")
        self.device = device
        if device.type == "cpu":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def __call__(self, nbytes: int) -> mmap.mmap:
        """Return memory of that size; `UsageError` if it cannot be page-locked."""
        memory = _PinnedMemory(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        in_huge_pages(memory)
        memory.register(self.device)
        return memory


class _PinnedMemory(mmap.mmap):
    """Memory that is unlocked before it is unmapped."""

    locked: tuple[torch.device, int, int] | None = None  # device, address, process

    def register(self, device: torch.device) -> None:
        """Lock it. This may be another thread than the program's, with no GPU chosen."""
        address = int(np.frombuffer(self, np.uint8, 1).ctypes.data)
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), _PORTABLE))
        if code:
            raise UsageError(
                f"{len(self)} bytes of memory cannot be page-locked",
                found=f"CUDA error {code}",
                fix="raise the limit (ulimit -l), take a smaller buffer_size, or pin_memory=False",
            )
        self.locked = device, address, os.getpid()

    def __del__(self) -> None:
        if self.locked is None or sys.is_finalizing():
            return
        device, address, process = self.locked
        if process == os.getpid():  # a forked child has no context
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(address)
