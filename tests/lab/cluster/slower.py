"""``dsprep`` with smaller tasks, and a pause in each: small data suffice to break in.

It is run as ``python slower.py repack ...``, or loaded by a worker of Dask (``--preload``); pauses
are of ``DSPREP_LAB_PAUSE`` seconds, and when a process is in its third one, it makes the file
``DSPREP_LAB_MARK``.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dsprep.writing.create_sidecar
import dsprep.writing.parallel
import dsprep.writing.run
import dsprep.writing.shuffle
from dsprep.cli import main

PAUSE = float(os.environ.get("DSPREP_LAB_PAUSE", "0"))
MARK = os.environ.get("DSPREP_LAB_MARK")

dsprep.writing.shuffle.PART_NBYTES = 8 << 20


def paused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that pauses before it does what `function` does."""

    calls = itertools.count(1)

    @functools.wraps(function)
    def pausing(*args: Any, **options: Any) -> Any:
        if next(calls) == 3 and MARK is not None:
            Path(MARK).touch()
        time.sleep(PAUSE)
        return function(*args, **options)

    return pausing


for module in (dsprep.writing.run, dsprep.writing.parallel):
    module.write_shard = paused(module.write_shard)
if sys.argv[1:2] == ["provenance"]:
    dsprep.writing.create_sidecar._fit_layout = paused(dsprep.writing.create_sidecar._fit_layout)

if __name__ == "__main__":
    main()
