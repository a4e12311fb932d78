"""Stripe sizes are read from what lfs prints, else from the block size, and said where from."""

from __future__ import annotations

import os

import h5py
import pytest
from support import cli

import dsprep
from dsprep.errors import UsageError
from dsprep.verbs.repack import RepackOptions, plan_repack
from dsprep.writing import stripes
from dsprep.writing.job import RunOptions
from dsprep.writing.stripes import detect, hint, requested_stripe

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


# As ``lfs getstripe`` prints them of Lustre 2.10 to 2.16, with numbers of our own.


def component(number, start, end, size, count, *, mirror=0, flags="init", pattern="raid0", osts=()):
    """A part of a composite file."""
    objects = "".join(
        f"      - {i:>3}: {{ l_ost_idx: {o:>3}, l_fid: [0x1000{o:x}0000:0x{17 + i:x}:0x0] }}\n"
        for i, o in enumerate(osts)
    )
    return (
        f"    lcme_id:             {number}\n"
        f"    lcme_mirror_id:      {mirror}\n"
        f"    lcme_flags:          {flags}\n"
        f"    lcme_extent.e_start: {start}\n"
        f"    lcme_extent.e_end:   {end}\n"
        f"      lmm_stripe_count:  {count}\n"
        f"      lmm_stripe_size:   {size}\n"
        f"      lmm_pattern:       {pattern}\n"
        "      lmm_layout_gen:    0\n"
        f"      lmm_stripe_offset: {osts[0] if osts else -1}\n"
        + (f"      lmm_objects:\n{objects}" if osts else "")
        + "\n"
    )


def composite(*parts, mirrors=1):
    head = f"  lcm_layout_gen:    6\n  lcm_mirror_count:  {mirrors}\n"
    return f"{head}  lcm_entry_count:   {len(parts)}\n{''.join(parts)}"


PROGRESSIVE = composite(  # the last part was not written to yet
    component(1, 0, 16 * MIB, MIB, 1, osts=(3,)),
    component(2, 16 * MIB, 512 * MIB, 2 * MIB, 4, osts=(5, 0, 1, 2)),
    component(3, 512 * MIB, "EOF", 8 * MIB, -1, flags="0"),
)
DATA_ON_METADATA = composite(
    component(1, 0, MIB, MIB, 0, pattern="mdt").replace("stripe_offset", "mdt_index"),
    component(2, MIB, "EOF", 4 * MIB, 6, osts=(1, 2, 3, 4, 5, 0)),
)
SELF_EXTENDING = composite(  # room for extension has a size of its own in place of stripes
    component(1, 0, 256 * MIB, MIB, 1, osts=(7,)),
    component(2, 256 * MIB, 1 << 30, MIB, 0, flags="extension").replace(
        f"lmm_stripe_size:   {MIB}", f"lmm_extension_size: {64 * MIB}"
    ),
    component(3, 1 << 30, 1 << 30, 4 * MIB, 4, flags="0"),
    component(4, 1 << 30, "EOF", MIB, 0, flags="extension").replace(
        f"lmm_stripe_size:   {MIB}", f"lmm_extension_size: {256 * MIB}"
    ),
)
OVERSTRIPED = """lmm_stripe_count:  6
lmm_stripe_size:   2097152
lmm_pattern:       raid0,overstriped
lmm_layout_gen:    0
lmm_stripe_offset: 1
\tobdidx\t\t objid\t\t objid\t\t group
\t     1\t           812\t        0x32c\t             0
\t     0\t           790\t        0x316\t             0
\t     1\t           813\t        0x32d\t             0
\t     0\t           791\t        0x317\t             0
\t     1\t           814\t        0x32e\t             0
\t     0\t           792\t        0x318\t             0

"""
OVERSTRIPED_DEFAULT = (
    "stripe_count:  -2 stripe_size:   4194304 "
    "pattern:       raid0,overstriped stripe_offset: -1\n\n"
)
FOREIGN = "lfm_value:     'pool/31d2/container/77aa'\n\n"
YAML = """lmm_stripe_count:  2
lmm_stripe_size:   8388608
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 4
lmm_pool:          flash
lmm_objects:
      - l_ost_idx: 4
        l_fid:     0x100040000:0x9:0x0
      - l_ost_idx: 6
        l_fid:     0x100060000:0xb:0x0
"""
WITH_DIRECTORY_STRIPES = (  # of the directory over metadata targets, which are no stripes of files
    "lmv_stripe_count: 4 lmv_stripe_offset: 1 lmv_hash_type: crush\n"
    "mdtidx\t\t FID[seq:oid:ver]\n     1\t\t [0x240000401:0x2:0x0]\n"
    "stripe_count:  2 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
)
DEFAULT_PARTS = """  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: 0
    lcme_extent.e_end:   67108864
      stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1

    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: 67108864
    lcme_extent.e_end:   EOF
      stripe_count:  8 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1 pool: disk

"""


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
    monkeypatch.setattr(stripes, "file_system", lambda _: "lustre")
    return make


