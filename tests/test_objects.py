"""Ranges of objects: every byte is right whatever the store does, or an error says why not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("obstore")

from object_server import forget, serving
from support import assert_same_batch, fails

import dsprep
from dsprep.errors import (
    ChangedError,
    FormatError,
    MissingExtra,
    ReadError,
    UnsupportedError,
    UsageError,
)
from dsprep.sidecar.sidecar import Sidecar, StaleError
from dsprep.storage import paths
from dsprep.storage.objects import requests
from dsprep.storage.objects import store as objects
from dsprep.storage.scatter import runs

NBYTES = 3_000_000
DATA = np.random.default_rng(3).integers(0, 256, NBYTES).astype(np.uint8)


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    forget()
    running.clear()
    monkeypatch.setattr(objects, "PAUSE", 0.001)
    running.put("/b/data", DATA)
    yield running
    forget()


def read(file, offsets, lengths):
    """The bytes of ranges, by one call."""
    offsets, lengths = np.array(offsets, np.int64), np.array(lengths, np.int64)
    places = np.concatenate([[0], np.cumsum(lengths)])
    out = np.zeros(max(1, int(places[-1])), np.uint8)
    file.read_runs(runs(offsets, lengths, places[:-1] + out.ctypes.data, 0))
    return [out[a:b] for a, b in pairwise(places)]


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, NBYTES - 1), st.integers(0, 400_000)), min_size=1, max_size=40
    ),
    part=st.sampled_from([70_001, 1 << 20]),
)
def test_requests_cover_ranges_exactly(ranges, part):
    """Every wanted byte is in one request, and what nobody wants is near, and little."""
    version = requests.Version(None, "k", "s3://b/k", NBYTES, '"1"')
    offsets = np.array([a for a, _ in ranges], np.int64)
    lengths = np.array([min(n, NBYTES - a) for a, n in ranges], np.int64)
    order = np.argsort(offsets, kind="stable")
    places = np.concatenate([[0], np.cumsum(lengths[order])])
    out = np.zeros(max(1, int(places[-1])), np.uint8)
    made = requests.parts_of(
        version, runs(offsets[order], lengths[order], places[:-1] + out.ctypes.data, 0), part
    )
    for _, start, stop, place in made:
        assert 0 <= start < stop <= NBYTES
        place(DATA[start:stop].tobytes())
    for k, i in enumerate(order):
        got = out[places[k] : places[k + 1]]
        assert np.array_equal(got, DATA[offsets[i] : offsets[i] + lengths[i]])
    union = np.zeros(NBYTES, bool)
    for a, n in zip(offsets, lengths, strict=True):
        union[a : a + n] = True
    nbytes = sum(stop - start for _, start, stop, _ in made)
    assert nbytes <= int(lengths.sum()) + requests.NEAR * len(ranges)


def test_ranges_are_read_by_few_requests(server):
    file = paths.open_file("s3://b/data")
    server.stat["gets"] = 0
    got = read(file, [10, 5000, 1_000_000, 1_030_000], [100, 10, 20_000, 5])
    for at, data in zip([10, 5000, 1_000_000, 1_030_000], got, strict=True):
        assert np.array_equal(data, DATA[at : at + len(data)])
    assert server.stat["gets"] == 2
    assert file.pread(100, NBYTES - 7) == DATA[-7:].tobytes()
    assert file.pread(10, NBYTES) == b""
    assert file.pread(NBYTES, 0) == DATA.tobytes()
    fails(lambda: read(file, [NBYTES - 5], [6]), FormatError, "ends too early")
    server.stat["requests"] = 0
    for at in range(0, NBYTES - 12, 20_011):
        assert file.pread(12, at) == DATA[at : at + 12].tobytes()
    assert server.stat["requests"] <= 4


@pytest.mark.parametrize("fault", ["500", "503", "reset", "short"])
def test_faults_are_tried_again(server, fault):
    file = paths.open_file("s3://b/data")
    server.set[fault] = 0.2
    at = np.arange(0, NBYTES - 1000, 100_003)
    for _ in range(5):
        for start, data in zip(at, read(file, at, np.full(len(at), 1000)), strict=True):
            assert np.array_equal(data, DATA[start : start + 1000])
    assert server.stat["faults"] > 5


def test_the_last_try_is_an_error(server):
    file = paths.open_file("s3://b/data")
    server.set["500"] = 1.0
    with pytest.raises(OSError, match=r"offset 9: .*500.*s3://b/data") as caught:
        read(file, [9], [10])
    assert "secret-secret" not in str(caught.value)
    server.set["500"] = 0.0
    assert np.array_equal(read(file, [9], [10])[0], DATA[9:19])


@pytest.mark.parametrize("ignores", [0.0, 1.0], ids=["412", "another ETag in the answer"])
def test_a_changed_object_is_refused(server, ignores):
    file = paths.open_file("s3://b/data")
    server.set["moved"] = ignores
    server.put("/b/data", DATA[::-1])
    fails(lambda: read(file, [9], [10]), ChangedError, "changed since it was opened", "provenance")
    del server.objects["/b/data"]
    fails(lambda: read(file, [9], [10]), ChangedError, "nothing there")


def test_a_request_that_stalls_is_made_again(server, monkeypatch):
    monkeypatch.setattr(objects, "STALLED", 0.2)
    file, ended = paths.open_file("s3://b/data"), threading.Event()
    send, stuck = server._send, []

    async def once(*args, **options):
        if not stuck:
            stuck.append(True)
            while not ended.is_set():
                await asyncio.sleep(0.01)
        return await send(*args, **options)

    monkeypatch.setattr(server, "_send", once)
    assert np.array_equal(read(file, [9], [10])[0], DATA[9:19])
    ended.set()


def test_what_is_in_flight_is_bounded(server, monkeypatch):
    monkeypatch.setattr(requests, "BUDGET_NBYTES", 50_000)
    file = paths.open_file("s3://b/data")
    server.set["latency"] = 0.01
    at = np.arange(0, NBYTES - 10_000, 100_003)
    server.stat["most"] = 0
    read(file, at, np.full(len(at), 10_000))
    assert 2 <= server.stat["most"] <= 5


def test_errors_of_names(server, tmp_path):
    with pytest.raises(FileNotFoundError):
        dsprep.open("s3://b/missing.h5")
    fails(lambda: dsprep.open("s3:///x.h5"), UsageError, "names no bucket")
    for name in ("host/x.h5?X-Amz-Signature=secret-secret", "user:secret-secret@host/x.h5"):
        told = fails(lambda: dsprep.open(f"https://{name}"), UsageError)
        assert "secret-secret" not in str(told)
    fails(lambda: list(paths.scan("http://127.0.0.1:9/d")), UnsupportedError, "no list")


def test_a_server_that_is_away_is_said_to_be(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match="the server cannot be reached: is AWS_") as caught:
        dsprep.open("s3://b/data")
    assert "s3://b/data" in str(caught.value)


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("", ".store", ".requests"):
        monkeypatch.delitem(sys.modules, f"dsprep.storage.objects{name}")
    monkeypatch.delitem(paths._stores, "gs", raising=False)
    with pytest.raises(MissingExtra, match=r"dsprep\[objects\]"):
        dsprep.open("gs://b/x.h5")


@pytest.fixture
def dataset(server, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(40_000).reshape(4000, 10))
    server.put("/b/d/x.npy", path.read_bytes())
    dsprep.provenance("s3://b/d/x.npy")
    return path


def test_requests_end_before_the_interpreter():
    """A thread that is about to get a result at the end of the program would abort it."""
    code = """
