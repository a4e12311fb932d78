"""What all tests share: quick collections, examples that may take their time, a small dataset."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import re
import signal
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import settings

FULL = os.environ.get("DSPREP_FULL") == "1"
settings.register_profile(  # other processes may have the cores
    "patient", deadline=None, max_examples=300 if FULL else 40
)
settings.load_profile("patient")

OF_THE_CALLER = ("AWS_", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "OMPI_", "PMI", "SLURM_")
for _name in [name for name in os.environ if name.startswith(OF_THE_CALLER)]:
    del os.environ[_name]  # a terminal, a job, a store: what tests start would take it for theirs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _temporary(tmp_path_factory):
    """Let what libraries leave in the directory of temporary files go with those of the tests."""
    folder = str(tmp_path_factory.mktemp("t"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        multiprocessing.util._run_finalizers()  # its own directory is there, for the last time


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk():
    """Files of tests need not outlast a power cut; what a killed process has written is kept."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: os.fstat(fd) and None)
        # nor does anybody complete a sidecar that a test has damaged
        patch.setattr("dsprep.reader.data.PAUSES", (0.0,) * 4)
        yield


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Let a collection look only at what the module itself makes, not at all that is imported."""
    gc.collect()  # what the module before left, whose files would stay open
    gc.freeze()


@pytest.fixture
def train(tmp_path) -> Path:
    """A file of 100 samples, for what is tried by commands."""
    path = tmp_path / "train.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(600, dtype="<f4").reshape(100, 2, 3)
        file["y"] = np.arange(100)
        file["x"].attrs["unit"] = "K"
        file.attrs["title"] = "long " * 50
    return path


LIMIT_SECONDS = 300.0
"""How long a test may take, other tests beside it; quiet, none takes more than some seconds."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail instead of waiting for ever: all waiting in Python ends when a signal raises."""

    def late(*_):
        raise TimeoutError(f"not done after {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


NEEDS_TENSORFLOW = re.compile(
    r"tensorflow|\btf\b|_tf\b|test_cli_provenance|test_checking"
    r"|(conformance|format_contract|test_write\.|bench_strategies).*tfrecord",
    re.IGNORECASE,
)


def pytest_collection_modifyitems(items):
    """What needs TensorFlow comes first: so one of several workers imports it, not all."""
    items.sort(
        key=lambda item: "tf" not in item.fixturenames and not NEEDS_TENSORFLOW.search(item.nodeid)
    )


@pytest.fixture(scope="session")
def tf():
    """TensorFlow, imported quietly."""
    from oracles import tensorflow

    return tensorflow()
