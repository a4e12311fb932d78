"""Reads that the kernel cuts short, or asks to try again, change nothing, whatever the format."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import numpy as np
import pytest
from sample_files import BATCH, COUNT, FORMS, SCHEMA, make
from support import assert_same_batch, take

import dsprep
from dsprep.core import spans
from dsprep.errors import UnsupportedError
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage import ranges
from dsprep.storage import scatter as vectorised
from dsprep.verbs.provenance import provenance


@pytest.fixture(scope="module", params=FORMS, ids=" ".join)
def made(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("data"))


@pytest.fixture(params=[61, 4099], ids=lambda most: f"{most} bytes")
def most(request, monkeypatch):
    """At most so many bytes come by a call, and now and then EAGAIN."""
    own = threading.local()  # a thread that tries again comes through, whatever others do

    def blocked():
        own.calls = getattr(own, "calls", 0) + 1
        return own.calls % 7 == 0

    def pread(fd, nbytes, offset):
        if blocked():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return real_pread(fd, min(nbytes, request.param), offset)

    def preadv(fd, buffers, offset, flags=0):
        if blocked():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        view = memoryview(buffers[0])  # whole, as direct reads take nothing else
        got = real_preadv(fd, [view], offset, flags)
        come = min(got, request.param)
        view[come:got] = b"\xee" * (got - come)
        return come

    def call(fd, address, count, offset):
        if blocked():
            ctypes.set_errno(errno.EAGAIN)
            return -1
        got = real_call(fd, address, 1, offset)
        come = min(got, request.param)
        if got > come:
            first = ctypes.c_int64.from_address(address).value
            ctypes.memset(first + come, 0xEE, got - come)
        return come

    real_pread, real_preadv, real_call = os.pread, os.preadv, vectorised._call
    monkeypatch.setattr(ranges, "PAUSES", (0.0,))
    monkeypatch.setattr(vectorised, "PAUSES", (0.0,))
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(vectorised, "_call", call)
    return request.param


def test_the_same_data(made, most, tmp_path):
    if most != 61 and made.suffix != ".zarr" and "grouped" not in made.name:
        return  # by direct reads, those of groups and of many files
    if most == 61:
        with dsprep.open(made) as source:
            assert_same_batch(source[:], BATCH, SCHEMA)
    kept = tmp_path / "x.dsprep"
    try:
        provenance(made, out=kept)
    except UnsupportedError:  # one gzip stream
        assert made.name == "compressed.tfrecord"
        return
    with Sidecar.open(kept, made) as found:
        assert_same_batch(found.read(slice(0, COUNT)), BATCH, SCHEMA)
    engine = "buffered" if most == 61 else "direct"
    with dsprep.Reader(made, 7, shuffle="none", engine=engine) as reader:
        for at, batch in zip(range(0, COUNT, 7), reader, strict=True):
            assert_same_batch(batch, take(BATCH, at, at + 7), SCHEMA)


@pytest.mark.parametrize("most", [1, 61, 4099, 1 << 30])
def test_writes_that_the_kernel_cuts_short(most, tmp_path, monkeypatch):
    """Bytes at many addresses end up in a file in their order, and an error is the system's."""
    rng = np.random.default_rng(most)
    lengths = rng.integers(1, 900, 150) if most > 1 else rng.integers(1, 20, 30)
    memory = rng.integers(0, 256, int(lengths.sum()), np.uint8)
    order = rng.permutation(len(lengths))
    starts = spans.offsets_of(lengths)
    places = np.stack([memory.ctypes.data + starts[:-1], lengths], axis=1)[order]
    calls, real = [0], vectorised._write

    def write(fd, address, count, offset):
        calls[0] += 1
        if calls[0] % 7 == 0:
            ctypes.set_errno(errno.EAGAIN if calls[0] % 2 else errno.EINTR)
            return -1
        first = (ctypes.c_int64 * 2).from_address(address)
        if first[1] > most:
            return real(fd, ctypes.addressof((ctypes.c_int64 * 2)(first[0], most)), 1, offset)
        return real(fd, address, 1 if most < 1 << 30 else count, offset)

    monkeypatch.setattr(vectorised, "PAUSES", (0.0,))
    monkeypatch.setattr(vectorised, "CALL_NBYTES", 700)
    monkeypatch.setattr(vectorised, "IOV_MAX", 3)
    monkeypatch.setattr(vectorised, "_write", write)
    path = tmp_path / "x"
    with path.open("wb") as file:
        vectorised.drain(file.fileno(), 5, np.ascontiguousarray(places), path)
    parts = np.split(memory, starts[1:-1])
    assert path.read_bytes() == bytes(5) + b"".join(parts[i].tobytes() for i in order.tolist())
    with path.open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        vectorised.drain(file.fileno(), 0, np.ascontiguousarray(places), path)
    monkeypatch.setattr(vectorised, "_write", lambda *_: 0)
    with path.open("wb") as file, pytest.raises(OSError, match="Input/output error"):
        vectorised.drain(file.fileno(), 0, np.ascontiguousarray(places), path)
