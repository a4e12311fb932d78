"""Input and output of a dataset family: `recipe`, `SynthJob` and `Opening`.

A family writes the files of `SynthJob.path` sample by sample or block by block, draws every value
from `SynthJob.rng`, and knows nothing of temporary names, overwriting or other families.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

Progress: TypeAlias = Callable[[int, int], None]


Opening: TypeAlias = tuple[str, ...]
"""Arguments that open a dataset that was made: the directory inside the output, if not the
output itself, and options of ``dsprep inspect`` that the fields need."""


@dataclass(frozen=True)
class SynthJob:
    """One dataset to be made.

    Attributes
    ----------
    path
        The file or directory to create; it does not exist yet, its parent does.
    samples
        How many samples, at least 1.
    scale
        In (0, 1]: the factor on edge lengths or sample sizes; 1 is the real size.
    seed
        Which of the endless datasets of this kind, at least 0.
    progress
        Called with ``(samples done, samples)``.
    """

    path: Path
    samples: int
    scale: float
    seed: int
    progress: Progress

    def edge(self, real: int) -> int:
        """Return a length that is `real` at full size, at least 1."""
        return max(1, round(real * self.scale))

    def rng(self, family: str, *index: int) -> np.random.Generator:
        """Return the random numbers of one part, such as one sample, of the dataset.

        They depend on the seed, the family and the index alone: a sample is the same however many
        others are made, and two recipes that name the same family and index hold equal values.
        """
        return np.random.default_rng([self.seed, zlib.crc32(family.encode()), *index])

    def done(self, samples: int) -> None:
        """Report that `samples` samples are written."""
        self.progress(samples, self.samples)


@dataclass(frozen=True)
class Recipe:
    """One dataset that can be made.

    Attributes
    ----------
    about
        One line: what it is and how it is stored.
    samples, scale
        The defaults: about 1 to 20 MB in all.
    write
        Creates ``job.path`` and returns how to open it.
    """

    about: str
    samples: int
    scale: float
    write: Callable[[SynthJob], Opening]


W = TypeVar("W", bound=Callable[[SynthJob], Opening])

RECIPES: dict[str, Recipe] = {}
"""The datasets that can be made, by name: each family adds its own when it is imported."""


def recipe(name: str, about: str, *, samples: int, scale: float) -> Callable[[W], W]:
    """Add the function below as the `Recipe` called `name`."""

    def add(write: W) -> W:
        RECIPES[name] = Recipe(about, samples, scale, write)
        return write

    return add


def train_and_validation(samples: int, one_in: int) -> tuple[tuple[str, int], ...]:
    """Return ``(directory, samples)`` of a training and a validation set, neither of them empty.

    One sample in `one_in` is for validation, at least one if there are two.
    """
    held_out = max(samples // one_in, min(1, samples - 1))
    sets = (("train", samples - held_out), ("validation", held_out))
    return tuple((name, count) for name, count in sets if count)
