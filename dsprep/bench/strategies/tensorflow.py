"""tf.data: over HDF5 with one sample per read (Lee et al.'s TF and TF-Pre), and over TFRecord."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from dsprep.bench.delays import delay_of
from dsprep.bench.strategies.base import Way, iterated
from dsprep.bench.strategies.samples import Stored
from dsprep.bench.task import Task
from dsprep.core.schema import Array, Column, Field, Ragged, is_extension
from dsprep.errors import MissingExtra, UnsupportedError
from dsprep.formats.options import WriteOptions
from dsprep.formats.tfrecord.example import BYTES, FLOAT
from dsprep.formats.tfrecord.features import is_opaque, plan

SHUFFLED = 4096
"""Records in the shuffle buffer."""

SHUFFLED_NBYTES = 1 << 30
"""Of which there are fewer, if they would take more than this."""

READ_NBYTES = 8 << 20
"""Bytes read from a TFRecord file at a time; TensorFlow's 256 KiB are few."""


def tensorflow() -> Any:
    """Import TensorFlow, without its messages, and keep it from taking the memory of GPUs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtra("TensorFlow is not installed", fix="pip install tensorflow") from error
    with suppress(RuntimeError):  # raised where they are in use already
        tf.config.set_visible_devices([], "GPU")
    return tf


def tensor_type(tf: Any, field: Field) -> Any:
    """Return the `tf.DType` of a field: strings for `bytes` and `str`."""
    if field.kind != "array":
        return tf.string
    dtype = field.dtype
    if dtype.kind in "biufc" or is_extension(dtype):
        try:
            return tf.as_dtype(dtype.newbyteorder("="))
        except TypeError:
            pass
    raise UnsupportedError(
        f"TensorFlow has no dtype for field {field}", fix="leave this strategy or the field out"
    )


def as_column(tensor: Any, field: Field) -> Column:
    """Return a batch's tensor, dense or ragged, as dsprep's batches have it."""
    if field.kind != "array":
        items: list[bytes] = tensor.numpy().tolist()
        joined = np.frombuffer(b"".join(items), np.uint8)
        return Ragged.from_lengths(joined, np.array([*map(len, items)], np.int64), field.kind)
    if not field.ragged:
        dense: Array = tensor.numpy()
        return dense.astype(field.dtype, copy=False)
    values = tensor.values.numpy().astype(field.dtype, copy=False)
    return Ragged(values, tensor.row_splits.numpy(), field.kind)


def _way(task: Task, epoch: Callable[[int], Iterator[Any]]) -> Way:
    """Return a way of reading whose items are dicts of tensors."""

    def size(item: Any) -> int:
        tensor = next(iter(item.values()))
        rows = tensor.row_splits.shape[0] - 1 if hasattr(tensor, "row_splits") else tensor.shape[0]
        return int(rows)

    return Way(epoch, size, lambda item: {f.name: as_column(item[f.name], f) for f in task.schema})


def open_samples(task: Task, resources: ExitStack, *, ahead: bool = False) -> Way:
    """Open TF: one read at a time, nothing ahead; or TF-Pre, with as many ahead as AUTOTUNE says.

    A dataset of shuffled numbers is mapped to samples by a function that reads one of them with
    h5py, and batched. TensorFlow runs such functions under Python's lock, so that reads do not
    overlap each other even on several threads; with prefetching they overlap what the consumer
    does.
    """
    tf, schema = tensorflow(), task.schema
    types = [tensor_type(tf, f) for f in schema]
    import h5py

    file = resources.enter_context(h5py.File(task.path, "r"))
    fields = [Stored(file, f, task) for f in schema]

    def read(index: Any) -> list[Any]:
        """Return a sample's values, as TensorFlow takes them."""
        values: list[Any] = []
        for s in fields:
            value = s.sample(int(index))
            if s.field.kind != "array":
                values.append(value.tobytes())
            else:
                values.append(value.astype(value.dtype.newbyteorder("="), copy=False))
        return values

    def sample(index: Any) -> dict[str, Any]:
        """Return the tensors of a sample; part of the graph."""
        values = tf.numpy_function(read, [index], types)
        return {
            f.name: tf.ensure_shape(v, f.shape if f.kind == "array" else ())
            for f, v in zip(schema, values, strict=True)
        }

    # The graph is made once, as in a program; only the order is another in each epoch.
    order = tf.Variable(np.zeros(0, np.int64), trainable=False, shape=(None,))
    data, auto = tf.data.Dataset, tf.data.AUTOTUNE if ahead else None
    samples = data.range(1).flat_map(lambda _: data.from_tensor_slices(order))
    samples = samples.map(sample, num_parallel_calls=auto)
    varies = any(f.ragged and f.kind == "array" for f in schema)
    batches = (samples.ragged_batch if varies else samples.batch)(task.batch_size)
    batches = batches.prefetch(auto) if ahead else batches

    def epoch(number: int) -> Iterator[Any]:
        order.assign(task.share(number))
        yield from iterated(batches)

    return _way(task, epoch)


