"""Waits that ``dsprep plan`` predicts beside what ``bench read`` measures, on any directories.

``python tests/lab/predictions.py DIR [DIR ...]`` writes 0.3 GB to each and measures its storage;
then, for some numbers of ranks and lengths of steps, it prints what an epoch waits: predicted,
measured (the median of three cold runs), and whether that is within 20 % or 5 ms.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

WAYS = ("group", "group-db", "dsprep")
CASES = ((1, "1ms"), (2, "4ms"), (4, "12ms"))


def run(*words: object) -> None:
    command = [sys.executable, "-m", "dsprep", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def check(folder: Path) -> list[tuple[int, int]]:
    """Return (ways within the bounds, ways) of each case in a directory."""
    plain, data, storage = (folder / name for name in ("plain.h5", "data.h5", "storage.json"))
    with h5py.File(plain, "w") as file:
        x = file.create_dataset("x", (4096, 128, 128), "f4")
        for start in range(0, len(x), 256):
            x[start : start + 256] = np.random.default_rng(start).random((256, 128, 128), "f4")
    run("repack", plain, data, "-b", 64)
    plain.unlink()
    run("bench", "storage", folder, "--out", storage, "--seconds", 40)
    found = []
    for ranks, compute in CASES:
        how = ("-M", 16, "--compute", compute, "--json")
        measured = folder / "measured.json"
        threads = max(1, min(4, len(os.sched_getaffinity(0)) // ranks))
        words = ("plan", data, "--ranks-per-node", ranks, "--threads", threads, *how)
        text = subprocess.run(
            [sys.executable, "-m", "dsprep", *map(str, words), "--storage", storage],
            check=True,
            capture_output=True,
        ).stdout
        chosen = itertools.chain.from_iterable(("-s", way) for way in WAYS)
        run("bench", "read", data, "--ranks", ranks, *chosen, *how, measured)
        rows = {row["name"]: row for row in json.loads(measured.read_text())["strategies"]}
        within = 0
        for way in WAYS:
            predicted = json.loads(text)["ways"][way]["exposed_seconds"]
            waited = rows[way]["measures"]["exposed_seconds"]
            seconds, low, high = (waited[k] for k in ("value", "least", "most"))
            good = abs(predicted - seconds) <= max(0.005, 0.2 * seconds)
            within += good
            print(
                f"{folder}: {ranks} ranks, {compute}: {way:9} predicted {predicted:.3f} s, "
                f"measured {seconds:.3f} ({low:.3f} to {high:.3f}){'' if good else '  *'}",
                flush=True,
            )
        found.append((within, len(WAYS)))
        measured.unlink()
    return found


def main() -> None:
    cases = []
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory(dir=name) as folder:
            cases += check(Path(folder))
    print(f"{sum(a for a, _ in cases)} of {sum(b for _, b in cases)} within 20 % or 5 ms")


if __name__ == "__main__":
    main()
