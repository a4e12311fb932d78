"""A command that a signal ends cleans up, as one that is interrupted.

Reads and writes that are under way are waited for, which takes long where a file server is away:
then a line says so, and a second interrupt leaves at once, as if killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What batch systems send at the end of the time, and terminals when they are closed."""

PATIENCE = 2.0
"""Seconds after an interrupt until a line says what is waited for."""

WAITING = (
    "dsprep: note: waiting for reads and writes that are under way; interrupt again to leave at "
    "once, and run the same command again to continue"
)


class Ended(KeyboardInterrupt):
    """One of the signals `ENDING` came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def heeding(say: Callable[[str], None]) -> Iterator[None]:
    """Raise `Ended` when one of `ENDING` comes, unless it is ignored or has another handler.

    A second interrupt does not raise `KeyboardInterrupt` again, but ends the process.
    `say` prints a line to stderr.
    """
    waiting = threading.Timer(PATIENCE, say, [WAITING])
    waiting.daemon = True

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the rest is not to be broken off
        raise Ended(number)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, leave)
        waiting.start()
        raise KeyboardInterrupt

    def leave(number: int, frame: object) -> None:
        say("dsprep: error: interrupted twice, left at once")
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


def ended(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return what came, with what is to do about it, and the exit status."""
    what, code = "interrupted", INTERRUPTED
    if isinstance(error, Ended):
        what, code = f"ended by {signal.Signals(error.number).name}", 128 + error.number
    return "; ".join((what, *getattr(error, "__notes__", ()))), code
