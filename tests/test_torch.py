"""Batches as tensors: the same values, without a copy, and ahead on a device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import adapter_contract
import ml_dtypes
import numpy as np
import pytest
from adapter_contract import (
    ALONE,
    COUNT,
    PLAIN,
    STEPS,
    LoopsContract,
    labels,
    made,
    of_reader,
)
from support import epochs, fails, flip_sampled, raw

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import ChangedError, UnsupportedError, UsageError
from dsprep.reader.memory import anonymous

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    random_split,
)

import dsprep.torch as adapter  # noqa: E402
from dsprep.torch import Batches, Feed, Pinned, Samples, tensor  # noqa: E402


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Each batch has memory of its own."""
    schema = Schema((Field("x", np.dtype("<f4"), (64, 64)), PLAIN["label"]))
    return made(tmp_path_factory.mktemp("large"), schema)


plain, mixed = adapter_contract.plain, adapter_contract.mixed


class TestTorch(LoopsContract):
    lacking = Field("t", np.dtype("<U3"))

    def batches(self, path, **options):
        return Batches(path, 8, **options)

    def address(self, x):
        return x.data_ptr()


def double(batch):
    return {"x": batch["x"] * 2, "label": batch["label"]}


# --- tensors -----------------------------------------------------------------------------------


def test_ragged_fields_as_nested_tensors(mixed):
    path, expected = mixed
    batch = next(iter(Batches(path, 8, nested=True, fields=("label", "points"), **ALONE)))
    parts = batch["points"].unbind()
    assert len(parts) == 8
    for sample, part in zip(batch["label"].tolist(), parts, strict=True):
        assert part.tolist() == expected["points"][sample].tolist()


DTYPES = ["?", "u1", "<i2", ">i2", "<u2", ">u8", "<f2", ">f8", "<c8"]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
NAMES = "bool uint8 int16 int16 uint16 uint64 float16 float64 complex64 bfloat16 float8_e4m3fn"


@pytest.mark.parametrize(("dtype", "expected"), [*zip(DTYPES, NAMES.split(), strict=True)])
def test_dtypes(dtype, expected):
    rng = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    bits = rng.integers(0, 256, (4, 3 * dtype.itemsize), "u1")
    array = bits.astype(bool) if dtype.kind == "b" else bits.view(dtype)
    found = tensor(array)
    assert found.dtype == getattr(torch, expected)
    assert found.shape == (4, 3)
    native = array.byteswap() if dtype.byteorder == ">" else array
    assert found.view(torch.uint8).numpy().tobytes() == native.tobytes()
    if dtype.byteorder != ">":
        assert found.data_ptr() == array.ctypes.data


def test_arrays_that_tensors_cannot_share():
    assert tensor(np.array([b"ab", b"\0c"], "S3")).tolist() == [[97, 98, 0], [0, 99, 0]]
    array = np.arange(6)
    array.flags.writeable = False
    assert tensor(array[::-1]).tolist() == [5, 4, 3, 2, 1, 0]
    assert tensor(np.array(3.5)).shape == ()


def test_a_transform_gives_any_structure(plain):
    def pair(batch):
        return batch["x"][:, 0], [batch["label"], "text", None]

    both = [dict, pair]
    x, rest = next(iter(Batches(plain[0], 8, transform=both, io_threads=2, **ALONE)))
    assert x.shape == (8, 4)
    assert isinstance(rest[0], torch.Tensor)
    assert rest[1:] == ["text", None]


# --- loops and states --------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")  # PyTorch warns of more batches than `len` said
def test_through_a_loader(plain):
    expected = of_reader(plain[0], 3)
    first = Batches(plain[0], 8, **ALONE)
    loader = DataLoader(first, batch_size=None)
    for epoch in range(2):
        assert len(loader) == 13
        assert labels(loader) == expected[13 * epoch : 13 * epoch + 13]
    found = [batch["label"].tolist() for _, batch in zip(range(5), loader, strict=False)]
    second = Batches(plain[0], 8, **ALONE)
    second.load_state_dict(first.state_dict())
    assert found + labels(DataLoader(second, batch_size=None)) == expected[26:]
    gc.collect()
    assert found + labels(loader) == expected[26:]  # the loop that was left continues


