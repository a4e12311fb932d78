"""Batches stay as they are while they are held; memory, files and threads come back."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import dataset, epochs, random_batch
from test_reader import keys

import dsprep
from dsprep.core.schema import Batch, Field, Schema
from dsprep.reader.memory import PAGE, Pool, Stopped, anonymous

COUNT = 120
LARGE = Schema(
    (
        Field("x", np.dtype("<f4"), (300,)),
        Field("y", np.dtype("<i8")),
        Field("v", np.dtype("<i2"), (None, 3)),
    )
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[Path, Batch]:
    batch = random_batch(LARGE, COUNT, seed=1, longest=40)
    return dataset(tmp_path_factory.mktemp("data"), "hdf5", LARGE, batch)


def threads() -> int:
    return sum(t.name.startswith("dsprep") for t in threading.enumerate())


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def blocks_at_home(reader: dsprep.Reader) -> tuple[int, int]:
    """Blocks that nobody holds, and blocks made, once the loop is over."""
    reader._running = None
    gc.collect()
    free = made = 0
    for pool in (reader._pools.blocks, *reader._pools.values.values()):
        pool._collect()
        free, made = free + len(pool._free), made + pool._made
    return free, made


def test_a_view_keeps_its_batch(data):
    """What numpy, the buffer protocol and DLPack make of an array holds its memory, too."""
    path, _ = data

    views_of: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda a: a[1:2, 5:9],
        lambda a: np.asarray(memoryview(a)[1:2])[:, 5:9],
        lambda a: np.from_dlpack(a)[1:2, 5:9],
        lambda a: a.view("u4")[1:2, 5:9].view("f4").reshape(2, 2).T.reshape(1, 4, order="F"),
    ]
    for kept in views_of:
        with dsprep.Reader(path, 3, buffer_size=20, buffers=1, epochs=4) as reader:
            views, copies = [], []
            for batch in epochs(reader, 4):
                views.append(kept(batch["x"]))
                copies.append(batch["x"][1:2, 5:9].copy())
                if len(views) > 30:
                    del views[::2], copies[::2]
            del batch
            for view, copy in zip(views, copies, strict=True):
                assert view.tobytes() == copy.tobytes()
            del view, views
            free, made = blocks_at_home(reader)
            assert free == made


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(draws=st.data())
def test_any_pattern_of_holding(draws, data):
    """Some batches are kept, some dropped, in any order; collections come at any time."""
    path, _ = data
    options: dict[str, Any] = {
        "batch_size": draws.draw(st.sampled_from([1, 4, 9, 30, 130])),
        "buffer_size": draws.draw(st.sampled_from([1, 10, 33, 120])),
        "buffers": draws.draw(st.integers(1, 3)),
        "io_threads": draws.draw(st.integers(1, 2)),
        "epochs": 2,
        "seed": draws.draw(st.integers(0, 3)),
    }
    held: list[tuple[Any, list[bytes]]] = []
    with dsprep.Reader(path, **options) as reader:
        for batch in epochs(reader, 2):
            action = draws.draw(st.integers(0, 5))
            if action <= 1:
                held.append((batch, keys(batch, LARGE)))
            elif action == 2 and held:
                found, known = held.pop(draws.draw(st.integers(0, len(held) - 1)))
                assert keys(found, LARGE) == known
                del found
            elif action == 3:
                gc.collect()
        del batch
        for found, known in held:
            assert keys(found, LARGE) == known
        held.clear()
        found = None
        free, made = blocks_at_home(reader)
        assert free == made


def test_memory_is_taken_once(data):
    """Nothing is allocated in the middle of a loop, nor again from loop to loop."""
    taken: list[int] = []

    def counted(nbytes: int) -> Any:
        taken.append(nbytes)
        return anonymous(nbytes)

    options: dict[str, Any] = {"fields": ("x", "y"), "buffer_size": 30}
    for buffers in (1, 2, 3):
        taken.clear()
        with dsprep.Reader(data[0], 10, buffers=buffers, epochs=20, **options) as reader:
            reader.allocate = counted
            for batch in epochs(reader, 20):
                del batch
        assert len(taken) == 1
    with dsprep.Reader(data[0], 10, **options) as reader:
        reader.allocate = counted
        taken.clear()
        for _ in range(20):
            for k, batch in enumerate(reader):
                del batch
                if k == 5:
                    break
            list(reader)
    assert sum(taken) < 20 * 120 * 1200  # what is held at once may come on top, once an epoch


def test_many_epochs_leave_nothing_behind(tmp_path):
    schema = Schema((Field("x", np.dtype("<f4"), (3,)), Field("y", np.dtype("u1"))))
    path = dataset(tmp_path, "hdf5", schema, 8)[0]
    with dsprep.Reader(path, 4, epochs=1) as reader:
        for _ in range(30):
            list(reader)
        gc.collect()
        before = threads(), fds()
        tracemalloc.start(1)
        try:
            for k in range(120):
                for batch in reader:
                    del batch
                    if k % 7 == 0:
                        break
                if k == 50:
                    gc.collect()
                    small = tracemalloc.get_traced_memory()[0]
            gc.collect()
            large = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert (threads(), fds()) == before
        assert large - small < 1 << 18
    with dsprep.Reader(path, 8, epochs=1010) as reader:
        assert sum(1 for _ in epochs(reader, 1010)) == 1010
        assert threads() == 0
        assert len(reader.stats) == 1000
    assert fds() <= before[1]


# --- the pool alone --------------------------------------------------------------------------


def test_a_pool_never_lends_twice():
    pool = Pool(100, 3)
    held = [pool.take(0, lambda: False) for _ in range(3)]
    assert len({b.address for b, _ in held}) == 3
    assert all(b.address % PAGE == 0 and b.nbytes >= 100 for b, _ in held)
    extra = pool.take(0, lambda: True)  # all are held: one more, for once
    assert extra[0].address not in {b.address for b, _ in held}
    del extra
    address = held[1][0].address
    del held[1]
    assert pool.take(0, lambda: False)[0].address == address
    large = [pool.take(3 * PAGE, lambda: True) for _ in range(2)]
    assert all(b.nbytes >= 3 * PAGE and len(a) >= 3 * PAGE for b, a in large)
    pool.stop()
    with pytest.raises(Stopped):
        pool.take(0, lambda: True)


def test_a_closed_reader_holds_nothing(data, tmp_path):
    """No file and no memory, without a collection, however its loops ended."""
    path = tmp_path / "out.h5"
    dsprep.repack(data[0], path, buffer_size=20, durable=False)
    taken: list[weakref.ref[Any]] = []

    def noted(nbytes: int) -> Any:
        memory = anonymous(nbytes)
        taken.append(weakref.ref(memory))
        return memory

    gc.collect()
    gc.disable()
    try:
        before = fds()
        for engine in ("buffered", "direct"):
            for transform in (None, len):
                options: dict[str, Any] = {"engine": engine, "transform": transform}
                reader = dsprep.Reader(path, 7, epochs=3, **options)
                reader.allocate = noted
                if transform is None:
                    list(reader)
                else:
                    for _ in reader:
                        break
                    loop = iter(reader)
                    next(loop)
                    del loop
                reader.close()
                assert fds() == before
                assert [memory() for memory in taken] == [None] * len(taken)
                gone = weakref.ref(reader)
                del reader
                assert gone() is None
    finally:
        gc.enable()
