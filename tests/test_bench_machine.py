"""Telling what the machine is: complete where the kernel tells, silent where it does not."""

from __future__ import annotations

import getpass
import json
import platform
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from dsprep.bench import machine
from dsprep.storage.mounts import mount_of


def test_describe(tmp_path):
    path = tmp_path / "private-name" / "not-there.h5"
    facts = machine.describe(path)
    assert facts["packages"]["dsprep"]
    assert facts["cores_usable"] >= 1
    assert facts["memory_bytes"] > 1 << 20
    assert facts["file_system"]["type"]
    assert facts["scattered_reads"] in ("io_uring", "preadv")
    assert facts["python"].endswith(platform.python_version())
    text = json.dumps(facts)
    for secret in ("private-name", tmp_path.name, socket.gethostname()):
        assert secret not in text
    user = getpass.getuser()
    assert (
        user not in [w for w in text.replace("/", '"').split('"') if w != "root"] or user == "root"
    )


MOUNTS = r"""
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,data=ordered
30 22 0:40 / /scratch\040one rw,noatime - lustre 10.0.0.1@o2ib:/fs rw,flock,lazystatfs
31 22 0:41 / /home/alice rw - nfs server:/alice rw,vers=4.2,rsize=1048576,addr=10.0.0.9
"""


@pytest.mark.parametrize(
    ("path", "kind", "options"),
    [
        ("/data/x", "ext4", ["relatime", "data=ordered"]),
        ("/scratch one/x", "lustre", ["noatime", "flock"]),
        ("/scratch one", "lustre", ["noatime", "flock"]),
        ("/home/alice/x", "nfs", ["vers=4.2", "rsize=1048576"]),
        ("/home/alicex", "ext4", ["relatime", "data=ordered"]),
    ],
)
def test_mounts(path, kind, options):
    mount = mount_of(Path(path), MOUNTS)
    assert mount.kind == kind
    assert [o for o in mount.options if machine.OPTIONS.fullmatch(o)] == options


@pytest.mark.parametrize(
    ("point", "is_told"),
    [("/home/alice", False), ("/Users", False), ("/scratch/alice", False), ("/scratch", True)],
)
def test_mount_points_of_people_are_not_told(point, is_told, monkeypatch, tmp_path):
    mount = replace(mount_of(tmp_path), point=point)
    monkeypatch.setattr(machine, "mount_of", lambda path: mount)
    assert ("mount_point" in machine.describe(tmp_path)["file_system"]) == is_told
