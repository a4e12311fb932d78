"""The dataset as it lies: samples read one by one, at places that its sidecar tells."""

from __future__ import annotations

from typing import Any

from dsprep.bench.strategies.dsprep_reader import DsprepReader


class Provenance(DsprepReader):
    """`Reader` over a dataset that was not repacked, every sample read where it lies.

    All samples are shuffled. What is read at a time, `Task.buffer_nbytes`, are samples from all
    over the dataset, in the order in which they lie.
    """

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made."""
        return {**super().arguments(), "shuffle": "global", "data": self.task.data}
