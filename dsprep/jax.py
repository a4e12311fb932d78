"""Batches as JAX arrays: `Batches`, put on the devices while the batch before is computed.

>>> from dsprep.jax import Batches
>>> batches = Batches("train.h5", 256, remainder="drop")  # doctest: +SKIP
>>> for batch in batches:  # doctest: +SKIP
...     state = step(state, batch["x"], batch["y"])

Over all devices of all processes, each of which reads its part of the global batch::

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    Batches(path, 256, remainder="drop", sharding=sharding)

Memory: on the CPU, JAX uses the memory that ``preadv`` filled, without a copy, and holds it as
long as the array exists; on other devices until the copy is done. Either way the reader fills it
again only then.

Dtypes: without ``jax_enable_x64`` JAX has no 64-bit types. float64 becomes float32, complex128
complex64, as JAX does it; integers become 32-bit ones, and what does not fit is an error, not
another number. Big-endian numbers are swapped (a copy). Text and structured dtypes are refused.
Ragged fields are `dsprep.reader.adapters.Values`, whose length differs from batch to batch, so that
a jitted function is compiled again and again: pad them in a `transform`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from dsprep.core.schema import Array, DType, Ragged, is_extension
from dsprep.errors import MissingExtra, UnsupportedError, UsageError, require
from dsprep.reader.adapters import Ahead, B, ReaderLoops, Values, check_fields, mapped, native
from dsprep.reader.data import Paths
from dsprep.reader.loader import Reader
from dsprep.reader.options import ReaderOptions, check_names

try:
    import jax
except ImportError as error:
    raise MissingExtra("dsprep.jax needs JAX", fix="pip install 'dsprep[jax]'") from error


class Batches(ReaderLoops[B]):
    """Batches of JAX arrays, read by `dsprep.Reader`; each loop runs through the next epoch.

    A batch is a dict of field name to ``jax.Array`` of shape ``(n, *shape)``, or
    ``(n * world_size, *shape)`` if they are sharded over processes. The transfer of a batch is
    started when the batch before it is delivered.

    Parameters
    ----------
    path, batch_size
        As in `Reader`.
    sharding
        How arrays are placed: a ``jax.sharding.Sharding``, or a device, for all fields, or one by
        name. A sharding over several processes makes one global array of the parts that
        the processes read; then each of them needs its own rank, and all batches the same size.
        None: the default device.
    transform
        As in `Reader`: gets the batch of numpy arrays, in threads; every array in what it
        returns becomes a JAX array.
    **options
        All others of `Reader`. Rank and world size are those of JAX's processes if there are
        several, else as there.

    Attributes
    ----------
    reader
        The `Reader`.

    Raises
    ------
    UnsupportedError
        If JAX has no dtype for a field, and no transform is given.
    UsageError
        If arguments contradict each other.
    """

    def __init__(
        self,
        path: Paths,
        batch_size: int,
        *,
        sharding: Any = None,
        **options: Any,
    ) -> None:
        check_names(options, (*ReaderOptions.__dataclass_fields__, "sharding"))
        if options.get("rank") is None is options.get("world_size") and jax.process_count() > 1:
            options["rank"], options["world_size"] = jax.process_index(), jax.process_count()
        self.reader = Reader(path, batch_size, **options)
        self._sharding = sharding
        if not self.reader.transforms:
            check_fields(self.reader.schema, takes, "JAX")
        kinds = sharding.values() if isinstance(sharding, Mapping) else [sharding]
        kinds = [s for s in kinds if isinstance(s, jax.sharding.Sharding)]
        is_global = not all(s.is_fully_addressable for s in kinds)  # beyond this process
        words = "arrays over several processes need batches of the same size"
        fix = 'give remainder="drop" or remainder="pad"'
        is_even = self.reader.remainder != "ragged" or not is_global
        require(is_even, UsageError, words, fix=fix)

    def __iter__(self) -> Iterator[B]:
        """Return the batches of the next epoch, or of what is left of it."""
        return self._noted(self._loop())

    def _loop(self) -> Generator[Any, None, None]:
        ahead = self._ahead = Ahead(self.reader, self._put)
        try:
            for batch in ahead:
                yield batch
                del batch
        finally:
            ahead.close()
            if self._ahead is ahead:  # else another loop has begun after the last batch of this one
                self._ahead = None

    def _put(self, batch: Any) -> Any:
        """Begin to transfer a batch."""
        if isinstance(self._sharding, Mapping):
            if not isinstance(batch, Mapping) or set(batch) - set(self._sharding):
                raise UsageError(
                    "sharding does not name every field of a batch",
                    expected=", ".join(batch) if isinstance(batch, Mapping) else "a dict",
                    found=", ".join(self._sharding),
                )
            kinds = self._sharding
            return {k: mapped(partial(put, sharding=kinds[k]), v) for k, v in batch.items()}
        return mapped(partial(put, sharding=self._sharding), batch)

    def __repr__(self) -> str:
        return f"<Batches in JAX of {self.reader!r}>"


def takes(dtype: DType) -> bool:
    """Return whether values of a dtype become a JAX array."""
    if is_extension(dtype):
        return hasattr(jax.numpy, dtype.name)
    if dtype.names is not None or dtype.subdtype is not None:
        return False
    return dtype.char in "?bBhHiIlLqQefdFD"


def put(value: Any, sharding: Any = None) -> Any:
    """Begin to transfer an array, or a `Ragged` as `Values`; other values are returned.

    Raises
    ------
    UnsupportedError
        If JAX has no such dtype.
    UsageError
        If an integer does not fit into 32 bits, and JAX has no more; if it is ragged and shall
        be shared out among devices.
    """
    if isinstance(value, Ragged):
        if isinstance(sharding, jax.sharding.Sharding) and len(sharding.device_set) > 1:
            raise UsageError(
                "a ragged field cannot be shared out among devices",
                fix="pad it in a transform=, or name other fields with fields=",
            )
        return Values(put(value.values, sharding), put(value.offsets, sharding))
    if not isinstance(value, np.ndarray):
        return value
    if not takes(value.dtype):
        raise UnsupportedError(f"JAX has no dtype for an array of {value.dtype}")
    values = _narrow(native(value))
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.make_array_from_process_local_data(sharding, values)
    return jax.device_put(values, sharding)


def _narrow(values: Array) -> Array:
    """Return values of a dtype that JAX has now, each the same or rounded as JAX does it."""
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    if dtype == values.dtype:
        return values
    if values.dtype.kind in "iu" and values.size:
        low, high = int(values.min()), int(values.max())
        info = np.iinfo(dtype)
        if low < info.min or high > info.max:
            raise UsageError(
                f"{low if low < info.min else high} does not fit into {dtype}",
                fix="jax.config.update('jax_enable_x64', True), or another dtype by transform=",
            )
    return values.astype(dtype)
