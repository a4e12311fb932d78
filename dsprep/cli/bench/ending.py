"""A benchmark that is ended by a signal removes what it wrote, as one that is interrupted."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from dsprep.cli.report import fail

P = ParamSpec("P")
R = TypeVar("R")

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What batch systems send at the end of the time, and terminals when they are closed."""


def tidy(command: Callable[P, R]) -> Callable[P, R]:
    """Return `command`, which is interrupted by `ENDING` and not killed."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        came: list[int] = []

        def end(number: int, frame: object) -> None:
            signal.signal(number, signal.SIG_IGN)  # the rest is not to be broken off
            came.append(number)
            raise KeyboardInterrupt

        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {s: signal.getsignal(s) for s in ENDING}
        try:
            for number, handler in before.items():
                if handler == signal.SIG_DFL:  # else it is ignored, as nohup has it
                    signal.signal(number, end)
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            if came:
                fail(f"ended by {signal.Signals(came[0]).name}", 128 + came[0])
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return run
