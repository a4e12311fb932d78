"""Stripe sizes are read from what lfs prints, else from the block size, and said where from."""

from __future__ import annotations

import os

import h5py
import pytest
from support import cli, fails

import dsprep
from dsprep.errors import UsageError
from dsprep.verbs.repack import RepackOptions, plan_repack
from dsprep.writing import stripes
from dsprep.writing.job import RunOptions
from dsprep.writing.stripes import detect_stripe, requested_stripe, suggest_stripes

MIB = 1 << 20

PLAIN = "lmm_stripe_count:  4\nlmm_stripe_size:   4194304\nlmm_pattern:       raid0\n"
DIRECTORY = "stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
OLD_DIRECTORY = "stripe_count:   -1 stripe_size:    0 stripe_offset:  -1\n"


# As ``lfs getstripe`` prints them of Lustre 2.10 to 2.16, with numbers of our own.


def composite(*parts):
    """A composite file, whose parts have an end, the bytes of a stripe, and a number of these."""
    return "".join(
        f"    lcme_id:             {i}\n    lcme_extent.e_start: 0\n"
        f"    lcme_extent.e_end:   {end}\n      lmm_stripe_count:  {count}\n"
        f"      lmm_stripe_size:   {size}\n      lmm_pattern:       raid0\n\n"
        for i, (end, size, count) in enumerate(parts)
    )


PROGRESSIVE = composite((16 * MIB, MIB, 1), (512 * MIB, 2 * MIB, 4), ("EOF", 8 * MIB, -1))
DATA_ON_METADATA = composite((MIB, MIB, 0), ("EOF", 4 * MIB, 6))
EXTENDED = "lmm_extension_size: 67108864"  # room for extension has it in place of stripes
SELF_EXTENDING = composite((256 * MIB, MIB, 1), (1 << 30, 77, 0), (1 << 30, 4 * MIB, 4)).replace(
    "lmm_stripe_size:   77", EXTENDED
)
OVERSTRIPED_DEFAULT = "stripe_count:  -2 stripe_size:   4194304 pattern:       raid0,overstriped\n"
FOREIGN = "lfm_value:     'pool/31d2/container/77aa'\n\n"
WITH_DIRECTORY_STRIPES = (  # of the directory over metadata targets, which are no stripes of files
    "lmv_stripe_count: 4 lmv_stripe_offset: 1 lmv_hash_type: crush\n"
    "stripe_count:  2 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
)


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
    ("text", "expected", "nbytes"),
    [
        (PLAIN, None, 4 * MIB),
        (PLAIN.replace("\n", "\n  "), None, 4 * MIB),
        (OLD_DIRECTORY, None, MIB),
        (PROGRESSIVE, None, 8 * MIB),
        (PROGRESSIVE, 10 * MIB, MIB),
        (PROGRESSIVE, 300 * MIB, 2 * MIB),
        (PROGRESSIVE.replace("lmm_", ""), 10 << 30, 8 * MIB),
        (DATA_ON_METADATA, 1000, 4 * MIB),
        (SELF_EXTENDING, 10 * MIB, MIB),
        (SELF_EXTENDING, 2 << 30, 4 * MIB),
        (OVERSTRIPED_DEFAULT, 1 << 40, 4 * MIB),
        (WITH_DIRECTORY_STRIPES, None, MIB),
        (DIRECTORY.replace("1048576", str(3 * MIB)), None, MIB),
    ],
)
def test_the_layout_of_the_last_byte(text, expected, nbytes, lustre, tmp_path):
    lustre(text)
    assert detect_stripe(tmp_path, expected).nbytes == nbytes


def test_lustre(lustre, tmp_path):
    args = lustre(PROGRESSIVE)
    found = detect_stripe(tmp_path / "not" / "yet.h5", 500 * MIB)
    assert args().split() == ["getstripe", "-d", str(tmp_path)]
    assert "lfs getstripe" in found.source
    assert found.file_system == "lustre"
    file = tmp_path / "here stripe_size: 77"
    file.write_bytes(b"x")
    lustre(DIRECTORY)
    assert detect_stripe(file).nbytes == MIB
    assert args().split() == ["getstripe", *str(file).split()]


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
    found = detect_stripe(tmp_path)
    assert "lfs getstripe" not in found.source


