"""A node, or the file server, is lost in the middle: nothing hangs, and a rerun completes it."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import Cases
from .jobs import DSPREP, HERE, MAKE, TIMEOUT, check_same, seen, workers
from .lab import Lab
from .rank import SAMPLES
from .readers import RANK, Launcher, launchers
from .spaces import Node, Space, patient, wait_for

WITHIN = 60.0
"""Seconds in which all have ended that worked with what was lost."""
PAUSE = "0.4"
"""Seconds for each of 24 tasks."""
SLOWER = f"python {HERE / 'slower.py'}"
VERBS = {
    "repack": f"{DSPREP} repack -q {{i}}/cosmo {{o}} --to hdf5 -b 4 --stripe-size 64KiB"
    " --shard-size 4 --shuffle 1",
    "convert": f"{DSPREP} convert -q {{i}}/cosmo {{o}} --to zarr --shard-size 4",
    "provenance": f"{DSPREP} provenance -q {{i}}/parts --checksums --out {{o}}.dsprep.json",
    "write": "python -m tests.lab.cluster.items {o}",
}
PARTS = "convert -q {i}/cosmo {i}/parts --to tfrecord --shard-size 4"


class Trial:
    """What is lost, on one file system."""

    def __init__(self, lab: Lab, cases: Cases, system: str) -> None:
        self.lab, self.cases, self.system = lab, cases, system
        self.root = lab.systems[system].root
        self.folder = self.root / "losses"
        self.first = lab.nodes[lab.names[0]]
        self.mark = lab.base / "mark"
        self.expected: dict[str, dict[str, str]] = {}

    def make(self) -> None:
        """Make data, and what one process makes of them."""
        env = self.lab.env(self.first.name)
        for command in (
            f"mkdir -p {self.folder}",
            MAKE[1].format(i=self.folder),
            f"{DSPREP} {PARTS.format(i=self.folder)}",
            f"python {RANK} make {self.folder}/data.h5",
        ):
            self.first.run(command, env=env, check=True, timeout=TIMEOUT)
        for verb in VERBS:
            name = f"{verb.replace(' ', '')}-one"
            self.first.run(self.line(verb, name), env=env, check=True)
            self.expected[verb] = self.written(name)

    def line(self, verb: str, name: str, *, slower: bool = False) -> str:
        """Return the words of a command whose output has a name."""
        words = VERBS[verb].format(i=self.folder, o=self.folder / name)
        return words.replace(DSPREP, SLOWER) if slower else words

    def written(self, name: str) -> dict[str, str]:
        """Return the digests of an output and its sidecar."""
        return seen(self.lab, self.first, self.folder, self.root, name)

    def start(self, where: Space, before: Sequence[str], words: str) -> Any:
        """Start a command."""
        self.mark.unlink(missing_ok=True)
        slow = {"DSPREP_LAB_PAUSE": PAUSE, "DSPREP_LAB_MARK": str(self.mark)}
        return where.start(
            [*before, *shlex.split(words)],
            self.lab.env(self.lab.names[0], slow),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def begun(self, job: subprocess.Popen[str]) -> None:
        """Wait until a command is in the middle."""
        wait_for("the middle", lambda: self.mark.exists() or job.poll() is not None, 60)
        assert job.poll() is None, f"it has ended: {job.communicate()[0]}"

    # --- a node ------------------------------------------------------------------------------

    def node_lost(self, way: str, verb: str, which: int) -> None:
        """Kill a node while a verb works on three; repeat the command on the others."""
        what = (
            f"{verb}: a node {'of a worker' if which else 'of rank 0'} lost, {way}, {self.system}"
        )
        if not self.cases.wanted(what):
            return
        lab, names = self.lab, self.lab.names[:3]
        login = lab.nodes[lab.names[3]]
        name = f"{verb.replace(' ', '')}-{which}-{way}"
        with self.cases.case(what) as notes:
            where: Space = login if way == "srun" else lab.fabric
            job = self.start(where, mpi(lab, way, names), self.line(verb, name, slower=True))
            try:
                self.begun(job)
                lab.nodes[names[which]].end()
                notes.append(ended(job, 1))
                rest = [n for n in lab.names if n != names[which]][:2]
                login = lab.nodes[lab.names[3]]
                where = login if way == "srun" else lab.fabric
                again = self.start(where, mpi(lab, way, rest), self.line(verb, name))
                notes.append("again: " + ended(again, 0, TIMEOUT))
            finally:
                stop(job)
                lab.boot(names[which])
                self.first = lab.nodes[lab.names[0]]
                if lab.slurm is not None:
                    lab.slurm.ready(list(lab.names))
            check_same(self.written(name), self.expected[verb])

    def dask_lost(self, verb: str) -> None:
        """Kill a node of Dask's workers; their tasks are given to others."""
        what = f"{verb}: a node lost, Dask workers, {self.system}"
        if not self.cases.wanted(what):
            return
        lab, name = self.lab, f"{verb.replace(' ', '')}dask"
        slow = {"DSPREP_LAB_PAUSE": PAUSE, "DSPREP_LAB_MARK": str(self.mark)}
        with self.cases.case(what) as notes, workers(lab, slow=slow) as address:
            lost = lab.names[-1]
            words = f"{self.line(verb, name)} --executor dask:{address}"
            job = self.start(self.first, (), words)
            try:
                self.begun(job)
                lab.nodes[lost].end()
                notes.append(ended(job, 0, TIMEOUT))
            finally:
                stop(job)
                lab.boot(lost)
                if lab.slurm is not None:
                    lab.slurm.ready(list(lab.names))
            check_same(self.written(name), self.expected[verb])

    def reader_lost(self, launcher: Launcher, lost: str, **options: Any) -> None:
        """Kill a node while ranks read."""
        told = ", ".join(f"{k}={v}" for k, v in options.items() if k != "pause")
        what = f"Reader: a node lost, {launcher.name}{', ' if told else ''}{told}, {self.system}"
        if not self.cases.wanted(what):
            return
        lab, job = self.lab, f"lost-{time.monotonic_ns()}"
        folder = lab.base / "notes"
        folder.mkdir(exist_ok=True)
        with self.cases.case(what) as notes:
            words = {"batch_size": 8, "job": job, "epochs": 2, "pause": 0.3, **options}
            running = launcher.start(
                [RANK, str(self.folder / "data.h5"), str(folder), json.dumps(words)]
            )
            try:
                ranks = range(len(launcher.hosts))
                wait_for(
                    "ranks", lambda: all((folder / f"{job}-{r}.begun").exists() for r in ranks), 60
                )
                time.sleep(2)
                lab.nodes[lost].end()
                # Of torchrun, which prints where it noticed it, and of programs that do
                text: list[str] | None = [] if options.get("torch") else None
                notes += [ended(process, None, text=text)[:200] for process in running]
            finally:
                for process in running:
                    stop(process)
                lab.boot(lost)
                self.first = lab.nodes[lab.names[0]]
                if lab.slurm is not None:
                    lab.slurm.ready(list(lab.names))

    # --- the server --------------------------------------------------------------------------

    def server_lost(self, verb: str, away: float) -> None:
        """Kill the file server for a while; repeat the command if it failed."""
        what = f"{verb}: the server is away for {away:.0f} s, {self.system}"
        if not self.cases.wanted(what):
            return
        name = f"{verb.replace(' ', '')}-away-{away:.0f}"
        with self.cases.case(what) as notes:
            words = self.line(verb, name, slower=True)
            job = self.start(self.first, (), words)
            try:
                self.begun(job)
                self.lab.store.end()
                time.sleep(away)
                self.lab.serve_again()
                notes.append(ended(job, None, TIMEOUT))
            finally:
                stop(job)
            self.mounted_again()
            if job.returncode:
                again = self.start(self.first, (), self.line(verb, name))
                notes.append("again: " + ended(again, 0, TIMEOUT))
            check_same(self.written(name), self.expected[verb])

    def server_lost_reading(self, away: float) -> None:
        """Kill the file server for a while, during an epoch."""
        what = f"Reader: the server is away for {away:.0f} s, {self.system}"
        if not self.cases.wanted(what):
            return
        lab, job = self.lab, f"away-{time.monotonic_ns()}"
        folder = lab.base / "notes"
        folder.mkdir(exist_ok=True)
        with self.cases.case(what) as notes:
            words = json.dumps({"batch_size": 8, "job": job, "epochs": 1, "pause": 0.1})
            running = self.start(
                self.first, (), f"python {RANK} {self.folder}/data.h5 {folder} '{words}'"
            )
            try:
                wait_for("a rank", lambda: (folder / f"{job}-0.begun").exists(), 60)
                lab.store.end()
                time.sleep(away)
                lab.serve_again()
                notes.append(ended(running, None, TIMEOUT))
            finally:
                stop(running)
            self.mounted_again()
            if running.returncode:
                assert "data.h5" in notes[0], notes[0]
            else:
                found = json.loads((folder / f"{job}-0.json").read_text())["found"]
                assert sorted(found["0"]) == list(range(SAMPLES)), "not every sample once"

    def mounted_again(self) -> None:
        """Wait until the file system answers on the first node, mounted anew if it does not."""
        try:
            wait_for("it", lambda: answers(self.first, self.folder), 30)
        except TimeoutError:
            system = self.lab.systems[self.system]
            system.unmount(self.first)
            system.mount(self.first)
            wait_for("it", lambda: answers(self.first, self.folder), 30)


