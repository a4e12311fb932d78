"""Waiting times of a training loop: `measure` times the steps of any loader of any framework."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from dsprep.bench.counters import count

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class LoopReport:
    """The measures of a loop, over all of its epochs; those that `bench read` has are named alike.

    Printed, it is a table and the verdict: whether loading is the bottleneck.
    """

    epochs: int  # `for` loops that got a batch
    steps: int  # batches
    samples: int | None  # None where the samples of a step are not known
    exposed_seconds: float  # for which the loop waited for data, the end of each epoch included
    exposed_after_first_seconds: float  # the same without the first batch of each epoch
    first_batch_seconds: float  # until the first batch of an epoch had come, the median
    wait_p50_seconds: float  # percentiles of the waits for all other batches
    wait_p99_seconds: float
    compute_seconds: float  # in the body of the loop
    device_bytes: int  # read from devices while the loop ran; see `measure`

    seconds: float  # of the loop: waiting and computing
    utilisation_percent: float  # AU: the share of the time in which the loop computed
    samples_per_second: float | None  # None where samples are not known

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from dsprep.bench.report.answer import BUSY
        from dsprep.bench.report.tables import digits, show_percent, show_seconds
        from dsprep.core.units import show_nbytes

        if not self.steps:
            return "The loop got no batch."
        p50, p99 = show_seconds(self.wait_p50_seconds), show_seconds(self.wait_p99_seconds)
        rows = {
            "steps": f"{self.steps:,} in {self.epochs:,} epoch{'s' * (self.epochs > 1)}",
            "exposed I/O": show_seconds(self.exposed_seconds),
            "compute": show_seconds(self.compute_seconds),
            "AU": f"{show_percent(self.utilisation_percent)} %",
            "first batch": show_seconds(self.first_batch_seconds),
            "wait": f"p50 {p50}, p99 {p99}",
            "device": show_nbytes(self.device_bytes),
        }
        if self.samples_per_second is not None:
            rows["samples/s"] = digits(self.samples_per_second)
        verdict = "loading is the bottleneck."
        if self.utilisation_percent >= BUSY:
            verdict = "loading is not the bottleneck."
        elif self.compute_seconds * (100 - BUSY) >= BUSY * self.exposed_after_first_seconds:
            verdict = "only the first batch of an epoch is waited for."
        words = (
            f"The loop computes {show_percent(self.utilisation_percent)} % of the time and waits "
            f"for data for {show_seconds(self.exposed_seconds)} of {show_seconds(self.seconds)}: "
            f"{verdict}"
        )
        return "\n".join([*(f"{label:<11}  {value}" for label, value in rows.items()), words])


class Steps(Generic[Item]):
    """A loader whose loops are timed; it has the loader's length and attributes. See `measure`."""

    def __init__(
        self,
        loader: Iterable[Item],
        batch_size: int | None,
        synchronize: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loader, self._batch_size, self._clock = loader, batch_size, clock
        self._synchronize = synchronize
        self._firsts, self._waits = array("d"), array("d")  # for batches, in seconds
        self._ends = self._compute = 0.0  # seconds until epochs ended, and in the loops' bodies
        self._device = 0
        self._final: LoopReport | None = None

    def __enter__(self) -> Self:
        self._final = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._final = self.report()  # an iterator that lives on adds nothing any more

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # copy and pickle ask before there is one
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Item]:
        before, began = count().device, self._clock()
        batches = iter(self._loader)  # not at the first batch: some loaders start to read here
        return self._timed(batches, before, self._clock() - began)

    def _timed(self, batches: Iterator[Item], before: int, opening: float) -> Iterator[Item]:
        now, waits, batch = self._clock, self._firsts, list[Item]()
        try:
            clock = now() - opening
            while True:
                try:
                    batch.append(next(batches))
                except StopIteration:
                    break
                got = now()
                waits.append(got - clock)
                waits = self._waits
                try:
                    yield batch.pop()  # the loop alone holds it, and may free its memory
                    cuda = getattr(sys.modules.get("torch"), "cuda", None)
                    if self._synchronize and cuda is not None and cuda.is_initialized():
                        cuda.synchronize()
                finally:  # reached by `break` and exceptions, too
                    clock = now()
                    self._compute += clock - got
            self._ends += now() - clock
        finally:
            self._device += max(0, count().device - before)

    def report(self) -> LoopReport:
        """Return what was measured: until now, or until the end of the ``with`` block."""
        if self._final is not None:
            return self._final
        steps, later = len(self._firsts) + len(self._waits), sum(self._waits) + self._ends
        samples = None if self._batch_size is None else steps * self._batch_size
        exposed = sum(self._firsts) + later
        seconds = max(exposed + self._compute, 1e-9)
        p50, p99 = np.percentile(self._waits or [0.0], (50, 99))
        return LoopReport(
            epochs=len(self._firsts),
            steps=steps,
            samples=samples,
            exposed_seconds=exposed,
            exposed_after_first_seconds=later,
            first_batch_seconds=float(np.median(self._firsts or [0.0])),
            wait_p50_seconds=float(p50),
            wait_p99_seconds=float(p99),
            compute_seconds=self._compute,
            device_bytes=self._device,
            seconds=exposed + self._compute,
            utilisation_percent=100 * self._compute / seconds,
            samples_per_second=None if samples is None else samples / seconds,
        )

    def __str__(self) -> str:
        return str(self.report())


def measure(
    loader: Iterable[Item], *, batch_size: int | None = None, synchronize: bool = True
) -> Steps[Item]:
    """Time a training loop: how long it waits for batches, and how long it computes.

    Parameters
    ----------
    loader
        Whatever the loop iterates, once or for several epochs; it is not closed.
    batch_size
        Samples per step, for samples/s; a shorter last batch counts as a full one.
    synchronize
        Wait for the GPU at the end of each step, where torch has used CUDA: what a step has started
        there counts as its own. False: only what the program itself waits for is timed.

    Returns
    -------
    Steps
        The loader to iterate instead, whose length and attributes are those of `loader`. Printed,
        it gives the verdict; ``report()`` returns the numbers as a `LoopReport`.

    Raises
    ------
    TypeError
        If the loader cannot be iterated over.

    Notes
    -----
    Only loops are timed, not what is between them. A step costs two calls of ``perf_counter``.

    Bytes from devices are those that Linux counts for this process and those that it started,
    whatever they read, from the begin to the end of each loop. Not counted is what came from the
    page cache or over most networks, what is read between loops, what others read for
    them (daemons, workers of a cluster), and what processes read that ended in the loop and that
    nobody waited for.

    Examples
    --------
    >>> with measure([[1, 2], [3, 4]], batch_size=2) as steps:
    ...     for batch in steps:
    ...         pass
    >>> steps.report().samples
    4
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise TypeError(f"{type(loader).__name__} cannot be iterated over")
    return Steps(loader, batch_size, synchronize)
