"""``python -m tests.lab.cluster.items OUT``: `dsprep.write` of items, by any executor.

With ``--executor`` as of the commands of dsprep. A call of the function takes
``DSPREP_LAB_PAUSE`` seconds; that of the third item makes the file ``DSPREP_LAB_MARK``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import dsprep
from dsprep.executors import opened

ITEMS = 40


def samples(item: int) -> list[dict[str, Any]]:
    """Return what is made of an item: as many samples as its number says."""
    mark = os.environ.get("DSPREP_LAB_MARK")
    if item == 2 and mark:
        Path(mark).touch()
    time.sleep(float(os.environ.get("DSPREP_LAB_PAUSE", "0")))
    rng = np.random.default_rng(item)
    return [{"x": rng.random(600), "item": item, "k": k} for k in range(item % 5)]


def main() -> None:
    """Write; an error of dsprep is a line, as in a program of a user."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--executor")
    words = parser.parse_args()
    try:
        with opened(words.executor) as executor:
            by = executor or "threads"
            report = dsprep.write(
                words.out, range(ITEMS), function=samples, executor=by, resume=True
            )
    except (dsprep.errors.DsprepError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for note in report.notes:
        print("dsprep: note:", note)


if __name__ == "__main__":
    from tests.lab.cluster import items  # by this name its function is found on other nodes

    items.main()
