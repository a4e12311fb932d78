"""Batches as JAX arrays: the same values, one ahead, sharded, safe while memory is shared."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from adapter_data import COUNT, MIXED, PLAIN, made
from support import epochs, raw

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import UnsupportedError, UsageError

jax = pytest.importorskip("jax")

from dsprep.jax import Batches, batches, put  # noqa: E402
from dsprep.reader.adapters import Values  # noqa: E402

ALONE = {"rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return made(tmp_path_factory.mktemp("mixed"), MIXED)


def labels(found):
    return [np.asarray(batch["label"]).tolist() for batch in found]


def test_every_value_arrives(mixed):
    path, expected = mixed
    seen = []
    for batch in batches(path, 8, **ALONE):
        assert isinstance(batch["image"], jax.Array)
        assert isinstance(batch["points"], Values)
        for i, sample in enumerate(np.asarray(batch["label"]).tolist()):
            seen.append(sample)
            assert raw(np.asarray(batch["image"][i])) == raw(expected["image"][sample])
            assert np.asarray(batch["id"])[i].tolist() == expected["id"][sample].tolist()
            for name in ("points", "name"):
                values, offsets = map(np.asarray, batch[name])
                assert raw(values[offsets[i] : offsets[i + 1]]) == raw(expected[name][sample])
    assert sorted(seen) == list(range(COUNT))


def test_arrays_share_memory_on_the_cpu_and_stay_as_they_are(plain):
    path, expected = plain
    places, kept = [], []

    def note(batch):
        places.append(batch["x"].ctypes.data)
        return batch

    for batch in epochs(Batches(path, 8, epochs=20, buffers=1, transform=note, **ALONE), 20):
        kept.append(batch if len(kept) % 100 == 0 else None)  # most memory is used again
    assert kept[0]["x"].unsafe_buffer_pointer() == places[0]
    assert len(set(places)) < len(places)
    with dsprep.Reader(path, 8, epochs=20, **ALONE) as reader:
        right = [batch["label"].tolist() for batch in epochs(reader, 20)]
    for expected_labels, batch in zip(right, kept, strict=True):
        if batch is None:
            continue
        assert np.asarray(batch["label"]).tolist() == expected_labels
        assert raw(np.asarray(batch["x"])) == raw(expected["x"][np.asarray(batch["label"])])


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


def test_states_are_exact_and_loops_that_are_left_go_on(plain):
    expected = labels(epochs(Batches(plain[0], 8, epochs=2, **ALONE), 2))
    source = Batches(plain[0], 8, epochs=2, **ALONE)
    assert len(source) == 13
    loop = epochs(source)
    found = []
    for count in range(16):
        state = source.state_dict()
        if count in (0, 1, 12, 13, 14):
            other = Batches(plain[0], 8, epochs=1, **ALONE)
            other.load_state_dict(state)
            rest = labels(other)
            assert (found + rest) == expected[: len(found + rest)]
            assert len(rest) in (13, 13 - count, 26 - count)
        found.append(np.asarray(next(loop)["label"]).tolist())
    loop.close()
    assert source.epoch == 1
    other = Batches(plain[0], 8, **ALONE)
    other.load_state_dict(source.state_dict())
    assert found + labels(other) == expected
    source.set_epoch(0)
    assert labels(epochs(source, 2)) == expected
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dsprep-")]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("?", "bool"),
        ("<u2", "uint16"),
        (">i2", "int16"),
        (">f4", "float32"),
        ("<f8", "float32"),
        ("<i8", "int32"),
        (">u8", "uint32"),
        ("<c16", "complex64"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_dtypes(dtype, expected):
    values = np.array([[0, 1, 2, 100]]).astype(dtype)
    found = put(values)
    assert found.dtype == expected
    assert np.asarray(found).astype("c8").tolist() == values.astype("c8").tolist()


def test_numbers_that_jax_would_change_are_refused():
    with pytest.raises(UsageError, match=r"1099511627776 does not fit into int32.*x64"):
        put(np.array([1, 2**40]))
    with pytest.raises(UsageError, match=r"-1099511627776 does not fit"):
        put(np.array([1, -(2**40)]))
    jax.config.update("jax_enable_x64", True)
    try:
        assert int(put(np.array([1, 2**40]))[1]) == 2**40
    finally:
        jax.config.update("jax_enable_x64", False)


def test_dtypes_that_jax_lacks_are_refused_by_name(tmp_path):
    path, _ = made(tmp_path, Schema((Field("t", np.dtype("S3")), PLAIN["x"])), 20)
    with pytest.raises(UnsupportedError, match=r"field t: S3.*fields="):
        Batches(path, 4, **ALONE)
    assert len(list(Batches(path, 4, fields=("x",), **ALONE))) == 5
    with pytest.raises(UnsupportedError, match="no dtype"):
        list(Batches(path, 4, transform=lambda b: b, **ALONE))


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
batches = Batches(path, 8, sharding=sharding, drop_last=True)
assert (batches.reader.place.rank, batches.reader.place.world_size) == (rank, 2)
for batch in batches:
    assert batch["x"].shape == (16, 6, 3)
    assert len(batch["x"].addressable_shards) == 2
    for shard in batch["label"].addressable_shards:
        print(*np.asarray(shard.data).tolist(), flush=True)
try:
    next(iter(Batches(ragged, 8, sharding=sharding, drop_last=True)))
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
    done = [each.communicate(timeout=60) for each in ranks]
    for each, (_, err) in zip(ranks, done, strict=True):
        assert each.returncode == 0, err
    for rank, (out, _) in enumerate(done):
        with dsprep.Reader(plain[0], 8, rank=rank, world_size=2, drop_last=True) as reader:
            expected = [b["label"].tolist() for b in reader]
        rows = [[int(word) for word in line.split()] for line in out.splitlines()]
        assert [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)] == expected
