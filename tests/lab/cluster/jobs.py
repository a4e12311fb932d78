"""Verbs over nodes: whoever does the work, and on whatever file system, the bytes are the same."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .cases import Cases
from .lab import ROOT, Lab
from .spaces import Node, Space, wait_for

HERE = Path(__file__).parent
DSPREP = "python -m dsprep"
SLOWER = f"python {HERE / 'slower.py'}"
TIMEOUT = 120.0

NEURON = "-f train_frames -f train_phys_par -f train_unit_par -f train_unitStar_par"

MAKE = (
    f"{DSPREP} synth -q neuron-inverter {{i}}/neuron --samples 2400",
    f"{DSPREP} synth -q cosmoflow-h5 {{i}}/cosmo --samples 96",
    f"{DSPREP} synth -q cosmic-tagger {{i}}/cosmic.h5 --samples 40 --scale 0.05",
    f"{DSPREP} convert -q {{i}}/cosmic.h5 {{i}}/cosmic --to tfrecord --shard-size 9",
)
"""What makes the data of the jobs."""

VERBS = {
    "convert": f"{DSPREP} convert -q {{i}}/cosmo {{o}}/tf --to tfrecord --shard-size 12",
    "convert, ragged": f"{DSPREP} convert -q {{i}}/cosmic {{o}}/zarr --to zarr"
    " --shard-size 7 --compress zstd:1",
    "repack": f"{DSPREP} repack -q {{i}}/cosmo {{o}}/grouped --to hdf5 -b 8 --stripe-size 64KiB"
    " --shard-size 16",
    "repack --shuffle, buckets": f"{SLOWER} repack -q {{i}}/neuron {{o}}/shuffled --to hdf5"
    f" {NEURON}"
    " -b 512KiB --stripe-size 64KiB --shard-size 300 --shuffle 1 --memory 72MB",
    "repack --split": f"{DSPREP} repack -q {{i}}/cosmo {{o}}/set --to lmdb -b 8 --stripe-size 4KiB"
    " --shard-size 16 --shuffle 2 --split train=0.7,val=0.3",
    "provenance": f"{DSPREP} provenance -q {{i}}/neuron {NEURON} --checksums"
    " --out {o}/neuron.dsprep.json",
    "write, function=": "python -m tests.lab.cluster.items {o}/items.h5",
    "verify": f"{DSPREP} verify {{i}}/cosmo {{o}}/tf",
}
PARTS = f"{DSPREP} convert -q {{i}}/cosmic {{o}}/parts --to hdf5 --shard-size 4"
ALONE = {
    **{
        f"convert to {name}": f"{DSPREP} convert -q {{i}}/cosmic {{o}}/set{suffix}"
        for name, suffix in (("hdf5", ".h5"), ("lmdb", ".lmdb"), ("zarr-zip", ".zarr.zip"))
    },
    "overwrite": f"bash -c '{DSPREP} convert -q {{i}}/cosmic {{o}}/over.zarr --samples 0:9 &&"
    f" {DSPREP} convert -q {{i}}/cosmic {{o}}/over.zarr --overwrite'",
    "killed, continued": f"bash -c '(timeout -s KILL 0.9 {PARTS}; true) 2> /dev/null;"
    f" test -e {{o}}/parts || {PARTS}'",
    "provenance --check": f"bash -c '{DSPREP} provenance {{o}}/set.h5 --check --full > /dev/null'",
    "bench read": f"bash -c '{DSPREP} bench read -q {{o}}/grouped -s dsprep -M 32 -r 1 --warm"
    " --scratch {o}/bench > /dev/null'",
}
"""What one process does on each file system besides."""


@dataclass(frozen=True)
class Way:
    """A way of having several processes do a command.

    Attributes
    ----------
    name
        For tables.
    where
        On which node it is begun.
    before, after
        The words before and after those of the command.
    """

    name: str
    where: Space
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def run(
        self, lab: Lab, command: str, timeout: float = TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Do a command."""
        words = [*self.before, *shlex.split(command), *self.after]
        return self.where.run(words, env=lab.env(lab.names[0]), timeout=timeout)


