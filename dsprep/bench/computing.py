"""What a step does with its batch: nothing, wait as for an accelerator, or multiply matrices."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from dsprep.errors import UsageError

EDGE = 1024
"""Rows and columns of the matrices of ``gemm``."""

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse(text: str) -> tuple[str, float]:
    """Return what ``none``, ``12ms`` or ``gemm:512`` asks for: a kind, and seconds or an edge.

    Raises
    ------
    UsageError
        If it is something else.
    """
    if text == "none":
        return "none", 0.0
    timed = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s)", text, re.ASCII)
    if timed and 0 < float(timed[1]) * _UNITS[timed[2]] <= 3600:
        return "wait", float(timed[1]) * _UNITS[timed[2]]
    product = re.fullmatch(r"gemm(?::(\d{1,5}))?", text, re.ASCII)
    if product and int(product[1] or EDGE) > 0:
        return "gemm", float(product[1] or EDGE)
    raise UsageError(
        f"--compute {text!r} is not understood",
        expected="none, a time such as 12ms, gemm, or gemm:512 (rows of the matrices)",
    )


def make(text: str) -> Callable[[], object]:
    """Return the work of one step.

    A time is waited for without using the processor, as for an accelerator; ``gemm`` multiplies
    float32 matrices by numpy, which takes processors from readers as training on them does.
    """
    kind, amount = parse(text)
    if kind == "none":
        return _nothing
    if kind == "wait":
        return lambda: _wait(amount)
    import numpy as np

    edge = int(amount)
    rng = np.random.default_rng(0)
    a, b = (rng.random((edge, edge), np.float32) for _ in range(2))
    out = np.empty((edge, edge), np.float32)
    return lambda: np.matmul(a, b, out=out)


def _nothing() -> None:
    """Do nothing."""


def _wait(seconds: float) -> None:
    time.sleep(seconds)