@pytest.mark.parametrize(
    ("text", "expected", "nbytes", "targets"),
    [
        (PLAIN, None, 4 * MIB, 4),
        (PLAIN.replace("\n", "\n  "), None, 4 * MIB, 4),
        (DIRECTORY, None, MIB, 1),
        (OLD_DIRECTORY, None, MIB, None),
        (PROGRESSIVE, None, 8 * MIB, None),
        (PROGRESSIVE, 10 * MIB, MIB, 1),
        (PROGRESSIVE, 300 * MIB, 2 * MIB, 4),
        (PROGRESSIVE, 10 << 30, 8 * MIB, None),
        (DATA_ON_METADATA, None, 4 * MIB, 6),
        (DATA_ON_METADATA, 1000, 4 * MIB, 6),
        (SELF_EXTENDING, 10 * MIB, MIB, 1),
        (SELF_EXTENDING, 2 << 30, 4 * MIB, 4),
        (OVERSTRIPED, None, 2 * MIB, None),
        (OVERSTRIPED_DEFAULT, 1 << 40, 4 * MIB, None),
        (YAML, 1 << 30, 8 * MIB, 2),
        (WITH_DIRECTORY_STRIPES, None, MIB, 2),
        (DEFAULT_PARTS, None, 4 * MIB, 8),
        (DEFAULT_PARTS, 20 * MIB, MIB, 1),
    ],
)
def test_the_layout_of_the_last_byte(text, expected, nbytes, targets, lustre, tmp_path):
    lustre(text)
    found = detect(tmp_path, expected)
    assert (found.nbytes, found.targets) == (nbytes, targets)
    assert found.matters is (targets != 1)


def test_lustre(lustre, tmp_path):
    args = lustre(PROGRESSIVE)
    found = detect(tmp_path / "not" / "yet.h5", 500 * MIB)
    assert args().split() == ["getstripe", "-d", str(tmp_path)]
    assert (found.nbytes, found.targets, found.matters) == (2 * MIB, 4, True)
    assert "lfs getstripe" in found.source
    assert found.file_system == "lustre"
    file = tmp_path / "here stripe_size: 77"
    file.write_bytes(b"x")
    lustre(DIRECTORY)
    found = detect(file)
    assert args().split() == ["getstripe", *str(file).split()]
    assert (found.nbytes, found.targets, found.matters) == (MIB, 1, False)
    lustre(OLD_DIRECTORY)
    found = detect(tmp_path)
    assert (found.nbytes, found.targets, found.matters) == (MIB, None, True)


def test_stripes_that_are_no_power_of_two(lustre, tmp_path):
    lustre(DIRECTORY.replace("1048576", str(3 * MIB)).replace("count:  1", "count:  5"))
    assert detect(tmp_path).nbytes == MIB


@pytest.mark.parametrize("how", ["fails", "nonsense", "no number", "foreign", "hangs", "missing"])
def test_lfs_that_does_not_help(how, lustre, tmp_path, monkeypatch):
    match how:
        case "fails":
            lustre(PROGRESSIVE, code=1)
        case "nonsense":
            lustre("\udcff what\n".encode("utf-8", "surrogateescape").decode("latin1"))
        case "no number":
            lustre(f"stripe_count: x stripe_size: 5\nstripe_count: 1 stripe_size: {'9' * 5000}\n")
        case "foreign":
            lustre(FOREIGN)
        case "hangs":
            lustre("")
            (tmp_path / "bin" / "lfs").write_text("#!/bin/sh\nexec sleep 5\n")
            monkeypatch.setattr(stripes, "TIMEOUT", 0.1)
    found = detect(tmp_path)
    assert "lfs getstripe" not in found.source
    assert found.matters is None


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
    monkeypatch.setattr(stripes, "file_system", lambda _: kind)
    found = detect(tmp_path / "data.h5", 5)
    assert found.file_system == kind
    assert (found.matters, found.targets) == (matters, targets)
    assert kind in found.source
    assert found.nbytes >= 4096
    assert found.nbytes & (found.nbytes - 1) == 0


def test_no_mounts_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(stripes, "mount_of", lambda _: None)
    assert detect(tmp_path).file_system == "unknown"


