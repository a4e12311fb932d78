"""tf.data: over HDF5 with one sample per read (Lee et al.'s TF and TF-Pre), and over TFRecord."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import numpy as np

from dsprep.bench.strategies.base import Loader
from dsprep.bench.strategies.samples import Stored
from dsprep.core.schema import Array, Batch, Column, Field, Ragged, is_extension
from dsprep.errors import MissingExtra, UnsupportedError
from dsprep.formats.options import WriteOptions
from dsprep.formats.tfrecord.example import BYTES, FLOAT
from dsprep.formats.tfrecord.features import is_opaque, plan

SHUFFLED = 4096
"""Records in the shuffle buffer."""

SHUFFLED_NBYTES = 1 << 30
"""Of which there are fewer, if they would take more than this."""

READ_NBYTES = 8 << 20
"""What is read from a TFRecord file at a time; TensorFlow's 256 KiB are few."""


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


class TensorFlow(Loader):
    """What is common to ways of reading by tf.data: items are dicts of tensors."""

    def size(self, item: Any) -> int:
        """Return the samples of a batch of tensors."""
        tensor = next(iter(item.values()))
        rows = tensor.row_splits.shape[0] - 1 if hasattr(tensor, "row_splits") else tensor.shape[0]
        return int(rows)

    def batch(self, item: Any) -> Batch:
        """Return the tensors as arrays."""
        return {f.name: as_column(item[f.name], f) for f in self.task.schema}


class TfSamples(TensorFlow):
    """TF: one read at a time, nothing ahead.

    A dataset of shuffled numbers is mapped to samples by a function that reads one of them with
    h5py, and batched. TensorFlow runs such functions under Python's lock, so that reads do not
    overlap each other even on several threads; with prefetching they overlap what the consumer
    does.
    """

    ahead: ClassVar[bool] = False

    def prepare(self, resources: ExitStack) -> None:
        """Open the file and its datasets."""
        self._tf = tensorflow()
        self._types = [tensor_type(self._tf, f) for f in self.task.schema]
        import h5py

        file = resources.enter_context(h5py.File(self.task.path, "r"))
        self._fields = tuple(Stored(file, f, self.task) for f in self.task.schema)
        # The graph is made once, as in a program; only the order is another in each epoch.
        self._order = self._tf.Variable(np.zeros(0, np.int64), trainable=False, shape=(None,))
        self.loader = self._data()

    def _read(self, index: Any) -> list[Any]:
        """Return a sample's values, as TensorFlow takes them."""
        values: list[Any] = []
        for s in self._fields:
            value = s.sample(int(index))
            if s.field.kind != "array":
                values.append(value.tobytes())
            else:
                values.append(value.astype(value.dtype.newbyteorder("="), copy=False))
        return values

    def _sample(self, index: Any) -> dict[str, Any]:
        """Return the tensors of a sample; part of the graph."""
        values = self._tf.numpy_function(self._read, [index], self._types)
        return {
            f.name: self._tf.ensure_shape(v, f.shape if f.kind == "array" else ())
            for f, v in zip(self.task.schema, values, strict=True)
        }

    def _data(self) -> Any:
        """Return the dataset of batches, of the samples that `_order` names when it is iterated."""
        data = self._tf.data.Dataset
        auto = self._tf.data.AUTOTUNE if self.ahead else None
        order = data.range(1).flat_map(lambda _: data.from_tensor_slices(self._order))
        samples = order.map(self._sample, num_parallel_calls=auto)
        varies = any(f.ragged and f.kind == "array" for f in self.task.schema)
        batches = (samples.ragged_batch if varies else samples.batch)(self.task.batch_size)
        return batches.prefetch(auto) if self.ahead else batches

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's tensors, shuffled."""
        self._order.assign(self.task.share(number))
        return super().epoch(number)


class TfPrefetch(TfSamples):
    """TF-Pre: with as many calls and batches ahead as AUTOTUNE finds best."""

    ahead: ClassVar[bool] = True


class TfRecords(TensorFlow):
    """Records as dsprep writes them, read as tf.data's guides recommend.

    Records, those of this rank of the one file that all read (``shard``), through a shuffle buffer,
    then batched, parsed a batch at a time, and prefetched. The buffer mixes only what is near in
    the file: tf.data cannot do more without reading at random. How fields are stored is in
    `dsprep.formats.tfrecord.features`.
    """

    def prepare(self, resources: ExitStack) -> None:
        """Find out how the fields are parsed; the file is opened by each epoch.

        Raises
        ------
        UnsupportedError
            If TensorFlow cannot hold a field.
        """
        self._tf = tensorflow()
        schema = self.task.schema
        self._types = plan(schema, WriteOptions())
        for f in schema:
            tensor_type(self._tf, f)
            if 0 in f.inner:
                raise UnsupportedError(f"TensorFlow does not parse field {f}, which is empty")
        self._spec = {f.name: self._feature(f) for f in schema}
        self.loader = self._data()

    def _feature(self, field: Field) -> Any:
        """Return how TensorFlow parses a field."""
        io = self._tf.io
        if self._types[field.name] == BYTES:
            return io.FixedLenFeature([], self._tf.string, "")
        dtype = self._tf.float32 if self._types[field.name] == FLOAT else self._tf.int64
        if field.ragged:
            return io.RaggedFeature(dtype, row_splits_dtype=self._tf.int64)
        return io.FixedLenFeature(field.shape, dtype)

    def _parse(self, records: Any) -> dict[str, Any]:
        """Return a batch of records as tensors; part of the graph."""
        if is_opaque(self.task.schema):
            return {self.task.schema.names[0]: records}
        parsed = self._tf.io.parse_example(records, self._spec)
        return {f.name: self._value(f, parsed[f.name]) for f in self.task.schema}

    def _value(self, field: Field, value: Any) -> Any:
        """Return a field of a batch from what was parsed."""
        tf = self._tf
        if field.kind != "array" or self._types[field.name] != BYTES:
            return value
        if not field.ragged:
            return tf.reshape(self._decoded(field, value), (-1, *field.inner))
        rows = tf.cast(tf.strings.length(value), tf.int64) // field.row_nbytes
        joined = tf.strings.reduce_join(value, axis=0)
        rowwise = tf.reshape(self._decoded(field, joined), (-1, *field.inner))
        return tf.RaggedTensor.from_row_lengths(rowwise, rows, validate=False)

    def _decoded(self, field: Field, text: Any) -> Any:
        """Return the elements whose bits are in strings."""
        tf = self._tf
        target = tensor_type(tf, field)
        little = field.dtype.str[0] != ">"
        signed = {tf.uint32: tf.int32, tf.uint64: tf.int64}.get(target, target)
        decoded = tf.io.decode_raw(text, signed, little_endian=little)
        return decoded if signed == target else tf.bitcast(decoded, target)

    def _data(self) -> Any:
        """Return the dataset of batches, in another order each time that it is iterated."""
        auto, task = self._tf.data.AUTOTUNE, self.task
        seed = np.random.default_rng([task.seed, self.opened]).integers(1 << 31)
        nbytes = max(1, math.ceil(task.path.stat().st_size / max(1, task.samples)))
        buffer = max(1, min(SHUFFLED, SHUFFLED_NBYTES // nbytes))
        records = self._tf.data.TFRecordDataset(str(task.path), buffer_size=READ_NBYTES)
        if task.world_size > 1:
            records = records.shard(task.world_size, task.rank)
        batches = records.shuffle(buffer, seed=int(seed)).batch(task.batch_size)
        return batches.map(self._parse, num_parallel_calls=auto).prefetch(auto)
