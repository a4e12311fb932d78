"""However a loop ends, and whatever happens to the files, the reader neither hangs nor lies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import MIXED, dataset, epochs, fails, flip, flip_sampled, random_batch
from test_located import FORMATS, mutations
from test_reader import TARGETS, keys
from test_reader_memory import fds, threads

import dsprep
from dsprep.core.schema import Batch, Field, Schema
from dsprep.errors import DsprepError, ReadError, UsageError
from dsprep.formats.options import Compression, WriteOptions
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import StaleError
from dsprep.storage import scatter

COUNT = 100
SCHEMA = Schema((Field("x", np.dtype("<f4"), (300,)), Field("y", np.dtype("<i8"))))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """The same samples: with a sidecar only, repacked, and compressed."""
    directory = tmp_path_factory.mktemp("made")
    plain = dataset(directory, "hdf5", SCHEMA, COUNT)[0]
    paths = {"plain": plain}
    for name in ("groups", "gzip"):
        paths[name] = directory / f"{name}.h5"
        compress = None if name == "groups" else name
        options = {"buffer_size": 20, "stripe_size": 4096, "durable": False}
        dsprep.repack(plain, paths[name], compress=compress, **options)
    return paths


def copied(path: Path, directory: Path) -> Path:
    """A copy of a dataset of one file, with its sidecar."""
    for each in (path, spec.sidecar_path(path)):
        shutil.copy2(each, directory / each.name)
    return directory / path.name


def exhaust(loop: Any) -> None:
    """Take what is left; for an endless loop, 50 batches."""
    for _ in range(50):
        next(loop)


# --- how a loop ends -------------------------------------------------------------------------


def test_loops_that_are_thrown_away(made):
    reader = dsprep.Reader(made["groups"], 7, epochs=None, io_threads=2)
    before = fds()

    def begun(reader: dsprep.Reader, steps: int) -> Any:
        loop = iter(reader)
        for _ in range(steps):
            next(loop)
        assert threads() == 3
        return loop

    for steps in (0, 1, 5):
        begun(reader, steps)
        assert threads() == 0
    with pytest.raises(KeyError):  # noqa: PT012
        for batch in reader:
            raise KeyError(len(batch))
    gc.collect()
    assert threads() == 0
    cycle: list[Any] = [begun(reader, 1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert threads() == 0
    items = [begun(reader, 1)]
    thread = threading.Thread(target=lambda: (next(items[0]), items.clear()))  # and ended there
    thread.start()
    thread.join(600)
    assert threads() == 0
    loop = begun(reader, 1)
    del reader  # the loop goes on
    next(loop)
    del loop
    gc.collect()
    assert threads() == 0
    assert fds() <= before + 1


@pytest.mark.parametrize("transform", [None, dict])
@pytest.mark.parametrize("close", ["reader", "loop"])
def test_closing_within_the_loop(close, transform, made):
    for io_threads in (1, 3):
        options: dict[str, Any] = {"io_threads": io_threads, "transform": transform}
        reader = dsprep.Reader(made["groups"], 7, epochs=None, **options)
        assert threads() == 0
        loop = iter(reader)
        held = next(loop)
        known = keys(held, SCHEMA)
        (reader if close == "reader" else loop).close()
        assert threads() == 0
        assert keys(held, SCHEMA) == known
        if close == "reader":
            for late in (lambda loop=loop: next(loop), lambda reader=reader: iter(reader)):
                fails(late, UsageError, "was closed")
        else:
            assert len(list(reader)) == 14
        assert list(loop) == []
        reader.close()
        reader.close()
        del reader, loop
        assert keys(held, SCHEMA) == known


def test_closing_while_another_thread_waits(made, monkeypatch):
    """A consumer that waits for a read learns that the reader was closed."""
    real = scatter._call
    gate, reading = threading.Event(), threading.Event()

    def slow(*args: Any) -> int:
        reading.set()
        gate.wait(5)
        return real(*args)

    monkeypatch.setattr(scatter, "_call", slow)
    for buffers in (1, 3):
        gate.clear()
        reading.clear()
        reader = dsprep.Reader(made["groups"], 7, epochs=None, buffers=buffers)
        loop = epochs(reader)
        ended: list[BaseException | None] = []

        def consume(loop=loop, ended=ended) -> None:
            try:
                for _ in loop:
                    pass
            except BaseException as error:
                ended.append(error)
            else:
                ended.append(None)

        consumer = threading.Thread(target=consume)
        consumer.start()
        assert reading.wait(600)
        assert not ended
        threading.Timer(0.1, gate.set).start()
        reader.close()
        consumer.join(600)
        assert not consumer.is_alive()
        assert isinstance(ended[0], UsageError)
        assert threads() == 0


def test_one_loop_at_a_time(made):
    with dsprep.Reader(made["groups"], 7) as reader:
        loop = iter(reader)
        fails(lambda: iter(reader), UsageError, "iterated already")
        next(loop)
        fails(lambda: list(reader), UsageError, "second Reader")
        assert len([*loop]) == 14  # it was not disturbed
        assert len([*reader]) == 15
        assert list(loop) == []


def test_a_transform_that_fails(made):
    def fails(batch: Batch) -> Any:
        if batch["y"][0] % 2:
            raise ZeroDivisionError("in the transform")
        return batch["y"]

    with dsprep.Reader(made["groups"], 7, transform=fails, io_threads=2) as reader:
        with pytest.raises(ZeroDivisionError):
            list(reader)
        assert threads() == 0
    with dsprep.Reader(made["groups"], 7) as reader:
        expected = [b["y"].sum() for b in reader]
    for workers in (1, 4):
        with dsprep.Reader(
            made["groups"], 7, transform=lambda b: b["y"].sum(), io_threads=workers
        ) as reader:
            assert list(reader) == expected
            for _ in reader:
                state = reader.state_dict()
                break
            assert state["stages"][-1][2] == 1
            gc.collect()
            assert threads() == 0


# --- other processes -------------------------------------------------------------------------


def test_a_reader_is_pickled_where_it_is(made):
    with dsprep.Reader(made["groups"], 7, seed=3, epochs=2) as reader:
        expected = [keys(b, SCHEMA) for b in epochs(reader, 2)]
    with dsprep.Reader(made["groups"], 7, seed=3, epochs=1) as reader:
        copies = [pickle.dumps(reader) for _ in reader]
        for k, data in enumerate(copies[:-1]):
            with pickle.loads(data) as again:
                assert [keys(b, SCHEMA) for b in again] == expected[k + 1 : 15]


def child_of(code: Callable[[], None], seconds: float = 600.0) -> int:
    """Fork, run `code`, and return its exit status; -1 if it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            code()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_in_the_middle(made):
    with dsprep.Reader(made["groups"], 7, seed=1, epochs=None) as reader:
        loop = epochs(reader)
        for _ in range(3):
            held = next(loop)
        known = keys(held, SCHEMA)

        def goes_on() -> None:  # from where the parent is
            state = reader.state_dict()
            found = [keys(b, SCHEMA) for _, b in zip(range(30), epochs(reader), strict=False)]
            assert len(found) == 30
            assert keys(held, SCHEMA) == known
            reader.load_state_dict(state)
            assert keys(next(iter(reader)), SCHEMA) == found[0]
            reader.close()

        def wrong() -> None:
            fails(lambda: exhaust(loop), UsageError, "forked")

        def ends() -> None:
            loop.close()
            reader.close()
            gc.collect()

        for code in (goes_on, wrong, ends):
            assert child_of(code) == 0
        following = [keys(next(loop), SCHEMA) for _ in range(20)]
        assert keys(held, SCHEMA) == known
        loop.close()
    with dsprep.Reader(made["groups"], 7, seed=1, epochs=None) as reader:
        expected = [keys(b, SCHEMA) for _, b in zip(range(23), epochs(reader), strict=False)]
    assert following == expected[3:]


