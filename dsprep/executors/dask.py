"""Workers of Dask: of a cluster that runs already, or on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from dsprep.errors import ExecutorError, MissingExtra


@contextmanager
def opened(workers: int | None, scheduler: str | None) -> Iterator[Executor]:
    """Give the workers of the cluster at `scheduler`, or new ones on this machine.

    Raises
    ------
    MissingExtra
        If dask.distributed is not installed.
    ExecutorError
        If there is no scheduler at that address.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise MissingExtra(
            "--executor dask needs dask.distributed", fix="pip install 'dsprep[dask]'"
        ) from error
    if scheduler is None:
        count = workers or len(os.sched_getaffinity(0))
        cluster = LocalCluster(
            n_workers=count, threads_per_worker=1, dashboard_address=None, silence_logs=50
        )
        with cluster, Client(cluster) as client:
            yield client.get_executor(pure=False)
        return
    try:
        if Path(scheduler).is_file():
            client = Client(scheduler_file=scheduler, timeout="20s")
        else:
            client = Client(scheduler, timeout="20s")
    except (OSError, ValueError) as error:
        raise ExecutorError(
            "Dask's scheduler does not answer", where=scheduler, found=str(error)[:200]
        ) from error
    with client:
        yield client.get_executor(pure=False)