def open_records(task: Task, resources: ExitStack) -> Way:
    """Open records as dsprep writes them, which are read as tf.data's guides recommend.

    Records, those of this rank of the one file that all read (``shard``), through a shuffle buffer,
    then batched, parsed a batch at a time, and prefetched. The buffer mixes only what is near in
    the file: tf.data cannot do more without reading at random. How fields are stored is in
    `dsprep.formats.tfrecord.features`. The file is opened by each epoch.

    Raises
    ------
    UnsupportedError
        If TensorFlow cannot hold a field.
    """
    tf, schema = tensorflow(), task.schema
    types = plan(schema, WriteOptions())
    for f in schema:
        tensor_type(tf, f)
        if 0 in f.inner:
            raise UnsupportedError(f"TensorFlow does not parse field {f}, which is empty")

    def feature(field: Field) -> Any:
        """Return how TensorFlow parses a field."""
        if types[field.name] == BYTES:
            return tf.io.FixedLenFeature([], tf.string, "")
        dtype = tf.float32 if types[field.name] == FLOAT else tf.int64
        if field.ragged:
            return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
        return tf.io.FixedLenFeature(field.shape, dtype)

    spec = {f.name: feature(f) for f in schema}

    def parse(records: Any) -> dict[str, Any]:
        """Return a batch of records as tensors; part of the graph."""
        if is_opaque(schema):
            return {schema.names[0]: records}
        parsed = tf.io.parse_example(records, spec)
        as_bits = {f.name for f in schema if f.kind == "array" and types[f.name] == BYTES}
        return {
            f.name: _from_bits(tf, f, parsed[f.name]) if f.name in as_bits else parsed[f.name]
            for f in schema
        }

    auto = tf.data.AUTOTUNE
    seed = np.random.default_rng([task.seed, task.opening]).integers(1 << 31)
    nbytes = max(1, math.ceil(task.path.stat().st_size / max(1, task.samples)))
    buffer = max(1, min(SHUFFLED, SHUFFLED_NBYTES // nbytes))
    records = tf.data.TFRecordDataset(str(task.path), buffer_size=READ_NBYTES)
    if task.world_size > 1:
        records = records.shard(task.world_size, task.rank)
    if task.storage is not None:
        records = _delayed(tf, task, records, max(1, READ_NBYTES // nbytes))
    batches = records.shuffle(buffer, seed=int(seed)).batch(task.batch_size)
    batches = batches.map(parse, num_parallel_calls=auto).prefetch(auto)
    return _way(task, lambda number: iterated(batches))


def _delayed(tf: Any, task: Task, records: Any, count: int) -> Any:
    """Return records of an imitated storage, so many of which come by one read."""
    delay = delay_of(task)

    def late(read: Any) -> Any:
        delay(sum(map(len, read)), 1)
        return read

    reads = records.batch(count)
    reads = reads.map(lambda r: tf.ensure_shape(tf.numpy_function(late, [r], tf.string), [None]))
    return reads.unbatch()


def _from_bits(tf: Any, field: Field, value: Any) -> Any:
    """Return a field of a batch whose elements' bits are in strings."""

    def decoded(text: Any) -> Any:
        target = tensor_type(tf, field)
        little = field.dtype.str[0] != ">"
        signed = {tf.uint32: tf.int32, tf.uint64: tf.int64}.get(target, target)
        elements = tf.io.decode_raw(text, signed, little_endian=little)
        return elements if signed == target else tf.bitcast(elements, target)

    if not field.ragged:
        return tf.reshape(decoded(value), (-1, *field.inner))
    rows = tf.cast(tf.strings.length(value), tf.int64) // field.row_nbytes
    rowwise = tf.reshape(decoded(tf.strings.reduce_join(value, axis=0)), (-1, *field.inner))
    return tf.RaggedTensor.from_row_lengths(rowwise, rows, validate=False)
