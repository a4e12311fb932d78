"""Calls of the kernel that Python does not have."""

from __future__ import annotations

import ctypes
from typing import Any

_library = ctypes.CDLL(None, use_errno=True)


def c_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the C library, which sets errno; None where it has none."""
    function = getattr(_library, name, None)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return function
