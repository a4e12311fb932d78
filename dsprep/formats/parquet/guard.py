"""pyarrow, imported where it is needed, and its errors as one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsprep.errors import DsprepError, FormatError, MissingExtra


def arrow() -> Any:
    """Return pyarrow, with ``pyarrow.parquet`` imported; `MissingExtra` if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            "reading Parquet needs pyarrow", fix="pip install 'dsprep[parquet]'"
        ) from error
    return pyarrow


@contextmanager
def library(where: object, doing: str) -> Iterator[None]:
    """Turn the errors of pyarrow inside the block into `FormatError`.

    `where` is the file and, if known, the row group and the column; `doing` what fails.
    """
    try:
        yield
    except DsprepError:
        raise
    except MemoryError as error:
        raise FormatError(doing, where=where, found="sizes beyond the memory") from error
    except (
        OSError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        NotImplementedError,
    ) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise FormatError(f"{doing}: {message}", where=where) from error
