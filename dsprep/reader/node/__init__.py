"""One node, many ranks: a few of them read for all, into memory that they share.

Of the ranks of a node, numbered from 0, the first k read: rank j of them for every rank r with
``r % k == j``. Each rank gets the batches that it would read itself. Where every rank of a node
could be one of those, it reads for itself. Source: Pumma et al., "Scalable Deep Learning via I/O
Analysis and Optimization" (LMDBIO-LMM), on fewer readers per node than processes.
"""

from __future__ import annotations

import os

from dsprep.core.packing import digest
from dsprep.core.schema import Schema
from dsprep.errors import UsageError
from dsprep.reader.node import wire
from dsprep.reader.node.client import Client
from dsprep.reader.node.root import Service
from dsprep.reader.pipeline import ReadTask
from dsprep.reader.ranks import RankInfo

JOB = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PBS_JOBID",
    "LSB_JOBID",
)
"""Variables that are the same in all processes of a job."""

_STEP = ("MASTER_PORT", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def job_key() -> str:
    """Return what the processes of one job on this node have in common, and those of others not.

    What the launcher says; if that does not distinguish runs, the process that started
    this one.
    """
    words = [f"{name}={os.environ[name]}" for name in JOB if name in os.environ]
    if not any(name in os.environ for name in _STEP):
        words.append(f"parent {os.getppid()}")
    return " ".join(words)


def join(rank_info: RankInfo, readers: int, task: ReadTask) -> Client | Service | None:
    """Return this process's part in reading for its node; None: it reads for itself alone.

    `readers` processes per node read. Raises `UsageError` if nothing says which of the node's
    processes this is.
    """
    rank, size = rank_info.local_rank, rank_info.local_size
    if rank is None or size is None:
        raise UsageError(
            "readers_per_node needs to know which process of the node this is",
            found=str(rank_info),
            fix="set LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun does",
        )
    root = rank % readers
    if readers >= size or (rank < readers and root + readers >= size):
        return None
    agreed = (  # by the Readers of a node, which find each other by it
        digest(task.planner.sidecar.path.read_bytes()),
        *(task.order.facts(), task.order.world_size, task.order.batch_size),
        *(task.planner.names, task.planner.verify),
    )
    name = wire.address("node", job_key(), root, *agreed)
    if rank >= readers:
        return Client(name, root, rank_info.rank, Schema(tuple(task.planner.fields)))
    return Service(task, name)