def trying(lab: Lab, cases: Cases, systems: Sequence[str]) -> None:
    """Try all verbs in all ways on some file systems."""
    reference, first = lab.base / "reference", lab.nodes[lab.names[0]]
    expected: dict[str, dict[str, str]] = {}
    with cases.case("one process, the machine's own disk: the bytes that all others have to write"):
        prepared(lab, reference)
        for verb in (*VERBS, *ALONE):
            expected[verb] = written(lab, Way("one", first), verb, reference)
    if len(expected) < len(VERBS) + len(ALONE):
        return
    for system in systems:
        copied(lab, reference, lab.systems[system].root)
        each(lab, cases, Way("one", first), system, expected)
        for way in by_mpi(lab):
            each(lab, cases, way, system, expected)
    with workers(lab) as address:
        way = Way("Dask workers", first, after=("--executor", f"dask:{address}"))
        for system in systems:
            each(lab, cases, way, system, expected)
    with slurm_cluster(lab) as address:
        for system in systems:
            what = f"examples/convert_dask.py: SLURMCluster, {system}"
            if cases.wanted(what):
                with cases.case(what):
                    from_python(lab, address, system)


def each(
    lab: Lab, cases: Cases, way: Way, system: str, expected: dict[str, dict[str, str]]
) -> None:
    """Try all verbs in one way on one file system."""
    for verb in (*VERBS, *(ALONE if way.name == "one" else ())):
        what = f"{verb}: {way.name}, {system}"
        if cases.wanted(what):
            with cases.case(what):
                check_same(written(lab, way, verb, lab.systems[system].root), expected[verb])


def by_mpi(lab: Lab) -> Iterator[Way]:
    """Return the ways of starting MPI, with 4 ranks each."""
    for count in (2, 4):
        names = lab.names[:count]
        if count <= len(lab.names):
            srun = ("srun", f"-N{count}", "-n4", f"-w{','.join(names)}")
            yield Way(f"srun on {count} nodes", lab.nodes[names[0]], srun)
            yield Way(f"hydra on {count} nodes", lab.fabric, tuple(lab.hydra(4, names)))


def prepared(lab: Lab, root: Path) -> None:
    """Make the data of all jobs under `root`."""
    node = lab.nodes[lab.names[0]]
    node.run(f"mkdir -p {root}/in", check=True)
    for command in MAKE:
        node.run(
            command.format(i=f"{root}/in"), check=True, env=lab.env(node.name), timeout=TIMEOUT
        )


def copied(lab: Lab, reference: Path, root: Path) -> None:
    """Copy the data to another file system, on the last node."""
    last = lab.nodes[lab.names[-1]]
    last.run(f"cp -r --preserve=timestamps {reference}/in {root}", check=True)


def written(lab: Lab, way: Way, verb: str, root: Path) -> dict[str, str]:
    """Do a verb; return the digests of what was written.

    Raises
    ------
    AssertionError
        If it fails, or says anything but notes on the data.
    """
    out, node = root / way.name.replace(" ", "-"), lab.nodes[lab.names[0]]
    node.run(f"mkdir -p {out}", check=True)
    before = seen(lab, node, out, root)
    done = way.run(lab, (VERBS | ALONE)[verb].format(i=root / "in", o=out))
    assert not done.returncode, f"exit status {done.returncode}: {done.stdout}"
    assert way.name == "one" or "by this process alone" not in done.stdout, done.stdout
    printed = [x for x in done.stdout.splitlines() if not x.startswith("dsprep: note:")]
    if verb == "verify":
        assert "same: all 96 samples, bit for bit" in printed, done.stdout
        return {}
    assert not printed, done.stdout
    after = seen(lab, node, out, root)
    return {k: v for k, v in after.items() if before.get(k) != v}


