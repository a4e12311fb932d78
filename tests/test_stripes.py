"""Stripe sizes are read from what lfs prints, else from the block size, and said where from."""

from __future__ import annotations

import os

import h5py
import pytest

import dsprep
from dsprep import stripes
from dsprep.errors import UsageError
from dsprep.repacking import plan_repack
from dsprep.stripes import as_asked, choose, detect, hint, parse_layout

MIB = 1 << 20

PLAIN = """
lmm_stripe_count:  4
lmm_stripe_size:   4194304
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 3
\tobdidx\t\t objid\t\t objid\t\t group
\t     3\t       8235451\t     0x7da9bb\t             0
"""
DIRECTORY = "stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
OLD_DIRECTORY = "stripe_count:   -1 stripe_size:    0 stripe_offset:  -1\n"
COMPOSITE = """
  lcm_layout_gen:    5
  lcm_mirror_count:  1
  lcm_entry_count:   3
    lcme_id:             1
    lcme_mirror_id:      0
    lcme_flags:          init
    lcme_extent.e_start: 0
    lcme_extent.e_end:   104857600
      lmm_stripe_count:  1
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: 0
      lmm_objects:
      - 0: { l_ost_idx: 0, l_fid: [0x100000000:0x2:0x0] }

    lcme_id:             2
    lcme_mirror_id:      0
    lcme_flags:          init
    lcme_extent.e_start: 104857600
    lcme_extent.e_end:   10737418240
      lmm_stripe_count:  8
      lmm_stripe_size:   4194304
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: 0

    lcme_id:             3
    lcme_mirror_id:      0
    lcme_flags:          0
    lcme_extent.e_start: 10737418240
    lcme_extent.e_end:   EOF
      lmm_stripe_count:  -1
      lmm_stripe_size:   16777216
      lmm_pattern:       raid0
      lmm_layout_gen:    0
      lmm_stripe_offset: -1
"""
ON_METADATA = """
  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: 0
    lcme_extent.e_end:   65536
      stripe_count:  0       stripe_size:   65536       pattern:       mdt       stripe_offset: -1

    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: 65536
    lcme_extent.e_end:   EOF
      stripe_count:  2       stripe_size:   1048576       pattern:       raid0 stripe_offset: -1
"""
MIRRORED = """
  lcm_layout_gen:    7
  lcm_mirror_count:  2
  lcm_entry_count:   2
  component0:
    lcme_id:             65537
    lcme_mirror_id:      1
    lcme_flags:          init,stale
    lcme_extent.e_start: 0
    lcme_extent.e_end:   EOF
    sub_layout:
      lmm_stripe_count:  4
      lmm_stripe_size:   2097152
      lmm_pattern:       raid0
  component1:
    lcme_id:             131074
    lcme_mirror_id:      2
    lcme_flags:          init
    lcme_extent.e_start: 0
    lcme_extent.e_end:   EOF
    sub_layout:
      lmm_stripe_count:  1
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0
"""
EXTENDED = """
  lcm_entry_count:   2
    lcme_id:             1
    lcme_flags:          init
    lcme_extent.e_start: 0
    lcme_extent.e_end:   67108864
      lmm_stripe_count:  1
      lmm_stripe_size:   1048576
      lmm_pattern:       raid0

    lcme_id:             2
    lcme_flags:          extension
    lcme_extent.e_start: 67108864
    lcme_extent.e_end:   EOF
      lmm_stripe_count:  0
      lmm_extension_size: 67108864
      lmm_stripe_size:   67108864
      lmm_pattern:       raid0
"""


@pytest.mark.parametrize(
    ("text", "expected", "size", "count"),
    [
        (PLAIN, None, 4 * MIB, 4),
        (PLAIN.replace("\n", "\n  "), None, 4 * MIB, 4),
        (DIRECTORY, None, MIB, 1),
        (OLD_DIRECTORY, None, 0, -1),
        (COMPOSITE, None, 4 * MIB, 8),  # the last that holds data
        (COMPOSITE, 50 * MIB, MIB, 1),
        (COMPOSITE, 150 * MIB, MIB, 1),
        (COMPOSITE, 300 * MIB, 4 * MIB, 8),
        (COMPOSITE, 1 << 40, 16 * MIB, -1),
        (ON_METADATA, None, MIB, 2),
        (ON_METADATA, 1000, MIB, 2),
        (ON_METADATA, 1 << 30, MIB, 2),
        (MIRRORED, 1 << 30, MIB, 1),
        (EXTENDED, None, MIB, 1),
        (EXTENDED, 1 << 40, MIB, 1),
    ],
)
def test_the_component_that_holds_the_data(text, expected, size, count):
    chosen = choose(parse_layout(text), expected)
    assert (chosen.size, chosen.count) == (size, count)


@pytest.mark.parametrize(
    "text",
    ["", "no stripe info\n", "stripe_count: x stripe_size: 5", "stripe_size: 1048576", "\0" * 99],
)
def test_output_without_a_layout(text):
    assert parse_layout(text) == []
    assert choose([], 5) is None


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    """Make `tmp_path` look like Lustre, with an lfs that prints what `lustre(text)` says."""

    def make(text, code=0):
        program = tmp_path / "bin" / "lfs"
        program.parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / "out").write_text(text)
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/bin/args\nfor last; do :; done\n'
            f'echo "$last"\ncat {tmp_path}/bin/out\nexit {code}\n'
        )
        program.chmod(0o755)
        return (tmp_path / "bin" / "args").read_text if not code else None

    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    real = stripes.mounts()
    monkeypatch.setattr(stripes, "mounts", lambda: [*real, (str(tmp_path), "lustre")])
    return make