def test_all_ranks_follow_rank_0_in_repeats_that_adapt(plain, tmp_path):
    script, store = Path(__file__).with_name("repeats_job.py"), tmp_path / "store"
    jobs = [
        subprocess.Popen(
            [sys.executable, script, plain[0], "label", store, str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [job.communicate(timeout=240) for job in jobs]  # a deadlock shows here
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], said
    assert said[0][0].strip() == "right with 2 ranks"


# --- samples -----------------------------------------------------------------------------------


def first_row(sample):
    return sample["x"][0], int(sample["label"])


def test_samples_by_their_numbers(mixed):
    path, expected = mixed
    samples = Samples(path)
    assert len(samples) == COUNT
    assert samples.schema.names == tuple(expected)
    order = [7, 99, 0, 7]
    for i, sample in [*zip(order, samples.__getitems__(order), strict=True), (-1, samples[-1])]:
        for one in (sample, samples[i], samples[np.int64(i)], samples[torch.tensor(i)]):
            assert one["label"].shape == ()
            assert one["label"].item() == expected["label"][i]
            assert one["image"].numpy().tobytes() == expected["image"][i].tobytes()
            assert one["points"].tolist() == expected["points"][i].tolist()
            assert one["id"].tolist() == expected["id"][i].tolist()
            assert one["name"] == expected["name"][i]
    batch = samples[[3, 5]]
    assert batch["image"].shape == (2, 8, 5)
    assert batch["points"].offsets[-1] == len(expected["points"][3]) + len(expected["points"][5])
    for wrong in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            samples[wrong]
    with pytest.raises(IndexError):
        samples.__getitems__([1, COUNT])
    some = Samples(path, fields=["label"], transform=[lambda s: s["label"], lambda y: y + 1])
    assert [*map(int, some.__getitems__([4, 2]))] == [5, 3]
    with pytest.raises(UsageError, match="one sample, not a batch"):
        some[[1, 2]]
    samples.close()
    assert samples[1]["label"] == 1


@pytest.mark.parametrize(
    "how", [{}, {"num_workers": 2}, {"num_workers": 1, "multiprocessing_context": "spawn"}]
)
def test_samples_through_a_loader(plain, how):
    path, expected = plain
    samples = Samples(path, transform=first_row)
    samples[0]  # files that are open stay those of this process
    loader = DataLoader(samples, 8, shuffle=True, **how)
    seen = []
    for x, label in loader:
        assert x.numpy().tobytes() == expected["x"][label, 0].tobytes()
        seen += label.tolist()
    assert len(loader) == STEPS
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)


def test_samples_of_a_subset(plain):
    samples = Samples(plain[0], subset=[3, 9, 40])
    assert [int(samples[i]["label"]) for i in range(len(samples))] == [3, 9, 40]
    assert pickle.loads(pickle.dumps(samples))[-1]["label"] == 40
    assert samples[[2, 0]]["label"].tolist() == [40, 3]


def test_samples_of_a_batch_are_read_together(plain, monkeypatch):
    calls, read = [], dsprep.Sidecar.read
    counted = lambda self, chosen, *a, **k: calls.append(chosen) or read(self, chosen, *a, **k)  # noqa: E731
    monkeypatch.setattr(dsprep.Sidecar, "read", counted)
    samples = Samples(plain[0])
    assert sum(labels(DataLoader(samples, 20)), []) == list(range(COUNT))  # noqa: RUF017
    assert len(calls) == 5
    sampler = BatchSampler(range(0, COUNT, 2), 10, drop_last=False)
    found = labels(DataLoader(samples, batch_size=None, sampler=sampler))
    assert found == [list(range(i, i + 20, 2)) for i in range(0, COUNT, 20)]
    assert len(calls) == 10


def test_samples_that_are_not_those_of_before(tmp_path):
    path, _ = made(tmp_path, PLAIN)
    samples = Samples(path)
    asleep = pickle.dumps(samples)
    before = path.stat().st_mtime_ns
    flip_sampled(path)
    os.utime(path, ns=(before, before + 10**9))
    with pytest.raises(ChangedError):
        samples[3], samples[3]
    dsprep.provenance(path, checksums=True)
    with pytest.raises(UsageError, match="written again since"):
        pickle.loads(asleep)[3]
    (tmp_path / "other").mkdir()
    lacking = made(tmp_path / "other", Schema((Field("t", np.dtype("<U3")),)))[0]
    fails(lambda: Samples(lacking), UnsupportedError, "no dtype for field t")
    with pytest.raises(dsprep.DsprepError, match="files disagree about their fields"):
        Samples(tmp_path)


def test_habits_that_lead_nowhere_name_the_way(plain):
    batches = Batches(plain[0], 8, **ALONE)
    with pytest.raises(UsageError, match="num_workers=0"):
        next(iter(DataLoader(batches, batch_size=None, num_workers=1)))
    with pytest.raises(UsageError, match=r"Samples\(path\)"):
        random_split(batches, [0.5, 0.5])[0][0]
    fails(lambda: Batches(plain[0], 8, devise="cpu"), UsageError, "did you mean device=?")
    fails(lambda: Samples(plain[0], shuffle=True), UsageError, "give it to the DataLoader")
    fails(lambda: Samples(plain[0], feilds="x"), UsageError, "did you mean fields=?")


# --- devices: a fake one, since no GPU is at hand where tests run ---------------------------------


class Event:
    """Copies happen in order, and only when somebody waits for the event, or asks often."""

    def __init__(self, side):
        self.side, self.work = side, side.begun
        side.begun = []

    def synchronize(self):
        if self in self.side.events:
            time.sleep(0.002)  # others go on meanwhile, and fill memory that is free
        while self in self.side.events:
            for to, values in self.side.events.pop(0).work:
                to.copy_(values)

    def query(self):
        self.side.asked += 1
        if self.side.asked % 3 == 0:
            self.synchronize()
        return self not in self.side.events


class Fake:
    """Knows the address of what it copies, and does not keep the memory from being used again."""

    def __init__(self, device=None):
        self.begun, self.events = [], []
        self.asked = self.most = 0

    def copy(self, values):
        to = torch.full_like(values, 77)
        if values.nbytes:
            there = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
            self.begun.append((to, torch.frombuffer(there, dtype=values.dtype).view(to.shape)))
        return to

    def mark(self):
        self.events.append(Event(self))
        self.most = max(self.most, len(self.events))
        return self.events[-1]

    def use(self, tensors, event):
        event.synchronize()  # the program computes at once
        assert tensors


@pytest.fixture
def kept():
    """Memory that stays mapped, so that a copy from a place that is free is seen, not fatal."""
    kept = []

    def allocate(nbytes):
        kept.append(anonymous(nbytes))
        return kept[-1]

    return allocate


@pytest.mark.parametrize("shuffle", ["group", "none"])
def test_a_device_gets_the_batches_of_the_reader(large, shuffle, kept):
    path, expected = large
    options = {"shuffle": shuffle, "epochs": 8, "buffers": 1, **ALONE}
    side = Fake()
    with dsprep.Reader(path, 8, **options) as reader:
        right = labels(epochs(reader, 8))
    source = dsprep.Reader(path, 8, **options)
    source.allocate = kept
    found = []
    for _ in range(8):
        feed = Feed(source, _tensors, side)
        for batch in feed:
            assert raw(batch["x"].numpy()) == raw(expected["x"][batch["label"]])
            found.append(batch["label"].tolist())
        feed.close()
    source.close()
    assert found == right
    assert side.most <= adapter.COPIES


def test_copies_that_fall_behind_are_waited_for(large, kept):
    side = Fake()
    side.use = lambda tensors, event: None  # a program that runs ahead of its GPU
    options = {"buffers": 1, **ALONE}
    with dsprep.Reader(large[0], 8, **options) as reader:
        right = labels(reader)
    source = dsprep.Reader(large[0], 8, **options)
    source.allocate = kept
    feed = Feed(source, _tensors, side)
    late = list(feed)
    assert side.most <= adapter.COPIES
    feed.close()
    assert not side.events
    assert labels(late) == right
    for batch in late:
        assert raw(batch["x"].numpy()) == raw(large[1]["x"][batch["label"]])


def _tensors(batch):
    return {name: tensor(column) for name, column in batch.items()}


@pytest.fixture
def gpu(monkeypatch):
    """What PyTorch has on a machine with two GPUs, as far as it is used to lock memory."""
    locked = {}

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            assert address % 4096 == 0
            assert flags == 1
            if nbytes > 1 << 30:
                return 2
            locked[address] = nbytes
            return 0

        def cudaHostUnregister(self, address):
            ctypes.string_at(address, locked.pop(address))  # it is still there

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(adapter, "Cuda", Fake)
    yield locked
    gc.collect()  # memory is unlocked while the fake is there


def test_on_a_gpu_states_are_exact_and_all_memory_is_unlocked(plain, gpu):
    expected = labels(epochs(Batches(plain[0], 8, epochs=2, **ALONE), 2))
    batches = Batches(plain[0], 8, device="cuda", epochs=2, **ALONE)
    assert "cuda:1" in repr(batches)
    loop = epochs(batches)
    found = [next(loop)["label"].tolist() for _ in range(12)]
    assert gpu
    loop.close()  # one batch that was begun is not lost
    left = Batches(plain[0], 8, device="cuda", **ALONE)
    left.load_state_dict(batches.state_dict())
    assert found + labels(epochs(left, 2)) == expected
    del loop, batches, left
    gc.collect()
    assert not gpu


def test_memory_that_cannot_be_locked_is_told(plain, gpu):
    fails(lambda: Pinned(torch.device("cuda:0"))(2 << 30), UsageError, "CUDA error 2", "ulimit -l")
    assert not gpu


def test_memory_is_locked_on_request(plain, gpu):
    batches = Batches(plain[0], 8, pin_memory=True, **ALONE)
    batch = next(iter(batches))
    assert any(a <= batch["x"].data_ptr() < a + n for a, n in gpu.items())
    assert labels(Batches(plain[0], 8, device="cuda", pin_memory=False, **ALONE))


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "meta", "nonsense", 1.5])
def test_devices_that_are_not_there(plain, device):
    fails(lambda: Batches(plain[0], 8, device=device, **ALONE), UsageError, "device is")


