"""Tables of what works where, and of how fast the Reader is there."""

from __future__ import annotations

import re
import sys

from lab.cluster import verbs
from lab.cluster.lab import ROOT, Lab, Worker


def table(lab: Lab, wanted: str | None, counts: list[int]) -> list[str]:
    """Print what every verb does on every file system; return what is wrong.

    By `counts` nodes together: where nodes have mounts of their own, and on ext4.
    """
    words = wanted.split(",") if wanted else [""]
    only = [n for n, _ in verbs.STEPS if any(word in n for word in words)]
    first = Worker(lab, lab.names[0])
    reference = {}
    for nodes in counts:
        reference[nodes] = verbs.Trial(lab, first, lab.base / "reference", nodes)
        for name, found in verbs.run(reference[nodes], None, only).items():
            if found.word != "works":
                return [
                    f"{name} on a local disk, {nodes} nodes: {line}"
                    for line in found.lines(lab.base)
                ]
    wrong, told = [], []
    print("| file system | nodes | " + " | ".join(n for n, _ in verbs.STEPS) + " |")
    print("|---" * (2 + len(list(verbs.STEPS))) + "|")
    for system in lab.systems.values():
        for nodes in counts if system.network or system.name == "ext4" else counts[:1]:
            found = verbs.run(verbs.Trial(lab, first, system.root, nodes), reference[nodes], only)
            words = [found[n].word if n in found else "" for n, _ in verbs.STEPS]
            print(f"| {system.name} | {nodes} | " + " | ".join(words) + " |", flush=True)
            for verb, outcome in found.items():
                lines = [f"{system.name}, {nodes}, {verb}: {x}" for x in outcome.lines(lab.base)]
                print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr, flush=True)
                told += lines
                wrong += lines if outcome.wrong or outcome.late else []
    print("", *told, sep="\n")
    return wrong


SAMPLES = (19.2, 192)
_SHARE = re.compile(
    r"^reader-(?:warm|cold) +>= \S+ +(\S+) +\((\S+) to (\S+)\).* limit (\S+) GB/s", re.M
)


def speeds(lab: Lab, gigabytes: float, runs: int) -> list[str]:
    """Print the Reader's share of plain preadv on every file system; return what fails."""
    node, wrong = lab.nodes[lab.names[0]], []
    script = ROOT / "examples" / "throughput.py"
    print("| file system | 19.2 kB, warm | cold | 192 kB, warm | cold | plain preadv, warm |")
    print("|---|---|---|---|---|---|")
    for system in lab.systems.values():
        told = ["--gigabytes", gigabytes, "--runs", runs, "--directory", system.root]
        told += ["--rows", "reader-warm", "reader-cold", "--sample-kb"]
        printed = ""
        for sample in SAMPLES:
            command = [sys.executable, str(script), *map(str, told), str(sample)]
            printed += node.run(command, timeout=1200, env=lab.env(node.name)).stdout
        cells = [f"{m[1]} ({m[2]}-{m[3]})" for m in _SHARE.finditer(printed)]
        rates = [m[4] for m in _SHARE.finditer(printed)]
        if len(cells) != 2 * len(SAMPLES):
            wrong.append(f"{system.name}: {printed[-500:]}")
        rate = f"{rates[0]} GB/s" if rates else ""
        print(f"| {system.name} | {' | '.join(cells)} | {rate} |", flush=True)
    return wrong
