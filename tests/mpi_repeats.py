"""Every rank passes mini-epochs whose repeats rank 0 decides; the first one compares what they did.

Run as ``mpiexec -n P python mpi_repeats.py DATA``; prints what was right.
"""

from __future__ import annotations

import sys

from mpi4py import MPI

import dsprep
from dsprep.repeats import Patience

OPTIONS = {"batch_size": 5, "seed": 3, "mini_epochs": 3}
LOSSES = [3.0, 2.0, 2.5, 1.0, 1.5, 0.5, 0.7, 0.8]  # of rank 0; those of the others get better


def main() -> None:
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    found, over = [], []
    with dsprep.Reader(sys.argv[1], repeats=Patience(passes=1), comm=comm, **OPTIONS) as reader:
        for number, loss in enumerate(LOSSES):
            found.append([i for batch in reader for i in batch["id"].tolist()])
            over.append(reader.report(loss=loss if rank == 0 else -number))
        state = reader.state_dict()
        list(reader)
        problem = ""
        try:
            reader.report(**({"error": 1.0} if rank == 0 else {"loss": 1.0}))
        except dsprep.DsprepError as error:
            problem = str(error)
    every = comm.gather((found, over, state, problem), root=0)
    if rank == 0:
        assert over == [False, False, True, False, True, False, True, False]
        assert state["repeats"] == [3, 2, 2]
        assert state["reports"] == [{"loss": 0.8}]
        assert all(each[1:3] == (over, state) for each in every)
        assert all("metric loss was not reported" in each[3] for each in every)
        with dsprep.Reader(
            sys.argv[1], repeats=(3, 2, 2), rank=0, world_size=1, **OPTIONS
        ) as reader:
            for number in range(len(LOSSES)):
                whole = sorted(i for batch in reader for i in batch["id"].tolist())
                assert sorted(i for each in every for i in each[0][number]) == whole
        print(f"right with {comm.Get_size()} ranks")


if __name__ == "__main__":
    main()
