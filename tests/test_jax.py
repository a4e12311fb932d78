"""Batches as JAX arrays: the same values, one ahead, sharded, safe while memory is shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import adapter_contract
import ml_dtypes
import numpy as np
import pytest
from adapter_contract import ALONE, LoopsContract
from support import epochs, fails

import dsprep
from dsprep.core.schema import Field
from dsprep.errors import UsageError

jax = pytest.importorskip("jax")

from dsprep.jax import Batches, put  # noqa: E402

plain, mixed = adapter_contract.plain, adapter_contract.mixed


class TestJax(LoopsContract):
    lacking = Field("t", np.dtype("S3"))

    def batches(self, path, **options):
        return Batches(path, 8, **options)

    def address(self, x):
        assert isinstance(x, jax.Array)
        return x.unsafe_buffer_pointer()


def test_a_computation_that_is_under_way_has_its_batch(plain):
    path, expected = plain
    total = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y + 0, x).sum())
    reader = Batches(path, 8, epochs=3, buffers=1, fields=("label",), **ALONE)
    sums = [total(batch["label"]) for batch in epochs(reader, 3)]  # dispatched; batches are gone
    assert sum(map(int, sums)) == 3 * int(expected["label"].sum())


def test_the_next_batch_is_begun_while_one_is_used(plain):
    begun = []

    def note(batch):
        begun.append(1)
        return batch

    source = Batches(plain[0], 8, buffers=4, **ALONE)
    put, source._put = source._put, lambda batch: put(note(batch))
    loop = iter(source)
    next(loop)
    assert len(begun) == 2


DTYPES = ["?", "<u2", ">i2", ">f4", "<f8", "<i8", ">u8", "<c16", ml_dtypes.bfloat16]
NAMES = "bool uint16 int16 float32 float32 int32 uint32 complex64 bfloat16"


@pytest.mark.parametrize(("dtype", "expected"), [*zip(DTYPES, NAMES.split(), strict=True)])
def test_dtypes(dtype, expected):
    values = np.array([[0, 1, 2, 100]]).astype(dtype)
    found = put(values)
    assert found.dtype == expected
    assert np.asarray(found).astype("c8").tolist() == values.astype("c8").tolist()


def test_numbers_that_jax_would_change_are_refused():
    with pytest.raises(UsageError, match=r"1099511627776 does not fit into int32.*x64"):
        put(np.array([1, 2**40]))
    fails(lambda: put(np.array([1, -(2**40)])), UsageError, "-1099511627776 does not fit")
    jax.config.update("jax_enable_x64", True)
    try:
        assert int(put(np.array([1, 2**40]))[1]) == 2**40
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_device_for_all_or_a_sharding_by_field(plain):
    device = jax.devices()[0]
    batch = next(iter(Batches(plain[0], 8, sharding=device, **ALONE)))
    assert batch["x"].devices() == {device}
    one = jax.sharding.SingleDeviceSharding(device)
    batch = next(iter(Batches(plain[0], 8, sharding={"x": one, "label": None}, **ALONE)))
    assert batch["x"].sharding == one
    with pytest.raises(UsageError, match="does not name every field"):
        next(iter(Batches(plain[0], 8, sharding={"x": one}, **ALONE)))


SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dsprep.errors import UsageError
from dsprep.jax import Batches

rank, port, path, ragged = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
try:
    Batches(path, 8, sharding=sharding)
except UsageError as error:
    assert "same size" in str(error)
batches = Batches(path, 8, sharding=sharding, remainder="drop")
assert (batches.reader.rank_info.rank, batches.reader.rank_info.world_size) == (rank, 2)
for batch in batches:
    assert batch["x"].shape == (16, 8, 4)
    assert len(batch["x"].addressable_shards) == 2
    for shard in batch["label"].addressable_shards:
        print(*np.asarray(shard.data).tolist(), flush=True)
try:
    next(iter(Batches(ragged, 8, sharding=sharding, remainder="drop")))
except UsageError as error:
    assert "shared out" in str(error)
"""


def test_global_arrays_of_two_processes_with_two_devices_each(plain, mixed, tmp_path):
    import socket

    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(plain[0]), str(mixed[0])],
            env=environment,
            cwd=Path(dsprep.__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    done = [each.communicate(timeout=240) for each in ranks]
    for each, (_, err) in zip(ranks, done, strict=True):
        assert each.returncode == 0, err
    for rank, (out, _) in enumerate(done):
        with dsprep.Reader(plain[0], 8, rank=rank, world_size=2, remainder="drop") as reader:
            expected = [b["label"].tolist() for b in reader]
        rows = [[int(word) for word in line.split()] for line in out.splitlines()]
        assert [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)] == expected