def script(path: Path, body: str, **options: Any) -> subprocess.Popen[str]:
    text = f"""
        import gc, os, signal, sys, threading, time
        import dsprep
        path = {str(path)!r}
        """
    code = textwrap.dedent(text) + textwrap.dedent(body)
    pipe = subprocess.PIPE
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]  # of fork() in threads
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, **options)


@pytest.mark.parametrize(
    "body",
    [
        """
        readers = [dsprep.Reader(path, 7, epochs=None, io_threads=n) for n in (1, 3, 2)]
        loop, sys.loop, cycle = map(iter, readers)
        kept, _, _, cycle.me = next(loop), next(sys.loop), next(cycle), cycle
        for b in dsprep.Reader(path, 7, transform=lambda b: b, epochs=None):
            sys.exit(0)
        """,
        """
        loop = iter(dsprep.Reader(path, 7)); next(loop)
        if os.fork() == 0: sys.exit(0)
        assert os.wait()[1] == 0
        """,
    ],
)
def test_the_interpreter_ends_while_loops_are_open(body, made):
    with script(made["groups"], body) as process:
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert (out, err) == ("", "")


def test_an_interrupt_while_waiting(made):
    body = """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        from dsprep.storage import scatter
        real = scatter._call
        def slow(*args):
            if threading.active_count() and reading.is_set():
                os.write(1, b"waiting\\n")  # at once: print writes the line and its end apart
                time.sleep(0.5)
            return real(*args)
        reading = threading.Event()
        scatter._call = slow
        reader = dsprep.Reader(path, 7, epochs=None, buffers=1)
        taken = 0
        try:
            while True:
                for batch in reader:
                    taken += 1
                    reading.set()
        except KeyboardInterrupt:
            names = [t.name for t in threading.enumerate() if t.name.startswith("dsprep")]
            steps = reader.state_dict()["stages"][-1][2] + 15 * reader.epoch
            print("interrupted", names, steps - taken, flush=True)
        """
    with script(made["groups"], body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)  # until the consumer waits, too
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "interrupted [] 0"


