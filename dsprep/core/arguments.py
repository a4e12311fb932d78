"""Keyword arguments of library functions, which are also options of the command line.

Their descriptions here are the help texts of the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from dsprep.formats.options import OpenOptions, WriteOptions


class RunArguments(TypedDict, total=False):
    """Options of the run.

    Attributes
    ----------
    workers
        Threads, one per core and at most 8 by default; or processes of --executor.
    memory : SIZE
        Memory for buffers; a quarter of what is free by default.
    overwrite
        Replace the target once the new one is complete.
    restart
        Discard what an interrupted run left, and start over.
    durable
        Wait for the disk: nothing is lost if the machine crashes.
    executor : KIND
        threads of this process, processes of this machine, ranks of an MPI job (mpi), or workers
        of dask, also those of a scheduler (dask:tcp://host:8786, or dask:FILE); by default mpi
        where mpiexec or srun started several processes, else threads. A task is a file, or 64 MiB
        or more of one.
    """

    workers: int | None
    memory: str | int | None
    overwrite: bool
    restart: bool
    durable: bool
    executor: Executor | None


class ConvertArguments(RunArguments, total=False):
    """Options of the target.

    Attributes
    ----------
    to : FORMAT
        hdf5, lmdb, tfrecord or zarr; by default as the suffix of the target says.
    compress : CODEC[:LEVEL]
        none, gzip, zstd or blosc, as the target allows.
    chunk
        Samples per chunk, for hdf5 and zarr.
    cast : NAME=DTYPE
        Other dtypes of fields; values that do not fit are refused.
    samples : START:STOP
        Only these samples, as in Python: half-open.
    shard_size : SIZE
        Write a directory of files of so many samples (1000), or bytes of values at most (4GiB).
    open_options, write_options
        Everything else about reading and writing.
    """

    to: str | None
    compress: str | None
    chunk: int | None
    cast: Mapping[str, str] | None
    samples: str | None
    shard_size: str | int | None
    open_options: OpenOptions | None
    write_options: WriteOptions | None


class WriteArguments(TypedDict, total=False):
    """Options of `write`, and of `repack` among others."""

    to: str | None
    buffer_size: str | int
    stripe_size: str | int | None
    compress: str | None
    shuffle: int | None
    shard_size: str | int | None
    write_options: WriteOptions | None
    workers: int | None
    memory: str | int | None
    overwrite: bool
    durable: bool


class RepackArguments(WriteArguments, total=False):
    """Options of the target.

    Attributes
    ----------
    to : FORMAT
        hdf5, lmdb, tfrecord or zarr; by default as the suffix of the target says, else hdf5.
    buffer_size : SIZE
        What one read fetches, a group: samples (128), bytes (256MiB) or auto, the default.
    stripe_size : SIZE
        Groups begin at multiples of this size; by default that of the file system.
    compress : CODEC[:LEVEL]
        none, gzip, zstd or blosc, as the target allows; each group is compressed on its own.
    shard_size : SIZE
        Write a directory of files of whole groups: so many samples (1000), or bytes of values at
        most (4GiB).
    subset : WHICH
        Only 'y > 0', FILE.npy, or 'val of train=.9,val=.1'.
    split : SHARES
        Write DST-train, ...: train=0.8,val=0.1,test=0.1. Only train is shuffled and duplicated.
    group_by : FIELD
        Samples of one value of this field go to one split.
    shuffle : SEED
        Shuffle all samples by this seed; by default they keep their order.
    duplicate
        Write each sample so many times.
    ranks
        Processes that will read: warns if there are too few groups, and fits stripes to them.
    epochs
        Epochs of training: warns if groups are too large.
    open_options, write_options
        Everything else about reading and writing.
    """

    subset: Any
    split: str | None
    group_by: str | None
    duplicate: int
    ranks: int | None
    epochs: int | None
    open_options: OpenOptions | None
    restart: bool
    executor: Executor | None


class OrderArguments(TypedDict, total=False):
    """Options of the order, as of the Reader.

    Attributes
    ----------
    seed
        The seed of the order; 0 by default.
    shuffle
        What is shuffled; group by default.
    remainder
        What happens to samples that do not fill a batch on every rank: left out (drop), filled up
        by repeats (pad), or delivered in shorter batches (ragged, the default).
    buffer_size : SIZE
        What is read at a time: samples (4096) or bytes (64MiB); by default one group, or 64MiB
        where there are none.
    buffers_mixed
        Groups that are shuffled together; by default those of --buffer-size.
    fields : NAME
        A field that is read; all if none is named.
    mini_epochs
        Parts of each epoch.
    recompose
        The same parts in every epoch: recompose=False.
    pools
        Caches among which a part is divided.
    subset : WHICH
        Only 'y > 0', FILE.npy, or 'val of train=.9,val=.1'.
    weights : FIELD|FILE.npy
        Draw samples with replacement, each as often as its weight says.
    sidecar : FILE
        The sidecar, if not beside the data.
    """

    seed: int
    shuffle: Literal["group", "global", "none"]
    remainder: Literal["drop", "pad", "ragged"]
    buffer_size: int | str | None
    buffers_mixed: int | None
    fields: Sequence[str]
    mini_epochs: int | None
    repeats: Any
    recompose: bool
    pools: int
    subset: Any
    weights: Any
    sidecar: str | Path | None