def test_an_error_comes_after_the_batches_before_it(plain, tmp_path):
    def fail(batch):
        if 50 in batch["label"]:
            raise ValueError("no 50")
        return batch

    reader = dsprep.Reader(plain[0], 8, shuffle="none", transform=fail, **ALONE)
    feed = Feed(reader, _tensors, Fake())
    found = []
    with pytest.raises(ValueError, match="no 50"):
        found += (batch["label"].tolist() for batch in feed)
    feed.close()
    assert len(found) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_gets_the_batches_of_the_reader(large):
    path, expected = large
    x = torch.from_numpy(expected["x"]).cuda().view(torch.int32)
    work = torch.rand(2048, 2048, device="cuda")
    batches = Batches(path, 8, device="cuda", epochs=50, **ALONE)
    wrong, found = torch.zeros((), dtype=torch.int64, device="cuda"), []
    for batch in epochs(batches, 50):  # nothing here waits: the program runs ahead of the GPU
        work = work @ work / 2048
        wrong += (batch["x"].view(torch.int32) != x[batch["label"]]).sum()
        found.append(batch["label"])
    assert int(wrong) == 0
    with dsprep.Reader(path, 8, epochs=50, **ALONE) as reader:
        assert [f.tolist() for f in found] == labels(epochs(reader, 50))
    batches = Batches(path, 8, pin_memory=True, **ALONE)
    assert next(iter(batches))["x"].is_pinned()
