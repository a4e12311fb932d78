"""What all tests share: nothing but quick garbage collections."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Let a collection look only at what the module itself makes, not at all that is imported."""
    gc.collect()  # what the module before left, whose files would stay open
    gc.freeze()
