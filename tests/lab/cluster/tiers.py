"""Fast tiers of nodes: staged, filled by Readers, and lost: every sample comes once."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .cases import Cases
from .jobs import DSPREP
from .lab import Lab
from .losses import RANK, WITHIN, answers, ended, stop
from .readers import once
from .spaces import wait_for

TIER = "/run/tier"
"""A directory of each node's own memory, gone when it is started anew."""

STAGE = f"{DSPREP} stage {{data}} --to {TIER} --ranks 4 --ranks-per-node 2 -M 8 --seed 5 -E 3"
SLOWLY = "0.2MB/s"
"""At which rate is copied what is to be interrupted: all takes more than 6 s."""


class Trial:
    """Two nodes of two ranks each, with tiers, on one file system."""

    def __init__(self, lab: Lab, cases: Cases, system: str) -> None:
        self.lab, self.cases, self.system = lab, cases, system
        self.root = lab.systems[system].root / "tiers"
        self.data = self.root / "data.h5"
        self.notes = lab.base / "tiers" / system
        self.notes.mkdir(parents=True)
        self.names, self.number = lab.names[:2], 0
        self.mounted_again()  # the server was lost for others
        env = lab.env(self.names[0])
        make = f"mkdir -p {self.root} && python {RANK} make {self.data}"
        lab.nodes[self.names[0]].run(make, env=env, check=True)

    # --- doing ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Empty the tiers."""
        for name in self.names:
            self.lab.nodes[name].run(f"rm -rf {TIER}", check=True)

    def start(self, per_node: int, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start processes on both nodes."""
        srun = ["srun", "-N2", f"--ntasks-per-node={per_node}", f"-w{','.join(self.names)}"]
        return self.lab.nodes[self.names[0]].start(
            [*srun, "--kill-on-bad-exit=1", *words],
            self.lab.env(self.names[0]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stage(self, more: str = "") -> subprocess.Popen[str]:
        """Start staging on both nodes."""
        return self.start(1, shlex.split(f"{STAGE.format(data=self.data)} {more}"))

    def ranks(self, **options: Any) -> tuple[subprocess.Popen[str], str]:
        """Start ranks that read three epochs; return also the name of their notes."""
        self.number += 1
        job = f"job{self.number}"
        told = json.dumps({"batch_size": 8, "epochs": 3, "job": job, **options})
        return self.start(2, ["python", RANK, str(self.data), str(self.notes), told]), job

    def read(self, job: str) -> list[dict[str, Any]]:
        """Return what ranks noted, who have read each sample once in each epoch."""
        found = [json.loads((self.notes / f"{job}-{r}.json").read_text()) for r in range(4)]
        for epoch in range(3):
            once(found, epoch)
        return found

    def reading(self, **options: Any) -> list[dict[str, Any]]:
        """Have ranks read to the end."""
        running, job = self.ranks(**options)
        try:
            ended(running, 0)
        finally:
            stop(running)
        return self.read(job)

    def wait_for(self, job: str, mark: str) -> None:
        """Wait until all ranks have come somewhere."""
        paths = [self.notes / f"{job}-{r}.{mark}" for r in range(4)]
        wait_for("ranks", lambda: all(p.exists() for p in paths), 60)

    def verified(self) -> None:
        """Raise unless all that tiers hold has its checksums."""
        for name in self.names:
            node = self.lab.nodes[name]
            node.run(f"{DSPREP} cache verify {TIER}", env=self.lab.env(name), check=True)

    def lose(self, what: str) -> Callable[[], None]:
        """Lose a node, or the server for 5 s; return what brings all back."""
        lab, lost = self.lab, self.names[1]
        if what == "node":
            lab.nodes[lost].end()

            def back() -> None:
                lab.boot(lost)
                if lab.slurm is not None:
                    lab.slurm.ready(list(lab.names))

            return back
        lab.store.end()
        time.sleep(5)
        lab.serve_again()
        return self.mounted_again

    def mounted_again(self) -> None:
        """Wait until nodes see the data, mounted anew where they do not."""
        for name in self.lab.names:
            node, system = self.lab.nodes[name], self.lab.systems[self.system]
            with suppress(TimeoutError):
                wait_for("it", lambda node=node, at=system.root: answers(node, at), 20)
                continue
            system.unmount(node)
            system.mount(node)

    # --- cases ---------------------------------------------------------------------------------

    def staged(self) -> None:
        """Stage, then read: in the order without a tier, and nothing but from the tier."""
        what = f"stage by srun, then Reader, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what):
            self.clear()
            running = self.stage()
            try:
                ended(running, 0)
            finally:
                stop(running)
            plain = self.reading()
            found = self.reading(cache=TIER)
            assert [n["found"] for n in found] == [n["found"] for n in plain], "another order"
            self.from_tier(found)
            self.verified()

    def from_tier(self, notes: Sequence[dict[str, Any]]) -> None:
        """Raise if something was read from the slow tier."""
        slow = sum(n["nbytes"] - n["cache_nbytes"] + n["copied_nbytes"] for n in notes)
        assert not slow, f"{slow} bytes from the slow tier"

    def stage_lost(self, lost: str) -> None:
        """Lose something while it is staged; the same command continues."""
        what = f"stage: a {lost} lost, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what) as told:
            self.clear()
            running, back = self.stage(f"--bandwidth {SLOWLY} -j 1"), list[Callable[[], None]]()
            try:
                node = self.lab.nodes[self.names[1]]
                copies = f"ls {TIER}/*/0*"
                wait_for("copies", lambda: not node.run(copies).returncode, 60)
                back.append(self.lose(lost))
                told.append(ended(running, None, WITHIN + 30))
            finally:
                stop(running)
                for bring in back:
                    bring()
            again = self.stage()
            try:
                told.append("again: " + ended(again, 0))
            finally:
                stop(again)
            self.from_tier(self.reading(cache=TIER))
            self.verified()

    def shared(self) -> None:
        """Stage to one directory that both nodes share: it is copied once."""
        what = f"stage --all by two nodes, {self.system}"
        if not (self.cases.wanted(what) and self.lab.systems[self.system].locks):
            return
        with self.cases.case(what) as told:
            tier = self.root / "tier"
            words = STAGE.replace(TIER, str(tier)).format(data=self.data)
            running = self.start(1, shlex.split(f"{words} --all --bandwidth 1MB/s"))
            try:
                text = list[str]()
                ended(running, 0, text=text)
            finally:
                stop(running)
            copied = [line for line in text[0].splitlines() if line.startswith("copied")]
            told += [" / ".join(copied)]
            assert sum(line.split()[1:3] == ["0", "B"] for line in copied) == 1, text[0]
            self.from_tier(self.reading(cache=str(tier)))

    def filled(self, **options: Any) -> None:
        """Fill tiers while reading: in the order without."""
        given = "".join(f", {k}={v}" for k, v in options.items())
        what = f"cache{given}, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what):
            self.clear()
            plain = self.reading(**options)
            found = self.reading(cache=TIER, **options)
            assert [n["found"] for n in found] == [n["found"] for n in plain], "another order"
            self.verified()

    def fill_lost(self, lost: str) -> None:
        """Lose something while tiers are filled; the same ranks begin anew."""
        what = f"cache: {lost} lost while it is filled, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what) as told:
            self.clear()
            back = list[Callable[[], None]]()
            running, job = self.ranks(cache=TIER, cache_bandwidth=SLOWLY, pause=0.1)
            try:
                self.wait_for(job, "begun")
                if lost == "tier":
                    self.lab.nodes[self.names[1]].run(f"rm -rf {TIER}")
                else:
                    back.append(self.lose(lost))
                told.append(ended(running, 0 if lost == "tier" else None, WITHIN + 30))
            finally:
                stop(running)
                for bring in back:
                    bring()
            if not running.returncode:
                self.read(job)
            self.reading(cache=TIER)
            self.verified()

    def server_gone(self) -> None:
        """Lose the server for good when the tiers have all that is needed."""
        what = f"cache: full, then the server is away for good, {self.system}"
        if not self.cases.wanted(what):
            return
        with self.cases.case(what) as told:
            self.clear()
            go = self.notes / "go"
            go.unlink(missing_ok=True)
            running, job = self.ranks(cache=TIER, go=str(go))
            try:
                self.wait_for(job, "waits")
                self.lab.store.end()
                go.touch()
                told.append(ended(running, 0, WITHIN + 30))
                self.told(told, job)
            finally:
                stop(running)
                self.lab.serve_again()
                self.mounted_again()

    def told(self, told: list[str], job: str) -> None:
        """Add what ranks were warned of."""
        found = self.read(job)
        told += sorted({line[:200] for n in found for line in n["warnings"]})


def trying(lab: Lab, cases: Cases, systems: Sequence[str]) -> None:
    """Try tiers on some file systems."""
    for system in systems:
        trial = Trial(lab, cases, system)
        trial.staged()
        trial.shared()
        for options in ({}, {"readers_per_node": 1}, {"stagger": 1, "comm": True}, SHUFFLED):
            trial.filled(**options)
        trial.fill_lost("tier")
        for lost in ("node", "server"):
            if lost == "node" or lab.systems[system].network:
                trial.stage_lost(lost)
                trial.fill_lost(lost)
        if lab.systems[system].network:
            trial.server_gone()


SHUFFLED = {"shuffle": "global"}
