"""Batches as a ``tf.data.Dataset``: `dataset`, with static shapes and dtypes.

The reader's threads read; TensorFlow takes the arrays without copying them (``tf.numpy_function``
shares memory that is aligned, as that of the reader is) and holds them as long as a tensor of
them exists. Parsing, shuffling, batching and interleaving in TensorFlow are not needed.

>>> from dsprep.tf import dataset
>>> data = dataset("train.h5", 256, remainder="drop")  # doctest: +SKIP
>>> model.fit(data, epochs=10, shuffle=False)  # doctest: +SKIP

With ``tf.distribute``::

    strategy.distribute_datasets_from_function(
        lambda context: dataset(
            path, 256, remainder="drop", rank=context.input_pipeline_id,
            world_size=context.num_input_pipelines,
        )
    )
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, Column, DType, Ragged, is_extension
from dsprep.errors import MissingExtra, UnsupportedError, UsageError, require
from dsprep.reader.adapters import native
from dsprep.reader.data import Paths
from dsprep.reader.loader import Reader
from dsprep.reader.options import ReaderOptions, at_least, check_names
from dsprep.reader.transforms import transformed

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
    output_signature: Any = None,
    **options: Any,
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` whose elements are batches.

    A batch is a dict of field name to ``tf.Tensor`` of shape ``(n, *shape)``, or to
    ``tf.RaggedTensor``; `bytes`, `str` (UTF-8), ``S`` and ``U`` fields are ``tf.string``. With
    a `remainder` of ``"drop"`` or ``"pad"``, ``n`` is the batch size and known in advance, else it
    is None.

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
    output_signature
        What `transform` or `collate` returns: a structure of ``tf.TensorSpec``. Not needed for
        `dsprep.each`, `pad`, `pack`, `normalise` and `mask_and_scale`, alone or in a list. (In
        transforms TensorFlow has NumPy flush subnormal results of arithmetic to zero, as in its
        own; values are passed on as they are.)
    **options
        All others of `Reader`.

    Raises
    ------
    UnsupportedError
        If TensorFlow has no dtype for a field, and no `output_signature` is given.
    UsageError
        If arguments contradict each other.
    """
    own = ("epoch", "step", "prefetch", "output_signature")
    check_names(options, (*ReaderOptions.__dataclass_fields__, *own))
    readers = _Readers({"path": path, "batch_size": batch_size, **options}, epoch, step)
    reader, step = readers.first, at_least("step", step, 0)
    steps = reader.steps_of(epoch)
    size = None if reader.remainder == "ragged" else batch_size
    if step > steps:
        raise UsageError(f"step is {step}", expected=f"at most {steps}, the steps of an epoch")
    known = transformed(reader.schema, reader.transforms) if output_signature is None else None
    is_known = known is not None or (output_signature is not None and reader.transforms)
    words = "output_signature and a function as transform, or collate, belong together"
    fix = "give both: TensorFlow has to know in advance what the function returns"
    require(is_known, UsageError, words, fix=fix)
    if known is not None:
        batch, varying = known
        output_signature = {n: _signature(n, c, size, varying.get(n)) for n, c in batch.items()}

    def batches() -> Iterator[Any]:
        for batch in readers.loop():
            yield batch if known is None else _plain(batch)
            del batch

    data = tf.data.Dataset.from_generator(batches, output_signature=output_signature)
    if known is not None and any(isinstance(s, tuple) for s in output_signature.values()):
        split = partial(tf.RaggedTensor.from_row_splits, validate=False)
        data = data.map(
            lambda b: {n: split(*c) if isinstance(c, tuple) else c for n, c in b.items()}
        )
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
        words = "TensorFlow takes batches before they are used, so repeats cannot adapt"
        fix = "give repeats as numbers or a function, or use dsprep.Reader"
        require(not hasattr(self.first.repeats, "enough"), UsageError, words, fix=fix)

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
    """Return whether values of a dtype become a tensor."""
    if dtype.names is not None or dtype.subdtype is not None:
        return False
    if dtype.kind in "SU" and not is_extension(dtype):
        return True
    try:
        tf.as_dtype(dtype.newbyteorder("="))
    except TypeError:
        return False
    return True


def _signature(name: str, column: Column, size: int | None, varying: int | None) -> Any:
    """Return the kind of tensor, or of a pair of them, that `_plain` gives for a field."""
    values: Array = column.values if isinstance(column, Ragged) else column
    words = f"TensorFlow has no dtype for field {name}: {values.dtype}"
    fix = "name other fields with fields=, or give a transform= and its output_signature="
    require(takes(values.dtype), UnsupportedError, words, fix=fix)
    is_text = values.dtype.kind in "SU" and not is_extension(values.dtype)
    kind = tf.string if is_text else tf.as_dtype(values.dtype.newbyteorder("="))
    if not isinstance(column, Ragged):
        shape = [size, *values.shape[1:]]
        if varying is not None:
            shape[varying] = None
        return tf.TensorSpec(shape, kind)
    if column.kind != "array":
        return tf.TensorSpec((size,), tf.string)
    offsets = tf.TensorSpec((None if size is None else size + 1,), tf.int64)
    return tf.TensorSpec((None, *values.shape[1:]), kind), offsets


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
