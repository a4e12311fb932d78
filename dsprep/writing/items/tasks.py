"""Calling the user's function for some consecutive items, and writing its samples as a part.

A task may be done twice, by two workers at the same time if one of them is taken for dead: each
writes into a directory of its own, in one that is of this run alone, and the first part that is
complete gets the name.
"""

from __future__ import annotations

import copy
import errno
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dsprep.core.schema import Schema
from dsprep.errors import ExecutorError, ItemError, SchemaError, UsageError, describe
from dsprep.storage.durable import sync_directory
from dsprep.storage.nodes import node, wait_for
from dsprep.storage.trees import remove
from dsprep.writing.items.parts import BLOCK_NBYTES, LISTED, Failed, Part, PartWriter, read_part
from dsprep.writing.samples.assemble import Assembler
from dsprep.writing.samples.values import infer

Function: TypeAlias = Callable[[Any], Any]
"""Of an item: gives a sample, an iterable of samples, or None."""

SHOWN = 200
"""Characters that are shown of an item, and five times as many of what went wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Consecutive items, as they travel.

    Attributes
    ----------
    function, items
        What is called on each of which.
    start
        The number of the first item among all.
    declared, schema
        Fields that the user declares; and those of all samples, None: of the first one here.
    skip
        Whether an item that fails is left out, and not raised.
    directory, attempts
        Where the part gets its name; and a directory of this run, where it is made: workers of an
        earlier run find theirs gone.
    durable
        Whether to wait for the disk.
    apart
        Whether another process does it, so that what is raised there has to travel.
    node
        Where the directories were made; see `storage.node`.
    losses
        How many workers have ended over it: it is done again in halves, of one item once more.
    """

    function: Function
    items: tuple[Any, ...]
    start: int
    declared: Schema | None
    schema: Schema | None
    skip: bool
    directory: Path
    attempts: Path
    durable: bool
    apart: bool
    node: str
    losses: int = 0

    def again(self, error: BaseException, schema: Callable[[], Schema | None]) -> Iterator[Task]:
        """Yield the tasks that replace this one after it ended a worker.

        In the end that is to say of one item that it ends workers. `schema`: gives the fields that
        are known when each of these tasks begins.
        """
        count = len(self.items)
        if count > 1:
            cuts = ((0, count // 2), (count // 2, count))
            for first, last in cuts:
                items, start = self.items[first:last], self.start + first
                yield replace(self, items=items, start=start, schema=schema())
            return
        again = replace(self, losses=self.losses + 1, schema=schema())
        yield replace(again, function=Ends(describe(error))) if self.losses else again


class Outcome(NamedTuple):
    """What became of a task.

    Attributes
    ----------
    part
        The part, of fewer items if one failed.
    schema
        The fields of its samples; None if it has none.
    error, cause
        If an item failed: the error that names it, and what was raised.
    seconds, node
        How long it took, and where it was done.
    """

    part: Part
    schema: Schema | None
    error: ItemError | SchemaError | None
    cause: BaseException | None
    seconds: float
    node: str


@dataclass(frozen=True)
class Ends:
    """Stands in for a function that ends the processes calling it: raises an error that says so."""

    reason: str

    def __call__(self, item: Any) -> Any:
        """Raise `ExecutorError`."""
        raise ExecutorError(f"it ended two processes that were at this item alone: {self.reason}")


def do(task: Task) -> Outcome:
    """Call the function for the items of a task, and write a part."""
    for directory in (task.attempts, task.directory):
        wait_for(directory, task.node)
    began = time.monotonic()
    own = Path(tempfile.mkdtemp(prefix=f"{task.start}-", dir=task.attempts))
    with closing(_Making(task, own)) as making:
        stop, error = task.start, None
        try:
            for item in task.items:
                making.add(stop, item)
                stop += 1
        except (ItemError, SchemaError) as failed:
            making.undo()
            error = failed
        part = making.finish(stop)
    if stop > task.start:
        path = task.directory / part.name
        if not _put(own, path):
            part = read_part(path) or part
        if task.durable:
            sync_directory(task.directory)
    remove(own)
    cause = None if error is None else error.__cause__
    if cause is not None and task.apart:
        cause = _travelling(cause)
    return Outcome(part, making.schema, error, cause, time.monotonic() - began, node())


def _put(own: Path, path: Path) -> bool:
    """Give a complete part its name; return whether no other attempt has done so before."""
    try:
        own.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


class _Making:
    """A part that is being made.

    Attributes
    ----------
    schema
        The fields of its samples; None as long as there is none.
    """

    def __init__(self, task: Task, directory: Path) -> None:
        self._task, self._directory, self.schema = task, directory, task.schema
        self._packed: Assembler | None = None
        self._writer: PartWriter | None = None
        self._none = self._failures = 0
        self._failed: list[Failed] = []
        self._before = self._blocks = 0  # samples in memory, and blocks, before the item

    def add(self, number: int, item: Any) -> None:
        """Add the samples of an item, all or none.

        Raises
        ------
        ItemError, SchemaError
            If the function fails, or gives what is not a sample of the schema.
        """
        self._before = 0 if self._packed is None else len(self._packed)
        self._blocks = self._writer.blocks if self._writer is not None else 0
        count = 0
        try:
            for sample in _samples(self._task.function, number, item):
                where = _Where(number, item, count)
                packed = self._packed if self._packed is not None else self._begin(sample, where)
                if packed.nbytes >= BLOCK_NBYTES:
                    self._write(packed)
                packed.add(sample, where)
                count += 1
        except (ItemError, SchemaError) as error:
            if not self._task.skip:
                raise
            self.undo()
            self._failures += 1
            if len(self._failed) < LISTED:
                cause = error.__cause__ or error
                text = cut(describe(cause), 5 * SHOWN)
                self._failed.append(Failed(number, show_item(item), text))
        else:
            self._none += not count

    def _begin(self, sample: Any, where: _Where) -> Assembler:
        if self.schema is None:
            self.schema = infer(sample, self._task.declared, where)
        self._packed = Assembler(self.schema)
        self._writer = PartWriter(self._directory, self.schema)
        return self._packed

    def _write(self, packed: Assembler) -> None:
        """Write what is in memory; what is of the item that is being added, as its own block."""
        assert self._writer is not None
        count, before, batch = len(packed), self._before, packed.take()
        if before:
            self._writer.append({name: column[:before] for name, column in batch.items()})
            self._blocks, self._before = self._writer.blocks, 0
        if count > before:
            self._writer.append({name: column[before:] for name, column in batch.items()})

    def undo(self) -> None:
        """Forget the samples of the item that was added last."""
        if self._writer is not None and self._writer.blocks > self._blocks:
            self._writer.take_back(self._blocks)
        if self._packed is not None and len(self._packed) > self._before:
            batch = self._packed.take()
            self._packed.extend(batch, 0, self._before)

    def finish(self, stop: int) -> Part:
        """Complete the part, which has the items up to `stop`."""
        if self._packed is not None and len(self._packed):
            self._before = len(self._packed)
            self._write(self._packed)
        part = Part(
            start=self._task.start,
            stop=stop,
            samples=0,
            nbytes=0,
            none=self._none,
            failures=self._failures,
            failed=tuple(self._failed),
        )
        self._writer = self._writer or PartWriter(self._directory, Schema(()))
        return self._writer.finish(part, self._task.durable)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


def _samples(function: Function, number: int, item: Any) -> Iterator[Any]:
    """Yield what a function gives of an item, as samples."""
    samples: Iterator[Any] | None = None
    while True:
        try:  # around what the function does alone: what is raised at `yield` is not its failure
            if samples is None:
                samples = iter(_several(function(item)))
            sample = next(samples, _END)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # such as what sys.exit() raises
            raise ItemError(
                f"the function failed: {cut(describe(error), 5 * SHOWN)}",
                where=str(_Where(number, item, 0)),
                fix="correct it and call again with resume=True; or leave out such items: "
                "errors='skip'",
            ) from error
        if sample is _END:
            return
        yield sample


_END = object()


def _several(result: Any) -> Iterable[Any]:
    if result is None:
        return ()
    if isinstance(result, Mapping | str | bytes | np.ndarray) or not isinstance(result, Iterable):
        return (result,)
    return result


class _Where(NamedTuple):
    """The label of an item's sample in messages, made when it is needed."""

    number: int
    item: Any
    sample: int

    def __str__(self) -> str:
        several = f", sample {self.sample}" if self.sample else ""
        return f"item {self.number} ({show_item(self.item)}){several}"


def show_item(item: Any) -> str:
    """Return the `repr` of an item in one line, cut to `SHOWN` characters."""
    try:
        return cut(repr(item), SHOWN)
    except Exception as error:
        return f"<{type(item).__name__}, whose repr fails: {type(error).__name__}>"


def cut(text: str, limit: int) -> str:
    """Return the first line or so of a text, of at most so many characters."""
    text = " ".join(text.split()) if len(text) < 16 * limit else text[: 16 * limit]
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _travelling(error: BaseException) -> BaseException:
    """Return an exception as it can be sent to another process, with where it was raised."""
    trace = "".join(traceback.format_exception(error))
    try:
        again = copy.copy(error)  # as it is made again there
        ForkingPickler.dumps(again)
    except Exception:
        again = RuntimeError(cut(describe(error), 5 * SHOWN))
    again.add_note(f"In the function:\n{trace}")
    return again


def check_function(function: Function) -> None:
    """Raise `UsageError` if other processes cannot import the function."""
    reason = ""
    try:
        ForkingPickler.dumps(function)
    except Exception as error:
        reason = cut(describe(error), SHOWN)
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    inner = getattr(function, "func", function)
    if not reason and getattr(inner, "__module__", "") == "__main__" and not Path(main).is_file():
        reason = "it is not in a file that they could import"
    if reason:
        raise UsageError(
            f"the function cannot be called by other processes: {reason}",
            found=show_function(function),
            fix="define it at the top level of a module, or take executor='threads'",
        )


def check_main() -> None:
    """Raise `UsageError` if a worker process is here only because it imports the main script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker process called it again, when it imported the script",
            fix="put the call under: if __name__ == '__main__':",
        )


def name_of(function: Any) -> str:
    """Return the module and qualified name of a function, or of the class of what is called."""
    if isinstance(function, partial):
        return f"partial({name_of(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def show_function(function: Function) -> str:
    """Return the name of a function, of a `partial` with its arguments, cut to `SHOWN`."""
    arguments = getattr(function, "args", ()), getattr(function, "keywords", {})
    more = f" of {show_item(arguments)}" if isinstance(function, partial) else ""
    return cut(f"{name_of(function)}{more}", SHOWN)
