"""The end of a command: a user's mistake is one line and an exit code; cleanup always runs.

A signal ends it as an interrupt does. Reads and writes that are under way are waited for, which
takes long where a file server is away: then a line says so, and a second interrupt leaves at
once, as if killed.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsprep.cli.report import Verbosity, current_verbosity, detail, fail, note, say
from dsprep.errors import DsprepError, DsprepWarning

INTERRUPTED = 130
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of batch systems at the time limit, and of terminals that are closed."""

PATIENCE = 2.0
"""Seconds after an interrupt until a line says what is waited for."""

WAITING = (
    "waiting for reads and writes that are under way; interrupt again to leave at "
    "once, and run the same command again to continue"
)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Leave with one line on stderr and an exit code where the user is wrong.

    A bug keeps its traceback.
    """
    try:
        with handling_signals(), warnings.catch_warnings():
            warnings.simplefilter("always", DsprepWarning)
            show = warnings.showwarning

            def shown(message: Any, category: Any, *more: Any, **others: Any) -> None:
                if issubclass(category, DsprepWarning):
                    note(str(message))
                else:
                    show(message, category, *more, **others)

            warnings.showwarning = shown
            yield
    except DsprepError as error:
        _causes(error)
        fail(str(error.args[0]), error.exit_code)
    except BrokenPipeError:
        raise
    except MemoryError as error:
        fail(f"out of memory: {error}; lower --memory or --workers", 1)
    except OSError as error:
        _causes(error)
        where = f"{error.filename}: " if error.filename else ""
        notes = getattr(error, "__notes__", ())
        fail("; ".join((f"{where}{error.strerror or error}", *notes)), 1)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        fail(
            "the system allows no more threads; lower --workers, or raise the limit "
            "(ulimit -u, or that of the container)",
            1,
        )
    except KeyboardInterrupt as error:
        message, code = "interrupted", INTERRUPTED
        if isinstance(error, Ended):
            message, code = f"ended by {signal.Signals(error.number).name}", 128 + error.number
        message = " ".join((message, *error.args))
        try:
            fail("; ".join(dict.fromkeys((message, *getattr(error, "__notes__", ())))), code)
        finally:
            from dsprep.executors.mpi import leave

            leave(code)


def _causes(error: BaseException) -> None:
    """Print what an error follows from and where it was noticed, with ``--verbose``."""
    if current_verbosity() < Verbosity.verbose:
        return
    root = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    for frame in [f for f in frames if Path(f.filename).is_relative_to(root)][-1:]:
        where = Path(frame.filename).relative_to(root)
        detail(f"noticed in {where}, line {frame.lineno}, {frame.name}")
    cause = error.__cause__ or error.__context__
    while cause is not None:
        detail(f"because of {type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__


class Ended(KeyboardInterrupt):
    """One of the signals `ENDING` came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def handling_signals() -> Iterator[None]:
    """Raise `Ended` when one of `ENDING` comes, unless it is ignored or has another handler.

    A second interrupt does not raise `KeyboardInterrupt` again, but ends the process.
    """
    waiting = threading.Timer(PATIENCE, lambda: note(WAITING))
    waiting.daemon = True

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the rest is not to be broken off
        raise Ended(number)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, leave_at_once)
        waiting.start()
        raise KeyboardInterrupt

    def leave_at_once(number: int, frame: object) -> None:
        say("dsprep: error: interrupted twice, left at once", err=True)
        os._exit(INTERRUPTED)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.getsignal(s) for s in (*ENDING, signal.SIGINT)}
    try:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:  # else it is ignored, as nohup has it
                signal.signal(number, end)
            elif handler is signal.default_int_handler:
                signal.signal(number, interrupt)
        yield
    finally:
        waiting.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
