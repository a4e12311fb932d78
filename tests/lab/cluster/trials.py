"""Random verbs on random file systems with random faults: what comes out is right, or one line.

A trial is a function of the seed and its number. First the datasets are made on each file system,
in every format and grouped; a trial reads one of them, or makes another one of it. Faults are those
of the lab's own file system, a kill, and the loss of a node's mount or of the server.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.cluster.filesystems import Faults
from lab.cluster.lab import Lab, Worker
from lab.cluster.truth import COUNT
from lab.cluster.verbs import TARGETS

INJECTED = (
    *("eio=once", "eio=every:7", "estale=once", "hang=3", "slow=0.01", "short=0.5"),
    *("short-write=0.5", "enospc=100000", "enospc-close", "eio-fsync", "no-dir-fsync=EIO"),
    *("no-rename2", "no-copy-file-range", "no-fallocate"),
)
"""Faults that are armed when all is mounted and made; disarmed before what follows."""

SECONDS = 60.0
"""After which a command hangs."""


@dataclass(frozen=True)
class Plan:
    """A trial.

    Attributes
    ----------
    system, fault
        Where, and what goes wrong there: a fault of `INJECTED`, ``"kill"``, ``"none"``.
    verb, name
        What is done to which dataset.
    to
        Name of the output.
    options
        More arguments.
    after
        Seconds after which the process is killed.
    """

    system: str
    fault: str
    verb: str
    name: str
    to: str
    options: tuple[str, ...]
    after: float


def plan(seed: int, number: int, systems: list[str], injecting: list[str]) -> Plan:
    """Return what a trial does."""
    dice = random.Random(f"{seed} {number}")
    system = dice.choice(systems)
    faults = ["none", "kill", "kill", *(INJECTED if system in injecting else ())]
    verb = dice.choice(("convert", "convert", "repack", "repack", "check", "reader", "reader"))
    grouped = verb == "reader" or dice.random() < 0.3
    name = dice.choice(TARGETS).replace("set", "set-groups" if grouped else "set")
    to = dice.choice(TARGETS).replace("set", "out")
    options: list[str] = []
    if verb in ("convert", "repack") and dice.random() < 0.4:
        options += ["--samples-per-file", str(dice.choice((64, 128, 300)))]
        to = to.replace(".zarr.zip", ".zarr")
    if verb == "repack":
        options += ["-b", str(dice.choice((16, 64))), "--stripe-size", "4KiB"]
        if dice.random() < 0.6:
            options += ["--shuffle", str(dice.randrange(9))]
    if verb == "reader":
        options = [dice.choice(("buffered", "direct", "mapped", "global", "verify", ""))]
    fault = dice.choice(faults)
    return Plan(system, fault, verb, name, to, tuple(options), dice.uniform(0.02, 0.9))


class Trials:
    """Datasets on every file system, and what is done to them."""

    def __init__(self, lab: Lab, node: str) -> None:
        self.lab, self.node = lab, node
        self.worker = Worker(lab, node)
        self.digests: dict[tuple[object, ...], str] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.findings: list[str] = []
        self.errors: dict[str, Counter[str]] = {}
        self.systems: list[str] = []
        self.lacking: list[str] = []
        for system in lab.systems.values():
            try:
                self._prepare(self._root(system.name))
            except RuntimeError as error:
                self.lacking.append(f"{system.name}: {error}")
            else:
                self.systems.append(system.name)

    def _prepare(self, root: Path) -> None:
        """Make the datasets of a file system."""
        self._must("make_directory", path=str(root))
        self._must("write", path=str(root / "origin.h5"))
        for name in TARGETS:
            source = root / "origin.h5"
            self._must("dsprep", argv=["convert", str(source), str(root / name)])
            grouped = str(root / name.replace("set", "set-groups"))
            self._must("dsprep", argv=["repack", str(source), grouped, "-b", "32"])

    def _root(self, system: str) -> Path:
        return self.lab.systems[system].root / f"trials-{self.node}"

    def _must(self, do: str, **more: Any) -> dict[str, Any]:
        answer = self.worker.do(do, **more)
        if "error" in answer or answer.get("status"):
            raise RuntimeError(f"{do} {more}: {answer}")
        return answer

    def run(self, number: int, trial: Plan) -> str:
        """Do a trial; return what came out, beginning with "!" if that must not be."""
        system = self.lab.systems[trial.system]
        injected = trial.fault if trial.fault not in ("none", "kill") else ""
        if injected:
            assert isinstance(system, Faults)
            system.tell(self.node, f"arm {injected}")
        try:
            found = self._once(trial, kill=trial.fault == "kill")
        finally:
            if injected:
                system.tell(self.node, f"disarm {injected.partition('=')[0]}")
        if found.startswith("!") or found == "right":
            return self._clean(trial, found)
        if found.startswith("error"):
            line = re.sub(r"/\S*/|\d+", "", found.partition(" | ")[2])
            self.errors.setdefault(trial.fault, Counter())[f"{trial.verb}: {line}"] += 1
        again = self._once(trial, kill=False)
        if again != "right":
            first = f"after {found.partition(' | ')[0]}, again"
            again = again if again.startswith("!") else f"!does not recover | {again}"
            return self._clean(trial, f"!{first}: {again.removeprefix('!')} | {found}")
        return self._clean(trial, f"{found.partition(' | ')[0]}, then right")

    def _clean(self, trial: Plan, found: str) -> str:
        if trial.verb in ("convert", "repack"):
            target = self._root(trial.system) / trial.to
            for path in (target, Path(f"{target}.dsprep.json"), Path(f"{target}.dsprep.bin")):
                self.worker.do("remove", path=str(path))
            self.worker.do("remove", path=str(target.with_name(f".{target.name}.dsprep-partial")))
        return found

    def _once(self, trial: Plan, kill: bool) -> str:
        root = self._root(trial.system)
        source, target = str(root / trial.name), str(root / trial.to)
        own: dict[str, Any] = {"seconds": SECONDS, **({"kill_after": trial.after} if kill else {})}
        if trial.verb == "reader":
            how = trial.options[0]
            options: dict[str, Any] = (
                {"engine": how} if how in ("buffered", "direct", "mapped") else {}
            )
            options |= {"shuffle": "global"} if how == "global" else {}
            options |= {"verify": True} if how == "verify" else {}
            answer = self.worker.do("reader", path=source, batch_size=32, seed=1, **options, **own)
            said = self._said(answer)
            if said == "right" and sorted(answer["labels"]) != list(range(COUNT)):
                return f"!{len(answer['labels'])} labels"
            return said
        if trial.verb == "check":
            answer = self.worker.dsprep("provenance", source, "--check", "full", **own)
            return self._said(answer)
        to = {"tfrecord": "tfrecord", "h5": "hdf5", "lmdb": "lmdb", "zarr": "zarr"}
        name = "zarr" if target.endswith("zip") else target.rpartition(".")[2]
        argv = [trial.verb, source, target, "--to", to[name], *trial.options]
        answer = self.worker.dsprep(*argv, **own)
        if "exists" in answer.get("err", ""):  # the kill came too late
            answer = {}
        said = self._said(answer)
        if said != "right":
            return said
        key = (
            trial.verb,
            trial.name,
            trial.to.rpartition("out")[2].partition(".")[2],
            trial.options,
        )
        ordered = "--shuffle" not in trial.options
        for attempt in range(3):  # a fault may still be seen by the kernel's own cache
            checked = self.worker.do("check", path=target, ordered=ordered)
            if "error" not in checked or attempt == 2:
                break
        if checked.get("wrong") or "error" in checked:
            return f"!wrong data | {checked}"
        digest = self.worker.do("digest", path=target).get("digest", "?")
        if digest != self.digests.setdefault(key, digest):
            return "!other bytes"
        return "right"

    def _said(self, answer: dict[str, Any]) -> str:
        """Return "right", or how it ended."""
        if answer.get("wrong"):
            return f"!wrong data | {answer['wrong']}"
        if "error" in answer:
            if answer["error"] == "hangs":
                return "!hangs"
            if answer.get("trace"):
                return f"!traceback | {answer['trace'][-1500:]}"
            return "killed" if answer["error"] == "killed" else f"error | {answer['error']}"
        if answer.get("status"):
            lines = answer["err"].splitlines()
            errors = [x for x in lines if x.startswith("dsprep: error: ")]
            found = answer["out"].strip().splitlines()
            if "Traceback" in answer["err"] or (len(errors) != 1 and not found):
                return f"!not one line | {answer['err'][-800:]}"
            return f"error | {(errors or found)[0]}"
        return "right"


def run(lab: Lab, numbers: range, seed: int, minutes: float) -> Iterator[str]:
    """Do trials on the first node, until all are done or the time is over."""
    end = time.monotonic() + 60 * minutes
    trials = Trials(lab, lab.names[0])
    yield from (f"left out: {line}" for line in trials.lacking)
    systems = trials.systems
    injecting = [n for n in systems if isinstance(lab.systems[n], Faults)]
    done = 0
    for number in numbers:
        if time.monotonic() > end:
            break
        trial = plan(seed, number, systems, injecting)
        found = trials.run(number, trial)
        done += 1
        trials.counts[trial.fault.partition("=")[0], found.partition(" | ")[0]] += 1
        if found.startswith("!"):
            trials.findings.append(f"trial {number}: {found[1:]}\n  {trial}")
            yield trials.findings[-1]
    faults: dict[str, list[str]] = {}
    for (fault, outcome), times in sorted(trials.counts.items()):
        faults.setdefault(fault, []).append(f"{outcome} {times}")
    for fault, outcomes in faults.items():
        yield f"{fault:<20} {', '.join(outcomes)}"
    for fault, lines in trials.errors.items():
        yield from (f"{fault}: {line} ({times})" for line, times in lines.most_common(4))
    yield f"{done} trials, {len(trials.findings)} findings"
