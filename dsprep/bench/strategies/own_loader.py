"""The user's own loader: any iterable of batches that a function returns."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from dsprep.bench.strategies.base import Way, iterated
from dsprep.bench.task import Task
from dsprep.errors import UsageError


def find_function(text: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` or ``file.py:function`` names.

    Raises
    ------
    UsageError
        If there is none. What the module itself raises is not caught.
    """
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            sys.path.insert(0, str(Path(where).absolute().parent))
            where = Path(where).stem
        function: Callable[..., Any] = getattr(importlib.import_module(where), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise UsageError(
            f"there is no loader {text}: {error}",
            expected="FILE.py:FUNCTION or MODULE:FUNCTION, a function that returns an iterable",
        ) from error
    if not callable(function):
        raise UsageError(f"{text} is not a function", found=type(function).__name__)
    return function


def count_samples(batch: Any) -> int | None:
    """Return the first dimension of the first array of a batch; None: there is no array.

    >>> count_samples({"x": [np.zeros((3, 2))]})
    3
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((n for one in batch if (n := count_samples(one)) is not None), None)
    shape = getattr(batch, "shape", ())
    return int(shape[0]) if shape else None


PASSED = ("batch_size", "rank", "world_size", "seed")


def open_own(task: Task, resources: ExitStack) -> Way:
    """Open a loader of the user's own: what the function returns, for as many steps as others.

    The function gets what it has parameters for: ``data`` (the paths), ``batch_size``, ``rank``,
    ``world_size``, ``seed``, ``threads``. What it returns is iterated once for each epoch; its
    ``set_epoch`` is called where it has one. Batches are counted and not compared, since only the
    function knows what it does to them.
    """
    known = {
        "data": [str(path) for path in task.files],
        **{name: getattr(task, name) for name in PASSED},
        "threads": max(1, task.threads),
    }
    function = find_function(task.strategy)
    names = inspect.signature(function).parameters
    loader = function(**{name: known[name] for name in known if name in names})
    if (close := getattr(loader, "close", None)) is not None:
        resources.callback(close)

    def epoch(number: int) -> Iterator[Any]:
        if (set_epoch := getattr(loader, "set_epoch", None)) is not None:
            set_epoch(number)
        yield from islice(iterated(loader), task.steps)

    def size(item: Any) -> int:
        count = count_samples(item)
        return task.batch_size if count is None else count

    return Way(epoch, size)
