"""Functions of items for `test_write_items`, in a module that worker processes can import.

``mpiexec -n 4 python item_functions.py mpi TARGET``, ``python item_functions.py processes TARGET``:
write the samples of 60 items by ranks, or by processes that can be killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import dsprep
from dsprep.writing.items import calls

OPTIONS = {
    "schema": {"r": "int16[None,3]"},
    "buffer_size": 8,
    "stripe_size": "4KiB",
    "durable": False,
}
DELAY = 0.0
"""Seconds that a function takes, at most."""


def sample(i, j=0):
    """Return a sample of fixed, ragged, `str` and `bytes` fields that depends on two numbers."""
    rng = np.random.default_rng([i, j])
    return {
        "x": rng.random((6, 5), dtype="f4"),
        "y": 100 * i + j,
        "r": rng.integers(0, 99, (i % 4, 3)).astype("<i2"),
        "name": f"nr {i}",
        "raw": rng.bytes(i % 5),
    }


def several(i):
    """Give none, one, or several samples, as a list or one after another."""
    time.sleep(random.random() * DELAY)
    if i % 5 == 1:
        return None
    if i % 5 == 2:
        return [sample(i, j) for j in range(3)]
    if i % 5 == 3:
        return (sample(i, j) for j in range(i % 4))  # of some, none
    return sample(i)


def slow(i):
    """Give a sample after up to 20 ms."""
    time.sleep(random.random() * 0.02)
    return several(i)


def failing(i):
    """Fail for some items; of others give a sample that does not fit, or fail after some."""
    if i % 20 == 7:
        raise ValueError(f"there is no {i}")
    if i % 20 == 12:
        return {**sample(i), "y": np.zeros(2)}
    if i % 20 == 17:
        return failing_after(i)
    return several(i)


def refusing(i):
    """Fail for one item."""
    if i == 7:
        raise ValueError(f"there is no {i}")
    return several(i)


def failing_after(i):
    """Fail after some samples."""
    yield sample(i)
    yield sample(i, 1)
    raise KeyError(i)


class Odd(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()  # which cannot be pickled, either


def odd(i):
    """Raise it."""
    if i == 3:
        raise Odd(1, 2)
    return sample(i)


def lost(item):
    """Be killed for one item, the first time."""
    number, marker = item
    if number == 30 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return several(number)


def ending(i):
    """End the process for some items, each in another way."""
    if i == 4:
        os._exit(3)
    if i == 11:
        os.kill(os.getpid(), signal.SIGSEGV)
    if i == 17:
        sys.exit("no more")
    return small(i)


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError

    def __repr__(self):
        raise RuntimeError


def never(i):
    """Fail for all items."""
    raise (Mute if i % 10 == 9 else KeyError if i % 2 else ValueError)(i)


def small(i):
    """Give a sample at once."""
    return {"y": i}


def main():
    import item_functions  # as other processes know it

    executor, target = sys.argv[1:]
    calls.TASK_SECONDS = 0.0
    function = item_functions.several if executor == "mpi" else item_functions.slow
    dsprep.write(target, range(60), function=function, executor=executor, workers=2, **OPTIONS)


if __name__ == "__main__":
    main()
