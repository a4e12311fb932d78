"""Output of the command line: errors in one line, notes, tables, and progress bars."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from dsprep.core.escaping import printable, printable_json
from dsprep.core.units import show_time

if TYPE_CHECKING:
    from rich.progress import Progress

    from dsprep.writing.job import Job, Report

SECONDS = 30.0
"""Seconds between two lines of progress where stderr is not a terminal."""


class Verbosity(IntEnum):
    """The amount of output of a command; results, notes and errors are always printed."""

    quiet = -1
    usual = 0
    verbose = 1


_verbosity: ContextVar[Verbosity] = ContextVar("verbosity", default=Verbosity.usual)


def current_verbosity() -> Verbosity:
    """Return the verbosity of the running command."""
    return _verbosity.get()


@contextmanager
def verbosity(level: Verbosity) -> Iterator[None]:
    """Set the verbosity of a command, and print its time with ``--verbose``."""
    before = _verbosity.set(level)
    try:
        with step("in all"):
            yield
    finally:
        _verbosity.reset(before)


def say(*lines: str, err: bool = False, style: Mapping[str, Any] | None = None) -> None:
    """Print lines. Nothing else prints: whatever names and values hold, it is escaped here.

    A newline inside a line is escaped too, so that no value passes for a line of its own.
    """
    if all(map(str.isprintable, lines)):
        text = "\n".join(lines)
    else:
        text = "\n".join(map(printable, lines))
    if style and not os.environ.get("NO_COLOR"):
        text = typer.style(text, **style)
    typer.echo(text, err=err)


def say_json(text: str) -> None:
    """Print JSON, in as many lines as it has."""
    typer.echo(printable_json(text))


def fail(message: str, code: int) -> NoReturn:
    """Print an error as one line and leave the command."""
    _remark(f"dsprep: error: {' '.join(message.split())}")
    raise typer.Exit(code)


def note(message: str) -> None:
    """Print a remark that is neither result nor error."""
    _remark(f"dsprep: note: {message}")


def remark(message: str) -> None:
    """Print a note unless ``--quiet`` is given."""
    if current_verbosity() > Verbosity.quiet:
        note(message)


def detail(message: str) -> None:
    """Print a line with ``--verbose`` only."""
    if current_verbosity() >= Verbosity.verbose:
        _remark(f"dsprep: {message}")


def _remark(line: str) -> None:
    """Print a line on stderr."""
    say(*_wrapped(line, 2, err=True), err=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print the duration of a step, with ``--verbose``."""
    began = time.monotonic()
    try:
        yield
    finally:
        detail(f"{name}: {time.monotonic() - began:.2f} s")


def report_rows(report: Report, name: str = "") -> list[tuple[str, str]]:
    """Return the report of an output for a person; `name` is the name of its split."""
    from dsprep.core.units import show_nbytes

    more = report.bytes_out - report.payload
    share = f" ({more / report.payload:+.1%} of the values)" if report.payload > abs(more) else ""
    rate = show_nbytes(report.copied / max(report.seconds, 1e-9))
    rows = [
        (
            f"wrote {name}".rstrip(),
            f"{report.target} ({report.files:,} file{'s' * (report.files != 1)})",
        ),
        ("samples", f"{report.samples:,}"),
        ("read", show_nbytes(report.bytes_in)),
        ("written", f"{show_nbytes(report.bytes_out)}{share}"),
        ("time", f"{report.seconds:.2f} s, {rate}/s of values"),
        ("sidecar", str(report.sidecar)),
    ]
    if report.resumed:
        rows.insert(2, ("continued", f"after {report.resumed:,} samples of an interrupted run"))
    return rows


