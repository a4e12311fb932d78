"""Write what a function makes of files, by several processes, and continue when it is killed.

    python examples/write_items.py                            # on files that it makes and removes
    python examples/write_items.py FOLDER out.h5 --workers 16  # FOLDER/**/*.pkl
    mpiexec -n 64 python examples/write_items.py FOLDER out.h5 --executor mpi

`load` unpickles one file of a simulation and gives a sample for each of its steps; files without
steps are left out, and such as cannot be read are listed in the end. Run it again with --resume
after whatever has stopped it: files that are done are not read again, and the bytes are the same.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import dsprep


def load(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a simulation that you trust: to unpickle is to run what the file says."""
    run = pickle.loads(path.read_bytes())
    for number, step in enumerate(run["steps"]):
        if number % 2 == 0:  # every other one is enough
            yield {"field": step, "mean": step.mean(), "viscosity": run["viscosity"]}


def make_runs(folder: Path, count: int = 40) -> None:
    """Make the files of some simulations, one of them damaged and one without steps."""
    rng = np.random.default_rng(0)
    for i in range(count):
        steps = [rng.random((32, 32), np.float32) for _ in range(0 if i == 3 else 6)]
        data = pickle.dumps({"steps": steps, "viscosity": 0.1 * i})
        (folder / f"run{i:03}.pkl").write_bytes(data[: 100 if i == 7 else None])


def write(
    folder: Path, target: Path, workers: int | None, executor: str, resume: bool = False
) -> None:
    """Write all files of a folder, and say what came of them."""
    report = dsprep.write(
        target,
        sorted(folder.rglob("*.pkl")),  # in an order that the next run finds again
        function=load,
        workers=workers,
        executor=executor,
        errors="skip",
        resume=resume,
        shuffle=1,
        progress=print,
    )
    print(f"{report.samples:,} samples in {report.target.name}; {'; '.join(report.notes)}")


def main() -> None:
    """Write the files that are named, or some that are made here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="with files NAME.pkl")
    parser.add_argument("target", nargs="?", type=Path, default=Path("steps.h5"))
    parser.add_argument("--workers", type=int, help="one per core if left out")
    parser.add_argument("--executor", default="processes", help="threads, processes, mpi or dask")
    parser.add_argument("--resume", action="store_true", help="continue what was interrupted")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        write(**vars(arguments))
        return
    with tempfile.TemporaryDirectory() as name:
        make_runs(Path(name))
        write(Path(name), Path(name) / "steps.h5", 2, "processes")
        with dsprep.open(Path(name) / "steps.h5") as source:
            print(f"{len(source)} samples of {source.schema}")


if __name__ == "__main__":  # worker processes import this file
    main()
