"""How the command line speaks: errors in one line, notes, tables, and progress bars."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer

from dsprep.errors import DsprepError

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Return `command` with the user's mistakes as one line on stderr and an exit code.

    A bug keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "sidecar ignored")  # a note says it too
                return command(*args, **kwargs)
        except DsprepError as error:
            fail(str(error), error.exit_code)
        except BrokenPipeError:
            raise
        except MemoryError as error:
            fail(f"out of memory: {error}; lower --memory or --workers", 1)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            fail(f"{where}{error.strerror or error}", 1)
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)

    return run


def fail(message: str, code: int) -> NoReturn:
    """Print an error as one line and leave the command."""
    typer.echo(f"dsprep: error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def note(message: str) -> None:
    """Print a remark that is neither result nor error."""
    typer.echo(f"dsprep: note: {message}", err=True)


def print_json(content: Any) -> None:
    """Print a result for other programs; numbers that JSON lacks, such as NaN, become text."""
    from dsprep.sidecar import dump_json

    typer.echo(dump_json(_finite(content)), nl=False)


def _finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(v) for v in content] if isinstance(content, list | tuple) else content


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Print facts as aligned lines of name and value."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}".rstrip())


@contextmanager
def progress_bar(
    what: str, samples: int, payload: int, show: bool
) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with rate and time left on stderr, if that is a terminal.

    Yields the function to call with (samples, payload bytes) done so far.
    """
    if not show or not sys.stderr.isatty():
        yield lambda samples, nbytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[samples]:,}/{task.fields[of]:,} samples"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(what, total=max(1, payload), samples=0, of=samples)

        def update(done: int, nbytes: int) -> None:
            bar.update(task, completed=min(nbytes, max(1, payload)), samples=done)

        yield update
        bar.update(task, completed=max(1, payload))


@contextmanager
def count_bar(what: str, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar that counts, on stderr, if that is a terminal.

    Yields the function to call with (done, of how many).
    """
    if not show or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
