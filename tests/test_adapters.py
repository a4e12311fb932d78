"""What the adapters share; and that each tells when its framework is missing."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple

import pytest
from adapter_contract import PLAIN, made
from support import DTYPES, epochs, random_array

import dsprep
from dsprep.reader.adapters import Ahead, Values, mapped, native

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.names is None], ids=str)
def test_native_keeps_values(dtype):
    array = random_array(dtype, (3, 4))
    found = native(array)
    assert found.dtype.isnative
    assert found.tobytes() == array.astype(dtype.newbyteorder("=")).tobytes()
    assert (found is array) == dtype.isnative


def test_mapped_looks_into_structures():
    value = {"a": [1, (2, Pair(3, "x"))], "b": Values(4, 5)}
    assert mapped(str, value) == {"a": ["1", ("2", Pair("3", "x"))], "b": Values("4", "5")}
    assert mapped(repr, value["b"], (Values,)) == "Values(values=4, offsets=5)"


def test_a_batch_ahead_is_not_lost_however_the_loop_ends(tmp_path):
    path, _ = made(tmp_path, PLAIN)
    with dsprep.Reader(path, 8, epochs=2, rank=0, world_size=1) as reader:
        expected = [b["label"].tolist() for b in epochs(reader, 2)]
        reader.set_epoch(0)
        found = []
        for steps in (1, 3, 8, 1, 2, 30, 30):  # a loop runs through an epoch, or less
            ahead = Ahead(reader, lambda batch: batch["label"].tolist())
            found += [labels for _, labels in zip(range(steps), ahead, strict=False)]
            ahead.close()
            ahead.close()
        assert found[: len(expected)] == expected


def test_a_missing_framework_is_told():
    code = """
import importlib, sys
import dsprep
for name in ("torch", "jax", "lightning", "transformers", "tf"):
    package, extra = ("tensorflow", "tensorflow") if name == "tf" else (name, f"'dsprep[{name}]'")
    sys.modules[package] = None
    try:
        importlib.import_module(f"dsprep.{name}")
    except dsprep.DsprepError as error:
        assert isinstance(error, ImportError)
        assert f"dsprep.{name} needs" in str(error)
        assert f"pip install {extra}" in str(error)
        print(name)
    del sys.modules[package]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch", "jax", "lightning", "transformers", "tf"]
