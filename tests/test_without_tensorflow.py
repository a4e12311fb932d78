"""TensorFlow is needed by `dsprep.tf` and the strategies that measure it, by nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import numpy as np

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""

WORK = """
import sys
import dsprep
from dsprep.cli import main

def run(*words):
    sys.argv = ["dsprep", *words]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    assert not code, (words, code)

data = {"hdf5": "a.h5", "lmdb": "a.lmdb", "tfrecord": "a.tfrecord", "zarr": "a.zarr"}
for to in ("lmdb", "tfrecord", "zarr"):
    run("convert", "a.h5", data[to], "-q")
for source, path in data.items():
    to = "tfrecord" if source != "tfrecord" else "zarr"
    run("convert", path, f"from-{source}-{data[to]}", "-q")
    run("verify", path, f"from-{source}-{data[to]}", "-q")
    grouped = f"grouped-{path}"
    run("repack", path, grouped, "--buffer-size", "8", "-q")
    run("provenance", path, "-q")
    for each in (path, grouped):
        with dsprep.Reader(each, 8, rank=0, world_size=1) as batches:
            assert sum(len(batch["x"]) for batch in batches) == 40
assert "tensorflow" not in sys.modules
"""

BENCH = ("bench", "read", "a.h5", "-q", "--warm", "-r", "1", "-s", "dsprep", "-s", "in-place")


def test_nothing_else_needs_tensorflow(tmp_path):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK)
    with h5py.File(tmp_path / "a.h5", "w") as out:
        out["x"] = np.arange(120, dtype=np.float32).reshape(40, 3)
        out["y"] = np.arange(40)
    paths = (str(tmp_path / "blocked"), *filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    how = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "check": False}
    blocked = subprocess.run([sys.executable, "-c", "import tensorflow"], **how)
    assert "ModuleNotFoundError: No module named 'tensorflow'" in blocked.stderr
    for words in (("-c", WORK), ("-m", "dsprep", *BENCH)):
        done = subprocess.run([sys.executable, *words], **how)
        assert done.returncode == 0, done.stderr
