"""`dsprep.measure`: how long a loop waits, and what passes through."""

from __future__ import annotations

import itertools
import sys
import types
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


@pytest.mark.parametrize(("synchronize", "computed"), [(True, 30), (False, 0)])
def test_what_a_gpu_computes(
    synchronize: bool, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stand-in for torch, whose GPU takes 10 s a step behind the program."""
    loader = Loader()

    class Cuda:
        is_initialized = staticmethod(lambda: True)

        @staticmethod
        def synchronize() -> None:
            loader.now += 10

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=Cuda))
    steps = Steps(loader, None, synchronize, loader.clock)
    assert len([*steps]) == 3
    assert (steps.report().compute_seconds, steps.report().exposed_seconds) == (computed, 9)


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
