"""Batches through ``tf.data``: the same values, static shapes, memory shared."""

from __future__ import annotations

import gc
import threading
import warnings
from dataclasses import replace
from typing import Any

import adapter_contract
import numpy as np
import pytest
from adapter_contract import ALONE, MIXED, AdapterContract, labels, of_reader
from support import DTYPES, fails, random_array, raw

import dsprep
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import UsageError
from dsprep.reader.adapters import native

tf: Any = None
_array = dataset = takes = tf


@pytest.fixture(autouse=True, scope="module")
def _imported(tf):
    """Import it once it is needed: every process that collects these tests would have it."""
    from dsprep.tf import _array, dataset, takes

    globals().update(tf=tf, _array=_array, dataset=dataset, takes=takes)


plain, mixed = adapter_contract.plain, adapter_contract.mixed


class TestTensorFlow(AdapterContract):
    lacking = Field("t", np.dtype([("a", "<i4")]))

    def batches(self, path, **options):
        if "transform" in options:
            options["output_signature"] = dataset(path, 8, **ALONE).element_spec
        return dataset(path, 8, **options)

    def ragged(self, column, i):
        return column[i].numpy()

    def address(self, x):
        return np.asarray(memoryview(x)).ctypes.data


@pytest.mark.parametrize("policy", [{"remainder": "drop"}, {"remainder": "pad"}])
def test_shapes_are_static(plain, policy):
    data = dataset(plain[0], 8, **policy, **ALONE)
    assert data.element_spec == {
        "x": tf.TensorSpec((8, 8, 4), tf.float32),
        "label": tf.TensorSpec((8,), tf.int64),
    }
    assert int(data.cardinality()) == len(list(data))
    assert dataset(plain[0], 8, **ALONE).element_spec["x"].shape.as_list() == [None, 8, 4]


def test_ragged_shapes_are_as_static_as_they_can_be(mixed):
    data = dataset(mixed[0], 8, remainder="drop", **ALONE)
    assert data.element_spec["points"].shape.as_list() == [8, None, 3]
    assert data.element_spec["name"] == tf.TensorSpec((8,), tf.string)
    assert len(list(data)) == 12


def test_iterations_are_repeated_and_resumed(plain):
    expected = of_reader(plain[0], 4, seed=3)
    data = dataset(plain[0], 8, seed=3, **ALONE)
    assert labels(data.repeat(3)) == expected[:39]
    resumed = dataset(plain[0], 8, seed=3, epoch=2, step=5, **ALONE)
    assert labels(resumed) == expected[31:39]
    assert labels(resumed) == expected[39:]


def test_passes_of_mini_epochs_are_resumed(plain):
    cut = {"mini_epochs": 3, "repeats": 2, "seed": 3, **ALONE}
    with dsprep.Reader(plain[0], 8, **cut) as reader:
        expected = [labels(reader) for _ in range(6)]
    for epoch, steps in enumerate(map(len, expected)):
        resumed = dataset(plain[0], 8, epoch=epoch, step=steps - 1, **cut)
        assert labels(resumed) == expected[epoch][-1:]
        assert [labels(resumed) for _ in expected[epoch + 1 :]] == expected[epoch + 1 :]
        with pytest.raises(UsageError, match=f"at most {steps}"):
            dataset(plain[0], 8, epoch=epoch, step=steps + 1, **cut)
    with pytest.raises(UsageError, match="cannot adapt"):
        dataset(plain[0], 8, **{**cut, "repeats": dsprep.repeats.Patience()})


def test_iterations_at_the_same_time_are_independent(plain):
    data = dataset(plain[0], 8, **ALONE)
    first, second = iter(data), iter(data)
    next(first)
    assert len(list(second)) == 13
    for _ in data.take(2):
        pass
    del first, second
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dsprep-")]


def test_a_transform_needs_a_signature(plain):
    with pytest.raises(UsageError, match="output_signature"):
        dataset(plain[0], 8, transform=lambda b: b["x"], **ALONE)
    data = dataset(
        plain[0],
        8,
        transform=lambda b: (b["x"][:, 0], b["label"] * 2),
        output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int64)),
        **ALONE,
    )
    x, y = next(iter(data))
    assert raw(x.numpy()) == raw(plain[1]["x"][y.numpy() // 2, 0])


def halved(sample, out, rng):
    out["half"][:] = sample["label"] / 2


KNOWN = {
    "each": dsprep.each(halved, {"half": (">f8", (4, 5))}),
    "pad": dsprep.pad("points", 9),
    "longest": dsprep.pad("points"),
    "pack": dsprep.pack("points", 4),
    "normalise": ...,
    "unpack": ...,
    "list": [dsprep.pad("points", 9), dsprep.each(halved, {"half": ("f2", (4, 5))})],
}


@pytest.mark.parametrize("policy", [{"remainder": "drop"}, {}])
@pytest.mark.parametrize("name", KNOWN)
def test_signatures_of_known_transforms_are_derived(mixed, name, policy):
    transform = KNOWN[name]
    if name == "normalise":
        transform = dsprep.normalise(mixed[0], "label", "points")
    elif name == "unpack":
        fields = [replace(MIXED["points"], attrs={"scale_factor": 0.5}), MIXED["name"]]
        transform = dsprep.mask_and_scale(Schema(tuple(fields)), "points")
    with dsprep.Reader(mixed[0], 8, transform=transform, **policy, **ALONE) as reader:
        expected = list(reader)
    data = dataset(mixed[0], 8, transform=transform, **policy, **ALONE)
    for found, batch in zip(data, expected, strict=True):  # TensorFlow compares the signature
        assert found.keys() == batch.keys()
        for key, column in batch.items():
            if not isinstance(column, Ragged):
                assert raw(found[key].numpy()) == raw(native(column))
    spec = data.element_spec
    size = 8 if policy else None
    if "points" in spec:
        shapes = {"pack": [None, 4, 3], "pad": [size, 9, 3], "list": [size, 9, 3]}
        assert spec["points"].shape.as_list() == shapes.get(name, [size, None, 3])
    if "half" in spec:
        assert spec["half"].shape.as_list() == [size, 4, 5]
    if name == "pack":
        assert spec["points_documents"].shape.as_list() == [None, 4]


def test_wrong_arguments(plain):
    for step in (14, -1, 1.5, True):
        fails(lambda: dataset(plain[0], 8, step=step, **ALONE), UsageError, "step is")


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


def test_keras_takes_pairs(plain):
    data = dataset(plain[0], 8, **ALONE).map(lambda batch: (batch["x"][:, 0], batch["label"]))
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=data)
    assert len(history.history["val_loss"]) == 2