def check_same(found: dict[str, str], expected: dict[str, str]) -> None:
    """Raise unless all that is expected was found, and nothing else."""
    assert found == expected, "other bytes than those of one process: " + ", ".join(
        k for k in sorted({*found, *expected}) if found.get(k) != expected.get(k)
    )


def seen(lab: Lab, node: Node, folder: Path, root: Path, *name: str) -> dict[str, str]:
    """Return the digests of what a node sees in a folder; of an output if it has a name."""
    done = node.run(
        ["python", str(HERE / "cases.py"), str(folder), str(root), *name],
        env=lab.env(node.name),
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


# --- Dask --------------------------------------------------------------------------------------

PORT = 8786


@contextmanager
def workers(lab: Lab, per_node: int = 2, slow: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start Dask's scheduler on the first node and workers on the last two; give its address.

    `slow`: the environment of workers that load `slower`.
    """
    first = lab.nodes[lab.names[0]]
    address = f"tcp://{first.address}:{PORT}"
    started = [
        first.start(
            f"exec dask scheduler --host {first.address} --port {PORT} --no-dashboard"
            f" > {lab.base}/scheduler.log 2>&1",
            lab.env(first.name),
        )
    ]
    try:
        for name in lab.names[-2:]:
            started += [worker(lab, name, address, i, slow) for i in range(per_node)]
        wait_for("Dask's workers", lambda: connected(lab) >= 2 * per_node, 60)
        yield address
    finally:
        for process in started:
            process.kill()
            process.wait()
        first.run(f"pkill -f 'dask scheduler'; rm -f {lab.base}/scheduler.log")
        for name in lab.names:
            lab.nodes[name].run("pkill -f 'dask worker'")


def worker(
    lab: Lab, name: str, address: str, number: int, slow: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    """Start a worker of Dask on a node."""
    more = f" --preload {HERE / 'slower.py'}" if slow else ""
    return lab.nodes[name].start(
        f"exec dask worker {address} --nthreads 1 --no-dashboard --no-nanny{more}"
        f" --local-directory {lab.base}/{name}/tmp > {lab.base}/{name}/worker-{number}.log 2>&1",
        lab.env(name, slow),
    )


def connected(lab: Lab) -> int:
    """Return how many workers the scheduler has."""
    log = lab.base / "scheduler.log"
    return log.read_text().count("Starting worker compute stream") if log.exists() else 0


CLUSTER = """
import sys, dask
from dask_jobqueue import SLURMCluster
dask.config.set({"distributed.scheduler.dashboard.link": ""})
with SLURMCluster(cores=1, processes=1, memory="512MB", interface="eth0", python=sys.executable,
                  walltime="00:10:00", log_directory=sys.argv[1],
                  scheduler_options={"dashboard": False}) as cluster:
    cluster.scale(jobs=4)
    cluster.wait_for_workers(4, timeout=60)
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def slurm_cluster(lab: Lab) -> Iterator[str]:
    """Have dask-jobqueue start workers as jobs of SLURM; give the scheduler's address."""
    first = lab.nodes[lab.names[0]]
    with first.start(
        ["python", "-c", CLUSTER, str(lab.base / "slurm" / "log")],
        lab.env(first.name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as started:
        assert started.stdout is not None
        yield started.stdout.readline().strip()
        started.communicate()


def from_python(lab: Lab, address: str, system: str) -> None:
    """Run the example as it stands."""
    root, first = lab.systems[system].root, lab.nodes[lab.names[0]]
    done = first.run(
        f"python {ROOT}/examples/convert_dask.py --executor dask:{address} --to zarr"
        f" {root}/in/cosmo {root}/by-slurm-cluster",
        env=lab.env(first.name),
        timeout=TIMEOUT,
    )
    assert done.stdout.strip().endswith("files: same"), done.stdout
