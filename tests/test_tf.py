"""Batches through ``tf.data``: the same values, static shapes, memory shared."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from adapter_data import COUNT, MIXED, PLAIN, made
from support import DTYPES, epochs, random_array, raw

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import UnsupportedError, UsageError

tf = pytest.importorskip("tensorflow")

from dsprep.tf import _array, dataset, takes  # noqa: E402

ALONE = {"rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return made(tmp_path_factory.mktemp("mixed"), MIXED)


def labels(data):
    return [batch["label"].numpy().tolist() for batch in data]


def test_every_value_arrives(mixed):
    path, expected = mixed
    data = dataset(path, 8, **ALONE)
    assert isinstance(data, tf.data.Dataset)
    assert data.element_spec["points"] == tf.RaggedTensorSpec((None, None, 3), tf.int16, 1)
    seen = []
    for batch in data:
        for i, sample in enumerate(batch["label"].numpy().tolist()):
            seen.append(sample)
            assert raw(batch["image"][i].numpy()) == raw(expected["image"][sample])
            assert batch["id"][i].numpy().tolist() == expected["id"][sample].tolist()
            assert raw(batch["points"][i].numpy()) == raw(expected["points"][sample])
            assert batch["name"][i].numpy().decode() == expected["name"][sample]
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("policy", [{"drop_last": True}, {"pad": True}])
def test_shapes_are_static(plain, policy):
    data = dataset(plain[0], 8, **policy, **ALONE)
    assert data.element_spec == {
        "x": tf.TensorSpec((8, 6, 3), tf.float32),
        "label": tf.TensorSpec((8,), tf.int64),
    }
    assert int(data.cardinality()) == len(list(data))
    assert dataset(plain[0], 8, **ALONE).element_spec["x"].shape.as_list() == [None, 6, 3]


def test_ragged_shapes_are_as_static_as_they_can_be(mixed):
    data = dataset(mixed[0], 8, drop_last=True, **ALONE)
    assert data.element_spec["points"].shape.as_list() == [8, None, 3]
    assert data.element_spec["name"] == tf.TensorSpec((8,), tf.string)
    assert len(list(data)) == 12


def test_each_iteration_is_an_epoch_in_the_order_of_the_reader(plain):
    with dsprep.Reader(plain[0], 8, seed=3, epochs=4, **ALONE) as reader:
        expected = [b["label"].tolist() for b in epochs(reader, 4)]
    data = dataset(plain[0], 8, seed=3, **ALONE)
    assert labels(data) == expected[:13]
    assert labels(data.repeat(2)) == expected[13:39]
    resumed = dataset(plain[0], 8, seed=3, epoch=2, step=5, **ALONE)
    assert labels(resumed) == expected[31:39]
    assert labels(resumed) == expected[39:]
    several = dataset(plain[0], 8, seed=3, epochs=2, **ALONE)
    assert len(several) == 13
    assert [labels(several), labels(several)] == [expected[:13], expected[13:26]]


def test_batches_share_memory_and_stay_as_they_are(plain):
    path, expected = plain
    places = []

    def note(batch):
        places.append(batch["x"].ctypes.data)
        return batch

    spec = dataset(path, 8, **ALONE).element_spec
    data = dataset(path, 8, transform=note, output_signature=spec, **ALONE)
    kept = list(data.repeat(3))
    with dsprep.Reader(path, 8, epochs=3, **ALONE) as reader:
        assert labels(kept) == [batch["label"].tolist() for batch in epochs(reader, 3)]
    for place, batch in zip(places, kept, strict=False):
        assert np.asarray(memoryview(batch["x"])).ctypes.data == place
        assert raw(batch["x"].numpy()) == raw(expected["x"][batch["label"].numpy()])


def test_what_is_left_early_leaves_no_thread(plain):
    data = dataset(plain[0], 8, **ALONE)
    first, second = iter(data), iter(data)  # independent of each other
    next(first)
    assert len(list(second)) == 13
    for _ in data.take(2):
        pass
    del first, second
    gc.collect()
    names = [t.name for t in threading.enumerate() if t.name.startswith("dsprep-")]
    assert not names


def test_a_transform_needs_a_signature(plain):
    with pytest.raises(UsageError, match="output_signature"):
        dataset(plain[0], 8, transform=lambda b: b["x"], **ALONE)
    data = dataset(
        plain[0],
        8,
        transform=lambda b: (b["x"][:, 0], b["label"] * 2),
        output_signature=(tf.TensorSpec((None, 3)), tf.TensorSpec((None,), tf.int64)),
        **ALONE,
    )
    x, y = next(iter(data))
    assert raw(x.numpy()) == raw(plain[1]["x"][y.numpy() // 2, 0])


def test_wrong_arguments(plain, tmp_path):
    with pytest.raises(UsageError, match="step is 14"):
        dataset(plain[0], 8, step=14, **ALONE)
    path, _ = made(tmp_path, Schema((Field("t", np.dtype([("a", "<i4")])),)), 20)
    with pytest.raises(UnsupportedError, match="field t"):
        dataset(path, 4, **ALONE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    if dtype.names is not None:
        assert not takes(dtype)
        return
    assert takes(dtype)
    array = random_array(dtype, (4, 3))
    found = tf.convert_to_tensor(_array(array)).numpy()
    if dtype.kind == "U":
        assert [[s.decode() for s in row] for row in found] == array.tolist()
    elif dtype.kind == "S":
        assert found.tolist() == array.tolist()
    else:
        assert raw(found) == raw(array.astype(dtype.newbyteorder("=")))
