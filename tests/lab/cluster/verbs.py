"""Every verb of dsprep on one file system, compared with the same on the machine's own disk."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.cluster.lab import Lab, Worker
from lab.cluster.truth import COUNT

TARGETS = ("set.h5", "set.lmdb", "set.tfrecord", "set.zarr", "set.zarr.zip")
OVER_NODES = ("set.h5", "set.tfrecord")
"""Formats that several nodes write together; the others take the same way to the disk."""
GROUPS = ("-b", 64, "--stripe-size", "64KiB")
"""Else the file system decides, and the bytes differ."""
MANY = 12_000
"""Samples of what does not fit in the memory of a shuffle."""


@dataclass
class Outcome:
    """What came out of a verb on a file system.

    Attributes
    ----------
    otherwise
        Notes that the same does not print on a local disk.
    refused
        Errors of one line.
    late
        What was not done in time: nothing is known of it.
    wrong
        What must not be: other bytes, other samples, a traceback.
    """

    otherwise: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The outcome in a word."""
        if self.wrong:
            return "WRONG"
        if self.late:
            return "late"
        if self.refused:
            return "refused"
        return "otherwise" if self.otherwise else "works"

    def lines(self, base: Path) -> Iterator[str]:
        """Return what there is to say, once each, without the names of directories."""
        seen = set()
        for line in (*self.wrong, *self.late, *self.refused, *self.otherwise):
            short = re.sub(rf"{re.escape(str(base))}/\S*?/(?=[^/\s]*(\s|$|:|,))", "", line)
            short = re.sub(r"\bset(-\w+)?\.(h5|lmdb|tfrecord|zarr\.zip|zarr)", "SET", short)
            if short not in seen:
                seen.add(short)
                yield short


