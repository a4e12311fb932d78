"""Formats and stores of other distributions, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

PROGRAM = """
import numpy as np, dsprep
dsprep.write("a.toy", ({"x": np.full(3, i, "f4"), "y": i} for i in range(50)), length=50)
dsprep.convert("a.toy", "b.h5")
dsprep.repack("b.h5", "c.toy", buffer_size=10)
dsprep.convert("memory://c.toy", "d", to="toy")
with dsprep.open("a.toy") as a, dsprep.open("d") as d, dsprep.Reader("c.toy", 7) as reader:
    assert dsprep.verify(a, d).same
    assert sorted(int(y) for batch in reader for y in batch["y"]) == list(range(50))
"""

STORE = """
from pathlib import Path
from memory_store import MemoryStore

def make(scheme):
    store = MemoryStore()
    store.add(Path("c.toy"))
    return store
"""


def test_a_format_and_a_store_that_are_installed(tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    info = site / "others-1.0.dist-info"
    info.mkdir(parents=True)
    work.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dsprep.formats]\ntoy = toy_format:Toy\n[dsprep.stores]\nmemory = others_store:make\n"
    )
    for name in ("toy_format.py", "memory_store.py"):
        (site / name).write_text((HERE / name).read_text())
    (site / "others_store.py").write_text(STORE)
    root = str(HERE.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), root])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=work, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "dsprep", "inspect", "a.toy"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert "samples  50" in done.stdout, done.stderr