import atexit, threading, time
def after():  # what was registered first comes last
    thread.join()
    read()
    print([t.name for t in threading.enumerate() if "objects" in t.name])
atexit.register(after)
from dsprep.storage.objects import requests
def read():
    try:
        requests.requests().fetch(requests.Version(None, "", "", 1, ""), 0, 1)
    except BaseException as error:
        print(type(error).__name__)
async def waits(*args, **options):
    await requests.asyncio.sleep(3600)
requests.obstore.get_async = waits
thread = threading.Thread(target=read, daemon=True)
thread.start()
while not (requests._made and requests._made.under_way):
    time.sleep(0.001)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CancelledError", "UsageError", "[]"]
    assert not done.stderr


def test_a_sidecar_names_the_version(server, dataset):
    server.stat["requests"] = 0
    with Sidecar.open("s3://b/d/x.npy") as sidecar:
        assert server.stat["requests"] == 1
        values = sidecar.read([3, 1])["x"]
    assert np.array_equal(values, np.load(dataset)[[3, 1]])
    server.put("/b/d/x.npy", dataset.read_bytes() + b"")
    server.objects["/b/d/x.npy"] = dataset.read_bytes(), '"uploaded again"'
    with Sidecar.open("s3://b/d/x.npy") as sidecar, pytest.raises(ChangedError, match="provenance"):
        sidecar.read([3])
    objects.ObjectStore.forget(paths.as_path("s3://b/d/x.npy").store, "b/d/x.npy")
    with dsprep.open("s3://b/d/x.npy") as source, pytest.raises(StaleError, match="ETag"):
        dsprep.inspect(source)
    dsprep.provenance("s3://b/d/x.npy")
    with Sidecar.open("s3://b/d/x.npy") as sidecar:
        assert np.array_equal(sidecar.read([3])["x"], np.load(dataset)[[3]])


def test_sidecars_move_between_disks_and_stores(server, dataset, tmp_path):
    for name in ("x.npy", "x.npy.dsprep.json"):
        (tmp_path / "copy" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(server.objects[f"/b/d/{name}"][0])
    with Sidecar.open(tmp_path / "copy" / "x.npy") as copied:
        assert np.array_equal(copied.read([3])["x"], np.load(dataset)[[3]])
    dsprep.provenance(dataset)
    for path in tmp_path.glob("x.npy*"):
        server.put(f"/b/up/{path.name}", path.read_bytes())
    with Sidecar.open("s3://b/up/x.npy") as uploaded:
        assert np.array_equal(uploaded.read([3])["x"], np.load(dataset)[[3]])
    server.put("/b/up/x.npy", dataset.read_bytes()[:-1] + b"x")
    objects.ObjectStore.forget(paths.as_path("s3://b/up/x.npy").store, "b/up/x.npy")
    fails(lambda: Sidecar.open("s3://b/up/x.npy"), StaleError)


def test_epochs_under_faults(server, dataset):
    """Thousands of faults of all kinds: no wrong sample, and no hang."""
    expected = np.load(dataset)
    for fault in ("500", "503", "reset", "short"):
        server.set[fault] = 0.05
    with dsprep.Reader("s3://b/d/x.npy", 100, buffer_size=100, seed=2, epochs=None) as reader:
        for _ in range(3):
            rows = np.concatenate([batch["x"] for batch in reader])
            assert_same_batch({"x": rows[np.argsort(rows[:, 0])]}, {"x": expected}, reader.schema)
    assert server.stat["faults"] > 10
    server.set["etag"] = 1.0
    with (
        dsprep.Reader("s3://b/d/x.npy", 100, buffer_size=100) as reader,
        pytest.raises(ReadError, match=r"sample \d+ .*changed since it was opened"),
    ):
        list(reader)
