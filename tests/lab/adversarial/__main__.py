"""Read damaged files: ``python tests/lab/adversarial --count 300``."""

from __future__ import annotations

import argparse
import os
import pickle
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(TESTS.parent), str(TESTS)]  # in place of this folder


def numbers(options: argparse.Namespace, job: int) -> Iterator[int]:
    """Yield the numbers of one job's trials, until time is over."""
    end = time.monotonic() + 60 * options.minutes
    chosen = options.only or range(options.start, options.start + options.count)
    for number in chosen[job :: options.jobs]:
        if time.monotonic() > end:
            return
        yield number


def preload() -> None:
    """Import once what every child needs."""
    import dsprep

    parts = (m.name for m in pkgutil.walk_packages(dsprep.__path__, "dsprep."))
    frameworks = ("torch", "lightning", "transformers", "tf", "jax")
    skipped = ("dsprep.__main__", *(f"dsprep.{name}" for name in frameworks))
    for name in ("h5py", "lmdb", "numcodecs", "zarr", "google_crc32c", "ml_dtypes", *parts):
        if name not in skipped:
            import_module(name)


def run(options: argparse.Namespace, folder: Path) -> int:
    """Do the trials in as many processes as asked; return the number of findings."""
    from lab.adversarial.judging import Tally
    from lab.adversarial.mutants import trials

    began = time.monotonic()
    pids = []
    for job in range(options.jobs):
        own = folder / str(job)
        own.mkdir()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                tally = Tally()
                try:
                    trials(numbers(options, job), tally, own, options)
                finally:
                    (folder / f"{job}.pickle").write_bytes(pickle.dumps(tally))
                code = 0
            except KeyboardInterrupt:
                pass
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = []
    try:
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
    except KeyboardInterrupt:
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
    tally = Tally()
    for job in range(options.jobs):
        tally.merge(pickle.loads((folder / f"{job}.pickle").read_bytes()))
    for line in tally.show(options.show):
        print(line)
    done = sum(tally.counts.values())
    print(f"\n{done:,} trials, {len(tally.findings)} findings, ", end="")
    print(f"{time.monotonic() - began:,.0f} s, seed {options.seed}")
    if any(codes):
        print("a job of the harness itself failed", file=sys.stderr)
    return len(tally.findings) + sum(map(bool, codes))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python tests/lab/adversarial", description=__doc__)
    found.add_argument("--count", type=int, default=100, help="how many trials")
    found.add_argument("--start", type=int, default=0, help="number of the first")
    found.add_argument("--only", type=int, nargs="+", help="these trials alone")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--jobs", type=int, default=1, help="processes")
    found.add_argument("--minutes", type=float, default=10.0, help="no trial begins after these")
    found.add_argument("--kind", action="append", help="of datasets: only those")
    found.add_argument("--show", type=int, default=10, help="findings of each sort to show")
    found.add_argument("--keep", type=Path, help="where to work, and leave all that was made")
    return found


def main() -> int:
    options = parser().parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="adversarial-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        preload()
        return min(1, run(options, folder))
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