def test_as_asked(tmp_path):
    found = requested_stripe("1MiB", tmp_path / "x")
    assert (found.nbytes, found.source) == (MIB, "as asked")
    for text in ("3MiB", "1KiB", "8GiB", "4097", "x", "0", "-1", "1MB"):
        with pytest.raises(UsageError):
            requested_stripe(text, tmp_path)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("stripe", "outputs", "more", "command", "words"),
    [
        # How many read is unknown: size decides.
        ("1MiB", [[MIB]], {}, "-S 1M -c 1 DIR", "--ranks"),
        ("1MiB", [[2 * GIB]], {}, "-S 1M -c 4 DIR", "by size"),
        ("4GiB", [[1 << 40]], {}, "-S 4G -c -1 DIR", "by size"),
        ("64KiB", [[MIB]], {}, "-S 64K -c 1 DIR", ""),
        # Lustre has none below 64 KiB, and groups must be aligned to what it has.
        ("4KiB", [[MIB]], {}, "-S 1M -c 1 DIR (on Lustre, with --stripe-size 1MiB)", ""),
        # One file that many ranks share: as many targets as read it at once, never one.
        ("1MiB", [[40 * GIB]], {"ranks": 64}, "-S 1M -c 64 DIR", "64 ranks read the file at once"),
        ("1MiB", [[40 * GIB]], {"ranks": 4096}, "-S 1M -c -1 DIR", "from all targets"),
        ("1MiB", [[40 * GIB]], {"ranks": 1}, "-S 1M -c 4 DIR", "1 rank reads the file"),
        ("1MiB", [[40 * GIB] * 8], {"ranks": 64}, "-S 1M -c 8 DIR", "8 ranks read each file"),
        # No more than there are groups or stripes.
        (
            "1MiB",
            [[200 * MIB]],
            {"ranks": 64, "group_nbytes": 20 * MIB},
            "-S 1M -c 10 DIR",
            "64 ranks",
        ),
        ("4MiB", [[16 * MIB]], {"ranks": 64}, "-S 4M -c 4 DIR", "64 ranks"),
        ("4MiB", [[3 * MIB]], {"ranks": 64}, "-S 4M -c 1 DIR", "on one target"),
        # As many files as ranks: one target each, however large.
        ("1MiB", [[20 * GIB] * 64], {"ranks": 64}, "-S 1M -c 1 DIR", "64 files for 64 ranks"),
        ("1MiB", [[20 * GIB] * 100 + [5]], {"ranks": 64}, "-S 1M -c 1 DIR", "one each"),
        # Ranks read one output at a time.
        (
            "1MiB",
            [[90 * GIB], [20 * GIB], [20 * GIB]],
            {"ranks": 3},
            "-S 1M -c 4 DIR",
            "3 ranks read the file",
        ),
    ],
)
def test_the_hint(tmp_path, stripe, outputs, more, command, words):
    """Stripes fit how many read at once; a large file that is shared is never on one target."""
    found = hint(requested_stripe(stripe, tmp_path), outputs, **more)
    assert found.command == f"lfs setstripe {command}"
    assert words in found.why
    assert "files that exist keep their layout" in found.why


def test_a_plan_for_lustre_has_the_hint(lustre, tmp_path):
    lustre(DIRECTORY)
    source = tmp_path / "a.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("x", (64, 1 << 18), "u1", chunks=(1, 1 << 18))
    done = cli("repack", "-n", source, tmp_path / "b.h5", "-b", "4MiB", "--ranks", 2)
    told = " ".join(done.said.split())
    assert f"lfs setstripe -S 1M -c 2 {tmp_path}" in told
    assert "2 ranks read the file at once" in told


def test_a_repack_expects_the_bytes_of_its_largest_file(lustre, tmp_path):
    lustre(
        composite(component(1, 0, 100 * MIB, MIB, 1), component(2, 100 * MIB, "EOF", 4 * MIB, 8))
    )
    source = tmp_path / "a.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("x", (400, MIB), "u1", chunks=(1, MIB))
    with dsprep.open(source) as opened:
        for expected, options in (
            (4 * MIB, {}),
            (MIB, {"split": "train=.25,a=.25,b=.25,c=.25"}),
            (4 * MIB, {"split": "train=.25,a=.25,b=.25,c=.25", "duplicate": 3}),
            (MIB, {"samples_per_file": 100}),
            (MIB, {"shard_nbytes": 50 * MIB}),
            (MIB, {"stripe_size": "1MiB"}),
        ):
            plan = plan_repack(
                opened, tmp_path / "b.h5", RepackOptions(**options), RunOptions(memory=8 << 30)
            )
            assert plan.stripe.nbytes == expected, options
