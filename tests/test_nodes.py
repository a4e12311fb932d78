"""Data on file systems that nodes share, and copies: times move, and things are seen late."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
from oracles import SUFFIX
from support import assert_same_batch, fails, random_batch
from test_changes import COUNT, SCHEMA, made

import dsprep
from dsprep.errors import TargetError
from dsprep.sidecar.spec import Content
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage import nodes
from dsprep.storage.identity import Identity
from dsprep.storage.nodes import wait_for
from dsprep.writing import staging

FORMATS = sorted(SUFFIX)


def test_attributes_that_a_client_has_kept_are_asked_for_anew(tmp_path, monkeypatch):
    """Opening does that; it is done before data count as changed, and only then."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    old = path.stat()
    time.sleep(0.01)
    path.write_bytes(b"new!")
    known = Identity.of(path)
    real, opened, kept = Path.stat, [], [old]
    monkeypatch.setattr(
        Path, "stat", lambda p, **k: kept[0] if kept and p == path else real(p, **k)
    )
    before = os.open

    def open_(name, *args, **kwargs):
        if Path(name) == path:
            opened.append(name)
            kept.clear()
        return before(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    for _ in range(2):
        assert known.changed(path) is None
        assert len(opened) == 1


# --- what another node has completed -----------------------------------------------------------


def test_it_is_waited_for_what_another_node_has_written(tmp_path):
    path = tmp_path / "x"
    threading.Timer(0.1, path.write_bytes, [b"12"]).start()
    wait_for(path)
    assert path.exists()


def test_what_is_never_seen_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "PATIENCE", 0.1)
    fails(lambda: wait_for(tmp_path / "x"), TargetError, "not seen here", "share", "actimeo=1")


# --- sidecars ------------------------------------------------------------------------------------


def assert_used(path: Path) -> None:
    """Assert that a sidecar is used without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dsprep.open(path) as source:
            assert isinstance(source, SidecarSource)
            assert_same_batch(source[:], random_batch(SCHEMA, COUNT, seed=1), SCHEMA)
        dsprep.Sidecar.open(path).close()


WAYS = {
    "cp -a": lambda a, b: subprocess.run(["cp", "-a", a, b], check=True),
    "rsync without times": lambda a, b: subprocess.run(["cp", "-r", a, b], check=True),
    "moved": lambda a, b: a.rename(b),
}


@pytest.mark.parametrize(("way", "format"), [*zip(WAYS, FORMATS, strict=False), ("moved", "zarr")])
def test_a_sidecar_holds_for_copies(way, format, tmp_path):
    (path,) = made(format, tmp_path / "one", 1, 1, beside=True)
    dsprep.provenance(path, checksums=True)
    WAYS[way](tmp_path / "one", tmp_path / "two")
    assert_used(tmp_path / "two" / path.name)


# --- what is found again -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_another_node_has_made_meanwhile_is_not_replaced(kind, tmp_path, monkeypatch):
    """Though this one does not see it: the server is asked by the rename itself."""
    target = tmp_path / "out"
    real = os.path.lexists
    with staging.Staging(target, {"format": "hdf5"}) as stage:
        for path in (stage.data / "out", target):
            if kind == "file":
                path.write_text(str(path))
            else:
                path.mkdir()
                (path / "x").write_text(str(path))
        stage.save({"complete": True})
        monkeypatch.setattr(os.path, "lexists", lambda p: p != target and real(p))
        with pytest.raises(TargetError, match="another node has made it"):
            stage.publish(Content("hdf5", SCHEMA, ()), b"")
    assert (target if kind == "file" else target / "x").read_text() == str(
        target if kind == "file" else target / "x"
    ).removesuffix("/x")