# --- files that change or fail ---------------------------------------------------------------


def consumed(reader: dsprep.Reader) -> list[bytes]:
    return [key for batch in reader for key in keys(batch, SCHEMA)]


@pytest.mark.parametrize("name", ["plain", "groups", "gzip"])
def test_a_file_that_changes_while_it_is_read(name, made, tmp_path):
    path = copied(made[name], tmp_path)
    data = path.read_bytes()
    options: dict[str, Any] = {"buffer_size": 10, "shuffle": "none", "epochs": 3}
    for length in (len(data) // 2, 0):
        path.write_bytes(data)
        shutil.copystat(made[name], path)
        with dsprep.Reader(path, 10, **options) as reader:
            loop = iter(reader)
            next(loop)
            time.sleep(0.02)
            os.truncate(path, length)
            with pytest.raises(DsprepError) as caught:
                list(itertools.chain(loop, reader, reader))
            assert str(path) in str(caught.value)
            if name != "gzip":  # of which a chunk that was decoded before is delivered
                assert isinstance(caught.value, ReadError)
                assert 0 <= caught.value.sample < COUNT
                assert threads() == 0
            fails(lambda: list(reader), DsprepError)


def test_a_file_that_is_replaced(made, tmp_path):
    """Who has it open reads the old one to its end; the next loop notices."""
    path = copied(made["groups"], tmp_path)
    with dsprep.Reader(path, 10, shuffle="none") as reader:
        expected = consumed(reader)
        reader.set_epoch(0)
        loop = iter(reader)
        found = keys(next(loop), SCHEMA)
        other = tmp_path / "other"
        other.write_bytes(made["groups"].read_bytes()[:-5] + b"xxxxx")
        other.replace(path)
        found += [key for batch in loop for key in keys(batch, SCHEMA)]
        assert found == expected
        fails(lambda: list(reader), StaleError)


@pytest.mark.parametrize("target", ["hdf5", "zarr"])
def test_data_written_to_in_place_are_noticed(target, tmp_path):
    """Within a loop, also where a file is not yet open, if a sampled block shows it."""
    origin = dataset(tmp_path, "hdf5", SCHEMA, COUNT)[0]
    path = tmp_path / TARGETS[target]
    dsprep.repack(origin, path, buffer_size=20, stripe_size=4096, durable=False)
    with dsprep.Reader(path, 5, shuffle="none", io_threads=1) as reader:
        (extent,) = reader._sidecar.extents([COUNT - 1], ["x"])
        file = path.parent / extent.file
        loop = iter(reader)
        next(loop)
        flip(file, extent.offset + 600)
        flip_sampled(path)
        fails(lambda: list(loop), ReadError, "sampled blocks")


def failing(monkeypatch, code: int, after: int, times: int = 1 << 60) -> list[int]:
    """Have ``preadv`` fail with an errno, from the call number `after` on."""
    real, calls = scatter._call, [0]

    def call(*args: Any) -> int:
        calls[0] += 1
        if after <= calls[0] < after + times:
            ctypes.set_errno(code)
            return -1
        return real(*args)

    monkeypatch.setattr(scatter, "_call", call)
    return calls


@pytest.mark.parametrize("io_threads", [1, 3])
def test_errors_of_the_storage_reach_the_consumer(io_threads, made, monkeypatch):
    for after in (1, 2, 4):
        with monkeypatch.context() as patch:
            failing(patch, errno.EIO, after)
            options: dict[str, Any] = {"shuffle": "none", "io_threads": io_threads}
            with dsprep.Reader(made["groups"], 7, transfer_size=9000, **options) as reader:
                with pytest.raises(ReadError, match="Input/output error") as caught:
                    consumed(reader)
                assert str(made["groups"]) in str(caught.value)
                assert "offset" in str(caught.value)
                assert 0 <= caught.value.sample < COUNT
                assert isinstance(caught.value.__cause__, OSError)
                assert threads() == 0
    with dsprep.Reader(made["groups"], 7) as reader:
        assert len(consumed(reader)) == COUNT


def test_a_loop_goes_on_after_an_error_that_passes(made, monkeypatch):
    with dsprep.Reader(made["groups"], 10, shuffle="none") as reader:
        expected = consumed(reader)
        reader.set_epoch(0)
        found = []
        with monkeypatch.context() as patch:
            failing(patch, errno.EIO, 3)
            with contextlib.suppress(ReadError):
                for batch in reader:
                    found += keys(batch, SCHEMA)
        assert 0 < len(found) < COUNT
        found += consumed(reader)
        assert found == expected


@pytest.mark.parametrize("kind", ["files", "compressed chunks"])
def test_more_files_than_may_be_open(kind, tmp_path):
    """A unit may lie in thousands of files."""
    count = 120
    origin, batch = dataset(tmp_path, "hdf5", SCHEMA, count)
    path = tmp_path / "set"
    if kind == "files":
        dsprep.convert(origin, path, to="hdf5", shard_size=1, workers=1, durable=False)
    else:
        compress = "gzip" if "compressed" in kind else None
        options = {"workers": 1, "compress": compress, "memory": "100GiB", "durable": False}
        write = WriteOptions(chunk=1)
        path = path.with_suffix(".zarr")
        dsprep.convert(origin, path, to="zarr", write_options=write, **options)
    expected = sorted(keys(batch, SCHEMA))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for shuffle in ("global", "none"):
        with dsprep.Reader(path, 20, shuffle=shuffle, io_threads=2) as reader:
            resource.setrlimit(resource.RLIMIT_NOFILE, (fds() + 100, hard))
            try:
                found = consumed(reader)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sorted(found) == expected
        if shuffle == "none":
            assert found == keys(batch, SCHEMA)


# --- hostile sidecars ------------------------------------------------------------------------

HARMLESS = (DsprepError, FileNotFoundError, IsADirectoryError, NotADirectoryError)


def read_hostile(path: Path, rng: np.random.Generator) -> None:
    options: dict[str, Any] = {
        "shuffle": ("none", "group", "global")[int(rng.integers(3))],
        "buffer_size": (None, 7, "1MiB")[int(rng.integers(3))],
        "io_threads": int(rng.integers(1, 3)),
        "verify": bool(rng.integers(2)),
        "epochs": 2,
    }
    with dsprep.Reader(path, int(rng.choice([1, 9, 200])), **options) as reader:
        for k, batch in enumerate(reader):
            for column in batch.values():
                len(column)
            if k > 100:
                break


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_hostile_sidecars_are_refused_or_harmless(format, grouped, tmp_path, monkeypatch):
    batch = random_batch(MIXED, 60, seed=5)
    compress = {"chunk": 7, "compress": Compression("gzip")} if format in ("hdf5", "zarr") else {}
    path = dataset(tmp_path, format, MIXED, batch, **({} if grouped else compress))[0]
    if grouped:
        out = tmp_path / f"groups{path.suffix}"
        dsprep.repack(path, out, buffer_size=11, stripe_size=4096, durable=False)
        path = out
    where = spec.sidecar_path(path)
    good = where.read_text()
    rng = np.random.default_rng(6)
    monkeypatch.setattr(dsprep.Sidecar, "check", lambda *_, **__: None)
    refused = 0
    for _ in range(15):
        content = json.loads(good)
        done = [mutations(content, rng) for _ in range(int(rng.integers(1, 3)))]
        where.write_text(json.dumps(content))
        try:
            read_hostile(path, rng)
        except HARMLESS:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{done}: {error!r}") from error
        assert threads() == 0
    assert refused > 4