class Trial:
    """Verbs on one directory by the worker of one node, or by several nodes together."""

    def __init__(self, lab: Lab, worker: Worker, root: Path, nodes: int = 1) -> None:
        self.lab, self.worker, self.nodes = lab, worker, nodes
        self.root = root / f"table-{nodes}"
        self.outcome = Outcome()
        self.digests: dict[str, Any] = {}
        self.notes: set[str] = set()
        self.targets = TARGETS if nodes == 1 else OVER_NODES
        self.kept: dict[str, tuple[dict[str, Any], set[str]]] = {}

    # --- steps ---------------------------------------------------------------------------------

    def dsprep(self, *argv: object, seconds: float = 60) -> bool:
        """Run a command on all nodes of the trial; return whether it succeeded."""
        told = [str(a) for a in argv]
        if self.nodes == 1:
            answer = self.worker.dsprep(*told, seconds=seconds)
        else:
            answer = self._over_nodes(["-m", "dsprep", *told], seconds)
        return self._judge(" ".join(told[:1]), answer)

    def _over_nodes(self, argv: list[str], seconds: float) -> dict[str, Any]:
        names = self.lab.names[: self.nodes]
        command = [*self.lab.hydra(2 * len(names), names), sys.executable, *argv]
        try:
            done = self.lab.fabric.run(command, timeout=seconds, env=self.lab.env(names[0]))
        except subprocess.TimeoutExpired as error:
            return {"error": "hangs", "seconds": error.timeout}
        return {"status": done.returncode, "out": done.stdout, "err": done.stdout}

    def _judge(self, what: str, answer: dict[str, Any]) -> bool:
        if answer.get("error") == "hangs":
            self.outcome.late.append(f"{what}: not done in {answer['seconds']:.0f} s")
            return False
        if "error" in answer:
            sort = self.outcome.wrong if answer.get("trace", "?") else self.outcome.refused
            sort.append(f"{what}: {answer['error']} {answer.get('trace', '')}".strip())
            return False
        if answer.get("wrong"):
            self.outcome.wrong.append(f"{what}: {answer['wrong']}")
            return False
        lines = [x for x in answer.get("err", "").splitlines() if x.startswith("dsprep: ")]
        notes = [x.removeprefix("dsprep: note: ") for x in lines if ": note: " in x]
        self.notes.update(notes)
        if answer.get("status", 0):
            errors = [x for x in lines if ": error: " in x]
            if len(errors) == 1 and "Traceback" not in answer["err"]:
                self.outcome.refused.append(f"{what}: {errors[0].removeprefix('dsprep: error: ')}")
            else:
                self.outcome.wrong.append(f"{what}: {answer['err'][-800:]}")
            return False
        return True

    def do(self, name: str, **more: Any) -> dict[str, Any]:
        """Let the worker do something, and judge it."""
        answer = self.worker.do(name, **more)
        self._judge(name, answer)
        return answer

    def check(self, path: Path, ordered: bool = True, count: int = COUNT, **more: Any) -> None:
        """Compare a dataset with its labels, and keep its digest."""
        self.do("check", path=str(path), ordered=ordered, count=count, **more)
        found = self.do("digest", path=str(path))
        self.digests[str(path.relative_to(self.root))] = found.get("digest", "?")

    # --- verbs ---------------------------------------------------------------------------------

    def sources(self) -> None:
        """Write what the others read."""
        self.do("make_directory", path=str(self.root))
        self.do("write", path=str(self.root / "plain.h5"))
        self.do("write", path=str(self.root / "ragged.h5"), ragged=True)

    def convert(self) -> None:
        """Convert to every format, and on to the next."""
        source = self.root / "ragged.h5"
        parts = ("--samples-per-file", 100) if self.nodes > 1 else ()
        for name in self.targets:
            target = self.root / (name if self.nodes == 1 else name.replace("set.", "set-parts."))
            if self.dsprep("convert", source, target, *parts):
                self.check(target)

    def overwrite(self) -> None:
        """Replace what is there."""
        for name in ("over.h5", "over.zarr"):
            target = self.root / name
            self.dsprep("convert", self.root / "ragged.h5", target, "--samples", "0:50")
            if self.dsprep("convert", self.root / "ragged.h5", target, "--overwrite"):
                self.check(target)

    def continued(self) -> None:
        """Kill a conversion, and repeat it."""
        source = self.root / "ragged.h5"
        for name, after in (("killed.h5", 0.15), ("killed.lmdb", 0.25), ("killed.zarr", 0.35)):
            argv = ["convert", str(source), str(self.root / name), "--samples-per-file", "40"]
            self.worker.do("dsprep", kill_after=after, argv=argv)
            if self.dsprep(*argv) or self._published():
                self.check(self.root / name)

    def _published(self) -> bool:
        """Whether what was refused is only that an earlier run was quicker than the kill."""
        if self.outcome.refused and "exists" in self.outcome.refused[-1]:
            self.outcome.refused.pop()
            return True
        return False

    def repack(self) -> None:
        """Repack to every format, shuffled; split; and with less memory than data."""
        plain = self.root / "plain.h5"
        parts = ("--samples-per-file", 128) if self.nodes > 1 else ()
        for name in self.targets:
            target = self.root / name.replace("set", "set-groups")
            if parts:
                target = target.with_suffix("") / target.suffix[1:]
                self.do("make_directory", path=str(target.parent))
            to = ("--to", name.rpartition(".")[2].replace("h5", "hdf5"))
            options = (*GROUPS, "--shuffle", 3, *(to if parts else ()), *parts)
            if self.dsprep("repack", plain, target, *options):
                self.check(target, ordered=False)
        target = self.root / "split.h5"
        split = ("--split", "train=0.8,val=0.2", "--to", "hdf5")
        if self.nodes == 1 and self.dsprep("repack", plain, target, *GROUPS, *split):
            for part, count in (("train", 480), ("val", 120)):
                found = self.do("digest", path=str(target.with_name(f"split-{part}.h5")))
                self.digests[f"split-{part}"] = found.get("digest"), count

    def buckets(self) -> None:
        """Shuffle more than fits in memory."""
        source, target = self.root / "many.h5", self.root / "many-shuffled.h5"
        self.do("write", path=str(source), count=MANY)
        parts = ("--samples-per-file", 3000) if self.nodes > 1 else ()
        options = (*GROUPS, "--shuffle", 3, "--memory", "70MB", "--to", "hdf5", *parts)
        if parts:
            target = target.with_suffix("")
        if self.dsprep("repack", source, target, *options, seconds=120):
            self.check(target, ordered=False, count=MANY)
        for path in (source, target):
            self.do("remove", path=str(path))

    def provenance(self) -> None:
        """Find where the samples of a foreign file lie, and check all of it."""
        source = self.root / "foreign.h5"
        self.do("write", path=str(source))
        if self.nodes > 1:
            parts = self.root / "set-parts.h5"
            self.do("remove", path=f"{parts}.dsprep.json")
            if self.dsprep("provenance", parts):
                self.check(parts, through="strict")
            return
        if self.dsprep("provenance", source, "--checksums"):
            self.check(source, through="strict")
        for name in self.targets:
            self.dsprep("provenance", self.root / name, "--check", "full")

    def verify(self) -> None:
        """Compare every format with the first."""
        first = self.root / "ragged.h5"
        for name in self.targets[1:]:
            target = self.root / (name if self.nodes == 1 else name.replace("set.", "set-parts."))
            self.dsprep("verify", first, target)

    def reader(self) -> None:
        """Read epochs with every engine, stopped and resumed, alone and as ranks."""
        path = self.root / "set-groups.h5"
        everything = list(range(COUNT))
        if self.nodes > 1:
            self._ranks(everything)
            return
        for options in (
            {},
            {"engine": "buffered"},
            {"engine": "direct"},
            {"shuffle": "global"},
            {"verify": True},
        ):
            found = self.do("reader", path=str(path), batch_size=32, seed=5, **options)
            if "error" not in found and sorted(found["labels"]) != everything:
                self.outcome.wrong.append(f"reader {options}: {len(found['labels'])} labels")
            self.digests[f"reader {options.get('shuffle')}"] = found.get("labels")
            self.notes.update(found.get("notes", ()))
        for name in self.targets[1:]:
            grouped = self.root / name.replace("set", "set-groups")
            found = self.do("reader", path=str(grouped), batch_size=32, seed=5)
            self.digests[f"reader {name}"] = found.get("labels")
        first = self.do("reader", path=str(path), batch_size=32, seed=5, stop=7)
        rest = self.do("reader", path=str(path), batch_size=32, seed=5, state=first.get("state"))
        labels = [*first.get("labels", ()), *rest.get("labels", ())]
        if "error" not in first and "error" not in rest and sorted(labels) != everything:
            self.outcome.wrong.append(f"resumed: {len(set(labels))} labels of {len(labels)}")

    def _ranks(self, everything: list[int]) -> None:
        path = self.root / "set-groups" / "h5"
        script = str(Path(__file__).with_name("worker.py"))
        for options in ({}, {"readers_per_node": 1}, {"stagger": 1}):
            told = json.dumps({"path": str(path), "batch_size": 16, "seed": 5, **options})
            with tempfile.TemporaryDirectory(dir=self.lab.base) as folder:
                answer = self._over_nodes([script, "ranks", folder, told], 60)
                ranks = [json.loads(p.read_text()) for p in Path(folder).iterdir()]
            labels: list[int] = []
            for found in ranks:
                self._judge(f"reader {options}", found)
            if not self._judge(f"reader {options}", answer):
                self.outcome.wrong.append(f"{len(ranks)} ranks came to an end")
                continue
            for found in ranks:
                labels += found.get("labels", ())
            if sorted(labels) != everything:
                what = f"{len(set(labels))} labels of {len(labels)}: {answer['out'][-300:]}"
                self.outcome.wrong.append(f"reader {options}: {what}")

    def bench(self) -> None:
        """Measure, cold."""
        if self.nodes == 1:
            options = ("-s", "dsprep", "-M", "32", "-r", "1", "--scratch", self.root / "bench")
            self.dsprep("bench", "read", self.root / "set-groups.h5", *options)


