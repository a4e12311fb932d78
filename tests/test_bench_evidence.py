"""Cold runs: what stayed in the page cache, and which bytes the kernel counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsprep.bench import caches
from dsprep.bench.evidence import DEVICE, Evidence

NBYTES = 1 << 20


@pytest.mark.parametrize(
    ("held", "device", "problem", "words"),
    [
        (0.0, 1000, "", DEVICE),
        (None, 900, "", DEVICE),
        (0.0, 10, "", f"pages dropped, 1% of the bytes {DEVICE}: a network mount, or warm"),
        (None, 0, "", f"0% of the bytes {DEVICE}: a network mount, or warm"),
        (0.5, 500, "not cold: the page cache still held 50% of the files", None),
        (1.0, 0, "(tmpfs) nothing is cold (--warm)", None),
    ],
)
def test_a_cold_run_has_evidence(held, device, problem, words):
    found = Evidence(held, device, 1000)
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
    assert words is None or found.words == words


def test_the_page_cache_is_looked_at(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(NBYTES))
    path.read_bytes()
    assert caches.held([path]) == 1.0
    caches.drop([path])
    share = caches.held([path])
    if share:
        pytest.skip("files stay in memory here")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(NBYTES // 2)
    assert 0.4 < caches.held([path]) < 0.7
    (tmp_path / "empty").touch()
    assert caches.held([tmp_path / "empty"]) == 0.0
