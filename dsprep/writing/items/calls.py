"""Calling a function for all items, on any workers, until every part is complete.

How many items go to a worker together follows from how long the ones before took. The output does
not show it: parts are read in the order of their items, and a rerun does what lies between those
that are there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dsprep import executors
from dsprep.core.schema import Schema
from dsprep.errors import FormatError, UsageError
from dsprep.storage.trees import remove
from dsprep.writing.items.parts import (
    LISTED,
    Failed,
    Part,
    PartsSource,
    part_name,
    part_paths,
    read_part,
)
from dsprep.writing.items.tasks import (
    Function,
    PartWriter,
    check_function,
    make_part,
    name_of,
    show_function,
    show_item,
)
from dsprep.writing.job import Progress
from dsprep.writing.tasks import Task, run_tasks

TASK_SECONDS = 2.0
"""Seconds of work per task, about: what is lost when a worker is killed."""

MOST_TASKS = 4096
"""Tasks into which items are cut, about: each makes a directory of a few files."""

MOST_ITEMS = 1 << 14
"""Items of a task, unless `MOST_TASKS` asks for more."""

REASONS = 3
"""Errors that are shown when all items failed."""


CONTINUED = (
    "continued: {} of {} items are of an interrupted run; that the function has the same name and "
    "the items the same number is all that was checked: restart=True makes them again"
)


class Calls:
    """Calls of a function for items: the parts that there are, and those that are missing.

    Parameters
    ----------
    function, items
        What is called for each of which.
    declared
        Fields that the user declares.
    skip
        Whether items that fail are left out, and not raised.

    Attributes
    ----------
    schema
        The fields of all samples; None as long as there is none.
    resumed, samples
        The items that earlier runs have done, and all samples that there are.
    """

    def __init__(
        self, function: Function, items: Sequence[Any], declared: Schema | None, *, skip: bool
    ) -> None:
        if not callable(function):
            raise UsageError("function= is not callable", found=show_item(function))
        kind = type(items)
        listed = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
        if not listed or issubclass(kind, Mapping | str | bytes):
            raise UsageError(
                f"items cannot be a {kind.__name__}",
                expected="a sequence, in an order that another run finds again",
                fix="give a list, such as sorted(items)",
            )
        self._function, self._items, self._declared, self._skip = function, items, declared, skip
        self._parts, self._failed = list[Part](), list[Failed]()
        self.schema: Schema | None = None
        self.resumed = self.samples = 0
        self._size = 1  # items of the next task

    def job(self) -> dict[str, Any]:
        """Return what a rerun must have in common to continue, as JSON."""
        return {
            "function": name_of(self._function),
            "items": len(self._items),
            "fields declared": None if self._declared is None else self._declared.to_json(),
        }

    def find(self, directory: Path) -> None:
        """Take the parts of earlier runs that are in a directory; what is of no use is removed."""
        stop = 0
        for first, last, path in part_paths(directory):
            with suppress(FormatError):
                part = read_part(path)
                known = self.schema is None or part.schema in (None, self.schema.to_json())
                skipped = self._skip or not part.failures
                same = (part.start, part.stop) == (first, last)
                if known and skipped and same and stop <= first < last <= len(self._items):
                    self._add(part)
                    stop = last
                    continue
            remove(path)
        self.resumed = sum(part.stop - part.start for part in self._parts)

    def _add(self, part: Part) -> None:
        """Keep what is known of a part; of all that failed only the first `LISTED`."""
        if self.schema is None and part.schema is not None:
            own, fields = self._declared or Schema(()), Schema.from_json(part.schema)
            known = (own[f.name] if f.name in own.names else f for f in fields)
            self.schema = Schema(tuple(known), own.attrs)
        self._failed = sorted((*self._failed, *part.failed))[:LISTED]
        self._parts.append(replace(part, failed=(), schema=None))
        self.samples += part.samples

    def run(
        self,
        executor: Executor,
        attempts: Path,
        durable: bool,
        callback: Progress | None,
        check: Callable[[Schema], object],
    ) -> None:
        """Call the function for all items that are missing.

        Parameters
        ----------
        executor
            Who calls it.
        attempts, durable
            As of its tasks.
        callback
            Called with how many items are done, and how many there are.
        check
            Called with the fields as soon as they are known.

        Raises
        ------
        ItemError, SchemaError
            If an item fails, from what was raised; the parts that are complete stay.
        """
        if getattr(executor, "by_reference", isinstance(executor, ProcessPoolExecutor)):
            check_function(self._function)
        done, tell = self.resumed, callback or (lambda done, total: None)
        tell(done, len(self._items))
        for alone in (True, False):  # the first sample has the fields of all
            if not alone and self.schema is not None:
                check(self.schema)
            tasks = self._tasks(attempts, durable, executors.workers_of(executor), alone)
            ahead = (lambda: 1) if alone else None
            with closing(run_tasks(executor, tasks, ahead)) as results:
                for task, seconds in results:
                    self._add(part := read_part(task.made))
                    count = part.stop - part.start
                    size = count * min(4.0, TASK_SECONDS / max(seconds, 1e-6))
                    self._size = max(1, min(MOST_ITEMS, int(size)))
                    done += count
                    tell(done, len(self._items))
        self._parts.sort(key=lambda part: part.start)

    def _tasks(
        self, attempts: Path, durable: bool, workers: int, alone: bool
    ) -> Iterator[Task[float]]:
        """Yield tasks for the items that are missing; `alone`: as long as no fields are known."""
        smallest = -(-len(self._items) // MOST_TASKS)
        edges = sorted(edge for part in self._parts for edge in (part.start, part.stop))
        gaps = list(zip([0, *edges[1::2]], [*edges[::2], len(self._items)], strict=True))
        left = sum(stop - start for start, stop in gaps)
        for start, stop in gaps:
            while start < stop and not (alone and self.schema is not None):
                share = -(-left // max(1, 2 * workers))  # so that all end at about the same time
                size = min(stop - start, max(smallest, min(self._size, share)))
                last = start + size - 1
                how = self._declared, self.schema, self._skip, durable, os.getpid()
                writer = partial(PartWriter, self._function, *how)
                items = tuple(self._items[i] for i in range(start, start + size))
                yield Task(
                    attempts=attempts,
                    name=part_name(start, start + size),
                    subject=f"items {start} to {last}" if size > 1 else f"item {last}",
                    durable=durable,
                    make=partial(make_part, writer, items, start),
                )
                start, left = start + size, left - size

    def counts(self) -> dict[str, Any]:
        """Return what became of all items, as in an `ItemsReport`."""
        return {
            "items": len(self._items),
            "left_out": sum(part.none for part in self._parts),
            "failures": sum(part.failures for part in self._parts),
            "failed": tuple(self._failed),
        }

    def lineage(self) -> dict[str, Any]:
        """Return what a sidecar says of the origin of the samples."""
        counts = self.counts()
        del counts["failed"]
        return {"command": "dsprep.write", "function": show_function(self._function), **counts}

    def no_samples(self) -> UsageError:
        """Return the error that no item has a sample: the function gave none, or failed."""
        first = [f"item {f.number} ({f.item}): {f.error}" for f in self._failed[:REASONS]]
        counts = self.counts()
        return UsageError(
            f"there is no sample: of {counts['items']:,} items {counts['failures']:,} failed, and "
            "of the others the function gave none",
            found="; ".join(first) or None,
            fix="correct the function or its items",
        )

    def source(self, directory: Path) -> PartsSource:
        """Return the samples of all parts."""
        return PartsSource(directory, self.schema or Schema(()), self._parts)
