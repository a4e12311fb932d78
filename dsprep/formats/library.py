"""One clear line for any error of a format's library about a damaged file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from dsprep.errors import DsprepError, FormatError

_ERRNO = re.compile(r"\berrno = (\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of a disk or a file that can take no more."""

_ERRORS = (
    *(OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError),
    *(AttributeError, SystemError),
)


@contextmanager
def library_errors(
    where: object, doing: str, reason: re.Pattern[str] | None = None
) -> Iterator[None]:
    """Turn exceptions of a library inside the block into `FormatError`.

    Those of the operating system pass through.

    Parameters
    ----------
    where
        The file and, if known, the part of it.
    doing
        The action that fails: ``"it cannot be read"``.
    reason
        The group of a message that matters, if it matches.
    """
    try:
        yield
    except DsprepError:
        raise
    except MemoryError as error:
        raise FormatError(doing, where=where, found="sizes beyond the memory") from error
    except _ERRORS as error:
        if isinstance(error, OSError) and error.errno:
            raise
        text = " ".join(str(error).split())
        number = _ERRNO.search(text)  # HDF5 gives it in its text only
        if number is not None and int(number[1]) in _FULL:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(where)) from error
        inner = reason.search(text) if reason else None
        text = (inner[1] if inner else text)[:200] or type(error).__name__
        raise FormatError(f"{doing}: {text}", where=where) from error
