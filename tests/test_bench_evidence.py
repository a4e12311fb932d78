"""Cold runs: what stayed in the page cache, and which bytes the kernel counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsprep.bench import caches
from dsprep.storage.trees import drop_cached

NBYTES = 1 << 20


def test_the_page_cache_is_looked_at(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(NBYTES))
    path.read_bytes()
    assert caches.resident([path]) == 1.0
    drop_cached([path])
    share = caches.resident([path])
    if share:
        pytest.skip("files stay in memory here")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(NBYTES // 2)
    assert 0.4 < caches.resident([path]) < 0.7
    (tmp_path / "empty").touch()
    assert caches.resident([tmp_path / "empty"]) == 0.0
