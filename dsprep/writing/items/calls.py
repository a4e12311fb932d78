"""Calling a function for all items, on any workers, until every part is complete.

How many items go to a worker together follows from how long the ones before took. The output does
not show it: parts are read in the order of their items, and a rerun does what lies between those
that are there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dsprep import executors
from dsprep.core.schema import Schema
from dsprep.errors import UsageError
from dsprep.sidecar.spec import read_record, write_record
from dsprep.storage.nodes import node, wait_for
from dsprep.storage.trees import remove
from dsprep.writing.items.parts import LISTED, Failed, Part, PartsSource, parts_in
from dsprep.writing.items.tasks import (
    Function,
    Outcome,
    Task,
    check_function,
    do,
    name_of,
    show_item,
)

TASK_SECONDS = 2.0
"""Seconds of work per task, about: what is lost when a worker is killed."""

MOST_TASKS = 4096
"""Tasks into which items are cut, about: each makes a directory of a few files."""

MOST_ITEMS = 1 << 14
"""Items of a task, unless `MOST_TASKS` asks for more."""

OFTEN = 0.5
"""Seconds between two reports of progress, at least."""

REASONS = 3
"""Errors that are shown when all items failed."""

_KNOWN = "known.json"
_RUN = "run-"


@dataclass(frozen=True)
class Progress:
    """How far the work has come; as text a line for a person.

    Attributes
    ----------
    what
        ``"items"`` while the function is called, then ``"samples"`` while they are written.
    done, total
        Of these, those of interrupted runs included.
    before
        Of those done, how many earlier runs did.
    seconds
        Since this run began with them.
    """

    what: str
    done: int
    total: int
    before: int
    seconds: float

    @property
    def rate(self) -> float:
        """How many are done in a second of this run."""
        return (self.done - self.before) / max(self.seconds, 1e-9)

    @property
    def left(self) -> float | None:
        """Seconds until all are done, if the rate stays as it is; None if there is none yet."""
        return (self.total - self.done) / self.rate if self.rate else None

    def __str__(self) -> str:
        text = f"{self.what} {self.done:,} of {self.total:,}, {self.rate:,.1f} a second"
        if self.left is None:
            return text
        minutes, seconds = divmod(round(self.left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{text}, {hours}:{minutes:02}:{seconds:02} left"


ProgressCallback: TypeAlias = Callable[[Progress], object]


class ProgressReporter:
    """Reports the progress of one kind of work, not more often than a person can read."""

    def __init__(self, callback: ProgressCallback | None, subject: str, total: int) -> None:
        self._callback, self._subject, self._total = callback, subject, total
        self._before: int | None = None
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, nbytes: int = 0) -> None:
        """Report how many are done; the first call says how many were done before."""
        now, first = time.monotonic(), self._before is None
        if self._before is None:
            self._before, self._began = done, now
        due = first or done == self._total or now - self._last >= OFTEN
        if self._callback is None or not due:
            return
        self._last = now
        self._callback(Progress(self._subject, done, self._total, self._before, now - self._began))


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is to be done.

    Attributes
    ----------
    function, items
        What is called for each of which.
    declared
        Fields that the user declares.
    skip
        Whether items that fail are left out, and not raised.
    """

    function: Function
    items: Sequence[Any]
    declared: Schema | None
    skip: bool

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError("function= is not callable", found=show_item(self.function))
        kind = type(self.items)
        listed = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
        if not listed or issubclass(kind, Mapping | str | bytes):
            raise UsageError(
                f"items cannot be a {kind.__name__}",
                expected="a sequence, in an order that another run finds again",
                fix="give a list, such as sorted(items)",
            )

    def job(self) -> dict[str, Any]:
        """Return what a rerun must have in common to continue, as JSON."""
        declared = self.declared
        return {
            "function": name_of(self.function),
            "items": len(self.items),
            "fields declared": None if declared is None else declared.to_json(),
        }


