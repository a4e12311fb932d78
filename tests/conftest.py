"""What all tests share: quick garbage collections, and examples that may take their time."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # other processes may have the cores
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Let a collection look only at what the module itself makes, not at all that is imported."""
    gc.collect()  # what the module before left, whose files would stay open
    gc.freeze()
