"""What is read at a time, and how."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from support import dataset, epochs, fails

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import UsageError

SCHEMA = Schema((Field("x", np.dtype("<f4"), (40, 30)), Field("y", np.dtype("<i8"))))
COUNT = 300


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    return dataset(folder, "hdf5", SCHEMA, COUNT)[0]


def test_the_rule_and_what_was_asked(origin, tmp_path):
    cores = len(os.sched_getaffinity(0))
    with dsprep.Reader(origin, 10, rank=0, world_size=1) as reader:
        assert reader.threads == min(4, cores)
        assert len(list(epochs(reader, 1))) == 30
    with dsprep.Reader(origin, 10, rank=0, world_size=1, engine="direct", io_threads=3) as reader:
        assert reader.threads == 3
    out = tmp_path / "out.h5"
    dsprep.repack(origin, out, buffer_size=32, compress="gzip", durable=False)
    with dsprep.Reader(out, 10, rank=0, world_size=1) as reader:
        assert reader.threads == cores
    with dsprep.Reader(out, 10, rank=0, world_size=1, fields=["y"], io_threads=1) as reader:
        assert reader.threads == 1


def test_threads_that_cannot_be_started_leave_none_behind(origin, monkeypatch):
    real, before = threading.Thread.start, threading.active_count()

    def start(thread):
        if thread.name == "dsprep-read-2":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with dsprep.Reader(origin, 10, rank=0, world_size=1, io_threads=5) as reader:
        fails(lambda: iter(reader), UsageError, "5 io_threads")
        assert threading.active_count() == before
