"""tf.data over TFRecord, as its guides recommend.

Records, those of this rank of the one file that all read (``shard``), through a shuffle buffer,
then batched, parsed a batch at a time, and prefetched. The buffer mixes only what is near in the
file: tf.data cannot do more without reading at random.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dsprep.bench.strategies.tf_samples import TensorFlow, tensor_type, tensorflow
from dsprep.core.schema import Field
from dsprep.errors import UnsupportedError
from dsprep.formats.base import WriteOptions
from dsprep.formats.tfrecord.example import BYTES, FLOAT
from dsprep.formats.tfrecord.features import is_opaque, plan

SHUFFLED = 4096
"""Records in the shuffle buffer."""

SHUFFLED_NBYTES = 1 << 30
"""Of which there are fewer, if they would take more than this."""

READ_NBYTES = 8 << 20
"""What is read from the file at a time; TensorFlow's 256 KiB are few."""


class TfRecords(TensorFlow):
    """Records as dsprep writes them: see `dsprep.formats.tfrecord.features`."""

    _opened = 0

    def open(self) -> None:
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
        found = self._tf.io.parse_example(records, self._spec)
        return {f.name: self._value(f, found[f.name]) for f in self.task.schema}

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
        wanted = tensor_type(tf, field)
        little = field.dtype.str[0] != ">"
        signed = {tf.uint32: tf.int32, tf.uint64: tf.int64}.get(wanted, wanted)
        found = tf.io.decode_raw(text, signed, little_endian=little)
        return found if signed == wanted else tf.bitcast(found, wanted)

    def _data(self) -> Any:
        """Return the dataset of batches, in another order each time that it is iterated."""
        auto, task = self._tf.data.AUTOTUNE, self.task
        self._opened += 1
        seed = np.random.default_rng([task.seed, self._opened]).integers(1 << 31)
        nbytes = max(1, math.ceil(task.path.stat().st_size / max(1, task.samples)))
        buffer = max(1, min(SHUFFLED, SHUFFLED_NBYTES // nbytes))
        records = self._tf.data.TFRecordDataset(str(task.path), buffer_size=READ_NBYTES)
        if task.world_size > 1:
            records = records.shard(task.world_size, task.rank)
        batches = records.shuffle(buffer, seed=int(seed)).batch(task.batch_size)
        return batches.map(self._parse, num_parallel_calls=auto).prefetch(auto)
