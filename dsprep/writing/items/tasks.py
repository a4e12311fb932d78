"""Calling the user's function for some consecutive items, and writing its samples as a part."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dsprep.core.schema import Batch, Schema
from dsprep.errors import ItemError, SchemaError, UsageError, describe
from dsprep.sidecar.spec import write_record
from dsprep.storage.checksums import pwrite_crc32c
from dsprep.storage.durable import close, sync
from dsprep.writing.items.parts import LISTED, Failed, Part
from dsprep.writing.samples.assemble import Assembler
from dsprep.writing.samples.spool import BLOCK_NBYTES, pack
from dsprep.writing.samples.values import infer

Function: TypeAlias = Callable[[Any], Any]
"""Of an item: gives a sample, an iterable of samples, or None."""

SHOWN = 200
"""Characters that are shown of an item, and five times as many of what went wrong with it."""


def make_part(
    writer: Callable[[Path], PartWriter], items: Sequence[Any], start: int, directory: Path
) -> float:
    """Write the samples of items into an empty directory; return the seconds that it took.

    `start`: the number of the first item among all.
    """
    began = time.monotonic()
    with closing(writer(directory)) as part:
        for number, item in enumerate(items, start):
            part.add(number, item)
        part.finish(start, start + len(items))
    return time.monotonic() - began


class PartWriter:
    """Writes the samples of consecutive items into an empty directory.

    Parameters
    ----------
    function
        What is called on each item.
    declared, schema
        Fields that the user declares; and those of all samples, None: of the first one here.
    skip
        Whether an item that fails is left out, and not raised.
    durable
        Whether to wait for the disk.
    process
        Which one hands them out: to another one, what the function raised goes as a note.
    """

    def __init__(
        self,
        function: Function,
        declared: Schema | None,
        schema: Schema | None,
        skip: bool,
        durable: bool,
        process: int,
        directory: Path,
    ) -> None:
        self._function, self._declared, self._schema = function, declared, schema
        self._skip, self._durable, self._process = skip, durable, process
        self._directory = directory
        self._packed: Assembler | None = None
        self._none = self._failures = self._end = 0
        self._failed: list[Failed] = []
        self._blocks: list[tuple[int, int, int, int]] = []
        self._fd = os.open(directory / "data", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def add(self, number: int, item: Any) -> None:
        """Add the samples of an item, all or none.

        Raises
        ------
        ItemError, SchemaError
            If the function fails, or gives what is not a sample of the schema.
        """
        before, count = 0 if self._packed is None else len(self._packed), 0
        try:
            for sample in _samples(self._function, number, item):
                where = _Where(number, item, count)
                if self._packed is None:
                    if self._schema is None:
                        self._schema = infer(sample, self._declared, where)
                    self._packed = Assembler(self._schema)
                self._packed.add(sample, where)
                count += 1
                if not self._skip:  # or the item may be taken back
                    self._write(BLOCK_NBYTES)
        except (ItemError, SchemaError) as error:
            if not self._skip:
                raise self._travelling(error) from error.__cause__
            if self._packed is not None:
                self._packed.cut(before)
            self._failures += 1
            if len(self._failed) < LISTED:
                text = cut(describe(error.__cause__ or error), 5 * SHOWN)
                self._failed.append(Failed(number, show_item(item), text))
        else:
            self._none += not count
        self._write(BLOCK_NBYTES)

    def _travelling(self, error: ItemError | SchemaError) -> ItemError | SchemaError:
        """Return an error as another process learns of it, which is not told its cause."""
        if self._process != os.getpid() and error.__cause__ is not None:
            trace = "".join(traceback.format_exception(error.__cause__))
            error.add_note(f"In the function:\n{trace}")
        return error

    def _write(self, nbytes: int) -> None:
        """Write the samples in memory, if they have so many bytes."""
        if self._packed is None or not len(self._packed) or self._packed.nbytes < nbytes:
            return
        # An item that may be taken back has many blocks' samples.
        count, total = len(self._packed), self._packed.nbytes
        batch, each = self._packed.take(), max(1, count * BLOCK_NBYTES // max(total, BLOCK_NBYTES))
        for i in range(0, count, each):
            self.append({name: column[i : i + each] for name, column in batch.items()})

    def append(self, batch: Batch) -> None:
        """Write samples, which have the fields of the schema in its order, as a block."""
        buffers = pack(batch)
        crc = pwrite_crc32c(self._fd, buffers, self._end)
        nbytes = sum(int(buffer.nbytes) for buffer in buffers)
        self._blocks.append((len(next(iter(batch.values()))), self._end, nbytes, crc))
        self._end += nbytes

    def finish(self, start: int, stop: int) -> None:
        """Complete the files, of these items."""
        self._write(0)
        if self._durable:
            sync(self._fd, data=True)
        self.close()
        part = Part(
            start=start,
            stop=stop,
            blocks=self._blocks,
            schema=None if self._schema is None else self._schema.to_json(),
            none=self._none,
            failures=self._failures,
            failed=tuple(self._failed),
        )
        write_record(asdict(part), self._directory / "part.json", durable=self._durable)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


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
