"""pyarrow, imported where it is needed."""

from __future__ import annotations

from typing import Any

from dsprep.errors import MissingExtra


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
