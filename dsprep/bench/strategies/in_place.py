"""The files as they are: what holds for every training script before anything is prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from dsprep.bench.strategies.base import Strategy
from dsprep.core.schema import concatenate
from dsprep.source.dataset import open_dataset
from dsprep.source.many import MultiSource

MAX_OPEN = 512
"""Files that stay open, as a training script leaves them: half of what most systems allow."""


class InPlace(Strategy):
    """All files of the dataset by their format's library, a sample at a time, shuffled."""

    def prepare(self, resources: ExitStack) -> None:
        """Open the dataset without a sidecar."""
        task = self.task
        source = open_dataset(list(task.files), task.reading, through="library")
        self._source = resources.enter_context(source)
        if isinstance(source, MultiSource):
            source.max_open = MAX_OPEN

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples, shuffled."""
        task, source = self.task, self._source
        numbers = np.arange(task.samples) if task.numbers is None else task.numbers
        for indices in task.batches(number):
            samples = [source.read(i, i + 1) for i in numbers[indices].tolist()]
            yield concatenate(source.schema, samples)
