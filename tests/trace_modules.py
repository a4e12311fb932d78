"""Prints how many modules and functions of dsprep one run passes through: ``python FILE``.

Each run is of 1,000 samples: ``convert`` of an HDF5 file, `Sidecar.read` of one sample, and the
first batch of a `Reader`, with what is read ahead of it. Opening the `Sidecar` or the `Reader` is
not counted. ``-v`` names the functions.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import numpy as np

import dsprep
from dsprep.reader.loader import Reader
from dsprep.sidecar.sidecar import Sidecar

PACKAGE = str(Path(dsprep.__file__).parent)
SAMPLES = 1000


def passed_through(run: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return ``(module, function)`` of all of dsprep that is called while `run` runs."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            found.add((code.co_filename[len(PACKAGE) + 1 : -3], code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def runs(directory: Path) -> dict[str, set[tuple[str, str]]]:
    """Return what each run passes through."""
    source, grouped = directory / "source.h5", directory / "grouped.h5"
    with h5py.File(source, "w") as file:
        file["x"] = np.arange(SAMPLES * 192, dtype="u2").reshape(SAMPLES, 192)
        file["y"] = np.arange(SAMPLES)
    dsprep.convert(source, directory / "warm.h5")  # what is imported, or looked at once
    found = {"convert": passed_through(lambda: dsprep.convert(source, directory / "plain.h5"))}
    dsprep.repack(source, grouped, buffer_size=100)
    with Sidecar.open(grouped) as opened:
        opened.read(0)
        found["Sidecar.read"] = passed_through(lambda: opened.read(7))
    with Reader(grouped, batch_size=50) as reader:
        loops: list[Any] = []

        def first() -> None:
            loops.append(iter(reader))
            next(loops[0])

        found["first group of a Reader"] = passed_through(first)
    return found


def main() -> None:
    """Print the numbers, and with ``-v`` the names."""
    with tempfile.TemporaryDirectory() as directory:
        for name, found in runs(Path(directory)).items():
            modules = {module for module, _ in found}
            print(f"{name}: {len(modules)} modules, {len(found)} functions")
            if "-v" in sys.argv:
                for module, function in sorted(found):
                    print(f"  {module}: {function}")


if __name__ == "__main__":
    main()
