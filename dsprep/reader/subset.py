"""Subsets of a dataset: samples by number, by a condition, or one part of a split."""

from __future__ import annotations

import io
import mmap
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.packing import digest
from dsprep.core.schema import Arena, Array, Ints, Ragged
from dsprep.errors import DsprepError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.npy_header import array_in
from dsprep.reader.hidden import load_hidden, save_hidden
from dsprep.reader.order import Weights
from dsprep.reader.where import Where
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.local import LocalFile
from dsprep.storage.paths import StorePath
from dsprep.writing.plan import pieces
from dsprep.writing.split import assign, check_shares, group_labels, parse_split

_SPLIT = re.compile(r"(\S+) of (\S+=\S+)(?: by (\S+))?")

Indices: TypeAlias = Any
"""Numbers of samples, one bool for each sample, or the path of either as a ``.npy`` file."""


@dataclass(frozen=True, eq=False)
class Subset:
    """The samples for which everything that is given holds.

    Parameters
    ----------
    indices
        Numbers of samples, in any order, each once; or one bool for each sample; or the path of a
        ``.npy`` file with either.
    where
        A condition on fields, such as ``"label in (3, 5) and y > 0"``; see
        `dsprep.reader.where.Where`.
    split
        The part, and the shares of all parts, with the sum 1; and a seed (0 if it is left out):
        ``("train", {"train": 0.9, "val": 0.1})``. Parts are drawn from all samples of the dataset,
        whatever else is given, as ``dsprep repack --split`` does.
    group_by
        A field: samples with the same value of it are in the same part.

    Raises
    ------
    UsageError
        If it is none of these, or nothing is given.
    """

    indices: Indices = None
    where: str | None = None
    split: Sequence[Any] | None = None
    group_by: str | None = None

    def __post_init__(self) -> None:
        if self.indices is None and self.where is None and self.split is None:
            raise UsageError("a subset of everything", expected="indices=, where= or split=")
        if self.where is not None:
            Where(self.where)
        if self.group_by is not None and self.split is None:
            raise UsageError("group_by keeps samples of one part together", fix="give split=, too")
        if self.split is not None:
            self._parts()

    @classmethod
    def of(cls, given: Any) -> Subset | None:
        """Return the subset that a parameter names; see `dsprep.Reader`.

        Text is a condition, a ``.npy`` file, or a part of a split such as ``train of
        train=0.9,val=0.1`` or ``val of train=0.9,val=0.1 by patient``.
        """
        if given is None or isinstance(given, Subset):
            return given
        if isinstance(given, str) and (words := _SPLIT.fullmatch(given)):
            return cls(split=(words[1], dict(parse_split(words[2]))), group_by=words[3])
        if isinstance(given, str) and not given.endswith(".npy"):
            return cls(where=given)
        return cls(indices=given)

    def _parts(self) -> tuple[str, list[tuple[str, float]], int]:
        """Return the part, the shares, and the seed of the split."""
        try:
            part, shares, *seeds = self.split or ()
            (seed,) = map(int, seeds or (0,))
            known = {str(name): float(share) for name, share in dict(shares).items()}
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"split is {self.split!r}", expected="('train', {'train': 0.9, 'val': 0.1})"
            ) from error
        check_shares(list(known.items()), f"split {known}")
        if part not in known:
            raise UsageError(f"the split has no part {part}", expected="one of " + ", ".join(known))
        return part, list(known.items()), seed

    def samples(self, count: int, opened: Callable[[Sequence[str]], Source]) -> Ints:
        """Return the samples, rising: int64, shape ``(n,)``.

        Parameters
        ----------
        count
            Samples of the dataset.
        opened
            Gives some of its fields.

        Raises
        ------
        UsageError, SchemaError
            If there are no such samples or fields.
        """
        kept: Ints | None = None
        if self.split is not None:
            part, shares, seed = self._parts()
            labels = None
            if self.group_by is not None:
                source = opened([self.group_by])
                labels = group_labels(source, source.schema[self.group_by])
            kept = assign(count, shares, seed, labels, part)[part]
        if self.indices is not None:
            numbers = numbers_of(self.indices, count)
            kept = numbers if kept is None else np.intersect1d(kept, numbers, assume_unique=True)
        if self.where is not None:
            mask = self._fulfilling(Where(self.where), opened)
            kept = np.flatnonzero(mask) if kept is None else kept[mask[kept]]
        assert kept is not None, "something is given"
        return kept

    def _fulfilling(self, where: Where, opened: Callable[[Sequence[str]], Source]) -> Array:
        """Return for which samples the condition holds: bool."""
        source, arena = opened(where.names), Arena()
        where.check(source.schema)
        mask = np.zeros(len(source), bool)
        for start, stop in pieces(source):
            mask[start:stop] = where(source.read(start, stop, arena))
        return mask

    @property
    def recipe(self) -> str:
        """The choice of samples in words, for the lineage of outputs."""
        given = self.indices
        if given is not None and not isinstance(given, (str, Path)):
            numbers = np.asarray(given)
            given = f"{len(numbers)} values {digest(numbers.tobytes())}"
        parts = {"indices": given, "where": self.where, "group_by": self.group_by}
        if self.split is not None:
            parts["split"] = self._parts()
        return ", ".join(f"{name}={value}" for name, value in parts.items() if value is not None)

    def key(self, sidecar: bytes) -> str:
        """Return a word for what a condition and a split choose of the data of a sidecar."""
        words = (self.where, self.group_by, None if self.split is None else self._parts())
        return digest(sidecar + repr(words).encode())


