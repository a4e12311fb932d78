"""A killed run leaves nothing that looks complete, and continues to the same bytes: at every step.

A step is before or after a piece is copied, a position recorded, an output completed, renamed or
cleaned up, and a sidecar written. Every 17th one is taken, which of them depends on the case; all
with ``DSPREP_FULL=1``. What each format's writer does when it is killed is of its contract
(`FormatContract`); these are cuts into files, chunks and groups, and shuffles.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import zlib
from dataclasses import replace

import numpy as np
import pytest
from support import fails, flip, forked, kill_at, written

import dsprep
from dsprep import formats
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.sidecar import spec
from dsprep.storage.atomic import partial_path
from dsprep.storage.trees import data_files, remove
from dsprep.writing import plan, shards, shuffle, staging, transfer

FIXED = Schema((Field("x", np.dtype("<f4"), (50, 10)), Field("y", np.dtype("<i8"))))
MIXED = Schema((*FIXED, Field("r", np.dtype("<i2"), (None, 3)), Field.opaque("b")))
GROUPS = {"buffer_size": 32, "stripe_size": "4KiB"}
STRIDE = 1 if os.environ.get("DSPREP_FULL") == "1" else 17
CASES = [
    ("hdf5", FIXED, {"chunk": 7}),
    ("hdf5", MIXED, {"compress": "gzip:1"}),
    ("tfrecord", MIXED, {"shard_size": 70}),
    ("zarr", FIXED, {"compress": "gzip:1", "chunk": 10}),
    ("hdf5", MIXED, {**GROUPS, "shuffle": 3}),
    ("tfrecord", FIXED, {**GROUPS, "shuffle": 3, "shard_size": 70}),
]


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """The two datasets, as TFRecord with its sidecar."""
    made = {}
    for schema in (FIXED, MIXED):
        made[schema] = written(tmp_path_factory.mktemp("in") / "origin.tfrecord", schema, 160)
    return made


def digest(target):
    found = hashlib.sha256()
    for path in sorted(data_files(target)):
        found.update(str(path.relative_to(target.parent)).encode() + path.read_bytes())
    return found.hexdigest()


def burning(around, format):
    """Take steps of writing for those at which this process may be killed."""

    def planned(*args, plan=format.plan):
        made = plan(*args)

        def created(*args):
            writer = made.create(*args)
            around(writer, "finish")
            around(writer, "clean")
            return writer

        return replace(made, create=created)

    format.plan = planned
    around(transfer.ShardCopy, "_copy")
    for name in ("save", "publish", "discard"):
        around(staging.Staging, name)
    around(spec, "write")


def killed(make, fuse, format, more=lambda around: None):
    """Whether a child that makes the output was killed at step `fuse`; `more` adds steps."""

    def work():
        around = kill_at(fuse)
        burning(around, format)
        more(around)
        make(1)

    code = forked(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize(("to", "schema", "options"), CASES)
def test_killed_at_every_step(to, schema, options, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHECKPOINT_NBYTES", 100_000)
    monkeypatch.setattr(shuffle, "_choose", lambda *_: "buckets")  # of which some are released
    monkeypatch.setattr(shuffle, "UNSYNCED_NBYTES", 0)
    for name in ("pieces", "group_pieces"):  # small ones, so that there are many
        cut = getattr(plan, name)
        monkeypatch.setattr(shards, name, lambda *a, c=cut, **k: c(*a, **{"target": 40_000, **k}))
    format = formats.load(to)
    target = tmp_path / ("set" if "shard_size" in options else f"set{format.suffixes[0]}")
    verb = dsprep.repack if "buffer_size" in options else dsprep.convert

    def make(workers):
        verb(origin[schema], target, workers=workers, to=to, **options)

    make(2)
    expected, names = digest(target), {target.name, spec.sidecar_path(target).name}
    first = step = 1 + zlib.crc32(json.dumps([to, options]).encode()) % STRIDE
    while True:
        for path in list(tmp_path.iterdir()):
            remove(path)
        if not killed(make, step, format):
            break
        visible, working = target.exists(), partial_path(target)
        assert not visible or digest(target) == expected, step
        if (working / "state.json").exists() or not visible:
            make(1 + step % 3)
        elif working.exists():  # killed between its last two acts; all that is left is empty
            working.rmdir()
        assert digest(target) == expected, step
        assert {p.name for p in tmp_path.iterdir()} == names, step
        step += STRIDE
    assert step > first


SHARDS = {"shard_size": 40}
CUTS = {"convert": SHARDS, "repack": {**SHARDS, **GROUPS, "shuffle": 3}, "one file": {}}


def left(make, monkeypatch):
    """Leave an output that is complete and has not got its name."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(staging.Staging, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()


