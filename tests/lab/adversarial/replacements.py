"""The source is replaced while a conversion runs, or between a kill and the rerun.

It never ends with exit status 0 and old or mixed data: the output holds the new data, or one
clear line refuses. What is only touched is read as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.storage.trees import remove
from dsprep.writing import plan, shards, staging, transfer
from lab.adversarial import judging, making
from lab.adversarial.judging import Tally

COUNT = 500
SOURCES = ("hdf5", "hdf5-chunks", "lmdb", "tfrecord", "zarr-shards", "zarr-zip", "files")
WAYS = ("rename", "rename, same time", "write", "write, same time", "with its sidecar", "touch")
WHEN = ("while running", "while processes run", "after a kill", "while running")
TARGETS = ("set.h5", "set.lmdb", "set.tfrecord", "set.zarr", "shards")
SHARDS = "--to", "tfrecord", "--samples-per-file", "100"
PROCESSES = "--executor", "processes", "--workers", "2"


@dataclass(frozen=True)
class Source:
    """A dataset in two versions of equal sizes, in folders of their own."""

    folders: tuple[Path, Path]
    name: str
    values: tuple[judging.Values, judging.Values]


def made(kind: str, folder: Path) -> Source:
    folder.mkdir()
    folders, known = [], []
    name = "set" if kind == "files" else making.KINDS[kind][0]
    for version in (0, 1):
        origin = folder / f"origin-{version}"
        origin.mkdir()
        schema = making.FIXED if kind == "hdf5-chunks" else making.MIXED
        path = making.origin(origin, schema, making.samples(schema, COUNT, version))
        own = folder / f"version-{version}"
        if kind == "files":
            own.mkdir()
            shards = "--to", "tfrecord", "--samples-per-file", 125
            making.dsprep("convert", path, own / name, *shards)
        else:
            making.make(kind, path, own)
        folders.append(own)
        known.append(judging.read(own / name))
    return Source((folders[0], folders[1]), name, (known[0], known[1]))


def replace(old: Path, new: Path, way: str) -> None:
    """Put the dataset `new` in place of `old`, file by file."""
    if way == "touch":
        for path in [old, *old.rglob("*")]:
            os.utime(path)
        return
    same = way.endswith("same time")
    for path in [p for p in [new, *new.rglob("*")] if p.is_file()]:
        target = old / path.relative_to(new) if new.is_dir() else old
        stat = target.stat() if target.exists() else path.stat()
        if way.startswith("write"):
            with target.open("r+b") as file:
                file.write(path.read_bytes())
                file.truncate()
        else:
            other = target.with_name(f".other-{target.name}")
            shutil.copyfile(path, other)
            if same:
                os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            other.replace(target)
        if same:
            os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if way == "with its sidecar":
        for path in new.parent.glob(f"{new.name}.dsprep.*"):
            shutil.copyfile(path, old.parent / path.name)


def stepwise(step: int, do: Callable[[], None], after: Path) -> None:
    """Have `do` done at one step of a job, and written down what was copied after it."""
    shards.CHECKPOINT_NBYTES = 30_000
    for name in ("pieces", "group_pieces"):
        cut = getattr(plan, name)
        less = lambda *a, cut=cut, **k: cut(*a, **{"target": 20_000, **k})  # noqa: E731
        setattr(shards, name, less)
    taken = [0]

    def counted(owner: object, name: str, *, copies: bool) -> None:
        inner = getattr(owner, name)

        def outer(*args: object, **kwargs: object) -> object:
            taken[0] += 1
            if taken[0] == step:
                do()
                after.touch()
            elif taken[0] > step and copies:
                after.write_text("copied")
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    counted(transfer.ShardCopy, "_copy", copies=True)
    counted(staging.Staging, "save", copies=False)


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    judging.adopt()
    sources: dict[str, Source] = {}
    for number in numbers:
        rng = np.random.default_rng([options.seed, number])
        kind, way = SOURCES[number % len(SOURCES)], WAYS[number // len(SOURCES) % len(WAYS)]
        if kind not in sources:
            sources[kind] = made(kind, folder / kind)
        here = folder / "here"
        here.mkdir()
        shutil.copytree(sources[kind].folders[0], here / "source")
        when = WHEN[number % len(WHEN)]
        what = trial(sources[kind], way, when, here, folder, rng)
        what += f" | source {kind}" if " | " not in what else f"; source {kind}"
        tally.judge(number, f"{when}, {way}", what)
        shutil.rmtree(here)


def trial(
    source: Source, way: str, when: str, here: Path, folder: Path, rng: np.random.Generator
) -> str:
    path, new = here / "source" / source.name, source.folders[1] / source.name
    name = "shards" if when == "while processes run" else str(rng.choice(TARGETS))
    words = "convert", path, here / name, *(SHARDS if name == "shards" else ())
    after = here / "after"
    step = int(rng.integers(1, 14))

    def change() -> None:
        replace(path, new, way)

    if when == "while processes run":
        child = judging.Child(judging.program(*words, *PROCESSES), folder)
        time.sleep(rng.uniform(0.3, 1.5) if not after.exists() else 0)
        while judging.alive(child.pid) and not _begun(here, name) and rng.random() > 0.01:
            time.sleep(0.01)
        time.sleep(rng.exponential(0.1))
        change()
        ended = child.wait()
        judging.orphans()
        copied = False
    else:
        kills = when == "after a kill"

        def work() -> None:
            stepwise(step, (lambda: os.kill(os.getpid(), 9)) if kills else change, after)
            judging.command(*words)()

        ended = judging.forked(work, folder)
        copied = after.exists() and after.read_text() == "copied"
        if kills:
            if ended.code != -9:
                return "ended before"
            change()
            ended = judging.forked(judging.command(*words), folder)
            copied = True
    wrong = judging.complaint(ended)
    if wrong:
        return f"!{wrong}"
    if ended.code:
        return advised(ended, words, source, here / name, folder)
    old, new_values = source.values
    found = judging.whose(judging.read(here / name), {"new": new_values, "old": old})
    if found == "new" or (way == "touch" and found == "old"):
        return "as it is now"
    if found != "old":
        return f"!exit status 0, {found[1:]}"
    return "!exit status 0 with old data" if copied else "old, replaced after it was read"


def _begun(here: Path, name: str) -> bool:
    data = staging.partial_path(here / name) / "data"
    return any(data.rglob("*")) if data.exists() else False


def advised(
    ended: judging.Ended,
    words: tuple[object, ...],
    source: Source,
    target: Path,
    folder: Path,
) -> str:
    """Return whether the way out that a refusal names works."""
    line = judging.first_error(ended)
    if "dsprep provenance" in line:
        again = judging.forked(judging.command("provenance", words[1]), folder)
        if again.code:
            return f"!the advised provenance fails | {again.err[-300:]}"
    more = ["--restart"] if staging.partial_path(target).exists() else []
    again = judging.forked(judging.command(*words, *more), folder)
    if again.code and target.exists():
        remove(target)
        again = judging.forked(judging.command(*words, *more), folder)
    if again.code and "dsprep provenance" in judging.first_error(again):
        judging.forked(judging.command("provenance", words[1]), folder)
        again = judging.forked(judging.command(*words, *more), folder)
    if again.code:
        return f"!refused, and so is the way out | {line}; {judging.first_error(again)}"
    found = judging.whose(judging.read(target), {"new": source.values[1], "old": source.values[0]})
    if found.startswith("!"):
        return f"!refused, and the way out gives {found[1:]}; {line}"
    return "refused, and the way out works"
