"""No built-in exception comes out of damaged data, signals and limits of the system."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from support import cli, cli_error, fails, written

import dsprep
from dsprep import executors
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.formats.hdf5 import parse
from dsprep.formats.options import WriteOptions
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs.provenance import provenance

FIXED = Schema((Field("x", np.dtype("<f4"), (6, 5)), Field("y", np.dtype("<i8"))))
SUFFIXES = (".h5", ".lmdb", ".tfrecord", ".zarr")


def make(path, schema=FIXED, count=40, **options):
    return written(path, schema, count, **options)


# --- damaged data ------------------------------------------------------------------------------


def change(path, **keys):
    where = spec.sidecar_path(path)
    where.write_text(json.dumps({**json.loads(where.read_text()), **keys}))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_sidecar_without_places_is_written_again_as_advised(suffix, tmp_path):
    path = make(tmp_path / f"a{suffix}")
    change(path, layouts=[])
    fails(lambda: Sidecar.open(path), FormatError, "dsprep provenance")
    provenance(path)
    with Sidecar.open(path) as opened:
        assert len(opened.extents([39])) > 0


def test_rows_that_are_not_there_are_refused(tmp_path):
    schema = Schema((Field("r", np.dtype("<i2"), (None,)),))
    path = make(tmp_path / "a.h5", schema, write=WriteOptions(chunk=7))
    content = json.loads(spec.sidecar_path(path).read_text())
    for first in (1 << 40, -5):
        content["layouts"][0]["columns"]["r"] |= {"first": first, "count": 3}
        change(path, layouts=content["layouts"])
        with Sidecar.open(path) as opened, pytest.raises(FormatError, match="rows"):
            opened.extents([0])
        assert "rows that do not exist" in cli_error("provenance", path, "--locate", "0")


def test_names_of_attributes_that_are_no_text(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((5, 3))
        file["x"].attrs.create(b"caf\xe9", 3)
        file.attrs.create(b"caf\xe9", 3)
    made = provenance(tmp_path / "a.h5")
    assert any("caf\\xe9" in note for note in made.content.notes)
    for suffix in SUFFIXES:
        dsprep.convert(tmp_path / "a.h5", tmp_path / f"b{suffix}")


@pytest.mark.parametrize("inner", [False, True])
def test_an_array_without_codecs(inner, tmp_path):
    path = tmp_path / "a.zarr"
    zarr.create_array(
        path, shape=(8, 2), chunks=(2, 2), shards=(4, 2) if inner else None, dtype="i4"
    )
    document = json.loads((path / "zarr.json").read_text())
    if inner:
        document["codecs"][0]["configuration"]["codecs"] = []
    else:
        document["codecs"] = []
    (path / "zarr.json").write_text(json.dumps(document))
    fails(lambda: provenance(path), FormatError)


# --- signals -----------------------------------------------------------------------------------


def shared(group):
    """What the processes of a group share under a name, such as semaphores."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                found |= {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
        except OSError:
            continue  # it has ended, or is another user's
    return {name for name in found if not name.endswith("(deleted)")}


WAITING = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # that of a background job is ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup has it
pwritev, calls = os.pwritev, []
def waiting(*words):
    calls.append(words)
    while len(calls) > 2 and not os.path.exists({0!r} + "/go"):
        open({0!r} + "/waits", "w").close()
        time.sleep(0.01)
    return pwritev(*words)
os.pwritev = waiting
"""


def start(folder, *words):
    """Start a command in a group of its own that writes a little, waits for `go`, writes more."""
    (folder / "sitecustomize.py").write_text(WAITING.format(str(folder)))
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-m", "dsprep", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A dataset that takes many calls to write."""
    schema = Schema((Field("x", np.dtype("u1"), (1 << 18,)),))
    return make(tmp_path_factory.mktemp("large") / "a.h5", schema, 60)


