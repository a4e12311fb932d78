"""`dsprep.measure`: how long a loop waits, and what passes through."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dsprep
from dsprep.bench.measure import LoopReport, Steps


class Loader:
    """Three batches, for each of which the clock goes on by 2 s, after 5 s for the first one."""

    def __init__(self) -> None:
        self.now, self.epoch = 0.0, 0

    def clock(self) -> float:
        return self.now

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        for i in range(3):
            self.now += 2 if i else 5
            yield i


def test_waiting_and_computing() -> None:
    loader = Loader()
    with Steps(loader, 8, False, loader.clock) as steps:
        assert len(steps) == 3
        steps.set_epoch(4)
        assert steps.epoch == 4
        for _ in range(2):
            for batch in steps:
                loader.now += 10 + batch
    found = steps.report()
    assert (found.steps, found.epochs) == (6, 2)
    assert (found.exposed_seconds, found.compute_seconds) == (18, 66)
    assert found.exposed_after_first_seconds == 8
    assert (found.first_batch_seconds, found.wait_p50_seconds) == (5, 2)
    assert found.utilisation_percent == 100 * 66 / 84
    assert found.samples_per_second == 48 / 84
    assert found.to_json()["utilisation_percent"] == found.utilisation_percent
    assert "waits for data for 18.0 s of 84.0 s: loading is the bottleneck." in str(steps)
    assert "exposed I/O" in str(steps)


@pytest.mark.parametrize(
    ("step", "verdict"),
    [(1, "is the bottleneck"), (20, "only the first batch"), (500, "is not the bottleneck")],
)
def test_the_verdict(step: float, verdict: str) -> None:
    loader = Loader()
    steps = Steps(loader, None, False, loader.clock)
    for _ in steps:
        loader.now += step
    assert verdict in str(steps)


class Gpu:
    """A stand-in for torch, whose GPU works behind the clock of a loader, as CUDA does."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.until, self.used, self.cuda = loader, 0.0, False, self

    def kernel(self, seconds: float) -> None:
        self.used, self.until = True, max(self.until, self.loader.now) + seconds

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def synchronize(self) -> None:
        self.loader.now = max(self.loader.now, self.until)

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.time = max(self.gpu.until, self.gpu.loader.now)

    def query(self) -> bool:
        return self.time <= self.gpu.loader.now

    def synchronize(self) -> None:
        self.gpu.loader.now = max(self.gpu.loader.now, self.time)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()  # torch raises otherwise
        assert end.query()
        return 1000 * (end.time - self.time)


@pytest.mark.parametrize(("kernel", "waits"), [(10, 0), (1, 1)])
def test_what_a_gpu_computes(kernel: int, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader()
    gpu = Gpu(loader)
    gpu.used = True
    monkeypatch.setitem(sys.modules, "torch", gpu)
    with Steps(loader, None, False, loader.clock) as steps:
        for _ in steps:
            gpu.kernel(kernel)
        assert loader.now == 9  # 5 + 2 + 2: the loop does not wait for the GPU
    found = steps.report()
    assert loader.now == {10: 35, 1: 10}[kernel]  # the report does
    assert (found.steps, found.gpu_steps, found.compute_seconds) == (3, 3, 3 * kernel)
    assert (found.exposed_seconds, found.wait_p50_seconds) == (5 + 2 * waits, waits)
    assert "(GPU)" in str(steps)
    loader.now = 0.0
    gpu.until = 0.0
    clocked = Steps(loader, None, True, loader.clock)
    for _ in clocked:
        gpu.kernel(kernel)
    assert (clocked.report().gpu_steps, clocked.report().compute_seconds) == (0, 3 * kernel)


def test_loops_that_end_early_and_fail() -> None:
    loader = Loader()
    steps = Steps(loader, None, False, loader.clock)
    for _ in steps:
        loader.now += 1
        break
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in steps:
            loader.now += 100
            1 / 0  # noqa: B018
    assert steps.report().steps == 2
    assert steps.report().compute_seconds == 101
    assert steps.report().samples_per_second is None
    assert str(dsprep.measure([])) == "The loop got no batch."
    assert list(dsprep.measure([1, 2])) == [1, 2]
    with pytest.raises(TypeError, match="cannot be iterated"):
        dsprep.measure(3)


def test_a_reader_in_it(tmp_path: Path) -> None:
    def items() -> Iterator[dict[str, Any]]:
        yield from ({"x": float(i)} for i in range(100))

    dsprep.write(tmp_path / "a.h5", items(), durable=False)
    with dsprep.Reader(tmp_path / "a.h5", 10) as reader:
        steps = dsprep.measure(reader, batch_size=10)
        assert sum(len(b["x"]) for b in itertools.islice(steps, 4)) == 40
        assert reader.state_dict()["stages"][-1][2] == 4
    assert isinstance(steps.report(), LoopReport)
    assert steps.report().device_bytes >= 0