def answers(node: Node, folder: Path) -> bool:
    """Whether a node sees a folder."""
    try:
        return not node.run(f"ls {folder}", timeout=10).returncode
    except subprocess.TimeoutExpired:
        return False


def mpi(lab: Lab, way: str, names: Sequence[str]) -> list[str]:
    """Return the words that start two ranks on each of some nodes."""
    if way == "srun":
        words = ["srun", f"-N{len(names)}", "--ntasks-per-node=2", f"-w{','.join(names)}"]
        return [*words, "--kill-on-bad-exit=1"]
    return lab.hydra(2 * len(names), names)


def ended(
    job: subprocess.Popen[str],
    code: int | None,
    within: float = WITHIN,
    text: list[str] | None = None,
) -> str:
    """Wait for the end of a job; return how it ended, in a line; what it printed goes to `text`.

    Raises
    ------
    AssertionError
        If it ended with another status than `code` (1: any but 0, or that of srun, which may be
        0 though it prints that a node failed), or, without `text`, by a traceback.
    """
    began = time.monotonic()
    printed, _ = job.communicate(timeout=patient(within))
    seconds = time.monotonic() - began
    good = code is None or bool(job.returncode or "NODE FAILURE" in printed) == bool(code)
    assert good, f"exit status {job.returncode}: {printed[-1500:]}"
    if text is None:
        assert "Traceback" not in printed, printed[-3000:]
    else:
        text.append(printed)
    lines = [x for x in printed.splitlines() if x.strip() and "dsprep: note:" not in x]
    told = " / ".join(lines[-3:])
    return f"ended with {job.returncode} after {seconds:.0f} s{': ' if told else ''}{told[-400:]}"