def scratch_rows(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """Return the row on local working files of an output in a store."""
    from dsprep.core.units import show_nbytes
    from dsprep.storage.atomic import scratch_directory
    from dsprep.storage.paths import StorePath
    from dsprep.writing.job import staged_nbytes

    target = jobs[0].target
    if not isinstance(target, StorePath):
        return []
    nbytes = sum(map(staged_nbytes, jobs)) + max(job.scratch_nbytes for job in jobs)
    directory = scratch_directory(target)
    return [("scratch", f"about {show_nbytes(nbytes)} at a time in {directory} (TMPDIR)")]


def print_json(content: Any) -> None:
    """Print a result for other programs; numbers that JSON lacks, such as NaN, become text."""
    from dsprep.sidecar.spec import dump_json

    if isinstance(content, dict) and (asked := _asked()) is not None:
        content = {**content, "asked": asked}
    say_json(dump_json(_finite(content)).rstrip("\n"))


def _asked() -> dict[str, int] | None:
    """Return the requests of this process to object stores, None if there were none."""
    module = sys.modules.get("dsprep.storage.objects.requests")
    counters = {} if module is None else dict(module.counters)
    return counters if any(counters.values()) else None


def say_asked() -> None:
    """Print how many requests this process made to object stores, and the bytes that came."""
    from dsprep.core.units import show_nbytes

    if (asked := _asked()) is not None:
        remark(
            f"asked the store: {asked['requests']:,} GET requests, "
            f"{show_nbytes(asked['nbytes'])}; {asked['other']:,} others (HEAD, LIST, PUT)"
        )


def _finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(v) for v in content] if isinstance(content, list | tuple) else content


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Print facts as aligned lines of name and value."""
    names = [printable(name) for name, _ in rows]
    width = max(map(len, names), default=0)
    for name, (_, value) in zip(names, rows, strict=True):
        say(*_wrapped(f"{name:<{width}}  {value}".rstrip(), width + 2))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns; the first row is their heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        say("  ".join(cells).rstrip())


def _wrapped(line: str, indent: int, *, err: bool = False) -> list[str]:
    """Break a line between words to fit the terminal, never between a number and its unit."""
    stream, line, columns = (sys.stderr if err else sys.stdout), printable(line), 0
    if stream.isatty() or ("COLUMNS" in os.environ and not err):
        own = os.get_terminal_size(stream.fileno()) if stream.isatty() else (0, 0)
        columns = shutil.get_terminal_size(own).columns
    if len(line) <= columns or columns < indent + 20:
        return [line]
    text = re.sub(r"(\d|\s--?[a-z][a-z-]*|\bdsprep) (?=\S)", "\\1\0", line[indent:])
    parts = textwrap.wrap(text, columns - indent, break_long_words=False, break_on_hyphens=False)
    parts = [part.replace("\0", " ") for part in parts]
    return [line[:indent] + parts[0], *(" " * indent + part for part in parts[1:])]


def print_done(rows: list[tuple[str, str]]) -> None:
    """Print rows of a report unless ``--quiet`` is given."""
    if current_verbosity() > Verbosity.quiet:
        print_rows(rows)


@contextmanager
def progress_bar(
    label: str, samples: int, payload: int, show: bool, unit: str = "samples"
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a command, with the time left, on stderr.

    Yields the function to call with (samples or what `unit` says, payload bytes) done so far.
    """
    total = max(1, payload)
    with _shown(label, show) as update:
        yield lambda done, nbytes: update(
            min(nbytes, total), total, f"{done:,} of {samples:,} {unit}, {nbytes / total:.0%}"
        )


@contextmanager
def count_bar(label: str, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a count on stderr. Yields the function to call with (done, of how many)."""
    with _shown(label, show) as update:
        yield lambda done, total: update(done, total, f"{done:,} of {total:,}")


@contextmanager
def byte_bar(label: str, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show bytes and the time left on stderr.

    Yields the function to call with (done, of how many), from any thread.
    """
    from dsprep.core.units import show_nbytes

    with _shown(label, show) as update:
        yield lambda done, total: update(
            done, total, f"{show_nbytes(done)} of {show_nbytes(total)}, {done / max(1, total):.0%}"
        )


@contextmanager
def run_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show how many runs of a benchmark are done, on stderr.

    Yields the function to call with (done, of how many, what is being done).
    """
    with _shown("runs", True) as update:
        yield lambda done, total, words: update(done, total, f"{done:,} of {total:,}, {words}")


@contextmanager
def _shown(label: str, show: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show progress as a bar or log lines; yield the function to call with (done, total, words)."""
    with step(label):
        if not show or current_verbosity() < Verbosity.usual:
            yield lambda done, total, words: None
        elif not sys.stderr.isatty():
            yield _Lines(label)
        else:
            with _bar() as bar:
                task = bar.add_task(label, total=None, words="")
                yield lambda done, total, words: bar.update(
                    task, completed=done, total=total, words=printable(words)
                )


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.fields[words]}", markup=False)
    columns = ("{task.description}", BarColumn(), words, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _Lines:
    """Progress in a log: a line when `SECONDS` have passed since the one before."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int, words: str) -> None:
        now = time.monotonic()
        if now - self._last < SECONDS:
            return
        self._last = now
        left = (now - self._began) * (total - done) / done if done else math.inf
        about = f", about {show_time(left)} left" if math.isfinite(left) else ""
        say(f"dsprep: {self._label}: {words}{about}", err=True)
