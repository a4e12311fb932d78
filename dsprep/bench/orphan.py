"""A process of a benchmark does not outlive the one that started it, however that one ended."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; see ``prctl(2)``.

    Where the C library has no such call, it lives on until its work is done.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
