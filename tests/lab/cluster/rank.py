"""A rank that reads: it notes which samples it got, on which host, and who read them.

``python rank.py DATA FOLDER OPTIONS``: options of the Reader as JSON, and of this program:
``epochs``; ``comm``: whether those of MPI stagger together; ``torch``: whether torch.distributed
is initialised; ``stop``: the step after which the state is noted; ``state``: a file from which to
continue; ``pause``: seconds per step; ``job``: the name of what is noted. ``python rank.py make
DATA``: makes the data.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import numpy as np

import dsprep
from dsprep.reader.ranks import RankInfo

SAMPLES = 1203


def make(data: Path) -> None:
    """Write samples that hold their numbers, in groups of 16."""
    import h5py

    plain = data.with_name("plain.h5")
    numbers = np.arange(SAMPLES)
    with h5py.File(plain, "w") as file:
        file["id"] = numbers
        file["x"] = np.repeat(numbers, 512).reshape(SAMPLES, 512).astype(np.float32)
    dsprep.repack(plain, data, buffer_size=16, stripe_size="4KiB")


def fetched() -> int:
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def meet(folder: Path, job: str, place: RankInfo, where: str) -> None:
    """Wait until all ranks are there, as those do that train together."""
    (folder / f"{job}-{place.rank}.{where}").touch()
    end = time.monotonic() + 60
    while not all((folder / f"{job}-{r}.{where}").exists() for r in range(place.world_size)):
        if time.monotonic() > end:
            raise TimeoutError(f"other ranks have not {where}")
        time.sleep(0.05)


def main() -> None:
    """Do what is asked; an error of dsprep is a line, as in a program of a user."""
    try:
        run()
    except (dsprep.errors.DsprepError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def run() -> None:
    """Read, and note what came."""
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
        return
    read()


def read() -> None:
    """Read as one of the ranks."""
    data, folder, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    epochs, stop, pause = (
        options.pop("epochs", 1),
        options.pop("stop", None),
        options.pop("pause", 0),
    )
    state, job = options.pop("state", None), options.pop("job", "rank")
    barrier = None
    if options.pop("torch", False):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        barrier = dist.barrier
    if options.pop("comm", False):
        from mpi4py import MPI

        options["comm"] = MPI.COMM_WORLD
    reader = dsprep.Reader(data, seed=5, **options)
    place = reader.rank_info
    if state is not None:
        reader.load_state_dict(json.loads(Path(state).read_text()))
    found: dict[int, list[int]] = {}
    steps: dict[int, int] = {}
    done, saved, before = 0, None, fetched()
    while reader.epoch < epochs and saved is None:
        for batch in reader:
            ids = batch["id"]
            assert (batch["x"] == ids[:, None]).all(), "wrong samples"
            epoch = reader.epoch
            found.setdefault(epoch, []).extend(ids.tolist())
            steps[epoch] = steps.get(epoch, 0) + 1
            done += 1
            if done == 1:
                meet(folder, job, place, "begun")
            time.sleep(pause)
            if barrier is not None:
                barrier()
            if done == stop:
                saved = reader.state_dict()
                break
    notes = {
        "rank": place.rank,
        "world_size": place.world_size,
        "local_rank": place.local_rank,
        "local_size": place.local_size,
        "source": place.source,
        "host": socket.gethostname(),
        "fetched": fetched() - before,
        "steps": steps,
        "found": found,
        "state": saved,
    }
    (folder / f"{job}-{place.rank}.json").write_text(json.dumps(notes))
    meet(folder, job, place, "ended")
    reader.close()


if __name__ == "__main__":
    main()
