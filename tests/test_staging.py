"""Output appears whole or not at all, and only one process makes it."""

from __future__ import annotations

import pytest

from dsprep.core.atomic import partial_path
from dsprep.errors import FormatError, TargetError
from dsprep.writing.staging import Staging

JOB = {"format": "hdf5", "samples": [0, 3]}


def produce(staging, text="new"):
    (staging.data / staging.target.name).write_text(text)


def test_nothing_is_visible_before_publish(tmp_path):
    target = tmp_path / "out"
    with Staging(target, JOB) as staging:
        produce(staging)
        assert not target.exists()
        staging.publish()
        assert target.read_text() == "new"
        staging.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_existing_target_is_refused_or_replaced(tmp_path):
    target = tmp_path / "out"
    target.write_text("old")
    with pytest.raises(TargetError, match="--overwrite"):
        Staging(target, JOB)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with Staging(target, JOB, overwrite=True) as staging:
        produce(staging)
        assert target.read_text() == "old"
        staging.publish()
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
        staging.publish()
        staging.discard()
    assert target.is_dir() != old_is_dir
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "out"
    with Staging(target, JOB) as staging:
        produce(staging)
        target.write_text("someone else's")
        with pytest.raises(TargetError):
            staging.publish()
    assert target.read_text() == "someone else's"


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
    with pytest.raises(TargetError, match="--restart") as caught:
        Staging(target, {**JOB, "samples": [0, 4]})
    assert "samples differs" in str(caught.value)
    with Staging(target, {**JOB, "samples": [0, 4]}, restart=True) as staging:
        assert staging.state is None
        assert list(staging.data.iterdir()) == []


def test_killed_between_publishing_and_the_last_words(tmp_path):
    target = tmp_path / "out"
    with Staging(target, JOB) as staging:
        produce(staging)
        staging.save({"shard": 1, "complete": True})
        staging.publish()
    with Staging(target, JOB) as staging:  # no --overwrite needed: it is this run's own output
        assert staging.state["complete"]
        staging.publish()
        staging.discard()
    assert target.read_text() == "new"


def test_damaged_record_is_refused_with_the_way_out(tmp_path):
    target = tmp_path / "out"
    Staging(target, JOB).close()
    (partial_path(target) / "job.json").write_text("{")
    with pytest.raises(FormatError, match="--restart"):
        Staging(target, JOB)
    Staging(target, JOB, restart=True).close()


def test_missing_directory(tmp_path):
    with pytest.raises(TargetError, match="no such directory"):
        Staging(tmp_path / "no" / "out", JOB)