@pytest.mark.parametrize(
    ("executor", "number", "group", "code", "word"),
    [
        ("threads", signal.SIGTERM, False, 143, "ended by SIGTERM"),
        ("threads", signal.SIGHUP, False, 129, "ended by SIGHUP"),
        ("processes", signal.SIGINT, True, 130, "interrupted"),
        ("processes", signal.SIGKILL, True, -9, ""),
    ],
)
def test_signals(executor, number, group, code, word, large, tmp_path):
    target = tmp_path / "out"
    words = ["convert", large, target, "--to", "tfrecord", "--shard-size", 5]
    words += ["--executor", executor, "--workers", 2]
    child = start(tmp_path, *words)
    while not (tmp_path / "waits").exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    assert shared(child.pid) == set()  # it would be left by a SIGKILL
    (os.killpg if group else os.kill)(child.pid, number)
    (tmp_path / "go").touch()
    out, err = child.communicate(timeout=600)
    assert child.returncode == code, (out, err)
    if word:
        told = rf"dsprep: error: {word} after \d+ samples; run the same command again to continue\n"
        assert re.search(f"{told}$", err), err
        assert err.count("\n") == 2  # and the note on types
    assert not target.exists()
    cli(*words)
    with dsprep.open(target) as source:
        assert len(source) == 60


def test_an_ignored_signal_stays_ignored():
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from dsprep.cli.ending import handling_signals\n"
        "with handling_signals(): signal.raise_signal(signal.SIGTERM)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- limits ------------------------------------------------------------------------------------


def test_no_more_threads_is_one_line(tmp_path, monkeypatch):
    path = make(tmp_path / "a.h5")

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    told = cli_error("convert", path, tmp_path / "b.lmdb")
    assert "no more threads" in told
    assert "--workers" in told


def test_many_files_with_few_descriptors(tmp_path):
    for suffix in SUFFIXES:
        to = suffix[1:].replace("h5", "hdf5")
        make(tmp_path / to, count=50, to=to, shard_size=1)
    code = (
        "import resource, sys, dsprep\n"
        "from pathlib import Path\n"
        "from dsprep.verbs.provenance import provenance\n"
        "from dsprep.sidecar.sidecar import Sidecar\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (36, 36))\n"
        "for path in [p for p in Path(sys.argv[1]).iterdir() if p.is_dir()]:\n"
        "    for through in ('sidecar', 'library'):\n"
        "        with dsprep.open(path, through=through) as source: source.read(0, 50)\n"
        "    with Sidecar.open(path) as opened:\n"
        "        opened.read(slice(None)); opened.read([1, 45, 27] * 50)\n"
        "    with dsprep.Reader(path, batch_size=8) as reader:\n"
        "        assert sum(len(batch['y']) for batch in reader) == 50\n"
        "    provenance(path, checksums=True)\n"
        "    dsprep.convert(path, path.with_suffix('.tfrecord'), durable=False)\n"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


# --- a pool of processes -----------------------------------------------------------------------


def test_processes_give_back_what_cannot_be_sent():
    with executors.opened("processes", workers=1) as pool:
        with pytest.raises(RuntimeError, match="cannot be sent"):
            pool.submit(threading.Lock).result()
        with pytest.raises(ZeroDivisionError) as caught:
            pool.submit(divmod, 1, 0).result()
        assert "Traceback" in caught.value.__notes__[0]
        with pytest.raises(Exception, match=r"pickle|local object"):
            pool.submit(lambda: 1).result()
        assert pool.submit(os.getpid).result() != os.getpid()


@pytest.mark.parametrize("through", ["library", "sidecar"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_was_read_is_closed_though_the_server_is_gone(suffix, through, tmp_path, monkeypatch):
    path = make(tmp_path / f"data{suffix}")
    close = os.close

    def failing(fd):
        close(fd)
        raise OSError(5, "Input/output error")

    files, open_hdf5 = [], parse.open_hdf5
    recorded = lambda path: files.append(open_hdf5(path)) or files[-1]  # noqa: E731
    monkeypatch.setattr(parse, "open_hdf5", recorded)
    source = dsprep.open(path, through=through)
    for file in files:
        close(file.id.get_vfd_handle())
    expected = source[3]["y"] if suffix != ".h5" else None
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        source.close()
        del source
    assert expected is None or expected.shape == ()


def test_an_error_without_a_name_says_what_was_written(tmp_path, monkeypatch):
    path = make(tmp_path / "data.h5")

    def failing(copy):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("dsprep.writing.transfer.ShardCopy.run", failing)
    words = ("convert", path, tmp_path / "out", "--to", "zarr", "--shard-size", 15)
    assert "Input/output error (while out-00000-of-00003.zarr was written)" in cli_error(*words)
