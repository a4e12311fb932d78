"""Output appears whole or not at all, and only one process makes it."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import cli_error, fails, files_of

import dsprep
from dsprep.core.schema import Schema
from dsprep.errors import TargetError
from dsprep.sidecar.spec import Content
from dsprep.storage.atomic import partial_path
from dsprep.writing.staging import Staging, discard

CONTENT = Content("hdf5", Schema(()), ())
JOB = {"format": "hdf5", "samples": [0, 3]}


def produce(staging, text="new"):
    (staging.data / staging.target.name).write_text(text)


def test_existing_target_is_refused_or_replaced(tmp_path):
    target = tmp_path / "out"
    target.write_text("old")
    partial_path(target).mkdir(0o700)
    (partial_path(target) / "dsprep.lock").touch()  # killed when all but this was removed
    fails(lambda: Staging(target, JOB), TargetError, "overwrite=True")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with Staging(target, JOB, overwrite=True) as staging:
        produce(staging)
        assert target.read_text() == "old"
        staging.publish(CONTENT, b"")
    assert target.read_text() == "new"


@pytest.mark.parametrize("old_is_dir", [True, False])
def test_directories_and_files_replace_each_other(tmp_path, old_is_dir):
    target = tmp_path / "out"
    if old_is_dir:
        target.mkdir()
        (target / "inside").write_text("old")
    else:
        target.write_text("old")
    with Staging(target, JOB, overwrite=True) as staging:
        made = staging.data / "out"
        if old_is_dir:
            made.write_text("new")
        else:
            made.mkdir()
        staging.publish(CONTENT, b"")
        staging.discard()
    assert target.is_dir() != old_is_dir
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.dsprep.json"]


def test_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "out"
    with Staging(target, JOB) as staging:
        produce(staging)
        target.write_text("someone else's")
        fails(lambda: staging.publish(CONTENT, b""), TargetError)
    assert target.read_text() == "someone else's"


def test_a_directory_of_other_files_is_not_used(tmp_path):
    own = partial_path(tmp_path / "out") / "mine"
    own.parent.mkdir()
    own.write_text("mine")
    for more in ({}, {"restart": True}, {"overwrite": True}):
        fails(lambda: Staging(tmp_path / "out", JOB, **more), TargetError, "mine")
    assert own.read_text() == "mine"


def test_only_one_process_at_a_time(tmp_path):
    with Staging(tmp_path / "out", JOB), pytest.raises(TargetError, match="another process"):
        Staging(tmp_path / "out", JOB)
    Staging(tmp_path / "out", JOB).close()


def test_state_is_continued_by_the_same_job_only(tmp_path):
    target = tmp_path / "out"
    with Staging(target, JOB) as staging:
        assert staging.state is None
        staging.save({"shard": 3})
    with Staging(target, JOB) as staging:
        assert staging.state == {"shard": 3}
    with pytest.raises(TargetError, match="restart=True") as caught:
        Staging(target, {**JOB, "samples": [0, 4]})
    assert "other: samples" in str(caught.value)
    with Staging(target, {**JOB, "samples": [0, 4]}, restart=True) as staging:
        assert staging.state is None
        assert list(staging.data.iterdir()) == []


def test_killed_between_publishing_and_the_last_words(tmp_path):
    target = tmp_path / "out"
    with Staging(target, JOB) as staging:
        produce(staging)
        staging.save({"shard": 1, "complete": True})
        staging.publish(CONTENT, b"")
    with Staging(target, JOB) as staging:  # no --overwrite needed: it is this run's own output
        assert staging.state["complete"]
        assert staging.is_published
        staging.discard()
    assert target.read_text() == "new"


# --- what somebody else has put where it is made -------------------------------------------------


@pytest.fixture
def victim(tmp_path):
    """A directory that holds what nobody may remove, also under names that working ones have."""
    path = tmp_path / "victim"
    for name in ("data", "old", "home"):
        (path / name).mkdir(parents=True)
        (path / name / "thesis").write_text("precious")
    for name in ("job.json", "state.json", "thesis"):
        (path / name).write_text('{"complete": true}')
    return path


def plant(how: str, victim: Path, target: Path, monkeypatch) -> Path:
    """Put something of somebody else where `target` is made; return what is to stay as it is."""
    work = partial_path(target)
    if how == "file":
        work.write_text("mine")
    elif how == "link":
        work.symlink_to(victim)
    elif how == "dangling":
        work.symlink_to(victim / "not there")
    else:
        victim.rename(work)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        return work
    return victim


HOW = ["file", "link", "dangling", "another user's"]
FIX = "move it away, or choose another target"


@pytest.mark.parametrize("how", HOW)
def test_what_somebody_else_has_put_there_is_named_and_stays(how, victim, tmp_path, monkeypatch):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"] = np.zeros((4, 5))
    target = tmp_path / "out.h5"
    kept = plant(how, victim, target, monkeypatch)
    before = files_of(kept)
    for options in ({}, {"overwrite": True}, {"restart": True}, {"resumable": False}):
        with pytest.raises(TargetError, match=FIX) as caught:
            Staging(target, {**JOB, "source": "x"}, **options)
        assert str(partial_path(target)) in str(caught.value)
    for command in (["convert"], ["repack", "--buffer-size", "1"]):
        for words in ([], ["--overwrite"], ["--restart"]):
            told = cli_error(command[0], tmp_path / "in.h5", target, *command[1:], *words)
            assert FIX in told
    fails(lambda: discard(target), TargetError)
    with pytest.raises((TargetError, ValueError, FileNotFoundError)):
        dsprep.open(target)
    assert files_of(kept) == before
    assert not (victim / "not there").exists()
    assert not target.exists()


def test_nobody_else_can_look_into_a_working_directory(tmp_path):
    with Staging(tmp_path / "out", JOB) as staging:
        assert staging.root.stat().st_mode & 0o777 == 0o700
        assert not staging.data.stat().st_mode & 0o022


def test_what_was_replaced_is_not_published_again(tmp_path, monkeypatch):
    """By a run that cannot tell: the file system has numbered its files anew."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    with Staging(target, JOB, overwrite=True) as staging:
        staging.made.mkdir()
        staging.save({"shard": 1, "complete": True})
        staging.publish(CONTENT, b"")
    monkeypatch.setattr(
        "dsprep.writing.staging._identity", lambda path: [path.stat().st_ino + 1, 0]
    )
    fails(lambda: Staging(target, JOB), TargetError, "it exists already")
    with Staging(target, JOB, overwrite=True) as staging:
        assert staging.state is None
        assert not staging.made.exists()
