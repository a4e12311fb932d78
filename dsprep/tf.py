"""Batches as a ``tf.data.Dataset``: `dataset`, with static shapes and dtypes.

The reader's threads read; TensorFlow takes the arrays without copying them (``tf.numpy_function``
shares memory that is aligned, as that of the reader is) and holds them as long as a tensor of
them exists. Parsing, shuffling, batching and interleaving in TensorFlow are not needed.

>>> from dsprep.tf import dataset
>>> data = dataset("train.h5", 256, drop_last=True)  # doctest: +SKIP
>>> model.fit(data, epochs=10, shuffle=False)  # doctest: +SKIP

With ``tf.distribute``::

    strategy.distribute_datasets_from_function(
        lambda context: dataset(
            path, 256, drop_last=True, rank=context.input_pipeline_id,
            world_size=context.num_input_pipelines,
        )
    )
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, Column, DType, Field, Ragged, Schema, is_extension
from dsprep.errors import MissingExtra, UsageError
from dsprep.reader.adapters import check_fields, native
from dsprep.reader.data import Paths
from dsprep.reader.loader import Reader
from dsprep.reader.options import ReaderOptions, check_names
from dsprep.reader.transforms import Transforms

try:
    import tensorflow as tf
except ImportError as error:
    raise MissingExtra("dsprep.tf needs TensorFlow", fix="pip install tensorflow") from error


def dataset(
    path: Paths,
    batch_size: int,
    *,
    epoch: int = 0,
    step: int = 0,
    prefetch: int = 1,
    transform: Transforms = None,
    output_signature: Any = None,
    **options: Any,
) -> Any:
    """Return a ``tf.data.Dataset`` whose elements are batches.

    A batch is a dict of field name to ``tf.Tensor`` of shape ``(n, *shape)``, or to
    ``tf.RaggedTensor``; `bytes`, `str` (UTF-8), ``S`` and ``U`` fields are ``tf.string``. With
    `drop_last` or `pad`, ``n`` is the batch size and known in advance, else it is None.

    Each iteration over the dataset reads one epoch, the next iteration the next epoch, also after
    one that is left early. Iterations at the same time are independent. ``len`` is the number of
    batches of an iteration; none is known where the first one begins at a `step`, and with
    mini-epochs, of which each iteration is one pass.

    Parameters
    ----------
    path, batch_size
        As in `dsprep.Reader`.
    epoch, step
        Where the first iteration begins: a program that was interrupted gives the epoch, and how
        many batches of it were used. (TensorFlow takes batches before they are used, so only the
        program knows.)
    prefetch
        Batches that TensorFlow takes in advance; 0: none.
    transform
        As in `Reader`: gets the batch of numpy arrays, in threads. TensorFlow has these flush
        subnormal results of arithmetic to zero, as in its own; values are passed on as they are.
    output_signature
        What `transform` returns: a structure of ``tf.TensorSpec``.
    **options
        All others of `Reader`.

    Raises
    ------
    UnsupportedError
        If TensorFlow has no dtype for a field, and no transform is given.
    UsageError
        If arguments contradict each other.
    """
    own = ("epoch", "step", "prefetch", "output_signature")
    check_names(options, (*ReaderOptions.__dataclass_fields__, *own))
    options |= {"path": path, "batch_size": batch_size, "transform": transform}
    readers = _Readers(options, epoch, step)
    reader = readers.first
    schema, steps = reader.schema, reader.steps_of(epoch)
    size = None if reader.remainder == "ragged" else batch_size
    if step and not 0 < step <= steps:
        raise UsageError(f"step is {step}", expected=f"at most {steps}, the steps of an epoch")
    signature = _signatures(schema, size, reader.transforms, output_signature)

    def batches() -> Iterator[Any]:
        for batch in readers.loop():
            yield batch if reader.transforms else _plain(batch)
            del batch

    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    if not reader.transforms and schema.ragged:
        data = data.map(lambda batch: {f.name: _joined(f, batch[f.name]) for f in schema})
    if not step and reader.mini_epochs is None:
        data = data.apply(tf.data.experimental.assert_cardinality(steps))
    return data.prefetch(prefetch) if prefetch else data


class _Readers:
    """One reader, `first`, for iterations one after another; others for those at the same time.

    The first iteration begins at `epoch` and `step`.
    """

    def __init__(self, arguments: dict[str, Any], epoch: int, step: int) -> None:
        self._arguments, self._next, self._step = arguments, epoch, step
        self._lock = threading.Lock()
        self._busy = False
        self.first = Reader(**arguments)
        if hasattr(self.first.repeats, "enough"):
            raise UsageError(
                "TensorFlow takes batches before they are used, so repeats cannot adapt",
                fix="give repeats as numbers or a function, or use dsprep.Reader",
            )

    def loop(self) -> Iterator[Batch]:
        """Yield the batches of the next iteration."""
        with self._lock:
            epoch, step, more = self._next, self._step, self._busy
            self._next, self._step, self._busy = epoch + 1, 0, True
        # One more reads for itself alone: what ranks do together belongs to the first.
        among = ("readers_per_node", "stagger", "comm")
        alone = {k: v for k, v in self._arguments.items() if k not in among}
        reader = Reader(**alone) if more else self.first
        try:
            reader.set_epoch(epoch)
            if step:
                state = reader.state_dict()
                state["stages"][-1][2] = step
                reader.load_state_dict(state)
            batches = iter(reader)
            try:
                yield from batches
            finally:
                batches.close()
        finally:
            if more:
                reader.close()
            else:
                self._busy = False


def takes(dtype: DType) -> bool:
    """Whether values of a dtype become a tensor."""
    if dtype.names is not None or dtype.subdtype is not None:
        return False
    if dtype.kind in "SU" and not is_extension(dtype):
        return True
    try:
        tf.as_dtype(dtype.newbyteorder("="))
    except TypeError:
        return False
    return True


def _text(f: Field) -> bool:
    """Whether a field becomes ``tf.string``."""
    return f.kind != "array" or (f.dtype.kind in "SU" and not is_extension(f.dtype))


def _signatures(schema: Schema, size: int | None, transforms: Sequence[Any], given: Any) -> Any:
    """Return the kinds of tensors of a batch: those `given` with a transform, or by the fields."""
    if bool(transforms) != (given is not None):
        raise UsageError(
            "transform, or collate, and output_signature belong together",
            fix="give both: TensorFlow has to know in advance what the function returns",
        )
    if transforms:
        return given
    check_fields(schema, takes, "TensorFlow")
    return {f.name: _signature(f, size) for f in schema}


def _signature(f: Field, size: int | None) -> Any:
    """Return the kind of tensor, or of a pair of them, that `_plain` gives for a field."""
    kind = tf.string if _text(f) else tf.as_dtype(f.dtype.newbyteorder("="))
    if f.kind != "array":
        return tf.TensorSpec((size,), kind)
    if not f.ragged:
        return tf.TensorSpec((size, *f.inner), kind)
    offsets = tf.TensorSpec((None if size is None else size + 1,), tf.int64)
    return tf.TensorSpec((None, *f.inner), kind), offsets


def _plain(batch: Batch) -> dict[str, Any]:
    """Return a batch as arrays that TensorFlow takes."""
    return {name: _column(column) for name, column in batch.items()}


def _column(column: Column) -> Any:
    if not isinstance(column, Ragged):
        return _array(column)
    if column.kind == "array":
        return _array(column.values), column.offsets
    values, ends = column.values.tobytes(), column.offsets.tolist()
    out = np.empty(len(column), object)
    out[:] = [values[a:b] for a, b in itertools.pairwise(ends)]
    return out


def _array(values: Array) -> Array:
    if is_extension(values.dtype) or values.dtype.kind not in "SU":
        return native(values)
    if values.dtype.kind == "U":
        values = np.char.encode(values, "utf-8", "surrogateescape")
    return values.astype(object)


def _joined(f: Field, column: Any) -> Any:
    """Return a field as a tensor, of its values and offsets if it is ragged."""
    if not f.ragged or f.kind != "array":
        return column
    values, offsets = column
    return tf.RaggedTensor.from_row_splits(values, offsets, validate=False)
