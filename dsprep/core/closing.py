"""Blocks that close again what was opened for them, if they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def failure_closes(close: Callable[[], object]) -> Iterator[None]:
    """Enter a block at whose failure `close` is called; at its success nothing is."""
    try:
        yield
    except BaseException:
        close()
        raise
