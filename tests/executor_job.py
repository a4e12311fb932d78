"""Work for executors: the same jobs for each of them; run as a script, the ranks of MPI do them.

``mpiexec -n 3 python executor_job.py all ORIGIN FOLDER``: everything of `do_all`.
``mpiexec -n 3 python executor_job.py kill ORIGIN TARGET``: `killed`, in which a rank is killed.
``mpiexec -n 3 python executor_job.py stop ORIGIN TARGET``: the command line, where a rank stops.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path

import dsprep
from dsprep.executors import opened
from dsprep.source.dataset import open_dataset
from dsprep.verbs.provenance import provenance
from dsprep.verbs.verify import verify
from dsprep.writing import shuffle, tasks
from dsprep.writing.job import Report

do_task = tasks.do
SPLIT = {"shuffle": 3, "split": "train=0.8,val=0.2", "duplicate": 2}
GROUPS = {"buffer_size": 16, "stripe_size": "4KiB", "shard_size": 64}
CASES = [
    ("lmdb", "fixed-files", {"shard_size": 60}, None),
    ("hdf5", "fixed-files", {**GROUPS, **SPLIT}, "memory"),
    ("tfrecord", "mixed.tfrecord", {**GROUPS, **SPLIT}, "buckets"),
    ("zarr", "fixed.h5", {**GROUPS, **SPLIT, "compress": "gzip:1"}, "direct"),
    ("hdf5", "mixed.tfrecord", {"buffer_size": 16, "stripe_size": "4KiB", "shuffle": 3}, "buckets"),
]
"""Target's format, source, options, and the way of shuffling; the last one is of one file."""

FEW = (0, 2, 4)
"""Cases that differ most: for those executors that do the same work in another place."""


def do_all(
    origin: Path, folder: Path, executor: Executor | None, numbers: Iterable[int] = FEW
) -> None:
    """Do cases, the provenance of files, and comparisons."""
    for number in numbers:
        to, source, options, how = CASES[number]
        run = dsprep.repack if "buffer_size" in options else dsprep.convert
        path = origin / source
        inputs = files(path) if path.is_dir() else path
        choose = shuffle._choose
        if how is not None:
            shuffle._choose = lambda *_, how=how: how
        try:
            target = folder / f"{number}-{to}"
            run(inputs, target, to=to, durable=False, executor=executor, **options)
        finally:
            shuffle._choose = choose
    for name in ("fixed", "mixed"):
        inputs = files(origin / f"{name}-files")
        provenance(inputs, out=folder / f"{name}.dsprep.json", checksums=True, executor=executor)
    found = []
    for one, other, share in (
        ("fixed.h5", "fixed-files", 0.5),
        ("fixed.h5", "fixed-wrong", None),
        ("mixed.tfrecord", "mixed-files", None),
    ):
        with open_dataset(origin / one) as a, open_dataset(files(origin / other)) as b:
            found.append(asdict(verify(a, b, share=share, limit=3, executor=executor)))
    (folder / "verdicts.json").write_text(json.dumps(found, default=str, indent=1))


def files(folder: Path) -> list[Path]:
    """Return the files of data, without their sidecar."""
    return sorted(p for p in folder.iterdir() if ".dsprep" not in p.name)


def digests(folder: Path) -> dict[str, str]:
    """Return what all files hold, without when and by what command they were made."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock.mdb"):
        data = path.read_bytes()
        if path.name.endswith(".dsprep.json"):
            content = json.loads(data)
            data = json.dumps(plain(content), sort_keys=True).encode()
        data = data.replace(str(folder).encode(), b"FOLDER")
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def plain(value: object) -> object:
    """Leave out what differs from run to run: times, commands, and inodes."""
    if isinstance(value, dict):
        return {
            k: plain(v)
            for k, v in value.items()
            if k not in ("created", "command", "mtime_ns", "inode")
        }
    return [plain(v) for v in value] if isinstance(value, list) else value


def killing(task: tasks.Task) -> tuple:
    """Write a shard; the first time that one in the middle is to be written, be killed instead."""
    marker = task.attempts.parent / "killed"
    done = do_task(task) if task.name != "shard-2.json" or marker.exists() else None
    if not marker.exists() and task.name == "shard-2.json":
        marker.touch()
        (task.attempts / "2-killed").mkdir()
        (task.attempts / "2-killed" / "half").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return done


def stopping(task: tasks.Task) -> tuple:
    """Write a shard, or answer no more: as a rank whose node is lost."""
    if task.name == "shard-2.json":
        (task.attempts.parent / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return do_task(task)


def stopped(origin: Path, target: Path) -> None:
    """Run the command line, with a rank that stops."""
    import executor_job
    from mpi4py import MPI

    from dsprep.cli import main

    tasks.do = executor_job.stopping
    if MPI.COMM_WORLD.Get_rank() == 0:
        target.with_name("first").write_text(str(os.getpid()))
    words = [origin / "mixed.tfrecord", target, "--to", "tfrecord", "--shard-size", 30]
    sys.argv = ["dsprep", "convert", *map(str, words)]
    main()


def twice(task: tasks.Task) -> tuple:
    """Write a shard twice at the same time."""
    done = []
    threads = [threading.Thread(target=lambda: done.append(do_task(task))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    return done[0]


def slow(task: int) -> int:
    """Fail for one number."""
    if task == 3:
        raise dsprep.errors.ReadError("damaged", 7, where="here")
    return -task


def main() -> None:
    what, origin, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what == "stop":
        stopped(origin, target)
    with opened("mpi") as executor:
        if what == "all":
            do_all(origin, target, executor)
        else:
            import executor_job

            tasks.do = executor_job.killing
            killed(origin, target, executor)


def killed(origin: Path, target: Path, executor: Executor | None) -> Report:
    """Do a job that can be killed, of several files."""
    options = {"to": "tfrecord", "shard_size": 30}
    return dsprep.convert(origin / "mixed.tfrecord", target, executor=executor, **options)


if __name__ == "__main__":
    main()
