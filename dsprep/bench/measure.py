"""`measure`: whether a loop waits for its loader, whatever loader it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dsprep.bench.report.tables import show_seconds
from dsprep.core.units import show_nbytes

BUSY = 0.95
"""Share of the time in steps from which on a faster loader would change nothing that matters."""


@dataclass(frozen=True)
class LoopReport:
    """What a loop did, all its epochs together.

    Attributes
    ----------
    steps, epochs
        Batches that it took, and loops that it began.
    wait_seconds, compute_seconds
        In which it waited for the next batch, and did something else, such as training; the end
        of an epoch is waiting, too.
    first_seconds
        The longest wait for the first batch of an epoch.
    wait_p50, wait_p99
        Seconds that half of the waits took at most, and 99 % of them; first batches left out.
    batch_size
        Samples per step; None: it was not given.
    device_nbytes
        Bytes that this process and its children read from devices; None: the system does not say.
    """

    steps: int
    epochs: int
    wait_seconds: float
    compute_seconds: float
    first_seconds: float
    wait_p50: float
    wait_p99: float
    batch_size: int | None
    device_nbytes: int | None

    @property
    def busy(self) -> float:
        """The share of the time that was no waiting, in ``0 .. 1``: accelerator utilisation."""
        return self.compute_seconds / max(1e-12, self.compute_seconds + self.wait_seconds)

    @property
    def samples_per_second(self) -> float | None:
        """Samples that came in a second of the loop, compute included."""
        if self.batch_size is None:
            return None
        seconds = self.wait_seconds + self.compute_seconds
        return self.steps * self.batch_size / max(1e-12, seconds)

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        return {**asdict(self), "busy": self.busy, "samples_per_second": self.samples_per_second}

    def __str__(self) -> str:
        rate = self.samples_per_second
        of_rate = "" if rate is None else f", {rate:,.0f} samples/s"
        each, slow, first = map(show_seconds, (self.wait_p50, self.wait_p99, self.first_seconds))
        waits = f"a batch {each}, the slowest 1 % {slow}, the first one {first}"
        lines = [
            f"{self.steps} steps in {self.epochs} loop{'s' * (self.epochs != 1)}{of_rate}",
            f"waited   {show_seconds(self.wait_seconds)}: {waits}",
            f"computed {show_seconds(self.compute_seconds)}",
        ]
        if self.device_nbytes is not None:
            lines.append(f"read     {show_nbytes(self.device_nbytes)} from devices")
        verdict = "loading is no bottleneck: a faster loader would gain at most"
        if self.busy < BUSY:
            verdict = "loading is the bottleneck: a loader that never waits would gain"
        gain = 1 / max(1e-12, self.busy)
        lines.append(f"computing {self.busy:.0%} of the time; {verdict} {gain:.2f} times")
        return "\n".join(lines)


class measure:
    """Measure how long a loop waits for its batches; see `dsprep.measure`.

    ``with dsprep.measure(loader) as steps: for batch in steps: train(batch)``, then
    ``print(steps)``. It costs two readings of a clock a step. ``len``, attributes and methods of
    the loader, such as ``set_epoch``, are there.

    Parameters
    ----------
    loader
        Anything that can be iterated over, of any framework.
    batch_size
        Samples per step, for a rate.
    synchronize
        Whether to wait for the GPU after each step, so that what it computes counts as computing:
        a step of PyTorch only begins its work. Slower, but then the times are what they are called.
    clock
        Gives seconds.

    Raises
    ------
    TypeError
        If the loader cannot be iterated over.

    Notes
    -----
    Bytes are those of ``/proc/self/io``, and of children that live when a loop ends or that have
    been waited for; on network file systems the kernel counts none.
    """

    def __init__(
        self,
        loader: Any,
        *,
        batch_size: int | None = None,
        synchronize: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise TypeError(f"{type(loader).__name__} cannot be iterated over")
        self.loader, self._batch_size, self._clock = loader, batch_size, clock
        self._synchronize = synchronize
        self._waits: list[float] = []
        self._firsts: list[float] = []
        self._ends = self._computed = 0.0
        self._epochs = 0
        self._begun = device_nbytes()
        self._read: int | None = None

    def __iter__(self) -> Iterator[Any]:
        clock, waits = self._clock, self._waits
        self._epochs += 1
        batches, first = None, True
        try:
            began = clock()
            batches = iter(self.loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    self._ends += clock() - began
                    return
                ready = clock()
                (self._firsts if first else waits).append(ready - began)
                first = False
                try:
                    yield batch
                finally:
                    del batch
                    if self._synchronize:
                        _synchronize()
                    began = clock()
                    self._computed += began - ready
        finally:
            self._note_read()
            if (close := getattr(batches, "close", None)) is not None:
                close()

    def _note_read(self) -> None:
        now = device_nbytes()
        if now is not None and self._begun is not None:
            self._read = max(self._read or 0, now - self._begun)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # before __init__, as when it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._note_read()

    def report(self) -> LoopReport:
        """Return what was measured so far."""
        waits = self._waits or self._firsts or [0.0]
        p50, p99 = np.quantile(waits, (0.5, 0.99)).tolist()
        return LoopReport(
            len(self._waits) + len(self._firsts),
            self._epochs,
            sum(self._waits) + sum(self._firsts) + self._ends,
            self._computed,
            max(self._firsts, default=0.0),
            p50,
            p99,
            self._batch_size,
            self._read,
        )

    def __str__(self) -> str:
        return str(self.report())


def device_nbytes() -> int | None:
    """Return the bytes that this process and its children have read from devices, if known."""
    try:
        total = _read_nbytes(Path("/proc/self/io"))
    except (OSError, ValueError):
        return None
    for listed in Path("/proc/self/task").glob("*/children"):
        try:
            for child in listed.read_text().split():
                total += _read_nbytes(Path("/proc") / child / "io")
        except (OSError, ValueError):  # it has ended
            continue
    return total


def _read_nbytes(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise ValueError(f"{path} does not say it")


def _synchronize() -> None:
    """Wait for the GPU of PyTorch, if the program uses it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
