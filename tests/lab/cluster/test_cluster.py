"""What the lab tries, if asked for: it takes root, Debian's packages and many minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("DSPREP_CLUSTER") != "1" or os.geteuid() != 0,
    reason="a cluster of namespaces is made only with DSPREP_CLUSTER=1, as root",
)


@pytest.mark.parametrize("what", ["check", "jobs", "readers", "batch", "losses"])
def test_over_nodes(what):
    command = [sys.executable, str(Path(__file__).parent), what, "--nodes", "4"]
    done = subprocess.run(
        [*command, "--systems", "ext4,gluster,sshfs"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