STEPS = (
    ("convert", Trial.convert),
    ("overwrite", Trial.overwrite),
    ("killed, continued", Trial.continued),
    ("repack", Trial.repack),
    ("shuffle, little memory", Trial.buckets),
    ("provenance, check", Trial.provenance),
    ("verify", Trial.verify),
    ("Reader", Trial.reader),
    ("bench read", Trial.bench),
)
"""Verbs in order; some take what others have made."""

SINGLE = ("overwrite", "killed, continued", "bench read")
"""Verbs that one node does."""


def run(trial: Trial, reference: Trial | None, only: Sequence[str]) -> dict[str, Outcome]:
    """Do verbs; what differs from the reference is wrong, notes that it lacks are told."""
    trial.sources()
    found = {"sources": trial.outcome} if trial.outcome.word != "works" else {}
    for name, step in STEPS:
        if name not in only or (trial.nodes > 1 and name in SINGLE):
            continue
        trial.outcome, trial.digests, trial.notes = Outcome(), {}, set()
        step(trial)
        if reference is not None:
            known = reference.kept[name]
            trial.outcome.otherwise += sorted(n for n in trial.notes if not _same(n, known[1]))
            for what, digest in trial.digests.items():
                if digest not in ("?", None) and digest != known[0].get(what, digest):
                    trial.outcome.wrong.append(f"{what}: other bytes or order than on a local disk")
        else:
            trial.kept[name] = trial.digests, trial.notes
        found[name] = trial.outcome
    trial.do("remove", path=str(trial.root))
    return found


def _same(note: str, known: set[str]) -> bool:
    """Whether a note says the same as one of others, paths and figures aside."""

    def plain(text: str) -> str:
        return re.sub(r"/\S+|[\d.]+", "", text)

    return plain(note) in {plain(k) for k in known}