def test_other_file_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(stripes, "mount_of", lambda _: None)
    assert detect_stripe(tmp_path).file_system == "unknown"
    monkeypatch.setattr(stripes, "file_system", lambda _: "gpfs")
    found = detect_stripe(tmp_path / "data.h5", 5)
    assert (found.file_system, "gpfs" in found.source) == ("gpfs", True)
    assert found.nbytes >= 4096
    assert found.nbytes & (found.nbytes - 1) == 0


def test_as_asked(tmp_path):
    found = requested_stripe("1MiB", tmp_path / "x")
    assert (found.nbytes, found.source) == (MIB, "as asked")
    for text in ("3MiB", "1KiB", "8GiB", "4097", "x", "0", "-1", "1MB"):
        fails(lambda: requested_stripe(text, tmp_path), UsageError)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("stripe", "outputs", "more", "command"),
    [
        # How many read is unknown: size decides.
        ("1MiB", [[MIB]], {}, "-S 1M -c 1 DIR"),
        ("1MiB", [[2 * GIB]], {}, "-S 1M -c 4 DIR"),
        ("4GiB", [[1 << 40]], {}, "-S 4G -c -1 DIR"),
        ("64KiB", [[MIB]], {}, "-S 64K -c 1 DIR"),
        # Lustre has none below 64 KiB, and groups must be aligned to what it has.
        ("4KiB", [[MIB]], {}, "-S 1M -c 1 DIR (on Lustre, with --stripe-size 1MiB)"),
        # One file that many ranks share: as many targets as read it at once, never one.
        ("1MiB", [[40 * GIB]], {"ranks": 64}, "-S 1M -c 64 DIR"),
        ("1MiB", [[40 * GIB]], {"ranks": 4096}, "-S 1M -c -1 DIR"),
        ("1MiB", [[40 * GIB]], {"ranks": 1}, "-S 1M -c 4 DIR"),
        ("1MiB", [[40 * GIB] * 8], {"ranks": 64}, "-S 1M -c 8 DIR"),
        # No more than there are groups or stripes.
        ("1MiB", [[200 * MIB]], {"ranks": 64, "group_nbytes": 20 * MIB}, "-S 1M -c 10 DIR"),
        ("4MiB", [[16 * MIB]], {"ranks": 64}, "-S 4M -c 4 DIR"),
        ("4MiB", [[3 * MIB]], {"ranks": 64}, "-S 4M -c 1 DIR"),
        # As many files as ranks: one target each, however large.
        ("1MiB", [[20 * GIB] * 100 + [5]], {"ranks": 64}, "-S 1M -c 1 DIR"),
        # Ranks read one output at a time.
        ("1MiB", [[90 * GIB], [20 * GIB], [20 * GIB]], {"ranks": 3}, "-S 1M -c 4 DIR"),
    ],
)
def test_the_hint(tmp_path, stripe, outputs, more, command):
    """Stripes fit how many read at once; a large file that is shared is never on one target."""
    text = suggest_stripes(requested_stripe(stripe, tmp_path), outputs, **more)
    assert text.startswith(f"lfs setstripe {command}: ")


def test_a_repack_expects_the_bytes_of_its_largest_file(lustre, tmp_path):
    lustre(composite((100 * MIB, MIB, 1), ("EOF", 4 * MIB, 8)))
    source = tmp_path / "a.h5"
    with h5py.File(source, "w") as file:
        file.create_dataset("x", (400, MIB), "u1", chunks=(1, MIB))
    with dsprep.open(source) as opened:
        for expected, options in (
            (4 * MIB, {}),
            (MIB, {"split": "train=.25,a=.25,b=.25,c=.25"}),
            (4 * MIB, {"split": "train=.25,a=.25,b=.25,c=.25", "duplicate": 3}),
            (MIB, {"shard_size": 100}),
            (MIB, {"shard_size": "50MiB"}),
            (MIB, {"stripe_size": "1MiB"}),
        ):
            run, asked = RunOptions(memory=8 << 30), RepackOptions(**options)
            plan = plan_repack(opened, tmp_path / "b.h5", asked, run)
            assert plan.stripe.nbytes == expected, options
    done = cli("repack", "-n", source, tmp_path / "b.h5", "-b", "4MiB", "--ranks", 2)
    assert f"lfs setstripe -S 4M -c 2 {tmp_path}" in " ".join(done.said.split())
