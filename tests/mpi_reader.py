"""Every rank reads two epochs for each number of readers at a time; the first one proves them.

Run as ``mpiexec -n P python mpi_reader.py DATA``; prints what was right.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

import dsprep


def main() -> None:
    comm = MPI.COMM_WORLD
    size, rank = comm.Get_size(), comm.Get_rank()
    for stagger in (None, *range(1, size + 1)):
        options = {} if stagger is None else {"stagger": stagger, "comm": comm}
        # Ranks and world size are those of MPI, which mpi4py tells.
        with dsprep.Reader(sys.argv[1], 5, seed=3, io_threads=2, **options) as reader:
            assert (reader.rank_info.rank, reader.rank_info.world_size) == (rank, size)
            for epoch in range(2):
                reader.set_epoch(epoch)
                steps, found = 0, [np.zeros(0, np.int64)]
                for batch in reader:
                    steps += 1
                    found.append(batch["id"].copy())
                    assert (batch["x"][:, 0] == batch["id"]).all()
                every = comm.gather((steps, np.concatenate(found)), root=0)
                if rank == 0:
                    samples = np.sort(np.concatenate([ids for _, ids in every]))
                    assert (samples == np.arange(reader.samples)).all(), (stagger, epoch)
                    assert len({steps for steps, _ in every}) == 1
    if rank == 0:
        print(f"right with {size} ranks")


if __name__ == "__main__":
    main()
