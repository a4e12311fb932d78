"""The job scripts of the examples, submitted as they stand, started again in the middle."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .cases import Cases
from .jobs import DSPREP, TIMEOUT, Way, check_same, seen
from .lab import ROOT, Lab
from .readers import Launcher, ended, launchers
from .spaces import Node, patient, wait_for

EXAMPLES = ROOT / "examples"
SIZE = ("-N2", "--ntasks-per-node=2", "--cpus-per-task=1")
"""Of a job: the lab is smaller than what the scripts ask for."""
OPTIONS = "--buffer-size 512KiB --stripe-size 64KiB --shard-size 2MiB --memory 72MB"


class Job:
    """A job that was submitted.

    Parameters
    ----------
    lab
        Where.
    words
        The script and its arguments.
    size
        Options of sbatch.
    """

    def __init__(self, lab: Lab, words: Sequence[object], size: Sequence[str] = SIZE) -> None:
        self.lab, self.node = lab, lab.nodes[lab.names[0]]
        self.home = lab.base / f"jobs-{time.monotonic_ns()}"
        self.home.mkdir()
        self.log = self.home / "log"
        done = self.node.run(
            ["sbatch", "--parsable", f"--chdir={self.home}", f"--output={self.log}", *size]
            + [str(w) for w in words],
            env=lab.env(self.node.name, {"USER": "root"}),
            check=True,
        )
        self.id = done.stdout.strip()

    def told(self, name: str) -> str:
        """Return what SLURM says of the job."""
        env = self.lab.env(self.node.name)
        text = self.node.run(f"scontrol show job {self.id}", env=env).stdout
        found = re.search(rf"\b{name}=(\S+)", text)
        return found[1] if found else ""

    def printed(self) -> str:
        """Return what it printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def requeue(self) -> None:
        """Have SLURM end the job and start it again."""
        env = self.lab.env(self.node.name)
        self.node.run(f"scontrol requeue {self.id}", env=env, check=True)
        wait_for("the requeued job", lambda: self.told("JobState") == "PENDING", 60)
        self.node.run(f"scontrol update JobId={self.id} StartTime=now", env=env, check=True)

    def finished(self, timeout: float = TIMEOUT) -> str:
        """Wait for its end; return what it printed.

        Raises
        ------
        AssertionError
            If it failed.
        """
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        end = time.monotonic() + patient(timeout)
        while self.told("JobState") not in ends and time.monotonic() < end:
            time.sleep(0.5)
        state, text = self.told("JobState"), self.printed()
        assert state == "COMPLETED", f"{state}: {text}"
        assert "Traceback" not in text, text
        return text


def trying(lab: Lab, cases: Cases, systems: Sequence[str]) -> None:
    """Try all scripts on some file systems."""
    first = lab.nodes[lab.names[0]]
    for system in systems:
        root = lab.systems[system].root / "batch"
        with cases.case(f"data for jobs, {system}"):
            prepared(lab, first, root)
        what = f"slurm_repack.sh, requeued, {system}"
        if cases.wanted(what):
            with cases.case(what) as notes:
                notes.append(repacked(lab, first, root))
        for script, data, epochs in (("cosmoflow", "cosmo.h5", 6), ("neuron", "neuron.h5", 1)):
            what = f"slurm_train.sh with train_{script}_torch.py, requeued, {system}"
            if cases.wanted(what):
                with cases.case(what) as notes:
                    notes.append(trained(lab, root, script, data, epochs))
        for launcher in launchers(lab, lab.names[:2]):
            script, data = EXAMPLES / "train_neuron_torch.py", root / "neuron.h5"
            what = f"train_neuron_torch.py: {launcher.name}, {system}"
            if launcher.name == "torchrun" and cases.wanted(what):
                with cases.case(what):
                    run_by(
                        launcher,
                        [script, data, "--batch-size", 8, "--epochs", 1],
                        "trained with rank 0 of 4",
                    )
            what = f"train_jax.py: {launcher.name}"
            if launcher.name == "srun" and system == systems[0] and cases.wanted(what):
                with cases.case(what):
                    run_by(launcher, [EXAMPLES / "train_jax.py"], "4 device(s) of 4 process(es)")
        what = f"slurm_bench.sh, {system}"
        if cases.wanted(what):
            with cases.case(what):
                benched(lab, root)


