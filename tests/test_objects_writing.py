"""Outputs in object stores: the bytes of local ones, there as a whole or not at all."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

pytest.importorskip("obstore")

from object_server import forget, serving
from support import cli, fails, files_of

import dsprep
from dsprep.errors import ChangedError, DsprepError, TargetError, UsageError
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage import paths
from dsprep.storage.objects.store import ObjectStore
from dsprep.writing.remote import read_claim

COUNT = 90
RNG = np.random.default_rng(2)
X = RNG.integers(0, 99, (COUNT, 700)).astype("<u2")
FORMATS = {".h5": "hdf5", ".lmdb": "lmdb", ".tfrecord": "tfrecord", ".zarr": "zarr"}


def function(item):
    return {"x": X[item], "y": item}


@pytest.fixture(scope="module")
def running():
    with serving("test_objects_writing", "h5py") as server:
        yield server


def unremembered(store):
    """Have a store ask again, as another process would."""
    store._answers.clear()
    store._listings.clear()


@pytest.fixture
def server(running, monkeypatch, tmp_path):
    """An empty server, and an empty scratch directory."""
    running.clear()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    forget()
    yield running
    forget()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "source.h5"
    dsprep.write(path, ({"x": X[i], "y": i} for i in range(COUNT)), length=COUNT)
    return path


def objects(server):
    """All objects but sidecars, by key in the bucket."""
    some = {key: data for key, (data, _) in server.objects.items() if ".dsprep." not in key}
    return {key.removeprefix("/b/"): bytes(data) for key, data in some.items()}


def check_clean(server, tmp_path):
    """Nothing is left but datasets and their sidecars."""
    assert not [key for key in server.objects if "partial" in key]
    assert not server.uploads
    assert not list((tmp_path / "scratch").glob("*/*"))


def check_read(name, count=COUNT):
    with dsprep.open(name) as opened:
        assert isinstance(opened, SidecarSource)
        assert len(opened) == count
        batch = opened[:]
        assert np.array_equal(batch["x"], X[batch["y"]])


@pytest.mark.parametrize(
    ("verb", "cut", "suffix"),
    [
        (verb, cut, suffix)
        for (i, verb), (k, suffix) in itertools.product(
            enumerate((dsprep.convert, dsprep.repack)), enumerate(FORMATS)
        )
        for cut in ({}, {"shard_size": 32})[(i + k) % 2 :][:1]
    ],
)
def test_bytes_and_sidecar_are_those_of_a_local_run(verb, cut, suffix, source, server, tmp_path):
    name = "out" if cut else f"out{suffix}"
    local = tmp_path / "local" / name
    local.parent.mkdir()
    more = {"stripe_size": 4096, "buffer_size": 16} if verb is dsprep.repack else {}
    reports = [
        verb(source, p, to=FORMATS[suffix], **cut, **more) for p in (local, f"s3://b/{name}")
    ]
    if verb is dsprep.repack:
        reports = [report.parts[0][1] for report in reports]
    assert len({(r.samples, r.files, r.bytes_out, r.copied, r.notes) for r in reports}) == 1
    assert objects(server) == files_of(local.parent)
    one, other = Sidecar.open(local).content, Sidecar.open(f"s3://b/{name}").content
    assert one.layouts == other.layouts
    assert one.schema == other.schema
    for a, b in zip(one.files, other.files, strict=True):
        assert (a.path, a.samples, a.layout) == (b.path, b.samples, b.layout)
        assert (a.identity.nbytes, a.identity.sampled) == (b.identity.nbytes, b.identity.sampled)
        assert b.identity.etag
    check_read(f"s3://b/{name}")
    check_clean(server, tmp_path)


@pytest.mark.parametrize("habit", ["bare-list", "bare-match", "unconditional"])
def test_stores_of_other_habits(habit, source, server, tmp_path):
    server.set[habit] = 1.0
    for _ in range(2):
        dsprep.convert(source, "s3://b/out", to="hdf5", shard_size=30, overwrite=True)
        check_read("s3://b/out")
    with dsprep.Reader("s3://b/out", 16, epochs=1) as reader:
        assert sum(len(batch["y"]) for batch in reader) == COUNT
    dsprep.provenance("s3://b/out/*.h5", out="s3://b/glob.dsprep.json")
    check_clean(server, tmp_path)


def test_a_bucket_that_is_missing(source, server):
    with pytest.raises(FileNotFoundError, match=r"no such bucket.*s3://none"):
        dsprep.convert(source, "s3://none/out.h5")


def test_large_files_go_in_parts(source, server, tmp_path, monkeypatch):
    monkeypatch.setattr("dsprep.storage.objects.store.UPLOAD_NBYTES", 16 << 10)
    server.set.update({"500": 0.05, "503": 0.05, "reset": 0.05})
    dsprep.convert(source, "s3://b/out.h5")
    dsprep.convert(source, "s3://b/shards", to="tfrecord", shard_size=20)
    server.set.update({"500": 0, "503": 0, "reset": 0})
    assert server.objects["/b/out.h5"][1].endswith('-8"')
    for name in ("s3://b/out.h5", "s3://b/shards"):
        check_read(name)
    check_clean(server, tmp_path)


# --- interrupted runs ------------------------------------------------------------------------


def killed(source, target, options, number, after, scratch):
    """Convert in a process that kills itself at one of its requests to write."""
    tempfile.tempdir = scratch
    put, lock, calls = ObjectStore.put, threading.Lock(), []

    def counted(self, name, data, *, overwrite):
        with lock:
            calls.append(name)
            is_last = len(calls) == number
        if is_last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = put(self, name, data, overwrite=overwrite)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    ObjectStore.put = counted
    dsprep.convert(source, target, **options)


@pytest.mark.parametrize(
    ("options", "step"),
    [({"shard_size": 30}, 4), ({"to": "zarr", "chunk": 30}, 11), ({"overwrite": True}, 3)],
    ids=["shards", "zarr", "overwrite"],
)
def test_killed_runs_continue_to_the_same_bytes(
    options, step, source, server, tmp_path, monkeypatch
):
    target, scratch = "s3://b/x/out", str(tmp_path / "scratch")
    options = {"to": "hdf5", **options}
    started = multiprocessing.get_context("forkserver")
    (tmp_path / "x").mkdir()
    dsprep.convert(source, tmp_path / "x" / "out", **options)
    expected = {f"x/{name}": value for name, value in files_of(tmp_path / "x").items()}
    for number in range(1, 40, step):
        server.objects.clear()
        if "overwrite" in options:
            dsprep.convert(source, target, to="lmdb")
        store = paths.as_path(target).store
        args = (source, target, options, number, number % 4 < 2, scratch)
        process = started.Process(target=killed, args=args)
        process.start()
        process.join(600)
        unremembered(store)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        names = [target, *(f"s3://b/{key}" for key in objects(server) if "partial" not in key)]
        for name in names:
            if "/b/x/out.dsprep.json" not in server.objects:
                for read in (dsprep.open, Sidecar.open):
                    with pytest.raises((DsprepError, FileNotFoundError)) as refused:
                        read(name)
                    if name == target and server.objects:
                        assert "not complete" in str(refused.value)
        if number % 3 == 0:  # as on another machine
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        report = dsprep.convert(source, target, **options)
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        assert report.samples == COUNT
        unremembered(store)
        assert objects(server) == expected
        check_read(target)
        assert not [key for key in server.objects if "partial" in key]
    assert number > step


def fail_at(monkeypatch, number, error):
    """Have one of the requests to write fail; return the names of all."""
    put, names = ObjectStore.put, []

    def failing(self, name, data, *, overwrite):
        names.append(name)
        if len(names) == number:
            raise error
        return put(self, name, data, overwrite=overwrite)

    monkeypatch.setattr(ObjectStore, "put", failing)
    return names


def left(source, monkeypatch, number, error=OSError(5, "the store is away"), **options):  # noqa: B008
    """Leave a run of which one of the requests to write fails."""
    with monkeypatch.context() as patched:
        fail_at(patched, number, error)
        with pytest.raises(type(error)):
            dsprep.convert(source, "s3://b/out", **options)


@pytest.mark.parametrize("error", [OSError(5, "the store is away"), KeyboardInterrupt()])
def test_after_an_error_a_run_continues(error, source, server, tmp_path, monkeypatch):
    left(source, monkeypatch, 6, error, to="hdf5", shard_size=15)
    claim, _ = read_claim(paths.as_path("s3://b/out"))
    assert not claim.owner
    before = objects(server)
    assert [key for key in before if key.endswith(".h5")]
    for read in (dsprep.open, dsprep.provenance, partial(dsprep.Reader, batch_size=8)):
        for name in ("s3://b/out", ["s3://b/out/out-00000-of-00006.h5"]):
            fails(lambda: read(name), TargetError, "not complete")
    with pytest.raises(TargetError, match="other: files"):
        dsprep.convert(source, "s3://b/out", to="hdf5", shard_size=16)
    with monkeypatch.context() as patched:
        names = fail_at(patched, 0, error)
        dsprep.convert(source, "s3://b/out", to="hdf5", shard_size=15)
    recorded = {key.partition("shard-")[2].removesuffix(".json") for key in before}
    assert recorded > {""}
    done = [f"b/out/out-{int(n):05}-of-00006.h5" for n in recorded if n]
    assert not set(done) & set(names)
    check_read("s3://b/out")
    check_clean(server, tmp_path)


def test_what_was_removed_meanwhile_is_written_again(source, server, tmp_path, monkeypatch):
    options = {"to": "tfrecord", "shard_size": 15}
    left(source, monkeypatch, 14, **options)
    expected = {key: value for key, value in objects(server).items() if "partial" not in key}
    assert len(expected) == 6
    server.put("/b/out/out-00002-of-00006.tfrecord", b"of somebody else")
    del server.objects["/b/out/out-00004-of-00006.tfrecord"]
    dsprep.convert(source, "s3://b/out", **options)
    assert objects(server) == expected
    check_clean(server, tmp_path)


def test_restart_discards_what_was_written(source, server, tmp_path, monkeypatch):
    left(source, monkeypatch, 8, to="hdf5", shard_size=15)
    dsprep.convert(source, "s3://b/out", to="lmdb", restart=True)
    assert list(objects(server)) == ["out/data.mdb"]
    check_read("s3://b/out")
    check_clean(server, tmp_path)


# --- what is there, and other writers -----------------------------------------------------------


def test_what_exists_is_not_replaced_unasked(source, server):
    dsprep.convert(source, "s3://b/out", to="hdf5", shard_size=50)
    for name in ("out", "out/out-00000-of-00002.h5"):
        with pytest.raises(TargetError, match="exists already"):
            dsprep.convert(source, f"s3://b/{name}", to="hdf5")
    for name, text in {"https://h/x.h5": "only read", "s3://b": "names no object"}.items():
        with pytest.raises(UsageError, match=text):
            dsprep.convert(source, name)
    check_read("s3://b/out")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"shard_size": 20}, {"shard_size": 50}),
        ({"shard_size": 20}, {}),
        ({}, {"shard_size": 20}),
        ({"to": "zarr"}, {"to": "zarr", "chunk": 50}),
    ],
)
def test_overwrite(before, after, source, server, tmp_path, monkeypatch):
    remove = ObjectStore.remove

    def removed(self, name):  # while the sidecar is there, so are the data that it is of
        if "/out" in name and ".dsprep" not in name:
            assert "/b/out.dsprep.json" not in server.objects
        remove(self, name)

    monkeypatch.setattr(ObjectStore, "remove", removed)
    dsprep.convert(source, "s3://b/out", **{"to": "hdf5", **before})
    with dsprep.open("s3://b/out") as reading:
        reading[:1]
        chosen = {"to": "hdf5", **after, "samples": "10:80", "overwrite": True}
        dsprep.convert(source, "s3://b/out", **chosen)
        with suppress(ChangedError):  # or they had been read
            assert np.array_equal(reading[40:90]["x"], X[40:90])
    (tmp_path / "local").mkdir()
    dsprep.convert(source, tmp_path / "local" / "out", **chosen)
    assert objects(server) == files_of(tmp_path / "local")
    check_read("s3://b/out", 70)
    check_clean(server, tmp_path)


def test_one_writer_at_a_time(source, server, tmp_path, monkeypatch):
    errors = []

    def second(*_):
        if errors:
            return
        with monkeypatch.context() as patched:  # as of another user, or in a container
            patched.setattr(tempfile, "tempdir", str(tmp_path))
            try:
                dsprep.convert(source, "s3://b/out.h5")
            except TargetError as error:
                errors.append(str(error))

    dsprep.convert(source, "s3://b/out.h5", progress=second)
    assert "another process is writing it" in errors[0]
    assert f"process {os.getpid()}" in errors[0]
    check_read("s3://b/out.h5")


@pytest.mark.parametrize("restart", [False, True])
def test_who_loses_its_claim_does_not_publish(restart, source, server, tmp_path, monkeypatch):
    begun = []

    def second(*_):
        if not begun:
            begun.append(1)
            with monkeypatch.context() as patched:
                patched.setattr(tempfile, "tempdir", str(tmp_path))
                if restart:
                    dsprep.convert(source, "s3://b/out.h5", samples=":30", restart=True)
                else:
                    server.put("/b/out.h5", b"of another program")

    with pytest.raises(TargetError, match="meanwhile"):
        dsprep.convert(source, "s3://b/out.h5", progress=second)
    if restart:
        check_read("s3://b/out.h5", 30)
    else:
        assert server.objects["/b/out.h5"][0] == b"of another program"


# --- the other verbs ----------------------------------------------------------------------------


def test_split_and_shuffle(source, server, tmp_path):
    options = {"split": "train=0.8,val=0.2", "shuffle": 3, "stripe_size": 4096, "buffer_size": 16}
    (tmp_path / "local").mkdir()
    for root in (tmp_path / "local", "s3://b"):
        dsprep.repack(source, f"{root}/set.h5", **options)
    assert objects(server) == files_of(tmp_path / "local")
    check_read("s3://b/set-train.h5", 72)
    check_read("s3://b/set-val.h5", 18)
    check_clean(server, tmp_path)


@pytest.mark.parametrize("way", ["stream", "spool", "items", "shards"])
def test_write(way, server, tmp_path):
    samples = ({"x": X[i], "y": i} for i in range(COUNT))
    more = {"shard_size": 32, "to": "hdf5"} if way == "shards" else {}
    if way == "items":
        report = dsprep.write("s3://b/out.h5", range(COUNT), function=function)
    else:
        length = None if way == "spool" else COUNT
        report = dsprep.write("s3://b/out.h5", samples, length=length, **more)
    assert (report.samples, str(report.target)) == (COUNT, "s3://b/out.h5")
    check_read("s3://b/out.h5")
    check_clean(server, tmp_path)


def test_a_program_that_fails_leaves_nothing(server, tmp_path):
    def samples():
        for i in range(COUNT - 1):
            yield {"x": X[i], "y": i}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        dsprep.write("s3://b/out", samples(), length=COUNT, to="hdf5", shard_size=16)
    assert not server.objects
    check_clean(server, tmp_path)


def test_workers_of_an_executor(source, server, tmp_path):
    with dsprep.executors.opened("processes", workers=2) as executor:
        dsprep.convert(source, "s3://b/out", to="hdf5", shard_size=20, executor=executor)
    check_read("s3://b/out")
    check_clean(server, tmp_path)


def test_command_line(source, server, tmp_path):
    done = cli("convert", source, "s3://b/out.h5", "--dry-run")
    assert str(tmp_path / "scratch") in done.said
    assert not server.objects
    cli("repack", source, "s3://b/out.h5")
    cli("verify", source, "s3://b/out.h5")
    cli("provenance", "s3://b/out.h5", "--out", "s3://b/elsewhere/x.dsprep.json")
    assert "/b/elsewhere/x.dsprep.json" in server.objects


def test_a_server_of_others(source, server, tmp_path, monkeypatch):
    moto = pytest.importorskip("moto.server")
    started = moto.ThreadedMotoServer("127.0.0.1", 0)
    started.start()
    try:
        host, port = started.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        forget()
        boto3 = pytest.importorskip("boto3")
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
        for more in ({}, {"overwrite": True}):
            dsprep.convert(source, "s3://bucket/out", to="hdf5", shard_size=50, **more)
            check_read("s3://bucket/out")
    finally:
        started.stop()
        forget()


@pytest.mark.parametrize("more", [{}, {"shard_size": 15, "overwrite": True}])
def test_answers_that_are_lost(more, source, server, tmp_path):
    if more:
        dsprep.convert(source, "s3://b/out", to="hdf5", shard_size=15)
    server.set["lost"] = 0.2
    server.stat["faults"] = 0
    for _ in range(30):
        dsprep.convert(source, "s3://b/out", to="hdf5", **more)
        if server.stat["faults"]:
            break
        more = {**more, "overwrite": True}
    assert server.stat["faults"]
    check_read("s3://b/out")
    check_clean(server, tmp_path)
