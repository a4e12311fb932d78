"""``python tests/lab/cluster check``: start the lab, ask whether all in it works, and end it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.cluster import batch, jobs, losses, readers, speeds
from lab.cluster.cases import Cases
from lab.cluster.lab import NODES, Lab
from lab.cluster.spaces import be_patient

TRIALS = {
    "jobs": jobs.trying,
    "readers": readers.trying,
    "batch": batch.trying,
    "losses": losses.trying,
}
"""What is tried on a lab, by the name on the command line."""


def check(lab: Lab) -> list[str]:
    """Return what does not work."""
    wrong = []

    def expect(what: str, printed: str, *words: str) -> None:
        lacking = [word for word in words if word not in printed]
        print(f"{'ok' if not lacking else 'FAILED':8}{what}")
        if lacking:
            wrong.append(f"{what}: no {', '.join(lacking)} in:\n{printed}")

    first, names = lab.nodes[lab.names[0]], lab.names
    env = lab.env(first.name)
    hello = (
        "from mpi4py import MPI; import socket; c = MPI.COMM_WORLD;"
        "print(''.join(c.allgather(f'{c.rank} of {c.size} on {socket.gethostname()};')))"
    )
    ranks = 2 * len(names)
    told = [f"{i} of {ranks} on {names[i // 2]};" for i in range(ranks)]
    srun = f"srun -N{len(names)} --ntasks-per-node=2"
    expect(f"srun on {len(names)} nodes", first.run(f"{srun} hostname", env=env).stdout, *names)
    expect("MPI by srun", first.run(f'{srun} python -c "{hello}"', env=env).stdout, *told)
    by_hydra = lab.fabric.run([*lab.hydra(ranks, names), "python", "-c", hello], env=env)
    expect("MPI by hydra", by_hydra.stdout, *told)
    for name, system in lab.systems.items():
        at = system.root / "check"
        first.run(f"echo written > {at}; sync {at}")
        end = time.monotonic() + 15
        while True:  # some keep old directory entries for seconds
            read = lab.nodes[names[-1]].run(f"cat {at}").stdout
            if read == "written\n" or time.monotonic() > end:
                break
            time.sleep(0.5)
        expect(f"{name} on two nodes", read, "written\n")
    return wrong


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python tests/lab/cluster", description=__doc__)
    parser.add_argument("what", choices=("check", "shell", "speeds", *TRIALS))
    parser.add_argument("--nodes", type=int, default=2, choices=range(1, len(NODES) + 1))
    parser.add_argument("--systems", help="names, with commas between; all if not given")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="wait for everything so many times as long"
    )
    parser.add_argument("--only", help="cases that have this in their names")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="what speeds reads")
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    if os.geteuid():
        parser.error("namespaces and mounts take root")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # the lab is closed then
    be_patient(asked.patience)
    began = time.monotonic()
    systems = asked.systems.split(",") if asked.systems else None
    with Lab(systems, asked.nodes, slurm=True) as lab:
        print(f"up in {time.monotonic() - began:.0f} s, in {lab.base}")
        for name, why in lab.missing.items():
            print(f"left out: {name}: {why}")
        if asked.what == "shell":
            node = lab.nodes[lab.names[0]]
            node.start(["bash", "-i"], lab.env(node.name), stdin=None).wait()
            return 0
        if asked.what in TRIALS:
            cases = Cases(asked.only)
            TRIALS[asked.what](lab, cases, list(lab.systems))
            return cases.end()
        if asked.what == "speeds":
            wrong = speeds.speeds(lab, asked.gigabytes, asked.runs)
        else:
            wrong = check(lab)
    for text in wrong:
        print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