def test_lustre(lustre, tmp_path):
    args = lustre(COMPOSITE)
    found = detect(tmp_path / "not" / "yet.h5", 1 << 30)
    assert args().split() == ["getstripe", "-d", str(tmp_path)]
    assert (found.nbytes, found.targets, found.matters) == (4 * MIB, 8, True)
    assert "lfs getstripe" in found.source
    assert "component 2 of 3" in found.source
    assert found.file_system == "lustre"
    file = tmp_path / "here stripe_size: 77"
    file.write_bytes(b"x")
    lustre(DIRECTORY)
    found = detect(file)
    assert args().split() == ["getstripe", *str(file).split()]
    assert (found.nbytes, found.targets, found.matters) == (MIB, 1, False)
    assert "not expected to matter" in found.advice
    lustre(OLD_DIRECTORY)
    found = detect(tmp_path)
    assert (found.nbytes, found.targets, found.matters) == (MIB, None, True)


def test_stripes_that_are_no_power_of_two(lustre, tmp_path):
    lustre(DIRECTORY.replace("1048576", str(3 * MIB)).replace("count:  1", "count:  5"))
    found = detect(tmp_path)
    assert found.nbytes == MIB
    assert "no power of two" in found.advice


@pytest.mark.parametrize("how", ["fails", "nonsense", "hangs", "missing"])
def test_lfs_that_does_not_help(how, lustre, tmp_path, monkeypatch):
    match how:
        case "fails":
            lustre(COMPOSITE, code=1)
        case "nonsense":
            lustre("\udcff what\n".encode("utf-8", "surrogateescape").decode("latin1"))
        case "hangs":
            lustre("")
            (tmp_path / "bin" / "lfs").write_text("#!/bin/sh\nexec sleep 5\n")
            monkeypatch.setattr(stripes, "TIMEOUT", 0.1)
    found = detect(tmp_path)
    assert "lfs getstripe" not in found.source
    assert found.matters is None
    assert "unknown" in found.advice


@pytest.mark.parametrize(
    ("kind", "matters", "targets"),
    [
        ("ext4", False, 1),
        ("tmpfs", False, 1),
        ("xfs", False, 1),
        ("gpfs", True, None),
        ("nfs4", None, None),
        ("beegfs", None, None),
        ("fuse.sshfs", None, None),
    ],
)
def test_other_file_systems(kind, matters, targets, tmp_path, monkeypatch):
    inside = tmp_path / "a b"
    inside.mkdir()
    monkeypatch.setattr(
        stripes, "mounts", lambda: [("/", "ext4"), (str(inside), kind), (f"{inside}x", "no")]
    )
    found = detect(inside / "data.h5", 5)
    assert found.file_system == kind
    assert (found.matters, found.targets) == (matters, targets)
    assert kind in found.source
    assert found.nbytes >= 4096
    assert found.nbytes & (found.nbytes - 1) == 0
    if matters is not True:
        assert "large contiguous reads" in found.advice


def test_this_machine(tmp_path):
    found = detect(tmp_path)
    assert found.nbytes >= 4096
    assert found.source
    assert all("\\040" not in point for point, _ in stripes.mounts())


def test_no_mounts_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(stripes, "mounts", list)
    assert detect(tmp_path).file_system == "unknown"


def test_as_asked(tmp_path):
    found = as_asked("1MiB", tmp_path / "x")
    assert (found.nbytes, found.source) == (MIB, "as asked")
    for text in ("3MiB", "1KiB", "8GiB", "4097", "x", "0", "-1", "1MB"):
        with pytest.raises(UsageError):
            as_asked(text, tmp_path)


def test_the_hint(tmp_path):
    """A large file is never put on one storage target."""

    def line(text, file_nbytes=1 << 20):
        return hint(as_asked(text, tmp_path), file_nbytes)

    assert line("1MiB") == "lfs setstripe -S 1M -c 1 DIR"
    assert line("1MiB", 2 << 30) == "lfs setstripe -S 1M -c 4 DIR"
    assert line("4GiB", 1 << 40) == "lfs setstripe -S 4G -c -1 DIR"
    assert line("512KiB") == "lfs setstripe -S 512K -c 1 DIR"
    # Lustre has none below 64 KiB, and groups must be aligned to what it has
    assert line("4KiB") == ("lfs setstripe -S 1M -c 1 DIR (on Lustre, with --stripe-size 1MiB)")
    assert line("64KiB") == "lfs setstripe -S 64K -c 1 DIR"
    assert hint(as_asked("1MiB", tmp_path), 1, "my data").endswith(" 'my data'")


def test_a_repack_expects_the_bytes_of_its_largest_file(lustre, tmp_path):
    lustre(COMPOSITE)
    source = tmp_path / "a.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("x", (400, MIB), "u1", chunks=(1, MIB))
    with dsprep.open(source) as opened:
        for expected, options in (
            (4 * MIB, {}),
            (MIB, {"split": "train=.4,val=.3,test=.3"}),
            (4 * MIB, {"split": "train=.4,val=.3,test=.3", "duplicate": 3}),
            (MIB, {"samples_per_file": 100}),
            (MIB, {"shard_nbytes": 50 * MIB}),
            (MIB, {"stripe_size": "1MiB"}),
        ):
            plan = plan_repack(opened, tmp_path / "b.h5", memory=8 << 30, **options)
            assert plan.stripe.nbytes == expected, options
