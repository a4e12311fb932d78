"""``python tests/lab/stores``: dsprep on object stores that others wrote, as a table.

``--npm DIR`` has the packages of npm (``.venv-stores``). Names of servers leave out the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.stores.cases import Suite, WrongError
from lab.stores.servers import SERVERS, Missing


def attempt(name: str, packages: Path, folder: Path) -> dict[str, str]:
    """Return what came of each case on a server, "ok" or why not; print each as it ends."""
    rows: dict[str, str] = {}
    with SERVERS[name](folder, packages) as (base, env):
        for number, (case, run) in enumerate(Suite(base, env, folder / "work").cases(), 1):
            began, said = time.monotonic(), "ok"
            try:
                run()
            except (WrongError, subprocess.TimeoutExpired) as error:
                said = str(error)
            rows[f"{number:2} {case}"] = said
            took = time.monotonic() - began
            print(f"{name}  {number:2} {case}: {said} ({took:.1f} s)", flush=True)
    return rows


def main() -> int:
    """Try the servers that are asked for; return 1 if a case failed or one is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="*", default=[*SERVERS], metavar="|".join(SERVERS))
    parser.add_argument("--npm", type=Path, default=Path(".venv-stores"))
    given = parser.parse_args()
    results: dict[str, dict[str, str]] = {}
    for name in given.servers:
        with tempfile.TemporaryDirectory(prefix="dsprep-stores-") as folder:
            try:
                results[name] = attempt(name, given.npm.absolute(), Path(folder))
            except Missing as missing:
                print(f"{name} is left out: {missing} is not installed")
            except (TimeoutError, subprocess.SubprocessError) as error:
                print(f"{name} does not start: {error}")
    names = [*results]
    print(f"\n| case | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for case in results[names[0]] if names else ():
        cells = ("ok" if results[name][case] == "ok" else "FAILED" for name in names)
        print(f"| {case} | {' | '.join(cells)} |")
    right = [sum(said == "ok" for said in rows.values()) for rows in results.values()]
    counts = [len(rows) for rows in results.values()]
    sums = (f"{ok} of {count}" for ok, count in zip(right, counts, strict=True))
    print(f"| | {' | '.join(sums)} |")
    return 0 if names == given.servers and right == counts else 1


if __name__ == "__main__":
    sys.exit(main())