def numbers_of(indices: Indices, count: int) -> Ints:
    """Return the numbers of samples, rising; raise `UsageError` unless they are some of `count`."""
    name = "indices"
    if isinstance(indices, (str, Path)):
        name, indices = str(indices), _load(indices)
    numbers = _unmasked(indices, name)
    if numbers.dtype == bool and numbers.shape == (count,):
        return np.flatnonzero(numbers)
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and len(numbers)):
        raise UsageError(
            f"{name}: {numbers.dtype} of shape {numbers.shape}",
            expected=f"whole numbers in one row, or {count} bools",
        )
    # Of more numbers than samples, some among the first are wrong already.
    rising: Ints = np.sort(numbers[: count + 1]).astype(np.int64)
    if len(rising) and not 0 <= rising[0] <= rising[-1] < count:
        wrong = rising[0] if rising[0] < 0 else rising[-1]
        raise UsageError(f"{name}: there is no sample {wrong}", expected=f"0 to {count - 1}")
    again = np.flatnonzero(rising[1:] == rising[:-1])
    if len(again):
        raise UsageError(
            f"{name}: sample {rising[again[0]]} comes twice",
            expected="each sample once",
            fix="to read some samples more often, give weights=",
        )
    return rising


def _unmasked(values: Any, name: str) -> Any:
    """Return an array; raise `UsageError` if some of it is masked."""
    if np.ma.is_masked(values):
        raise UsageError(
            f"{name}: some values are masked, which says nothing of these samples",
            fix="say what they are: values.filled(0), or values.compressed() to leave them out",
        )
    return np.asarray(values)


def kept_samples(subset: Subset, sidecar: Sidecar) -> Ints:
    """Return the samples of a subset, rising: int64, shape ``(n,)``.

    What a condition or the values of a field decide is kept in a file beside the sidecar, whose
    name has a digest of both, so that it is computed once; where that cannot be written, each time.
    """
    count = len(sidecar)

    def opened(names: Sequence[str]) -> Source:
        return SidecarSource(sidecar, [(n, sidecar.schema[n]) for n in names])

    read = subset.where is not None or subset.group_by is not None
    if not read or subset.indices is not None:
        return subset.samples(count, opened)
    key = subset.key(sidecar.stated)
    path = sidecar.path.with_name(f".{sidecar.path.name}.{key}.npy")
    kept = load_hidden(path, sidecar.path, lambda data: _parse(data, count, path))
    if kept is not None:
        return kept
    samples = subset.samples(count, opened)
    if sidecar.kept and not isinstance(path, StorePath):
        out = io.BytesIO()
        np.save(
            out, samples if samples.nbytes < count else np.bincount(samples, minlength=count) > 0
        )
        save_hidden(path, out.getvalue() + digest(out.getvalue()).encode())
    return samples


def _parse(data: bytes, count: int, path: Path) -> Ints:
    """Return the samples that a hidden file keeps: a ``.npy`` file, and the digest behind it."""
    if data[-16:] != digest(data[:-16]).encode():
        raise ValueError("it has another digest")
    return numbers_of(array_in(np.frombuffer(data, np.uint8), path), count)


def read_weights(given: Any, sidecar: Sidecar, kept: Ints | None) -> Weights:
    """Return the weights of samples, of those that are kept.

    Parameters
    ----------
    given
        A field of one number for each sample; or an array with these, shape ``(n,)`` of all samples
        of the dataset; or the path of a ``.npy`` file with it.

    Raises
    ------
    UsageError, SchemaError
        If there is no such field, or values are below 0, not finite, or all 0.
    """
    if isinstance(given, str) and not given.endswith(".npy"):
        name, column = f"field {given}", sidecar.read(slice(None), [sidecar.schema[given].name])
        weights: Any = column[given]
    elif isinstance(given, (str, Path)):
        name, weights = str(given), _load(given)
    else:
        name, weights = "weights", _unmasked(given, "weights")
    if (
        isinstance(weights, Ragged)
        or weights.shape != (len(sidecar),)
        or weights.dtype.kind not in "biuf"
    ):
        raise UsageError(f"{name} is not a weight", expected=f"a number for each of {len(sidecar)}")
    weights = weights.astype(np.float64)
    if kept is not None:
        weights = weights[kept]
    if not (np.isfinite(weights).all() and (weights >= 0).all() and 0 < weights.sum() < np.inf):
        raise UsageError(f"{name} is not a weight", expected="finite, not below 0, and not all 0")
    return Weights(weights)


def _load(path: str | Path) -> Any:
    """Return an array; raise `UsageError` or `FormatError` if it cannot be read."""
    try:
        with closing(LocalFile(path)) as file:
            mapped = mmap.mmap(file.fd, 0, access=mmap.ACCESS_READ)
        return array_in(np.frombuffer(mapped, np.uint8), path)
    except (OSError, ValueError) as error:
        if isinstance(error, DsprepError):
            raise
        raise UsageError(f"{path} cannot be read: {error}", expected="a .npy file") from error