CONTINUED = (
    "continued: {} of {} items are of an interrupted run; that the function has the same name and "
    "the items the same number is all that was checked: restart=True makes them again"
)


class TaskSizer:
    """How many items a task has.

    Parameters
    ----------
    total
        All items.
    workers
        How many work side by side; 0: unknown.
    """

    def __init__(self, total: int, workers: int) -> None:
        self._smallest = -(-total // MOST_TASKS)
        self._workers, self._size, self._seconds = max(1, workers), 1, 0.0

    def ahead(self, most: int) -> int:
        """Return how many tasks are handed over: few until they take long, of `most` workers."""
        return 2 * max(1, most if self._seconds >= TASK_SECONDS / 4 else self._workers)

    def size(self, left: int) -> int:
        """Return how many of the items that are left the next task has."""
        share = -(-left // (2 * self._workers))  # so that all end at about the same time
        return min(left, max(self._smallest, min(self._size, share)))

    def learn(self, items: int, seconds: float) -> None:
        """Account for a finished task."""
        self._seconds = seconds
        target = items * min(4.0, TASK_SECONDS / max(seconds, 1e-6))
        self._size = max(1, min(MOST_ITEMS, int(target)))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What became of items.

    Attributes
    ----------
    items
        How many there are.
    left_out
        Of how many the function gave no sample.
    failures
        How many failed, and were left out.
    failed
        The first `LISTED` of these: number, item and error of each.
    """

    items: int
    left_out: int
    failures: int
    failed: tuple[Failed, ...]


class NoSampleError(UsageError):
    """No item has a sample: the function gave none, or failed each time."""

    def __init__(self, summary: Summary) -> None:
        first = [f"item {f.number} ({f.item}): {f.error}" for f in summary.failed[:REASONS]]
        super().__init__(
            f"there is no sample: of {summary.items:,} items {summary.failures:,} failed, and of "
            "the others the function gave none",
            found="; ".join(first) or None,
            fix="correct the function or its items",
        )


class Calls:
    """Calls the function for the items that no part has.

    Parameters
    ----------
    call
        What is to be done.
    directory
        Where parts are.
    durable
        Whether to wait for the disk.
    released
        Whether the output has samples whose data were removed here.

    Attributes
    ----------
    parts
        Those that are there, in order.
    schema
        The fields of all samples; None as long as there is none.
    resumed, samples
        The items that earlier runs have done, and their samples.
    notes
        What is worth knowing.
    """

    def __init__(self, call: Call, directory: Path, *, durable: bool, released: bool) -> None:
        self._call, self._directory, self._durable = call, directory.absolute(), durable
        self.notes: tuple[str, ...] = ()
        directory.mkdir(exist_ok=True)
        for path in directory.glob(f"{_RUN}*"):
            remove(path)
        self.schema = self._known_schema()
        self.parts, self._failed = list[Part](), list[Failed]()
        self._find(released)
        self.resumed = sum(part.stop - part.start for part in self.parts)
        self.samples = sum(part.samples for part in self.parts)
        if self.resumed:
            self.notes = (CONTINUED.format(f"{self.resumed:,}", f"{len(call.items):,}"),)

    def _known_schema(self) -> Schema | None:
        """Return the fields that an earlier run found, with the attributes that are declared."""
        try:
            known = read_record(self._directory / _KNOWN)
            schema = Schema.from_json(known["schema"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        declared = self._call.declared or Schema(())
        fields = (declared[f.name] if f.name in declared.names else f for f in schema)
        return Schema(tuple(fields), declared.attrs)

    def _find(self, released: bool) -> None:
        """Take the parts that are there and count; the others are removed."""
        stop = 0
        for part in parts_in(self._directory, released):
            unknown = part.samples and self.schema is None
            failing = part.failures and not self._call.skip
            if unknown or failing or not stop <= part.start <= part.stop <= len(self._call.items):
                remove(self._directory / part.name)
            else:
                self._add(part)
                stop = part.stop

    def _add(self, part: Part) -> None:
        """Keep what is known of a part; of all that failed only the first `LISTED`."""
        self._failed = sorted((*self._failed, *part.failed))[:LISTED]
        self.parts.append(replace(part, failed=()))

    def summary(self) -> Summary:
        """Return what became of all items."""
        return Summary(
            items=len(self._call.items),
            left_out=sum(part.none for part in self.parts),
            failures=sum(part.failures for part in self.parts),
            failed=tuple(self._failed),
        )

    def run(
        self, executor: Executor, callback: ProgressCallback | None, check: Callable[[Schema], None]
    ) -> None:
        """Call the function for all items that are missing.

        Parameters
        ----------
        executor
            Who calls it.
        callback
            Called with how far that has come.
        check
            Called with the fields as soon as they are known.

        Raises
        ------
        ItemError, SchemaError
            If an item fails, from what was raised; the parts that are complete stay.
        """
        call, apart = self._call, type(executor) is not ThreadPoolExecutor
        if getattr(executor, "by_reference", isinstance(executor, ProcessPoolExecutor)):
            check_function(call.function)
        attempts = Path(tempfile.mkdtemp(prefix=_RUN, dir=self._directory))
        workers = executors.workers_of(executor)
        pace = TaskSizer(len(call.items), getattr(executor, "present", workers))
        reporter = ProgressReporter(callback, "items", len(call.items))
        done = self.resumed
        reporter(done)
        for alone in (True, False):  # the first sample has the fields of all
            if not alone and self.schema is not None:
                check(self.schema)
            tasks = self._tasks(attempts, pace, alone, apart)
            ahead = (lambda: 1) if alone else partial(pace.ahead, workers) if workers else None
            with closing(executors.run(executor, do, tasks, ahead, again=self._again)) as outcomes:
                for task, outcome in outcomes:
                    self._take(task, outcome)
                    pace.learn(len(task.items), outcome.seconds)
                    done += outcome.part.stop - outcome.part.start
                    reporter(done)
        self.parts.sort(key=lambda part: part.start)
        remove(attempts)

    def _tasks(self, attempts: Path, pace: TaskSizer, alone: bool, apart: bool) -> Iterator[Task]:
        """Yield tasks for the items that are missing; `alone`: as long as no fields are known."""
        call = self._call
        edges = [
            0,
            *(e for p in sorted(self.parts, key=lambda p: p.start) for e in (p.start, p.stop)),
        ]
        gaps = list(zip(edges[::2], [*edges[1::2], len(call.items)], strict=True))
        left = sum(stop - start for start, stop in gaps)
        for start, stop in gaps:
            while start < stop and not (alone and self.schema is not None):
                size = min(stop - start, pace.size(left))
                yield Task(
                    function=call.function,
                    items=tuple(call.items[i] for i in range(start, start + size)),
                    start=start,
                    declared=call.declared,
                    schema=self.schema,
                    skip=call.skip,
                    directory=self._directory,
                    attempts=attempts,
                    durable=self._durable,
                    apart=apart,
                    node=node(),
                )
                start, left = start + size, left - size

    def _again(self, task: Task, error: BaseException) -> Iterator[Task]:
        return task.again(error, lambda: self.schema)

    def _take(self, task: Task, outcome: Outcome) -> None:
        """Account for a finished task."""
        if outcome.error is not None:
            raise outcome.error from outcome.cause
        wait_for(self._directory / outcome.part.name / "part.json", outcome.node)
        if self.schema is None and outcome.schema is not None:
            self.schema = outcome.schema
            known = {"schema": self.schema.to_json()}
            write_record(known, self._directory / _KNOWN, durable=self._durable)
        self._add(outcome.part)

    def source(self) -> PartsSource:
        """Return the samples of all parts.

        Raises
        ------
        NoSampleError
            If there is none.
        """
        if self.schema is None:
            raise NoSampleError(self.summary())
        return PartsSource(self._directory, self.schema, self.parts, node())
