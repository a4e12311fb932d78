"""``dsprep`` with smaller tasks, and a pause in each: small data suffice to break in.

It is run as ``python slower.py repack ...``, or loaded by a worker of Dask (``--preload``); pauses
are of ``DSPREP_LAB_PAUSE`` seconds.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import dsprep.describing
import dsprep.jobs
import dsprep.remote
from dsprep.cli import main

PAUSE = float(os.environ.get("DSPREP_LAB_PAUSE", "0"))

dsprep.remote.PART_NBYTES = 8 << 20


def paused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that pauses before it does what `function` does."""

    @functools.wraps(function)
    def pausing(*args: Any, **options: Any) -> Any:
        time.sleep(PAUSE)
        return function(*args, **options)

    return pausing


dsprep.jobs._write_shard = paused(dsprep.jobs._write_shard)
dsprep.describing._look = paused(dsprep.describing._look)

if __name__ == "__main__":
    main()
