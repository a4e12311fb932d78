"""A command that a signal ends cleans up, as one that is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What batch systems send at the end of the time, and terminals when they are closed."""


class Ended(KeyboardInterrupt):
    """One of the signals `ENDING` came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def heeding() -> Iterator[None]:
    """Raise `Ended` when one of `ENDING` comes, unless it is ignored or has another handler."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the rest is not to be broken off
        raise Ended(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.getsignal(s) for s in ENDING}
    try:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:  # else it is ignored, as nohup has it
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return what came, with what is to do about it, and the exit status."""
    what, code = "interrupted", INTERRUPTED
    if isinstance(error, Ended):
        what, code = f"ended by {signal.Signals(error.number).name}", 128 + error.number
    return "; ".join((what, *getattr(error, "__notes__", ()))), code
