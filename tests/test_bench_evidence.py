"""Cold runs have figures wherever the data lie, and say what shows that they were cold."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from dsprep.bench import caches, child, received
from dsprep.bench.caches import Watch
from dsprep.bench.counters import Counters
from dsprep.bench.evidence import UNKEPT, Evidence, Seen, server_words, weakest
from dsprep.bench.machine import Mount
from dsprep.bench.received import Received
from dsprep.bench.report import page
from dsprep.bench.report.answer import answer
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import csv_text, footnotes
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.summary import StrategyFacts, row
from dsprep.bench.sums import Sums
from dsprep.bench.task import Epoch, Result, Task
from dsprep.core.schema import Schema
from dsprep.errors import UsageError
from dsprep.storage.paths import open_file

LEAST = 10_000_000
UNKNOWN = "server cache unknown"


def evidence(*seen, device=0, least=LEAST, server=UNKNOWN):
    return Evidence.of(seen, device, least, server)


def over(mount=None, node="a", **interfaces):
    return {"received": Received(mount, interfaces), "node": node}


# --- what is known from what was seen ---------------------------------------------------------


OTHER = {"held": 0.0, "counts": False}
DROPPED = "pages dropped, "


@pytest.mark.parametrize(
    ("seen", "device", "words"),
    [
        ({"held": 0.0, "counts": True}, LEAST, "from the device"),
        ({"counts": True}, LEAST, "from the device"),
        ({"held": 0.0}, LEAST, "from the device"),
        (OTHER, 0, DROPPED),
        ({"held": 0.0}, 0, DROPPED),
        (OTHER | over(eth0=300_000), 0, DROPPED),
        (OTHER | {"keeps": False}, 0, "no client cache, "),
        (OTHER | over(eth0=10_200_000, lo=10**9), 0, f"{DROPPED}1.02x of the bytes over eth0, "),
        (OTHER | over(eth0=500, lo=10_100_000), 0, f"{DROPPED}1.01x of the bytes over lo, "),
        (
            OTHER | over(eth0=300_000, lo=10) | {"remote": True},
            0,
            f"{DROPPED}at most 0.03x of them over any interface, ",
        ),
        (OTHER | over(9_900_000, eth0=10**9), 0, f"{DROPPED}0.99x of the bytes from the server, "),
        ({"counts": False} | over(eth0=12_000_000), 0, "1.20x of the bytes over eth0, "),
        (
            {"held": 0.0, "counts": True, "remote": True},
            10_100_000,
            "1.01x of the bytes from the server, ",
        ),
        ({"held": 0.0}, 4_000_000, f"{DROPPED}0.40x of the bytes from a device, "),  # compressed
        ({"counts": False}, 10**9, "coldness unknown"),  # it counts the page cache's bytes too
        ({}, 0, "coldness unknown"),
    ],
)
def test_each_run_says_by_what_it_is_known(seen, device, words):
    found = evidence(Seen(**seen), device=device)
    assert found.problem == ""
    assert found.words == words + UNKNOWN * words.endswith(", ")


@pytest.mark.parametrize(
    ("seen", "device", "why"),
    [
        (Seen(held=0.4, counts=False), 0, "still held 40%"),
        (Seen(held=1.0), 0, "tmpfs"),
        (Seen(held=0.0, counts=True), 5_000_000, "50% of the bytes came from a device"),
        (Seen(held=0.0, counts=True, remote=True), 0, "0% of the bytes came from the server"),
        (Seen(held=0.0, counts=True, opening=5_000_000), 5_000_000, "opening the files brought"),
        (Seen(held=0.0, counts=False, opened=0.5), 0, "opening the files brought in 50%"),
        (Seen(), 5_000_000, "50% of the bytes came from a device"),
        (Seen(counts=False, **over(1_000_000)), 0, "10% of the bytes came from the server"),
    ],
)
def test_what_was_warm_has_no_figures(seen, device, why):
    assert why in evidence(seen, device=device).problem


def test_traffic_of_others_is_no_figure():
    few, enough = over(eth0=1000), over(eth0=11_000_000)
    assert evidence(Seen(held=0.0, **few)).network is None
    assert evidence(Seen(held=0.0, remote=True, **few)).network == 1000
    assert evidence(Seen(held=0.0, **enough)).network == 11_000_000
    assert evidence(Seen(held=0.0, **over(5, eth0=10**9))).network == 5
    assert evidence(Seen(held=0.0)).network is None


def test_what_a_node_received_counts_once_per_node():
    one, two = over(eth0=6_000_000), over(eth0=5_000_000, node="b")
    found = evidence(*(Seen(held=0.0, counts=c, **o) for c, o in ((False, one), (None, one))))
    assert found.received.interfaces == {"eth0": 6_000_000}
    found = evidence(*(Seen(held=0.0, counts=c, **o) for c, o in ((False, one), (None, two))))
    assert found.received.interfaces == {"eth0": 11_000_000}
    assert found.counts is False
    assert evidence(Seen(held=0.0, **over(1)), Seen(held=None, **over(2))).held is None
    assert evidence(Seen(held=0.0, **over(1)), Seen(**over(None, node="b"))).received.mount is None


def test_the_state_of_the_server_s_cache_is_said():
    seen = Seen(held=0.0, counts=False)
    assert (
        evidence(seen, server=server_words(True, None)).words == "pages dropped, server cache warm"
    )
    dropped = server_words(False, "ssh nas drop")
    assert evidence(seen, server=dropped).words.endswith("server cache dropped by ssh nas drop")
    assert evidence(Seen(), server=dropped).words.startswith("coldness unknown, server cache")
    assert evidence(Seen(counts=True), device=LEAST, server=dropped).words.startswith(
        "from the dev"
    )


def test_a_row_has_the_weakest_evidence_of_its_runs():
    two = [evidence(Seen(held=0.0, counts=False, **over(n))) for n in (10**7, 9_100_000)]
    assert weakest(two) is two[1]
    unseen = evidence(Seen(counts=False, **over(10**8)))
    assert weakest([*two, unseen]) is unseen
    assert weakest([]) is None


def row_of(device=0, facts=None, **seen):
    """The row of one run of one process."""
    epoch = Epoch(
        samples=10,
        seconds=1.0,
        waits=(0.5, 0.5),
        computing=0.0,
        skew=0.0,
        counters=Counters(device=device),
        light=0,
        seen=Seen(held=0.0, **seen),
    )
    known = {"expected": Sums(10), "payload": LEAST, "cold": True, "computes": False}
    result = Result(epochs=(epoch,), peak_rss=1)
    return row("h5py", [[result]], StrategyFacts(**known | (facts or {})))


def test_rows_tables_and_pages_have_it():
    found = row_of(counts=False, **over(eth0=10_200_000))
    assert found.problems == ()
    assert found.value("network_bytes") == 10_200_000
    assert found.value("device_bytes") is None
    words = f"pages dropped, 1.02x of the bytes over eth0, {UNKNOWN}"
    assert found.evidence == words
    assert Row.from_json(found.to_json()) == found
    assert footnotes([found]) == [f"h5py: cold: {words}"]
    report = BenchReport("c", "2025-06-01", {}, {}, {"cold": True}, (found,))
    assert words in csv_text(report)
    assert words in page.html(report)


@pytest.mark.parametrize(
    ("fetched", "opening", "stored", "why"),
    [
        (2, 0, 2, ""),  # compressed data are cold when all their bytes were fetched
        (1, 0, 2, "came from a device"),
        (2, 0, None, "came from a device"),
        (2, 0, 100, "came from a device"),
        (7.5, 2, None, "opening the files brought in 25%"),
        (7.5, 0.5, None, "75% of the bytes came from a device"),
    ],
)
def test_bytes_are_compared_with_those_of_the_files(fetched, opening, stored, why):
    mb = 1_000_000
    facts = {"stored": None if stored is None else stored * mb}
    found = row_of(int(fetched * mb), facts, counts=True, opening=int(opening * mb))
    assert bool(found.problems) == bool(why)
    assert why in "".join(found.problems)


# --- looking at the page cache ----------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(3 << 20))
    return path


def ways(monkeypatch, **answers):
    """Make the ways of looking answer the same always."""
    made = tuple(
        lambda file, offset, nbytes, a=answers[name]: a for name in ("counted", "mapped", "probed")
    )
    monkeypatch.setattr(caches, "_METHODS", made)
    return made


def test_the_ways_of_looking_agree(file):
    opened = open_file(file)
    os.pread(opened.fd, opened.nbytes, 0)
    found = {way(opened, 0, opened.nbytes) for way in caches._METHODS}
    assert found <= {1.0, None}
    assert caches.by_map(opened, 0, opened.nbytes) == 1.0
    assert caches.look([file]).held([file]) == 1.0
    assert caches.look([]).held([]) is None


@pytest.mark.parametrize(
    ("answers", "hidden", "chosen", "keeps"),
    [
        ({"counted": 1.0, "mapped": 1.0, "probed": 1.0}, False, 0, True),
        ({"counted": None, "mapped": 1.0, "probed": 1.0}, False, 1, True),  # an old kernel
        ({"counted": 0.0, "mapped": 1.0, "probed": None}, False, 1, True),  # overlayfs
        ({"counted": None, "mapped": None, "probed": 1.0}, True, 2, True),
        ({"counted": None, "mapped": None, "probed": None}, True, None, True),
        ({"counted": 0.0, "mapped": None, "probed": None}, True, None, True),
        ({"counted": 0.0, "mapped": None, "probed": None}, False, None, False),  # direct_io
        ({"counted": 0.0, "mapped": 0.0, "probed": None}, False, None, False),
        ({"counted": None, "mapped": 0.0, "probed": 0.0}, False, None, False),
    ],
)
def test_the_page_cache_is_looked_at_as_the_mount_allows(
    file, monkeypatch, answers, hidden, chosen, keeps
):
    made = ways(monkeypatch, **answers)
    monkeypatch.setattr(caches, "hidden", lambda file: hidden)
    look = caches.look([file])
    assert look == caches.Look(None if chosen is None else made[chosen], keeps)
    expected = 0.0 if not keeps else None if chosen is None else 1.0
    assert look.held([file]) == expected


def test_single_pages_are_tried_without_changing_them(file):
    opened = open_file(file)
    os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if caches.by_trying(opened, 0, opened.nbytes) is None:
        pytest.skip("this file system cannot read without waiting")
    caches.drop([file])
    before = caches.by_map(opened, 0, opened.nbytes)
    caches.by_trying(opened, 0, opened.nbytes)
    assert caches.by_map(opened, 0, opened.nbytes) <= before + 0.05


@pytest.mark.parametrize(
    ("cold", "warm", "keeps", "expected"),
    [
        (1.0, 0.0, True, True),
        (1.0, 1.0, True, False),  # as ZFS counts: what programs ask for
        (1.0, 1.0, False, True),  # nothing is kept, so all is fetched again
        (0.0, 0.0, True, False),
        (0.4, 0.0, True, None),  # it compresses
    ],
)
def test_what_the_kernel_counts_is_tried(file, monkeypatch, cold, warm, keeps, expected):
    nbytes, total, seen = caches.TRIAL, 0.0, set()
    real = caches.preadv_most

    def read(fd, view, at):
        nonlocal total
        total += nbytes * (warm if at in seen else cold)
        seen.add(at)
        return real(fd, view, at)

    monkeypatch.setattr(caches, "preadv_most", read)
    monkeypatch.setattr(caches, "fetched", lambda: int(total))
    look = caches.Look(lambda file, offset, nbytes: 0.0, keeps)
    assert caches.counts([file], look) is expected
    assert caches.counts([file], caches.Look(lambda *a: 1.0)) is None  # in memory
    seen.clear()
    if expected is False and not cold:  # unseen pages may have been there
        assert caches.counts([file], caches.Look(None)) is None


FUSE = """
import pickle, subprocess, sys
from pathlib import Path
from dsprep.bench import caches
from dsprep.bench.caches import Watch

