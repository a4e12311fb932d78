"""Hidden files beside a dataset: they keep what is computed once of it, with a digest."""

from __future__ import annotations

import os
import secrets
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_DAMAGED = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError


def load_hidden(path: Path, beside: Path, parse: Callable[[bytes], T]) -> T | None:
    """Return what a hidden file keeps, None if there is none to trust; a damaged one is noted.

    Trusted are plain files of this user, of root, or of whom the file `beside` belongs to.
    `parse` compares the digest, and raises any error of Python's or dsprep's if it is not that.
    """
    with suppress(OSError):
        status = path.lstat()
        owners = (os.getuid(), 0, beside.stat().st_uid)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners:
            return None
        data = path.read_bytes()
        try:
            return parse(data)
        except _DAMAGED:
            warnings.warn(f"{path} is damaged, so what it keeps is computed again", stacklevel=3)
    return None


def save_hidden(path: Path, data: bytes) -> None:
    """Keep `data`, whole or not at all, where that can be written."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with suppress(OSError):
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
