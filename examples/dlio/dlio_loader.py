"""The training loop of the DLIO benchmark reads through a `dsprep.Reader`.

With the directory of this file in PYTHONPATH, in the workload of DLIO::

    reader:
      data_loader_classname: dlio_loader.Loader
      data_loader_sampler: iterative  # DLIO asks for one, which is not used

The dataset is ``train`` in DLIO's ``data_folder``, and ``valid`` for its evaluation, or what the
environment variables ``DSPREP_TRAIN`` and ``DSPREP_VALID`` name.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

from dlio_benchmark.common.enumerations import DataLoaderType, Shuffle
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from dsprep.errors import UsageError
from dsprep.reader.loader import Batches, Reader


class Loader(BaseDataLoader):
    """Batches for DLIO, which makes one loader of the training and one of the evaluation.

    Of DLIO's arguments are used: its ranks, ``batch_size`` (``batch_size_eval``), ``seed``,
    ``read_threads`` as `io_threads`, and ``sample_shuffle`` and ``file_shuffle``: groups are
    shuffled unless both are off. Samples that do not fill a batch on every rank are left out.

    Attributes
    ----------
    options
        Further options of the `Reader`, of a class that is derived from this one.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self) -> None:
        """Open the dataset, before the first epoch.

        Raises
        ------
        UsageError
            If DLIO would take more steps than the dataset has.
        """
        given, name = self._args, str(self.dataset_type.value)
        path = os.environ.get(f"DSPREP_{name.upper()}") or Path(given.data_folder, name)
        shuffles = {given.sample_shuffle, given.file_shuffle} - {Shuffle.OFF}
        self._reader = Reader(
            path,
            self.batch_size,
            rank=given.my_rank,
            world_size=given.comm_size,
            **{"seed": given.seed, "shuffle": bool(shuffles), "epochs": given.epochs}
            | {"remainder": "drop", "io_threads": given.read_threads or None}
            | self.options,
        )
        self._epoch, found = 0, len(self._reader)
        steps = self.num_samples // (self.batch_size * given.comm_size)
        if steps > found:
            raise UsageError(
                "the dataset has fewer samples than DLIO counts",
                where=path,
                expected=f"{self.num_samples}, files times num_samples_per_file",
                found=self._reader.samples,
                fix="change these numbers of DLIO's dataset",
            )
        if steps < found and given.my_rank == 0:
            message = "%s: DLIO takes %d of the %d steps of an epoch"
            logging.getLogger(__name__).warning(message, path, steps, found)

    def next(self) -> Batches:
        """Return the batches of the next epoch, also where DLIO left the last one early."""
        self._reader.set_epoch(self._epoch)
        self._epoch += 1
        self._batches = iter(self._reader)
        return self._batches

    def finalize(self) -> None:
        """End the epoch: DLIO calls it after each, so the dataset stays open."""
        self._batches.close()
