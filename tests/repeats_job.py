"""Every rank passes mini-epochs whose repeats rank 0 decides; the first one compares what they did.

Run as ``mpiexec -n P python repeats_job.py DATA FIELD``, where the field has the numbers of the
samples, or by each of P processes as ``python repeats_job.py DATA FIELD STORE RANK P``, which meet
in torch.distributed by a file. Rank 0 prints what was right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import dsprep
from dsprep.repeats import Patience

OPTIONS: dict[str, Any] = {"batch_size": 5, "seed": 3, "mini_epochs": 3}
LOSSES = [3.0, 2.0, 2.5, 1.0, 1.5, 0.5, 0.7, 0.8]  # of rank 0; those of the others get better


def main(path: str, field: str, *processes: str) -> None:
    if processes:
        import torch

        from dsprep.torch import Batches

        store, rank, size = processes[0], int(processes[1]), int(processes[2])
        method = f"file://{store}"
        torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
        batches = Batches(path, repeats=Patience(passes=1), **OPTIONS)
        mine = train(batches, batches.reader, field)
        every: list[Any] = [None] * size
        torch.distributed.all_gather_object(every, mine)
        torch.distributed.destroy_process_group()
    else:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        with dsprep.Reader(path, repeats=Patience(passes=1), comm=comm, **OPTIONS) as reader:
            every = comm.allgather(train(reader, reader, field))
        rank = comm.Get_rank()
    if rank == 0:
        compare(path, field, every)
        print(f"right with {len(every)} ranks")


def train(batches: Iterable[Any], reader: dsprep.Reader, field: str) -> list[Any]:
    """Return the samples of each pass, what `report` said, the state, and why it failed then."""
    rank, found, over = reader.rank_info.rank, [], []
    for number, loss in enumerate(LOSSES):
        found.append([i for batch in batches for i in batch[field].tolist()])
        over.append(reader.report(loss=loss if rank == 0 else -number))
    state = reader.state_dict()
    for _ in batches:
        continue
    return [found, over, state, failure(reader.report, {"error": 1.0} if rank == 0 else {})]


def failure(function: Callable[..., object], options: dict[str, float]) -> str:
    try:
        function(**options)
    except dsprep.DsprepError as error:
        return str(error)
    return ""


def compare(path: str, field: str, every: list[Any]) -> None:
    over, state = every[0][1:3]
    assert over == [False, False, True, False, True, False, True, False]
    assert state["repeats"] == [3, 2, 2]
    assert state["reports"] == [{"loss": 0.8}]
    assert all(each[1:3] == [over, state] for each in every)
    assert all("metric loss was not reported" in each[3] for each in every)
    with dsprep.Reader(path, repeats=(3, 2, 2), rank=0, world_size=1, **OPTIONS) as reader:
        for number in range(len(LOSSES)):
            whole = sorted(i for batch in reader for i in batch[field].tolist())
            assert sorted(i for each in every for i in each[0][number]) == whole


if __name__ == "__main__":
    main(*sys.argv[1:])