def stop(job: subprocess.Popen[str]) -> None:
    """End a job that has not ended."""
    if job.poll() is None:
        job.kill()
    if job.stdout is not None and not job.stdout.closed:
        job.stdout.close()
    job.wait()


def trying(lab: Lab, cases: Cases, systems: Sequence[str]) -> None:
    """Try all losses on some file systems; with four nodes."""
    if len(lab.names) < 4:
        raise SystemExit("losses takes --nodes 4: three work, one starts them")
    for number, system in enumerate(systems):
        trial = Trial(lab, cases, system)
        with cases.case(f"data for losses, {system}"):
            trial.make()
        for way in ("srun", "hydra"):
            for verb in ("repack", "provenance", "write"):
                for which in (1, 0) if verb == "repack" else (1,):
                    trial.node_lost(way, verb, which)
        for verb in ("repack", "write"):
            trial.dask_lost(verb)
        if not number:
            for launcher in launchers(lab, lab.names[:2]):
                lost = lab.names[1]
                if launcher.name in ("srun", "hydra"):
                    trial.reader_lost(launcher, lost)
                    trial.reader_lost(launcher, lost, readers_per_node=1)
                    trial.reader_lost(launcher, lost, stagger=1, comm=True)
                elif launcher.name == "torchrun":
                    trial.reader_lost(launcher, lost, torch=True)
        if lab.systems[system].network:
            for away in (5, 50):
                for verb in ("convert", "repack", "write"):
                    trial.server_lost(verb, away)
                trial.server_lost_reading(away)
