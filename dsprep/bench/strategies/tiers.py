"""`dsprep.Reader` with a cache on a fast tier: first and further epochs, and mini-epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsprep.bench.strategies.dsprep_reader import DsprepReader
from dsprep.storage.trees import remove


class CacheNext(DsprepReader):
    """Epochs from a cache that an epoch before them has filled."""

    @property
    def folder(self) -> Path:
        """The directory of the cache, of this run alone."""
        folder = self.task.tier_folder
        assert folder is not None, "there is a fast tier"
        return folder

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made."""
        cache = {"cache": self.folder, "cache_size": self.task.tier_size}
        return {**super().arguments(), **cache}


class CacheFirst(CacheNext):
    """Epochs that each begin with an empty cache, and fill it."""

    anew = True

    @property
    def folder(self) -> Path:
        """The directory of the cache, of this epoch alone."""
        return super().folder / str(self.opened)

    def clear(self) -> None:
        """Remove what the last epoch has copied; of several ranks, one does."""
        renamed = self.folder.with_name(f"{self.opened}-{self.task.rank}")
        with suppress(FileNotFoundError):
            self.folder.rename(renamed)
            remove(renamed)


class Met(CacheNext):
    """Mini-epoch training: an epoch is cut into parts, and each part passed several times.

    Source: Xu et al., PDSW 2021, section III.
    """

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made: it knows of all epochs, and copies ahead across them."""
        task = self.task
        epochs = task.warmup + task.epochs + 1  # one more is checked
        parts = {"mini_epochs": task.mini_epochs, "repeats": task.repeats}
        return {**super().arguments(), "epochs": epochs, **parts}

    def passes(self, number: int) -> range:
        """Return the numbers of all passes of an epoch."""
        each = self.task.mini_epochs * self.task.repeats
        return range(number * each, (number + 1) * each)

    def steps(self, number: int) -> int:
        """Return the steps of all passes: each ends with a batch that may be short."""
        steps = 0
        for turn in self.passes(number):
            self._reader.set_epoch(turn)
            steps += len(self._reader)
        return steps

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the batches, pass by pass."""
        for turn in self.passes(number):
            self._reader.set_epoch(turn)
            yield from self._reader
