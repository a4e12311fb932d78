"""Workers of Dask: of a cluster that runs already, or on this machine."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsprep.errors import DsprepWarning, ExecutorError, MissingExtra


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
        from distributed import Client, KilledWorker, LocalCluster
    except ImportError as error:
        raise MissingExtra(
            "--executor dask needs dask.distributed", fix="pip install 'dsprep[dask]'"
        ) from error
    with _client(Client, LocalCluster, workers, scheduler) as client:
        _note_no_worker(client)
        executor = client.get_executor(pure=False)
        executor.lost = (KilledWorker,)
        executor.present = len(client.nthreads())
        executor.num_workers = max(GROWN, len(client.nthreads()))
        yield executor


GROWN = 256
"""Workers that a cluster is taken to have at least: it may grow while it is used."""

PATIENCE = 10.0
"""Seconds without a worker before that is said."""


def _note_no_worker(client: Any) -> None:
    """Warn if the cluster has no worker yet."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except TimeoutError:
        text = f"no Dask worker at {client.scheduler.address}: waiting for one"
        warnings.warn(text, DsprepWarning, stacklevel=2)


@contextmanager
def _client(
    Client: Any, LocalCluster: Any, workers: int | None, scheduler: str | None
) -> Iterator[Any]:
    if scheduler is None:
        import dask

        count = workers or len(os.sched_getaffinity(0))
        with (
            tempfile.TemporaryDirectory(prefix="dsprep-dask-") as folder,
            dask.config.set({"temporary-directory": folder}),  # where it leaves a folder
            LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                dashboard_address=None,
                scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},  # 8787 may be another's
                silence_logs=50,
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client
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
        yield client
