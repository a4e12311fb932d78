"""The Reader over nodes: every sample once over all ranks, whatever started them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import Cases
from .lab import Lab
from .rank import SAMPLES
from .spaces import Space, patient

HERE = Path(__file__).parent
TIMEOUT = 90.0
RANK = str(HERE / "rank.py")
FETCHED = 256 << 10
"""Bytes that only ranks read that read samples: a fourth of those are 600 KB."""


@dataclass(frozen=True)
class Launcher:
    """A way of starting ranks over nodes.

    Attributes
    ----------
    name
        For tables.
    hosts
        The node of every rank, in the order of ranks.
    start
        Starts a Python program with its arguments; returns the processes to wait for.
    told
        What the Reader says that its rank is from.
    mpi
        Whether it starts MPI.
    """

    name: str
    hosts: tuple[str, ...]
    start: Callable[[Sequence[str]], list[subprocess.Popen[str]]]
    told: str
    mpi: bool


def launchers(lab: Lab, names: Sequence[str], per_node: int = 2) -> Iterator[Launcher]:
    """Return all ways of starting ranks on some nodes."""
    count, ranks = len(names), per_node * len(names)
    first = lab.nodes[names[0]]
    env = lab.env(names[0])
    block = tuple(name for name in names for _ in range(per_node))
    cyclic = tuple(names) * per_node
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def by(where: Space, words: Sequence[str]) -> Callable[[Sequence[str]], list[Any]]:
        return lambda program: [where.start([*words, "python", *program], env, **pipes)]

    srun = ["srun", f"-N{count}", f"--ntasks-per-node={per_node}", f"-w{','.join(names)}"]
    yield Launcher("srun", block, by(first, srun), "PMI", True)
    yield Launcher("srun -m cyclic", cyclic, by(first, [*srun, "-m", "cyclic"]), "PMI", True)
    yield Launcher("srun --mpi=none", block, by(first, [*srun, "--mpi=none"]), "SLURM", False)
    yield Launcher("hydra", block, by(lab.fabric, lab.hydra(ranks, names)), "PMI", True)
    one = lab.hydra(ranks, names)
    one[one.index("-ppn") + 1] = "1"
    yield Launcher("hydra -ppn 1", cyclic, by(lab.fabric, one), "PMI", True)

    def torchrun(program: Sequence[str]) -> list[Any]:
        words = [
            *("torchrun", "--nnodes", str(count), "--nproc-per-node", str(per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29511"),
            *("--rdzv-id", "7", "--local-addr"),
        ]
        return [
            lab.nodes[name].start(
                [*words, lab.nodes[name].address, *program], lab.env(name), **pipes
            )
            for name in names
        ]

    yield Launcher("torchrun", block, torchrun, "torch", False)


def ended(
    processes: Sequence[subprocess.Popen[str]], timeout: float = TIMEOUT
) -> tuple[list[int], str]:
    """Wait for processes, and return their exit statuses and what they printed."""
    printed, codes = "", []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=patient(timeout))
            printed += out
            codes.append(process.returncode)
    except subprocess.TimeoutExpired as error:
        for process in processes:
            process.kill()
        printed += "".join(process.communicate()[0] for process in processes)
        raise subprocess.TimeoutExpired(error.cmd, timeout, printed) from None
    return codes, printed


def once(notes: Sequence[Mapping[str, Any]], epoch: int) -> None:
    """Raise unless every sample of an epoch was read once, in as many steps by every rank."""
    found = Counter(i for n in notes for i in n["found"].get(str(epoch), ()))
    more = [i for i, count in found.items() if count > 1]
    assert not more, f"epoch {epoch}: {len(more)} samples more than once, such as {more[:5]}"
    lost = sorted(set(range(SAMPLES)) - set(found))
    assert not lost, f"epoch {epoch}: {len(lost)} samples never, such as {lost[:5]}"
    steps = {n["steps"].get(str(epoch)) for n in notes}
    assert len(steps) == 1, f"epoch {epoch}: ranks had {steps} steps"


class Trial:
    """Ranks on one file system."""

    def __init__(self, lab: Lab, cases: Cases, system: str) -> None:
        self.lab, self.cases, self.system = lab, cases, system
        self.folder = lab.systems[system].root / "ranks"
        self.data = self.folder / "data.h5"
        self.notes = lab.base / "notes" / system  # of the machine: no file system is in the way
        self.notes.mkdir(parents=True)
        self.number = 0

    def make(self) -> None:
        """Make the data, on the last node."""
        last = self.lab.names[-1]
        self.lab.nodes[last].run(
            f"mkdir -p {self.folder} && python {RANK} make {self.data}",
            env=self.lab.env(last),
            check=True,
        )

    def read(self, launcher: Launcher, **options: Any) -> list[dict[str, Any]]:
        """Have ranks read; return what they noted."""
        self.number += 1
        job = f"job{self.number}"
        told = json.dumps({"batch_size": 8, "job": job, **options})
        program = [RANK, str(self.data), str(self.notes), told]
        codes, printed = ended(launcher.start(program))
        assert not any(codes), f"exit status {codes}: {printed}"
        notes = [
            json.loads((self.notes / f"{job}-{rank}.json").read_text())
            for rank in range(len(launcher.hosts))
        ]
        hosts = tuple(n["host"] for n in notes)
        assert hosts == launcher.hosts, f"ranks ran on {hosts}"
        assert {n["world_size"] for n in notes} == {len(notes)}, notes[0]["source"]
        return notes

    def try_reading(self, what: str, launcher: Launcher, **options: Any) -> None:
        """Read two epochs, and check them."""
        what = f"{what}: {launcher.name}, {len(set(launcher.hosts))} nodes, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what):
            notes = self.read(launcher, epochs=2, **options)
            for epoch in range(2):
                once(notes, epoch)
            if options.get("comm") is None:
                assert all(launcher.told in n["source"] for n in notes), notes[0]["source"]
            readers = Counter(n["host"] for n in notes if n["fetched"] > FETCHED)
            ranks = Counter(launcher.hosts)
            most = options.get("readers_per_node", len(notes))
            assert readers == {h: min(most, ranks[h]) for h in ranks}, f"data read on {readers}"

    def try_resuming(self, one: Launcher, other: Launcher) -> None:
        """Stop in the middle of an epoch, and continue with other ranks."""
        what = f"{len(one.hosts)} ranks continued by {len(other.hosts)}: {one.name}, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what):
            before = self.read(one, stop=11)
            states = {json.dumps(n["state"]) for n in before}
            assert len(states) == 1, "ranks saved different states"
            path = self.notes / "state.json"
            path.write_text(states.pop())
            after = self.read(other, state=str(path), epochs=2)
            for n in before:
                n["steps"] = {}
            found = Counter(i for n in [*before, *after] for i in n["found"].get("0", ()))
            assert found == Counter(range(SAMPLES)), "not every sample of the epoch once"
            once(after, 1)


def trying(lab: Lab, cases: Cases, systems: Sequence[str]) -> None:
    """Try the Reader in all ways on some file systems."""
    for number, system in enumerate(systems):
        trial = Trial(lab, cases, system)
        with cases.case(f"data for ranks, {system}") as _:
            trial.make()
        two, four = lab.names[:2], lab.names[:4]
        for launcher in launchers(lab, two):
            trial.try_reading("reads", launcher)
            if number and launcher.name not in ("srun", "torchrun"):
                continue  # what the file system does not decide was tried on the first one
            for readers in (1, 2):
                trial.try_reading(f"readers_per_node={readers}", launcher, readers_per_node=readers)
            trial.try_reading("stagger=1", launcher, stagger=1)
            if launcher.mpi:
                trial.try_reading("stagger=1 over nodes", launcher, stagger=1, comm=True)
        for launcher in launchers(lab, two, 3):
            if not number and launcher.name in ("srun", "hydra -ppn 1", "torchrun"):
                trial.try_reading("readers_per_node=2 of 3", launcher, readers_per_node=2)
        if len(four) > 2:
            by_name = {c: list(launchers(lab, four[:c], 1)) for c in (2, 3, 4)}
            for k in (0, 3):  # srun, hydra
                trial.try_resuming(by_name[4][k], by_name[3][k])
                trial.try_resuming(by_name[2][k], by_name[4][k])
            trial.try_reading("stagger=2 over nodes", by_name[4][0], stagger=2, comm=True)