def damage(path):
    """Change a byte of a file, and give it its time stamp back."""
    flip(path, path.stat().st_size // 2, keep_time=True)


HOW = {
    "flip": lambda path: flip(path, 0),
    "cut": lambda path: os.truncate(path, 100),
    "remove": os.unlink,
}


@pytest.mark.parametrize(
    ("to", "cut", "how"),
    [
        *itertools.product(("hdf5", "zarr"), ("convert", "one file"), ("flip",)),
        ("hdf5", "convert", "cut"),
        ("zarr", "repack", "remove"),
        ("lmdb", "repack", "flip"),
        ("tfrecord", "convert", "remove"),
    ],
)
def test_a_complete_shard_that_was_changed_is_made_again(
    to, how, cut, origin, tmp_path, monkeypatch
):
    target, options = tmp_path / "set", CUTS[cut]
    verb = dsprep.repack if "buffer_size" in options else dsprep.convert

    def make():
        return verb(origin[FIXED], target, to=to, **options)

    left(make, monkeypatch)
    files = sorted(data_files(staging.made_path(target)))
    expected = [(path.name, path.read_bytes()) for path in files]
    HOW[how](max(files[: len(files) // 3 or 1], key=lambda path: path.stat().st_size))
    report = make()
    done = report if cut != "repack" else report.parts[0][1]
    assert [(path.name, path.read_bytes()) for path in sorted(data_files(target))] == expected
    assert done.resumed == {"convert": 120, "repack": 128, "one file": 0}[cut]


def test_a_damaged_record_costs_a_shard_or_is_refused(origin, tmp_path, monkeypatch):
    target, kept = tmp_path / "set", tmp_path / "kept"
    working = partial_path(target)

    def make(**more):
        dsprep.repack(origin[FIXED], target, to="hdf5", **CUTS["repack"], **more)

    make()
    expected = digest(target)
    remove(target)
    spec.sidecar_path(target).unlink()
    left(make, monkeypatch)
    shutil.copytree(working, kept)
    of_shard = itertools.product(("shard-1.json",), ("flip", "cut", "empty", "other"))
    for name, how in (("job.json", "flip"), ("state.json", "cut"), *of_shard):
        for path in (working, target, spec.sidecar_path(target)):
            remove(path)
        shutil.copytree(kept, working)
        path, data = working / name, (working / name).read_bytes()
        texts = {"cut": data[: len(data) // 2], "empty": b"{}", "other": b"[[1e999]]"}
        if how == "flip":
            damage(path)
        else:
            path.write_bytes(texts[how])
        if name in ("job.json", "state.json"):
            fails(make, FormatError, "damaged; add restart=True")
        make(restart=name in ("job.json", "state.json"))
        assert digest(target) == expected, (name, how)


@pytest.mark.parametrize("to", formats.WRITTEN)
def test_an_interrupt_loses_nothing_that_was_written(to, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(
        shards, "pieces", lambda *a, cut=shards.pieces, **k: cut(*a, target=40_000, **k)
    )
    done = []

    def interrupt(samples, nbytes):
        done.append(samples)
        if samples > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"after \d+ samples") as caught:
        dsprep.convert(origin[FIXED], tmp_path / "set", to=to, progress=interrupt)
    assert caught.value.__notes__ == [staging.RESUME_HINT]
    assert dsprep.convert(origin[FIXED], tmp_path / "set", to=to).resumed >= done[-1]
    with dsprep.open(origin[FIXED]) as a, dsprep.open(tmp_path / "set") as b:
        assert dsprep.verify(a, b).same