program, backing, mount, *faults = sys.argv[1:]
command = [sys.executable, program, backing, mount, *(f"--fault={f}" for f in faults)]
served = subprocess.Popen(
    [*command, "--until-eof"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
assert served.stdout.readline().strip() == "ready"
file = Path(mount, "data")
watch = Watch([file])
with file.open("rb") as kept:
    caches.fill([file])
    before = watch.before()
    caches.drop([file])
    print(pickle.dumps([before, watch.before()]).hex())
served.stdin.close()
sys.exit(served.wait(10))
"""


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse here")
@pytest.mark.parametrize(("faults", "keeps"), [(["eio-fsync"], True), (["no-mmap"], False)])
def test_a_fuse_mount_without_a_device(file, tmp_path, faults, keeps):
    """Nothing is counted for the process there; past the page cache nothing is kept either."""
    program = Path(__file__).parent / "lab" / "cluster" / "faultfs.py"
    mount = tmp_path / "mount"
    mount.mkdir()
    command = [sys.executable, "-c", FUSE, str(program), str(file.parent), str(mount), *faults]
    spaces = [] if shutil.which("unshare") is None else ["unshare", "-Urm"]
    if not spaces or subprocess.run([*spaces, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces of users and mounts here")
    done = subprocess.run([*spaces, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    filled, dropped = pickle.loads(bytes.fromhex(done.stdout))
    assert (filled.keeps, filled.counts) == (keeps, False)
    assert dropped.held == 0.0
    words = "pages dropped" if keeps else "no client cache"
    assert evidence(replace(dropped, received=Received())).words == f"{words}, {UNKNOWN}"


# --- what counts on the way -------------------------------------------------------------------

STATS = """device proc mounted on /proc with fstype proc
device nas:/vol/a mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576
\tbytes:\t911 12 313 14 5150 16 17 18
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
device nas:/vol/b mounted on /data/with\\040blank with fstype nfs statvers=1.1
\tbytes:\t1 2 3 4 777 6 7 8
device nas:/vol/c mounted on /odd with fstype nfs statvers=1.1
\tbytes:\tx
"""


def test_nfs_counts_for_each_mount():
    assert received.nfs(STATS, "/data") == 5150
    assert received.nfs(STATS, "/data/with blank") == 777
    for point in ("/odd", "/proc", "/none"):
        assert received.nfs(STATS, point) is None


def osc(nbytes):
    return (
        "snapshot_time             1700000123.456789 secs.nsecs\n"
        "req_waittime              31 samples [usecs] 90 812 7310 2300110\n"
        + (
            f"read_bytes                7 samples [bytes] 4096 1048576 {nbytes} 999\n"
            * bool(nbytes)
        )
        + "write_bytes               2 samples [bytes] 4096 8192 12288 1\n"
    )


@pytest.fixture
def root(tmp_path):
    """Make a root with what a client of Lustre, two interfaces and an InfiniBand port show."""

    def write(path, text):
        at = tmp_path / "root" / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)

    lustre = "sys/kernel/debug/lustre"
    write(f"{lustre}/osc/big-OST0000-osc-ffff9a/stats", osc(1000))
    write(f"{lustre}/osc/big-OST0001-osc-ffff9a/stats", osc(0))
    write(f"{lustre}/mdc/big-MDT0000-mdc-ffff9a/stats", osc(24))
    write(f"{lustre}/osc/other-OST0000-osc-ffff9b/stats", osc(5))
    write(f"{lustre}/llite/big-ffff9a/stats", osc(10**9))  # asked for, from the page cache too
    head = "Inter-|   Receive        |  Transmit\n face |bytes    packets errs|bytes    packets\n"
    write("proc/net/dev", f"{head}    lo: 50 1 0 50 1\nhsn0:123456 9 0 1 1\n bad: x\n")
    write("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "250\n")
    write("proc/self/mountstats", STATS)
    write("proc/sys/kernel/random/boot_id", "0-1-2\n")
    return tmp_path / "root"


def mount(source, kind, point="/data"):
    return Mount("0:9", point, kind, (), source)


def test_what_was_received_until_now(root, monkeypatch):
    monkeypatch.setenv("PATH", "")
    expected = {"lo": 50, "hsn0": 123456, "mlx5_0 port 1": 1000}
    sources = {
        mount("nas:/vol/a", "nfs4"): 5150,
        mount("10.9.0.1@tcp:10.9.0.2@tcp:/big", "lustre"): 1024,
        mount("10.9.0.1@tcp:/other/sub", "lustre"): 5,
        mount("10.9.0.1@tcp:/none", "lustre"): None,
        mount("10.9.0.1@tcp:/*", "lustre"): None,
        mount("nas:/vol", "fuse.glusterfs"): None,
    }
    for where, nbytes in sources.items():
        assert received.received(where, root) == Received(nbytes, expected), where
    assert received.received(None, root / "empty") == Received()
    assert received.node(root).startswith("0-1-2")
    later = Received(6000, {"lo": 40, "hsn0": 123460, "new": 1})
    assert later - received.received(mount("nas:/vol/a", "nfs4"), root) == Received(
        850, {"lo": 0, "hsn0": 4}
    )


def test_lustre_that_only_lctl_reads(root, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "lctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\necho "{osc(333)}{osc(3)}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    found = received.received(mount("10.9.0.1@tcp:/far", "lustre"), root)
    assert found.mount == 336
    assert (tmp_path / "args").read_text().split()[-2:] == ["osc.far-*.stats", "mdc.far-*.stats"]


def test_mounts_named_after_machines():
    remote = ["nas:/vol", "user@nas:", "//nas/share", "10.1.1.1@tcp:/big"]
    local = ["/dev/sda1", "/dev/disk/by-path/pci-0000:00", "overlay"]
    assert [s for s in (*remote, *local) if received.remote(mount(s, "x"))] == remote
    assert not received.remote(None)


# --- whole runs -------------------------------------------------------------------------------


class Nothing(Strategy):
    """Delivers numbers of samples only."""

    def prepare(self, held):
        return

    def epoch(self, number):
        yield from (len(b) for b in self.task.batches(number))

    def size(self, item):
        return item


Nothing.delivers = False


@pytest.fixture
def task(file):
    return Task(
        strategy="pread-limit",
        path=file,
        schema=Schema(()),
        samples=10,
        batch_size=4,
        drop=(file,),
        cold=True,
        check=False,
    )


def ran(task, **facts):
    told = {"expected": Sums(10), "payload": 3 << 20, "cold": True, "computes": False, **facts}
    return row(
        "pread-limit", [[child.run(task, Nothing(task), lambda: None)]], StrategyFacts(**told)
    )


def test_what_opening_read_is_dropped_as_well(task, monkeypatch):
    """As of many small files, whose first pages are most of them."""
    events = []

    class Opening(Nothing):
        def prepare(self, held):
            events.append("open")

        def epoch(self, number):
            events.append("epoch")
            return super().epoch(number)

    monkeypatch.setattr(caches, "drop", lambda files: events.append("drop"))
    child.run(replace(task, epochs=2), Opening(task), lambda: None)
    assert events == ["drop", "open", "drop", "epoch"] * 2


def test_a_mount_that_counts_nothing_gives_figures(task, monkeypatch):
    """As GlusterFS and sshfs: pages can be dropped, and nothing comes from a device."""
    monkeypatch.setattr(caches, "counts", lambda files, look: False)
    monkeypatch.setattr(caches.Look, "held", lambda look, files: 0.0)
    monkeypatch.setattr(caches, "mount_under", lambda path: mount("nas:/v", "fuse.glusterfs"))
    traffic = count(0, 3 << 20)
    monkeypatch.setattr(caches, "received", lambda mount: Received(None, {"eth0": next(traffic)}))
    found = ran(replace(task, epochs=2))
    assert found.problems == ()
    assert found.value("samples_per_second") > 0
    assert found.evidence == f"pages dropped, 1.00x of the bytes over eth0, {UNKNOWN}"


def test_what_no_page_cache_keeps_is_not_called_warm(task, monkeypatch):
    warm = replace(task, cold=False)
    assert UNKEPT not in ran(warm, cold=False).notes
    monkeypatch.setattr(caches, "look", lambda files: caches.Look(None, keeps=False))
    found = ran(warm, cold=False)
    assert found.evidence == ""
    assert UNKEPT in found.notes
    report = BenchReport("c", "2025-06-01", {}, {}, {"cold": False}, (found,))
    words = " ".join(answer(report))
    assert "warm, but not in the page cache" in words
    assert "came from the page cache" not in words


def test_where_nothing_can_be_seen_it_is_said(task, monkeypatch):
    ways(monkeypatch, counted=None, mapped=None, probed=None)
    monkeypatch.setattr(caches, "fetched", lambda: 0)
    monkeypatch.setattr(caches, "received", lambda mount: Received())
    found = ran(task)
    assert found.problems == ()
    assert found.evidence == "coldness unknown"


def test_a_server_s_cache_is_filled_once_or_dropped_before_each_epoch(task, tmp_path, monkeypatch):
    done = []
    real = caches.fill
    monkeypatch.setattr(caches, "fill", lambda files: done.append(real(files)))
    log = tmp_path / "log"
    ran(replace(task, epochs=3, evict_server=f"echo x >> {log}"))
    assert log.read_text() == "x\n" * 3
    assert not done
    ran(replace(task, epochs=3, warm_server=True))
    assert len(done) == 1
    ran(replace(task, rank=1, world_size=1, warm_server=True, evict_server="exit 1"))
    assert len(done) == 1  # the first rank does it


def test_a_command_that_fails_is_an_error(task, monkeypatch):
    with pytest.raises(UsageError, match="exit status 3: no such host"):
        ran(replace(task, evict_server="echo no such host >&2; exit 3"))
    monkeypatch.setattr(caches, "TIMEOUT", 0.05)
    with pytest.raises(UsageError, match="nothing after"):
        caches.drop_server("sleep 5")
    caches.drop_server(None)


def test_files_that_are_many_are_looked_at_once(file, monkeypatch):
    monkeypatch.setattr(caches, "counts", lambda files, look: False)
    watch = Watch([file])
    assert watch.opened(Seen(), 5).opened is not None
    monkeypatch.setattr(caches, "MANY", 0)
    assert watch.opened(Seen(), 5).opened is None
