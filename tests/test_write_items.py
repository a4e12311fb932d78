"""Samples of items: the same bytes whoever calls the function, whatever was killed meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import item_functions
import numpy as np
import pytest
from executor_job import digests
from item_functions import OPTIONS, several
from support import fails
from test_executors import mpiexec, needs, swept  # noqa: F401 (a fixture)
from test_interruption import killed

import dsprep
from dsprep import executors, formats
from dsprep.errors import (
    ExecutorError,
    FormatError,
    ItemError,
    SchemaError,
    TargetError,
    UsageError,
)
from dsprep.sidecar import spec
from dsprep.sidecar.spec import sidecar_path
from dsprep.storage.atomic import partial_path
from dsprep.storage.trees import remove
from dsprep.writing import plan, shards, shuffle, staging, tasks
from dsprep.writing.items import calls
from dsprep.writing.items import tasks as items_tasks

SCRIPT = Path(item_functions.__file__)
COUNT = 60
ITEMS = range(COUNT)


def expected_samples(count=COUNT):
    """What `several` gives, in order."""
    found = []
    for i in range(count):
        given = several(i)
        found += [] if given is None else [given] if isinstance(given, dict) else list(given)
    return found


def write(target, function=several, items=ITEMS, **options):
    return dsprep.write(target, items, function=function, **{**OPTIONS, **options})


def working(target):
    return partial_path(target) / "items"


def assert_samples(target, expected):
    with dsprep.open(target) as source:
        assert len(source) == len(expected)
        for found, sample in zip(source, expected, strict=True):
            assert list(found) == list(sample)
            for name, value in sample.items():
                assert np.array_equal(found[name], value), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one thread makes."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "set.h5", workers=1)
    return digests(folder)


# --- what a function may give ------------------------------------------------------------------


@pytest.mark.parametrize("to", sorted(formats.WRITTEN))
def test_samples_come_in_the_order_of_the_items(to, tmp_path):
    report = write(tmp_path / "set", to=to, workers=3)
    expected = expected_samples()
    assert_samples(tmp_path / "set", expected)
    none = sum(several(i) is None or i % 20 in (8,) for i in ITEMS)
    assert (report.samples, report.items, report.left_out) == (len(expected), COUNT, none)
    assert (report.failures, report.failed) == (0, ())
    assert {p.name for p in tmp_path.iterdir()} == {"set", "set.dsprep.json"}


def test_processes(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "TASK_SECONDS", 0.02)
    with executors.opened("processes", workers=2) as pool:
        write(tmp_path / "set.h5", function=several, executor=pool)
        assert digests(tmp_path) == whole
        for error, function, told in [
            (ItemError, item_functions.refusing, r"item 7 \(7\): the function failed: ValueError"),
            (ItemError, item_functions.odd, r"item 3 \(3\): .*Odd: 1 and 2"),
        ]:
            with pytest.raises(error, match=told) as caught:
                write(tmp_path / "other.h5", function=function, executor=pool)
            assert any("item_functions.py" in note for note in caught.value.__notes__)
            assert [f.result() for f in [pool.submit(abs, -i) for i in range(9)]] == list(range(9))
            remove(partial_path(tmp_path / "other.h5"))


@needs["mpi"]
def test_ranks(whole, tmp_path):
    done = mpiexec(SCRIPT, "mpi", tmp_path / "set.h5")
    assert (done.returncode, done.stderr) == (0, "")
    assert digests(tmp_path) == whole


# --- wrong use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [iter([1]), {1, 2}, {1: 2}, "abc", (i for i in "ab"), 7])
def test_items_without_an_order_are_refused(items, tmp_path):
    with pytest.raises(UsageError, match=r"items cannot be a .*; give a list"):
        write(tmp_path / "set.h5", items=items)
    assert list(tmp_path.iterdir()) == []


def test_no_samples_at_all(tmp_path):
    for items in ([1], []):
        with pytest.raises(UsageError, match="of the others the function gave none"):
            write(tmp_path / "set.h5", items=items)
        remove(partial_path(tmp_path / "set.h5"))


def test_functions_that_do_not_travel(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be called by other processes: .*; define it"):
        write(tmp_path / "set.h5", lambda i: several(i), executor="processes")
    fails(lambda: write(tmp_path / "set.h5", 7), UsageError, "is not callable")
    with pytest.raises(UsageError, match="expected 'raise' or 'skip'"):
        write(tmp_path / "set.h5", errors="ignore")
    with pytest.raises(UsageError, match="'spark' is not an executor"):
        write(tmp_path / "set.h5", executor="spark")


# --- items that fail ---------------------------------------------------------------------------


def test_an_item_that_fails_is_named(tmp_path):
    with pytest.raises(ItemError) as caught:
        write(tmp_path / "set.h5", item_functions.failing, [0, 7, 8], workers=1)
    assert str(caught.value.where) == "item 1 (7)"
    assert "resume=True" in caught.value.fix
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(SchemaError, match=r"item 1 \(12\), field y: the value is not of this"):
        write(tmp_path / "other.h5", item_functions.failing, [0, 12], workers=1)
    items = ["a", "b" * 1000]
    with pytest.raises(SchemaError, match=r"item 1 \('bbb.*\.\.\.\): this is not a sample"):
        write(tmp_path / "third.h5", lambda i: {"n": i} if i == "a" else i, items, schema=None)


@pytest.mark.parametrize("nbytes", [100, items_tasks.BLOCK_NBYTES])
def test_items_that_fail_are_left_out(nbytes, tmp_path, monkeypatch):
    monkeypatch.setattr(items_tasks, "BLOCK_NBYTES", nbytes)
    monkeypatch.setattr(calls, "TASK_SECONDS", 0.01)
    good = [i for i in ITEMS if i % 20 not in (7, 12, 17)]
    write(tmp_path / "good.h5", items=good)
    report = write(tmp_path / "set.h5", item_functions.failing, errors="skip", workers=3)
    data = [(tmp_path / n).read_bytes() for n in ("good.h5", "set.h5")]
    assert data[0] == data[1]
    assert report.failures == 9
    assert [f.number for f in report.failed] == [i for i in ITEMS if i % 20 in (7, 12, 17)]
    assert report.failed[0] == (7, "7", "ValueError: there is no 7")
    assert report.failed[1].error.startswith("SchemaError: item 12 (12), field y: ")
    assert report.failed[2].error == "KeyError: 17"


def test_items_that_end_their_process_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "TASK_SECONDS", 1e9)
    options = {"schema": None, "workers": 2, "executor": "processes"}
    target = tmp_path / "set.h5"
    with pytest.raises(ItemError, match=r"item 1 \(17\): the function failed: SystemExit"):
        write(target, item_functions.ending, [0, 17], **options)
    remove(partial_path(target))
    told = {4: "ended with status 3", 11: r"was ended by signal 11 .*"}
    for number, how in told.items():
        lost = rf"^items? .*1: a worker was lost \(found the process {how}"
        with pytest.raises(ExecutorError, match=lost):
            write(target, item_functions.ending, [0, number], **options)
        remove(partial_path(target))


def test_if_all_items_fail_the_reasons_are_named(tmp_path):
    with pytest.raises(UsageError) as caught:
        write(tmp_path / "set.h5", item_functions.never, range(20), errors="skip", schema=None)
    assert "of 20 items 20 failed" in caught.value.what
    assert "item 0 (0): ValueError: 0" in str(caught.value.found)
    assert list(tmp_path.iterdir()) == []  # the next call begins anew
    write(tmp_path / "set.h5", item_functions.small, range(20), errors="skip", schema=None)


# --- interrupted runs --------------------------------------------------------------------------


def interrupted(*args):
    raise KeyboardInterrupt


def test_an_interrupted_run_keeps_what_is_complete(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "TASK_SECONDS", 0.0)

    def stop(done, total):
        if done >= 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        write(tmp_path / "set.h5", workers=2, progress=stop)
    assert caught.value.__notes__ == ["call again with resume=True to continue"]
    assert {p.name for p in tmp_path.iterdir()} == {partial_path(tmp_path / "set.h5").name}
    told = []
    write(tmp_path / "set.h5", workers=2, progress=lambda *n: told.append(n), resume=True)
    assert 30 <= told[0][0] < told[0][1] == COUNT
    assert digests(tmp_path) == whole


def left(target, monkeypatch, function=several, **options):
    """Leave an interrupted run with all parts."""
    with monkeypatch.context() as patch:
        patch.setattr(calls.Calls, "counts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(target, function, **options)
    assert list(working(target).glob("part-*"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"items": range(COUNT - 1)}, r"other: items\)"),
        ({"function": item_functions.slow}, r"other: function\)"),
        ({"buffer_size": 16}, r"other: buffer_size=\)"),
    ],
)
def test_another_call_does_not_continue(options, told, tmp_path, monkeypatch):
    target = tmp_path / "set.h5"
    left(target, monkeypatch)
    with pytest.raises(TargetError, match=told):
        write(target, **options, resume=True)
    assert working(target).exists()
    write(target, **options, restart=True)
    assert {p.name for p in tmp_path.iterdir()} == {"set.h5", "set.h5.dsprep.json"}
    items = options.get("items", ITEMS)
    assert spec.read(sidecar_path(target)).lineage["items"] == len(items)


def test_what_is_left_is_neither_continued_nor_discarded_unasked(whole, tmp_path, monkeypatch):
    target = tmp_path / "set.h5"
    left(target, monkeypatch)
    remove(next(iter(working(target).glob("part-0-*"))))
    for options in ({}, {"items": range(3)}, {"function": item_functions.slow}):
        with pytest.raises(TargetError, match=r"left \d+ of 60 items.*resume=True.*restart=True"):
            write(target, **options)
    with pytest.raises(UsageError, match=r"resume=True .*restart=True"):
        write(target, resume=True, restart=True)
    write(target, restart=True)
    assert digests(tmp_path) == whole


@pytest.mark.parametrize("damage", ["data", "part.json", "rename", "overlap", "gone"])
def test_parts_that_are_not_whole_are_made_again(damage, whole, tmp_path, monkeypatch):
    target = tmp_path / "set.h5"
    left(target, monkeypatch)
    part = next(iter(working(target).glob("part-*")))
    if damage == "rename":
        part.rename(part.with_name("part-0-61"))
    elif damage == "overlap":  # of a worker that was taken for dead
        others = [p for p in part.parent.glob("part-[!0]*") if (p / "data").stat().st_size]
        content = spec.read_record(others[0] / "part.json")
        content["start"] -= 1
        late = part.with_name(f"part-{content['start']}-{content['stop']}")
        spec.write_record(content, shutil.copytree(others[0], late) / "part.json")
    elif damage == "gone":
        remove(part)
    else:
        os.truncate(part / damage, 10)
    report = write(target, resume=True)
    assert report.notes[0].startswith("continued: ")
    assert digests(tmp_path) == whole


def parts_too(around):
    """Add the steps of parts and of tasks."""
    around(items_tasks.PartWriter, "append")
    around(items_tasks, "write_record")
    around(tasks, "remove")
    around(Path, "rename")


STRIDE = 1 if os.environ.get("DSPREP_FULL") == "1" else 53
CASES = [("hdf5", {}), ("lmdb", {"shuffle": 3}), ("zarr", {"errors": "skip", "shard_size": 12})]


@pytest.mark.parametrize(("to", "options"), CASES)
def test_killed_at_every_step(to, options, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHECKPOINT_NBYTES", 3000)
    monkeypatch.setattr(shuffle, "_choose", lambda *_: "buckets")
    monkeypatch.setattr(calls, "TASK_SECONDS", 0.0)
    monkeypatch.setattr(items_tasks, "BLOCK_NBYTES", 1000)
    cut = plan.group_pieces
    monkeypatch.setattr(shards, "group_pieces", lambda *a, **k: cut(*a, **{"target": 2000, **k}))
    format, target = formats.load(to), tmp_path / "set"
    function = item_functions.failing if options.get("errors") else several

    def make(workers):
        how = {"workers": workers, "to": to, "durable": True, "resume": True, **options}
        write(target, function, range(24), **how)

    make(1)
    expected, step = digests(tmp_path), 1 + len(to)
    first = step
    while True:
        for path in list(tmp_path.iterdir()):
            remove(path)
        if not killed(lambda _: make(2), step, format, parts_too):
            break
        if staging.published(target):  # killed between its last acts
            fails(lambda: make(1), TargetError, "an interrupted run had completed it")
        elif target.exists():
            remove(partial_path(target))
        else:
            make(1 + step % 3)
        assert digests(tmp_path) == expected, step
        step += STRIDE
    assert step > first


def test_items_of_a_killed_worker_are_done_again(whole, tmp_path):
    items = [(i, tmp_path / "marker") for i in ITEMS]
    target = tmp_path / "out" / "set.h5"
    target.parent.mkdir()
    with pytest.raises(ExecutorError, match=r"items? .*a worker was lost \(found .*signal 9"):
        write(target, item_functions.lost, items, executor="processes", workers=2)
    assert (tmp_path / "marker").exists()
    report = write(target, item_functions.lost, items, resume=True)
    assert report.failures == 0
    assert "continued" in report.notes[0]
    assert digests(target.parent)["set.h5"] == whole["set.h5"]


def test_damaged_values_are_noticed(whole, tmp_path, monkeypatch):
    target = tmp_path / "set.h5"
    left(target, monkeypatch)
    data = next(p for p in working(target).glob("part-*/data") if p.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(FormatError, match=r"a temporary file is damaged; .*resume=True"):
        write(target, resume=True)
    write(target, resume=True)
    assert digests(tmp_path) == whole


def test_the_output_is_started_over_if_it_is_planned_otherwise(tmp_path, monkeypatch):
    target = tmp_path / "set.h5"
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(target)
    (partial_path(target) / "plan.json").write_text("{}")
    for path in (partial_path(target) / "data").iterdir():
        remove(path)
    write(target, resume=True)
    assert_samples(target, expected_samples())
