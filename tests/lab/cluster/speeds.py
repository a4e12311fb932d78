"""A table of how fast the Reader is on each file system."""

from __future__ import annotations

import re
import sys

from lab.cluster.lab import ROOT, Lab

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
