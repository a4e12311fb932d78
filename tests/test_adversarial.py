"""The trials of tests/lab/adversarial run, one of each dataset, so that they do not rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRIALS = Path(__file__).parent / "lab" / "adversarial"


def test_one_of_each(tmp_path):
    words = "--count", "35", "--keep", tmp_path / "work"
    done = subprocess.run(
        [sys.executable, TRIALS, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "35 trials, 0 findings" in done.stdout