def prepared(lab: Lab, node: Node, root: Path) -> None:
    """Make what the scripts are given."""
    env = lab.env(node.name)
    fields = "--field train_frames --field train_unit_par"
    for command in (
        f"mkdir -p {root}",
        f"{DSPREP} synth -q neuron-inverter {root}/neuron --samples 2400",
        f"{DSPREP} synth -q cosmoflow-h5 {root}/cosmo --samples 96 --scale 0.0625",
        f"{DSPREP} repack -q {root}/neuron {root}/neuron.h5 {fields} -b 64",
        f"{DSPREP} repack -q {root}/cosmo {root}/cosmo.h5 -b 8",
    ):
        node.run(command, env=env, check=True, timeout=TIMEOUT)


def succeeds(node: Node, command: str) -> bool:
    """Whether a command succeeds on a node."""
    return not node.run(command).returncode


def in_the_middle(job: Job, begun: Callable[[], bool]) -> None:
    """Have a job started again when something has begun."""
    wait_for("the middle of the job", lambda: begun() or job.told("JobState") == "COMPLETED", 90)
    assert job.told("JobState") == "RUNNING", f"too late: {job.printed()}"
    job.requeue()


def repacked(lab: Lab, node: Node, root: Path) -> str:
    """Submit the script, and compare with what one process writes."""
    expected = root / "by-one"
    one = f"{DSPREP} repack -q {root}/neuron.h5 {expected} --to hdf5 --shuffle 1"
    done = Way("one", node).run(lab, f"{one} {OPTIONS}")
    assert not done.returncode, done.stdout
    target = root / "by-job"
    shards = f"{root}/.by-job.dsprep-partial/shard-*.json"
    job = Job(lab, [EXAMPLES / "slurm_repack.sh", root / "neuron.h5", target, *OPTIONS.split()])
    in_the_middle(job, partial(succeeds, node, f"ls {shards}"))
    text = job.finished()
    assert job.told("Restarts") == "1"
    check_same(seen(lab, node, root, root, target.name), seen(lab, node, root, root, expected.name))
    assert "no difference" in text, text
    again = re.search(r"^continued .*", text, re.MULTILINE)
    assert again, text
    return again[0]


def trained(lab: Lab, root: Path, script: str, data: str, epochs: int) -> str:
    """Train without a break, and with one: the batches are the same, and nearly the loss.

    Sums over ranks are added up in another order before the first step and after it.
    """
    found = []
    for requeued in (False, True):
        checkpoint = root / f"{script}-{requeued}.pt"
        more = ("--epochs", epochs, "--save-every", "5", "--batch-size", "4")
        example = EXAMPLES / f"train_{script}_torch.py"
        job = Job(lab, [EXAMPLES / "slurm_train.sh", root / data, example, checkpoint, *more])
        if requeued:
            there = f"ls {checkpoint}"
            in_the_middle(job, partial(succeeds, job.node, there))
        text = job.finished()
        lasts = re.findall(r"loss (\S+)\nits last batches (.*)", text)
        assert len(lasts) == 1, text
        found.append(lasts[0])
    assert "continued with" in text, text
    (one, batches), (other, again) = found
    assert batches == again, f"other batches after the restart: {batches}, {again}"
    assert abs(float(one) - float(other)) < 1e-3, f"another loss: {one}, {other}"
    steps = re.search(r"continued with .*? (\d+) steps", text)
    return f"{steps[1]} steps after the restart" if steps else text


def run_by(launcher: Launcher, program: Sequence[object], words: str) -> None:
    """Run a program in all ranks; it has to print some words."""
    codes, printed = ended(launcher.start([str(w) for w in program]), TIMEOUT)
    assert not any(codes), f"exit status {codes}: {printed[-1500:]}"
    assert words in printed, printed[-1500:]


def benched(lab: Lab, root: Path) -> None:
    """Submit the script; it has to give figures of every strategy."""
    job = Job(lab, [EXAMPLES / "slurm_bench.sh", root / "neuron.h5", root / "scratch"])
    text = job.finished(180)
    for name in ("h5py", "group-db", "dsprep"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), text
    assert (job.home / "bench.json").stat().st_size
    shutil.rmtree(job.home)
